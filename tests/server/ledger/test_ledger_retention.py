"""Transactions and keys that a ledger knows after a restart, on a second server, or after erasure."""

from pathlib import Path
from typing import Final

import pytest

from databases import BOTH_STORES
from oncelog.core.policy import LEDGER
from oncelog.core.transactions import ledger_scope
from oncelog.engine.limits import Limits
from oncelog.testing.clock import ManualClock
from server.ledger.ledger_servers import SharedServer, key, run_server
from server.ledger.ledger_transports import Json, Ledger, code, expect_failure, expect_success, put
from server.ledger.write_answers import expect_already_committed, receipt_of, retry_write, write_transactions

pytestmark = BOTH_STORES

CACHE_TTL_MS: Final = 86_400_000


# --- restarts ---------------------------------------------------------------------------------------------


@pytest.mark.rule("LG-4", "LG-6", "LG-9", "LG-11", "LG-12", "LG-13")
async def test_restarted_server_knows_every_key_with_its_sequence_id_and_height(tmp_path: Path, wire: str) -> None:
    async with run_server(tmp_path, wire) as server:
        ledger = server.ledger(client_id="app")
        answers = await write_transactions(ledger, 4)
        unkeyed = expect_success(await ledger.write(5, put("a", b"5")))
        state = await ledger.get_client_state()
    async with run_server(tmp_path, wire) as server:
        ledger = server.ledger(client_id="app")
        assert await ledger.get_client_state() == state
        for number in (3, 4, 1, 2):  # the stored answer, not the answer to the last sequence
            for _ in range(2):
                assert expect_already_committed(await retry_write(ledger, number)) == receipt_of(answers[number - 1])
            assert expect_already_committed(await retry_write(ledger, number, with_key=b"")) == receipt_of(
                answers[number - 1]
            )
            assert expect_already_committed(await retry_write(ledger, number, with_key=key(77))) == receipt_of(
                answers[number - 1]
            )
            # A known key is looked up by the key, regardless of the sequence.
            again = await ledger.write(number + 7, put("a", b"%d" % number), key=key(number))
            assert expect_already_committed(again) == receipt_of(answers[number - 1])
            other = await ledger.write(number, put("a", b"other"), key=key(number))
            assert (code(other), expect_failure(other)["number"]) == ("IDEMPOTENCY_KEY_REUSED", 6)
            assert code(await ledger.write(number, put("a", b"other"), key=key(78))) == "SEQUENCE_REUSED"
            assert code(await ledger.write(number, put("a", b"other"))) == "SEQUENCE_REUSED"
        assert expect_already_committed(await ledger.write(5, put("a", b"5"))) == receipt_of(unkeyed)
        assert code(await ledger.write(7, put("a", b"7"), key=key(7))) == "SEQUENCE_GAP"
        assert await ledger.get_client_state() == state
        assert len(await ledger.transaction_ids()) == 5
        sixth = expect_success(await retry_write(ledger, 6))
        assert await retry_write(ledger, 6) == sixth
        assert expect_already_committed(await retry_write(ledger, 4)) == receipt_of(answers[3])


@pytest.mark.rule("LG-11", "LG-17")
async def test_restarted_server_reports_a_batch_as_already_committed(tmp_path: Path, wire: str) -> None:
    writes = [[put("a", b"1")], [put("b", b"2")]]
    async with run_server(tmp_path, wire) as server:
        answer = expect_success(await server.ledger(client_id="app").batch_write(1, *writes, key=key(1)))
    async with run_server(tmp_path, wire) as server:
        ledger = server.ledger(client_id="app")
        assert expect_already_committed(await ledger.batch_write(1, *writes, key=key(1))) == receipt_of(answer)
        assert expect_already_committed(await ledger.batch_write(1, *writes)) == receipt_of(answer)
        assert code(await ledger.batch_write(1, writes[0], key=key(1))) == "IDEMPOTENCY_KEY_REUSED"
        assert code(await ledger.batch_write(3, writes[0], key=key(3))) == "SEQUENCE_GAP"
        assert await ledger.last_sequence() == 1


