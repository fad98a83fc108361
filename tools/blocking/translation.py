"""Functions without `await`, from the async ones.

A class in `table.py` calls its async object through a portal. A translated function runs the same steps in the caller's
thread instead: `await` is removed, and the names in `Translation.names` are replaced.
"""

import ast
from collections.abc import Iterator, Mapping

from tools.blocking.source import Function, GenerationError, SourceModule
from tools.blocking.table import Translation


def translate(translation: Translation) -> tuple[str, Iterator[str]]:
    """Return the code of a translated function, and the names that it uses."""
    module, _, name = translation.source.partition(":")
    source = SourceModule(module)
    found = next((node for node in source.tree.body if isinstance(node, Function) and node.name == name), None)
    if found is None:
        raise GenerationError(f"found no function {translation.source}")
    translator = _AwaitRemover(translation.names)
    node = translator.visit(found)
    unused = translation.names.keys() - translator.replaced
    if unused:
        raise GenerationError(f"{translation.source} has no {sorted(unused)}, which tools/blocking/table.py names")
    statements = (source.find_import(part.id) for part in ast.walk(node) if isinstance(part, ast.Name))
    return ast.unparse(ast.fix_missing_locations(node)), filter(None, statements)


class _AwaitRemover(ast.NodeTransformer):
    """Removes `async` and `await`, and replaces names."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names
        self.replaced: set[str] = set()

    def _replace(self, name: str) -> str:
        if name in self._names:
            self.replaced.add(name)
        return self._names.get(name, name)

    def visit_Await(self, node: ast.Await) -> ast.expr:
        """Return the awaited expression."""
        value: ast.expr = self.visit(node.value)
        return value

    def visit_AsyncWith(self, node: ast.AsyncWith) -> ast.With:
        """Return the `with` statement."""
        self.generic_visit(node)
        return ast.With(node.items, node.body)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        """Replace the function's name."""
        self.generic_visit(node)
        node.name = self._replace(node.name)
        return node

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.FunctionDef:
        """Return the function without `async`."""
        self.generic_visit(node)
        return ast.FunctionDef(self._replace(node.name), node.args, node.body, node.decorator_list, node.returns)

    def visit_Name(self, node: ast.Name) -> ast.Name:
        """Replace a name."""
        return ast.Name(self._replace(node.id), node.ctx)
