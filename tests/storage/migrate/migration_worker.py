"""Signal the process in the middle of a move.

A point is a method of the mover's source or target, followed by `before` or `after`. The process sends itself a signal
at a numbered call of the method.
"""

import asyncio
import os
import signal
from typing import Any

from oncelog.storage.migrate import migration, source, target

SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "int": signal.SIGINT}


def stop_at(owner: type, name: str, when: str, number: int, how: str = "kill") -> None:
    original: Any = getattr(owner, name)
    calls = 0

    def count_call(now: str) -> None:
        nonlocal calls
        calls += now == when
        if now == when and calls == number:
            os.kill(os.getpid(), SIGNALS[how])

    async def call_async(*arguments: Any) -> Any:
        count_call("before")
        await asyncio.sleep(0)
        result = await original(*arguments)
        count_call("after")
        return result

    def call_sync(*arguments: Any) -> Any:
        count_call("before")
        result = original(*arguments)
        count_call("after")
        return result

    setattr(owner, name, call_async if asyncio.iscoroutinefunction(original) else call_sync)


def use_small_slices() -> None:
    for module in (source, migration):
        vars(module)["SLICE_ROWS"] = 7


def stop_at_point(point: str, number: int, how: str = "kill") -> None:
    """Send a signal at a point, such as `target.save_slice.before`."""
    owner, name, when = point.split(".")
    stop_at({"source": source.MigrationSource, "target": target.MigrationTarget}[owner], name, when, number, how)
