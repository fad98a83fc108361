"""Ledger client recovery: crashes, lost answers, and servers that have forgotten the client."""

import asyncio
import signal
from pathlib import Path
from random import Random
from typing import Any
from uuid import UUID

import pytest

import oncelog
from cli.server_process import server_process
from client.ledger.ledgers import (
    HERE,
    UNREACHABLE_ADDRESS,
    address_of,
    count_calls,
    expect_written,
    keys_of,
    ledger_of,
    transactions_of,
)
from databases import BOTH_STORES, log_at
from deadlines import soon
from oncelog.client.ledger import (
    ForgottenError,
    LedgerLimits,
    Refused,
    Written,
    set_entity,
)
from oncelog.client.ledger.transport import LedgerTransport
from oncelog.errors import (
    LostError,
)
from oncelog.testing.clock import ManualClock
from scripts import read_line, run_until_killed, start_script
from server.running_server import Serving, api_key, serving

DAY_MS = 24 * 3600 * 1000
KILLS_AFTER = (1, 7, 23, 2, 40, 11)
"""Number of writes that each client reports before it is killed."""


# --- crashes


@BOTH_STORES
@pytest.mark.rule("LG-19")
@pytest.mark.parametrize("moment", ["unsent", "unanswered"])
async def test_killed_client_recovers_its_pending_writes(tmp_path: Path, moment: str) -> None:
    path, count = tmp_path / "client.db", 5

    async with server_process(tmp_path, grpc=True) as server:
        address = server.rpc_address
        await asyncio.to_thread(run_until_killed, HERE / "ledger_client_worker.py", address, path, moment, count)
        async with ledger_of(address, path) as ledger:
            pending = await ledger.pending()
            assert any(one.operations[0] == set_entity("entity:4", b"1", must_not_exist=True) for one in pending)
            later = await soon(ledger.write(set_entity("later", b"1")))
            recovered = await soon(ledger.recovered())
            assert [one.key for one in recovered] == [one.key for one in pending]
            sequences = [expect_written(one.outcome).sequence for one in recovered]
            assert sequences == list(range(count - len(recovered) + 1, count + 1))
            assert expect_written(later).sequence == count + 1
            assert await keys_of(ledger) == [*(f"entity:{number}" for number in range(count)), "later"]
            assert len([one async for one in transactions_of(ledger)]) == count + 1
        async with ledger_of(address, path) as ledger:
            assert await soon(ledger.recovered()) == []


@BOTH_STORES
@pytest.mark.rule("LG-19")
async def test_repeatedly_killed_client_commits_each_write_once(tmp_path: Path) -> None:
    """Each write requires that its entity does not exist, so a second commit would be refused."""
    path, reported = tmp_path / "client.db", list[str]()
    async with server_process(tmp_path, grpc=True) as server:
        address = server.rpc_address
        for number, lines in enumerate(KILLS_AFTER):
            with start_script(HERE / "ledger_storm_worker.py", address, path, number) as process:
                reported += [read_line(process) for _ in range(lines)]
                process.send_signal(signal.SIGKILL)
                assert process.stdout is not None
                reported += [line.strip() for line in process.stdout if line.endswith("\n")]
        async with ledger_of(address, path) as ledger:
            for one in await soon(ledger.recovered()):
                reported.append(f"{type(one.outcome).__name__} {getattr(one.operations[0], 'key', '')}")
            keys = await keys_of(ledger)
            assert keys == sorted(keys)
            assert {line.partition(" ")[0] for line in reported} == {"Written"}
            # A client may be killed between a commit and its report.
            assert {line.partition(" ")[2] for line in reported} <= set(keys)
            assert await ledger.pending() == []
            for number in range(len(KILLS_AFTER)):  # no gaps
                names = [key for key in keys if key.startswith(f"{number}:")]
                assert names == [f"{number}:{one:04}" for one in range(len(names))]


@BOTH_STORES
@pytest.mark.rule("LG-11")
@pytest.mark.rule("LG-19")
async def test_writes_continue_after_the_server_is_killed_and_restarted(tmp_path: Path) -> None:
    async with (
        server_process(tmp_path, grpc=True) as server,
        ledger_of(server.rpc_address, tmp_path / "client.db") as ledger,
    ):
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
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.start)
        await soon(writing)
        assert [expect_written(one).sequence for one in outcomes] == list(range(1, 121))
        assert await keys_of(ledger) == [f"{number:03}" for number in range(120)]


