"""The log of pauses: checkpoints and the key index add to it, and it stays small."""

import math
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from deadlines import until
from oncelog.core.latency import Cause
from oncelog.core.values import Request
from oncelog.storage.pauses import PAUSES_MAX, RECORDED_S_MIN, PauseFigures, PauseLog
from oncelog.storage.sqlite import SqliteStore
from oncelog.storage.sqlite.store import CHECKPOINT_RECORDS
from oncelog.testing.contract.writes import event


@pytest.fixture
def pauses() -> PauseLog:
    pauses = PauseLog()
    pauses.is_on = True
    return pauses


@pytest_asyncio.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    store = SqliteStore(tmp_path / "log.db", seal_keys=64)
    await store.open()
    yield store
    await store.close()


def test_pauses_are_recorded_only_while_the_log_is_on() -> None:
    pauses = PauseLog()
    pauses.add(Cause.GC, 1.0, 2.0)
    with pauses.measure(Cause.MERGE):
        pass
    assert pauses.list_after(0.0) == []
    assert pauses.take_figures() == {}


def test_only_pauses_that_ended_after_a_time_are_listed(pauses: PauseLog) -> None:
    for number in range(4):
        pauses.add(Cause.GC, float(number), number + 0.5)
    assert sorted(pauses.list_after(1.5)) == [(2.0, 2.5, Cause.GC), (3.0, 3.5, Cause.GC)]


def test_pause_is_listed_while_it_lasts(pauses: PauseLog) -> None:
    with pauses.measure(Cause.CHECKPOINT):
        [(start_s, end_s, cause)] = pauses.list_after(1e12)
        assert (end_s, cause) == (math.inf, Cause.CHECKPOINT)
        time.sleep(2 * RECORDED_S_MIN)
    assert pauses.list_after(1e12) == []
    [(kept_s, end_s, _)] = pauses.list_after(0.0)
    assert kept_s == start_s
    assert end_s - start_s >= 2 * RECORDED_S_MIN


def test_short_pauses_are_ignored(pauses: PauseLog) -> None:
    pauses.add(Cause.GC, 1.0, 1.0 + RECORDED_S_MIN / 2)
    assert pauses.list_after(0.0) == []
    assert pauses.take_figures() == {}


def test_number_of_kept_pauses_is_limited(pauses: PauseLog) -> None:
    for number in range(PAUSES_MAX + 10):
        pauses.add(Cause.GC, float(number), number + 0.25)
    assert len(pauses.list_after(0.0)) == PAUSES_MAX


def test_figures_are_those_since_the_last_call(pauses: PauseLog) -> None:
    pauses.add(Cause.GC, 1.0, 1.5)
    pauses.add(Cause.GC, 2.0, 2.25)
    assert pauses.take_figures() == {Cause.GC: PauseFigures(2, 750.0, 500.0)}
    assert pauses.take_figures() == {}


async def test_store_records_checkpoints_and_work_on_the_key_index(store: SqliteStore) -> None:
    store.pauses.is_on = True
    for first in range(1, CHECKPOINT_RECORDS + 1, 256):
        await store.commit([Request(tuple(event(number) for number in range(first, first + 256)))])
    figures = await until(lambda: (found := store.pauses._figures).keys() >= {Cause.CHECKPOINT, Cause.MERGE} and found)
    assert figures[Cause.CHECKPOINT].total_ms > 0


@pytest.mark.parametrize("count", [1, 300])
async def test_result_has_the_times_of_its_commit(store: SqliteStore, count: int) -> None:
    result = await store.commit([Request(tuple(event(number) for number in range(1, count + 1)))])
    assert 0 < result.prepared_s <= result.synced_s - result.sync_s + 1e-6 < result.synced_s
    again = await store.commit([Request((event(1),))])
    assert again.synced_s == 0, "a retry changes nothing"
