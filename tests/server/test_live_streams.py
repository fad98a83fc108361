"""Termination of streams that follow a log."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from oncelog.server.auth.authenticator import DevelopmentAuthenticator
from oncelog.server.auth.principal import EVERYTHING, Principal
from oncelog.server.auth_gate import AuthGate
from oncelog.server.limits import ApiLimits
from oncelog.server.live_streams import LiveStream, LiveStreams
from oncelog.testing.clock import ManualClock

ADA = Principal(actor="user:ada", client_id=None, grants=EVERYTHING)


class LostConnection:
    """A response whose connection fails at the first heartbeat."""

    async def write(self, data: bytes) -> None:
        if data == b":\n\n":
            raise ConnectionResetError


@pytest.mark.rule("CO-31")
async def test_stop_does_not_interrupt_the_cleanup_of_a_stream_whose_connection_failed() -> None:
    streams = LiveStreams(AuthGate(DevelopmentAuthenticator(), ManualClock(), ApiLimits()), "events")
    is_cleaning, may_finish = asyncio.Event(), asyncio.Event()
    finished: list[str] = []

    async def follow() -> AsyncGenerator[bytes, None]:
        try:
            await asyncio.Event().wait()
            yield b""
        finally:
            is_cleaning.set()
            await may_finish.wait()
            finished.append("generator")

    async def serve() -> None:
        response: Any = LostConnection()
        stream = LiveStream(ADA, ["orders"], heartbeat_ms=1)
        streams.connections.add(stream)
        await stream.run(streams._send_all(stream, response, b"hello", follow(), bytes))

    serving = asyncio.ensure_future(serve())
    await is_cleaning.wait()
    streams.close_all()
    await asyncio.sleep(0)
    may_finish.set()
    with pytest.raises(ConnectionResetError):
        await serving
    assert finished == ["generator"]


@pytest.mark.rule("CO-31")
async def test_cancelled_request_is_not_mistaken_for_a_stopped_stream() -> None:
    streams = LiveStreams(AuthGate(DevelopmentAuthenticator(), ManualClock(), ApiLimits()), "events")
    is_following = asyncio.Event()

    async def follow() -> AsyncGenerator[bytes, None]:
        is_following.set()
        await asyncio.Event().wait()
        yield b""

    async def serve() -> None:
        response: Any = LostConnection()
        stream = LiveStream(ADA, ["orders"], heartbeat_ms=60_000)
        await stream.run(streams._send_all(stream, response, b"hello", follow(), bytes))

    serving = asyncio.ensure_future(serve())
    await is_following.wait()
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving
