"""Checks of a map that run before files are changed."""

import ast
import sys
from collections.abc import Iterator
from pathlib import PurePosixPath

from tools.rename.facts import Facts
from tools.rename.groups import missing
from tools.rename.name_map import parts
from tools.rename.project import Project, Symbol, named
from tools.rename.scopes import Import, Scope, Source, resolve


def errors(project: Project, facts: Facts) -> Iterator[str]:
    yield from project.names.errors
    yield from _modules(project)
    for key in project.names.names:
        problem = _unknown(project, facts, key)
        if problem:
            yield f"[names] {key}: {problem}"
    for key, (new, reason) in {key: (new, reason) for key, new, reason in missing(project, facts)}.items():
        present = project.names.names.get(key)
        told = f"is {present!r} in the map" if present else "is missing"
        yield f'[names] "{key}" = "{new}"  # {told}; it overrides or implements {reason}'
    yield from _members(project, facts)
    for source in project.sources.values():
        yield from _scopes(project, source)


def _modules(project: Project) -> Iterator[str]:
    names, moves = project.names, project.moves
    for old in names.modules:
        if not project.is_module(old):
            yield f"[modules] {old}: no such module"
    for old in names.tests:
        if old not in moves.files and old not in moves.directories:
            yield f"[tests] {old}: no such file or directory"
    taken: dict[str, str] = {}
    for old, new in moves.files.items():
        if taken.setdefault(new, old) != old:
            yield f"{old} and {taken[new]} both become {new}"
    yield from _packages(project)
    yield from _tests(
        {old: new for old, new in moves.files.items() if new.startswith("tests/") and new.endswith(".py")}
    )


def _tests(files: dict[str, str]) -> Iterator[str]:
    names: dict[str, str] = {}
    for old, new in files.items():
        path = PurePosixPath(new)
        if new != old and path.stem in sys.stdlib_module_names:
            yield f"[tests] {new}: hides a module of the standard library, because pytest puts its directory first"
        if path.name.startswith("test_") and names.setdefault(path.name, new) != new:
            yield f"[tests] {new}: pytest needs file names that differ; there is {names[path.name]}"


def _packages(project: Project) -> Iterator[str]:
    files = set(project.moves.files.values())
    reported = set()
    for old, new in project.moves.files.items():
        if not new.startswith("src/oncelog/") or not new.endswith(".py") or new == old:
            continue
        for parent in PurePosixPath(new).parents:
            package = str(parent).removeprefix("src/").replace("/", ".")
            if str(parent) == "src/oncelog":
                break
            if (
                f"{parent}/__init__.py" not in files
                and package not in project.names.packages
                and package not in reported
            ):
                reported.add(package)
                yield f'[packages] "{package}" = "Docstring."  # is missing: {new} needs this package'
            if f"{parent}.py" in files:
                yield f"{parent}.py and the package {package} have one name"


def _unknown(project: Project, facts: Facts, key: str) -> str | None:
    module, qualname, local = parts(key)
    source = project.sources.get(module)
    if source is None:
        return "no such module"
    outer, _, last = qualname.rpartition(".")
    if local:
        return _unknown_local(source, qualname, local)
    if not outer:
        bound = source.scopes[0].bindings.get(qualname)
        if not bound:
            return f"{module} does not define {qualname}"
        if all(isinstance(one, Import) and one.alias.asname in {None, one.alias.name} for one in bound):
            imported = project.exported(module, qualname)
            return f"is imported here; name it where it is defined: {imported.key}"
        return None
    name = f"{module}:{outer}"
    if name not in facts.classes:
        return None if qualname in source.nodes else f"{module} has no class {outer}"
    if last in facts.classes[name].members:
        if last in facts.classes[name].foreign:
            return "overrides a member of another package"
        return None
    owner = facts.owner(name, last)
    return f"is defined by {owner}" if owner else f"{outer} has no {last}"


