"""Rate limit on log lines that clients can cause."""

import logging
from pathlib import Path

import pytest

from oncelog.errors import StoreUnavailableError
from oncelog.server.limits import ApiLimits
from oncelog.server.rate_limiter import LINES_MAX, LogLimiter
from oncelog.testing.clock import ManualClock
from security.raw_websocket import frame, upgrade, wait_closed
from server.raw_http import raw_connection
from server.running_server import serving


def written(caplog: pytest.LogCaptureFixture, message: str) -> list[logging.LogRecord]:
    return [one for one in caplog.records if one.message == message]


def total(lines: list[logging.LogRecord]) -> int:
    """Return the number of events that the lines report."""
    return len(lines) + sum(getattr(one, "suppressed", 0) for one in lines)


def test_lines_above_the_limit_are_counted_in_the_next_line(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    limiter = LogLimiter(clock.elapsed_ms, lines_max=2)
    for number in range(10):
        limiter.warn("refused", address=f"192.0.2.{number}")
    limiter.warn("another message")
    assert [one.address for one in written(caplog, "refused")] == ["192.0.2.0", "192.0.2.1"]  # type: ignore[attr-defined]
    assert len(written(caplog, "another message")) == 1
    clock.advance(1000)
    limiter.warn("refused", address="192.0.2.10")
    assert total(written(caplog, "refused")) == 11


def test_flush_reports_the_suppressed_rest_of_a_burst_once(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    limiter = LogLimiter(clock.elapsed_ms, lines_max=1)
    for number in range(5):
        limiter.log(logging.ERROR, "refused", address=f"192.0.2.{number}")
    limiter.flush()
    assert len(written(caplog, "refused")) == 1
    clock.advance(1000)
    limiter.flush()
    limiter.flush()
    last = written(caplog, "refused")[-1]
    assert (last.address, last.suppressed, last.levelname) == ("192.0.2.4", 3, "ERROR")  # type: ignore[attr-defined]
    assert total(written(caplog, "refused")) == 5


async def test_connections_that_send_garbage_write_a_few_lines_with_their_address(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = ManualClock()
    message = "received data is not valid HTTP"
    async with serving(tmp_path, clock=clock) as served:
        for _ in range(300):
            async with raw_connection(served) as connection:
                connection.send(b"GET / HTTP/1.1\r\nsecret-token \x00\r\n\r\n")
                assert (await connection.read_answer())[0] == 400
        lines = written(caplog, message)
        assert len(lines) == LINES_MAX
        clock.advance(1000)
        served.server.run_checks()
        lines = written(caplog, message)
        assert (len(lines), total(lines)) == (LINES_MAX + 1, 300)
        assert {one.address for one in lines} == {"127.0.0.1"}  # type: ignore[attr-defined]
        assert "secret-token" not in caplog.text


async def test_oversized_frames_write_a_few_lines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    too_large = frame(b"", declared=2 * ApiLimits().frame_bytes_max)
    async with serving(tmp_path, clock=ManualClock()) as served:
        for path in ("/v1/events", "/v1/chat") * LINES_MAX:
            async with raw_connection(served) as connection:
                await upgrade(connection, path)
                connection.send(too_large)
                assert await wait_closed(connection)
        lines = written(caplog, "a frame is larger than limits.frame_bytes_max; the connection is closed")
        assert len(lines) == LINES_MAX
        assert {one.address for one in lines} == {"127.0.0.1"}  # type: ignore[attr-defined]


async def test_health_checks_of_a_failing_store_write_a_few_lines(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail() -> None:
        raise StoreUnavailableError("the disk is gone")

    async with serving(tmp_path, clock=ManualClock()) as served:
        monkeypatch.setattr(served.server.log, "heads", fail)
        for _ in range(2 * LINES_MAX):
            assert (await served.get("/readyz")).status == 503
        lines = written(caplog, "not ready")
        assert len(lines) == LINES_MAX
        assert lines[0].error == "the disk is gone"  # type: ignore[attr-defined]
