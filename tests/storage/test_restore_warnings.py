"""Warnings that a log may have been restored without a new epoch."""

import logging
from pathlib import Path

import pytest

import oncelog
from core.item_builders import event
from databases import BOTH_STORES, POSTGRES, is_postgres, log_at, query
from oncelog.core.values import Request
from oncelog.errors import HistoryChangedError
from oncelog.storage.postgres.store import PostgresStore
from oncelog.storage.sqlite.store import SqliteStore
from oncelog.testing.clock import ManualClock


def list_warnings(caplog: pytest.LogCaptureFixture, text: str) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING and text in one.getMessage()]


@pytest.mark.rule("CO-12")
@BOTH_STORES
def test_reader_ahead_of_the_log_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with oncelog.open_blocking(log_at(tmp_path / "log.db")) as log:
        log.submit(event(1, partitions=("p",)))
        log.read(after=1)
        assert list_warnings(caplog, "a reader of") == []
        for cursor in (19, 20):
            with pytest.raises(HistoryChangedError):
                log.read(after=cursor)
    (warning,) = list_warnings(caplog, "a reader of")
    assert warning.startswith("a reader of lane 0 sent the cursor 19, ahead of the newest record, 1.")
    assert "usually a mistake of the client" in warning
    assert "oncelog epoch LOG --renew" in warning


@pytest.mark.rule("CO-12")
@BOTH_STORES
@pytest.mark.parametrize(("behind_ms", "above"), [(10_000, None), (10_001, None), (86_400_000, 5_000_000)])
async def test_leap_with_a_clock_behind_the_log_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, behind_ms: int, above: int | None
) -> None:
    clock = ManualClock()
    store = (PostgresStore if is_postgres() else SqliteStore)(log_at(tmp_path / "log.db"), clock=clock)
    await store.open()
    try:
        await store.commit([Request((event(1),))])
        clock.restart()
        clock.jump(-behind_ms)
        renewed = await store.renew_epoch(above)
    finally:
        await store.close()
    warnings = list_warnings(caplog, "behind the last commit of the log")
    if above is None and behind_ms > 10_000:
        assert renewed.above == 1_000_001
        (warning,) = warnings
        assert "10001 ms behind" in warning
        assert "only 1000000 above the highest one" in warning
        assert "oncelog epoch LOG --renew --above N" in warning
    else:
        assert warnings == []


@pytest.mark.rule("CO-12")
@pytest.mark.stores(POSTGRES)
def test_changed_timeline_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    address = log_at(tmp_path / "log.db")
    for _ in range(2):
        with oncelog.open_blocking(address) as log:
            log.submit(event(1, partitions=("p",)))
    assert list_warnings(caplog, "timeline") == []
    ((current,),) = query(address, "SELECT timeline FROM oncelog_state")
    query(address, "UPDATE oncelog_state SET timeline = '000000FF'")
    for _ in range(2):
        with oncelog.open_blocking(address) as log:
            log.submit(event(1, partitions=("p",)))
            log.read(after=0)
    (warning,) = list_warnings(caplog, "timeline")
    assert f"the server's timeline is {current}, but was 000000FF before" in warning
    assert "oncelog epoch ADDRESS --renew" in warning
    assert query(address, "SELECT timeline FROM oncelog_state") == [(current,)]