def _unknown_local(source: Source, qualname: str, local: str) -> str | None:
    scopes = [scope for scope in source.scopes if scope.kind != "class" and named(scope).qualname == qualname]
    if not scopes:
        return f"{source.module} has no function {qualname}"
    return (
        None if any(local in scope.bindings for scope in scopes) else f"{qualname} has no parameter or variable {local}"
    )


def _members(project: Project, facts: Facts) -> Iterator[str]:
    """Yield new names that already exist in the class, a base or a derived class."""
    new_names, seen = project.names.names, set()
    for name, known in facts.classes.items():
        found: dict[str, dict[str, str]] = {}
        for base in known.bases:
            for member in facts.classes[base].members if base in facts.classes else ():
                key = f"{base}.{member}"
                found.setdefault(project.names.new_name(key, member), {}).setdefault(member, key)
        for new, old in found.items():
            clash = dict(old)
            if new in known.foreign and new not in clash:
                clash[new] = f"{new} of another package"
            if len(clash) > 1 and any(key in new_names for key in clash.values()):
                told = " and ".join(sorted(clash.values()))
                if told not in seen:
                    seen.add(told)
                    yield f"{name}: {told} would both be {new}"


def _scopes(project: Project, source: Source) -> Iterator[str]:
    """Yield variables of one scope that would get the same name."""
    for scope in source.scopes:
        found: dict[str, str] = {}
        for name in scope.bindings:
            new = project.new_local(source, scope, name)
            other = found.setdefault(new, name)
            if other != name and not _same_import(project, scope, name, other):
                where = f"{source.path}: in {scope.qualname or 'the module'}"
                yield f"{where}: {other} and {name} would both be {new}"


def _same_import(project: Project, scope: Scope, one: str, other: str) -> bool:
    found = []
    for name in (one, other):
        bound = scope.bindings[name][0]
        if not isinstance(bound, Import) or bound.name is None:
            return False
        found.append(project.exported(bound.module, bound.name))
    return found[0] == found[1]


def captures(source: Source, text: str) -> Iterator[str]:
    """Yield names that would refer to a different definition, for example a local variable or a builtin."""
    try:
        new = Source(source.path, source.module, text)
    except SyntaxError as error:
        yield f"{source.path}: the new text does not parse: {error}"
        return
    inside = _import_spans(source), _import_spans(new)
    old_uses = [use for use in source.uses if not _within(inside[0], use.start)]
    new_uses = [use for use in new.uses if not _within(inside[1], use.start)]
    if len(old_uses) != len(new_uses):
        yield f"{source.path}: {len(old_uses)} names became {len(new_uses)}"
        return
    for old, now in zip(old_uses, new_uses, strict=True):
        before, after = resolve(old.scope, old.name), resolve(now.scope, now.name)
        if (before.index if before else -1) != (after.index if after else -1):
            where = f"{source.path}:{source.line_of(old.start)}"
            yield f"{where}: {old.name} becomes {now.name}, which means something else here ({_declared(after)})"


def _declared(scope: Scope | None) -> str:
    return "a builtin" if scope is None else f"defined in {scope.qualname or 'the module'}"


def _import_spans(source: Source) -> list[tuple[int, int]]:
    return [source.span(node) for node, _ in source.imports]


def _within(spans: list[tuple[int, int]], start: int) -> bool:
    return any(first <= start < last for first, last in spans)


def warnings(project: Project, facts: Facts) -> Iterator[str]:
    """Yield renames that need a manual review: wire formats, the command line, public names, fixtures."""
    public = dict(_public(project))
    commands = set(_commands(project))
    for key, new in project.names.names.items():
        module, qualname, local = parts(key)
        if key in public:
            yield f"{key} → {new}: public, in __all__ of {public[key]}: it needs a deprecated alias"
        owner, _, member = qualname.rpartition(".")
        known = facts.classes.get(f"{module}:{owner}")
        if known is not None and not local:
            node = project.node(Symbol(module, owner))
            if known.struct and isinstance(node, ast.ClassDef) and _is_wire_field(node, member):
                yield f"{key} → {new}: a struct's field: the wire changes unless it gets msgspec.field(name={member!r})"
            if known.enum:
                yield f"{key} → {new}: an enum member: its `.name` changes"
        yield from _function_warnings(project, key, new, commands)


