"""A client of the ledger: it pays bills, is killed in the middle of it, and goes on where it was.

Start a server (`.venv/bin/oncelog serve --development`), then run `.venv/bin/python examples/ledger_client.py`, with
another address of its gRPC than 127.0.0.1:7271 as an argument. It leaves ledger_client.db behind, made anew by every
run; each run is a client of its own.
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


def client_of(run: str) -> LedgerClient:
    """The one whose sequence and pending writes are in the file. A run has a vault of its own."""
    return LedgerClient(ADDRESS, path=FILE, organization="acme", vault=run, client_id=f"billing-{run}")


async def pay(run: str) -> None:
    """Pays all bills at once, each with two operations that happen together, and does not live to hear of it."""
    async with client_of(run) as ledger:
        writes = []
        for number in range(BILLS):
            operations = [
                set_entity(f"bill:{number}", b"paid", must_not_exist=True),
                relate(f"bill:{number}", "paid_by", "ann"),
            ]
            writes.append(asyncio.ensure_future(ledger.write(operations)))
        await asyncio.wait(writes, return_when=asyncio.FIRST_COMPLETED)
        os.kill(os.getpid(), signal.SIGKILL)


def killed(run: str) -> None:
    """The process of the first run."""
    asyncio.run(pay(run))


async def go_on(run: str) -> None:
    """Opens the same file: what was pending is resolved under its old keys."""
    async with client_of(run) as ledger:
        pending = await ledger.pending()
        print(f"the file has {len(pending)} writes whose outcome nobody knows")
        recovered = await ledger.recovered()
        written = [one for one in recovered if isinstance(one.outcome, Written)]
        print(f"all of them are known now: {len(written)} are written, once, whether before the kill or after it")
        paid = [entity async for entity in ledger.list_entities("bill:")]
        print(f"{len(paid)} bills are paid, the sequence is {(await ledger.client_state()).last_sequence}")
        again = await ledger.write(set_entity("bill:3", b"paid", must_not_exist=True))
        assert isinstance(again, Refused)
        print(f"a bill that is paid cannot be paid again: {again.code.name}, version {again.current_version}")
        count = 0
        async for block in ledger.watch_blocks():
            count += len(block.tx_ids)
            if count == BILLS:
                print(
                    f"{BILLS} transactions in blocks up to {block.block.height}, each with the hash of the one before"
                )
                break
    assert len(paid) == BILLS


def main() -> None:
    """Tells the story."""
    for name in (FILE, Path(f"{FILE}-wal"), Path(f"{FILE}-shm"), Path(f"{FILE}-lock")):
        name.unlink(missing_ok=True)
    run = uuid4().hex[:8]
    process = multiprocessing.get_context("spawn").Process(target=killed, args=(run,))
    process.start()
    process.join()
    print(f"the first process was killed by signal {-(process.exitcode or 0)}")
    asyncio.run(go_on(run))


if __name__ == "__main__":
    main()
