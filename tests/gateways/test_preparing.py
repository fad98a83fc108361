"""A writer's statements are prepared before it holds anything: how long that may take, and what ends it."""

import asyncio
from typing import Any

import asyncpg
import pytest

from gateways.gateway_stores import WAIT_S, event, fetched, place, run
from oncelog.core.policy import EVENTS
from oncelog.engine.log import Log, open_log
from oncelog.stores.postgres import PostgresStore
from oncelog.stores.postgres.connecting import Timeouts
from oncelog.stores.postgres.preparing import STATEMENTS
from oncelog.stores.postgres.session import Writer
from oncelog.testing.postgres_proxy import PostgresProxy

BARRIER = "SELECT pg_logical_emit_message"
HALFWAY = len(STATEMENTS) // 2
LONG_MS = 100_000
"""Longer than a test waits."""


class FarAway:
    """A session with a server far away, which needs a while for each statement that is made known to it."""

    def __init__(self, each_s: float) -> None:
        self.now_s = 0.0
        self.is_ended = False
        self.prepared: list[str] = []
        self._each_s = each_s

    async def _get_statement(self, statement: str, _timeout: None) -> None:
        self.now_s += self._each_s
        await asyncio.sleep(0)  # whatever was to happen by now happens
        if self.is_ended:
            raise asyncpg.ConnectionDoesNotExistError("connection was closed in the middle of operation")
        self.prepared.append(statement)

    async def execute(self, statement: str) -> str:
        return statement

    def add_log_listener(self, _: Any) -> None:
        pass

    def remove_log_listener(self, _: Any) -> None:
        pass

    def is_closed(self) -> bool:
        return self.is_ended

    def terminate(self) -> None:
        self.is_ended = True


async def nothing(_: Any) -> None:
    pass


async def transacted(server: FarAway, timeouts: Timeouts, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a writer for whom time passes only where the server needs it."""
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: server.now_s)

    async def connected() -> FarAway:
        assert not server.is_ended, "it was let go, and would be tried again for ever"
        return server

    try:
        await Writer(connected, "the log", timeouts).transact([0], nothing, lambda _: ())
    finally:
        monkeypatch.undo()


def test_of_a_server_far_away_all_statements_may_take_longer_than_a_transaction(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timeouts = Timeouts()
    server = FarAway(each_s=0.9 * timeouts.connect_ms / 1000)
    run(transacted(server, timeouts, monkeypatch))
    assert server.now_s > timeouts.transaction_ms / 1000
    assert server.prepared == list(STATEMENTS)
    assert not server.is_ended


@pytest.mark.rule("CO-16")
def test_who_hears_nothing_of_one_statement_takes_another_session(database: str) -> None:
    """After the time that a session may take to be made; a transaction might take far longer."""

    async def main() -> None:
        timeouts = Timeouts(connect_ms=500, lane_ms=LONG_MS, commit_ms=LONG_MS)
        async with PostgresProxy(database) as proxy:
            store = PostgresStore(proxy.address, timeouts=timeouts)
            await store.open()
            held = proxy.hold_after(BARRIER, HALFWAY)
            declared = asyncio.create_task(store.declare([EVENTS]))
            async with asyncio.timeout(WAIT_S):
                await held.reached()
                assert list(await declared) == [EVENTS.name]
            await store.close()

    run(main())


@pytest.mark.rule("CO-12")
def test_a_session_that_has_forgotten_its_statements_is_not_used_again(database: str) -> None:
    """A table was changed under it. Frozen at the first use of one of them it would keep its lane."""

    async def main() -> None:
        async with open_log(database) as log:
            assert place(await log.submit(event(1))) == 1
            before = session_of(log)
            # What a statement gives is now of another type than the session was told when it was prepared.
            await fetched(database, "ALTER TABLE oncelog_lanes ALTER revision TYPE integer")
            assert place(await log.submit(event(2))) == 2
            after = session_of(log)
            assert after != before
            assert place(await log.submit(event(3))) == 3
            assert session_of(log) == after

    run(main())


def session_of(log: Log) -> int:
    """The one that writes."""
    return int(log._store._writer._connection.get_server_pid())  # type: ignore[attr-defined]