def places(project: Project) -> Iterator[str]:
    """Yield code that depends on a file's path or on the last part of a module name."""
    moves = project.moves
    last = {old.rpartition(".")[2]: new.rpartition(".")[2] for old, new in moves.modules.items() if "oncelog." in old}
    for source in project.sources.values():
        depth = moves.files[source.path].count("/") - source.path.count("/")
        lines = source.text.splitlines()
        for node in ast.walk(source.tree):
            line = lines[node.lineno - 1].strip() if isinstance(node, ast.expr) else ""
            if isinstance(node, ast.Name) and node.id == "__file__" and depth:
                yield f"{source.path}:{node.lineno}: moves {depth:+} levels: {line}"
            elif _names_modules(node, last, line):
                yield f"{source.path}:{getattr(node, 'lineno', 0)}: {line}"


def _names_modules(node: ast.AST, last: dict[str, str], line: str) -> bool:
    """Return whether a path or a list of strings consists of parts of modules, one of which changes."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and "oncelog" in line:
        found = [node.right]
    elif isinstance(node, (ast.Tuple, ast.List, ast.Set)) and len(node.elts) > 1 and "__slots__" not in line:
        found = node.elts
    else:
        return False
    values = [str(getattr(one, "value", "")) for one in found]
    return all(value in last for value in values) and any(last[value] != value for value in values)


def _public(project: Project) -> Iterator[tuple[str, str]]:
    """Yield the keys of public names, with the module that has them in `__all__`."""
    for source in project.sources.values():
        for node in source.tree.body if source.module.startswith("oncelog") else ():
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
                for one in ast.walk(node.value):
                    if isinstance(one, ast.Constant) and isinstance(one.value, str):
                        yield project.exported(source.module, one.value).key, source.module


def _is_wire_field(node: ast.ClassDef, field: str) -> bool:
    if any(one.arg == "array_like" for one in node.keywords):
        return False
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and getattr(statement.target, "id", "") == field:
            value = statement.value
            return not (isinstance(value, ast.Call) and any(one.arg == "name" for one in value.keywords))
    return False


def _commands(project: Project) -> Iterator[str]:
    """Yield the keys of functions that `app.command()(function)` turns into commands."""
    for source in project.sources.values():
        for call, scope in source.calls:
            made = call.func.func if isinstance(call.func, ast.Call) else None
            if isinstance(made, ast.Attribute) and made.attr in {"command", "callback"} and call.args:
                symbol = project.static(source, scope, call.args[0])
                if symbol is not None:
                    yield symbol.key


def _function_warnings(project: Project, key: str, new: str, commands: set[str]) -> Iterator[str]:
    module, qualname, local = parts(key)
    node = project.node(Symbol(module, qualname))
    if isinstance(node, ast.ClassDef) and not local:
        tags = [
            one for one in node.keywords if one.arg == "tag" and not isinstance(getattr(one.value, "value", None), str)
        ]
        if tags:
            yield f"{key} → {new}: a struct whose tag is made of its name: the wire changes"
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return
    decorators = [ast.unparse(one) for one in node.decorator_list]
    if f"{module}:{qualname}" in commands or any(".command" in one or ".callback" in one for one in decorators):
        what = "option" if local else "command"
        yield f"{key} → {new}: a command of the CLI: check that its {what} keeps its name"
    if not local and any("fixture" in one for one in decorators):
        yield f"{key} → {new}: a pytest fixture: parameters follow only through [identifiers]"
