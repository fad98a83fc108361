"""Errors for a `with` statement of the wrong kind: `with` for an async object, `async with` for a blocking one.

Without these methods, Python reports only that the object is not a context manager. Type checkers do not see them, so
that they still report the statement.
"""

from typing import TYPE_CHECKING


class AsyncContext:
    """Base class of objects that `async with` opens."""

    def _name_openers(self) -> tuple[str, str]:
        """Return the calls that create the object and its blocking counterpart."""
        name = type(self).__name__
        return f"{name}(…)", f"Blocking{name}(…)"

    if not TYPE_CHECKING:

        def __enter__(self):
            own, blocking = self._name_openers()
            raise TypeError(
                f"{own} needs `async with`: write `async with {own}` in an async function, or `with {blocking}` in "
                "code without an event loop"
            )

        def __exit__(self, *_):
            """Never called, because `__enter__` raises. The `with` statement requires both methods."""


class BlockingContext:
    """Base class of objects that `with` opens."""

    def _name_openers(self) -> tuple[str, str]:
        """Return the calls that create the object and its async counterpart."""
        name = type(self).__name__
        return f"{name}(…)", f"{name.removeprefix('Blocking')}(…)"

    if not TYPE_CHECKING:

        async def __aenter__(self):
            own, asynchronous = self._name_openers()
            raise TypeError(
                f"{own} needs `with`: write `with {own}` in code without an event loop, or `async with {asynchronous}` "
                "in an async function"
            )

        async def __aexit__(self, *_):
            """Never called, because `__aenter__` raises. The `async with` statement requires both methods."""
