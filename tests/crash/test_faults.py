"""The disk fails at any operation, once or until repaired. Errors contain the fault, and batches remain atomic.

The simulated disk behaves badly: data of a failed sync is never written, although it can be read until the power is
lost. The power is lost at the end of each run, before the store can be closed.
"""

import asyncio
from contextlib import suppress
from itertools import product

import pytest

from core.invariants import History
from crash.scripted_workload import (
    Tally,
    build_batch,
    check_complete,
    count_points,
    reopen_and_check,
    run_workload,
    submissions,
    submit_workload,
)
from crash.store_history import build_answer, read_history, say
from oncelog.core.values import SetMember, Submission
from oncelog.engine.log import Log
from oncelog.errors import StoreUnavailableError
from oncelog.storage.sqlite import SqliteStore
from oncelog.testing.disk import Disk, Fault

pytestmark = pytest.mark.usefixtures("early_merges")

BATCHES = 4
STRIDE = 2
"""Without --soak, the disk fails at every second operation of the store: once at odd ones, and until repaired at even
ones.
"""
LOG_STRIDE = 9
"""Without --soak, the disk fails at every ninth operation of the log."""
SEEDS = 2
SOAK_SEEDS = 20

FAULTS = [(fault, sticky) for fault in Fault for sticky in (False, True)]
NAMES = [f"{fault.name.lower()} {'until repaired' if sticky else 'once'}" for fault, sticky in FAULTS]


def check_error(error: StoreUnavailableError, fault: Fault) -> None:
    """Assert that the error contains the fault and the SQLite error code."""
    assert fault.value in str(error)
    assert "[SQLITE_" in str(error)


def check_atomic(history: History) -> None:
    """Assert that either all new writes of a batch are stored or none are."""
    stored = {(record.policy, record.key) for record in history.records}
    for number in range(1, BATCHES + 1):
        news = build_batch(number)[:4]
        assert sum((one.policy.name, one.key) in stored for one in news if isinstance(one, Submission)) in {0, 4}


async def run_on_store(disk: Disk, tally: Tally, fault: Fault, sticky: bool) -> int:
    """Repeat the workload on one store until it completes, and return the number of failures."""
    store, failures, is_open = tally.store(disk), 0, False
    while True:
        try:
            if not is_open:
                await store.open()
                is_open = True
            await submit_workload(store, tally, BATCHES)
        except StoreUnavailableError as error:
            failures += 1
            check_error(error, fault)
            if sticky:
                await check_still_failing(store, fault, is_open)
                disk.repair()
            if is_open:
                history = await read_history(store, tally.answers)
                tally.check(history)
                check_atomic(history)
        else:
            break
    disk.lose_power()
    await store.close()
    return failures


async def check_still_failing(store: SqliteStore, fault: Fault, is_open: bool) -> None:
    """Assert that the store refuses new writes with the same error while the disk is broken."""
    if is_open and fault is Fault.IO_ERROR:
        with pytest.raises(StoreUnavailableError) as caught:
            await submit_workload(store, Tally(), 1)
        check_error(caught.value, fault)
    elif not is_open:
        with pytest.raises(StoreUnavailableError) as caught:
            await store.open()
        check_error(caught.value, fault)


@pytest.mark.rule("CO-10")
@pytest.mark.rule("CO-16")
@pytest.mark.parametrize(("fault", "sticky"), FAULTS, ids=NAMES)
async def test_store_with_a_failing_disk_operation_needs_only_a_retry(
    fault: Fault, sticky: bool, is_soak: bool
) -> None:
    failures = 0
    step = 1 if is_soak else STRIDE

    async def fails(number: int) -> bool:
        nonlocal failures
        with Disk(forgets_failed_syncs=True) as disk:
            tally = Tally()
            disk.fail_at(number, fault, sticky=sticky)
            failures += await run_on_store(disk, tally, fault, sticky)
            was_reached = disk.count(fault) >= number
            disk.repair()
            check_complete(await reopen_and_check(disk, tally), BATCHES)
            return was_reached

    first = 1 if is_soak else 1 + FAULTS.index((fault, sticky)) % STRIDE
    found = await count_points(fails, first, step)
    say(f"{fault.name}, sticky {sticky}: at {found} operations, {failures} reported to callers")
    assert found > 150 // step
    assert failures > 100 // step