@BOTH_STORES
@pytest.mark.rule("LG-19")
@pytest.mark.parametrize("seed", range(2))
async def test_lost_requests_and_answers_do_not_change_the_outcomes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    chance = Random(seed)
    call = LedgerTransport.call

    async def lose_calls(self: LedgerTransport, method: str, request: Any, **options: Any) -> Any:
        if options and chance.random() < 0.1:
            raise LostError("the request was lost")
        answer = await call(self, method, request, **options)
        if options and chance.random() < 0.1:
            raise LostError("the answer was lost")
        return answer

    monkeypatch.setattr(LedgerTransport, "call", lose_calls)
    names, outcomes = [f"{number:03}" for number in range(100)], list[Any]()
    refused = {name for name in names if chance.random() < 0.1}
    async with serving(tmp_path) as served:
        for part in (names[:50], names[50:]):  # two runs of the client
            async with ledger_of(address_of(served), tmp_path / "client.db") as ledger:
                writes = [ledger.write(set_entity(name, b"1", must_exist=name in refused)) for name in part]
                outcomes += await asyncio.gather(*writes)
                keys = await keys_of(ledger)
    assert {name for name, one in zip(names, outcomes, strict=True) if isinstance(one, Refused)} == refused
    assert keys == [name for name in names if name not in refused]
    assert [one.sequence for one in outcomes if isinstance(one, Written)] == list(range(1, len(keys) + 1))


@pytest.mark.rule("LG-11")
async def test_client_without_read_rights_accepts_unverified_replays(tmp_path: Path) -> None:
    async with serving(tmp_path, api_keys=True) as served:
        token = api_key(served, "billing-1", write=["ledger/acme"]).text
        async with ledger_of(address_of(served), token=token) as ledger:
            first = expect_written(await ledger.write(set_entity("a", b"1"), key=UUID(int=1)))
            assert first.version == 1
    async with (
        serving(tmp_path, api_keys=True) as served,
        ledger_of(address_of(served), token=token) as ledger,
    ):
        again = expect_written(await ledger.write(set_entity("a", b"1"), key=UUID(int=1)))
        assert again == Written(first.tx_id, 1, None, first.height, None, is_replay=True)


@BOTH_STORES
@pytest.mark.rule("LG-11")
async def test_replayed_answer_after_a_server_restart_is_complete(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, ledger_of(address_of(served)) as ledger:
        first = expect_written(await ledger.write(set_entity("a", b"1"), key=UUID(int=1)))
    async with serving(tmp_path) as served, ledger_of(address_of(served)) as ledger:
        again = expect_written(await ledger.write(set_entity("a", b"1"), key=UUID(int=1)))
        assert again == Written(first.tx_id, 1, first.version, first.height, first.timestamp_ms, is_replay=True)
        assert expect_written(await ledger.write(set_entity("b", b"1"))).sequence == 2
    async with serving(tmp_path) as served, ledger_of(address_of(served), verify=False) as ledger:
        believed = expect_written(await ledger.write(set_entity("a", b"1"), key=UUID(int=1)))
        assert believed == Written(first.tx_id, 1, None, first.height, None, is_replay=True)


# --- client state on the server


@BOTH_STORES
@pytest.mark.rule("LG-19")
async def test_new_store_continues_after_the_last_sequence_of_the_server(served: Serving, tmp_path: Path) -> None:
    for name in ("one.db", "two.db"):
        async with ledger_of(address_of(served), tmp_path / name) as ledger:
            for key in ("a", "b"):
                await ledger.write(set_entity(f"{name}:{key}", b"1"))
    async with ledger_of(address_of(served), tmp_path / "one.db") as ledger:  # a store with an older state
        assert expect_written(await ledger.write(set_entity("c", b"1"))).sequence == 5


@BOTH_STORES
@pytest.mark.rule("LG-13")
@pytest.mark.rule("LG-19")
@pytest.mark.parametrize("value", [b"1", b"2"])
async def test_pending_write_with_a_taken_sequence_is_sent_again_under_its_key(
    served: Serving, tmp_path: Path, value: bytes
) -> None:
    """If the client reused that sequence for equal content, the server would treat the pending write as a retry."""
    path = tmp_path / "client.db"
    async with ledger_of(UNREACHABLE_ADDRESS, path) as ledger:
        for number in (1, 2):
            with pytest.raises(TimeoutError):
                await ledger.write(set_entity("a", b"1"), key=UUID(int=number), timeout_s=0.01)
    async with ledger_of(address_of(served)) as other:
        await other.write(set_entity("a", value))
    async with ledger_of(address_of(served), path) as ledger:
        recovered = await soon(ledger.recovered())
        assert [(one.key.int, expect_written(one.outcome).sequence) for one in recovered] == [(1, 2), (2, 3)]
        assert [one.key[-1] async for one in transactions_of(ledger)][1:] == [1, 2]


@BOTH_STORES
@pytest.mark.rule("LG-13", "LG-19")
@pytest.mark.parametrize("value", [b"1", b"2"])
async def test_pending_write_is_sent_again_if_its_sequence_was_taken_before_an_eviction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: bytes
) -> None:
    """The sequence entry is evicted, but the server still refuses different content because of the stored record
    (SEQUENCE_REUSED).
    """
    path, clock = tmp_path / "client.db", ManualClock()
    async with oncelog.open(log_at(tmp_path / "events.db"), settings=oncelog.Settings(eviction_interval=1)):
        pass
    async with ledger_of(UNREACHABLE_ADDRESS, path) as ledger:
        for number in (1, 2):
            with pytest.raises(TimeoutError):
                await ledger.write(set_entity("a", b"1"), key=UUID(int=number), timeout_s=0.01)
    async with serving(tmp_path, clock=clock) as served:
        async with ledger_of(address_of(served)) as other:
            await other.write(set_entity("a", value))
            clock.advance(DAY_MS + 1)
            await other.write(set_entity("b", b"1"))  # evicts sequence 1 and renews the client
        sent = count_calls(monkeypatch)
        async with ledger_of(address_of(served), path) as ledger:
            recovered = await soon(ledger.recovered())
            assert [(one.key.int, expect_written(one.outcome).sequence) for one in recovered] == [(1, 3), (2, 4)]
            assert sent[0] == 1, "the write is first sent under its old sequence"
            assert expect_written(await soon(ledger.write(set_entity("c", b"1"), key=UUID(int=3)))).sequence == 5
            assert [one.key[-1] async for one in transactions_of(ledger)][2:] == [1, 2, 3]
        async with ledger_of(address_of(served), path) as ledger:
            assert await soon(ledger.recovered()) == []
            assert expect_written(await soon(ledger.write(set_entity("d", b"1")))).sequence == 6


