"""Eviction of ledger clients at every fourth log position, by log time."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import pytest
import pytest_asyncio

from databases import BOTH_STORES
from oncelog.core.policy import LEDGER, evicted_after
from oncelog.core.values import Settings
from oncelog.errors import PolicyError, SettingsError
from oncelog.testing.clock import ManualClock
from server.ledger.ledger_servers import LedgerServer, SharedServer, key, prepare, run_server
from server.ledger.ledger_transports import (
    GRPC,
    Json,
    Ledger,
    code,
    expect_failure,
    expect_refusal,
    expect_success,
    put,
)
from server.ledger.write_answers import expect_already_committed, outcome, receipt_of, retry_write, write_transactions
from server.shared_servers import pool_fixture

pytestmark = BOTH_STORES

TTL_MS: Final = 86_400_000
INTERVAL: Final = 4


class EvictingServer:
    """A server with a manual clock whose log has one lane and evicts at every fourth position.

    Positions count from the start of the test, which is at a multiple of the interval.
    """

    def __init__(self, ledger_server: LedgerServer, name: str, start: int = 0) -> None:
        assert isinstance(ledger_server.served.clock, ManualClock)
        self.clock = ledger_server.served.clock
        self.ledger = ledger_server.ledger(name, client_id="app")
        self._server = ledger_server
        self._start = start

    async def fill(self, upto: int) -> None:
        """Write as other clients until the log has reached the position."""
        others = self._server.ledger("others")
        for number in range(await position(self._server), self._start + upto):
            answer = await others.of(client_id=f"client-{number}").write(1, put("z"), key=key(number))
            assert expect_success(answer)["block_header"]["first_position"] == number + 1


async def position(ledger_server: LedgerServer) -> int:
    heads = await ledger_server.log.heads()
    return heads[1].position if 1 in heads else 0


@asynccontextmanager
async def evicting(directory: Path, wire: str, clock: ManualClock) -> AsyncIterator[EvictingServer]:
    """Run a server for one test on the log in the directory. Create the log if it does not exist."""
    async with run_evicting_server(directory, wire, clock) as ledger_server:
        yield EvictingServer(ledger_server, "acme")


@asynccontextmanager
async def run_evicting_server(directory: Path, wire: str, clock: ManualClock) -> AsyncIterator[LedgerServer]:
    await prepare(directory, clock, eviction_interval=INTERVAL)
    async with run_server(directory, wire, clock=clock) as ledger_server:
        yield ledger_server


server_pool = pool_fixture(lambda directory: run_evicting_server(directory, GRPC, ManualClock()))


@pytest_asyncio.fixture(loop_scope="session")
async def server(shared_server: SharedServer) -> EvictingServer:
    """A shared server at a position that is a multiple of the interval."""
    ledger_server = shared_server.server
    start = -(-await position(ledger_server) // INTERVAL) * INTERVAL
    await EvictingServer(ledger_server, shared_server.name).fill(start)
    return EvictingServer(ledger_server, shared_server.name, start)


@pytest.mark.rule("LG-15")
def test_eviction_interval_and_time_to_live_follow_the_rule_and_are_positive() -> None:
    assert (Settings().eviction_interval, LEDGER.retention.ttl_ms) == (1000, 86_400 * 1000)
    for interval in (0, -1):
        with pytest.raises(SettingsError, match="eviction_interval"):
            Settings(eviction_interval=interval)
    for ms in (0, -1):
        with pytest.raises(PolicyError, match="time to live"):
            evicted_after(ms=ms)


@pytest.mark.rule("LG-8", "LG-15", "LG-16")
async def test_client_is_evicted_at_the_interval_and_then_unknown(server: EvictingServer) -> None:
    (first,) = await write_transactions(server.ledger, 1)
    server.clock.advance(TTL_MS + 1)
    await server.fill(INTERVAL - 1)
    assert await server.ledger.last_sequence() == 1
    assert expect_already_committed(await retry_write(server.ledger, 1)) == receipt_of(first)
    await server.fill(INTERVAL)
    await check_evicted(server.ledger, first)


@pytest.mark.rule("LG-8", "LG-15", "LG-16")
async def test_eviction_is_the_same_after_restarts(tmp_path: Path, wire: str) -> None:
    clock = ManualClock()
    async with evicting(tmp_path, wire, clock) as server:
        (first,) = await write_transactions(server.ledger, 1)
        clock.advance(TTL_MS + 1)
        await server.fill(INTERVAL - 1)
    async with evicting(tmp_path, wire, clock) as server:
        assert await server.ledger.last_sequence() == 1
        assert expect_already_committed(await retry_write(server.ledger, 1)) == receipt_of(first)
        await server.fill(INTERVAL)
    async with evicting(tmp_path, wire, clock) as server:
        await check_evicted(server.ledger, first)


async def check_evicted(ledger: Ledger, first: Json) -> None:
    """Check that the client has no state, that a higher sequence is a gap, and that a retry as sequence 1 executes."""
    unknown = {
        "last_committed_sequence": 0,
        "last_seen_ms": 0,
        "last_idempotency_key": b"",
        "last_request_hash": b"",
    }
    assert await ledger.get_client_state() == unknown
    error = expect_failure(await ledger.write(2, put("a", b"2"), key=key(2)))
    assert (error["code"], error["last_committed_sequence"]) == ("SEQUENCE_GAP", 0)
    again = expect_success(await retry_write(ledger, 1))
    assert again["committed_tx_id"] != first["committed_tx_id"]
    assert (again["assigned_sequence"], again["version"]) == (1, 2)  # versions belong to the scope and continue
    assert await ledger.last_sequence() == 1
    # the key now belongs to the new transaction
    assert await retry_write(ledger, 1) == again
    assert code(await ledger.write(1, put("x"), key=key(1))) == "IDEMPOTENCY_KEY_REUSED"
    assert (await ledger.get_transaction(first["committed_tx_id"]))["version"] == 1


@pytest.mark.rule("LG-16")
async def test_evicted_client_recovers_by_sending_its_retry_as_sequence_one(server: EvictingServer) -> None:
    ledger = server.ledger
    await write_transactions(ledger, 3)
    server.clock.advance(TTL_MS + 1)
    await server.fill(INTERVAL)
    assert expect_failure(await retry_write(ledger, 3))["code"] == "SEQUENCE_GAP"
    last = await ledger.last_sequence()
    answer = expect_success(await ledger.write(last + 1, put("a", b"3"), key=key(3)))
    assert (last, answer["assigned_sequence"]) == (0, 1)
    # The old key is forgotten, so different operations under it are a new write.
    assert code(await ledger.write(2, put("a", b"else"), key=key(1))) == "OK"


@pytest.mark.rule("LG-15")
@pytest.mark.parametrize(("age_ms", "last"), [(TTL_MS - 1, 1), (TTL_MS, 1), (TTL_MS + 1, 0)])
async def test_only_entries_older_than_the_time_to_live_are_evicted(
    server: EvictingServer, age_ms: int, last: int
) -> None:
    (first,) = await write_transactions(server.ledger, 1)
    server.clock.advance(age_ms)
    await server.fill(INTERVAL)
    assert await server.ledger.last_sequence() == last
    # The answer cache forgets at the same age, without waiting for a multiple of the interval.
    assert (outcome(await retry_write(server.ledger, 1)) == receipt_of(first)) is (last == 1)


@pytest.mark.rule("LG-15")
async def test_passing_of_time_without_writes_evicts_nothing(server: EvictingServer) -> None:
    """Eviction happens at log positions, so a log without writes evicts nothing."""
    (first,) = await write_transactions(server.ledger, 1)
    server.clock.advance(10 * TTL_MS)
    assert await server.ledger.last_sequence() == 1
    assert expect_already_committed(await retry_write(server.ledger, 1)) == receipt_of(first)
    assert expect_already_committed(await retry_write(server.ledger, 1, with_key=b"")) == receipt_of(first)


@pytest.mark.rule("LG-6", "LG-13", "LG-15")
async def test_record_at_the_evicting_position_applies_before_the_eviction(tmp_path: Path, wire: str) -> None:
    """The record renews its client, so the client's earlier sequences do not execute again."""
    clock = ManualClock()
    async with evicting(tmp_path, wire, clock) as server:
        ledger = server.ledger
        committed = await write_transactions(ledger, 2)
        clock.advance(TTL_MS + 1)
        await server.fill(INTERVAL - 1)
        third = expect_success(await retry_write(ledger, 3))  # at the evicting position
        assert await ledger.last_sequence() == 3
        assert await retry_write(ledger, 3) == third
        for number in (1, 2):
            for asked in (key(number), key(50), b""):
                answer = await ledger.write(number, put("a", b"%d" % number), key=asked)
                assert expect_already_committed(answer) == receipt_of(committed[number - 1])
                error = expect_failure(await ledger.write(number, put("a", b"other"), key=asked))
                assert (error["code"], error["last_committed_sequence"]) == ("SEQUENCE_REUSED", 3)
        assert await ledger.last_sequence() == 3
        assert await ledger.value("a") == b"3"
    async with evicting(tmp_path, wire, clock) as server:
        assert expect_already_committed(await retry_write(server.ledger, 1)) == receipt_of(committed[0])
        assert expect_already_committed(await retry_write(server.ledger, 3)) == receipt_of(third)


