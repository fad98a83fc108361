"""Temporarily refused writes wait together with all later writes, and the client reports the reason."""

import asyncio
import logging
from itertools import groupby
from pathlib import Path

import pytest

from client.chat import chat_clients
from client.events import event_clients
from client.events.event_clients import numbered_draft
from client.ledger.ledgers import address_of, expect_written, keys_of, ledger_of
from databases import BOTH_STORES
from deadlines import soon, until
from oncelog.client import Committed, ConnectionState, Status
from oncelog.client.runtime.protocol import BlockedWrites
from oncelog.core.operations import SetEntity
from oncelog.core.rules import quotas
from oncelog.core.tenants import Tenant
from oncelog.engine import committer
from oncelog.testing.clock import ManualClock
from server.running_server import Serving, serving


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quotas, "QUOTA_RETRY_AFTER_MS", 5)
    monkeypatch.setattr(committer, "RETRY_AFTER_READ_ONLY_MS", 5)


def count_lines(caplog: pytest.LogCaptureFixture, level: int, words: str) -> int:
    """Return the number of log lines that contain the words."""
    return sum(record.levelno == level and words in record.getMessage() for record in caplog.records)


async def wait_for_refusals(served: Serving, door: str, wire: str, code: str) -> None:
    """Wait until the server has refused two more requests."""
    requests = served.server.counts.requests
    before = requests[door, wire, code]
    await until(lambda: requests[door, wire, code] > before + 1)


@BOTH_STORES
async def test_exceeded_quota_is_reported_until_it_is_raised_and_writes_keep_their_order(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "oncelog.client")
    async with serving(tmp_path) as served, event_clients.client_of(served.url, partitions=()) as client:
        log = served.server.log
        await log.set_tenants([Tenant("acme", records_max=1)])
        assert isinstance(await soon((await client.submit(numbered_draft(1), ["acme/a"])).outcome()), Committed)
        assert client.status().last_error is None
        seen: list[Status] = []
        client.on_status(seen.append)
        full = await client.submit(numbered_draft(2), ["acme/a"])
        await until(lambda: bool(seen) and seen[-1].last_error is not None)
        behind = await client.submit(numbered_draft(3), ["elsewhere"])
        await wait_for_refusals(served, "events", "websocket", "quota_exceeded")
        status = client.status()
        assert (status.state, status.pending) == (ConnectionState.LIVE, 2)
        assert str(status.last_error).startswith("quota_exceeded: records_max of the tenant 'acme' is 1")
        assert full.result is behind.result is None
        await log.set_tenants([Tenant("acme", records_max=2)])
        outcomes = [await soon(full.outcome()), await soon(behind.outcome())]
        first, second = [one.committed_id for one in outcomes if isinstance(one, Committed)]
        assert first < second
        assert client.status().last_error is None
        await until(lambda: seen[-1].last_error is None)
    assert count_lines(caplog, logging.WARNING, "temporarily refused: quota_exceeded") == 1
    assert count_lines(caplog, logging.INFO, "writes are accepted again") == 1


