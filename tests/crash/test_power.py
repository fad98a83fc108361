"""The power is lost at every moment at which it can make a difference, and nothing that was told becomes untrue."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from crash.observing import say
from crash.scripted import (
    BATCHES,
    NAME,
    Tally,
    check,
    commit,
    demand_verified,
    demand_whole,
    points,
    run,
    submissions,
)
from oncelog.errors import StoreUnavailableError
from oncelog.testing.disk import Disk

pytestmark = pytest.mark.usefixtures("small_slices")

SEEDS = (None, 1, 2, 3)


@pytest.fixture
def copies(tmp_path: Path) -> Path:
    directory = tmp_path / "copies"
    directory.mkdir()
    return directory


@pytest.fixture
def disk() -> Iterator[Disk]:
    with Disk() as disk:
        yield disk


def interrupted(runner: asyncio.Runner, disk: Disk, tally: Tally) -> bool:
    """Runs the workload; whether it was stopped by what the disk has planned, then with the right error."""
    try:
        runner.run(run(disk, tally))
    except StoreUnavailableError as error:
        demand_told(error)
    return not disk.is_on


def demand_told(error: StoreUnavailableError) -> None:
    assert "[SQLITE_" in str(error)


def seeds(is_soak: bool) -> Iterator[int | None]:
    yield from SEEDS
    if is_soak:
        yield from range(4, 60)


def test_the_workload_keeps_the_key_index_busy(runner: asyncio.Runner, disk: Disk, copies: Path) -> None:
    tally = Tally()
    runner.run(run(disk, tally))
    passed = demand_verified(disk, copies)
    assert passed.erased == 2
    assert passed.segments > 1
    assert passed.sealed_keys > 30
    demand_whole(runner.run(check(disk, tally)))


@pytest.mark.rule("CO-10")
@pytest.mark.rule("CO-11")
@pytest.mark.rule("CO-12")
def test_power_lost_at_every_sync_costs_nothing_that_was_told(
    runner: asyncio.Runner, copies: Path, is_soak: bool
) -> None:
    def loses(number: int, seed: int | None) -> bool:
        with Disk() as disk:
            tally = Tally()
            disk.lose_power_at_sync(number, seed)
            if not interrupted(runner, disk, tally):
                return False
            disk.power_on()
            runner.run(check(disk, tally))
            demand_verified(disk, copies)
            runner.run(run(disk, tally))
            disk.lose_power()
            demand_whole(runner.run(check(disk, tally)))
            demand_verified(disk, copies)
            return True

    for seed in seeds(is_soak):
        found = points(lambda number, seed=seed: loses(number, seed))  # type: ignore[misc]
        say(f"seed {seed}: power lost at {found} syncs")
        assert found > BATCHES


@pytest.mark.rule("CO-10")
def test_power_lost_while_recovering_from_a_loss_of_power(runner: asyncio.Runner, copies: Path) -> None:
    """At every sync of the second run, after a loss in the middle of the first one."""

    def loses(number: int) -> bool:
        with Disk() as disk:
            tally = Tally()
            disk.lose_power_at_sync(14, seed=number)
            assert interrupted(runner, disk, tally)
            disk.power_on()
            disk.lose_power_at_sync(number, seed=number + 1)
            if not interrupted(runner, disk, tally):
                return False
            disk.power_on()
            runner.run(run(disk, tally))
            disk.lose_power()
            demand_whole(runner.run(check(disk, tally)))
            demand_verified(disk, copies)
            return True

    assert points(loses) > BATCHES


@pytest.mark.rule("CO-11")
@pytest.mark.rule("CO-16")
@pytest.mark.parametrize("failed", [False, True], ids=["killed before the sync", "killed after the sync failed"])
def test_what_a_killed_process_left_unsynced_is_durable_before_anybody_is_told(
    runner: asyncio.Runner, copies: Path, failed: bool
) -> None:
    """A process is killed between writing a commit and syncing it: the outcome is unknown, also to itself.

    The next process finds the commit in the write-ahead log, where SQLite believes it. Nobody has synced it yet, so
    a retry must not be answered from it before somebody does. After a sync that failed this is more than syncing.
    """

    async def retry_what_is_known(disk: Disk, tally: Tally) -> None:
        store = tally.store(disk)
        await store.open()
        wanted = submissions()
        known = await store.remembered([(one.policy.name, one.scope, one.client, one.key) for one in wanted])
        await commit(store, tally, [one for one, there in zip(wanted, known, strict=True) if there is not None])
        disk.lose_power()
        await store.close()

    def kills(number: int) -> bool:
        with Disk(forgets_failed_syncs=failed) as disk:
            tally = Tally()
            disk.kill_at_sync(number)
            if not interrupted(runner, disk, tally):
                return False
            disk.power_on()
            runner.run(retry_what_is_known(disk, tally))
            runner.run(check(disk, tally))
            runner.run(run(disk, tally))
            demand_whole(runner.run(check(disk, tally)))
            demand_verified(disk, copies)
            return True

    assert points(kills) > BATCHES


@pytest.mark.rule("CO-10")
def test_power_lost_while_a_log_is_made_leaves_a_file_that_can_be_made_a_log(
    runner: asyncio.Runner, copies: Path, is_soak: bool
) -> None:
    torn = set()

    async def open_and_close(disk: Disk) -> None:
        store = Tally().store(disk)
        await store.open()
        await store.close()

    def loses(number: int, seed: int | None) -> bool:
        with Disk() as disk:
            disk.lose_power_at_sync(number, seed)
            try:
                runner.run(open_and_close(disk))
            except StoreUnavailableError:
                assert not disk.is_on
            if disk.is_on:
                return False
            disk.power_on()
            header = disk.head(NAME, 100)
            torn.add("no file" if header is None else "empty" if not header else "zeros" if not any(header) else "log")
            tally = Tally()
            runner.run(run(disk, tally, batches=1))
            disk.lose_power()
            demand_whole(runner.run(check(disk, tally)), batches=1)
            demand_verified(disk, copies)
            return True

    for seed in (None, *range(200 if is_soak else 20)):
        assert points(lambda number, seed=seed: loses(number, seed)) >= 4  # type: ignore[misc]
    assert torn == {"no file", "empty", "zeros", "log"}
