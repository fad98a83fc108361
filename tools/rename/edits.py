"""Edits of one Python file: changes to code, strings and comments according to the map."""

import ast
import re
import tokenize
from collections.abc import Iterable, Iterator
from typing import Final

from tools.rename.facts import Facts, Owners
from tools.rename.imports import import_edits
from tools.rename.name_map import old_last_part, parts
from tools.rename.project import Project, Symbol
from tools.rename.scopes import Import, Scope, Source, resolve
from tools.rename.text import Edit, TextMap, is_module_argument, is_telling, replace

_BY_STRING: Final = frozenset({"getattr", "setattr", "hasattr", "delattr", "object"})
_REPLACE: Final = frozenset({"replace", "evolve", "__replace__"})
_STAND_INS: Final = frozenset({"SimpleNamespace", "Mock", "MagicMock", "AsyncMock"})
"""Classes whose objects imitate other objects. Their keyword arguments are member names."""
_FIXTURES: Final = frozenset({"parametrize", "usefixtures", "getfixturevalue"})
_LOGGER: Final = re.compile(r"getLogger\(|at_level\(|set_level\(|logger=|\.name ==")
_MEMBER_LISTS: Final = frozenset({"__slots__", "__match_args__"})
_WORD: Final = re.compile(r"[A-Za-z_]\w*")


class Context:
    """Data that all files share."""

    def __init__(self, project: Project, facts: Facts, text: TextMap) -> None:
        self.project = project
        self.facts = facts
        self.text = text
        names = project.names.names
        self.attributes = {old_last_part(key) for key in names if not parts(key)[2]}
        self.modules = _module_names(project)
        """Local names of modules that are renamed, as in `from a import b`."""
        self.keywords = {old_last_part(key) for key in names if _sets_field(facts, key)}
        self.strings_to_report = {old_last_part(key) for key in names if is_telling(old_last_part(key))}
        self.guesses = _guesses(facts, project)
        """New names of private members whose old names are unambiguous in the whole tree."""
        self.vanishing = self.attributes - _remaining(facts, project)
        self.decided: set[str] = set()
        self.guessed: list[str] = []
        self.unresolved: list[str] = []
        self.errors: list[str] = []
        self.kept: list[str] = []
        self.strings: list[str] = []


def _sets_field(facts: Facts, key: str) -> bool:
    """Return whether a key names a parameter or a field that a keyword argument may set."""
    module, qualname, local = parts(key)
    known = facts.classes.get(f"{module}:{qualname.rpartition('.')[0]}")
    return bool(local) or (known is not None and known.generated)


def _module_names(project: Project) -> set[str]:
    found = set()
    for source in project.sources.values():
        for name, bound in source.scopes[0].bindings.items():
            if isinstance(bound[0], Import) and project.new_local(source, source.scopes[0], name) != name:
                symbol = project.exported(bound[0].module, bound[0].name or "")
                if not symbol.qualname:
                    found.add(name)
    return found


def _remaining(facts: Facts, project: Project) -> set[str]:
    """Return the members that classes have after the renames, and the names of modules and definitions."""
    found = {name for source in project.sources.values() for name in source.scopes[0].bindings}
    found |= {part for module in project.moves.modules for part in module.split(".")}
    for name, known in facts.classes.items():
        found |= known.foreign
        found |= {project.names.new_name(f"{name}.{member}", member) for member in known.members}
    return found


def _guesses(facts: Facts, project: Project) -> dict[str, str]:
    found: dict[str, set[str]] = {}
    for name, known in facts.classes.items():
        for member in known.members:
            if member.startswith("_") and not member.startswith("__"):
                found.setdefault(member, set()).add(project.names.new_name(f"{name}.{member}", member))
    return {old: min(new) for old, new in found.items() if len(new) == 1 and new != {old}}


