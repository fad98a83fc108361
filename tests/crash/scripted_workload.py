"""A small workload that uses every part of the store, and a record of the results that callers and readers received.

The workload can be restarted from the beginning at any time, and every write still gets one position. The key index
seals and merges in slices while the workload runs.
"""

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final

from core.invariants import Answer, History
from crash.store_history import (
    Order,
    build_answer,
    check_kept,
    check_same_receipts,
    check_sound,
    check_stored,
    list_order,
    list_submissions,
    read_history,
)
from oncelog.core.policy import BUILT_IN_POLICIES
from oncelog.core.values import Applied, Item, Request, SetMember, Submission
from oncelog.storage.sqlite import SqliteStore
from oncelog.storage.store import Store
from oncelog.storage.verify.findings import VerificationSummary
from oncelog.storage.verify.verification import verify_log
from oncelog.testing.clock import ManualClock
from oncelog.testing.contract.driver import make_salt_source
from oncelog.testing.contract.writes import event, message, transaction
from oncelog.testing.disk import Disk, DiskDriver

NAME: Final = "log.db"
SEAL_KEYS: Final = 5
RUN_KEYS: Final = 2
BATCHES: Final = 12
ERASE_AFTER: Final = 1
ERASED: Final = (1, 2)
"""Positions of lane 0."""
READ_AFTER: Final = (2, 9)


def build_batch(number: int) -> list[Item]:
    """Return new writes of every kind, and retries of a write in the same batch and of one in an earlier batch."""
    items: list[Item] = [
        event(10 * number + 1, f"first of {number}", partitions=("a", f"p{number % 3}")),
        event(10 * number + 2, f"second of {number}", partitions=("a",)),
        message(10 * number + 3, f"hello {number}"),
        transaction(10 * number + 4, number, content=f"paid {number}"),
        event(10 * number + 1, f"first of {number}", partitions=("a", f"p{number % 3}")),
    ]
    if number > 1:
        items += [event(10 * number - 8, f"second of {number - 1}", partitions=("a",))]
    return items


def submissions(batches: int = BATCHES) -> list[Submission]:
    """Return all writes of the workload, without the retries."""
    found = {}
    for number in range(1, batches + 1):
        for item in build_batch(number):
            if isinstance(item, Submission):
                found[item.policy.name, item.key] = item
    return list(found.values())


class Tally:
    """Answers to callers and records read so far. Every later state of the store must agree with them."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.answers: list[Answer] = []
        self.seen: Order = []
        self.erased: set[int] = set()

    def store(self, disk: Disk) -> SqliteStore:
        """Return an unopened store on the disk."""
        return SqliteStore(
            NAME, clock=self.clock, draw=make_salt_source(), driver=DiskDriver(disk), seal_keys=SEAL_KEYS
        )

    def record(self, items: Sequence[Item], verdicts: Sequence[object]) -> None:
        """Record the answers that a batch received."""
        for item, verdict in zip(items, verdicts, strict=True):
            if isinstance(item, Submission):
                self.answers.append(build_answer(item, verdict))  # type: ignore[arg-type]
            else:
                assert isinstance(verdict, Applied)

    def check(self, history: History) -> None:
        """Assert that the history agrees with everything recorded here and violates no invariant."""
        check_sound(history)
        check_stored(self.answers, history)
        check_same_receipts(self.answers)
        check_kept(self.seen, history)
        erased = {record.position for record in history.records if record.lane == 0 and record.erased}
        assert self.erased <= erased


async def submit_workload(store: Store, tally: Tally, batches: int = BATCHES) -> None:
    """Run the workload on an open store."""
    await store.declare(BUILT_IN_POLICIES)
    members = [SetMember("chat/1", "user:ann"), SetMember("chat/2", "user:bob")]
    await commit(store, tally, members)
    for number in range(1, batches + 1):
        tally.clock.advance(1000)
        await commit(store, tally, build_batch(number))
        if number in READ_AFTER:
            tally.seen = list_order(await read_history(store))
        if number == ERASE_AFTER and not tally.erased:
            await store.erase(0, ERASED)
            tally.erased.update(ERASED)


async def commit(store: Store, tally: Tally, items: Sequence[Item]) -> None:
    """Commit one batch, with one request per item."""
    decided = await store.commit([Request((item,)) for item in items])
    tally.record(items, [verdict for (verdict,) in decided.verdicts])


async def reopen_and_check(disk: Disk, tally: Tally) -> History:
    """Open the file on the disk and check its content against the tally."""
    store = tally.store(disk)
    await store.open()
    try:
        history = await read_history(store, tally.answers)
    finally:
        await store.close()
    tally.check(history)
    tally.seen = list_order(history)
    return history


async def run_workload(disk: Disk, tally: Tally, batches: int = BATCHES) -> None:
    """Open the file, run the workload and close the file."""
    store = tally.store(disk)
    await store.open()
    try:
        await submit_workload(store, tally, batches)
    finally:
        await store.close()


def check_complete(history: History, batches: int = BATCHES) -> None:
    """Assert that every write of the workload is stored exactly once."""
    wanted = sorted((one.policy.name, one.key) for one in submissions(batches))
    assert sorted((record.policy, record.key) for record in list_submissions(history)) == wanted


def check_verified(disk: Disk, directory: Path) -> VerificationSummary:
    """Assert that `oncelog verify` finds no damage in a copy of the file."""
    for leftover in directory.iterdir():
        leftover.unlink()
    disk.copy_to(directory)
    *_, last = verify_log(directory / NAME)
    assert isinstance(last, VerificationSummary), last
    return last


async def count_points(happens: Callable[[int], Awaitable[bool]], first: int = 1, step: int = 1) -> int:
    """Call with first, first + step, … until the planned fault is no longer reached, and return how often it was
    reached.
    """
    found = 0
    while await happens(first + found * step):
        found += 1
    return found
