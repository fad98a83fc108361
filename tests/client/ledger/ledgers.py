"""Clients of a ledger for tests: with short pauses, and waits that end; and in processes of their own."""

import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from client import waiting
from client.waiting import WAIT_S, line_of
from doors.serving import Serving
from oncelog.client.ledger import LedgerClient, LedgerLimits, Written
from oncelog.client.ledger.values import Outcome

HERE: Final = Path(__file__).parent
LIMITS: Final = LedgerLimits(pause_ms_min=1, pause_ms_max=20, refused_pause_ms_min=1, close_timeout_ms=10_000)
NOWHERE: Final = "127.0.0.1:9"
"""Nobody listens there."""


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
    with waiting.started(HERE / script, *arguments) as process:
        yield process


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
