"""A thread that runs the calls of an event loop in order.

This is a single-threaded executor with less overhead. A commit switches threads twice; with the locks and futures of
`concurrent.futures`, that takes as long as a small commit.
"""

import asyncio
import atexit
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Final, TypeVar

from msgspec import Struct

START_TIMEOUT_S: Final = 0.01
"""Maximum time that the event loop waits for a call to start."""
T = TypeVar("T")


class _Call(Struct):
    loop: asyncio.AbstractEventLoop
    outcome: "asyncio.Future[Any]"
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    started: "threading.Lock | None"


class WorkerThread:
    """Runs calls for one event loop. The owner calls `stop`; otherwise `atexit` calls it when the program ends."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._unfinished_calls = 0
        self._is_stopped = False
        # A daemon thread, because the interpreter waits for all other threads before it runs the atexit handler that
        # stops this one.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        atexit.register(self.stop)

    @property
    def is_idle(self) -> bool:
        """Return whether all calls have finished, so that the event loop may use the thread's resources."""
        return not self._unfinished_calls

    def submit(self, function: Callable[..., T], *arguments: Any, start_now: bool = False) -> "asyncio.Future[T]":
        """Run a function after all earlier calls. The call is skipped if its caller is cancelled before it starts.

        With `start_now`, the method waits until the call has started, if no other call is running. Without it, the
        event loop keeps the GIL, and the call cannot start before the loop becomes idle.
        """
        if self._is_stopped:
            raise RuntimeError(f"the thread {self._thread.name} has been stopped")
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[T] = loop.create_future()
        start_lock = threading.Lock() if start_now else None
        if start_lock is not None:
            start_lock.acquire()
        self._unfinished_calls += 1
        self._calls.put(_Call(loop, outcome, function, arguments, start_lock))
        if start_lock is not None:
            start_lock.acquire(timeout=START_TIMEOUT_S)
        return outcome

    def stop(self) -> None:
        """Wait for all calls to finish, and accept no more."""
        if not self._is_stopped:
            self._is_stopped = True
            atexit.unregister(self.stop)
            self._calls.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._calls.get()) is not None:
            self._execute(job)
            del job  # otherwise its outcome is kept alive until the next call

    def _execute(self, call: _Call) -> None:
        result, error = None, None
        if call.started is not None:
            call.started.release()
        try:
            if not call.outcome.cancelled():
                result = call.function(*call.arguments)
        except BaseException as raised:  # noqa: BLE001 - the caller receives it
            error = raised
        with suppress(RuntimeError):  # the event loop is closed, so no caller is waiting
            call.loop.call_soon_threadsafe(self._deliver, call.outcome, result, error)
        del call, error  # the traceback refers to this frame; only the garbage collector would break this cycle

    def _deliver(self, outcome: "asyncio.Future[Any]", result: Any, error: BaseException | None) -> None:
        self._unfinished_calls -= 1
        if outcome.cancelled():
            return
        if error is not None:
            outcome.set_exception(error)
        else:
            outcome.set_result(result)
