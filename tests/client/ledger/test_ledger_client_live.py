"""The ledger's client against a real server, in one process and in several, on both stores."""

import asyncio
import logging
import signal
import time
from pathlib import Path
from random import Random
from typing import Any
from uuid import UUID

import pytest
from msgspec.structs import replace

import oncelog
from client.ledger.ledgers import (
    LIMITS,
    NOWHERE,
    address_of,
    keys_of,
    killed_client,
    ledger_of,
    server_process,
    started,
    written,
)
from client.waiting import line_of, run, soon, until
from databases import BOTH_STORES, log_at
from doors.serving import api_key, serving
from doors.test_server import make_certificate
from oncelog.client.ledger import (
    ForgottenError,
    LedgerLimits,
    RefusalCode,
    Refused,
    UnverifiedError,
    Written,
    delete_entity,
    relate,
    set_entity,
    stream,
    unrelate,
)
from oncelog.client.ledger.entries import Call, Changes, Entry
from oncelog.client.ledger.store import LedgerStore
from oncelog.client.ledger.wire import Wire
from oncelog.core.proof import Proof
from oncelog.core.transactions import transaction_body
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

DAY_MS = 24 * 3600 * 1000
FEW = LedgerLimits(
    pause_ms_min=1, pause_ms_max=20, refused_pause_ms_min=1, in_flight_max=3, pending_writes_max=5, idle_ms=3_600_000
)


# --- writing


