"""A thread that runs the calls of an event loop in their order.

It is an executor of one thread with less in between: a commit has two changes of threads, and what `concurrent.futures`
does around them takes as long as a small commit itself.
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
"""So long the event loop waits at most for what it wants to have begun."""
T = TypeVar("T")


class _Call(Struct):
    loop: asyncio.AbstractEventLoop
    outcome: "asyncio.Future[Any]"
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    started: "threading.Lock | None"


class WorkerThread:
    """Used by one event loop. Whoever stops using it calls `stop`; at the end of the program that is done for him."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._unfinished_calls = 0
        self._is_stopped = False
        # A daemon, for else the interpreter would wait for it before it calls what ends it.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        atexit.register(self.stop)

    @property
    def is_idle(self) -> bool:
        """Whether all that was started has ended: then what the thread uses may be used by the event loop's."""
        return not self._unfinished_calls

    def submit(self, function: Callable[..., T], *arguments: Any, start_now: bool = False) -> "asyncio.Future[T]":
        """Does something when everything before it has ended. If nobody waits for it any more by then it is left out.

        With `start_now` it has begun when this returns, if nothing is before it. Else the event loop's thread would
        keep the interpreter, without which nothing begins, for as long as it has something to do.
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
        """Returns when all that was started has ended, and takes nothing more."""
        if not self._is_stopped:
            self._is_stopped = True
            atexit.unregister(self.stop)
            self._calls.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._calls.get()) is not None:
            self._execute(job)
            del job  # or its outcome would be kept until the next one comes

    def _execute(self, call: _Call) -> None:
        result, error = None, None
        if call.started is not None:
            call.started.release()
        try:
            if not call.outcome.cancelled():
                result = call.function(*call.arguments)
        except BaseException as raised:  # noqa: BLE001 - whoever waits is told
            error = raised
        with suppress(RuntimeError):  # the event loop has been closed, so nobody waits
            call.loop.call_soon_threadsafe(self._deliver, call.outcome, result, error)
        del call, error  # which knows this place, and would keep all that is here until a collection of garbage

    def _deliver(self, outcome: "asyncio.Future[Any]", result: Any, error: BaseException | None) -> None:
        self._unfinished_calls -= 1
        if outcome.cancelled():
            return
        if error is not None:
            outcome.set_exception(error)
        else:
            outcome.set_result(result)
