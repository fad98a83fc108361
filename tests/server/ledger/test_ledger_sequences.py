"""Ledger API sequences and duplicates over both wires: every row of the specification's tables."""

import asyncio
from typing import Final

import pytest

from databases import BOTH_STORES
from oncelog.core.identity import request_hash
from oncelog.core.limits import SEQUENCE_MAX
from oncelog.core.operations import SetEntity
from oncelog.ledger.v1 import ledger_pb2 as pb
from server.ledger.ledger_servers import SharedServer, key
from server.ledger.ledger_transports import (
    GRPC,
    HTTP,
    Json,
    code,
    expect_failure,
    expect_refusal,
    expect_success,
    message_of,
    put,
    remove,
)
from server.ledger.write_answers import write_transactions

pytestmark = BOTH_STORES

SET: Final = put("a", b"1")
OTHER: Final = put("a", b"2")


# --- transactions -----------------------------------------------------------------------------------------


@pytest.mark.rule("LG-1", "CO-20")
async def test_transaction_has_the_sent_and_the_assigned_fields(shared_server: SharedServer) -> None:
    ledger = shared_server.ledger()
    operations = [put("a", b"\x00\xff", expires_at_ms=2**53 - 1), remove("b")]
    first = expect_success(await ledger.write(1, *operations, key=key(1)))
    second = expect_success(await ledger.write(2, SET))
    assert first["committed_tx_id"] != second["committed_tx_id"]
    assert (first["assigned_sequence"], second["assigned_sequence"]) == (1, 2)
    assert (first["version"], second["version"]) == (1, 2)
    found = await ledger.get_transaction(first["committed_tx_id"])
    assert found == {
        "tx_id": first["committed_tx_id"],
        "client_id": "app",
        "sequence": 1,
        "idempotency_key": key(1),
        "operations": operations,
        "timestamp_ms": first["timestamp_ms"],
        "actor": "user:developer",
        "block_height": first["block_height"],
        "version": 1,
        "request_hash": found["request_hash"],
        "erased": False,
    }
    assert first["timestamp_ms"] == first["block_header"]["timestamp_ms"]
    assert (await ledger.get_transaction(second["committed_tx_id"]))["idempotency_key"] == b""


@pytest.mark.rule("LG-1", "CO-20")
async def test_client_id_in_development_mode_defaults_to_developer(shared_server: SharedServer) -> None:
    ledger = shared_server.ledger(client_id="")
    answer = expect_success(await ledger.write(1, SET, key=key(1)))
    assert (await ledger.get_transaction(answer["committed_tx_id"]))["client_id"] == "developer"
    assert await shared_server.ledger("developer").last_sequence() == 1


@pytest.mark.rule("LG-1")
async def test_transaction_ids_are_unique_across_scopes_and_clients(shared_server: SharedServer) -> None:
    ledgers = [shared_server.ledger(client, vault) for client in ("one", "two") for vault in ("", "v1", "v2")]
    answers = await asyncio.gather(*[ledger.write(1, SET, key=key(1)) for ledger in ledgers])
    assert len({expect_success(answer)["committed_tx_id"] for answer in answers}) == len(ledgers)


@pytest.mark.rule("LG-1", "CO-20")
async def test_actor_sent_by_the_client_is_ignored_or_refused(shared_server: SharedServer) -> None:
    ledger = shared_server.ledger()
    if ledger.wire.kind == HTTP:
        error = await expect_refusal(ledger.write(1, SET, key=key(1), actor="user:root"))
        assert (error.status, error.field) == ("INVALID_ARGUMENT", "actor")
        answer = await ledger.write(1, SET, key=key(1))
    else:
        known = {"organization": shared_server.name, "client_id": "app", "sequence": 1, "operations": [SET]}
        data = message_of(pb.WriteRequest, known).SerializeToString()
        actor = b"user:root"
        answer_data = await shared_server.wire().raw("Write", data + b"\x42" + bytes([len(actor)]) + actor)  # field 8
        response = pb.WriteResponse.FromString(answer_data)
        answer = {"actor": response.success.actor, "committed_tx_id": response.success.committed_tx_id}
    assert answer["actor"] == "user:developer"
    assert (await ledger.get_transaction(answer["committed_tx_id"]))["actor"] == "user:developer"


# --- validation rules, server guarantees, gaps ------------------------------------------------------------------


@pytest.mark.rule("LG-4", "LG-8")
async def test_sequences_start_at_one_and_increase_by_one(shared_server: SharedServer) -> None:
    ledger = shared_server.ledger()
    assert await ledger.last_sequence() == 0
    for number in range(1, 6):
        assert expect_success(await ledger.write(number, SET, key=key(number)))["assigned_sequence"] == number
        assert await ledger.last_sequence() == number


