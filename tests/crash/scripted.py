"""A small workload that touches everything a crash could hurt, and what callers and readers were told in it.

It can be run again from its beginning at any time: every write then gets its place once. The key index is kept busy:
sealing and merging go on in slices while the workload runs.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from crash.observing import (
    Order,
    answer_to,
    demand_kept,
    demand_same_receipts,
    demand_sound,
    demand_stored,
    history_of,
    order_of,
)
from oncelog.core.invariants import Answer, History
from oncelog.core.policy import BUILT_IN
from oncelog.core.values import Applied, Item, Request, SetMember, Submission
from oncelog.stores.protocol import Store
from oncelog.stores.sqlite import SqliteStore
from oncelog.stores.sqlite.verifying import verify_file
from oncelog.stores.verifying.findings import Passed
from oncelog.testing.clock import ManualClock
from oncelog.testing.contract.driven import numbered_bytes
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


def batch_of(number: int) -> list[Item]:
    """New writes of every kind, and retries: one of the same batch, one of an earlier."""
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
    """All writes of the workload, retries left out."""
    found = {}
    for number in range(1, batches + 1):
        for item in batch_of(number):
            if isinstance(item, Submission):
                found[item.policy.name, item.key] = item
    return list(found.values())


class Tally:
    """What has been told so far, to whomever; it holds for ever."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.answers: list[Answer] = []
        self.seen: Order = []
        self.erased: set[int] = set()

    def store(self, disk: Disk) -> SqliteStore:
        """A store on the disk, not yet open."""
        return SqliteStore(NAME, clock=self.clock, draw=numbered_bytes(), driver=DiskDriver(disk), seal_keys=SEAL_KEYS)

    def told(self, items: Sequence[Item], decided: Sequence[object]) -> None:
        """Notes the answers to a batch."""
        for item, verdict in zip(items, decided, strict=True):
            if isinstance(item, Submission):
                self.answers.append(answer_to(item, verdict))  # type: ignore[arg-type]
            else:
                assert isinstance(verdict, Applied)

    def demand(self, history: History) -> None:
        """All that was told is still true, and nothing else is wrong."""
        demand_sound(history)
        demand_stored(self.answers, history)
        demand_same_receipts(self.answers)
        demand_kept(self.seen, history)
        erased = {record.position for record in history.records if record.lane == 0 and record.erased}
        assert self.erased <= erased


async def steps(store: Store, tally: Tally, batches: int = BATCHES) -> None:
    """The workload, on a store that is open."""
    await store.declare(BUILT_IN)
    members = [SetMember("chat/1", "user:ann"), SetMember("chat/2", "user:bob")]
    await commit(store, tally, members)
    for number in range(1, batches + 1):
        tally.clock.advance(1000)
        await commit(store, tally, batch_of(number))
        if number in READ_AFTER:
            tally.seen = order_of(await history_of(store))
        if number == ERASE_AFTER and not tally.erased:
            await store.erase(0, ERASED)
            tally.erased.update(ERASED)


async def commit(store: Store, tally: Tally, items: Sequence[Item]) -> None:
    """One batch, a request an item."""
    decided = await store.commit([Request((item,)) for item in items])
    tally.told(items, [verdict for (verdict,) in decided.verdicts])


async def check(disk: Disk, tally: Tally) -> History:
    """Opens what is on the disk, and holds it against what was told."""
    store = tally.store(disk)
    await store.open()
    try:
        history = await history_of(store, tally.answers)
    finally:
        await store.close()
    tally.demand(history)
    tally.seen = order_of(history)
    return history


async def run(disk: Disk, tally: Tally, batches: int = BATCHES) -> None:
    """The whole workload, from opening the file to closing it."""
    store = tally.store(disk)
    await store.open()
    try:
        await steps(store, tally, batches)
    finally:
        await store.close()


def demand_whole(history: History, batches: int = BATCHES) -> None:
    """Every write of the workload is there, once."""
    wanted = sorted((one.policy.name, one.key) for one in submissions(batches))
    assert sorted((record.policy, record.key) for record in history.records) == wanted


def demand_verified(disk: Disk, directory: Path) -> Passed:
    """`oncelog verify` finds nothing in a copy of the file."""
    for leftover in directory.iterdir():
        leftover.unlink()
    disk.copy_to(directory)
    *_, last = verify_file(directory / NAME)
    assert isinstance(last, Passed), last
    return last


def points(happens: Callable[[int], bool]) -> int:
    """Calls with 1, 2, 3 … until nothing happens any more; gives how often something did."""
    number = 1
    while happens(number):
        number += 1
    return number - 1
