"""A writer prepares its statements before it locks a lane. These tests cover timeouts and failures."""

import asyncio
from typing import Any

import asyncpg
import pytest

from core import item_builders as builders
from engine.observable_store import LoopClock
from oncelog.core.operations import SetEntity
from oncelog.core.policy import EVENTS
from oncelog.core.tenants import Tenant
from oncelog.core.transactions import transaction
from oncelog.core.values import OpenStream, Refused, SetMember
from oncelog.engine.log import Log, open_log
from oncelog.storage.postgres import PostgresStore
from oncelog.storage.postgres.connection import Timeouts
from oncelog.storage.postgres.writer import STATEMENTS, Writer
from oncelog.testing.postgres_proxy import PostgresProxy
from servers.shared_logs import LONG_MS, event, fetch_rows, position_of

BARRIER = "SELECT pg_logical_emit_message"
HALFWAY = len(STATEMENTS) // 2
CONNECT_MS = LONG_MS // 10


class DistantServer:
    """A session with a distant server, where preparing each statement takes some time."""

    def __init__(self, each_s: float) -> None:
        self.now_s = 0.0
        self.is_ended = False
        self.prepared: list[str] = []
        self._each_s = each_s

    async def _get_statement(self, statement: str, _timeout: None) -> None:
        self.now_s += self._each_s
        await asyncio.sleep(0)  # Let due timers fire.
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


async def do_nothing(_: Any) -> None:
    pass


async def run_transaction(server: DistantServer, timeouts: Timeouts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a transaction in virtual time, which advances only while the server prepares statements."""
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: server.now_s)

    async def open_session() -> DistantServer:
        assert not server.is_ended, "the session was abandoned and would be retried forever"
        return server

    try:
        await Writer(open_session, "the log", timeouts).transact([0], do_nothing, lambda _: ())
    finally:
        monkeypatch.undo()


async def test_preparing_statements_on_a_distant_server_may_take_longer_than_a_transaction(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timeouts = Timeouts()
    server = DistantServer(each_s=0.9 * timeouts.connect_ms / 1000)
    await run_transaction(server, timeouts, monkeypatch)
    assert server.now_s > timeouts.transaction_ms / 1000
    assert server.prepared == list(STATEMENTS)
    assert not server.is_ended


@pytest.mark.rule("CO-16")
async def test_writer_replaces_a_session_that_does_not_respond_while_preparing(
    database: str, loop_clock: LoopClock
) -> None:
    """The writer waits for the connect timeout, which is far shorter than the transaction timeout."""
    timeouts = Timeouts(connect_ms=CONNECT_MS, lane_ms=LONG_MS, commit_ms=LONG_MS, patience_ms=LONG_MS)
    async with PostgresProxy(database) as proxy:
        store = PostgresStore(proxy.address, timeouts=timeouts)
        await store.open()
        held = proxy.hold_after(BARRIER, HALFWAY)
        declared = asyncio.create_task(store.declare([EVENTS]))
        await held.wait_reached()
        loop_clock.advance(CONNECT_MS / 1000)
        assert list(await declared) == [EVENTS.name]
        await store.close()


@pytest.mark.rule("CO-12")
async def test_session_with_invalid_prepared_statements_is_replaced(database: str) -> None:
    """If the process froze while it prepared statements again in this session, the session would keep its lane."""
    async with open_log(database) as log:
        assert position_of(await log.submit(event(1))) == 1
        before = session_of(log)
        # Make a prepared statement return a different type.
        await fetch_rows(database, "ALTER TABLE oncelog_lanes ALTER revision TYPE integer")
        assert position_of(await log.submit(event(2))) == 2
        after = session_of(log)
        assert after != before
        assert position_of(await log.submit(event(3))) == 3
        assert session_of(log) == after


@pytest.mark.rule("CO-16")
async def test_writes_and_erasures_prepare_no_statement_while_they_hold_a_lane(database: str) -> None:
    """If the process froze while it prepared a statement, the session would keep its lane."""
    async with open_log(database, tenants=[Tenant("acme"), Tenant("chat"), Tenant("org")]) as log:
        await log.submit(event(1))
        prepared = statements_of(log)
        assert set(STATEMENTS) <= prepared
        for item in (
            builders.event(2, partitions=("acme/a",)),
            OpenStream("chat/1", "user:ann"),
            SetMember("chat/1", "user:bob"),
            builders.message(1),
            SetMember("chat/1", "user:ann", present=False),
            transaction("org/1", "c1", 1, [SetEntity("a", b"1")]),
            transaction("org/1", "c1", 2, [SetEntity("€" * 1000, b"1")]),
        ):
            assert not isinstance(await log.submit(item), Refused)
        assert await log.erase(partition="acme/a") == 1
        assert await log.erase(stream="chat/1") == 1
        assert await log.erase(stream="org/1") == 2
        assert statements_of(log) == prepared


def statements_of(log: Log) -> set[str]:
    """Return the prepared statements of the writer's session."""
    connection = log._store._writer._connection  # type: ignore[attr-defined]
    return {statement.query for statement in connection._stmt_cache.iter_statements()}


def session_of(log: Log) -> int:
    """Return the process id of the writer's session."""
    return int(log._store._writer._connection.get_server_pid())  # type: ignore[attr-defined]
