"""Docstrings of attributes: the strings after assignments, which only the source code contains."""

import ast
import inspect
import textwrap
from collections.abc import Sequence


def find_attribute_docstrings(cls: type) -> dict[str, str]:
    """Return the docstrings of a class's attributes, by name. Empty if the source is not available."""
    try:
        source = textwrap.dedent(inspect.getsource(cls))
    except (OSError, TypeError):
        return {}
    (definition,) = ast.parse(source).body
    return collect_docstrings(definition.body) if isinstance(definition, ast.ClassDef) else {}


def collect_docstrings(body: Sequence[ast.stmt]) -> dict[str, str]:
    """Return the docstrings of the public names that these statements assign."""
    found: dict[str, str] = {}
    for statement, following in zip(body, [*body[1:], ast.Pass()], strict=True):
        target = statement.target if isinstance(statement, ast.AnnAssign) else None
        if isinstance(statement, ast.Assign):
            target = statement.targets[0] if isinstance(statement.targets[0], ast.Name) else None
        if not isinstance(target, ast.Name) or target.id.startswith("_"):
            continue
        is_text = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
        if is_text and isinstance(following.value.value, str):  # type: ignore[attr-defined]
            found[target.id] = following.value.value  # type: ignore[attr-defined]
    return found
