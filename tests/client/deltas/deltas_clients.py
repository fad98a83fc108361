"""Deltas clients for tests, with short pauses, and clients and servers in separate processes."""

import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from client import waiting
from client.waiting import WAIT_S, line_of
from oncelog.client.deltas import DeltasClient, DeltasLimits

HERE: Final = Path(__file__).parent
SHORT: Final = {
    "pause_ms_min": 1, "pause_ms_max": 20, "refused_pause_ms_min": 1, "refused_pause_ms_max": 20,
    "retry_after_ms_max": 20,
}  # fmt: skip
LIMITS: Final = DeltasLimits(**SHORT)
NOWHERE: Final = "http://127.0.0.1:9"
"""No server listens there."""
GATEWAY: Final = "shop"


def client_of(url: str, path: Path | str = ":memory:", client_id: str = "till-1", **options: Any) -> DeltasClient:
    """Return a client with short pauses."""
    return DeltasClient(url, GATEWAY, path=path, client_id=client_id, **{"limits": LIMITS, **options})


async def rows_of(client: DeltasClient, *tables: str) -> dict[tuple[str, str], Any]:
    """Return all rows of the tables, of `products` by default."""
    return {
        (table, row.row_id): row.columns for table in tables or ("products",) async for row in client.each_row(table)
    }


@contextmanager
def started(script: str, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """Run a script of this directory in a separate process."""
    with waiting.started(HERE / script, *arguments) as process:
        yield process


@contextmanager
def server_process(store: str, port: int = 0, schemas: str = "") -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """Run a server in a separate process; yield the process and its URL."""
    with started("deltas_server_worker.py", store, str(port), schemas) as process:
        url = line_of(process)
        assert url.startswith("http://127.0.0.1:")
        yield process, url


def killed_client(url: str, path: Path, moment: str, count: int) -> None:
    """Run a client that kills itself at the given moment of its first push."""
    with started("deltas_client_worker.py", url, str(path), moment, str(count)) as process:
        process.wait(WAIT_S)
        assert process.returncode == -signal.SIGKILL
