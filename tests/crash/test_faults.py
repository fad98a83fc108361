"""The disk fails at every operation, once or until it is repaired: an error that says so, and nothing half done.

It is the worse kind of disk: what a failed sync was to write is never written, though it can be read until the power is
lost. And the power is lost at the end of each run, before the store could be closed.
"""

import asyncio
from contextlib import suppress
from itertools import product

import pytest

from crash.observing import answer_to, history_of, say
from crash.scripted import Tally, batch_of, check, demand_whole, points, run, steps, submissions
from oncelog.core.invariants import History
from oncelog.core.values import SetMember, Submission
from oncelog.engine.log import Log
from oncelog.errors import StoreUnavailableError
from oncelog.stores.sqlite import SqliteStore
from oncelog.testing.disk import Disk, Fault

pytestmark = pytest.mark.usefixtures("early_merges")

BATCHES = 4
SAMPLE = 9
"""Every so manieth fault goes through the engine too."""

FAULTS = [(fault, sticky) for fault in Fault for sticky in (False, True)]
NAMES = [f"{fault.name.lower()} {'until repaired' if sticky else 'once'}" for fault, sticky in FAULTS]


def demand_told(error: StoreUnavailableError, fault: Fault) -> None:
    """The error says what is wrong, and what to do."""
    assert fault.value in str(error)
    assert "[SQLITE_" in str(error)


def demand_all_or_nothing(history: History) -> None:
    """The new writes of a batch are all there, or none is."""
    stored = {(record.policy, record.key) for record in history.records}
    for number in range(1, BATCHES + 1):
        news = batch_of(number)[:4]
        assert sum((one.policy.name, one.key) in stored for one in news if isinstance(one, Submission)) in {0, 4}


async def through_the_store(disk: Disk, tally: Tally, fault: Fault, sticky: bool) -> int:
    """The workload, again and again until it has run through, on one store; gives how often the disk was in its way."""
    store, failures, is_open = tally.store(disk), 0, False
    while True:
        try:
            if not is_open:
                await store.open()
                is_open = True
            await steps(store, tally, BATCHES)
        except StoreUnavailableError as error:
            failures += 1
            demand_told(error, fault)
            if sticky:
                await demand_still_failing(store, fault, is_open)
                disk.repair()
            if is_open:
                history = await history_of(store, tally.answers)
                tally.demand(history)
                demand_all_or_nothing(history)
        else:
            break
    disk.lose_power()
    await store.close()
    return failures


async def demand_still_failing(store: SqliteStore, fault: Fault, is_open: bool) -> None:
    """While the disk is broken nothing new is taken, and the error stays the same."""
    if is_open and fault is Fault.IO_ERROR:
        with pytest.raises(StoreUnavailableError) as caught:
            await steps(store, Tally(), 1)
        demand_told(caught.value, fault)
    elif not is_open:
        with pytest.raises(StoreUnavailableError) as caught:
            await store.open()
        demand_told(caught.value, fault)


@pytest.mark.rule("CO-10")
@pytest.mark.rule("CO-16")
@pytest.mark.parametrize(("fault", "sticky"), FAULTS, ids=NAMES)
def test_a_fault_at_every_operation_costs_nothing_but_a_retry(
    runner: asyncio.Runner, fault: Fault, sticky: bool
) -> None:
    failures = 0

    def fails(number: int) -> bool:
        nonlocal failures
        with Disk(forgets_failed_syncs=True) as disk:
            tally = Tally()
            disk.fail_at(number, fault, sticky=sticky)
            failures += runner.run(through_the_store(disk, tally, fault, sticky))
            was_reached = disk.count(fault) >= number
            disk.repair()
            demand_whole(runner.run(check(disk, tally)), BATCHES)
            return was_reached

    found = points(fails)
    say(f"{fault.name}, sticky {sticky}: at {found} operations, {failures} of them told to callers")
    assert found > 150
    assert failures > 100


