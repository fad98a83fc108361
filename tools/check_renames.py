"""Check that two revisions have the same syntax trees modulo a map of names.

    python -m tools.check_renames OLD NEW MAP.toml …

The command compares every Python file of OLD with its counterpart in NEW. The trees must be equal, with these
exceptions: identifiers may change according to the map, strings may change where they contain an old dotted name, path
or name in backquotes, and imports, `__all__` and `__slots__` may be reordered. Every name must refer to a definition in
the same scope as before. All other files below src must be identical. The command prints each difference, and exits
with status 1 if there are any.
"""

import argparse
import ast
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tools.rename import name_map, project, tree, validate
from tools.rename.imports import target
from tools.rename.project import GENERATED, OWN, Moves, Project
from tools.rename.scopes import Source
from tools.rename.text import TextMap

SORTED = frozenset({"__all__", "__slots__"})


class Comparison:
    """Compares the files of two trees."""

    def __init__(self, old: Project, new_root: Path) -> None:
        self.project = old
        self.new_root = new_root
        self.text = TextMap(old, tree.loggers_of(old))
        names = old.names
        self.pairs = {(name_map.old_last_part(key), new) for key, new in names.names.items()}
        self.pairs |= set(names.identifiers.items())
        self.pairs |= {(key.rpartition(":")[2].strip('"='), new) for key, new in names.unresolved.items()}
        for module, new in old.moves.modules.items():
            self.pairs.add((module.rpartition(".")[2], new.rpartition(".")[2]))
            self.pairs.add((module.partition(".")[0], new.partition(".")[0]))
        self.differences: list[str] = []
        self.used: set[tuple[str, str]] = set()

    def run(self) -> None:
        for source in self.project.sources.values():
            path = self.new_root / self.project.moves.files[source.path]
            if not path.exists():
                self.differences.append(f"{source.path}: {self.project.moves.files[source.path]} does not exist")
                continue
            text = path.read_text()
            new = Source(source.path, source.module, text)
            self._imports(source, new)
            self._node(source.path, source.tree, new.tree)
            self.differences += validate.captures(source, text)

    def _imports(self, source: Source, new: Source) -> None:
        """Compare imports by scope as sets of module, name and local name."""
        found: list[dict[int, set[tuple[str, str, str]]]] = [{}, {}]
        for node, scope in source.imports:
            for alias in node.names:
                local = self.project.new_local(source, scope, alias.asname) if alias.asname else ""
                if isinstance(node, ast.Import):
                    one = (self.project.new_module(alias.name), "", local)
                else:
                    _, module, name = target(self.project, scope, alias)
                    one = (module, name, "" if local == name else local)
                found[0].setdefault(scope.index, set()).add(one)
        for node, scope in new.imports:
            for alias in node.names:
                module = alias.name if isinstance(node, ast.Import) else node.module or ""
                name = "" if isinstance(node, ast.Import) else alias.name
                local = "" if alias.asname in {None, name} else str(alias.asname)
                found[1].setdefault(scope.index, set()).add((module, name, local))
        for index in {*found[0], *found[1]}:
            before, after = found[0].get(index, set()), found[1].get(index, set())
            for one in sorted(before - after):
                self.differences.append(f"{source.path}: the import {one} is missing")
            for one in sorted(after - before):
                self.differences.append(f"{source.path}: the import {one} is new")

    def _node(self, path: str, old: ast.AST, new: ast.AST) -> None:
        if type(old) is not type(new):
            self._differ(path, old, new, type(old).__name__, type(new).__name__)
            return
        if isinstance(old, ast.Constant) and isinstance(new, ast.Constant):
            self._constant(path, old, new)
            return
        if _dotted(old) and _dotted(old) != _dotted(new) and self.text.dotted(_dotted(old)) == _dotted(new):
            return
        for name, value in ast.iter_fields(old):
            self._field(path, old, new, value, getattr(new, name))

    def _field(self, path: str, old: ast.AST, new: ast.AST, before: object, after: object) -> None:
        if isinstance(before, ast.AST) and isinstance(after, ast.AST):
            if _sorted_list(old) and isinstance(before, (ast.List, ast.Tuple)):
                self._same_set(path, before, after)
            else:
                self._node(path, before, after)
        elif isinstance(before, list) and isinstance(after, list):
            first, second = list(_without_imports(before)), list(_without_imports(after))
            if len(first) != len(second):
                self._differ(path, old, new, f"{len(first)} parts", f"{len(second)} parts")
            for one, other in zip(first, second, strict=False):
                self._field(path, old, new, one, other)
        elif before != after:
            if isinstance(before, str) and isinstance(after, str) and (before, after) in self.pairs:
                self.used.add((before, after))
            else:
                self._differ(path, old, new, before, after)

    def _constant(self, path: str, old: ast.Constant, new: ast.Constant) -> None:
        before, after = old.value, new.value
        if before == after and type(before) is type(after):
            return
        if isinstance(before, str) and isinstance(after, str) and self._same_text(before, after):
            return
        self._differ(path, old, new, before, after)

    def _same_text(self, before: str, after: str) -> bool:
        if (before, after) in self.pairs or after in {
            self.text.apply(before, keep_loggers=keep) for keep in (True, False)
        }:
            return True
        words = [_words(before), _words(after)]  # A string may be an annotation or a parameter list.
        return len(words[0]) == len(words[1]) and all(
            one == other or (one, other) in self.pairs for one, other in zip(*words, strict=True)
        )

    def _same_set(self, path: str, old: ast.expr, new: ast.AST) -> None:
        before = sorted(str(one.value) for one in ast.walk(old) if isinstance(one, ast.Constant))
        after = {str(one.value) for one in ast.walk(new) if isinstance(one, ast.Constant)}
        missing = [one for one in before if one not in after and not any((one, other) in self.pairs for other in after)]
        if missing or len(before) != len(after):
            self._differ(path, old, new, missing, sorted(after - set(before)))

    def _differ(self, path: str, old: ast.AST, new: ast.AST, before: object, after: object) -> None:
        lines = f"{getattr(old, 'lineno', '?')} → {getattr(new, 'lineno', '?')}"
        self.differences.append(f"{path}: line {lines}: {before!r} became {after!r}")


