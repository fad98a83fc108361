"""Transactions and batches of the Ledger API over both wires: operations, conditions and atomicity."""

import asyncio
from pathlib import Path
from typing import Any, Final

import pytest

from databases import BOTH_STORES
from oncelog.core.limits import OPERATIONS_MAX
from oncelog.ledger.v1 import ledger_pb2 as pb
from oncelog.server.ledger.values import WriteErrorCode
from oncelog.testing.clock import ManualClock
from server.ledger.ledger_servers import SharedServer, key, run_server
from server.ledger.ledger_transports import (
    Json,
    code,
    expect_failure,
    expect_refusal,
    expect_success,
    put,
    relate,
    remove,
    unrelate,
)

pytestmark = BOTH_STORES

CODES: Final = {
    "KEY_EXISTS": 1,
    "KEY_NOT_FOUND": 2,
    "VERSION_MISMATCH": 3,
    "VALUE_MISMATCH": 4,
    "ALREADY_COMMITTED": 5,
    "IDEMPOTENCY_KEY_REUSED": 6,
    "SEQUENCE_GAP": 7,
    "SEQUENCE_REUSED": 8,
}
"""The numbers that rule LG-20 assigns to the error codes."""
PAST_MS: Final = 1
FUTURE_MS: Final = 2**50
ON_EXISTING: Final[list[tuple[Json, str]]] = [
    ({"must_not_exist": True}, "KEY_EXISTS"),
    ({"must_exist": True}, "OK"),
    ({"version_is": 1}, "OK"),
    ({"version_is": 2}, "VERSION_MISMATCH"),
    ({"version_is": 0}, "VERSION_MISMATCH"),
    ({"value_equals": b"one"}, "OK"),
    ({"value_equals": b"two"}, "VALUE_MISMATCH"),
    ({"value_equals": b""}, "VALUE_MISMATCH"),
]
ON_ABSENT: Final[list[tuple[Json, str]]] = [
    ({"must_not_exist": True}, "OK"),
    ({"must_exist": True}, "KEY_NOT_FOUND"),
    ({"version_is": 1}, "KEY_NOT_FOUND"),
    ({"version_is": 0}, "KEY_NOT_FOUND"),
    ({"value_equals": b"one"}, "KEY_NOT_FOUND"),
    ({"value_equals": b""}, "KEY_NOT_FOUND"),
]


@pytest.mark.rule("LG-20")
def test_error_codes_have_the_numbers_in_the_rule() -> None:
    assert {one.name: one.value for one in WriteErrorCode} == CODES
    named = {name.removeprefix("WRITE_ERROR_CODE_"): number for name, number in pb.WriteErrorCode.items()}
    assert named == {"UNSPECIFIED": 0, **CODES}


# --- operations -------------------------------------------------------------------------------------------


@pytest.mark.rule("LG-2")
async def test_entity_has_the_version_of_its_last_change(
    shared_server: SharedServer,
) -> None:
    ledger = shared_server.ledger()
    assert expect_success(await ledger.write(1, put("a", b"1"), put("b", b"2")))["version"] == 1
    assert expect_success(await ledger.write(2, put("c", b"3", expires_at_ms=FUTURE_MS)))["version"] == 2
    # Writing the same value also counts as a change.
    assert expect_success(await ledger.write(3, put("a", b"1")))["version"] == 3
    assert await ledger.get_entity("a") == {"key": "a", "value": b"1", "version": 3}
    assert await ledger.get_entity("b") == {"key": "b", "value": b"2", "version": 1}
    assert await ledger.get_entity("c") == {"key": "c", "value": b"3", "version": 2, "expires_at_ms": FUTURE_MS}
    assert expect_success(await ledger.write(4, remove("a"), put("c", b"")))["version"] == 4
    assert await ledger.get_entity("a") is None
    assert await ledger.get_entity("c") == {"key": "c", "value": b"", "version": 4}


