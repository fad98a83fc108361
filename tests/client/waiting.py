"""Waits with a deadline, ports that stay reserved, and processes, for tests of clients."""

import asyncio
import socket
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TypeVar

from cli.processes import Command

T = TypeVar("T")

WAIT_S: Final = 300
"""Guards against a hang: no single wait of a test takes that long, even on a busy machine."""
RUN_SCRIPT: Final = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], None, '__main__')"


async def soon(waited_for: Awaitable[T]) -> T:
    """Return the result, or raise TimeoutError after `WAIT_S`."""
    async with asyncio.timeout(WAIT_S):
        return await waited_for


async def until(condition: Callable[[], bool]) -> None:
    """Poll until the condition is true, for a state change of the client that has no event."""
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 - the condition has no event
            await asyncio.sleep(0.001)


def port_of(address: str) -> int:
    """Return the port of a URL or of HOST:PORT."""
    return int(address.rpartition(":")[2])


@contextmanager
def reserved_port() -> Iterator[int]:
    """Reserve a port of 127.0.0.1 on which servers of the test can be started one after the other.

    The socket is bound and does not listen: connections are refused while no server runs, and no other process gets
    the port in the meantime.
    """
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        yield reserved.getsockname()[1]


@contextmanager
def started(script: Path, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """Run a script in a separate process, with pipes for input and output, and kill it at the end of the block.

    The process is forked from one that has imported `oncelog`, so that it starts quickly.
    """
    with Command(str(script), *arguments, program=RUN_SCRIPT, stderr=None) as process:
        try:
            yield process
        finally:
            process.kill()


def line_of(process: "subprocess.Popen[str]") -> str:
    """Wait for the next line of output."""
    assert process.stdout is not None
    return process.stdout.readline().strip()
