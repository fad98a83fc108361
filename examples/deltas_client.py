"""Two deltas clients: two tills edit a product list, one is killed while offline, and both end up with the same rows.

Start a server (`.venv/bin/oncelog serve --development`), then run `.venv/bin/python examples/deltas_client.py`. Pass
the server's address as an argument if it is not http://127.0.0.1:7171. Each run recreates till-1.db and till-2.db, and
uses a new gateway.
"""

import asyncio
import multiprocessing
import os
import signal
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from uuid import uuid4

from oncelog.client.deltas import DeltasClient

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:7171"
UNREACHABLE_URL = "http://127.0.0.1:9"


def open_till(name: str, gateway: str, url: str = URL) -> DeltasClient:
    """Return a till's client, which has its own file."""
    return DeltasClient(url, gateway, path=f"{name}.db", client_id=name)


async def edit_and_die(gateway: str) -> None:
    """Edit two rows without a network, and kill the process before it can push them."""
    async with open_till("till-1", gateway, UNREACHABLE_URL) as client:
        await client.put("products", "tea", {"name": "Tea", "price": 3})
        await client.put("products", "milk", {"name": "Milk", "price": 1})
        os.kill(os.getpid(), signal.SIGKILL)


def run_first_till(gateway: str) -> None:
    """Run the first till's process, which is killed."""
    asyncio.run(edit_and_die(gateway))


async def sync_both(gateway: str) -> None:
    """Reopen the first till's file, and edit the same rows with a second till."""
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(open_till("till-1", gateway))
        print(f"the file has {first.status().pending} edits that no gateway knows of")
        second = await stack.enter_async_context(open_till("till-2", gateway))
        changes = second.changes("products")
        await first.synced(timeout_s=30)
        for _ in range(2):
            change = await anext(changes)
            print(f"the second till receives {change.row_id}: {change.after}")
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
    """Kill the first till, and sync both."""
    for name in ("till-1.db", "till-2.db"):
        for path in (name, f"{name}-wal", f"{name}-shm", f"{name}-lock"):
            Path(path).unlink(missing_ok=True)
    gateway = f"shop-{uuid4().hex[:8]}"
    process = multiprocessing.get_context("spawn").Process(target=run_first_till, args=(gateway,))
    process.start()
    process.join()
    print(f"the first till was killed by signal {-(process.exitcode or 0)}")
    asyncio.run(sync_both(gateway))


if __name__ == "__main__":
    main()
