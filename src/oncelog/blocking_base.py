"""Base of the blocking classes: they call objects of an event loop through a portal.

`tools/blocking` generates the blocking classes from the async classes. Code that it cannot derive is in subclasses of
these classes (`blocking_base.py` of each package).
"""

from collections.abc import AsyncIterator, Callable, Iterator
from types import TracebackType
from typing import ParamSpec, Protocol, Self, TypeVar

from oncelog.portal import Portal, build_closed_error

P = ParamSpec("P")
T = TypeVar("T")


class AsyncResource(Protocol):
    """An object that an event loop opens and closes."""

    async def __aenter__(self) -> object:
        """Open it."""

    async def close(self) -> None:
        """Close it."""


class BlockingObject:
    """Calls an object of an event loop from other threads. Any number of threads may share it."""

    def __init__(self, portal: Portal | None) -> None:
        self._open_portal = portal

    @property
    def _portal(self) -> Portal:
        """The open portal. Raises the error for closed objects before the object is opened and after it is closed."""
        if self._open_portal is None:
            raise self._build_closed_error()
        return self._open_portal

    def _build_closed_error(self) -> Exception:
        return build_closed_error()

    def _iterate(self, iterator: AsyncIterator[T]) -> Iterator[T]:
        return self._portal.iterate(iterator)

    def _run_any_time(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a synchronous function: in the event loop, or directly without a portal, when no event loop uses the
        object."""
        portal = self._open_portal
        return function(*args, **kwargs) if portal is None else portal.run(function, *args, **kwargs)


class BlockingResource(BlockingObject):
    """Opens and closes an object of an event loop. The portal is open in between."""

    def __init__(self, resource: AsyncResource, thread_name: str) -> None:
        self._open_portal = None
        self._resource = resource
        self._thread_name = thread_name

    def __enter__(self) -> Self:
        portal = Portal(self._thread_name, self._build_closed_error)
        try:
            portal.call(self._resource.__aenter__)
        except BaseException:
            portal.close()
            raise
        self._open_portal = portal
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the object and the portal. Does nothing in a forked process, or if it is closed."""
        portal, self._open_portal = self._open_portal, None
        if portal is not None and not portal.is_forked:
            try:
                portal.call(self._resource.close)
            finally:
                portal.close()
