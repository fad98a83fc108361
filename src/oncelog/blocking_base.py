"""Base classes of the blocking API, which calls async objects through a portal.

`tools/blocking` generates the blocking classes from the async classes. Code that it cannot derive is written by hand in
subclasses of these bases (`blocking_base.py` in each package).
"""

from collections.abc import AsyncIterator, Callable, Iterator
from types import TracebackType
from typing import ParamSpec, Protocol, Self, TypeVar

from oncelog.context_errors import BlockingContext
from oncelog.portal import Portal, build_closed_error

P = ParamSpec("P")
T = TypeVar("T")


class AsyncResource(Protocol):
    """An async object that must be opened and closed."""

    async def __aenter__(self) -> object:
        """Open the object."""

    async def close(self) -> None:
        """Close the object."""


class BlockingObject:
    """Calls an async object from other threads. Any number of threads may share it."""

    def __init__(self, portal: Portal | None) -> None:
        self._open_portal = portal

    @property
    def _portal(self) -> Portal:
        """The open portal. Raises the closed error before the object is opened and after it is closed."""
        if self._open_portal is None:
            raise self._build_closed_error()
        return self._open_portal

    def _build_closed_error(self) -> Exception:
        return build_closed_error()

    def _iterate(self, iterator: AsyncIterator[T]) -> Iterator[T]:
        return self._portal.iterate(iterator)

    def _run_any_time(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a synchronous function in the event loop or, while the portal is not open, in the current thread."""
        portal = self._open_portal
        return function(*args, **kwargs) if portal is None else portal.run(function, *args, **kwargs)


class BlockingResource(BlockingObject, BlockingContext):
    """Opens and closes an async object. The portal is open in between."""

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
        """Close the object and the portal. Does nothing in a forked process, or if already closed."""
        portal, self._open_portal = self._open_portal, None
        if portal is not None and not portal.is_forked:
            try:
                portal.call(self._resource.close)
            finally:
                portal.close()
