"""What the tasks of one client share: the file with its thread, who waits for something, and what ends it all."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from oncelog.client.runtime.cancellation import call_in_thread, is_being_cancelled
from oncelog.errors import ClientError, ClosedError, OncelogError

T = TypeVar("T")


class ClientRuntime:
    """Opened once, and closed once."""

    def __init__(self, name: str, new_closed_error: Callable[[], ClosedError], logger: logging.Logger) -> None:
        """`name` is that of the client in logs and errors; `closed` makes what is told to those who come too late."""
        self.name = name
        self._new_closed_error = new_closed_error
        self._logger = logger
        self._thread: ThreadPoolExecutor | None = None
        self._waiters: list[asyncio.Future[None]] = []
        self._is_closing = False
        self._failure: BaseException | None = None

    @property
    def has_opened(self) -> bool:
        """Or at least tried to be."""
        return self._thread is not None

    @property
    def is_ended(self) -> bool:
        """Nothing new is begun any more."""
        return self._is_closing or self._failure is not None

    def start(self) -> None:
        """From now on `call_store` can be used. Whatever happens then, it is to be closed."""
        self._thread = ThreadPoolExecutor(1, f"oncelog-{self.name}")

    def stop(self) -> None:
        """From now on nothing new is begun."""
        self._is_closing = True
        self.wake_waiters()

    async def close(self, close_store: Callable[[], None]) -> None:
        """When all tasks have ended."""
        self.stop()
        self.notify_failure(self.failure_error)
        if self._thread is not None:
            await close_store_thread(self._thread, close_store)

    def check_open(self) -> None:
        """Raises ClosedError, or ClientError where a task could not go on."""
        failed = self.failure_error
        if failed is not None:
            raise failed
        if self._thread is None:
            raise ClosedError(f"the {self.name} client is not open: use `async with`")
        if self._is_closing:
            raise self._new_closed_error()

    def notify_failure(self, error: OncelogError | None) -> None:
        """To those who wait elsewhere; None if the client was closed as it should be."""

    # --- the file

    async def call_store(self, function: Callable[..., T], *arguments: Any) -> T:
        """Calls a function of the store's in its thread."""
        if self._thread is None:
            raise self._new_closed_error()
        try:
            called = asyncio.get_running_loop().run_in_executor(self._thread, call_in_thread, function, *arguments)
        except RuntimeError as error:  # the thread has been ended
            raise self._new_closed_error() from error
        return await called

    async def call_store_and_notify(
        self, function: Callable[..., T], *arguments: Any, notify: Callable[[T], None]
    ) -> T:
        """The same for what somebody is told of, even if whoever waits for it has gone meanwhile."""
        loop = asyncio.get_running_loop()

        def call_and_notify() -> T:
            result = function(*arguments)
            loop.call_soon_threadsafe(notify, result)
            return result

        return await self.call_store(call_and_notify)

    # --- those who wait

    def wake_waiters(self) -> None:
        """Something may have changed that somebody waits for."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Raises what `check_open` raises."""
        while True:
            self.check_open()
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

    async def guard_task(self, work: Coroutine[Any, Any, None]) -> None:
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
        self._logger.error("the %s client cannot go on", self.name, exc_info=error)
        self._failure = error
        self.notify_failure(self.failure_error)
        self.wake_waiters()

    @property
    def failure_error(self) -> OncelogError | None:
        """What nobody has foreseen, if it has happened."""
        if self._failure is None:
            return None
        failed = ClientError(f"the {self.name} client cannot go on: {type(self._failure).__name__}: {self._failure}")
        failed.__cause__ = self._failure
        return failed


async def close_store_thread(thread: ThreadPoolExecutor, close_store: Callable[[], None]) -> None:
    """Close the store after all calls that are queued for its thread, and end the thread.

    The store is closed even if the caller is cancelled while it waits. On return the thread has ended.
    """
    done = thread.submit(close_store)
    thread.shutdown(wait=False)
    try:
        await asyncio.shield(asyncio.wrap_future(done))
    finally:
        if done.done():
            thread.shutdown()  # does not block: closing the store was the last call
