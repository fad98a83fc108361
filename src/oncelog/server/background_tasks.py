"""Background tasks, which run until they finish or the server stops, and long calls in threads."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from oncelog.server.limits import LONG_FRAME_BYTES

T = TypeVar("T")


class BackgroundTasks:
    """The set of background tasks that one owner has started."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start the work in a task and return the task."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def cancel(self) -> None:
        """Cancel all tasks."""
        for task in self._tasks:
            task.cancel()


async def run_long(size: int, function: Callable[[], T]) -> T:
    """Call a function, in a thread if its input is long, so that other requests do not wait for it."""
    return await asyncio.to_thread(function) if size > LONG_FRAME_BYTES else function()
