"""Writes and reads by the ledger client against a real server."""

import asyncio
import logging
import time
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from msgspec.structs import replace

import oncelog
from client.ledger.ledgers import (
    LIMITS,
    UNREACHABLE_ADDRESS,
    address_of,
    code_of,
    count_calls,
    expect_written,
    keys_of,
    ledger_of,
)
from databases import BOTH_STORES
from deadlines import WAIT_S, soon, until
from oncelog.client.ledger import (
    LedgerClient,
    LedgerLimits,
    RefusalCode,
    Refused,
    UnverifiedError,
    Written,
    delete_entity,
    relate,
    set_entity,
    unrelate,
)
from oncelog.client.ledger.entries import QueuedWrite, SavedEntry, ScopeState, StoreChanges
from oncelog.client.ledger.store import LedgerStore
from oncelog.client.ledger.transport import LedgerTransport
from oncelog.client.runtime import backoff
from oncelog.core.proof import Proof
from oncelog.core.transactions import encode_operations
from oncelog.errors import (
    CanonicalError,
    ClientError,
    ClosedError,
    IdReusedError,
    LimitExceededError,
    LostError,
    ServerRefusedError,
    StoreUnavailableError,
)
from oncelog.proof import proof_document, verify
from oncelog.testing.clock import ManualClock
from server.running_server import Serving, api_key, serving
from server.test_server_app import make_certificate

KEY = UUID(int=7)
FEW = LedgerLimits(
    pause_ms_min=1, pause_ms_max=20, refused_pause_ms_min=1, in_flight_max=3, pending_writes_max=5, idle_ms=3_600_000
)


# --- writes