@BOTH_STORES
@pytest.mark.rule("LG-19")
def test_a_write_and_its_outcomes(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served, ledger_of(address_of(served), tmp_path / "client.db") as ledger:
            first = written(await ledger.write([set_entity("a", b"1", must_not_exist=True), relate("d", "o", "ann")]))
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
            assert _code(await ledger.write(set_entity("a", b"2", version_is=7))) is RefusalCode.VERSION_MISMATCH
            assert _code(await ledger.write(set_entity("a", b"2", value_equals=b""))) is RefusalCode.VALUE_MISMATCH
            second = written(await ledger.write(set_entity("a", b"2", version_is=1)))
            assert (second.sequence, second.version) == (2, 2)
            assert (await ledger.client_state()).last_sequence == 2
            assert await ledger.pending() == []

    run(main())


@pytest.mark.rule("LG-19")
def test_the_same_key_is_the_same_write(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served, ledger_of(address_of(served)) as ledger:
            key = UUID(int=7)
            operation = set_entity("a", b"1")
            both = await asyncio.gather(ledger.write(operation, key=key), ledger.write(operation, key=key.bytes))
            assert both[0] == both[1]
            assert await ledger.write(operation, key=key) == both[0]
            assert _code(await ledger.write(set_entity("a", b"2"), key=key)) is RefusalCode.IDEMPOTENCY_KEY_REUSED
            assert written(await ledger.write(set_entity("b", b"2"))).sequence == 2

    run(main())


@BOTH_STORES
@pytest.mark.rule("LG-19")
def test_concurrent_callers_are_put_in_one_order(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served, ledger_of(address_of(served), tmp_path / "client.db") as ledger:
            outcomes = await asyncio.gather(
                *(ledger.write(set_entity(f"{number:03}", b"1", must_exist=number % 17 == 5)) for number in range(200))
            )
            good = [f"{number:03}" for number in range(200) if number % 17 != 5]
            assert [one.sequence for one in outcomes if isinstance(one, Written)] == list(range(1, len(good) + 1))
            assert {_code(one) for one in outcomes if isinstance(one, Refused)} == {RefusalCode.KEY_NOT_FOUND}
            assert await keys_of(ledger) == good

    run(main())


@pytest.mark.rule("LG-19")
def test_the_next_is_sent_before_the_first_is_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served, ledger_of(address_of(served), limits=FEW) as ledger:
            await ledger.recovered()
            gate = served.hold_commits(monkeypatch)
            sent = _count_calls(monkeypatch)
            writes = [asyncio.create_task(ledger.write(set_entity(str(number), b"1"))) for number in range(5)]
            await until(lambda: len(sent) == 3)
            with pytest.raises(LimitExceededError, match="pending_writes_max"):
                await ledger.write(set_entity("x", b"1"))
            gate.open()
            assert [written(one).sequence for one in await asyncio.gather(*writes)] == [1, 2, 3, 4, 5]

    run(main())


@pytest.mark.rule("LG-19")
def test_who_gives_up_waiting_does_not_take_it_back(tmp_path: Path) -> None:
    async def main() -> None:
        path = tmp_path / "client.db"
        async with ledger_of(NOWHERE, path) as ledger:
            with pytest.raises(TimeoutError):
                await ledger.write(set_entity("a", b"1"), key=UUID(int=1), timeout_s=0.01)
            cancelled = asyncio.create_task(ledger.write(set_entity("b", b"1")))
            await until(lambda: len(ledger._stream._protocol) == 2)  # type: ignore[union-attr]
            cancelled.cancel()
            await asyncio.gather(cancelled, return_exceptions=True)
            assert [one.sequence for one in await ledger.pending()] == [1, 2]
            with pytest.raises(IdReusedError):
                await ledger.write(set_entity("a", b"2"), key=UUID(int=1))
            waiting = asyncio.create_task(ledger.write(set_entity("c", b"1")))
            await until(lambda: len(ledger._stream._protocol) == 3)  # type: ignore[union-attr]
        with pytest.raises(ClosedError, match="is kept"):
            await waiting
        with pytest.raises(ClosedError):
            await ledger.write(set_entity("d", b"1"))
        async with serving(tmp_path) as served, ledger_of(address_of(served), path) as ledger:
            recovered = await soon(ledger.recovered())
            assert recovered[0].key == UUID(int=1)
            assert [written(one.outcome).sequence for one in recovered] == [1, 2, 3]
            assert await keys_of(ledger) == ["a", "b", "c"]

    run(main())


@pytest.mark.rule("LG-19")
def test_closing_waits_for_what_is_sent_but_not_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        path = tmp_path / "client.db"
        async with serving(tmp_path) as served:
            for timeout_ms in (60_000, 1):
                limits = replace(LIMITS, close_timeout_ms=timeout_ms)
                ledger = ledger_of(address_of(served), path, limits=limits)
                await ledger.__aenter__()
                await ledger.recovered()
                gate = served.hold_commits(monkeypatch)
                sent = _count_calls(monkeypatch)
                writing = asyncio.create_task(ledger.write(set_entity(f"{timeout_ms}", b"1")))
                await until(lambda: len(sent) == 1)  # noqa: B023 - it is waited for here
                closing = asyncio.create_task(ledger.close())
                if timeout_ms > 1:
                    gate.open()
                    assert written(await soon(writing)).sequence == 1
                await soon(closing)
                gate.open()
                if timeout_ms == 1:
                    with pytest.raises(ClosedError):
                        await writing
                monkeypatch.undo()
            async with ledger_of(address_of(served), path) as ledger:
                (recovered,) = await soon(ledger.recovered())
                assert written(recovered.outcome).sequence == 2

    run(main())


def test_a_file_that_cannot_be_written_takes_no_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        monkeypatch.setattr(stream, "STORE_PAUSE_S", 0.001)
        async with serving(tmp_path) as served, ledger_of(address_of(served)) as ledger:
            await ledger.recovered()
            with monkeypatch.context() as patched:
                patched.setattr(LedgerStore, "save", _full)
                results = await asyncio.gather(
                    *(ledger.write(set_entity(name, b"1")) for name in ("a", "b")), return_exceptions=True
                )
                assert [type(one) for one in results] == [StoreUnavailableError] * 2
            assert written(await soon(ledger.write(set_entity("c", b"1")))).sequence == 1
            assert await keys_of(ledger) == ["c"]

    run(main())


def _full(*_: object) -> None:
    raise StoreUnavailableError("the disk is full")


def test_what_nobody_has_foreseen_is_told_to_everybody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def failing(*_: object) -> None:
        raise ZeroDivisionError

    async def main() -> None:
        async with serving(tmp_path) as served, ledger_of(address_of(served), tmp_path / "client.db") as ledger:
            monkeypatch.setattr(Wire, "write", failing)
            for _ in range(2):
                with pytest.raises(ClientError, match="cannot go on: ZeroDivisionError"):
                    await soon(ledger.write(set_entity("a", b"1")))
            with pytest.raises(ClientError, match="cannot go on"):
                await soon(ledger.recovered())
        monkeypatch.undo()
        async with serving(tmp_path) as served, ledger_of(address_of(served), tmp_path / "client.db") as ledger:
            assert len(await soon(ledger.recovered())) == 1

    run(main())


@pytest.mark.rule("LG-19")
def test_a_key_that_is_in_the_file_twice(tmp_path: Path) -> None:
    """Its first write was committed and told, and it was used again; then the power failed."""

    async def main() -> None:
        path = tmp_path / "client.db"
        store = LedgerStore(str(path))
        store.open("billing-1")
        scope = store.scope("acme", "")
        operations, now = (set_entity("a", b"1"),), time.time_ns() // 10**6
        entries = [Entry(number, bytes([7]) * 16, operations, transaction_body(operations), now) for number in (1, 2)]
        store.save(scope.id, Changes([(entry, entry.number) for entry in entries], [], 0))
        store.close()
        async with serving(tmp_path) as served, ledger_of(address_of(served), path) as ledger:
            first, second = await soon(ledger.recovered())
            assert written(first.outcome).tx_id == written(second.outcome).tx_id
            assert written(await ledger.write(set_entity("b", b"1"))).sequence == 2

    run(main())


@pytest.mark.rule("LG-7")
@pytest.mark.rule("LG-19")
def test_scopes_have_streams_of_their_own_in_one_file(tmp_path: Path) -> None:
    async def main() -> None:
        path = tmp_path / "client.db"
        async with ledger_of(NOWHERE, path) as ledger:
            for scope in (ledger, ledger.scope("acme", "main")):
                with pytest.raises(TimeoutError):
                    await scope.write(set_entity("a", b"1"), timeout_s=0)
        async with serving(tmp_path) as served, ledger_of(address_of(served), path) as ledger:
            assert [(one.organization, one.vault) for one in ledger.scopes] == [("acme", ""), ("acme", "main")]
            for scope in ledger.scopes:
                (recovered,) = await soon(scope.recovered())
                assert written(recovered.outcome).sequence == 1
            assert ledger.scope("acme", "main") is ledger.scopes[1]
            assert written(await ledger.scope("acme", "main").write(set_entity("b", b"1"))).sequence == 2
            assert written(await ledger.write(set_entity("b", b"1"))).sequence == 2

    run(main())


def test_what_cannot_be_written_is_told_at_once(tmp_path: Path) -> None:
    async def main() -> None:
        async with ledger_of(NOWHERE, limits=LedgerLimits(transaction_bytes_max=1000)) as ledger:
            with pytest.raises(CanonicalError, match="at least one"):
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

    run(main())


# --- crashes


@BOTH_STORES
@pytest.mark.rule("LG-19")
@pytest.mark.parametrize("moment", ["unsent", "unanswered"])
def test_a_client_that_is_killed_goes_on_where_it_was(tmp_path: Path, moment: str) -> None:
    path, count = tmp_path / "client.db", 5

    async def main(address: str) -> None:
        async with ledger_of(address, path) as ledger:
            pending = await ledger.pending()
            assert any(one.operations[0] == set_entity("entity:4", b"1", must_not_exist=True) for one in pending)
            later = await soon(ledger.write(set_entity("later", b"1")))
            recovered = await soon(ledger.recovered())
            assert [one.key for one in recovered] == [one.key for one in pending]
            sequences = [written(one.outcome).sequence for one in recovered]
            assert sequences == list(range(count - len(recovered) + 1, count + 1))
            assert written(later).sequence == count + 1
            assert await keys_of(ledger) == [*(f"entity:{number}" for number in range(count)), "later"]
            assert len([one async for one in _transactions(ledger)]) == count + 1

    with server_process(log_at(tmp_path / "events.db")) as (_, address):
        killed_client(address, path, moment, count)
        run(main(address))
        run(_nothing_is_recovered(address, path))


async def _nothing_is_recovered(address: str, path: Path) -> None:
    async with ledger_of(address, path) as ledger:
        assert await soon(ledger.recovered()) == []


@BOTH_STORES
@pytest.mark.rule("LG-19")
def test_a_client_that_is_killed_again_and_again_loses_and_doubles_nothing(tmp_path: Path) -> None:
    """Each write is on the condition that it has not happened: one that happened twice would be refused."""
    path, told = tmp_path / "client.db", list[str]()
    with server_process(log_at(tmp_path / "events.db")) as (_, address):
        for number, lines in enumerate((1, 7, 23, 2, 40, 11)):
            with started("ledger_storm_worker.py", address, str(path), str(number)) as process:
                told += [line_of(process) for _ in range(lines)]
                process.send_signal(signal.SIGKILL)
                assert process.stdout is not None
                told += [line.strip() for line in process.stdout if line.endswith("\n")]

        async def main() -> None:
            async with ledger_of(address, path) as ledger:
                for one in await soon(ledger.recovered()):
                    told.append(f"{type(one.outcome).__name__} {getattr(one.operations[0], 'key', '')}")
                keys = await keys_of(ledger)
                assert keys == sorted(keys)
                assert {line.partition(" ")[0] for line in told} == {"Written"}
                assert {line.partition(" ")[2] for line in told} <= set(keys)  # killed before it was said
                assert await ledger.pending() == []
                for number in range(6):  # none is missing between those that are there
                    names = [key for key in keys if key.startswith(f"{number}:")]
                    assert names == [f"{number}:{one:04}" for one in range(len(names))]

        run(main())


@BOTH_STORES
@pytest.mark.rule("LG-11")
@pytest.mark.rule("LG-19")
def test_a_server_that_is_killed_and_comes_back(tmp_path: Path) -> None:
    store = log_at(tmp_path / "events.db")

    async def main() -> None:
        with server_process(store) as (process, address):
            port = int(address.rpartition(":")[2])
            ledger = ledger_of(address, tmp_path / "client.db")
            await ledger.__aenter__()
            done = asyncio.Event()
            outcomes: list[Any] = []

            async def write_all() -> None:
                for number in range(0, 120, 4):
                    names = [f"{number + one:03}" for one in range(4)]
                    outcomes.extend(await asyncio.gather(*(ledger.write(set_entity(one, b"1")) for one in names)))
                    if number >= 20:
                        done.set()

            writing = asyncio.create_task(write_all())
            await done.wait()
            process.send_signal(signal.SIGKILL)
            process.wait()
        with server_process(store, port):
            await soon(writing)
            assert [written(one).sequence for one in outcomes] == list(range(1, 121))
            assert await keys_of(ledger) == [f"{number:03}" for number in range(120)]
            await ledger.close()

    run(main())


@BOTH_STORES
@pytest.mark.rule("LG-19")
@pytest.mark.parametrize("seed", range(2))
def test_a_network_that_loses_requests_and_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    chance = Random(seed)
    call = Wire.call

    async def losing(self: Wire, method: str, request: Any, **options: Any) -> Any:
        if options and chance.random() < 0.1:
            raise LostError("the request was lost")
        answer = await call(self, method, request, **options)
        if options and chance.random() < 0.1:
            raise LostError("the answer was lost")
        return answer

    async def main() -> None:
        monkeypatch.setattr(Wire, "call", losing)
        names, outcomes = [f"{number:03}" for number in range(100)], list[Any]()
        refused = {name for name in names if chance.random() < 0.1}
        async with serving(tmp_path) as served:
            for part in (names[:50], names[50:]):  # and in two runs
                async with ledger_of(address_of(served), tmp_path / "client.db") as ledger:
                    writes = [ledger.write(set_entity(name, b"1", must_exist=name in refused)) for name in part]
                    outcomes += await asyncio.gather(*writes)
                    keys = await keys_of(ledger)
        assert {name for name, one in zip(names, outcomes, strict=True) if isinstance(one, Refused)} == refused
        assert keys == [name for name in names if name not in refused]
        assert [one.sequence for one in outcomes if isinstance(one, Written)] == list(range(1, len(keys) + 1))

    run(main())


@pytest.mark.rule("LG-11")
def test_who_may_write_and_not_read_believes_what_it_is_told(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, api_keys=True) as served:
            token = api_key(served, "billing-1", write=["ledger/acme"]).text
            async with ledger_of(address_of(served), token=token) as ledger:
                first = written(await ledger.write(set_entity("a", b"1"), key=UUID(int=1)))
                assert first.version == 1
        async with (
            serving(tmp_path, api_keys=True) as served,
            ledger_of(address_of(served), token=token) as ledger,
        ):
            again = written(await ledger.write(set_entity("a", b"1"), key=UUID(int=1)))
            assert again == Written(first.tx_id, 1, None, first.height, None, is_replay=True)

    run(main())


@BOTH_STORES
@pytest.mark.rule("LG-11")
def test_an_answer_after_a_restart_is_looked_up_and_complete(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served, ledger_of(address_of(served)) as ledger:
            first = written(await ledger.write(set_entity("a", b"1"), key=UUID(int=1)))
        async with serving(tmp_path) as served, ledger_of(address_of(served)) as ledger:
            again = written(await ledger.write(set_entity("a", b"1"), key=UUID(int=1)))
            assert again == Written(first.tx_id, 1, first.version, first.height, first.timestamp_ms, is_replay=True)
            assert written(await ledger.write(set_entity("b", b"1"))).sequence == 2
        async with serving(tmp_path) as served, ledger_of(address_of(served), verify=False) as ledger:
            believed = written(await ledger.write(set_entity("a", b"1"), key=UUID(int=1)))
            assert believed == Written(first.tx_id, 1, None, first.height, None, is_replay=True)

    run(main())


# --- where the server stands elsewhere


@BOTH_STORES
@pytest.mark.rule("LG-19")
def test_a_new_file_goes_on_behind_what_the_server_knows(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served:
            for name in ("one.db", "two.db"):
                async with ledger_of(address_of(served), tmp_path / name) as ledger:
                    for key in ("a", "b"):
                        await ledger.write(set_entity(f"{name}:{key}", b"1"))
            async with ledger_of(address_of(served), tmp_path / "one.db") as ledger:  # and an old one
                assert written(await ledger.write(set_entity("c", b"1"))).sequence == 5

    run(main())


@BOTH_STORES
@pytest.mark.rule("LG-13")
@pytest.mark.rule("LG-19")
@pytest.mark.parametrize("value", [b"1", b"2"])
def test_a_pending_write_whose_number_another_has_keeps_its_key(tmp_path: Path, value: bytes) -> None:
    """Also if both say the same: the server takes it for a retry of the other, and it would be lost."""

    async def main() -> None:
        path = tmp_path / "client.db"
        async with ledger_of(NOWHERE, path) as ledger:
            for number in (1, 2):
                with pytest.raises(TimeoutError):
                    await ledger.write(set_entity("a", b"1"), key=UUID(int=number), timeout_s=0.01)
        async with serving(tmp_path) as served:
            async with ledger_of(address_of(served)) as other:
                await other.write(set_entity("a", value))
            async with ledger_of(address_of(served), path) as ledger:
                recovered = await soon(ledger.recovered())
                assert [(one.key.int, written(one.outcome).sequence) for one in recovered] == [(1, 2), (2, 3)]
                assert [one.key[-1] async for one in _transactions(ledger)][1:] == [1, 2]

    run(main())


@BOTH_STORES
@pytest.mark.rule("LG-16")
@pytest.mark.rule("LG-19")
@pytest.mark.parametrize("resend", [True, False, [UUID(int=2)]])
def test_a_client_that_was_forgotten_is_asked_before_anything_is_sent_again(tmp_path: Path, resend: Any) -> None:
    async def main() -> None:
        path, clock = tmp_path / "client.db", ManualClock()
        store = log_at(tmp_path / "events.db")
        async with oncelog.open(store, settings=oncelog.Settings(eviction_interval=1)):
            pass
        async with serving(tmp_path, clock=clock) as served:
            async with ledger_of(address_of(served), path) as ledger:
                await ledger.write(set_entity("a", b"1"))
            async with ledger_of(NOWHERE, path) as ledger:
                for number in (1, 2, 3):
                    with pytest.raises(TimeoutError):
                        await ledger.write(set_entity(f"p{number}", b"1"), key=UUID(int=number), timeout_s=0.01)
            clock.advance(DAY_MS + 1)
            async with ledger_of(address_of(served), client_id="other") as other:
                await other.write(set_entity("other", b"1"))
            async with ledger_of(address_of(served), path) as ledger:
                with pytest.raises(ForgottenError, match="has forgotten this client") as caught:
                    await soon(ledger.recovered())
                assert (caught.value.last_sequence, caught.value.server_sequence) == (1, 0)
                assert [one.key.int for one in caught.value.pending] == [1, 2, 3]
                with pytest.raises(ForgottenError):
                    await ledger.write(set_entity("b", b"1"))
                assert await keys_of(ledger) == ["a", "other"]
                outcomes = await soon(ledger.resume(resend=resend))
                chosen = {True: [1, 2, 3], False: []}.get(resend, [2]) if isinstance(resend, bool) else [2]
                assert [one.key.int for one in outcomes] == chosen
                assert [written(one.outcome).sequence for one in outcomes] == list(range(1, len(chosen) + 1))
                assert written(await ledger.write(set_entity("b", b"1"))).sequence == len(chosen) + 1
                assert await keys_of(ledger) == ["a", "other", *(f"p{number}" for number in chosen), "b"]
                recovered = await ledger.recovered()
                assert [one.outcome is None for one in recovered] == [number not in chosen for number in (1, 2, 3)]

    run(main())


@pytest.mark.rule("LG-16")
@pytest.mark.rule("LG-19")
@pytest.mark.parametrize("is_idle", [True, False])
def test_a_client_forgotten_while_it_runs(tmp_path: Path, is_idle: bool) -> None:
    """One that was idle asks before it sends, and has nothing to send again. Else its write waits for a decision."""

    async def main() -> None:
        clock = ManualClock()
        store = log_at(tmp_path / "events.db")
        async with oncelog.open(store, settings=oncelog.Settings(eviction_interval=1)):
            pass
        limits = LedgerLimits(pause_ms_min=1, pause_ms_max=20, idle_ms=1 if is_idle else 3_600_000)
        async with serving(tmp_path, clock=clock) as served, ledger_of(address_of(served), limits=limits) as ledger:
            await ledger.write(set_entity("a", b"1"))
            await ledger.write(set_entity("b", b"1"))
            clock.advance(DAY_MS + 1)
            async with ledger_of(address_of(served), client_id="other") as other:
                await other.write(set_entity("other", b"1"))
            if is_idle:
                assert written(await ledger.write(set_entity("c", b"1"))).sequence == 1
            else:
                with pytest.raises(ForgottenError):
                    await ledger.write(set_entity("c", b"1"), key=UUID(int=1))
                (outcome,) = await soon(ledger.resume(resend=True))
                assert (outcome.key.int, written(outcome.outcome).sequence) == (1, 1)
            assert await ledger.resume(resend=True) == []
            assert await keys_of(ledger) == ["a", "b", "other", "c"]

    run(main())


@pytest.mark.rule("LG-19")
def test_a_server_restored_from_a_backup_is_told_of_too(tmp_path: Path) -> None:
    async def main() -> None:
        path = tmp_path / "client.db"
        (tmp_path / "other").mkdir()
        async with serving(tmp_path / "other") as served, ledger_of(address_of(served)) as ledger:
            await ledger.write(set_entity("a", b"1"))
        async with serving(tmp_path) as served, ledger_of(address_of(served), path) as ledger:
            for key in ("a", "b", "c"):
                await ledger.write(set_entity(key, b"1"))
        async with serving(tmp_path / "other") as served, ledger_of(address_of(served), path) as ledger:
            with pytest.raises(ForgottenError, match="knows less of this client") as caught:
                await soon(ledger.recovered())
            assert (caught.value.last_sequence, caught.value.server_sequence) == (3, 1)
            assert await ledger.resume(resend=True) == []
            assert written(await ledger.write(set_entity("d", b"1"))).sequence == 2

    run(main())


# --- who may not


@pytest.mark.rule("LG-19")
def test_a_server_that_does_not_let_us_in_says_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)

    async def main() -> None:
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
                with pytest.raises(ServerRefusedError, match="client_id: must be that of the credential"):
                    await soon(ledger.write(set_entity("a", b"1")))
                tokens[0] = key.text
                assert written(await soon(ledger.write(set_entity("a", b"1")))).sequence == 1
            async with ledger_of(address, client_id="billing-2", token=reader.text) as ledger:
                with pytest.raises(ServerRefusedError, match="may not be written"):
                    await soon(ledger.write(set_entity("a", b"1")))
                assert await keys_of(ledger) == ["a"]
            for secret in (key.text, reader.text, other.text):
                assert secret not in caplog.text

    run(main())


@pytest.mark.rule("LG-19")
def test_a_pending_write_that_the_server_does_not_look_at(tmp_path: Path) -> None:
    """Nobody knows whether it was sent in an earlier run; but where the client stands says that it was not written."""

    async def main() -> None:
        path = tmp_path / "client.db"
        async with ledger_of(NOWHERE, path) as ledger:
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
            assert written(small.outcome).sequence == 1
            results = await asyncio.gather(
                ledger.write(set_entity("x", b"1" * 60)), ledger.write(set_entity("y", b"1")), return_exceptions=True
            )
            assert isinstance(results[0], ServerRefusedError)
            assert written(results[1] if not isinstance(results[1], BaseException) else None).sequence == 2

    run(main())


def test_a_message_that_the_server_does_not_take_is_no_reason_to_go_on_for_ever(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, frame_bytes_max=1000) as served, ledger_of(address_of(served)) as ledger:
            with pytest.raises(ServerRefusedError, match="larger than max"):
                await soon(ledger.write(set_entity("a", b"1" * 2000)))
            assert written(await soon(ledger.write(set_entity("a", b"1")))).sequence == 1

    run(main())


@pytest.mark.rule("LG-19")
def test_a_server_that_has_too_much_to_do_is_asked_again(tmp_path: Path) -> None:
    async def main() -> None:
        clock = ManualClock()
        async with (
            serving(tmp_path, clock=clock, new_events_per_second_max=50) as served,
            ledger_of(address_of(served)) as ledger,
        ):
            writing = asyncio.gather(*(ledger.write(set_entity(str(one), b"1")) for one in range(70)))
            await until(lambda: served.server.counts.requests["ledger", "grpc", "rate_limited"] > 0)
            clock.advance(1000)
            assert [written(one).sequence for one in await soon(writing)] == list(range(1, 71))

    run(main())


@pytest.mark.rule("LG-18")
@pytest.mark.rule("LG-19")
def test_a_proof_that_does_not_verify_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served, ledger_of(address_of(served)) as ledger:
            assert served.server.rpc is not None
            door: Any = served.server.rpc._door
            honest = door._success

            def lying(receipt: Any) -> Any:
                return replace(honest(receipt), proof=Proof(0, 2, (bytes(32),)))

            monkeypatch.setattr(door, "_success", lying)
            with pytest.raises(UnverifiedError, match="does not verify") as caught:
                await ledger.write(set_entity("a", b"1"))
            assert caught.value.tx_id is not None
            monkeypatch.setattr(door, "_success", honest)
            assert written(await ledger.write(set_entity("b", b"1"))).sequence == 2
            assert await ledger.pending() == []

    run(main())


def test_a_channel_that_is_encrypted(tmp_path: Path) -> None:
    async def main() -> None:
        tls = make_certificate(tmp_path, "server")
        async with serving(tmp_path, tls=tls) as served:
            address = address_of(served).replace("127.0.0.1", "localhost")
            async with ledger_of(address, tls=str(tls.certificate)) as ledger:
                assert written(await soon(ledger.write(set_entity("a", b"1")))).sequence == 1
            async with ledger_of(address, tls=True) as ledger:  # its root is not one of the machine's
                with pytest.raises(TimeoutError):
                    await ledger.write(set_entity("a", b"1"), timeout_s=0.2)

    run(main())


def test_a_function_for_tokens_may_fail_for_a_while(tmp_path: Path) -> None:
    async def main() -> None:
        asked = 0

        async def token() -> str | None:
            nonlocal asked
            asked += 1
            if asked < 4:
                raise OSError("no network")
            return None

        async with serving(tmp_path) as served, ledger_of(address_of(served), token=token) as ledger:
            assert written(await soon(ledger.write(set_entity("a", b"1")))).sequence == 1

    run(main())


def test_a_read_ends_with_its_client(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served:
            ledger = ledger_of(address_of(served))
            await ledger.__aenter__()
            watched = ledger.watch_blocks()
            waiting = asyncio.ensure_future(anext(watched))
            await until(lambda: len(served.server.rpc or ()) == 1)
            await ledger.close()
            with pytest.raises(ClosedError):
                await soon(waiting)

    run(main())


# --- reading


@BOTH_STORES
def test_what_was_written_can_be_read(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served, ledger_of(address_of(served)) as ledger:
            operations = (
                set_entity("user:1", b"\0\xff", expires_at_ms=2**52, must_not_exist=True),
                set_entity("user:2", b""),
                relate("doc:1", "owner", "ann"),
                relate("doc:1", "reader", "bob"),
                unrelate("doc:1", "owner", "eve"),
                delete_entity("user:3"),
            )
            first = written(await ledger.write(operations, key=UUID(int=5)))
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

    run(main())


@BOTH_STORES
def test_blocks_are_watched_through_a_restart_each_once(tmp_path: Path) -> None:
    async def main() -> None:
        heights: list[int] = []
        async with serving(tmp_path) as served, ledger_of(address_of(served)) as ledger:
            port = int(ledger.address.rpartition(":")[2])
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

    run(main())


def test_a_read_that_nobody_answers_is_lost(tmp_path: Path) -> None:
    async def main() -> None:
        limits = LedgerLimits(answer_timeout_ms=20)
        async with ledger_of(NOWHERE, limits=limits) as ledger:
            with pytest.raises(LostError):
                await ledger.get_entity("a")
        with pytest.raises(ClosedError):
            await ledger.get_entity("a")

    run(main())


# --- helpers


def _code(outcome: Any) -> RefusalCode:
    assert isinstance(outcome, Refused), outcome
    return outcome.code


def _count_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    sent: list[int] = []
    write = Wire.write

    async def counted(self: Wire, organization: str, vault: str, call: Call) -> Any:
        sent.append(call.sequence)
        return await write(self, organization, vault, call)

    monkeypatch.setattr(Wire, "write", counted)
    return sent


async def _transactions(ledger: Any) -> Any:
    height = 1
    while (block := await ledger.get_block(height)) is not None:
        for tx_id in block.tx_ids:
            yield await ledger.get_transaction(tx_id)
        height += 1