@pytest.mark.rule("LG-2")
async def test_delete_of_an_absent_entity_succeeds(shared_server: SharedServer) -> None:
    ledger = shared_server.ledger()
    answer = expect_success(await ledger.write(1, remove("none"), unrelate("none"), key=key(1)))
    assert answer["assigned_sequence"] == 1
    assert await ledger.get_entity("none") is None
    assert await ledger.check_relationship("none") == {"exists": False, "version": 0}
    assert expect_success(await ledger.write(2, remove("none"), unrelate("none"), key=key(2)))["version"] == 2


@pytest.mark.rule("LG-2")
async def test_relationship_created_twice_keeps_its_version(shared_server: SharedServer) -> None:
    ledger = shared_server.ledger()
    await ledger.write(1, put("a"))
    await ledger.write(2, relate("doc", "viewer", "user:1"))
    assert await ledger.check_relationship("doc") == {"exists": True, "version": 2}
    assert expect_success(await ledger.write(3, relate("doc"), relate("doc"), relate("doc", subject="user:2")))
    assert await ledger.check_relationship("doc") == {"exists": True, "version": 2}
    assert await ledger.check_relationship("doc", subject="user:2") == {"exists": True, "version": 3}
    for other in (("doc", "owner", "user:1"), ("doc2", "viewer", "user:1"), ("viewer", "doc", "user:1")):
        assert await ledger.check_relationship(*other) == {"exists": False, "version": 0}
    await ledger.write(4, unrelate("doc"))
    assert await ledger.check_relationship("doc") == {"exists": False, "version": 0}
    await ledger.write(5, relate("doc"))
    assert await ledger.check_relationship("doc") == {"exists": True, "version": 5}


@pytest.mark.rule("LG-2")
async def test_operations_see_the_effects_of_earlier_operations_in_the_transaction(shared_server: SharedServer) -> None:
    ledger = shared_server.ledger()
    changes = [
        put("a", b"1", condition={"must_not_exist": True}),
        put("a", b"2", condition={"value_equals": b"1"}),
        put("a", b"3", condition={"version_is": 1}),
        remove("a"),
        put("a", b"4", condition={"must_not_exist": True}),
        put("a", b"5", condition={"must_exist": True}),
        relate("doc"),
        unrelate("doc"),
        relate("doc"),
        put("gone", b"", expires_at_ms=PAST_MS),
        put("gone", b"6", condition={"must_not_exist": True}),
    ]
    assert expect_success(await ledger.write(1, *changes))["version"] == 1
    assert await ledger.get_entity("a") == {"key": "a", "value": b"5", "version": 1}
    assert await ledger.value("gone") == b"6"
    assert await ledger.check_relationship("doc") == {"exists": True, "version": 1}
    error = expect_failure(
        await ledger.write(2, put("a", b"6"), remove("a"), put("a", condition={"value_equals": b"6"}))
    )
    assert (error["code"], error["key"], error["operation_index"]) == ("KEY_NOT_FOUND", "a", 2)
    error = expect_failure(await ledger.write(2, put("a", b"7"), put("a", condition={"value_equals": b"5"})))
    assert (error["code"], error["current_value"], error["current_version"]) == ("VALUE_MISMATCH", b"7", 2)
    assert await ledger.value("a") == b"5"


# --- conditions -------------------------------------------------------------------------------------------


@pytest.mark.rule("LG-2", "LG-3", "LG-20")
@pytest.mark.parametrize(("condition", "expected"), ON_EXISTING, ids=str)
async def test_conditions_are_checked_against_an_existing_entity(
    shared_server: SharedServer, condition: Json, expected: str
) -> None:
    ledger = shared_server.ledger()
    await ledger.write(1, put("a", b"one"))
    answer = await ledger.write(2, put("b", b"other"), put("a", b"new", condition=condition), key=key(2))
    assert code(answer) == expected
    if expected == "OK":
        assert await ledger.get_entity("a") == {"key": "a", "value": b"new", "version": 2}
        return
    error = expect_failure(answer)
    assert error == {
        "code": expected,
        "number": CODES[expected],
        "message": error["message"],
        "key": "a",
        "current_version": 1,
        "current_value": b"one",
        "operation_index": 1,
    }
    assert await ledger.get_entity("a") == {"key": "a", "value": b"one", "version": 1}
    assert await ledger.get_entity("b") is None
    assert await ledger.last_sequence() == 1


