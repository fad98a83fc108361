"""Telling the end of one's own task from that of something it waits for."""

import asyncio


def is_being_cancelled() -> bool:
    """Whether a CancelledError is meant for the task that gets it: what it waits for may have been cancelled too."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
