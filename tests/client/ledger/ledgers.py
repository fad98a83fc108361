"""Clients of a ledger for tests: with short pauses, and waits that end; and in processes of their own."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

from doors.serving import Serving
from oncelog.client.ledger import LedgerClient, LedgerLimits, Written
from oncelog.client.ledger.values import Outcome

T = TypeVar("T")

WAIT_S: Final = 60
RUN_S: Final = 200
HERE: Final = Path(__file__).parent
LIMITS: Final = LedgerLimits(pause_ms_min=1, pause_ms_max=20, refused_pause_ms_min=1, close_timeout_ms=10_000)
NOWHERE: Final = "127.0.0.1:9"
"""Nobody listens there."""


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


def address_of(served: Serving) -> str:
    rpc = served.server.rpc
    assert rpc is not None
    return f"127.0.0.1:{rpc.port}"


def ledger_of(address: str, path: Path | str = ":memory:", **options: Any) -> LedgerClient:
    """A client that waits for nothing long."""
    chosen = {"organization": "acme", "client_id": "billing-1", "limits": LIMITS, **options}
    return LedgerClient(address, path=path, **chosen)


def written(outcome: Outcome | Exception | None) -> Written:
    assert isinstance(outcome, Written), outcome
    return outcome


async def keys_of(ledger: LedgerClient) -> list[str]:
    """What has been set, in the order in which it was."""
    found = [(one.version, one.key) async for one in ledger.list_entities()]
    return [key for _, key in sorted(found)]


@contextmanager
def started(script: str, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """A script that is beside this file. It has ended when the block is left."""
    command = [sys.executable, str(HERE / script), *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603
        try:
            yield process
        finally:
            process.kill()


def line_of(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@contextmanager
def server_process(store: str, port: int = 0) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """A server, and where its gRPC is."""
    with started("ledger_server_worker.py", store, str(port)) as process:
        address = line_of(process)
        assert address.startswith("127.0.0.1:")
        yield process, address


def killed_client(address: str, path: Path, moment: str, count: int) -> None:
    """A client's process that is killed at a moment of its first write that comes so far."""
    with started("ledger_client_worker.py", address, str(path), moment, str(count)) as process:
        process.wait(WAIT_S)
        assert process.returncode == -signal.SIGKILL