@pytest.mark.rule("LG-2", "LG-3", "LG-20")
@pytest.mark.parametrize("before", ["never", "deleted", "expired"])
@pytest.mark.parametrize(("condition", "expected"), ON_ABSENT, ids=str)
async def test_conditions_are_checked_against_an_absent_entity(
    shared_server: SharedServer, before: str, condition: Json, expected: str
) -> None:
    ledger = shared_server.ledger()
    past = PAST_MS if before == "expired" else None
    await ledger.write(1, *([] if before == "never" else [put("a", b"one", expires_at_ms=past)]), put("z"))
    if before == "deleted":
        await ledger.write(2, remove("a"))
    last = await ledger.last_sequence()
    answer = await ledger.write(last + 1, put("a", b"new", condition=condition), key=key(9))
    assert code(answer) == expected
    if expected == "OK":
        assert await ledger.value("a") == b"new"
        return
    error = expect_failure(answer)
    assert error == {
        "code": "KEY_NOT_FOUND",
        "number": 2,
        "message": error["message"],
        "key": "a",
        "operation_index": 0,
    }
    assert await ledger.get_entity("a") is None
    assert await ledger.last_sequence() == last


@pytest.mark.rule("LG-2")
async def test_empty_current_value_is_reported(shared_server: SharedServer) -> None:
    ledger = shared_server.ledger()
    await ledger.write(1, put("a", b""))
    error = expect_failure(await ledger.write(2, put("a", condition={"value_equals": b"x"})))
    assert (error["current_version"], error["current_value"]) == (1, b"")
    assert code(await ledger.write(2, put("a", b"y", condition={"value_equals": b""}))) == "OK"


@pytest.mark.rule("LG-2")
async def test_entity_exists_until_it_expires(tmp_path: Path, wire: str) -> None:
    clock = ManualClock()
    async with run_server(tmp_path, wire, clock=clock) as server:
        ledger = server.ledger()
        end_ms = clock.wall_ms() + 1000
        await ledger.write(1, put("a", b"one", expires_at_ms=end_ms), put("b", b"stays"))
        clock.advance(999)
        assert await ledger.value("a") == b"one"
        assert code(await ledger.write(2, put("a", condition={"must_not_exist": True}))) == "KEY_EXISTS"
        clock.advance(1)
        assert await ledger.get_entity("a") is None
        listed = await ledger.list_entities()
        assert [one["key"] for one in listed["entities"]] == ["b"]
        error = expect_failure(await ledger.write(2, put("a", condition={"must_exist": True})))
        assert (error["code"], "current_version" in error, "current_value" in error) == (
            "KEY_NOT_FOUND",
            False,
            False,
        )
        assert code(await ledger.write(2, put("a", b"two", condition={"must_not_exist": True}))) == "OK"
        assert await ledger.get_entity("a") == {"key": "a", "value": b"two", "version": 2}


@pytest.mark.rule("LG-3", "LG-6")
async def test_write_with_a_failed_condition_can_be_retried(
    shared_server: SharedServer,
) -> None:
    ledger = shared_server.ledger()
    await ledger.write(1, put("a", b"one"))
    asked = [put("b", b"other"), relate("doc"), put("a", b"two", condition={"value_equals": b"other"})]
    for _ in range(3):
        assert code(await ledger.write(2, *asked, key=key(2))) == "VALUE_MISMATCH"
    assert await ledger.get_entity("b") is None
    assert await ledger.check_relationship("doc") == {"exists": False, "version": 0}
    assert await ledger.last_sequence() == 1
    assert len(await ledger.transaction_ids()) == 1
    another = shared_server.ledger("another")
    await another.write(1, put("a", b"other"))
    answer = expect_success(await ledger.write(2, *asked, key=key(2)))
    assert (answer["assigned_sequence"], answer["version"]) == (2, 3)
    # The write is now known, although its condition no longer holds.
    assert await ledger.write(2, *asked, key=key(2)) == answer
    assert (await ledger.value("a"), await ledger.value("b")) == (b"two", b"other")


