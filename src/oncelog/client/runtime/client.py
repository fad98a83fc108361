"""Lifecycle of a client: its store thread, tasks and waiting callers, from opening to closing or failure.

`BaseClient` is the base class of the four public clients. The parts of a client share its `ClientRuntime`.
"""

import asyncio
import logging
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, Self, TypeVar

from oncelog.client.runtime.bounded_stream import BoundedStream
from oncelog.client.runtime.store_file import BaseStore
from oncelog.client.runtime.values import BaseLimits, BaseStatus, ConnectionState
from oncelog.context_errors import AsyncContext
from oncelog.errors import ClientError, ClosedError, OncelogError, StoreError

T = TypeVar("T")


StoreType = TypeVar("StoreType", bound=BaseStore)
LimitsType = TypeVar("LimitsType", bound=BaseLimits)


class ClientRuntime(Generic[StoreType, LimitsType]):
    """Store thread, tasks and waiting callers of one client. Opened once and closed once."""

    def __init__(
        self,
        name: str,
        logger: logging.Logger,
        store: StoreType,
        limits: LimitsType,
        random_source: random.Random | None = None,
    ) -> None:
        """`name` is the kind of client in logs, errors and task names, such as "chat"."""
        self.name = name
        self.logger = logger
        self.store = store
        self.limits = limits
        self.random_source = random_source or random.Random()  # noqa: S311 - for pauses
        self._thread: ThreadPoolExecutor | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopped_tasks: set[asyncio.Task[None]] = set()
        """Tasks that this runtime has cancelled. If other code cancels a task, the client fails."""
        self._change_event = asyncio.Event()
        self._is_closing = False
        self._failure: BaseException | None = None
        self.is_ready = False
        """Whether opening has succeeded."""
        self.store_error: str | None = None
        """Why the file cannot be written, or None if it can be."""
        self.streams: list[BoundedStream[Any]] = []
        """Streams that the application reads."""
        self.end_calls: list[Callable[[], None]] = []
        """Functions that release waiting callers with an error when the client is closed or fails."""

    # --- opening and ending

    @property
    def was_opened(self) -> bool:
        """Whether opening has begun, even if it failed."""
        return self._thread is not None

    @property
    def is_ended(self) -> bool:
        """Whether the client is closing, is closed or has failed, and therefore accepts no calls."""
        return self._is_closing or self._failure is not None

    @property
    def is_open(self) -> bool:
        """Whether the client was opened successfully and has neither been closed nor failed since."""
        return self.is_ready and not self.is_ended

    @property
    def failure_error(self) -> OncelogError | None:
        """Error for callers after an unexpected error in a task, or None if no task has failed."""
        if self._failure is None:
            return None
        failed = ClientError(f"the {self.name} client has failed: {describe_error(self._failure)}")
        failed.__cause__ = self._failure
        return failed

    @property
    def failure_text(self) -> str | None:
        """Text of the unexpected error for the client's status, or None if no task has failed."""
        return None if self._failure is None else str(self.failure_error)

    @property
    def end_error(self) -> OncelogError:
        """Error for waiting callers when the client is closed or fails."""
        return self.failure_error or build_closed_error(self.name)

    @property
    def not_open_error(self) -> ClosedError:
        """Error for calls before the client is opened."""
        return ClosedError(f"the {self.name} client is not open: use `async with`")

    def start(self) -> None:
        """Start the store thread. The caller must call `end`, even after an error."""
        self._thread = ThreadPoolExecutor(1, f"oncelog-{self.name}")

    def stop(self) -> None:
        """Refuse new calls."""
        self._is_closing = True
        self.wake_waiters()

    async def end(self) -> None:
        """Finish streams, release waiting callers, close the store after its queued calls, and stop its thread."""
        self.stop()
        self._tell_end()
        if self._thread is not None:
            await close_store_thread(self._thread, self.store.close)

    def fail(self, error: BaseException) -> None:
        """Cancel all tasks and release all waiting callers after an unexpected error."""
        if self._failure is None:
            self.logger.error("the %s client has failed", self.name, exc_info=error)
            self._failure = error
            self._cancel([task for task in self._tasks if task is not asyncio.current_task()])
            self._tell_end()
            self.wake_waiters()

    def _tell_end(self) -> None:
        self.finish_streams()
        for call in self.end_calls:
            call()

    def check_open(self) -> None:
        """Raise ClosedError if the client is not open, and ClientError after an unexpected error in a task."""
        if self.is_ended:
            raise self.end_error
        if not self.is_ready:
            raise self.not_open_error

    # --- tasks

    @property
    def is_own_task(self) -> bool:
        """Whether the caller is running in a task of this client, for example in a handler."""
        return asyncio.current_task() in self._tasks

    def start_task(self, name: str, work: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        """Run a function in a task. If the task fails, or other code cancels it, the client fails."""
        task = asyncio.create_task(self._run_task(work), name=f"oncelog {self.name}: {name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(self._stopped_tasks.discard)
        return task

    async def cancel_tasks(self, tasks: Collection["asyncio.Task[None]"] | None = None) -> None:
        """Cancel the given tasks, or all tasks by default, and wait until they have finished."""
        stopped = list(self._tasks if tasks is None else tasks)
        self._cancel(stopped)
        await asyncio.gather(*stopped, return_exceptions=True)

    def _cancel(self, tasks: Collection["asyncio.Task[None]"]) -> None:
        self._stopped_tasks.update(tasks)
        for task in tasks:
            task.cancel()

    async def _run_task(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except asyncio.CancelledError:
            if is_being_cancelled() and asyncio.current_task() in self._stopped_tasks:
                raise
            self.fail(ClientError("other code has cancelled a task of the client"))
        except (KeyboardInterrupt, SystemExit) as error:
            self.fail(error)
            raise
        except BaseException as error:  # noqa: BLE001 - for example a GeneratorExit
            if not (self.is_ended and isinstance(error, ClosedError)):
                self.fail(error)

    # --- the store

    async def call_store(
        self, function: Callable[..., T], *arguments: Any, notify: Callable[[T], None] | None = None
    ) -> T:
        """Call a function in the store thread, then `notify` with its result, even if the caller is cancelled.

        Raises ClosedError if the thread has stopped.
        """
        if self._thread is None:
            raise self.end_error
        loop = asyncio.get_running_loop()

        def call() -> T:
            result = call_in_thread(function, *arguments)
            if notify is not None:
                loop.call_soon_threadsafe(notify, result)
            return result

        try:
            called = loop.run_in_executor(self._thread, call)
        except RuntimeError as error:  # the thread has stopped
            raise self.end_error from error
        return await called

    async def save(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a writing function in the store thread, and record whether the file can be written."""
        try:
            result = await self.call_store(function, *arguments)
        except StoreError as error:
            if self.store_error is None:
                self.logger.warning("%s", error)
            self.store_error = str(error)
            self.wake_waiters()
            raise
        self.store_error = None
        return result

    # --- streams and waiting callers

    def publish(self, items: Iterable[Any]) -> None:
        """Pass items to all streams, and wake waiting callers."""
        for stream in list(self.streams):
            stream.put(items)
        self.wake_waiters()

    def finish_streams(self) -> None:
        """End all streams. After an unexpected error in a task, they end with that error."""
        for stream in list(self.streams):
            stream.finish(self.failure_error)

    def wake_waiters(self) -> None:
        """Make the callers of `wait_until` check their conditions again."""
        self._change_event.set()  # wakes the tasks that are waiting now; `clear` does not affect them
        self._change_event.clear()

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition is true. Raises the errors of `check_open`."""
        self.check_open()
        while not condition():
            await self._change_event.wait()
            self.check_open()

    async def wait_for(self, get: Callable[[], T], condition: Callable[[T], bool]) -> T:
        """Wait until `condition` is true for the value that `get` returns, and return that value."""
        await self.wait_until(lambda: condition(get()))
        return get()


ProtocolType = TypeVar("ProtocolType")


class ProtocolRuntime(ClientRuntime[StoreType, LimitsType], Generic[StoreType, LimitsType, ProtocolType]):
    """Runtime of a client whose protocol is built from the state in the store."""

    loaded_protocol: ProtocolType | None = None
    """The protocol, or None until the store is open."""
    wake_tasks: Callable[[], None]
    """Called after a protocol change, to wake waiting callers and the tasks that now have work. The client sets it."""

    @property
    def protocol(self) -> ProtocolType:
        """The protocol, even while the client is closing. Raises ClosedError before the client is opened."""
        if self.loaded_protocol is None:
            raise self.not_open_error
        return self.loaded_protocol

    @property
    def open_protocol(self) -> ProtocolType:
        """The protocol of an open client. Raises the errors of `check_open`."""
        self.check_open()
        return self.protocol


Runtime = TypeVar("Runtime", bound=ClientRuntime[Any, Any])
StatusType = TypeVar("StatusType", bound=BaseStatus)


class StatusSource(ABC, Generic[Runtime, StatusType]):
    """A client or one of its scopes: its status, and methods that wait for a status."""

    _runtime: Runtime

    @abstractmethod
    def status(self) -> StatusType:
        """Return the current status, for example for a user interface."""

    async def until_status(self, condition: Callable[[StatusType], bool]) -> StatusType:
        """Wait for a status that meets a condition, and return it. Raises ClosedError if the client is closed."""
        return await self._runtime.wait_for(self.status, condition)

    async def until_live(self) -> None:
        """Wait until all data on the server has arrived. Raises ClosedError if the client is closed."""
        await self._runtime.wait_until(self._is_live)

    async def until_settled(self) -> None:
        """Wait until all writes have outcomes. Raises ClosedError if the client is closed."""
        await self._runtime.wait_until(lambda: not self.status().pending)

    def _is_live(self) -> bool:
        return self.status().state is ConnectionState.LIVE


class BaseClient(StatusSource[Runtime, StatusType], AsyncContext):
    """A client with its own file. `async with` opens and closes it."""

    _close_task: "asyncio.Task[None] | None" = None

    async def __aenter__(self) -> Self:
        """Open the client without waiting for the server. Raises SettingsError, StoreInUseError or a StoreError."""
        if self._runtime.was_opened:
            raise ClosedError("a client can be opened only once; create another one")
        self._runtime.start()
        try:
            await self._open()
        except BaseException:
            await self.close()
            raise
        self._runtime.is_ready = True
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop all tasks and close the file. Pending writes remain in it and are sent when the client is reopened.

        When called from a handler, the method returns immediately. The client cancels the handler at its next `await`
        and delivers its event again after the client is reopened.
        """
        if not self._runtime.was_opened:
            return
        if self._close_task is None:
            self._runtime.stop()
            self._close_task = asyncio.create_task(self._close_all(), name=f"oncelog {self._runtime.name}: close")
        if not self._runtime.is_own_task:
            await asyncio.shield(self._close_task)

    async def _close_all(self) -> None:
        try:
            if self._runtime.is_ready and self._runtime.failure_error is None:
                await self._drain()
            await self._runtime.cancel_tasks()
            await self._release()
        finally:
            await self._runtime.end()

    @abstractmethod
    async def _open(self) -> None:
        """Open the store and start the tasks."""

    async def _drain(self) -> None:
        """Finish work in progress before the tasks are cancelled. Subclasses may override it."""

    @abstractmethod
    async def _release(self) -> None:
        """Close connections after the tasks have finished."""


def build_closed_error(name: str) -> ClosedError:
    """Return the error for calls to a closed client."""
    return ClosedError(
        f"the {name} client is closed: create another one with the same file, which sends the pending writes"
    )


async def close_store_thread(thread: ThreadPoolExecutor, close_store: Callable[[], None]) -> None:
    """Close the store after all calls that are queued for its thread, and stop the thread.

    The store is closed even if the caller is cancelled while it waits. When the call returns, the thread has stopped.
    """
    close_future = thread.submit(close_store)
    thread.shutdown(wait=False)
    try:
        await asyncio.shield(asyncio.wrap_future(close_future))
    finally:
        if close_future.done():
            thread.shutdown()  # does not block: closing the store was the last call


def describe_error(error: BaseException) -> str:
    """Return a one-line description of an error, even if its `str` fails."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - any error of `str`
        return type(error).__name__


def get_wall_ms() -> int:
    """Return the wall-clock time in milliseconds since 1970."""
    return time.time_ns() // 1_000_000


def is_being_cancelled() -> bool:
    """Whether the current task is being cancelled. If not, a CancelledError comes from a future that it awaits."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def call_in_thread(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function, and replace StopIteration, which a future cannot carry, with RuntimeError."""
    try:
        return function(*arguments)
    except StopIteration as error:
        raise RuntimeError(f"StopIteration was raised: {error}") from error