@BOTH_STORES
@pytest.mark.rule("LG-16")
@pytest.mark.rule("LG-19")
@pytest.mark.parametrize("resend", [True, False, [UUID(int=2)]])
async def test_evicted_client_sends_pending_writes_only_after_resume(tmp_path: Path, resend: Any) -> None:
    path, clock = tmp_path / "client.db", ManualClock()
    store = log_at(tmp_path / "events.db")
    async with oncelog.open(store, settings=oncelog.Settings(eviction_interval=1)):
        pass
    async with serving(tmp_path, clock=clock) as served:
        async with ledger_of(address_of(served), path) as ledger:
            await ledger.write(set_entity("a", b"1"))
        async with ledger_of(UNREACHABLE_ADDRESS, path) as ledger:
            for number in (1, 2, 3):
                with pytest.raises(TimeoutError):
                    await ledger.write(set_entity(f"p{number}", b"1"), key=UUID(int=number), timeout_s=0.01)
        clock.advance(DAY_MS + 1)
        async with ledger_of(address_of(served), client_id="other") as other:
            await other.write(set_entity("other", b"1"))
        async with ledger_of(address_of(served), path) as ledger:
            with pytest.raises(ForgottenError, match="has evicted this client") as caught:
                await soon(ledger.recovered())
            assert (caught.value.last_sequence, caught.value.server_sequence) == (1, 0)
            assert [one.key.int for one in caught.value.pending] == [1, 2, 3]
            with pytest.raises(ForgottenError):
                await ledger.write(set_entity("b", b"1"))
            assert await keys_of(ledger) == ["a", "other"]
            outcomes = await soon(ledger.resume(resend=resend))
            chosen = {True: [1, 2, 3], False: []}.get(resend, [2]) if isinstance(resend, bool) else [2]
            assert [one.key.int for one in outcomes] == chosen
            assert [expect_written(one.outcome).sequence for one in outcomes] == list(range(1, len(chosen) + 1))
            assert expect_written(await ledger.write(set_entity("b", b"1"))).sequence == len(chosen) + 1
            assert await keys_of(ledger) == ["a", "other", *(f"p{number}" for number in chosen), "b"]
            recovered = await ledger.recovered()
            assert [one.outcome is None for one in recovered] == [number not in chosen for number in (1, 2, 3)]


@pytest.mark.rule("LG-16")
@pytest.mark.rule("LG-19")
@pytest.mark.parametrize("is_idle", [True, False])
async def test_client_evicted_while_open_resumes_with_a_new_sequence(tmp_path: Path, is_idle: bool) -> None:
    """An idle client requests its state before it sends. In an active client, the write waits for `resume`."""
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
            assert expect_written(await ledger.write(set_entity("c", b"1"))).sequence == 1
        else:
            with pytest.raises(ForgottenError):
                await ledger.write(set_entity("c", b"1"), key=UUID(int=1))
            (outcome,) = await soon(ledger.resume(resend=True))
            assert (outcome.key.int, expect_written(outcome.outcome).sequence) == (1, 1)
        assert await ledger.resume(resend=True) == []
        assert await keys_of(ledger) == ["a", "b", "other", "c"]


@pytest.mark.rule("LG-19")
async def test_server_restored_from_a_backup_raises_forgotten_error(tmp_path: Path) -> None:
    path = tmp_path / "client.db"
    (tmp_path / "other").mkdir()
    async with serving(tmp_path / "other") as served, ledger_of(address_of(served)) as ledger:
        await ledger.write(set_entity("a", b"1"))
    async with serving(tmp_path) as served, ledger_of(address_of(served), path) as ledger:
        for key in ("a", "b", "c"):
            await ledger.write(set_entity(key, b"1"))
    async with serving(tmp_path / "other") as served, ledger_of(address_of(served), path) as ledger:
        with pytest.raises(ForgottenError, match="has an older state of this client") as caught:
            await soon(ledger.recovered())
        assert (caught.value.last_sequence, caught.value.server_sequence) == (3, 1)
        assert await ledger.resume(resend=True) == []
        assert expect_written(await ledger.write(set_entity("d", b"1"))).sequence == 2
