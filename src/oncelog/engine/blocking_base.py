"""Base classes of the blocking log and lease manager, with the methods that cannot be generated.

Closing the blocking log ends its followers' iterators. Work runs in the caller's thread.
"""

from collections.abc import AsyncIterator, Callable, Iterator
from functools import wraps
from typing import Final, ParamSpec, TypeVar

from oncelog.blocking_base import BlockingObject, BlockingResource
from oncelog.engine.answer_cache import WorkResult
from oncelog.engine.held_lease import HeldLease, Work, active_keys
from oncelog.engine.leases import LeaseManager
from oncelog.engine.log import Log
from oncelog.errors import ClosedError
from oncelog.portal import Portal

OPEN_BLOCKING_TEXT: Final = """Return the log in the file at `path`, for `with`. In async code, use `oncelog.open`.

    with oncelog.open_blocking("app.db") as log:
        log.append({"type": "order.placed", "order": 17}, id=order_id, partitions=["orders"])
        page = log.read(partition="orders")

Entering the `with` block opens the log, and creates the file if it does not exist. Any number of threads may use the
log, and any number of processes may open the same file. The parameters and errors are those of `oncelog.open`.
"""
B = TypeVar("B")
P = ParamSpec("P")
T = TypeVar("T")


class BlockingLogBase(BlockingResource):
    """Base class of `BlockingLog`."""

    def __init__(self, log: Log) -> None:
        super().__init__(log, "oncelog")

    def _name_openers(self) -> tuple[str, str]:
        return "oncelog.open_blocking(…)", "oncelog.open(…)"

    def _build_closed_error(self) -> Exception:
        return _build_closed_error()

    def _iterate(self, iterator: AsyncIterator[T]) -> Iterator[T]:
        return self._iterate_until_closed(super()._iterate(iterator))

    def _iterate_until_closed(self, records: Iterator[T]) -> Iterator[T]:
        """End the iterator without an error when the log is closed, as `Log.follow` does."""
        try:
            yield from records
        except ClosedError:
            if self._open_portal is not None:
                raise


class BlockingLeaseManagerBase(BlockingObject):
    """Base class of `BlockingLeaseManager`: methods that run in the caller's thread."""

    def __init__(self, lease_manager: LeaseManager, portal: Portal) -> None:
        super().__init__(portal)
        self._lease_manager = lease_manager

    def recall(self, work: Work) -> WorkResult | None:
        """Like `LeaseManager.recall`, but runs in the caller's thread."""
        if self._portal.is_forked:  # a thread of the parent process may have held the cache's lock
            raise _build_closed_error()
        return self._lease_manager.recall(work)

    def begin(self, work: Work) -> WorkResult | HeldLease:
        """Like `LeaseManager.begin`. The active keys of the caller's thread are also active in the event loop."""
        results: list[WorkResult | HeldLease] = []
        active = active_keys.get()

        async def begin() -> WorkResult | HeldLease:
            active_keys.set(active)
            results.append(await self._lease_manager.begin(work))
            return results[0]

        try:
            return self._portal.call(begin)
        except BaseException:
            if results and isinstance(results[0], HeldLease):  # interrupted after the lease was granted
                self._portal.call(self._lease_manager.release, results[0])
            raise


def wrap_opener(open_log: Callable[P, Log], build: Callable[[Log], B]) -> Callable[P, B]:
    """Return a function that takes the parameters of `open_log` and returns `build(log)`."""

    @wraps(open_log)
    def open_blocking(*args: P.args, **kwargs: P.kwargs) -> B:
        try:
            log = open_log(*args, **kwargs)
        except TypeError as error:
            message = str(error)
            called = f"{open_log.__qualname__}()"
            if not message.startswith(called):
                raise
            raise TypeError(f"oncelog.open_blocking(){message.removeprefix(called)}") from None
        return build(log)

    open_blocking.__doc__ = OPEN_BLOCKING_TEXT
    return open_blocking


def _build_closed_error() -> ClosedError:
    return ClosedError(
        "the log is not open; use it inside `with oncelog.open_blocking(…)`, and open it in the process that uses it, "
        "not before a fork"
    )