async def test_read_only_server_is_reported(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, event_clients.client_of(served.url, partitions=()) as client:
        served.server.log.set_read_only()
        pending = await client.submit(numbered_draft(1), ["a"])
        await until(lambda: str(client.status().last_error).startswith("read_only: new writes are refused"))
        served.server.log.set_read_only(False)
        await soon(pending.outcome())
        assert client.status().last_error is None


async def test_rate_limit_is_reported_on_an_open_connection(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()  # With a stopped clock, the rate window never ends.
    async with serving(tmp_path, clock=clock) as served, event_clients.client_of(served.url, partitions=()) as client:
        log = served.server.log
        await log.set_tenants([Tenant("acme", new_writes_per_second_max=1)])
        await soon((await client.submit(numbered_draft(1), ["acme"])).outcome())
        seen: list[Status] = []
        client.on_status(seen.append)
        pending = await client.submit(numbered_draft(2), ["acme"])
        await wait_for_refusals(served, "events", "websocket", "rate_limited")
        await log.set_tenants([])
        await soon(pending.outcome())
        assert client.status().last_error is None
        await until(lambda: not seen[-1].pending)
        are_errors = [one.last_error is not None for one in seen]
        assert [is_error for is_error, _ in groupby(are_errors)] == [False, True, False], "the error is kept"
        assert all(one.state is ConnectionState.LIVE for one in seen)
    assert count_lines(caplog, logging.WARNING, "temporarily refused: server_busy") == 1


async def test_exceeded_quota_of_a_chat_blocks_only_that_chat(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "oncelog.client.chat")
    async with serving(tmp_path) as served, chat_clients.client_of(served.url) as ann:
        log = served.server.log
        await ann.create("full")
        await ann.create("free")
        assert (await chat_clients.send_message(ann, "full", "one")).sequence == 1
        await log.set_tenants([Tenant("chat/full", records_max=1)])
        pending = [await ann.send("full", content) for content in ("two", "three")]
        status = await soon(ann.until_status(lambda status: status.last_error is not None))
        assert str(status.last_error).startswith("QUOTA_EXCEEDED: records_max of the tenant 'chat/full' is 1")
        assert (await chat_clients.send_message(ann, "free", "one")).sequence == 1
        await wait_for_refusals(served, "chat", "websocket", "quota_exceeded")
        assert (ann.status().state.name, ann.status().pending) == ("LIVE", 2)
        assert ann.status().last_error == status.last_error
        assert [one.result for one in pending] == [None, None]
        await log.set_tenants([])
        assert [chat_clients.expect_committed(await soon(one.outcome())).sequence for one in pending] == [2, 3]
        assert ann.status().last_error is None
    assert count_lines(caplog, logging.WARNING, "temporarily refused in full: QUOTA_EXCEEDED") == 1
    assert count_lines(caplog, logging.INFO, "writes are accepted again in full") == 1


async def test_exceeded_quota_of_a_ledger_is_reported_despite_gap_answers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "oncelog.client.ledger")
    async with serving(tmp_path) as served, ledger_of(address_of(served)) as ledger:
        log = served.server.log
        await log.set_tenants([Tenant("ledger/acme", records_max=1)])
        expect_written(await soon(ledger.write(SetEntity("k1", b"v"))))
        assert ledger.last_error is None
        writes = [asyncio.ensure_future(ledger.write(SetEntity(f"k{number}", b"v"))) for number in (2, 3)]
        await until(lambda: ledger.last_error is not None)
        await wait_for_refusals(served, "ledger", "grpc", "quota_exceeded")
        assert "quota_exceeded: records_max of the tenant 'ledger/acme' is 1" in str(ledger.last_error)
        assert not any(one.done() for one in writes)
        await log.set_tenants([])
        for one in writes:
            expect_written(await soon(one))
        assert ledger.last_error is None
        assert await keys_of(ledger) == ["k1", "k2", "k3"]
    assert count_lines(caplog, logging.WARNING, "a call to the server failed and will be retried: quota_exceeded") == 1
    assert count_lines(caplog, logging.INFO, "the server is responding again") == 1


def test_last_error_of_the_queues_that_are_still_blocked_is_reported() -> None:
    hold_ups = BlockedWrites(logging.getLogger("oncelog.client"))
    shown = [hold_ups.last_error]
    for code, queue in (("", "a"), ("BUSY", "a"), ("READ_ONLY", "b"), ("RATE_LIMITED", "a"), ("", "a"), ("", "b")):
        if code:
            hold_ups.block(code, "later", queue)
        else:
            hold_ups.unblock(queue)
        shown.append(hold_ups.last_error)
    assert shown == [None, None, "BUSY: later", "READ_ONLY: later", "RATE_LIMITED: later", "READ_ONLY: later", None]