@pytest.mark.rule("LG-15")
async def test_each_stream_of_a_client_is_evicted_by_the_time_of_its_last_write(server: EvictingServer) -> None:
    ledger = server.ledger
    vault, another = ledger.of(vault="main"), ledger.of(client_id="another")
    await write_transactions(ledger, 1)
    server.clock.advance(1)
    await write_transactions(vault, 1)
    await write_transactions(another, 1)
    server.clock.advance(TTL_MS)
    await server.fill(INTERVAL)
    assert [await one.last_sequence() for one in (ledger, vault, another)] == [0, 1, 1]


@pytest.mark.rule("LG-16", "LG-15")
async def test_setting_the_clock_back_evicts_nothing(tmp_path: Path, wire: str) -> None:
    clock = ManualClock()
    async with evicting(tmp_path, wire, clock) as server:
        ledger = server.ledger
        answers = await write_transactions(ledger, 2)
        clock.jump(-30 * TTL_MS)
        await server.fill(2 * INTERVAL)
        assert await ledger.last_sequence() == 2
        assert [await retry_write(ledger, number) for number in (1, 2)] == answers
        third = expect_success(await retry_write(ledger, 3))
        assert third["timestamp_ms"] >= answers[1]["timestamp_ms"]
        # Log time does not advance, so no entry has aged.
        clock.advance(29 * TTL_MS)
        await server.fill(3 * INTERVAL)
        assert await ledger.last_sequence() == 3


@pytest.mark.rule("LG-16", "CO-17")
async def test_forward_clock_jump_evicts_nothing(tmp_path: Path, wire: str) -> None:
    clock = ManualClock()
    async with evicting(tmp_path, wire, clock) as server:
        ledger = server.ledger
        await write_transactions(ledger, INTERVAL - 1)
        clock.jump(2 * TTL_MS)
        error = await expect_refusal(ledger.write(INTERVAL, put("a"), key=key(INTERVAL)))
        assert (error.status, error.retry_after_ms) == ("UNAVAILABLE", 1000)
        assert "new writes are not accepted" in error.message
        assert await ledger.last_sequence() == INTERVAL - 1
        clock.jump(-2 * TTL_MS)
        assert code(await retry_write(ledger, INTERVAL)) == "OK"
