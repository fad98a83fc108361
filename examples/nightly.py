"""A nightly job that is killed and restarted: it bills each account once.

Run it with `.venv/bin/python examples/nightly.py`. Each run recreates nightly.db.

The job does not store where it stopped. It begins at the first account every time, and `once` returns the stored bill
of each account that has already been billed this night. Two jobs that run at the same time do no harm either.
"""

import multiprocessing
import os
import signal
from pathlib import Path

import oncelog

FILE = Path("nightly.db")
BILLS = Path("nightly-bills.txt")
ACCOUNTS = [f"account-{number:02}" for number in range(20)]

log = oncelog.open_blocking(FILE)


@oncelog.once(log, retention=oncelog.kept_for(days=7))
def bill(account: str, night: str) -> int:
    """Send a bill and return its number. Account and night are the key."""
    with BILLS.open("a") as file:
        file.write(f"{account} {night}\n")
    return 1000 + ACCOUNTS.index(account)


def bill_all(night: str, die_at: str = "") -> list[int]:
    """Bill all accounts in order, and return the numbers. The process kills itself at the account `die_at`."""
    numbers = []
    with log:
        for account in ACCOUNTS:
            if account == die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            numbers.append(bill(account, night))
    return numbers


def main() -> None:
    """Kill a job in the middle, start it again, and check the bills."""
    for name in (FILE, Path(f"{FILE}-wal"), Path(f"{FILE}-shm"), BILLS):
        name.unlink(missing_ok=True)
    night = "2026-11-16"
    first = multiprocessing.get_context("spawn").Process(target=bill_all, args=(night, ACCOUNTS[13]))
    first.start()
    first.join()
    billed = len(BILLS.read_text().splitlines())
    print(f"the job of {night} billed {billed} accounts and was killed (SIGKILL)")
    numbers = bill_all(night)
    bills = BILLS.read_text().splitlines()
    print(f"started again from the first account, it billed the other {len(bills) - billed}")
    assert billed == 13
    assert bills == [f"{account} {night}" for account in ACCOUNTS]
    assert numbers == [1000 + number for number in range(20)]
    print(f"{len(bills)} bills for {len(set(bills))} accounts, and every call returned the number of its bill")


if __name__ == "__main__":
    main()
