"""Import statements under the map: moved modules, renamed names, and names that move to different modules."""

import ast
from collections.abc import Iterator

from tools.rename.project import Project
from tools.rename.scopes import Import, Scope, Source
from tools.rename.text import Edit


def import_edits(project: Project, source: Source) -> Iterator[Edit]:
    for node, scope in source.imports:
        if isinstance(node, ast.Import):
            for alias in node.names:
                start = source.span(alias)[0]
                new = project.new_module(alias.name)
                if new != alias.name:
                    yield Edit(start, start + len(alias.name), new)
                if alias.asname is not None:
                    yield from _alias(project, source, scope, alias)
        else:
            yield from _from(project, source, scope, node)


def _from(project: Project, source: Source, scope: Scope, node: ast.ImportFrom) -> Iterator[Edit]:
    groups: dict[str, list[tuple[ast.alias, str]]] = {}
    old = ""
    for alias in node.names:
        old, module, name = target(project, scope, alias)
        groups.setdefault(module, []).append((alias, name))
    if len(groups) == 1:
        ((module, aliases),) = groups.items()
        if module != old:
            start = source.span(node)[0] + len("from ")
            written = "." * node.level + (node.module or "")
            yield Edit(source.text.index(written, start), source.text.index(written, start) + len(written), module)
        for alias, name in aliases:
            start, end = source.span(alias)
            if _is_needless(project, source, scope, alias, name):
                yield Edit(start, end, name)
                continue
            if name != alias.name:
                yield Edit(start, start + len(alias.name), name)
            if alias.asname is not None:
                yield from _alias(project, source, scope, alias)
        return
    statements = []
    for module, aliases in groups.items():
        written = ", ".join(
            name
            if alias.asname is None or _is_needless(project, source, scope, alias, name)
            else f"{name} as {project.new_local(source, scope, alias.asname)}"
            for alias, name in aliases
        )
        statements.append(f"from {module} import {written}")
    start, end = source.span(node)
    yield Edit(start, end, ("\n" + " " * node.col_offset).join(statements))


def _is_needless(project: Project, source: Source, scope: Scope, alias: ast.alias, name: str) -> bool:
    """Return whether an alias equals the new name."""
    if alias.asname is None or alias.asname == alias.name:
        return False
    return project.new_local(source, scope, alias.asname) == name


def _alias(project: Project, source: Source, scope: Scope, alias: ast.alias) -> Iterator[Edit]:
    name = alias.asname or ""
    new, end = project.new_local(source, scope, name), source.span(alias)[1]
    if new != name:
        yield Edit(end - len(name), end, new)


def target(project: Project, scope: Scope, alias: ast.alias) -> tuple[str, str, str]:
    """Return the old module, the new module and the new name of an imported name."""
    home: Scope | None = scope
    bound = None
    while bound is None and home is not None:
        found = home.bindings.get(alias.asname or alias.name, ())
        bound = next((one for one in found if isinstance(one, Import) and one.alias is alias), None)
        home = home.parent
    module = bound.module if bound is not None else ""
    inner = f"{module}.{alias.name}"
    if project.is_submodule(module, alias.name):
        package, _, name = project.new_module(inner).rpartition(".")
        return module, package, name
    return module, project.new_module(module), project.new_export(module, alias.name)