async def submit_all(log: Log, tally: Tally, fault: Fault) -> int:
    """Submit the workload through the engine, one write per request, and return the number of failures."""
    failures = 0
    try:
        await log.submit(SetMember("chat/1", "user:ann"))
    except StoreUnavailableError as error:
        check_error(error, fault)
        return 1

    async def submit(one: Submission) -> None:
        nonlocal failures
        try:
            verdict = await log.submit(one)
        except StoreUnavailableError as error:
            failures += 1
            check_error(error, fault)
        else:
            tally.answers.append(build_answer(one, verdict))

    for number in range(1, BATCHES + 1):
        tally.clock.advance(1000)
        before = failures
        await asyncio.gather(*[submit(one) for one in build_batch(number) if isinstance(one, Submission)])
        if failures > before:
            return failures  # clients with client sequences stop at the first unanswered write
    try:
        await log.erase(key=submissions()[0].key)
    except StoreUnavailableError as error:
        check_error(error, fault)
        failures += 1
    else:
        tally.erased.add(1)
    return failures


async def run_on_log(disk: Disk, tally: Tally, fault: Fault) -> None:
    """Open a log before the disk fails, and repeat the workload until it completes."""
    store = tally.store(disk)
    async with Log(store, clock=tally.clock) as log:
        while await submit_all(log, tally, fault):
            disk.repair()
        history = await read_history(store, tally.answers)
        tally.check(history)
        check_complete(history, BATCHES)
        disk.repair()
        disk.lose_power()


@pytest.mark.rule("CO-16")
@pytest.mark.parametrize(("fault", "sticky"), FAULTS, ids=NAMES)
async def test_log_commits_again_after_disk_recovers(fault: Fault, sticky: bool, is_soak: bool) -> None:
    with Disk() as disk:
        async with Log(Tally().store(disk)):
            pass
        opening = disk.count(fault)
    step = 1 if is_soak else LOG_STRIDE

    async def fails(number: int) -> bool:
        with Disk(forgets_failed_syncs=True) as disk:
            tally = Tally()
            disk.fail_at(number, fault, sticky=sticky)
            await run_on_log(disk, tally, fault)
            was_reached = disk.count(fault) >= number
            check_complete(await reopen_and_check(disk, tally), BATCHES)
            return was_reached

    found = await count_points(fails, opening + 1, step)
    say(f"{fault.name}, sticky {sticky}: at {found} operations of a running log")
    assert found > 100 // step


async def find_syncs() -> list[int]:
    """Return which operations of the workload are syncs."""
    found: list[int] = []

    async def kill_at(number: int) -> bool:
        with Disk() as disk:
            disk.kill_at_sync(number)
            with suppress(StoreUnavailableError):
                await run_workload(disk, Tally(), BATCHES)
            found.append(disk.operations)
            return not disk.is_on

    await count_points(kill_at)
    return found[:-1]


async def run_until_power_loss(disk: Disk, tally: Tally, syncs: int, seed: int) -> None:
    """Continue after the disk is repaired, until the power is lost at a sync."""
    store, is_open, is_repaired = tally.store(disk), False, False
    while True:
        try:
            if not is_open:
                await store.open()
                is_open = True
            await submit_workload(store, tally, BATCHES)
            break
        except StoreUnavailableError:
            if is_repaired:
                break
            is_repaired = True
            with suppress(StoreUnavailableError):  # Once more, while the disk still fails.
                await (submit_workload(store, Tally(), 1) if is_open else store.open())
            disk.repair()
            disk.lose_power_at_sync(syncs, seed)
    await store.close()


@pytest.mark.rule("CO-10")
@pytest.mark.rule("CO-11")
async def test_power_loss_after_failed_sync_loses_no_acknowledged_write(is_soak: bool) -> None:
    """Data of the failed sync disappears when the power is lost, so later acknowledgements must not depend on it."""
    losses = 0
    syncs = await find_syncs()
    seeds = range(SOAK_SEEDS if is_soak else SEEDS)
    for number in syncs:
        for seed, later in product(seeds, (1, 2, 3)):
            with Disk(forgets_failed_syncs=True) as disk:
                tally = Tally()
                disk.fail_at(number, Fault.IO_ERROR, sticky=True)
                await run_until_power_loss(disk, tally, later, seed)
                losses += not disk.is_on
                disk.repair()
                disk.power_on()
                await reopen_and_check(disk, tally)
                await run_workload(disk, tally, BATCHES)
                check_complete(await reopen_and_check(disk, tally), BATCHES)
    say(f"power lost {losses} times after a failed sync, with {len(syncs)} syncs")
    assert losses > 2 * len(syncs) * len(seeds)