@pytest.mark.rule("LG-3")
async def test_restarted_server_does_not_remember_a_failed_condition(tmp_path: Path, wire: str) -> None:
    asked = put("a", b"2", condition={"must_exist": True})
    async with run_server(tmp_path, wire) as server:
        ledger = server.ledger(client_id="app")
        assert code(await ledger.write(1, asked, key=key(1))) == "KEY_NOT_FOUND"
    async with run_server(tmp_path, wire) as server:
        ledger = server.ledger(client_id="app")
        assert await ledger.last_sequence() == 0
        assert code(await server.ledger(client_id="else").write(1, put("a"), key=key(1))) == "OK"
        assert expect_success(await ledger.write(1, asked, key=key(1)))["assigned_sequence"] == 1


# --- a second server ----------------------------------------------------------------------------------------


@pytest.mark.rule("LG-7", "LG-9", "LG-11", "LG-12", "LG-13")
async def test_second_server_knows_the_commits_of_the_first(tmp_path: Path, wire: str) -> None:
    async with run_server(tmp_path, wire) as one, run_server(tmp_path, wire) as other:
        first, second = one.ledger(client_id="app"), other.ledger(client_id="app")
        answers = await write_transactions(first, 2)
        assert await second.get_client_state() == await first.get_client_state()
        for number in (1, 2):
            assert expect_already_committed(await retry_write(second, number)) == receipt_of(answers[number - 1])
            assert expect_already_committed(await retry_write(second, number, with_key=b"")) == receipt_of(
                answers[number - 1]
            )
            assert await retry_write(first, number) == answers[number - 1]
            assert code(await second.write(number, put("x"), key=key(number))) == "IDEMPOTENCY_KEY_REUSED"
            assert code(await second.write(number, put("x"), key=key(90))) == "SEQUENCE_REUSED"
        third = expect_success(await retry_write(second, 3))
        assert expect_already_committed(await retry_write(first, 3)) == receipt_of(third)
        assert await retry_write(second, 3) == third
        error = expect_failure(await first.write(5, put("x"), key=key(5)))
        assert (error["code"], error["last_committed_sequence"]) == ("SEQUENCE_GAP", 3)
        assert await first.value("a") == await second.value("a") == b"3"


# --- the cache ---------------------------------------------------------------------------------------------


@pytest.mark.rule("LG-10")
def test_cache_defaults_follow_the_rule() -> None:
    assert (Limits().cache_entries_max, Limits().cache_ttl_ms) == (100_000, CACHE_TTL_MS)


@pytest.mark.rule("LG-10", "LG-11")
async def test_write_evicted_from_the_cache_is_answered_from_the_store(tmp_path: Path, wire: str) -> None:
    async with run_server(tmp_path, wire, cache_entries_max=2) as server:
        ledger = server.ledger(client_id="app")
        answers = await write_transactions(ledger, 5)
        for number in (5, 4):
            assert await retry_write(ledger, number) == answers[number - 1]
        for number in (1, 2, 3):
            assert expect_already_committed(await retry_write(ledger, number)) == receipt_of(answers[number - 1])
        assert code(await ledger.write(1, put("x"), key=key(1))) == "IDEMPOTENCY_KEY_REUSED"


@pytest.mark.rule("LG-10", "LG-11")
async def test_answer_older_than_the_cache_time_to_live_comes_from_the_store(tmp_path: Path, wire: str) -> None:
    clock = ManualClock()
    async with run_server(tmp_path, wire, clock=clock, cache_ttl_ms=700) as server:
        ledger = server.ledger(client_id="app")
        (first,) = await write_transactions(ledger, 1)
        clock.advance(699)
        assert await retry_write(ledger, 1) == first
        clock.advance(1)
        for asked in (key(1), b""):
            assert expect_already_committed(await retry_write(ledger, 1, with_key=asked)) == receipt_of(first)
        second = expect_success(await retry_write(ledger, 2))
        assert await retry_write(ledger, 2) == second
        assert expect_already_committed(await retry_write(ledger, 1)) == receipt_of(first)