@pytest.mark.rule("LG-3")
async def test_another_write_may_use_the_key_and_sequence_of_a_failed_condition(
    shared_server: SharedServer,
) -> None:
    ledger = shared_server.ledger()
    assert code(await ledger.write(1, put("a", condition={"must_exist": True}), key=key(1))) == "KEY_NOT_FOUND"
    assert expect_success(await ledger.write(1, put("b", b"else"), key=key(1)))["assigned_sequence"] == 1


@pytest.mark.rule("LG-2")
async def test_one_of_many_concurrent_conditional_writes_succeeds(shared_server: SharedServer) -> None:
    wanted = [shared_server.ledger(f"client-{number}") for number in range(12)]
    answers = await asyncio.gather(
        *[
            ledger.write(1, put("lock", ledger.client_id.encode(), condition={"must_not_exist": True}), key=key(1))
            for ledger in wanted
        ]
    )
    assert sorted(map(code, answers)) == ["KEY_EXISTS"] * 11 + ["OK"]
    (winner,) = [ledger for ledger, answer in zip(wanted, answers, strict=True) if code(answer) == "OK"]
    assert await winner.value("lock") == winner.client_id.encode()
    for answer in answers:
        if code(answer) != "OK":
            assert expect_failure(answer)["current_value"] == winner.client_id.encode()
    assert sorted([await ledger.last_sequence() for ledger in wanted]) == [0] * 11 + [1]


@pytest.mark.rule("LG-2")
async def test_write_with_no_or_too_many_operations_is_refused(shared_server: SharedServer) -> None:
    ledger = shared_server.ledger()
    error = await expect_refusal(ledger.write(1, key=key(1)))
    assert error.summary == ("INVALID_ARGUMENT", "operations: must not be empty", "operations")
    many = [remove("a")] * (OPERATIONS_MAX + 1)
    error = await expect_refusal(ledger.write(1, *many, key=key(1)))
    message = f"operations: must have at most {OPERATIONS_MAX} entries, not {OPERATIONS_MAX + 1}"
    assert error.summary == ("INVALID_ARGUMENT", message, "operations")
    assert await ledger.last_sequence() == 0
    assert code(await ledger.write(1, *many[1:], key=key(1))) == "OK"


# --- batches ----------------------------------------------------------------------------------------------


@pytest.mark.rule("LG-17")
async def test_batch_is_one_transaction_with_one_sequence(shared_server: SharedServer) -> None:
    ledger = shared_server.ledger()
    writes = [[put("a", b"1")], [put("b", b"2"), relate("doc")], [put("a", b"3", condition={"value_equals": b"1"})]]
    answer = expect_success(await ledger.batch_write(1, *writes, key=key(1)))
    assert (answer["assigned_sequence"], answer["version"]) == (1, 1)
    assert await ledger.last_sequence() == 1
    assert (await ledger.value("a"), await ledger.value("b")) == (b"3", b"2")
    found = await ledger.get_transaction(answer["committed_tx_id"])
    assert found["operations"] == [one for write in writes for one in write]
    assert await ledger.transaction_ids() == [answer["committed_tx_id"]]
    assert expect_success(await ledger.batch_write(2, [put("c")], key=key(2)))["assigned_sequence"] == 2


