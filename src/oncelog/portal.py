"""Portal from blocking code into asyncio: a thread runs an event loop, and callers wait for their results.

This module does not depend on the rest of Oncelog. The blocking classes of the library and the clients use it through
`oncelog.blocking_base`.
"""

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from functools import partial
from typing import Generic, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def build_closed_error() -> Exception:
    """Return the default error for calls to a closed portal."""
    return RuntimeError("the portal is closed")


class Portal:
    """Runs coroutines in an event loop in a separate thread. Any number of threads may call it.

    `build_closed_error` builds the error that is raised for calls after `close` and for calls that `close` interrupts.
    """

    def __init__(self, name: str = "portal", build_closed_error: Callable[[], Exception] = build_closed_error) -> None:
        self._build_closed_error = build_closed_error
        self._process = os.getpid()
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop = self._runner.get_loop()
        self._lock = threading.Lock()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, function: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call an async function and return its result. After an interrupt, cancel it and wait until it ends."""
        return self.call_with_timeout(None, partial(function, *args, **kwargs))

    def call_with_timeout(
        self, timeout_s: float | None, function: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Call an async function. After the timeout, cancel the call and raise TimeoutError."""

        async def run_call() -> T:
            async with asyncio.timeout(timeout_s):
                return await function(*args, **kwargs)

        return self._wait(run_call)

    def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a synchronous function in the event loop's thread and return its result."""

        async def run_function() -> T:
            return function(*args, **kwargs)

        return self._wait(run_function)

    def iterate(self, iterator: AsyncIterator[T]) -> Iterator[T]:
        """Iterate over an async iterator, and close it when the loop ends."""

        async def step() -> T:
            return await anext(iterator)

        async def close() -> None:
            aclose = getattr(iterator, "aclose", None)
            if aclose is not None:
                await aclose()

        try:
            while True:
                try:
                    value = self._wait(step)
                except StopAsyncIteration:
                    return
                yield value
        finally:
            if not self._is_closed and not self.is_forked:  # otherwise the event loop has already closed it
                self._wait(close)

    @property
    def is_forked(self) -> bool:
        """Whether this process was forked after the portal started. A fork does not inherit the thread."""
        return os.getpid() != self._process

    def close(self) -> None:
        """Cancel running calls and stop the thread. Does nothing in a forked process."""
        if self.is_forked:
            return
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _wait(self, function: Callable[[], Awaitable[T]]) -> T:
        if self.is_forked:
            raise self._build_closed_error()
        if threading.current_thread() is self._thread:
            raise RuntimeError("a blocking call in the event loop's thread would deadlock")
        call = _Call(function)
        try:
            self._submit(call)
            return call.outcome.result()
        except CancelledError as error:
            if self._is_closed:
                raise self._build_closed_error() from error
            raise
        except BaseException:
            if call.is_sent and not call.outcome.done():  # this thread was interrupted
                with suppress(RuntimeError):  # the loop is closed and has already cancelled the call
                    self._loop.call_soon_threadsafe(call.cancel)
                with suppress(BaseException):
                    call.outcome.result()
            raise

    def _submit(self, call: "_Call[T]") -> None:
        with self._lock:
            # The lock ensures that `begin` is scheduled before the loop stops, so that every sent call finishes.
            if self._is_closed:
                raise self._build_closed_error()
            call.is_sent = True
            self._loop.call_soon_threadsafe(call.begin)

    def _run(self) -> None:
        with self._runner:  # cancels the remaining tasks and closes the loop
            try:
                self._loop.run_forever()
            finally:
                with self._lock:
                    self._is_closed = True


class _Call(Generic[T]):
    """A call in the event loop. Its outcome is set only after its task has finished.

    The future that `asyncio.run_coroutine_threadsafe` returns is done as soon as it is cancelled.
    """

    def __init__(self, function: Callable[[], Awaitable[T]]) -> None:
        self.outcome: Future[T] = Future()
        self.is_sent = False
        self._function = function
        self._task: asyncio.Future[T] | None = None

    def begin(self) -> None:
        """Start the task. This and the following methods run in the event loop's thread."""
        self._task = asyncio.ensure_future(self._function())
        self._task.add_done_callback(self._finish)

    def cancel(self) -> None:
        if self._task is None:
            self.outcome.set_exception(CancelledError())  # interrupted before `begin`
        else:
            self._task.cancel()

    def _finish(self, task: "asyncio.Future[T]") -> None:
        error = CancelledError() if task.cancelled() else task.exception()
        if error is None:
            self.outcome.set_result(task.result())
        else:
            self.outcome.set_exception(error)
