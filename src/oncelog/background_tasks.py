"""Background tasks, which run until they finish or their owner stops."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class BackgroundTasks:
    """The set of background tasks that one owner has started."""

    def __init__(self, logger: logging.Logger | None = None) -> None:
        """Create an empty set. `logger` gets task errors at DEBUG, because callers or the log's state report them too.

        Without a logger, asyncio reports errors of tasks that no caller awaits.
        """
        self._logger = logger
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start the work in a task and return the task."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    async def shield(self, work: Coroutine[Any, Any, T]) -> T:
        """Await the work, which continues even if the caller is cancelled."""
        return await asyncio.shield(self.start(work))

    async def wait(self) -> None:
        """Wait until all tasks have finished, including tasks that start while this method waits."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def cancel(self) -> None:
        """Cancel all tasks."""
        for task in self._tasks:
            task.cancel()

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if self._logger is not None and not task.cancelled() and task.exception() is not None:
            self._logger.debug("a background task failed: %r", task.exception())
