"""Odd ends: telling that of one's own task from that of something it waits for, and errors that no future takes."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def is_being_cancelled() -> bool:
    """Whether a CancelledError is meant for the task that gets it: what it waits for may have been cancelled too."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def call_in_thread(function: Callable[..., T], *arguments: Any) -> T:
    """Calls a function in a thread. A StopIteration in a future would leave who waits for it waiting for ever."""
    try:
        return function(*arguments)
    except StopIteration as error:
        raise RuntimeError(f"StopIteration was raised: {error}") from error
