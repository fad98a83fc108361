"""Connections that say nothing."""

import asyncio
from pathlib import Path

import pytest

from doors.serving import run, serving, soon, until
from oncelog.doors.arrivals import RESERVE, Arrivals


class Transport:
    def __init__(self) -> None:
        self.is_aborted = False

    def abort(self) -> None:
        self.is_aborted = True

    def is_closing(self) -> bool:
        return self.is_aborted


@pytest.mark.rule("CO-30")
def test_who_says_nothing_is_ended_and_who_has_spoken_is_not() -> None:
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
def test_too_many_are_turned_away_until_some_have_gone(caplog: pytest.LogCaptureFixture) -> None:
    arrivals = Arrivals(1, 1000, lambda: 0)
    there = [Transport() for _ in range(1 + RESERVE)]
    assert all(map(arrivals.admit, there))
    assert not arrivals.admit(Transport())
    there[0].abort()
    assert arrivals.admit(Transport())
    arrivals.sweep()
    assert "turned away" in caplog.text


@pytest.mark.rule("CO-30", "CO-33")
def test_silent_connections_do_not_stay_and_others_are_served_meanwhile(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, connections_max=1, connect_timeout_ms=50) as served:
            host, port = served.url.removeprefix("http://").split(":")
            silent = [await asyncio.open_connection(host, int(port)) for _ in range(5)]
            silent[0][1].write(b"GET /healthz HTTP/1.1\r\nHost: 127")
            assert (await served.get("/healthz")).status == 200
            for reader, _ in silent:
                with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                    await soon(reader.readexactly(1))
            await until(lambda: len(served.server._arrivals) <= 1)
            assert (await served.get("/healthz")).status == 200
            for _, writer in silent:
                writer.close()

    run(main())
