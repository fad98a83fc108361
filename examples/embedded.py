"""The embedded log in a file: a worker is killed, and a second one submits everything again.

Run it with `make tour` or `.venv/bin/python examples/embedded.py`. Each run recreates tour.db, and prints commands to
try on it.
"""

import multiprocessing
import os
import signal
import uuid
from pathlib import Path

import oncelog

FILE = Path("tour.db")
ORDERS = [uuid.uuid5(uuid.NAMESPACE_URL, f"order {number}") for number in range(1, 101)]


def submit_until_killed(path: Path) -> None:
    """Submit the orders, and kill the process after the 40th answer."""
    with oncelog.open_blocking(path) as log:
        for number, order in enumerate(ORDERS, 1):
            log.submit(oncelog.event(order, {"type": "order.placed", "order": number}, ["orders"]))
            if number == 40:
                os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Kill a worker, submit all orders again, and print the state of the file after each step."""
    for name in (FILE, Path(f"{FILE}-wal"), Path(f"{FILE}-shm")):
        name.unlink(missing_ok=True)
    print(f"\nA log in a file, {FILE}")
    worker = multiprocessing.get_context("spawn").Process(target=submit_until_killed, args=(FILE,))
    worker.start()
    worker.join()
    print("  a worker submitted orders 1, 2, 3 … and was killed (SIGKILL) after the 40th answer")
    with oncelog.open_blocking(FILE) as log:
        page = log.read(partition="orders", limit=1000)
        print(f"  the file has {len(page.records)} orders: every answered order is there")
        events = [
            oncelog.event(order, {"type": "order.placed", "order": number}, ["orders"])
            for number, order in enumerate(ORDERS, 1)
        ]
        verdicts = log.submit_many(events)
        known = sum(isinstance(verdict, oncelog.Replayed) for verdict in verdicts)
        print(f"  a second worker submits all 100 again: {known} were known, {100 - known} are new")
        page = log.read(partition="orders", limit=1000)
        print(f"  the file has {len(page.records)} orders, each once, in one order")
    print(
        f"""
Try next:
  .venv/bin/oncelog verify {FILE}
  .venv/bin/oncelog show {FILE} {ORDERS[16]}
  .venv/bin/oncelog stats {FILE}
  .venv/bin/oncelog --help
and read docs/guides/library.md: the log in your own programs."""
    )


if __name__ == "__main__":
    main()