@pytest.mark.rule("LG-10", "LG-11")
async def test_retry_without_a_cache_is_already_committed(tmp_path: Path, wire: str) -> None:
    async with run_server(tmp_path, wire, cache_entries_max=0) as server:
        ledger = server.ledger(client_id="app")
        answers = await write_transactions(ledger, 2)
        for number in (1, 2):
            assert expect_already_committed(await retry_write(ledger, number)) == receipt_of(answers[number - 1])


# --- erasure ---------------------------------------------------------------------------------------------------


@pytest.mark.rule("LG-18", "LG-11", "CO-41")
async def test_erased_transaction_is_known_and_marked(shared_server: SharedServer) -> None:
    ledger = shared_server.ledger()
    answers = await write_transactions(ledger, 3)
    before = await ledger.get_transaction(answers[1]["committed_tx_id"])
    erased = await shared_server.server.log.erase(key=key(2), policy=LEDGER, scope=shared_server.scope, client="app")
    assert erased == 1
    await check_second_is_marked_erased(ledger, answers, before)


@pytest.mark.rule("LG-18", "LG-11", "CO-41")
async def test_restarted_server_knows_and_marks_an_erased_transaction(tmp_path: Path, wire: str) -> None:
    async with run_server(tmp_path, wire) as server:
        ledger = server.ledger(client_id="app")
        answers = await write_transactions(ledger, 3)
        before = await ledger.get_transaction(answers[1]["committed_tx_id"])
        assert await server.log.erase(key=key(2), policy=LEDGER, scope=ledger_scope("acme"), client="app") == 1
    async with run_server(tmp_path, wire) as server:
        await check_second_is_marked_erased(server.ledger(client_id="app"), answers, before)


@pytest.mark.rule("CO-41", "CO-44")
async def test_entity_of_an_erased_transaction_has_no_value(shared_server: SharedServer) -> None:
    ledger = shared_server.ledger()
    expect_success(await ledger.write(1, put("a", b"secret"), put("b", b"secret"), key=key(1)))
    expect_success(await ledger.write(2, put("b", b"new"), key=key(2)))
    await shared_server.server.log.erase(key=key(1), policy=LEDGER, scope=shared_server.scope, client="app")
    entity = await ledger.get_entity("a") or {}
    assert (entity["value"], entity["version"], entity["erased"]) == (b"", 1, True)
    assert not (await ledger.get_entity("b") or {}).get("erased")
    error = expect_failure(await ledger.write(3, put("a", b"x", condition={"value_equals": b""}), key=key(3)))
    assert (error["code"], error["current_version"]) == ("VALUE_MISMATCH", 1)
    assert not error.get("current_value")
    expect_success(await ledger.write(3, put("a", b"x", condition={"version_is": 1}), key=key(3)))
    assert (await ledger.get_entity("a") or {})["value"] == b"x"


async def check_second_is_marked_erased(ledger: Ledger, answers: list[Json], before: Json) -> None:
    for asked in (key(2), b"", key(70)):
        error = expect_failure(await ledger.write(2, put("a", b"2"), key=asked))
        assert (error["code"], error["erased"]) == ("ALREADY_COMMITTED", True)
        assert (error["assigned_sequence"], error["committed_tx_id"], error["block_height"]) == receipt_of(answers[1])
    assert code(await ledger.write(2, put("a", b"x"), key=key(2))) == "IDEMPOTENCY_KEY_REUSED"
    found = await ledger.get_transaction(answers[1]["committed_tx_id"])
    assert found == {**before, "operations": [], "erased": True}
    for number in (1, 3):
        again = await retry_write(ledger, number)
        assert code(again) in ("OK", "ALREADY_COMMITTED")
        assert "erased" not in again.get("error", {})
        found = await ledger.get_transaction(answers[number - 1]["committed_tx_id"])
        assert (found["erased"], found["operations"]) == (False, [put("a", b"%d" % number)])
