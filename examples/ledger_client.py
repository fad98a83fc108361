"""A ledger client that is killed while it pays bills, and recovers its writes.

Start a server (`.venv/bin/oncelog serve --development`), then run `.venv/bin/python examples/ledger_client.py`. Pass
the server's gRPC address as an argument if it is not 127.0.0.1:7271. Each run recreates ledger_client.db, and uses a
new client and a new vault.
"""

import asyncio
import multiprocessing
import os
import signal
import sys
from pathlib import Path
from uuid import uuid4

from oncelog.client.ledger import LedgerClient, Refused, Written, relate, set_entity

FILE = Path("ledger_client.db")
ADDRESS = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:7271"
BILLS = 10


def open_client(run: str) -> LedgerClient:
    """Return the client for a run. The file contains its sequence and its pending writes."""
    return LedgerClient(ADDRESS, path=FILE, organization="acme", vault=run, client_id=f"billing-{run}")


async def pay(run: str) -> None:
    """Pay all bills concurrently in transactions of two operations, and kill the process after the first answer."""
    async with open_client(run) as ledger:
        writes = []
        for number in range(BILLS):
            operations = [
                set_entity(f"bill:{number}", b"paid", must_not_exist=True),
                relate(f"bill:{number}", "paid_by", "ann"),
            ]
            writes.append(asyncio.ensure_future(ledger.write(operations)))
        await asyncio.wait(writes, return_when=asyncio.FIRST_COMPLETED)
        os.kill(os.getpid(), signal.SIGKILL)


def run_first_process(run: str) -> None:
    """Run the first process, which is killed."""
    asyncio.run(pay(run))


async def recover(run: str) -> None:
    """Open the same file: the client sends the pending writes under their old keys."""
    async with open_client(run) as ledger:
        pending = await ledger.pending()
        print(f"the file has {len(pending)} writes without an outcome")
        recovered = await ledger.recovered()
        written = [one for one in recovered if isinstance(one.outcome, Written)]
        print(f"all outcomes are known now: {len(written)} are written, each once, before the kill or after it")
        paid = [entity async for entity in ledger.list_entities("bill:")]
        print(f"{len(paid)} bills are paid, the sequence is {(await ledger.client_state()).last_sequence}")
        again = await ledger.write(set_entity("bill:3", b"paid", must_not_exist=True))
        assert isinstance(again, Refused)
        print(f"a paid bill cannot be paid again: {again.code.name}, version {again.current_version}")
        count = 0
        async for block in ledger.watch_blocks():
            count += len(block.tx_ids)
            if count == BILLS:
                print(f"{BILLS} transactions in blocks up to {block.block.height}, linked by their hashes")
                break
    assert len(paid) == BILLS


def main() -> None:
    """Kill a process that pays bills, and recover its writes."""
    for name in (FILE, Path(f"{FILE}-wal"), Path(f"{FILE}-shm"), Path(f"{FILE}-lock")):
        name.unlink(missing_ok=True)
    run = uuid4().hex[:8]
    process = multiprocessing.get_context("spawn").Process(target=run_first_process, args=(run,))
    process.start()
    process.join()
    print(f"the first process was killed by signal {-(process.exitcode or 0)}")
    asyncio.run(recover(run))


if __name__ == "__main__":
    main()