@pytest.mark.rule("LG-4")
async def test_sequence_zero_is_refused(shared_server: SharedServer) -> None:
    ledger = shared_server.ledger()
    error = await expect_refusal(ledger.write(0, SET, key=key(1)))
    assert (error.status, error.field) == ("INVALID_ARGUMENT", "sequence")
    assert await ledger.last_sequence() == 0


@pytest.mark.rule("LG-5", "LG-20")
@pytest.mark.parametrize("last", [0, 1, 3])
@pytest.mark.parametrize("ahead", [2, 3, 2**53])
async def test_sequence_gap_reports_the_last_sequence_and_writes_nothing(
    shared_server: SharedServer, last: int, ahead: int
) -> None:
    ledger = shared_server.ledger()
    await write_transactions(ledger, last)
    sequence = min(last + ahead, 2**53 - 1)
    for asked in (key(99), b""):
        error = expect_failure(await ledger.write(sequence, OTHER, key=asked))
        assert (error["code"], error["number"]) == ("SEQUENCE_GAP", 7)
        assert error["last_committed_sequence"] == last
        assert error.keys() == {"code", "number", "message", "last_committed_sequence"}
    assert await ledger.last_sequence() == last
    assert await ledger.value("a") == (b"%d" % last if last else None)
    # The key was not stored either, so a write with the right sequence may use it.
    assert expect_success(await ledger.write(last + 1, OTHER, key=key(99)))["version"] == last + 1


@pytest.mark.rule("LG-5")
async def test_sequences_have_64_bits_in_grpc_and_53_in_json(shared_server: SharedServer) -> None:
    ledger = shared_server.ledger()
    await write_transactions(ledger, 1)
    if ledger.wire.kind == GRPC:
        for sequence in (2**53, 2**63, SEQUENCE_MAX):
            error = expect_failure(await ledger.write(sequence, SET, key=key(9)))
            assert (error["code"], error["last_committed_sequence"]) == ("SEQUENCE_GAP", 1)
    else:
        for sequence in (2**53, 2**64 - 1, 2**64):
            refusal = await expect_refusal(ledger.write(sequence, SET, key=key(9)))
            assert (refusal.http_status, refusal.field) == (400, "sequence")
        assert code(await ledger.write(2**53 - 1, SET, key=key(9))) == "SEQUENCE_GAP"
    assert await ledger.last_sequence() == 1


@pytest.mark.rule("LG-5", "LG-8")
async def test_client_uses_its_state_to_recover_from_a_gap(shared_server: SharedServer) -> None:
    """Recovery as in the specification: writes are rejected until the sequence is right."""
    ledger = shared_server.ledger()
    await write_transactions(ledger, 3)
    for sequence in (9, 8, 5):
        assert code(await ledger.write(sequence, OTHER, key=key(50))) == "SEQUENCE_GAP"
    state = await ledger.get_client_state()
    answer = expect_success(await ledger.write(state["last_committed_sequence"] + 1, OTHER, key=key(50)))
    assert answer["assigned_sequence"] == 4


@pytest.mark.rule("LG-6", "LG-13")
async def test_old_sequence_with_new_operations_is_refused(shared_server: SharedServer) -> None:
    ledger = shared_server.ledger()
    await write_transactions(ledger, 4)
    for sequence in range(1, 5):
        for asked in (key(70 + sequence), b""):
            error = expect_failure(await ledger.write(sequence, put("b", b"new"), key=asked))
            assert (error["code"], error["number"]) == ("SEQUENCE_REUSED", 8)
            assert error["last_committed_sequence"] == 4
            assert error.keys() == {"code", "number", "message", "last_committed_sequence"}
    assert await ledger.get_entity("b") is None
    assert await ledger.last_sequence() == 4
    assert len(await ledger.transaction_ids()) == 4


@pytest.mark.rule("LG-7", "LG-8")
async def test_sequences_of_an_organization_and_of_its_vaults_are_independent(
    shared_server: SharedServer,
) -> None:
    own, first, second = (shared_server.ledger(vault=vault) for vault in ("", "one", "two"))
    await write_transactions(own, 3)
    await write_transactions(first, 1)
    assert [await one.last_sequence() for one in (own, first, second)] == [3, 1, 0]
    assert code(await second.write(2, SET, key=key(2))) == "SEQUENCE_GAP"
    assert expect_success(await first.write(2, SET, key=key(2)))["version"] == 2
    # Keys belong to a scope, so the same key is unknown in another scope.
    assert expect_success(await second.write(1, put("a", b"else"), key=key(1)))["version"] == 1
    assert [await one.value("a") for one in (own, first, second)] == [b"3", b"1", b"else"]
    assert [await one.last_sequence() for one in (own, first, second)] == [3, 2, 1]
    other = own.of(organization=shared_server.name + "-other")
    assert await other.last_sequence() == 0
    assert await other.get_entity("a") is None


