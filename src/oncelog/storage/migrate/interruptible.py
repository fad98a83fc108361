"""Runs a coroutine that a signal can cancel at any moment."""

import asyncio
import signal
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

T = TypeVar("T")

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


def run_interruptible(coroutine: Coroutine[Any, Any, T]) -> T:
    """As asyncio.run. SIGINT and SIGTERM, as far as this process has handlers for them, end it: KeyboardInterrupt.

    The loop hears of them by its own socket. A handler that raises is not enough: asyncpg loses what is raised while it
    sends a statement, and goes on to wait for the answer. Nor is one that cancels, as asyncio has it for SIGINT: Python
    calls it only when the loop's wait is over if the signal came right before that, or on another thread.
    """

    async def run_cancellable() -> T:
        with _cancel_on_signals(asyncio.current_task()):
            return await coroutine

    try:
        return asyncio.run(run_cancellable())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


@contextmanager
def _cancel_on_signals(task: "asyncio.Task[Any] | None") -> Iterator[None]:
    if task is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    before = {number: handler for number in _SIGNALS if callable(handler := signal.getsignal(number))}
    for number in before:
        loop.add_signal_handler(number, task.cancel)
    try:
        yield
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)
