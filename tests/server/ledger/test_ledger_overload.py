"""Limits of the Ledger API: streams that the server must end, a full queue, and the rate of new writes."""

import asyncio
from pathlib import Path
from typing import Any, Final

import pytest

from databases import BOTH_STORES
from deadlines import WAIT_S, soon, until
from oncelog.core.operations import SetEntity
from oncelog.core.transactions import ledger_scope, transaction
from oncelog.server.ledger import grpc_service, reads
from oncelog.testing.clock import ManualClock
from server.auth import auth_material
from server.ledger.ledger_servers import LedgerServer, key, run_server, token
from server.ledger.ledger_transports import (
    GRPC,
    HTTP,
    CallError,
    code,
    expect_failure,
    expect_refusal,
    expect_success,
    put,
)
from server.ledger.write_answers import Unchanged, expect_already_committed, read_to_end, receipt_of
from server.running_server import api_key

pytestmark = BOTH_STORES

SET: Final = put("a", b"1")
SCOPE: Final = "ledger/acme"
SHUTDOWN_MS: Final = 600_000
"""Longer than any wait in a test. A server that stops only at this deadline therefore fails the test."""


# --- streams -----------------------------------------------------------------------------------------------------


@pytest.mark.rule("CO-23")
@pytest.mark.parametrize("how", ["expired", "revoked", "narrowed"])
async def test_stream_ends_when_the_credential_loses_its_rights(tmp_path: Path, wire: str, how: str) -> None:
    clock = ManualClock(auth_material.NOW_MS)
    async with run_server(tmp_path, wire, tokens=True, api_keys=True, clock=clock) as server:
        writer = server.ledger(credential=token("writer"))
        await writer.write(1, SET)
        shown = api_key(server.served, "reader", [SCOPE], [])
        ending = server.ledger(credential=token(exp=auth_material.NOW_S + 100) if how == "expired" else shown.text)
        staying = await writer.watch_blocks()
        watching = await ending.watch_blocks()
        assert await watching.next() == await staying.next()
        await writer.write(2, SET)
        assert await watching.next() == await staying.next()
        if how == "expired":
            clock.advance(100_000 + 30_000 - 1)  # one millisecond before the leeway ends
            server.server.run_checks()
            await writer.write(3, SET)
            assert await watching.next() == await staying.next()
            clock.advance(1)
            server.server.run_checks()
        elif how == "revoked":
            assert server.served.api_keys is not None
            server.served.api_keys.revoke(shown.key.id)
            server.server.reload()
        else:
            path = tmp_path / "keys.json"
            path.write_text(path.read_text().replace(f'"{SCOPE}"', '"ledger/other"'))
            server.server.reload()
        error = await expect_refusal(watching.next())
        assert (error.status, error.code) == ("UNAUTHENTICATED", "auth_failed")
        assert error.message == "the token has expired, or its rights have changed"
        error = await expect_refusal(ending.get_entity("a"))
        assert error.status == ("PERMISSION_DENIED" if how == "narrowed" else "UNAUTHENTICATED")
        last = await writer.last_sequence()
        await writer.write(last + 1, SET)
        block = await staying.next()
        assert block is not None
        assert len(block["tx_ids"]) == 1
        await until(lambda: server.server._reader_count == 1)
        await staying.close()
        if wire == GRPC:  # over HTTP the server detects a closed stream only when it sends
            await until(lambda: server.server._reader_count == 0)


