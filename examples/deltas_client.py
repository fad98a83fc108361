"""Clients of rows: two tills edit one list of products offline, one of them is killed, and both end with the same rows.

Start a server (`.venv/bin/oncelog serve --development`), then run `.venv/bin/python examples/deltas_client.py`, with
another address than http://127.0.0.1:7171 as an argument. It leaves till-1.db and till-2.db behind, made anew by every
run; each run has a gateway of its own.
"""

import asyncio
import multiprocessing
import os
import signal
import sys
from pathlib import Path
from uuid import uuid4

from oncelog.client.deltas import DeltasClient

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:7171"
NOWHERE = "http://127.0.0.1:9"


def till(name: str, gateway: str, url: str = URL) -> DeltasClient:
    """A till, with all it knows in a file of its own."""
    return DeltasClient(url, gateway, path=f"{name}.db", client_id=name)


async def edit_and_die(gateway: str) -> None:
    """Edits without a network, and does not live to push it."""
    async with till("till-1", gateway, NOWHERE) as client:
        await client.put("products", "tea", {"name": "Tea", "price": 3})
        await client.put("products", "milk", {"name": "Milk", "price": 1})
        os.kill(os.getpid(), signal.SIGKILL)


def killed(gateway: str) -> None:
    """The process of the first till."""
    asyncio.run(edit_and_die(gateway))


async def go_on(gateway: str) -> None:
    """The first till again, from its file, and a second one."""
    async with till("till-1", gateway) as first, till("till-2", gateway) as second:
        print(f"the file has {first.status().pending} edits that no gateway knows of")
        changes = second.changes("products")
        await first.synced(timeout_s=30)
        for _ in range(2):
            change = await anext(changes)
            print(f"the second till hears of {change.row_id}: {change.after}")
        await asyncio.gather(
            first.put("products", "tea", {"name": "Green tea"}),
            second.put("products", "tea", {"price": 4}),
            second.delete("products", "milk"),
        )
        for client in (first, second, first):
            await client.synced(timeout_s=30)
        rows = [{row.row_id: row.columns async for row in client.each_row("products")} for client in (first, second)]
        assert rows[0] == rows[1] == {"tea": {"name": "Green tea", "price": 4}}
        print(f"both tills have {rows[0]}")


def main() -> None:
    """Tells the story."""
    for name in ("till-1.db", "till-2.db"):
        for path in (name, f"{name}-wal", f"{name}-shm", f"{name}-lock"):
            Path(path).unlink(missing_ok=True)
    gateway = f"shop-{uuid4().hex[:8]}"
    process = multiprocessing.get_context("spawn").Process(target=killed, args=(gateway,))
    process.start()
    process.join()
    print(f"the first till was killed by signal {-(process.exitcode or 0)}")
    asyncio.run(go_on(gateway))


if __name__ == "__main__":
    main()