class FileEdits:
    """Collects the edits of a file."""

    def __init__(self, context: Context, source: Source) -> None:
        self.context = context
        self.project = context.project
        self.facts = context.facts
        self.source = source
        self.names = context.project.names
        self.code: dict[int, Edit] = {}
        self.final: list[Edit] = []
        self.forced: set[int] = set()
        """Offsets of strings that name a module, even if a logger has the same name."""
        self._function_of = {
            id(decorator): (qualname, node)
            for qualname, node in source.nodes.items()
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            for decorator in node.decorator_list
        }

    def run(self) -> str:
        """Return the new text."""
        imports = list(import_edits(self.project, self.source))
        self._chains()
        self._uses()
        self._attributes()
        for call, scope in self.source.calls:
            self._call(call, scope)
        for pattern, scope in self.source.patterns:
            self._pattern(pattern, scope)
        for before, after, scope in self.source.pairs:
            self._pair(before, after, scope)
        self._string_lists()
        self._identifiers()
        code = [edit for edit in self.code.values() if not any(one.start <= edit.start < one.end for one in imports)]
        code += imports
        taken = sorted((edit.start, edit.end) for edit in code)
        self.final = [*code, *self._in_text(taken)]
        return replace(self.source.text, self.final)

    def _add(self, start: int, old: str, new: str | None) -> None:
        if new is None or new == old:
            return
        if not self.source.text.startswith(old, start):
            self.context.errors.append(f"{self._place(start)}: expected {old} here")
            return
        edit = Edit(start, start + len(old), new)
        if self.code.setdefault(start, edit) != edit and self.code[start].end == edit.end:
            self.context.errors.append(f"{self._place(start)}: {old} becomes {self.code[start].new} and {new}")

    def _place(self, start: int) -> str:
        return f"{self.source.path}:{self.source.line_of(start)}"

    def _line(self, start: int) -> str:
        text = self.source.text
        end = text.find("\n", start)
        return text[text.rfind("\n", 0, start) + 1 : end if end >= 0 else None].strip()

    def _unresolved(self, start: int, name: str) -> None:
        self.context.unresolved.append(f"{self._place(start)}: {name}: {self._line(start)}")

    # Names

    def _uses(self) -> None:
        for use in self.source.uses:
            home = resolve(use.scope, use.name)
            if home is not None:
                self._add(use.start, use.name, self.project.new_local(self.source, home, use.name))

    def _chains(self) -> None:
        """Rename modules in chains of attributes, as after `import a.b`."""
        inner = set()
        for node, scope in reversed(self.source.attributes):
            base = self.project.static(self.source, scope, node.value)
            if base is None or base.qualname or not self.project.is_submodule(base.module, node.attr):
                continue
            symbol = Symbol(f"{base.module}.{node.attr}", "")
            inner.add(id(node.value))
            root: ast.expr = node
            while isinstance(root, ast.Attribute):
                root = root.value
            if id(node) in inner or not isinstance(root, ast.Name):
                continue
            self._chain(node, root, scope, symbol)

    def _chain(self, node: ast.Attribute, root: ast.Name, scope: Scope, symbol: Symbol) -> None:
        base = self.project.static(self.source, scope, root)
        home = resolve(scope, root.id)
        if base is None or home is None:
            return
        start, end = self.source.span(root)[0], self.source.span(node)[1]
        new, new_base = self.project.new_module(symbol.module), self.project.new_module(base.module)
        if not new.startswith(f"{new_base}."):
            if new != symbol.module:
                self.context.errors.append(f"{self._place(start)}: {symbol.module} leaves {base.module}")
            return
        local = self.project.new_local(self.source, home, root.id)
        self._add(start, self.source.text[start:end], local + new.removeprefix(new_base))

    # Attributes

    def _attributes(self) -> None:
        for node, scope in self.source.attributes:
            start = self.source.span(node)[1] - len(node.attr)
            known, new = self._new_attribute(node, scope)
            if not known:
                new = self._guess(node.attr, start)
            self._add(start, node.attr, new)

    def _guess(self, old: str, start: int) -> str:
        """Return the new name of a member of an object whose type mypy does not know."""
        if old in self.names.identifiers or old not in self.context.attributes | self.context.modules:
            return self.names.identifiers.get(old, old)
        if old in self.context.guesses:
            self.context.guessed.append(f"{self._place(start)}: {self.context.guesses[old]}: {self._line(start)}")
            return self.context.guesses[old]
        return self._decided(start, old)

    def _decided(self, start: int, old: str, shown: str = "") -> str:
        """Return the entry of the map for a use that types do not resolve."""
        for key in (f"{self._place(start)}:{shown or old}", f"{self.source.path}:{shown or old}"):
            if key in self.names.unresolved:
                self.context.decided.add(key)
                return self.names.unresolved[key]
        self._unresolved(start, shown or old)
        return old

    def _new_attribute(self, node: ast.Attribute, scope: Scope) -> tuple[bool, str | None]:
        """Return whether the definition is known, and the new name."""
        base = self.project.static(self.source, scope, node.value)
        if base is not None and not self.project.is_module(base.module):
            return True, self.names.identifiers.get(node.attr, node.attr)
        if base is not None and not base.qualname:
            if self.project.is_submodule(base.module, node.attr):
                return True, None
            return True, self.project.new_export(base.module, node.attr)
        owners = self.owners(node, scope, base)
        if owners is None:
            return False, None
        return True, self._agreed(node.attr, [f"{owner}.{node.attr}" for owner in owners], self.source.span(node)[1])

    def owners(self, node: ast.Attribute, scope: Scope, base: Symbol | None) -> Owners:
        if base is not None and isinstance(self.project.node(base), ast.ClassDef):
            owner = self.facts.owner(base.key, node.attr)
            if owner is not None:
                return (owner,) if owner else ()
        if isinstance(node.value, ast.Call) and getattr(node.value.func, "id", "") == "super":
            return self._above(scope, node.attr)
        places = self.facts.members.get(self.source.path, {})
        if id(node) in self.source.shifted:
            return None
        return places.get((node.end_lineno or 0, node.end_col_offset or 0))

    def _above(self, scope: Scope, name: str) -> Owners:
        current: Scope | None = scope
        while current is not None and current.kind != "class":
            current = current.parent
        known = self.facts.classes.get(f"{self.source.module}:{current.qualname}") if current is not None else None
        if known is None:
            return None
        for base in known.bases[1:]:
            if base in self.facts.classes and name in self.facts.classes[base].members:
                return (base,)
        return ()

    def _agreed(self, old: str, keys: Iterable[str], start: int) -> str:
        """Return the common new name of several keys, as for a union."""
        found = {key: self.names.new_name(key, old) for key in keys}
        if len(set(found.values())) > 1:
            told = ", ".join(f"{key} → {new}" for key, new in sorted(found.items()))
            self.context.errors.append(
                f"{self._place(start)}: {old} has several owners with different new names: {told}"
            )
            return old
        return next(iter(found.values()), self.names.identifiers.get(old, old))

    # Calls

    def _call(self, call: ast.Call, scope: Scope) -> None:
        function = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        for one in call.keywords:
            if one.arg is not None:
                self._keyword(call, scope, one, function)
        if function in _BY_STRING:
            self._by_string(call, scope)
        if function in _FIXTURES:
            self._fixtures(call)
        if is_module_argument(function) and call.args:
            self.forced.add(self.source.span(call.args[0])[0])

    def _keyword(self, call: ast.Call, scope: Scope, one: ast.keyword, function: str) -> None:
        start, old = self.source.span(one)[0], one.arg or ""
        keys = None if function in _STAND_INS else self._keyword_keys(call, scope, old, function)
        if keys is None:
            new = self.names.identifiers.get(old, old)
            names = self.context.attributes if function in _STAND_INS else self.context.keywords
            if new == old and old in names:
                new = self._decided(start, old, f"{old}=")
        else:
            new = self._agreed(old, keys, start)
        self._add(start, old, new)

    def _keyword_keys(self, call: ast.Call, scope: Scope, old: str, function: str) -> list[str] | None:
        """Return the keys of the parameters or fields that a keyword argument sets, or None if unknown."""
        symbol = self.project.static(self.source, scope, call.func)
        if symbol is not None and symbol.qualname and symbol.module in self.project.sources:
            return self._parameter(symbol, old)
        found = self._by_type(call, scope, old, function)
        if found is not None:
            return found
        return [] if symbol is not None and symbol.module not in self.project.sources else None

    def _by_type(self, call: ast.Call, scope: Scope, old: str, function: str) -> list[str] | None:
        place = (call.lineno, call.col_offset, call.end_lineno or 0, call.end_col_offset or 0)
        if function in _REPLACE and call.args:
            return self._fields(self.facts.first.get(self.source.path, {}).get(place), old)
        if isinstance(call.func, ast.Attribute):
            owners = self.owners(call.func, scope, self.project.static(self.source, scope, call.func.value))
            if function == "_replace":
                return self._fields(owners, old)
            found: list[str] = []
            for owner in owners or ():
                module, _, qualname = owner.partition(":")
                found += self._parameter(Symbol(module, f"{qualname}.{function}"), old) or []
            if found or owners == ():
                return found
        made = [
            name for name in self.facts.made.get(self.source.path, {}).get(place) or () if name in self.facts.classes
        ]
        if made:
            return [key for name in made for key in self._constructor(name, old)]
        if call.args:  # functools.partial, asyncio.to_thread, …
            passed = self._passed(call.args[0], scope)
            return (self._parameter(passed, old) if passed is not None else None) or None
        return None

    def _passed(self, node: ast.expr, scope: Scope) -> Symbol | None:
        symbol = self.project.static(self.source, scope, node)
        if symbol is not None and symbol.qualname:
            return symbol
        if isinstance(node, ast.Attribute):
            owners = self.owners(node, scope, None)
            if owners:
                module, _, qualname = owners[0].partition(":")
                return Symbol(module, f"{qualname}.{node.attr}")
        return None

    def _parameter(self, symbol: Symbol, old: str) -> list[str] | None:
        node = self.project.node(symbol)
        if isinstance(node, ast.ClassDef):
            return self._constructor(symbol.key, old)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            named = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            return [f"{symbol.key}({old})"] if any(one.arg == old for one in named) else []
        return None

    def _constructor(self, name: str, old: str) -> list[str]:
        known = self.facts.classes.get(name)
        if known is None:
            return []
        for base in known.bases:
            module, _, qualname = base.partition(":")
            for method in ("__init__", "__new__"):
                if self.project.node(Symbol(module, f"{qualname}.{method}")) is not None:
                    return [f"{base}.{method}({old})"]
            if base in self.facts.classes and self.facts.classes[base].generated:
                break
        return self._fields((name,), old) or []

    def _fields(self, classes: Owners, old: str) -> list[str] | None:
        if classes is None:
            return None
        owners = [self.facts.owner(name, old) for name in classes]
        return [f"{owner}.{old}" for owner in owners if owner]

    def _by_string(self, call: ast.Call, scope: Scope) -> None:
        """Rename attributes in strings, as in `getattr(x, "name")` and `monkeypatch.setattr(x, "name", …)`."""
        if len(call.args) < 2 or not isinstance(call.args[1], ast.Constant) or not isinstance(call.args[1].value, str):
            return
        old = call.args[1].value
        start = self.source.span(call.args[1])[0] + 1
        if not old.isidentifier() or not self.source.text.startswith(old, start):
            return
        base = self.project.static(self.source, scope, call.args[0])
        if base is not None and not base.qualname:
            self._add(
                start, old, self.project.new_export(base.module, old) if self.project.is_module(base.module) else old
            )
            return
        place = (call.lineno, call.col_offset, call.end_lineno or 0, call.end_col_offset or 0)
        classes: Owners = (base.key,) if base is not None else self.facts.first.get(self.source.path, {}).get(place)
        keys = self._fields(classes, old)
        if keys is not None:
            self._add(start, old, self._agreed(old, keys, start))
        else:
            self._add(start, old, self._guess(old, start))

    def _pair(self, before: ast.expr, node: ast.Constant, scope: Scope) -> None:
        """Rename a string after a module or class in a tuple, as in the parameters of a test that replaces it."""
        base, old = self.project.static(self.source, scope, before), str(node.value)
        start = self.source.span(node)[0] + 1
        if base is None or not old.isidentifier() or not self.source.text.startswith(old, start):
            return
        if not base.qualname and self.project.is_module(base.module):
            self._add(start, old, self.project.new_export(base.module, old))
        elif isinstance(self.project.node(base), ast.ClassDef):
            self._add(start, old, self._agreed(old, self._fields((base.key,), old) or (), start))

    def _fixtures(self, call: ast.Call) -> None:
        """Rename parameters of test functions in strings."""
        qualname, _ = self._function_of.get(id(call), ("", None))
        arguments = call.args[:1] if getattr(call.func, "attr", "") == "parametrize" else call.args
        for argument in arguments:
            for node in ast.walk(argument):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    start = self.source.span(node)[0]
                    raw = ast.get_source_segment(self.source.text, node) or ""
                    for word in _WORD.finditer(raw):
                        key = f"{self.source.module}:{qualname}({word[0]})"
                        self._add(start + word.start(), word[0], self.names.new_name(key, word[0]))

    def _pattern(self, node: ast.MatchClass, scope: Scope) -> None:
        symbol = self.project.static(self.source, scope, node.cls)
        after = self.source.span(node.patterns[-1] if node.patterns else node.cls)[1]
        for old, pattern in zip(node.kwd_attrs, node.kwd_patterns, strict=True):
            start = self.source.find_name(old, after)
            after = self.source.span(pattern)[1]
            keys = self._fields((symbol.key,), old) if symbol is not None and symbol.qualname else None
            if keys is not None:
                self._add(start, old, self._agreed(old, keys, start))
            elif old in self.context.attributes:
                self._unresolved(start, old)

    # Strings that are names

    def _string_lists(self) -> None:
        """Rename in `__all__`, `__slots__`, `__match_args__`, and the tables of modules that import on first use."""
        top = self.source.scopes[0]
        lazy = "__getattr__" in top.bindings
        for node in self.source.tree.body:
            value = getattr(node, "value", None)
            names = [getattr(one, "id", "") for one in getattr(node, "targets", [getattr(node, "target", None)])]
            if not isinstance(value, ast.expr):
                continue
            if isinstance(value, ast.Call) and value.args and getattr(value.args[0], "value", None) in names:
                for one, old in _strings(value.args[0]):  # T = TypeVar("T")
                    self._in_quotes(one, old, self.project.new_local(self.source, top, old))
            elif "__all__" in names:
                for one, old in _strings(value):
                    self._in_quotes(one, old, self.project.new_local(self.source, top, old))
            elif lazy and isinstance(value, ast.Dict):
                self._lazy(value, top)
        for qualname, defined in self.source.nodes.items():
            if isinstance(defined, ast.ClassDef):
                self._member_lists(qualname, defined)

    def _member_lists(self, qualname: str, node: ast.ClassDef) -> None:
        for statement in node.body:
            if isinstance(statement, ast.Assign) and getattr(statement.targets[0], "id", "") in _MEMBER_LISTS:
                for one, old in _strings(statement.value):
                    new = self.names.new_name(f"{self.source.module}:{qualname}.{old}", old)
                    self._in_quotes(one, old, new)

    def _lazy(self, table: ast.Dict, top: Scope) -> None:
        for key, value in zip(table.keys, table.values, strict=True):
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                self._in_quotes(key, key.value, self.project.new_local(self.source, top, key.value))
            named = list(_strings(value))
            if named and self.project.is_module(named[0][1]):
                self.forced.add(self.source.span(named[0][0])[0])
                for one, old in named[1:]:
                    self._in_quotes(one, old, self.project.new_export(named[0][1], old))

    def _in_quotes(self, node: ast.Constant, old: str, new: str) -> None:
        self._add(self.source.span(node)[0] + 1, old, new)

    # All tokens, and text

    def _identifiers(self) -> None:
        if self.names.identifiers:
            for token in self.source.tokens:
                if token.type == tokenize.NAME and token.string in self.names.identifiers:
                    start = self.source.token_offset(token.start)
                    if start not in self.code:
                        self._add(start, token.string, self.names.identifiers[token.string])

    def _in_text(self, taken: list[tuple[int, int]]) -> Iterator[Edit]:
        spans = set(taken)
        for token in self.source.tokens:
            if token.type not in {tokenize.STRING, tokenize.COMMENT}:
                continue
            start = self.source.token_offset(token.start)
            content = token.string.strip("\"'")
            keep = start not in self.forced
            if keep:
                for at in self.context.text.kept(token.string) if not _LOGGER.search(self._line(start)) else ():
                    self.context.kept.append(f"{self._place(start + at)}: {self._line(start + at)}")
            for edit in self.context.text.edits(token.string, keep_loggers=keep):
                moved = Edit(start + edit.start, start + edit.end, edit.new)
                if not any(first < moved.end and moved.start < last for first, last in spans):
                    yield moved
            if (
                token.type == tokenize.STRING
                and content in self.context.strings_to_report
                and start not in self.source.data
                and not self._line(start).startswith(("__slots__", "__all__"))
                and (start + 1, start + 1 + len(content)) not in spans
            ):
                key = f'{self.source.path}:"{content}"'
                if key in self.names.unresolved:
                    self.context.decided.add(key)
                    yield Edit(start + 1, start + 1 + len(content), self.names.unresolved[key])
                else:
                    self.context.strings.append(f"{self._place(start)}: {self._line(start)}")


def _strings(value: ast.expr) -> Iterator[tuple[ast.Constant, str]]:
    for node in ast.walk(value):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node, node.value
