"""Functions and classes without `await`, derived from the async ones.

A `Twin` in `table.py` calls its async object through a portal. A translated function or class instead runs the same
steps in the caller's thread: `await` is removed, and the names and texts in `Translation` are replaced.
"""

import ast
from collections.abc import Iterator, Mapping

from tools.blocking.source import Function, GenerationError, SourceModule, is_overload
from tools.blocking.table import Translation


def translate(translation: Translation) -> tuple[str, Iterator[str]]:
    """Return the code of a translated function or class, and the names that it uses."""
    module, _, name = translation.source.partition(":")
    source = SourceModule(module)
    definitions = (node for node in source.tree.body if isinstance(node, Function | ast.ClassDef))
    found = next((node for node in definitions if node.name == name), None)
    if found is None:
        raise GenerationError(f"found no function or class {translation.source}")
    translator = _AwaitRemover(translation.names, translation.texts)
    node = translator.visit(found)
    unused = {*translation.names, *translation.texts} - translator.replaced
    if unused:
        raise GenerationError(f"{translation.source} has no {sorted(unused)}, which tools/blocking/table.py names")
    statements = (source.find_import(part.id) for part in ast.walk(node) if isinstance(part, ast.Name))
    return ast.unparse(ast.fix_missing_locations(node)), filter(None, statements)


def remove_awaits(node: Function) -> Function:
    """Return a method without `async` and `await`."""
    translated: Function = ast.fix_missing_locations(_AwaitRemover({}, {}).visit(node))
    return translated


class _AwaitRemover(ast.NodeTransformer):
    """Removes `async` and `await`, and replaces names and parts of docstrings."""

    def __init__(self, names: Mapping[str, str], texts: Mapping[str, str]) -> None:
        self._names = names
        self._texts = texts
        self.replaced: set[str] = set()

    def _replace(self, name: str) -> str:
        if name in self._names:
            self.replaced.add(name)
        return self._names.get(name, name)

    def visit_Await(self, node: ast.Await) -> ast.expr:
        """Return the awaited expression."""
        value: ast.expr = self.visit(node.value)
        return value

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        """Return the type of an awaitable's result."""
        self.generic_visit(node)
        return node.slice if ast.unparse(node.value) == "Awaitable" else node

    def visit_AsyncWith(self, node: ast.AsyncWith) -> ast.With:
        """Return the `with` statement."""
        self.generic_visit(node)
        return ast.With(node.items, node.body)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef | None:
        """Replace the function's name. Overloads, which differ between async and other arguments, are left out."""
        if is_overload(node):
            return None
        self.generic_visit(node)
        node.name = self._replace(node.name)
        return node

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.FunctionDef | None:
        """Return the function without `async`."""
        if is_overload(node):
            return None
        self.generic_visit(node)
        return ast.FunctionDef(self._replace(node.name), node.args, node.body, node.decorator_list, node.returns)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        """Replace the class's name."""
        self.generic_visit(node)
        node.name = self._replace(node.name)
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        """Replace parts of a docstring."""
        for old, new in self._texts.items():
            if isinstance(node.value, str) and old in node.value:
                self.replaced.add(old)
                node.value = node.value.replace(old, new)
        return node

    def visit_Name(self, node: ast.Name) -> ast.Name:
        """Replace a name."""
        return ast.Name(self._replace(node.id), node.ctx)
