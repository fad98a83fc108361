"""Tasks that run in the background until they end or the server stops, and long work in threads."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from oncelog.server.limits import LONG_FRAME_BYTES

T = TypeVar("T")


class BackgroundTasks:
    """The running tasks of one owner."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task for the work, and return it."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def cancel(self) -> None:
        """Cancel all tasks."""
        for task in self._tasks:
            task.cancel()


async def run_long(size: int, function: Callable[[], T]) -> T:
    """Call a function; in a thread if its input is long, because other requests must not wait for it."""
    return await asyncio.to_thread(function) if size > LONG_FRAME_BYTES else function()