@BOTH_STORES
@pytest.mark.rule("LG-19")
async def test_write_returns_written_or_refused_with_the_current_state(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, ledger_of(address_of(served), tmp_path / "client.db") as ledger:
        first = expect_written(
            await ledger.write([set_entity("a", b"1", must_not_exist=True), relate("d", "o", "ann")])
        )
        assert (first.sequence, first.version, first.is_replay) == (1, 1, False)
        refused = await ledger.write(set_entity("a", b"2", must_not_exist=True))
        assert isinstance(refused, Refused)
        assert (refused.code, refused.key, refused.current_version) == (RefusalCode.KEY_EXISTS, "a", 1)
        assert (refused.current_value, refused.operation_index) == (b"1", 0)
        missing = await ledger.write([delete_entity("x"), set_entity("b", b"", must_exist=True)])
        assert isinstance(missing, Refused)
        assert (missing.code, missing.current_version, missing.current_value, missing.operation_index) == (
            RefusalCode.KEY_NOT_FOUND, None, None, 1
        )  # fmt: skip
        assert code_of(await ledger.write(set_entity("a", b"2", version_is=7))) is RefusalCode.VERSION_MISMATCH
        assert code_of(await ledger.write(set_entity("a", b"2", value_equals=b""))) is RefusalCode.VALUE_MISMATCH
        second = expect_written(await ledger.write(set_entity("a", b"2", version_is=1)))
        assert (second.sequence, second.version) == (2, 2)
        assert (await ledger.client_state()).last_sequence == 2
        assert await ledger.pending() == []


@pytest.mark.rule("LG-19")
async def test_writes_with_the_same_key_are_one_write(ledger: LedgerClient) -> None:
    key = UUID(int=7)
    operation = set_entity("a", b"1")
    both = await asyncio.gather(ledger.write(operation, key=key), ledger.write(operation, key=key.bytes))
    assert both[0] == both[1]
    assert await ledger.write(operation, key=key) == both[0]
    assert code_of(await ledger.write(set_entity("a", b"2"), key=key)) is RefusalCode.IDEMPOTENCY_KEY_REUSED
    assert expect_written(await ledger.write(set_entity("b", b"2"))).sequence == 2


@BOTH_STORES
@pytest.mark.rule("LG-19")
async def test_concurrent_writes_get_consecutive_sequences(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, ledger_of(address_of(served), tmp_path / "client.db") as ledger:
        outcomes = await asyncio.gather(
            *(ledger.write(set_entity(f"{number:03}", b"1", must_exist=number % 17 == 5)) for number in range(200))
        )
        good = [f"{number:03}" for number in range(200) if number % 17 != 5]
        assert [one.sequence for one in outcomes if isinstance(one, Written)] == list(range(1, len(good) + 1))
        assert {code_of(one) for one in outcomes if isinstance(one, Refused)} == {RefusalCode.KEY_NOT_FOUND}
        assert await keys_of(ledger) == good


@pytest.mark.rule("LG-19")
async def test_writes_are_pipelined_up_to_in_flight_max(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(tmp_path) as served, ledger_of(address_of(served), limits=FEW) as ledger:
        await ledger.recovered()
        gate = served.hold_commits(monkeypatch)
        sent = count_calls(monkeypatch)
        writes = [asyncio.create_task(ledger.write(set_entity(str(number), b"1"))) for number in range(5)]
        await until(lambda: len(sent) == 3)
        with pytest.raises(LimitExceededError, match="pending_writes_max"):
            await ledger.write(set_entity("x", b"1"))
        gate.open()
        assert [expect_written(one).sequence for one in await asyncio.gather(*writes)] == [1, 2, 3, 4, 5]


@pytest.mark.rule("LG-19")
async def test_cancelled_or_timed_out_write_remains_pending(tmp_path: Path) -> None:
    path = tmp_path / "client.db"
    async with ledger_of(UNREACHABLE_ADDRESS, path) as ledger:
        with pytest.raises(TimeoutError):
            await ledger.write(set_entity("a", b"1"), key=UUID(int=1), timeout_s=0.01)
        cancelled = asyncio.create_task(ledger.write(set_entity("b", b"1")))
        await until(lambda: len(ledger._stream._protocol.entries) == 2)  # type: ignore[union-attr]
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)
        assert [one.sequence for one in await ledger.pending()] == [1, 2]
        with pytest.raises(IdReusedError):
            await ledger.write(set_entity("a", b"2"), key=UUID(int=1))
        waiting = asyncio.create_task(ledger.write(set_entity("c", b"1")))
        await until(lambda: len(ledger._stream._protocol.entries) == 3)  # type: ignore[union-attr]
    with pytest.raises(ClosedError, match="sends the pending writes"):
        await waiting
    with pytest.raises(ClosedError):
        await ledger.write(set_entity("d", b"1"))
    async with serving(tmp_path) as served, ledger_of(address_of(served), path) as ledger:
        recovered = await soon(ledger.recovered())
        assert recovered[0].key == UUID(int=1)
        assert [expect_written(one.outcome).sequence for one in recovered] == [1, 2, 3]
        assert await keys_of(ledger) == ["a", "b", "c"]


@pytest.mark.rule("LG-19")
async def test_close_waits_for_sent_writes_until_close_timeout(
    served: Serving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "client.db"
    for timeout_ms in (60_000, 1):
        limits = replace(LIMITS, close_timeout_ms=timeout_ms)
        ledger = ledger_of(address_of(served), path, limits=limits)
        await ledger.__aenter__()
        await ledger.recovered()
        gate = served.hold_commits(monkeypatch)
        sent = count_calls(monkeypatch)
        writing = asyncio.create_task(ledger.write(set_entity(f"{timeout_ms}", b"1")))
        await until(lambda: len(sent) == 1)  # noqa: B023 - awaited immediately
        closing = asyncio.create_task(ledger.close())
        if timeout_ms > 1:
            gate.open()
            assert expect_written(await soon(writing)).sequence == 1
        await soon(closing)
        gate.open()
        if timeout_ms == 1:
            with pytest.raises(ClosedError):
                await writing
        monkeypatch.undo()
    async with ledger_of(address_of(served), path) as ledger:
        (recovered,) = await soon(ledger.recovered())
        assert expect_written(recovered.outcome).sequence == 2


async def test_new_write_is_refused_while_the_store_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backoff, "STORE_PAUSE", backoff.RetryPause(1))
    async with serving(tmp_path) as served, ledger_of(address_of(served)) as ledger:
        await ledger.recovered()
        with monkeypatch.context() as patched:
            patched.setattr(LedgerStore, "save", _fail_with_full_disk)
            results = await asyncio.gather(
                *(ledger.write(set_entity(name, b"1")) for name in ("a", "b")), return_exceptions=True
            )
            assert [type(one) for one in results] == [StoreUnavailableError] * 2
        assert expect_written(await soon(ledger.write(set_entity("c", b"1")))).sequence == 1
        assert await keys_of(ledger) == ["c"]


async def test_write_is_refused_while_outcomes_cannot_be_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client reports a commit before it saves the outcome, and later writes do not wait for the save."""
    monkeypatch.setattr(backoff, "STORE_PAUSE", backoff.RetryPause(1))
    save, failures = LedgerStore.save, asyncio.Event()
    loop = asyncio.get_running_loop()

    def save_first_write(store: LedgerStore, scope_id: int, changes: StoreChanges) -> None:
        if changes.settled:
            loop.call_soon_threadsafe(failures.set)
            _fail_with_full_disk()
        save(store, scope_id, changes)

    async with serving(tmp_path) as served, ledger_of(address_of(served)) as ledger:
        await ledger.recovered()
        with monkeypatch.context() as patched:
            patched.setattr(LedgerStore, "save", save_first_write)
            assert expect_written(await soon(ledger.write(set_entity("a", b"1")))).sequence == 1
            await soon(failures.wait())
            async with asyncio.timeout(WAIT_S):
                with pytest.raises(StoreUnavailableError):
                    await ledger.write(set_entity("b", b"1"))
        assert expect_written(await soon(ledger.write(set_entity("c", b"1")))).sequence == 2


def _fail_with_full_disk(*_: object) -> None:
    raise StoreUnavailableError("the disk is full")


async def test_unexpected_error_is_raised_in_all_callers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def failing(*_: object) -> None:
        raise ZeroDivisionError

    async with serving(tmp_path) as served, ledger_of(address_of(served), tmp_path / "client.db") as ledger:
        monkeypatch.setattr(LedgerTransport, "write", failing)
        for _ in range(2):
            with pytest.raises(ClientError, match="has failed: ZeroDivisionError"):
                await soon(ledger.write(set_entity("a", b"1")))
        with pytest.raises(ClientError, match="has failed"):
            await soon(ledger.recovered())
    monkeypatch.undo()
    async with serving(tmp_path) as served, ledger_of(address_of(served), tmp_path / "client.db") as ledger:
        assert len(await soon(ledger.recovered())) == 1


def _store_key_twice(path: Path, *names: str) -> None:
    """Store two writes under one key, as if power failed before the first outcome was saved."""
    store = LedgerStore(str(path))
    store.open("billing-1")
    scope = store.load_scope("acme", "")
    now = time.time_ns() // 10**6
    contents = [(set_entity(name, b"1"),) for name in names]
    entries = [
        QueuedWrite(number, KEY.bytes, operations, encode_operations(operations), now)
        for number, operations in enumerate(contents, 1)
    ]
    store.save(
        scope.id, StoreChanges([SavedEntry(entry, entry.number, entry.number) for entry in entries], [], ScopeState())
    )
    store.close()


@pytest.mark.rule("LG-19")
async def test_key_stored_twice_is_recovered_as_one_write(tmp_path: Path) -> None:
    """The first write was committed and reported, and the key was reused. Then power failed."""
    path = tmp_path / "client.db"
    _store_key_twice(path, "a", "a")
    async with serving(tmp_path) as served, ledger_of(address_of(served), path) as ledger:
        first, second = await soon(ledger.recovered())
        assert expect_written(first.outcome).tx_id == expect_written(second.outcome).tx_id
        assert expect_written(await ledger.write(set_entity("b", b"1"))).sequence == 2


async def test_callers_get_the_outcome_of_the_newer_write_of_a_key_stored_twice(tmp_path: Path) -> None:
    path = tmp_path / "client.db"
    _store_key_twice(path, "a", "b")
    async with serving(tmp_path) as served, ledger_of(address_of(served), path) as ledger:
        again = asyncio.create_task(ledger.write(set_entity("b", b"1"), key=KEY))
        first, second = await soon(ledger.recovered())
        assert await soon(again) == second.outcome != first.outcome
        assert await ledger.pending() == []


async def test_newer_write_of_a_key_stored_twice_is_withdrawn(tmp_path: Path) -> None:
    path = tmp_path / "client.db"
    _store_key_twice(path, "a", "b")
    async with ledger_of(UNREACHABLE_ADDRESS, path) as ledger:
        await ledger.withdraw(KEY)
        assert [one.operations for one in await ledger.pending()] == [(set_entity("a", b"1"),)]


@pytest.mark.rule("LG-7")
@pytest.mark.rule("LG-19")
async def test_scopes_have_separate_sequences_in_one_store(tmp_path: Path) -> None:
    path = tmp_path / "client.db"
    async with ledger_of(UNREACHABLE_ADDRESS, path) as ledger:
        for scope in (ledger, ledger.scope("acme", "main")):
            with pytest.raises(TimeoutError):
                await scope.write(set_entity("a", b"1"), timeout_s=0)
    async with serving(tmp_path) as served, ledger_of(address_of(served), path) as ledger:
        assert [(one.organization, one.vault) for one in ledger.scopes] == [("acme", ""), ("acme", "main")]
        for scope in ledger.scopes:
            (recovered,) = await soon(scope.recovered())
            assert expect_written(recovered.outcome).sequence == 1
        assert ledger.scope("acme", "main") is ledger.scopes[1]
        assert expect_written(await ledger.scope("acme", "main").write(set_entity("b", b"1"))).sequence == 2
        assert expect_written(await ledger.write(set_entity("b", b"1"))).sequence == 2


async def test_invalid_write_is_refused_before_it_is_stored() -> None:
    async with ledger_of(UNREACHABLE_ADDRESS, limits=LedgerLimits(transaction_bytes_max=1000)) as ledger:
        with pytest.raises(CanonicalError, match="must not be empty"):
            await ledger.write([])
        with pytest.raises(CanonicalError, match="must be an operation, not str"):
            await ledger.write("abc")  # type: ignore[arg-type]
        with pytest.raises(CanonicalError, match=r"set_entity\.key"):
            await ledger.write(set_entity("", b""))
        with pytest.raises(LimitExceededError, match="transaction_bytes_max"):
            await ledger.write(set_entity("a", b"1" * 1000))
        with pytest.raises(oncelog.SettingsError, match="key must be"):
            await ledger.write(set_entity("a", b"1"), key=bytes(16))
        assert await ledger.pending() == []


# --- refusals and verification


@pytest.mark.rule("LG-19")
async def test_refused_credentials_are_reported_without_showing_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    path = tmp_path / "client.db"
    async with serving(tmp_path, api_keys=True) as served:
        address = address_of(served)
        key = api_key(served, "billing-1", read=["ledger/acme"], write=["ledger/acme"])
        reader = api_key(served, "billing-2", read=["ledger/acme"])
        other = api_key(served, "billing-3", read=["ledger/acme"], write=["ledger/acme"])
        tokens = ["wrong"]
        async with ledger_of(address, path, token=lambda: tokens[0]) as ledger:
            with pytest.raises(ServerRefusedError, match="auth_failed"):
                await soon(ledger.recovered())
            with pytest.raises(ServerRefusedError, match="auth_failed"):
                await soon(ledger.write(set_entity("a", b"1")))
            assert await ledger.pending() == []
            tokens[0] = other.text
            with pytest.raises(ServerRefusedError, match="client_id: must be the credential's client"):
                await soon(ledger.write(set_entity("a", b"1")))
            tokens[0] = key.text
            assert expect_written(await soon(ledger.write(set_entity("a", b"1")))).sequence == 1
        async with ledger_of(address, client_id="billing-2", token=reader.text) as ledger:
            with pytest.raises(ServerRefusedError, match="no write access to this scope"):
                await soon(ledger.write(set_entity("a", b"1")))
            assert await keys_of(ledger) == ["a"]
        for secret in (key.text, reader.text, other.text):
            assert secret not in caplog.text


@pytest.mark.rule("LG-19")
async def test_pending_write_that_the_server_refuses_does_not_block_later_writes(tmp_path: Path) -> None:
    """An earlier run may have sent the write. The server's client state shows that it was not committed."""
    path = tmp_path / "client.db"
    async with ledger_of(UNREACHABLE_ADDRESS, path) as ledger:
        for key, value in (("large", b"1" * 100), ("small", b"1")):
            with pytest.raises(TimeoutError):
                await ledger.write(set_entity(key, value), timeout_s=0.01)
    async with (
        serving(tmp_path, entity_value_bytes_max=50) as served,
        ledger_of(address_of(served), path) as ledger,
    ):
        large, small = await soon(ledger.recovered())
        assert isinstance(large.outcome, ServerRefusedError)
        assert "must have at most 50 bytes" in str(large.outcome)
        assert expect_written(small.outcome).sequence == 1
        results = await asyncio.gather(
            ledger.write(set_entity("x", b"1" * 60)), ledger.write(set_entity("y", b"1")), return_exceptions=True
        )
        assert isinstance(results[0], ServerRefusedError)
        assert expect_written(results[1] if not isinstance(results[1], BaseException) else None).sequence == 2


async def test_write_above_the_frame_limit_is_refused_without_retries(tmp_path: Path) -> None:
    async with serving(tmp_path, frame_bytes_max=1000) as served, ledger_of(address_of(served)) as ledger:
        with pytest.raises(ServerRefusedError, match="larger than max"):
            await soon(ledger.write(set_entity("a", b"1" * 2000)))
        assert expect_written(await soon(ledger.write(set_entity("a", b"1")))).sequence == 1


@pytest.mark.rule("LG-19")
async def test_rate_limited_writes_are_retried_in_order(tmp_path: Path) -> None:
    clock = ManualClock()
    async with (
        serving(tmp_path, clock=clock, new_events_per_second_max=50) as served,
        ledger_of(address_of(served)) as ledger,
    ):
        writing = asyncio.gather(*(ledger.write(set_entity(str(one), b"1")) for one in range(70)))
        await until(lambda: served.server.counts.requests["ledger", "grpc", "rate_limited"] > 0)
        clock.advance(1000)
        assert [expect_written(one).sequence for one in await soon(writing)] == list(range(1, 71))


@pytest.mark.rule("LG-18")
@pytest.mark.rule("LG-19")
async def test_invalid_proof_raises_unverified_error(
    served: Serving, ledger: LedgerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert served.server.grpc_service is not None
    door: Any = served.server.grpc_service._service
    honest = door._find_success

    def forge_transaction(*arguments: Any) -> Any:
        success = honest(*arguments)
        return replace(success, attestation=replace(success.attestation, proof=Proof(0, 2, (bytes(32),))))

    monkeypatch.setattr(door, "_find_success", forge_transaction)
    with pytest.raises(UnverifiedError, match="does not verify") as caught:
        await ledger.write(set_entity("a", b"1"))
    assert caught.value.tx_id is not None
    monkeypatch.setattr(door, "_find_success", honest)
    assert expect_written(await ledger.write(set_entity("b", b"1"))).sequence == 2
    assert await ledger.pending() == []


async def test_tls_client_accepts_a_known_root_and_refuses_an_unknown_one(tmp_path: Path) -> None:
    tls = make_certificate(tmp_path, "server")
    async with serving(tmp_path, tls=tls) as served:
        address = address_of(served).replace("127.0.0.1", "localhost")
        async with ledger_of(address, tls=str(tls.certificate)) as ledger:
            assert expect_written(await soon(ledger.write(set_entity("a", b"1")))).sequence == 1
        async with ledger_of(address, tls=True) as ledger:  # the machine does not trust the root certificate
            writing = asyncio.create_task(ledger.write(set_entity("a", b"1")))
            await until(lambda: "CERTIFICATE_VERIFY_FAILED" in str(ledger.last_error))
            assert not writing.done()
            writing.cancel()


async def test_failing_token_function_is_retried(tmp_path: Path) -> None:
    calls = 0

    async def token() -> str | None:
        nonlocal calls
        calls += 1
        if calls < 4:
            raise OSError("no network")
        return None

    async with serving(tmp_path) as served, ledger_of(address_of(served), token=token) as ledger:
        assert expect_written(await soon(ledger.write(set_entity("a", b"1")))).sequence == 1


async def test_watch_raises_closed_error_when_the_client_is_closed(served: Serving) -> None:
    ledger = ledger_of(address_of(served))
    await ledger.__aenter__()
    watched = ledger.watch_blocks()
    waiting = asyncio.ensure_future(anext(watched))
    await until(lambda: len(served.server.grpc_service or ()) == 1)
    await ledger.close()
    with pytest.raises(ClosedError):
        await soon(waiting)


# --- reads


@BOTH_STORES
async def test_reads_return_entities_relationships_transactions_proofs_and_blocks(ledger: LedgerClient) -> None:
    operations = (
        set_entity("user:1", b"\0\xff", expires_at_ms=2**52, must_not_exist=True),
        set_entity("user:2", b""),
        relate("doc:1", "owner", "ann"),
        relate("doc:1", "reader", "bob"),
        unrelate("doc:1", "owner", "eve"),
        delete_entity("user:3"),
    )
    first = expect_written(await ledger.write(operations, key=UUID(int=5)))
    assert first.tx_id is not None
    entity = await ledger.get_entity("user:1")
    assert entity is not None
    assert (entity.value, entity.version, entity.expires_at_ms) == (b"\0\xff", 1, 2**52)
    assert await ledger.get_entity("user:3") is None
    assert [one.key async for one in ledger.list_entities("user:", page_size=1)] == ["user:1", "user:2"]
    related = [one async for one in ledger.list_relationships(resource="doc:1", page_size=1)]
    assert [(one.relation, one.subject) for one in related] == [("owner", "ann"), ("reader", "bob")]
    assert await ledger.check_relationship("doc:1", "owner", "ann")
    assert not await ledger.check_relationship("doc:1", "owner", "bob")
    found = await ledger.get_transaction(first.tx_id)
    assert found is not None
    assert (found.operations, found.key, found.sequence) == (operations, UUID(int=5).bytes, 1)
    proof = await ledger.get_proof(first.tx_id)
    assert proof is not None
    assert proof.is_valid
    assert verify(proof_document(proof), block_hash=proof.block.hash).is_valid
    assert first.height is not None
    block = await ledger.get_block(first.height)
    assert block is not None
    assert (block.tx_ids, block.block.hash, block.block) == ((first.tx_id,), block.hash, proof.block)
    assert await ledger.get_transaction("00" * 8) is None
    assert await ledger.get_proof("00" * 8) is None
    assert await ledger.get_block(10**6) is None
    with pytest.raises(ServerRefusedError, match="tx_id"):
        await ledger.get_transaction("no id")


@BOTH_STORES
async def test_watched_blocks_arrive_once_across_a_server_restart(tmp_path: Path, port: int) -> None:
    heights: list[int] = []
    async with serving(tmp_path, grpc_port=port) as served, ledger_of(address_of(served)) as ledger:
        await ledger.write(set_entity("a", b"1"))
        watched = ledger.watch_blocks()
        heights.append((await soon(anext(watched))).block.height)
        await ledger.write(set_entity("b", b"1"))
        heights.append((await soon(anext(watched))).block.height)
        following = asyncio.ensure_future(anext(watched))
        await served.server.stop()
        async with serving(tmp_path, grpc_port=port):
            await soon(ledger.write(set_entity("c", b"1")))
            heights.append((await soon(following)).block.height)
            await watched.aclose()
            later = ledger.watch_blocks(2, check_chain=False)
            assert (await soon(anext(later))).block.height == 3
            await later.aclose()
            wrong = ledger.watch_blocks(2, previous_hash=bytes(32))
            with pytest.raises(UnverifiedError, match="does not follow"):
                await soon(anext(wrong))
    assert heights == [1, 2, 3]


async def test_unanswered_read_raises_lost_error() -> None:
    limits = LedgerLimits(answer_timeout_ms=20)
    async with ledger_of(UNREACHABLE_ADDRESS, limits=limits) as ledger:
        with pytest.raises(LostError):
            await ledger.get_entity("a")
    with pytest.raises(ClosedError):
        await ledger.get_entity("a")
