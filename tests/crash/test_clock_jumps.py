"""If the clock is wrong, the log raises an error instead of committing, and does not forget keys."""

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from databases import BOTH_STORES, is_postgres, log_at
from oncelog.core.values import Committed, Receipt, Replayed, SetMember, Settings, Submission, Verdict
from oncelog.engine.limits import Limits
from oncelog.engine.log import Log
from oncelog.errors import ClockJumpedError
from oncelog.storage.postgres import PostgresStore
from oncelog.storage.sqlite import SqliteStore
from oncelog.storage.store import Store
from oncelog.testing.clock import ManualClock
from oncelog.testing.contract.assertions import assert_committed, assert_replayed
from oncelog.testing.contract.writes import DAY_MS, HOUR_MS, event, message, transaction

pytestmark = BOTH_STORES

SETTINGS = Settings(eviction_interval=1)
"""Each commit evicts all expired keys."""
FIRST = (event(1), message(2), transaction(3, 1))
"""Three writes. Their keys are remembered forever, for seven days and for 24 hours."""


def open_log(path: Path, clock: ManualClock, **limits: int) -> Log:
    store: Store
    if is_postgres():
        store = PostgresStore(log_at(path), SETTINGS, clock=clock, keep_clock_ms=0)
    else:
        store = SqliteStore(log_at(path), SETTINGS, clock=clock)
    return Log(store, clock=clock, limits=Limits(**limits))


async def create_log(path: Path, clock: ManualClock) -> list[Receipt]:
    """Create a log with three writes and close it."""
    async with open_log(path, clock) as log:
        await log.submit(SetMember("chat/1", "user:ann"))
        return [assert_committed(await log.submit(one)) for one in FIRST]


async def check_jumped(attempt: Coroutine[Any, Any, Verdict]) -> ClockJumpedError:
    with pytest.raises(ClockJumpedError, match="oncelog clock LOG --confirm") as caught:
        await attempt
    return caught.value


async def check_remembered(log: Log, receipts: list[Receipt]) -> None:
    assert [assert_replayed(await log.submit(one)).receipt for one in FIRST] == receipts


@pytest.mark.rule("CO-17")
@pytest.mark.parametrize("ahead_ms", [25 * HOUR_MS, 8 * DAY_MS])
@pytest.mark.parametrize("cache", [0, 100], ids=["from the store", "from memory"])
async def test_forward_jump_stops_commits_and_expires_no_key(tmp_path: Path, ahead_ms: int, cache: int) -> None:
    clock = ManualClock()
    receipts = await create_log(tmp_path / "log.db", clock)
    async with open_log(tmp_path / "log.db", clock, cache_entries_max=cache) as log:
        await check_remembered(log, receipts)
        clock.advance(1000)
        clock.jump(ahead_ms)
        for new in (event(4), message(5), transaction(6, 2), SetMember("chat/2", "user:bob")):
            error = await check_jumped(log.submit(new))
            assert error.ahead_ms == ahead_ms
            await check_remembered(log, receipts)
        clock.jump(-ahead_ms)
        for number, new in enumerate((event(4), message(5), transaction(6, 2))):
            clock.advance(1000)
            receipt = assert_committed(await log.submit(new))
            assert receipt.log_time_ms == receipts[number].log_time_ms + (2 + number) * 1000
        await check_remembered(log, receipts)


@pytest.mark.rule("CO-17")
async def test_jump_while_log_was_closed_is_detected_at_open(tmp_path: Path) -> None:
    clock = ManualClock()
    receipts = await create_log(tmp_path / "log.db", clock)
    clock.jump(25 * HOUR_MS)
    for _ in range(2):
        async with open_log(tmp_path / "log.db", clock) as log:
            await check_remembered(log, receipts)
            await check_jumped(log.submit(transaction(6, 2)))
            await check_remembered(log, receipts)