@pytest.mark.rule("LG-17", "LG-10", "LG-12", "LG-13")
async def test_resent_batch_is_a_duplicate(shared_server: SharedServer) -> None:
    ledger = shared_server.ledger()
    writes = [[put("a", b"1")], [put("b", b"2")]]
    answer = expect_success(await ledger.batch_write(1, *writes, key=key(1)))
    for asked in (key(1), b""):
        # Even from memory, a duplicate of a batch gets an error with the transaction's position.
        error = expect_failure(await ledger.batch_write(1, *writes, key=asked))
        assert (error["code"], error["assigned_sequence"]) == ("ALREADY_COMMITTED", 1)
        assert (error["committed_tx_id"], error["block_height"]) == (answer["committed_tx_id"], answer["block_height"])
    assert code(await ledger.batch_write(1, writes[0], key=key(1))) == "IDEMPOTENCY_KEY_REUSED"
    assert code(await ledger.batch_write(1, writes[0], key=key(2))) == "SEQUENCE_REUSED"
    # A single write with the same operations is the same transaction.
    assert await ledger.write(1, *writes[0], *writes[1], key=key(1)) == answer
    assert await ledger.last_sequence() == 1


@pytest.mark.rule("LG-17", "LG-5")
async def test_batch_with_a_sequence_gap_is_refused(shared_server: SharedServer) -> None:
    ledger = shared_server.ledger()
    await ledger.batch_write(1, [put("a")], key=key(1))
    error = expect_failure(await ledger.batch_write(3, [put("b")], [put("c")], key=key(3)))
    assert (error["code"], error["last_committed_sequence"]) == ("SEQUENCE_GAP", 1)
    assert await ledger.get_entity("b") is None
    assert await ledger.last_sequence() == 1


@pytest.mark.rule("LG-17", "LG-3")
async def test_batch_with_a_failed_condition_changes_nothing(shared_server: SharedServer) -> None:
    ledger = shared_server.ledger()
    writes = [[put("a", b"1")], [put("b", b"2"), put("x", b"3", condition={"must_exist": True})], [put("c")]]
    error = expect_failure(await ledger.batch_write(1, *writes, key=key(1)))
    assert (error["code"], error["key"], error["operation_index"]) == ("KEY_NOT_FOUND", "x", 2)
    assert [await ledger.get_entity(name) for name in "abc"] == [None] * 3
    assert await ledger.last_sequence() == 0
    another = shared_server.ledger("another")
    await another.write(1, put("x", b"there"))
    assert expect_success(await ledger.batch_write(1, *writes, key=key(1)))["assigned_sequence"] == 1


@pytest.mark.rule("LG-17")
async def test_writes_of_a_batch_must_have_the_same_scope(shared_server: SharedServer) -> None:
    name = shared_server.name
    ledger = shared_server.ledger(vault="one")
    good: Json = {"operations": [put("a", b"1")]}
    for other in (
        {"organization": name, "vault": "two"},
        {"organization": name},
        {"vault": "one"},
        {"organization": "else", "vault": "one"},
    ):
        mixed: Any = {**other, "operations": [put("b", b"2")]}
        error = await expect_refusal(ledger.batch_write(1, good, mixed, key=key(1)))
        expected = "writes[1]: must have the same scope as the batch, or no scope"
        assert error.summary == ("INVALID_ARGUMENT", expected, "writes[1]")
    assert await ledger.last_sequence() == 0
    assert await ledger.get_entity("a") is None
    named = {"organization": name, "vault": "one", "operations": [put("b", b"2")]}
    assert code(await ledger.batch_write(1, good, named, key=key(1))) == "OK"


@pytest.mark.rule("LG-17")
async def test_batch_without_writes_or_operations_is_refused(shared_server: SharedServer) -> None:
    ledger = shared_server.ledger()
    error = await expect_refusal(ledger.batch_write(1, key=key(1)))
    assert error.summary == ("INVALID_ARGUMENT", "writes: must not be empty", "writes")
    error = await expect_refusal(ledger.batch_write(1, [put("a")], [], key=key(1)))
    field = "writes[1].operations"
    assert error.summary == ("INVALID_ARGUMENT", f"{field}: must not be empty", field)
    error = await expect_refusal(ledger.batch_write(0, [put("a")], key=key(1)))
    assert (error.status, error.field) == ("INVALID_ARGUMENT", "sequence")
    assert await ledger.last_sequence() == 0
