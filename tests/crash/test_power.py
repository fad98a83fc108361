"""The power is lost at every sync, and every answer to callers and readers remains valid."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from crash.scripted_workload import (
    BATCHES,
    NAME,
    Tally,
    check_complete,
    check_verified,
    commit,
    count_points,
    reopen_and_check,
    run_workload,
    submissions,
)
from crash.store_history import say
from oncelog.errors import StoreUnavailableError
from oncelog.testing.disk import Disk

pytestmark = pytest.mark.usefixtures("small_slices")

SEEDS = (None, 1, 2, 3)
"""None loses all pending writes. A seed keeps some of them completely and others in part."""
SOAK_SEEDS = (None, *range(1, 60))
CREATION_SEEDS = 20
SOAK_CREATION_SEEDS = 200


@pytest.fixture
def copies(tmp_path: Path) -> Path:
    directory = tmp_path / "copies"
    directory.mkdir()
    return directory


@pytest.fixture
def disk() -> Iterator[Disk]:
    with Disk() as disk:
        yield disk


async def is_interrupted(disk: Disk, tally: Tally) -> bool:
    """Run the workload and return whether the planned disk fault interrupted it with the right error."""
    try:
        await run_workload(disk, tally)
    except StoreUnavailableError as error:
        check_error(error)
    return not disk.is_on


def check_error(error: StoreUnavailableError) -> None:
    assert "[SQLITE_" in str(error)


async def test_workload_keeps_key_index_busy(disk: Disk, copies: Path) -> None:
    tally = Tally()
    await run_workload(disk, tally)
    passed = check_verified(disk, copies)
    assert passed.erased == 2
    assert passed.segments > 1
    assert passed.sealed_keys > 30
    check_complete(await reopen_and_check(disk, tally))


@pytest.mark.rule("CO-10")
@pytest.mark.rule("CO-11")
@pytest.mark.rule("CO-12")
async def test_power_loss_at_any_sync_loses_no_acknowledged_write(copies: Path, is_soak: bool) -> None:
    async def lose_power_at(number: int, seed: int | None) -> bool:
        with Disk() as disk:
            tally = Tally()
            disk.lose_power_at_sync(number, seed)
            if not await is_interrupted(disk, tally):
                return False
            disk.power_on()
            await reopen_and_check(disk, tally)
            check_verified(disk, copies)
            await run_workload(disk, tally)
            disk.lose_power()
            check_complete(await reopen_and_check(disk, tally))
            check_verified(disk, copies)
            return True

    for seed in SOAK_SEEDS if is_soak else SEEDS:
        found = await count_points(lambda number, seed=seed: lose_power_at(number, seed))  # type: ignore[misc]
        say(f"seed {seed}: power lost at {found} syncs")
        assert found > BATCHES


@pytest.mark.rule("CO-10")
async def test_second_power_loss_during_recovery_loses_no_acknowledged_write(copies: Path) -> None:
    """The second power loss comes at each sync of the second run, after a loss in the middle of the first run."""

    async def lose_power_at(number: int) -> bool:
        with Disk() as disk:
            tally = Tally()
            disk.lose_power_at_sync(14, seed=number)
            assert await is_interrupted(disk, tally)
            disk.power_on()
            disk.lose_power_at_sync(number, seed=number + 1)
            if not await is_interrupted(disk, tally):
                return False
            disk.power_on()
            await run_workload(disk, tally)
            disk.lose_power()
            check_complete(await reopen_and_check(disk, tally))
            check_verified(disk, copies)
            return True

    assert await count_points(lose_power_at) > BATCHES


@pytest.mark.rule("CO-11")
@pytest.mark.rule("CO-16")
@pytest.mark.parametrize("failed", [False, True], ids=["killed before the sync", "killed after the sync failed"])
async def test_retry_of_commit_left_unsynced_is_answered_only_after_a_sync(copies: Path, failed: bool) -> None:
    """A process is killed between writing a commit and syncing it, so the outcome is unknown.

    The next process finds the commit in the write-ahead log, and SQLite accepts it. The commit is not durable yet, so
    a retry must not be answered from it before a sync succeeds. After a failed sync, one more sync is not enough.
    """

    async def retry_stored_writes(disk: Disk, tally: Tally) -> None:
        store = tally.store(disk)
        await store.open()
        wanted = submissions()
        known = await store.find_keys([(one.policy.name, one.scope, one.client, one.key) for one in wanted])
        await commit(store, tally, [one for one, found in zip(wanted, known, strict=True) if found is not None])
        disk.lose_power()
        await store.close()

    async def kill_at(number: int) -> bool:
        with Disk(forgets_failed_syncs=failed) as disk:
            tally = Tally()
            disk.kill_at_sync(number)
            if not await is_interrupted(disk, tally):
                return False
            disk.power_on()
            await retry_stored_writes(disk, tally)
            await reopen_and_check(disk, tally)
            await run_workload(disk, tally)
            check_complete(await reopen_and_check(disk, tally))
            check_verified(disk, copies)
            return True

    assert await count_points(kill_at) > BATCHES


@pytest.mark.rule("CO-10")
async def test_power_loss_during_creation_leaves_a_file_that_can_become_a_log(copies: Path, is_soak: bool) -> None:
    torn = set()

    async def open_and_close(disk: Disk) -> None:
        store = Tally().store(disk)
        await store.open()
        await store.close()

    async def lose_power_at(number: int, seed: int | None) -> bool:
        with Disk() as disk:
            disk.lose_power_at_sync(number, seed)
            try:
                await open_and_close(disk)
            except StoreUnavailableError:
                assert not disk.is_on
            if disk.is_on:
                return False
            disk.power_on()
            header = disk.head(NAME, 100)
            torn.add("no file" if header is None else "empty" if not header else "zeros" if not any(header) else "log")
            tally = Tally()
            await run_workload(disk, tally, batches=1)
            disk.lose_power()
            check_complete(await reopen_and_check(disk, tally), batches=1)
            check_verified(disk, copies)
            return True

    for seed in (None, *range(SOAK_CREATION_SEEDS if is_soak else CREATION_SEEDS)):
        assert await count_points(lambda number, seed=seed: lose_power_at(number, seed)) >= 4  # type: ignore[misc]
    assert torn == {"no file", "empty", "zeros", "log"}