async def submit_all(log: Log, tally: Tally, fault: Fault) -> int:
    """Submits the workload through the engine, each write on its own; gives how many were told of the fault."""
    failures = 0
    try:
        await log.submit(SetMember("chat/1", "user:ann"))
    except StoreUnavailableError as error:
        demand_told(error, fault)
        return 1

    async def submit(one: Submission) -> None:
        nonlocal failures
        try:
            verdict = await log.submit(one)
        except StoreUnavailableError as error:
            failures += 1
            demand_told(error, fault)
        else:
            tally.answers.append(answer_to(one, verdict))

    for number in range(1, BATCHES + 1):
        tally.clock.advance(1000)
        before = failures
        await asyncio.gather(*[submit(one) for one in batch_of(number) if isinstance(one, Submission)])
        if failures > before:
            return failures  # clients that number their writes stop at the first that has no answer
    try:
        await log.erase(key=submissions()[0].key)
    except StoreUnavailableError as error:
        demand_told(error, fault)
        failures += 1
    else:
        tally.erased.add(1)
    return failures


async def through_the_log(disk: Disk, tally: Tally, fault: Fault) -> None:
    """The workload on a log that is opened before the disk fails, until it has run through."""
    store = tally.store(disk)
    async with Log(store, clock=tally.clock) as log:
        while await submit_all(log, tally, fault):
            disk.repair()
        history = await history_of(store, tally.answers)
        tally.demand(history)
        demand_whole(history, BATCHES)
        disk.repair()
        disk.lose_power()


@pytest.mark.rule("CO-16")
@pytest.mark.parametrize(("fault", "sticky"), FAULTS, ids=NAMES)
def test_a_log_works_again_when_its_disk_does(
    runner: asyncio.Runner, fault: Fault, sticky: bool, is_soak: bool
) -> None:
    def opened(disk: Disk) -> int:
        async def opens() -> None:
            async with Log(Tally().store(disk)):
                pass

        runner.run(opens())
        return disk.count(fault)

    with Disk() as disk:
        first = opened(disk)
    step = 1 if is_soak else SAMPLE

    def fails(sample: int) -> bool:
        with Disk(forgets_failed_syncs=True) as disk:
            tally = Tally()
            number = first + 1 + (sample - 1) * step
            disk.fail_at(number, fault, sticky=sticky)
            runner.run(through_the_log(disk, tally, fault))
            was_reached = disk.count(fault) >= number
            demand_whole(runner.run(check(disk, tally)), BATCHES)
            return was_reached

    found = points(fails)
    say(f"{fault.name}, sticky {sticky}: at {found} operations of a running log")
    assert found > 100 // step


def syncs_of_the_workload(runner: asyncio.Runner) -> list[int]:
    """Which operations of the workload are syncs."""
    found: list[int] = []

    def kills(number: int) -> bool:
        with Disk() as disk:
            disk.kill_at_sync(number)
            with suppress(StoreUnavailableError):
                runner.run(run(disk, Tally(), BATCHES))
            found.append(disk.operations)
            return not disk.is_on

    points(kills)
    return found[:-1]


async def until_the_power_is_lost(disk: Disk, tally: Tally, syncs: int, seed: int) -> None:
    """Goes on after the disk was repaired, until the power is lost at a sync."""
    store, is_open, is_repaired = tally.store(disk), False, False
    while True:
        try:
            if not is_open:
                await store.open()
                is_open = True
            await steps(store, tally, BATCHES)
            break
        except StoreUnavailableError:
            if is_repaired:
                break
            is_repaired = True
            with suppress(StoreUnavailableError):  # once more, while the disk still fails
                await (steps(store, Tally(), 1) if is_open else store.open())
            disk.repair()
            disk.lose_power_at_sync(syncs, seed)
    await store.close()


@pytest.mark.rule("CO-10")
@pytest.mark.rule("CO-11")
def test_power_lost_soon_after_a_sync_failed(runner: asyncio.Runner, is_soak: bool) -> None:
    """What the failed sync left behind must not be built on: it is gone with the power, and the rest is not."""
    losses = 0
    for number in syncs_of_the_workload(runner):
        for seed, syncs in product(range(20 if is_soak else 3), (1, 2, 3)):
            with Disk(forgets_failed_syncs=True) as disk:
                tally = Tally()
                disk.fail_at(number, Fault.IO_ERROR, sticky=True)
                runner.run(until_the_power_is_lost(disk, tally, syncs, seed))
                losses += not disk.is_on
                disk.repair()
                disk.power_on()
                runner.run(check(disk, tally))
                runner.run(run(disk, tally, BATCHES))
                demand_whole(runner.run(check(disk, tally)), BATCHES)
    say(f"power lost {losses} times after a sync had failed")
    assert losses > 100