@pytest.mark.rule("CO-23", "CO-31")
@pytest.mark.parametrize("how", ["expired", "stopped"])
async def test_stream_ends_even_if_its_reader_does_not_read(
    tmp_path: Path, wire: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More blocks are pending than the connection buffers. The reader gets the buffered ones before the stream ends."""
    sent = 0

    def counted(make: Any) -> Any:
        def count(*arguments: Any) -> Any:
            nonlocal sent
            sent += 1
            return make(*arguments)

        return count

    monkeypatch.setattr(grpc_service, "CLOSE_TIMEOUT_S", WAIT_S)  # even if the reader is slow
    clock = ManualClock(auth_material.NOW_MS)
    async with run_server(tmp_path, wire, shutdown_ms=SHUTDOWN_MS, tokens=True, clock=clock) as server:
        reader = server.ledger(credential=token(exp=auth_material.NOW_S + 100))
        await reader.write(1, SET)
        watching = await reader.watch_blocks()
        await watching.next()
        monkeypatch.setattr(reads, "to_block_members", counted(reads.to_block_members))
        await fill(server)
        await until(Unchanged(lambda: sent))
        if how == "expired":
            clock.advance(200_000)
            server.server.run_checks()
            assert await read_to_end(watching) == "UNAUTHENTICATED"
        else:
            stopping = asyncio.ensure_future(server.server.stop())
            assert await read_to_end(watching) == ("UNAVAILABLE" if wire == GRPC else "OK")
            await soon(stopping)


async def fill(server: LedgerServer) -> None:
    """Commit twelve large blocks."""
    scope, operations = ledger_scope("acme"), [SetEntity("a", b"")]
    for number in range(12):
        await server.log.submit_many([transaction(scope, f"{number}-{n}", 1, operations) for n in range(1000)])


# --- overload ---------------------------------------------------------------------------------------------------


def check_retry_delay(error: CallError, wire: str, status: str, http_status: int) -> None:
    assert error.status == status
    assert error.retry_after_ms is not None
    assert error.retry_after_ms > 0
    if wire == HTTP:
        assert (error.http_status, error.retry_after_s) == (http_status, str(-(-error.retry_after_ms // 1000)))


@pytest.mark.rule("CO-32", "CO-15", "CO-18")
async def test_full_queue_refuses_new_writes_and_answers_known_ones(
    tmp_path: Path, wire: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with run_server(tmp_path, wire) as server:
        before = expect_success(await server.ledger(client_id="earlier").write(1, SET, key=key(1)))
    async with run_server(tmp_path, wire, queue_items_max=1) as server:
        earlier, known, new = (server.ledger(client_id=name) for name in ("earlier", "known", "new"))
        first = expect_success(await known.write(1, SET, key=key(1)))
        gate = server.served.hold_commits(monkeypatch)
        held = asyncio.ensure_future(server.ledger(client_id="held").write(1, SET, key=key(1)))
        await soon(gate.reached.wait())
        # Answered from the cache immediately.
        assert await known.write(1, SET, key=key(1)) == first
        assert code(await known.write(2, put("x"), key=key(1))) == "IDEMPOTENCY_KEY_REUSED"
        # A write that is not cached queues a lookup behind the held commit. The queue has room for one lookup.
        asked = asyncio.ensure_future(earlier.write(1, SET, key=key(1)))
        await until(lambda: len(server.log._committer._known_only_queue) == 1)
        check_retry_delay(await expect_refusal(new.write(1, SET, key=key(1))), wire, "UNAVAILABLE", 503)
        gate.open()
        assert code(await held) == "OK"
        assert expect_already_committed(await asked) == receipt_of(before)
        assert await new.last_sequence() == 0
        assert code(await new.write(1, SET, key=key(1))) == "OK"


@pytest.mark.rule("CO-32")
async def test_full_queue_refuses_a_write_that_a_lookup_finds_to_be_new(
    tmp_path: Path, wire: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with run_server(tmp_path, wire, queue_items_max=1) as server:
        new = server.ledger(client_id="new")
        gate = server.served.hold_commits(monkeypatch)
        held = asyncio.ensure_future(server.ledger(client_id="held").write(1, SET, key=key(1)))
        await soon(gate.reached.wait())
        asked = asyncio.ensure_future(expect_refusal(new.write(1, SET, key=key(1))))
        await until(lambda: len(server.log._committer._known_only_queue) == 1)
        gate.open()
        check_retry_delay(await asked, wire, "UNAVAILABLE", 503)
        assert code(await held) == "OK"
        assert await new.last_sequence() == 0
        assert expect_success(await new.write(1, SET, key=key(1)))["version"] == 2


@pytest.mark.rule("CO-15", "CO-18", "CO-30")
async def test_rate_limit_applies_only_to_new_writes(tmp_path: Path, wire: str) -> None:
    clock = ManualClock(auth_material.NOW_MS)
    options: dict[str, Any] = {"tokens": True, "clock": clock, "new_events_per_second_max": 2}
    async with run_server(tmp_path, wire, **options) as server:
        ledger = server.ledger(credential=token())
        first = expect_success(await ledger.write(1, SET, key=key(1)))
        await ledger.write(2, SET, key=key(2))
        limited = await expect_refusal(ledger.write(3, SET, key=key(3)))
        check_retry_delay(limited, wire, "RESOURCE_EXHAUSTED", 429)
        assert limited.code == "rate_limited"
        assert await ledger.last_sequence() == 2
        # Known writes are answered, and other reasons for refusal are reported first.
        assert await ledger.write(1, SET, key=key(1)) == first
        assert await ledger.write(1, SET) == first
        assert code(await ledger.write(2, put("x"), key=key(2))) == "IDEMPOTENCY_KEY_REUSED"
        assert code(await ledger.write(1, put("x"))) == "SEQUENCE_REUSED"
        assert code(await ledger.write(7, SET, key=key(7))) == "SEQUENCE_GAP"
        error = expect_failure(await ledger.write(3, put("a", condition={"must_not_exist": True}), key=key(3)))
        assert error["code"] == "KEY_EXISTS"
        # the limit is per actor
        assert code(await server.ledger(credential=token("bob")).write(1, SET, key=key(1))) == "OK"
    async with run_server(tmp_path, wire, **options) as server:
        ledger = server.ledger(credential=token())
        assert (await expect_refusal(ledger.write(3, SET, key=key(3)))).status == "RESOURCE_EXHAUSTED"
        assert expect_already_committed(await ledger.write(1, SET, key=key(1)))[1] == first["committed_tx_id"]
        clock.advance(limited.retry_after_ms or 0)
        assert expect_success(await ledger.write(3, SET, key=key(3)))["assigned_sequence"] == 3
