"""Types of parameters and results, read from the annotations of functions."""

import functools
import inspect
import typing
from collections.abc import Callable
from typing import Any


def resolve_annotation(function: Callable[..., Any], name: str) -> Any:
    """Return the type of a parameter, or of the result for the name `return`. Annotations may be strings.

    Only this annotation is evaluated, so that the others may name types that exist only for type checkers.

    Raises:
        KeyError: the function has no such annotation.
        Exception: the annotation cannot be evaluated; it may raise anything.
    """
    annotated = _find_annotated(function)

    def holder() -> None: ...

    # Built-in functions have no annotations, nor has the `__call__` of a class.
    holder.__annotations__ = {name: getattr(annotated, "__annotations__", {})[name]}
    source = inspect.unwrap(annotated)
    hints = typing.get_type_hints(
        holder, getattr(source, "__globals__", {}), _get_closure_variables(source), include_extras=True
    )
    return hints[name]


def get_name(function: Callable[..., Any]) -> str:
    """Return a function's name for error messages."""
    name: str = getattr(_find_annotated(function), "__qualname__", "") or repr(function)
    return name


def format_type(kind: Any) -> str:
    """Return the text of a type for error messages."""
    return inspect.formatannotation(kind)


def _find_annotated(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function whose annotations apply: the original of a partial function, or an object's `__call__`."""
    while isinstance(function, functools.partial):
        function = function.func
    return function if inspect.isroutine(function) else type(function).__call__


def _get_closure_variables(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the variables of enclosing functions that a function uses, such as classes that they define."""
    variables = {}
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    for name, cell in zip(names, getattr(function, "__closure__", None) or (), strict=True):
        try:
            variables[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    return variables
