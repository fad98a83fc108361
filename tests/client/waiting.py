"""For tests of clients: loops that end, waits that end, and processes that end."""

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

T = TypeVar("T")

WAIT_S: Final = 60
RUN_S: Final = 200


def run(main: Coroutine[Any, Any, T]) -> T:
    """Runs a test's coroutine in a loop of its own."""
    return asyncio.run(asyncio.wait_for(main, RUN_S))


async def soon(waited_for: Awaitable[T]) -> T:
    """What comes in time, or a TimeoutError."""
    async with asyncio.timeout(WAIT_S):
        return await waited_for


async def until(condition: Callable[[], bool]) -> None:
    """Waits for what happens in tasks of the client's, and is told to nobody."""
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.001)


@contextmanager
def started(script: Path, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """A script of a test's. It has ended when the block is left."""
    command = [sys.executable, str(script), *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603
        try:
            yield process
        finally:
            process.kill()


def line_of(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()