@pytest.mark.rule("LG-7")
async def test_clients_of_one_scope_have_separate_sequences_and_shared_entities(
    shared_server: SharedServer,
) -> None:
    ann, bob = shared_server.ledger("ann"), shared_server.ledger("bob")
    await write_transactions(ann, 2)
    assert await bob.last_sequence() == 0
    # Keys belong to a client, so another client may use the same key for different operations.
    answer = expect_success(await bob.write(1, put("a", b"bob"), key=key(1)))
    assert (answer["assigned_sequence"], answer["version"]) == (1, 3)
    assert await ann.value("a") == b"bob"
    assert (await ann.last_sequence(), await bob.last_sequence()) == (2, 1)


@pytest.mark.rule("LG-7")
async def test_names_with_separators_do_not_address_another_scope(shared_server: SharedServer) -> None:
    plain = shared_server.ledger()
    scopes = [("x/y", ""), ("x", "y"), ("x%2Fy", ""), ("x", "y/z"), ("x/y", "z"), ("x%", "2Fy")]
    ledgers = [plain.of(organization=shared_server.name + one, vault=two) for one, two in scopes]
    for number, ledger in enumerate(ledgers):
        assert expect_success(await ledger.write(1, put("a", b"%d" % number), key=key(1)))["version"] == 1
    assert [await ledger.value("a") for ledger in ledgers] == [b"%d" % number for number in range(len(scopes))]


@pytest.mark.rule("LG-8", "LG-9")
async def test_client_state_describes_the_last_write(shared_server: SharedServer) -> None:
    ledger = shared_server.ledger()
    unknown = {
        "last_committed_sequence": 0,
        "last_seen_ms": 0,
        "last_idempotency_key": b"",
        "last_request_hash": b"",
    }
    assert await ledger.get_client_state() == unknown
    (_, last) = await write_transactions(ledger, 2)
    expected = {
        "last_committed_sequence": 2,
        "last_seen_ms": last["timestamp_ms"],
        "last_idempotency_key": key(2),
        "last_request_hash": request_hash([SetEntity("a", b"2")]),
    }
    assert await ledger.get_client_state() == expected
    for again in (1, 2, 9):  # retries and refusals do not count as writes
        await ledger.write(again, OTHER, key=key(again))
    assert await ledger.get_client_state() == expected


# --- duplicates, while the server runs ---------------------------------------------------------------------


@pytest.mark.rule("LG-10", "CO-15")
async def test_retry_gets_the_complete_original_answer(shared_server: SharedServer) -> None:
    ledger = shared_server.ledger()
    answers = await write_transactions(ledger, 3)
    for _ in range(2):
        assert await write_transactions(ledger, 3) == answers
    assert len({answer["committed_tx_id"] for answer in answers}) == 3
    assert await ledger.last_sequence() == 3
    assert await ledger.transaction_ids() == [answer["committed_tx_id"] for answer in answers]


@pytest.mark.rule("LG-4", "LG-10")
@pytest.mark.parametrize("sequence", [1, 2, 3, 4, 77])
async def test_known_key_is_answered_regardless_of_the_sequence(shared_server: SharedServer, sequence: int) -> None:
    ledger = shared_server.ledger()
    answers = await write_transactions(ledger, 3)
    assert await ledger.write(sequence, put("a", b"2"), key=key(2)) == answers[1]
    assert code(await ledger.write(sequence, OTHER, key=key(3))) == "IDEMPOTENCY_KEY_REUSED"
    assert await ledger.last_sequence() == 3


@pytest.mark.rule("LG-12", "LG-20")
async def test_reused_key_with_different_operations_is_refused(shared_server: SharedServer) -> None:
    ledger = shared_server.ledger()
    condition = {"must_not_exist": True}
    original = put("a", b"1", condition=condition)
    assert code(await ledger.write(1, original, key=key(1))) == "OK"
    others = [
        [put("a", b"2", condition=condition)],
        [put("b", b"1", condition=condition)],
        [put("a", b"1")],
        [put("a", b"1", condition={"must_exist": True})],
        [put("a", b"1", condition=condition, expires_at_ms=2**50)],
        [original, original],
        [remove("a")],
    ]
    for other in others:
        for sequence in (1, 2):
            error = expect_failure(await ledger.write(sequence, *other, key=key(1)))
            assert (error["code"], error["number"]) == ("IDEMPOTENCY_KEY_REUSED", 6)
            assert error.keys() == {"code", "number", "message"}
    assert (await ledger.get_entity("a")) == {"key": "a", "value": b"1", "version": 1}
    assert await ledger.last_sequence() == 1


