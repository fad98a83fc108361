"""The server closes connections that send no request."""

from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from deadlines import soon, until
from oncelog.server import app
from oncelog.testing.clock import ManualClock
from server.raw_http import RawConnection, raw_connection
from server.running_server import serving


async def wait_closed(connection: RawConnection) -> bool:
    """Wait until the server has closed the connection."""
    try:
        return not await soon(connection.reader.read(1))
    except ConnectionError:
        return True


@pytest.mark.rule("CO-27", "CO-30", "CO-33")
async def test_silent_connections_are_closed_while_others_are_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "RENEW_S", 0.01)
    clock = ManualClock()
    async with (
        serving(tmp_path, connections_max=1, connect_timeout_ms=1000, clock=clock) as served,
        AsyncExitStack() as stack,
    ):
        silent = [await stack.enter_async_context(raw_connection(served)) for _ in range(5)]
        silent[0].send(b"GET /healthz HTTP/1.1\r\nHost: 127")
        assert (await served.get("/healthz")).status == 200
        await until(lambda: len(served.server._limiter) == 6)
        clock.advance(1001)
        assert [await wait_closed(one) for one in silent] == [True] * 5
        await until(lambda: len(served.server._limiter) <= 1)
        assert (await served.get("/healthz")).status == 200