def _words(text: str) -> list[str]:
    return "".join(char if char.isalnum() or char == "_" else f" {char} " for char in text).split()


def _dotted(node: ast.AST) -> str:
    """Return an expression such as `a.b.c` as text, or "" for other expressions."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = _dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""


def _sorted_list(node: ast.AST) -> bool:
    targets = getattr(node, "targets", [getattr(node, "target", None)])
    return any(getattr(one, "id", "") in SORTED for one in targets)


def _without_imports(nodes: list[object]) -> Iterator[object]:
    return (node for node in nodes if not isinstance(node, (ast.Import, ast.ImportFrom)))


def _other_files(moves: Moves, old: Path, new: Path, packages: dict[str, str]) -> Iterator[str]:
    expected = set(moves.files.values())
    for path, moved in moves.files.items():
        if path.startswith("src/") and (not path.endswith(".py") or path.endswith(GENERATED)):
            if not (new / moved).exists():
                yield f"{path}: {moved} does not exist"
            elif (old / path).read_bytes() != (new / moved).read_bytes():
                yield f"{path}: {moved} has different content"
    for found in sorted(new.rglob("*.py")):
        path = found.relative_to(new).as_posix()
        package = path.removeprefix("src/").removesuffix("/__init__.py").replace("/", ".")
        if path not in expected and package not in packages and not path.startswith(OWN):
            yield f"{path}: new file"


def _checked_out(revision: str, directory: Path) -> None:
    directory.mkdir()
    archive = subprocess.run(["git", "archive", revision], check=True, capture_output=True).stdout  # noqa: S603, S607
    subprocess.run(["tar", "-x", "-C", str(directory)], check=True, input=archive)  # noqa: S603, S607


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.check_renames", description=__doc__.partition("\n")[0])
    parser.add_argument("old", help="revision before the renames")
    parser.add_argument("new", help="revision after the renames")
    parser.add_argument("maps", type=Path, nargs="*", metavar="MAP.toml")
    options = parser.parse_args()
    names = name_map.load(options.maps)
    with tempfile.TemporaryDirectory(prefix="check-renames-") as directory:
        old, new = Path(directory) / "old", Path(directory) / "new"
        _checked_out(options.old, old)
        _checked_out(options.new, new)
        files = project.tracked_files(options.old)
        os.chdir(old)
        loaded = project.load(names, files)
        comparison = Comparison(loaded, new)
        comparison.run()
        differences = [*names.errors, *comparison.differences, *_other_files(loaded.moves, old, new, names.packages)]
    for difference in differences:
        print(difference)
    print(f"{len(loaded.sources)} files compared, {len(comparison.used)} names changed, {len(differences)} differences")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
