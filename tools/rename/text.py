"""Old names in text: dotted names, paths, and names in backquotes."""

import ast
import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from tools.rename.name_map import parts
from tools.rename.project import Project
from tools.rename.scopes import IMPORTERS, Import, Source

_PATH: Final = re.compile(r"(?<![\w./-])(?:[\w.-]+/)+[\w.-]*")
_QUOTED: Final = re.compile(r"(?<=`)([A-Za-z_][\w.]*)(?=(?:\(\))?`)")
_PREFIXES: Final = ("", "src/", "src/oncelog/", "tests/")
_REQUIRED: Final = frozenset({"files", "find_spec", *IMPORTERS})
"""Functions whose argument is a module, even if a logger has the same name."""


class Edit(NamedTuple):
    start: int
    end: int
    new: str


class TextMap:
    """Finds old names in comments, strings and documents."""

    def __init__(self, project: Project, loggers: frozenset[str]) -> None:
        self._project = project
        self.loggers = loggers
        moved = {old for old, new in project.moves.modules.items() if old != new}
        roots = sorted({"oncelog", *(old.partition(".")[0] for old in moved if "." in old)})
        self._dotted = re.compile(rf"(?<![\w./-])(?:{'|'.join(roots)})(?:\.[A-Za-z_]\w*)+(?::[A-Za-z_]\w*)?")
        self._quoted = _unique_names(project)
        self._files: dict[str, list[str]] = {}
        for path in project.moves.files:
            self._files.setdefault(path.rpartition("/")[2], []).append(path)

    def edits(self, text: str, *, keep_loggers: bool = True) -> Iterator[Edit]:
        for match in self._dotted.finditer(text):
            if not (keep_loggers and match[0] in self.loggers):
                new = self.dotted(match[0])
                if new != match[0]:
                    yield Edit(match.start(), match.end(), new)
        for match in _PATH.finditer(text):
            new = self.path(match[0])
            if new != match[0]:
                yield Edit(match.start(), match.end(), new)
        for match in _QUOTED.finditer(text):
            quoted = self._quoted.get(match[0])
            if quoted is not None:
                yield Edit(match.start(), match.end(), quoted)

    def kept(self, text: str) -> Iterator[int]:
        """Yield the offsets of logger names that are also names of moved modules."""
        for match in self._dotted.finditer(text):
            if match[0] in self.loggers and self.dotted(match[0]) != match[0]:
                yield match.start()

    def apply(self, text: str, *, keep_loggers: bool = True) -> str:
        return replace(text, self.edits(text, keep_loggers=keep_loggers))

    def dotted(self, old: str) -> str:
        whole, colon, entry = old.partition(":")
        names = whole.split(".")
        count = len(names)
        while count and not self._project.is_module(".".join(names[:count])):
            count -= 1
        if not count or (count == 1 and names[0] != "oncelog"):
            return old
        module = ".".join(names[:count])
        new = [self._project.new_module(module)]
        key = ""
        for number, name in enumerate(names[count:] + [entry] * bool(colon)):
            if number == 0:
                new.append(self._project.new_export(module, name))
                key = self._project.exported(module, name).key
            else:
                key = f"{key}.{name}"
                new.append(self._project.names.names.get(key, name))
        if colon:
            return ".".join(new[:-1]) + ":" + new[-1]
        return ".".join(new)

    def path(self, old: str) -> str:
        token = old.rstrip(".-")
        rest = old[len(token) :]
        slash = "/" if token.endswith("/") else ""
        up = re.match(r"(?:\.\.?/)*", token)
        lead = up[0] if up else ""
        bare = token[len(lead) :].rstrip("/")
        moves = self._project.moves
        for prefix in _PREFIXES:
            full = prefix + bare
            new = moves.files.get(full) or (moves.new_directory(full) if full in moves.directories else None)
            if new is not None:
                return lead + new.removeprefix(prefix) + slash + rest if new.startswith(prefix) else old
        found = [path for path in self._files.get(bare.rpartition("/")[2], ()) if path.endswith(f"/{bare}")]
        if len(found) == 1 and "/" in bare and moves.files[found[0]] != found[0]:
            before = found[0].removesuffix(bare)
            new = moves.files[found[0]]
            return lead + new.removeprefix(before) + rest if new.startswith(before) else old
        return old


def _unique_names(project: Project) -> dict[str, str]:
    """Return new names by old name, for definitions whose old names are unambiguous in the whole tree."""
    defined: dict[str, int] = {}
    for source in project.sources.values():
        for name, bound in source.scopes[0].bindings.items():
            if not all(hasattr(one, "alias") for one in bound):
                defined[name] = defined.get(name, 0) + 1
    found: dict[str, list[str]] = {}
    for key, new in project.names.names.items():
        _, qualname, local = parts(key)
        if not local and "." not in qualname and is_telling(qualname):
            found.setdefault(qualname, []).append(new)
    unique = {old: new[0] for old, new in found.items() if len(set(new)) == 1 and len(new) == defined.get(old, 1)}
    for name in _with_other_meanings(project, set(unique)):
        unique.pop(name, None)
    unique.update((old, new) for old, new in project.names.identifiers.items() if is_telling(old))
    for key, new in project.names.names.items():
        _, qualname, local = parts(key)
        name = qualname.rpartition(".")[0]
        if name and not local and defined.get(name, 0) <= 1:
            unique[qualname] = f"{unique.get(name, name)}.{new}"
    return unique


def _with_other_meanings(project: Project, names: set[str]) -> Iterator[str]:
    """Yield names that are also members or variables or that, as strings, may be wire names."""
    for source in project.sources.values():
        for scope in source.scopes[1:]:
            for name in names & scope.bindings.keys():
                if not any(isinstance(one, Import) for one in scope.bindings[name]):
                    yield name
        yield from (node.attr for node, _ in source.attributes if isinstance(node.ctx, ast.Store))
        if source.path.startswith("src/"):
            for node in ast.walk(source.tree):
                value = node.value if isinstance(node, ast.Constant) else None
                if isinstance(value, str) and value in names and _is_data(source, node, value):
                    yield value


def _is_data(source: Source, node: ast.AST, value: str) -> bool:
    """Return whether a string is outside `__all__` and module tables."""
    line = source.text.split("\n")[getattr(node, "lineno", 1) - 1].strip()
    return line.rstrip(",") != f'"{value}"' and "oncelog." not in line


def is_telling(name: str) -> bool:
    """Return whether a name is not also an English word."""
    return "_" in name or not name.islower()


def replace(text: str, edits: Iterator[Edit] | list[Edit]) -> str:
    """Apply edits. Of two overlapping edits, apply the one that starts first (or is longer)."""
    out, at = [], 0
    for edit in sorted(set(edits), key=lambda one: (one.start, -one.end)):
        if edit.start >= at:
            out += [text[at : edit.start], edit.new]
            at = edit.end
    return "".join([*out, text[at:]])


def is_module_argument(function: str) -> bool:
    return function in _REQUIRED