@pytest.mark.rule("CO-17")
async def test_commits_continue_after_operator_confirms_the_clock(tmp_path: Path) -> None:
    clock = ManualClock()
    receipts = await create_log(tmp_path / "log.db", clock)
    clock.jump(25 * HOUR_MS)
    async with open_log(tmp_path / "log.db", clock) as log:
        await check_jumped(log.submit(event(4)))
        await log.confirm_clock()
        receipt = assert_committed(await log.submit(event(4)))
        assert receipt.log_time_ms == receipts[0].log_time_ms + 25 * HOUR_MS
        assert_committed(
            await log.submit(transaction(6, 1, client="c2"))
        )  # evicts, because a day of log time has passed
        assert assert_committed(await log.submit(FIRST[2])).sequence == 3
    async with open_log(tmp_path / "log.db", clock) as log:
        clock.advance(1000)
        assert_committed(await log.submit(event(5)))


@pytest.mark.rule("CO-15")
@pytest.mark.rule("CO-17")
async def test_retries_are_answered_and_new_writes_refused_in_one_batch_after_a_jump(tmp_path: Path) -> None:
    """All submissions are in one group commit, and the answer cache is disabled."""
    clock = ManualClock()
    await create_log(tmp_path / "log.db", clock)
    clock.jump(25 * HOUR_MS)
    async with open_log(tmp_path / "log.db", clock, cache_entries_max=0) as log:
        batch: list[Submission] = [event(4), FIRST[0], event(5), FIRST[1], FIRST[2], event(6), event(7)]
        answers = await asyncio.gather(*[log.submit(one) for one in batch], return_exceptions=True)
    jumped = ClockJumpedError
    assert [type(answer) for answer in answers] == [jumped, Replayed, jumped, Replayed, Replayed, jumped, jumped]


@pytest.mark.rule("CO-17")
@pytest.mark.parametrize("ahead_ms", [60_000, 25 * HOUR_MS])
async def test_clock_is_trusted_after_a_reboot(tmp_path: Path, ahead_ms: int) -> None:
    """The monotonic clock has restarted, so a jump is indistinguishable from a night without power."""

    clock = ManualClock()
    receipts = await create_log(tmp_path / "log.db", clock)
    clock.restart()
    clock.jump(ahead_ms)
    async with open_log(tmp_path / "log.db", clock) as log:
        receipt = assert_committed(await log.submit(event(4)))
        assert receipt.log_time_ms == receipts[0].log_time_ms + ahead_ms
        clock.jump(25 * HOUR_MS)
        await check_jumped(log.submit(event(5)))


@pytest.mark.rule("CO-17")
@pytest.mark.parametrize("is_restarted", [False, True])
async def test_log_time_never_goes_back_and_a_corrected_clock_is_not_a_jump(tmp_path: Path, is_restarted: bool) -> None:
    clock = ManualClock()
    path = tmp_path / "log.db"
    newest_ms = (await create_log(path, clock))[-1].log_time_ms
    clock.jump(-25 * HOUR_MS)
    log = open_log(path, clock)
    async with log:
        for number in range(4, 7):
            clock.advance(1000)
            assert assert_committed(await log.submit(event(number))).log_time_ms == newest_ms
        if not is_restarted:
            clock.jump(25 * HOUR_MS)
            assert assert_committed(await log.submit(event(7))).log_time_ms == newest_ms + 3000
    if is_restarted:
        clock.jump(25 * HOUR_MS)
        async with open_log(path, clock) as log:
            assert assert_committed(await log.submit(event(7))).log_time_ms == newest_ms + 3000


@pytest.mark.rule("CO-17")
async def test_time_without_commits_is_not_a_jump(tmp_path: Path) -> None:
    clock = ManualClock()
    await create_log(tmp_path / "log.db", clock)
    clock.advance(30 * DAY_MS)
    async with open_log(tmp_path / "log.db", clock) as log:
        assert isinstance(await log.submit(event(4)), Committed)
