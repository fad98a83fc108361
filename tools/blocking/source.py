"""Syntax trees of the async classes."""

import ast
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

SOURCE: Final = Path(__file__).parents[2] / "src"
Function = ast.FunctionDef | ast.AsyncFunctionDef


class GenerationError(Exception):
    """The table or an async class contains a construct that the generator cannot translate."""


class SourceModule:
    """A module of the source, as a syntax tree."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.tree = ast.parse((SOURCE / f"{name.replace('.', '/')}.py").read_text(encoding="utf-8"))

    def find_import(self, name: str) -> str | None:
        """Return the statement that imports a name of this module, or None for a builtin."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom) and any(alias.name == name for alias in node.names):
                return f"from {node.module} import {name}"
            if isinstance(node, ast.Import) and any(alias.name == name for alias in node.names):
                return f"import {name}"
        return f"from {self.name} import {name}" if name in self._defined_names() else None

    def find_class(self, name: str) -> tuple["SourceModule", ast.ClassDef] | None:
        """Return a class that this module defines or imports from Oncelog, and the module that defines it."""
        for node in self.tree.body:
            if isinstance(node, ast.ClassDef) and node.name == name:
                return self, node
            if isinstance(node, ast.ImportFrom) and any(alias.name == name for alias in node.names):
                module = node.module or ""
                return SourceModule(module).find_class(name) if module.startswith("oncelog.") else None
        return None

    def find_base_names(self, name: str) -> list[str]:
        """Return the names of a class's bases, or an empty list for an unknown class."""
        found = self.find_class(name)
        return [] if found is None else [get_base_name(base) for base in found[1].bases]

    def _defined_names(self) -> Iterator[str]:
        for node in self.tree.body:
            if isinstance(node, ast.ClassDef | Function):
                yield node.name
            elif isinstance(node, ast.Assign):
                yield from (target.id for target in node.targets if isinstance(target, ast.Name))
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                yield node.target.id


def iterate_members(
    source: SourceModule, node: ast.ClassDef, has_twin: Callable[[str], object]
) -> Iterator[tuple[SourceModule, Function | ast.Assign]]:
    """Yield the methods and assignments of a class and of its bases without a blocking twin, with their modules."""
    for member in node.body:
        if isinstance(member, Function | ast.Assign) and not _is_abstract(member):
            yield source, member
    for base in node.bases:
        name = get_base_name(base)
        found = None if has_twin(name) else source.find_class(name)
        if found is not None:
            arguments = _find_type_arguments(base, found[1])
            for module, member in iterate_members(*found, has_twin):
                yield module, _TypeSubstitution(arguments).visit(member)


def _is_abstract(member: Function | ast.Assign) -> bool:
    return isinstance(member, Function) and "abstractmethod" in map(ast.unparse, member.decorator_list)


def is_overload(member: Function) -> bool:
    """Return whether a definition is only one of several signatures of a function."""
    return "overload" in map(ast.unparse, member.decorator_list)


class _TypeSubstitution(ast.NodeTransformer):
    """Replaces type variables with types."""

    def __init__(self, arguments: Mapping[str, ast.expr]) -> None:
        self._arguments = arguments

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Replace one name."""
        return self._arguments.get(node.id, node)


def _find_type_arguments(base: ast.expr, node: ast.ClassDef) -> dict[str, ast.expr]:
    """Return the type variables of a generic class, with the types that a subclass assigns to them."""
    parameters = [ast.unparse(name) for found in node.bases for name in _get_type_arguments(found)]
    return dict(zip(parameters, _get_type_arguments(base), strict=False))


def find_type_parameters(node: ast.ClassDef) -> list[str]:
    """Return the type variables of a class that is derived from `Generic`."""
    return [
        ast.unparse(name)
        for base in node.bases
        if get_base_name(base) == "Generic"
        for name in _get_type_arguments(base)
    ]


def _get_type_arguments(base: ast.expr) -> list[ast.expr]:
    if not isinstance(base, ast.Subscript):
        return []
    return base.slice.elts if isinstance(base.slice, ast.Tuple) else [base.slice]


def get_base_name(base: ast.expr) -> str:
    """Return the name of a base class, without its type arguments."""
    return ast.unparse(base.value if isinstance(base, ast.Subscript) else base)