@pytest.mark.rule("LG-13", "LG-10")
async def test_retry_by_client_and_sequence_gets_the_answer_regardless_of_the_key(
    shared_server: SharedServer,
) -> None:
    """Retry after a network timeout as in the specification, by client and sequence."""
    ledger = shared_server.ledger()
    answers = await write_transactions(ledger, 3)
    unkeyed = expect_success(await ledger.write(4, SET))
    for number in (1, 2, 3):
        for asked in (b"", key(88)):
            assert await ledger.write(number, put("a", b"%d" % number), key=asked) == answers[number - 1]
    for asked in (b"", key(88)):
        assert await ledger.write(4, SET, key=asked) == unkeyed
    # A key that was sent only with a retry belongs to no transaction and can still be used.
    assert expect_success(await ledger.write(5, OTHER, key=key(88)))["assigned_sequence"] == 5
    assert len(await ledger.transaction_ids()) == 5


@pytest.mark.rule("LG-6", "LG-10", "LG-13")
async def test_retry_of_an_earlier_sequence_gets_its_own_answer(shared_server: SharedServer) -> None:
    ledger = shared_server.ledger()
    answers = await write_transactions(ledger, 5)
    for number in (4, 1, 3, 5, 2):
        again = await ledger.write(number, put("a", b"%d" % number), key=key(number))
        assert again == answers[number - 1]


@pytest.mark.rule("LG-14")
async def test_key_must_be_sixteen_bytes_that_are_not_all_zero(shared_server: SharedServer) -> None:
    ledger = shared_server.ledger()
    keys = [
        bytes(15) + b"\x01",
        b"\xff" * 16,
        bytes.fromhex("0198f3c27d557c1e9a612f6f0c1b5a10"),
        b"\x80" + bytes(15),
    ]
    for number, one in enumerate(keys, 1):
        first = expect_success(await ledger.write(number, SET, key=one))
        assert await ledger.write(number, SET, key=one) == first
    for bad, message in (
        (bytes(16), "idempotency_key: must not be all zero"),
        (bytes(15), "idempotency_key: must have 16 bytes, not 15"),
        (b"k" * 15, "idempotency_key: must have 16 bytes, not 15"),
        (b"k" * 17, "idempotency_key: must have 16 bytes, not 17"),
        (b"k" * 1000, "idempotency_key: must have 16 bytes, not 1000"),
    ):
        error = await expect_refusal(ledger.write(5, SET, key=bad))
        assert error.summary == ("INVALID_ARGUMENT", message, "idempotency_key")
    assert await ledger.last_sequence() == 4


@pytest.mark.rule("LG-14")
async def test_transactions_that_differ_only_in_field_boundaries_have_different_hashes(
    shared_server: SharedServer,
) -> None:
    ledger = shared_server.ledger()
    pairs: list[tuple[list[Json], list[Json]]] = [
        ([put("ab", b"c")], [put("a", b"bc")]),
        ([put("a", b"b"), put("c", b"d")], [put("a", b"bc"), put("d", b"")]),
        ([put("a", b""), put("b", b"")], [put("b", b""), put("a", b"")]),
        (
            [{"create_relationship": {"resource": "a", "relation": "bc", "subject": "d"}}],
            [{"create_relationship": {"resource": "ab", "relation": "c", "subject": "d"}}],
        ),
        (
            [{"create_relationship": {"resource": "a", "relation": "b", "subject": "c"}}],
            [{"delete_relationship": {"resource": "a", "relation": "b", "subject": "c"}}],
        ),
        ([put("x", b"1", condition={"value_equals": b""})], [put("x", b"1", condition={"version_is": 0})]),
    ]
    sequence = 0
    for number, (one, other) in enumerate(pairs, 1):
        if number == 6:
            sequence += 1
            assert code(await ledger.write(sequence, put("x", b""), key=key(90))) == "OK"
        sequence += 1
        first = expect_success(await ledger.write(sequence, *one, key=key(number)))
        assert code(await ledger.write(sequence, *other, key=key(number))) == "IDEMPOTENCY_KEY_REUSED"
        assert code(await ledger.write(sequence, *other)) == "SEQUENCE_REUSED"
        found = await ledger.get_transaction(first["committed_tx_id"])
        assert len(found["request_hash"]) == 32
