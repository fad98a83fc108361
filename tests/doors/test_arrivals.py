"""Connections that send no request."""

import asyncio
from pathlib import Path

import pytest

from doors.serving import serving
from oncelog.doors import server as server_module
from oncelog.doors.arrivals import RESERVE, Arrivals
from oncelog.testing.clock import ManualClock
from waiting import soon, until


class Transport:
    def __init__(self) -> None:
        self.is_aborted = False

    def abort(self) -> None:
        self.is_aborted = True

    def is_closing(self) -> bool:
        return self.is_aborted


@pytest.mark.rule("CO-30")
def test_silent_connection_is_aborted_and_an_active_one_is_not() -> None:
    now_ms = 0
    arrivals = Arrivals(10, 1000, lambda: now_ms)
    silent, speaks = Transport(), Transport()
    assert arrivals.admit(silent)
    assert arrivals.admit(speaks)
    arrivals.spoke(speaks)
    arrivals.spoke(None)
    now_ms = 1000
    arrivals.sweep()
    assert not silent.is_aborted
    now_ms = 1001
    arrivals.sweep()
    assert (silent.is_aborted, speaks.is_aborted, len(arrivals)) == (True, False, 1)
    speaks.abort()
    arrivals.sweep()
    assert len(arrivals) == 0


@pytest.mark.rule("CO-30")
def test_connections_above_the_limit_are_refused_until_others_close(caplog: pytest.LogCaptureFixture) -> None:
    arrivals = Arrivals(1, 1000, lambda: 0)
    there = [Transport() for _ in range(1 + RESERVE)]
    assert all(map(arrivals.admit, there))
    assert not arrivals.admit(Transport())
    there[0].abort()
    assert arrivals.admit(Transport())
    arrivals.sweep()
    assert "turned away" in caplog.text


@pytest.mark.rule("CO-30", "CO-33")
async def test_silent_connections_are_closed_while_others_are_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "RENEW_S", 0.01)
    clock = ManualClock()
    async with serving(tmp_path, connections_max=1, connect_timeout_ms=1000, clock=clock) as served:
        host, port = served.url.removeprefix("http://").split(":")
        silent = [await asyncio.open_connection(host, int(port)) for _ in range(5)]
        silent[0][1].write(b"GET /healthz HTTP/1.1\r\nHost: 127")
        assert (await served.get("/healthz")).status == 200
        await until(lambda: len(served.server._arrivals) == 6)
        clock.advance(1001)
        for reader, _ in silent:
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await soon(reader.readexactly(1))
        await until(lambda: len(served.server._arrivals) <= 1)
        assert (await served.get("/healthz")).status == 200
        for _, writer in silent:
            writer.close()
