"""Waiting for a session ends at the deadline and leaves no connection open."""

import asyncio
from asyncio import StreamReader, StreamWriter
from contextlib import AsyncExitStack

import pytest

from deadlines import turns, until
from engine.observable_store import LoopClock
from oncelog.storage.postgres.connection import Timeouts, split_address
from oncelog.storage.postgres.session_factory import HEAD_START_S, SessionFactory
from servers.shared_logs import LONG_MS

COMMIT_S = 60
TURNS = 20


async def test_silent_hosts_are_abandoned_at_the_deadline(loop_clock: LoopClock) -> None:
    accepted: list[StreamWriter] = []

    async def accept_silently(_: StreamReader, writer: StreamWriter) -> None:
        accepted.append(writer)

    async with AsyncExitStack() as stack:
        servers = [
            await stack.enter_async_context(await asyncio.start_server(accept_silently, "127.0.0.1", 0))
            for _ in range(2)
        ]
        hosts = ",".join(f"127.0.0.1:{server.sockets[0].getsockname()[1]}" for server in servers)
        timeouts = Timeouts(connect_ms=LONG_MS, commit_ms=1000 * COMMIT_S)
        sessions = SessionFactory(f"postgresql://nobody@{hosts}/none", timeouts, lambda _: asyncio.sleep(0))
        session = asyncio.create_task(sessions.create())
        await until(lambda: len(accepted) == 1)
        loop_clock.advance(HEAD_START_S)
        await until(lambda: len(accepted) == 2)
        assert not session.done()
        loop_clock.advance(COMMIT_S - HEAD_START_S)
        for _ in range(TURNS):
            await turns()
        assert session.done()
        with pytest.raises(TimeoutError):
            await session
        sessions.close()
        for writer in accepted:
            writer.close()


async def test_session_that_opens_after_the_deadline_is_closed(address: str) -> None:
    sessions = SessionFactory(address, Timeouts(), lambda _: asyncio.sleep(0))
    (host,) = split_address(address)
    connection = await sessions._start_connecting(host)
    await sessions._give_up([host])
    assert connection.is_closed()
