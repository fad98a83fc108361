"""Log records about requests that fail because of the store."""

import logging
from pathlib import Path

import pytest

from oncelog.errors import CorruptError, DiskFullError, StoreUnavailableError
from oncelog.server import errors
from oncelog.server.errors import QUIET_POLLS, UNKNOWN_OUTCOME, StoreFailures, to_api_error
from oncelog.storage.sqlite import SqliteStore
from server.running_server import item, serving


@pytest.fixture
def failures(monkeypatch: pytest.MonkeyPatch) -> StoreFailures:
    fresh = StoreFailures()
    monkeypatch.setattr(errors, "store_failures", fresh)
    return fresh


def lines(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    """Return the level and text of the records at WARNING or above."""
    return [
        (record.levelname, record.message)
        for record in caplog.records
        if record.name == "oncelog.doors" and record.levelno >= logging.WARNING
    ]


BEGIN = ("ERROR", "the log could not serve a request: no room")


def end_record(count: int) -> tuple[str, str]:
    return ("WARNING", f"the log serves requests again, after {count} failed requests")


def test_start_and_end_of_a_failure_are_logged_once(failures: StoreFailures, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    for _ in range(3):
        assert to_api_error(DiskFullError("no room")).message == UNKNOWN_OUTCOME
    assert lines(caplog) == [BEGIN]
    assert len(caplog.records) == 3, "each request has a debug record"
    for _ in range(QUIET_POLLS):
        failures.poll()
    to_api_error(DiskFullError("no room"))  # a client retries seconds later
    for _ in range(QUIET_POLLS):
        failures.poll()
    assert lines(caplog) == [BEGIN]
    failures.poll()
    failures.poll()
    assert lines(caplog) == [BEGIN, end_record(4)]
    to_api_error(DiskFullError("no room"))
    assert lines(caplog) == [BEGIN, end_record(4), BEGIN]


def test_another_failure_reason_is_also_logged(failures: StoreFailures, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        to_api_error(DiskFullError("no room"))
        to_api_error(StoreUnavailableError("an I/O error"))
    assert lines(caplog) == [BEGIN, ("ERROR", "the log could not serve a request: an I/O error")]
    for _ in range(QUIET_POLLS + 1):
        failures.poll()
    assert lines(caplog)[2:] == [end_record(4)]


@pytest.mark.usefixtures("failures")
def test_corruption_is_logged_for_every_request(caplog: pytest.LogCaptureFixture) -> None:
    """Each request may find a different damaged record."""
    for place in (1, 2):
        to_api_error(CorruptError(f"record {place} is damaged"))
    assert [text for _, text in lines(caplog)] == [
        "the log could not serve a request: record 1 is damaged",
        "the log could not serve a request: record 2 is damaged",
    ]


def test_end_is_not_logged_without_a_failure(failures: StoreFailures, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3 * QUIET_POLLS):
        failures.poll()
    to_api_error(CorruptError("damaged"))
    for _ in range(3 * QUIET_POLLS):
        failures.poll()
    assert len(lines(caplog)) == 1


@pytest.mark.usefixtures("failures")
async def test_server_logs_a_full_disk_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail_with_full_disk(*_: object) -> None:
        raise DiskFullError("no room")

    async with serving(tmp_path) as served:
        with monkeypatch.context() as patched:
            patched.setattr(SqliteStore, "commit", fail_with_full_disk)
            for number in range(1, 6):
                assert (await served.submit(item(number))).refusal == (500, "server_error")
        assert BEGIN in lines(caplog)
        assert (await served.submit(item(1))).status in {200, 503}
        for _ in range(QUIET_POLLS + 1):
            served.server.run_checks()
        assert [line for line in lines(caplog) if line[1].startswith("the log ")] == [BEGIN, end_record(5)]
