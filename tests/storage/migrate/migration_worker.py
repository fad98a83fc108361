"""Signal the process in the middle of a move.

A point is a method of the mover's source or target, with `before` or `after`. The process sends itself a signal at a
numbered call of the method.
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

    def counted(now: str) -> None:
        nonlocal calls
        calls += now == when
        if now == when and calls == number:
            os.kill(os.getpid(), SIGNALS[how])

    async def asynchronous(*arguments: Any) -> Any:
        counted("before")
        await asyncio.sleep(0)
        result = await original(*arguments)
        counted("after")
        return result

    def synchronous(*arguments: Any) -> Any:
        counted("before")
        result = original(*arguments)
        counted("after")
        return result

    setattr(owner, name, asynchronous if asyncio.iscoroutinefunction(original) else synchronous)


def small_slices() -> None:
    for module in (source, migration):
        vars(module)["SLICE_ROWS"] = 7


def stop_by(point: str, number: int, how: str = "kill") -> None:
    """Send a signal at a point, such as `target.save_slice.before`."""
    owner, name, when = point.split(".")
    stop_at({"source": source.MigrationSource, "target": target.MigrationTarget}[owner], name, when, number, how)
