"""What the tasks of one client share: the file with its thread, who waits for something, and who is told of changes."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

from oncelog.client.cancelling import carried, is_being_cancelled
from oncelog.client.deltas.changes import ChangeStream
from oncelog.client.deltas.limits import DeltasLimits
from oncelog.client.deltas.store import DeltasStore, Replaced
from oncelog.client.deltas.values import Change
from oncelog.errors import ClientError, ClosedError, OncelogError

logger: Final = logging.getLogger("oncelog.client.deltas")
T = TypeVar("T")


class Desk:
    """Opened once, and closed once."""

    def __init__(self, store: DeltasStore, limits: DeltasLimits) -> None:
        self.store = store
        self.limits = limits
        self.streams: list[ChangeStream] = []
        self._thread: ThreadPoolExecutor | None = None
        self._waiters: list[asyncio.Future[None]] = []
        self._is_closing = False
        self._failure: BaseException | None = None

    @property
    def was_opened(self) -> bool:
        """Or at least tried to be."""
        return self._thread is not None

    async def open(self, client_id: str, gateway: str) -> None:
        """Whatever it raises, it is to be closed."""
        self._thread = ThreadPoolExecutor(1, "oncelog-deltas")
        await self.in_store(self.store.open, client_id, gateway)

    def end(self) -> None:
        """From now on nothing new is begun."""
        self._is_closing = True
        self.wake()

    async def close(self) -> None:
        """When all tasks have ended."""
        self.end()
        for stream in list(self.streams):
            stream.finish(self._failed())
        if self._thread is not None:
            # Whatever happens, the file is let go of, behind all that the thread has still to do.
            done = self._thread.submit(self.store.close)
            self._thread.shutdown(wait=False)
            await asyncio.wrap_future(done)

    def demand_open(self) -> None:
        """Raises ClosedError, or ClientError where a task could not go on."""
        failed = self._failed()
        if failed is not None:
            raise failed
        if self._thread is None:
            raise ClosedError("the deltas client is not open: use `async with`")
        if self._is_closing:
            raise closed()

    # --- the file

    async def in_store(self, function: Callable[..., T], *arguments: Any) -> T:
        """Calls a function of the store's in its thread."""
        if self._thread is None:
            raise closed()
        try:
            called = asyncio.get_running_loop().run_in_executor(self._thread, carried, function, *arguments)
        except RuntimeError as error:  # the thread has been ended
            raise closed() from error
        return await called

    async def changed(self, function: Callable[..., T], *arguments: Any, tell: Callable[[T], None]) -> T:
        """The same for what changes rows. It is told even if whoever waits for it has gone meanwhile."""
        loop = asyncio.get_running_loop()

        def changing() -> T:
            result = function(*arguments)
            loop.call_soon_threadsafe(tell, result)
            return result

        return await self.in_store(changing)

    # --- those who wait

    def tell(self, changes: list[Change]) -> None:
        """To all who read changes, and all who wait for something."""
        for stream in list(self.streams):
            stream.put(changes)
        self.wake()

    def tell_replaced(self, replaced: Replaced) -> None:
        """The same behind a reset."""
        if not replaced.is_complete:
            for stream in list(self.streams):
                stream.lose("changes_max", self.limits.changes_max)
        self.tell(replaced.changes)

    def wake(self) -> None:
        """Something may have changed that somebody waits for."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Raises what `demand_open` raises."""
        while True:
            self.demand_open()
            if condition():
                return
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            try:
                await waiter
            finally:
                if waiter in self._waiters:
                    self._waiters.remove(waiter)

    # --- tasks

    async def guarded(self, work: Coroutine[Any, Any, None]) -> None:
        """What nobody has foreseen must not leave the application waiting."""
        try:
            await work
        except asyncio.CancelledError:
            if self._is_closing and is_being_cancelled():
                raise
            self._fail(ClientError("a task of the client's was cancelled by somebody else"))
        except ClosedError:
            if not self._is_closing:
                raise
        except Exception as error:  # noqa: BLE001 - it is told to everybody
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        logger.error("the deltas client cannot go on", exc_info=error)
        self._failure = error
        for stream in list(self.streams):
            stream.finish(self._failed())
        self.wake()

    def _failed(self) -> OncelogError | None:
        if self._failure is None:
            return None
        failed = ClientError(f"the deltas client cannot go on: {type(self._failure).__name__}: {self._failure}")
        failed.__cause__ = self._failure
        return failed


def closed() -> ClosedError:
    """What is told to those who come too late, or wait too long."""
    return ClosedError("the deltas client is closed; what is pending is kept, and pushed when it is opened again")
