"""Ledger transactions: scopes, ids, and the canonical form of operations."""

from base64 import b64encode
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncelog.core.canonical import INTEGER_MAX, canonical, parse
from oncelog.core.identity import frame, request_hash
from oncelog.core.operations import Condition, DeleteEntity, Must, Operation, Relate, SetEntity, Unrelate
from oncelog.core.transactions import (
    OperationJson,
    check_operations,
    encode_operations,
    format_tx_id,
    ledger_scope,
    operations_from_json,
    parse_tx_id,
    transaction,
)
from oncelog.errors import CanonicalError

texts = st.text(min_size=1, max_size=20).filter(lambda text: "\0" not in text)
numbers = st.integers(0, INTEGER_MAX)
values = st.binary(max_size=40)
conditions = st.one_of(
    st.just(Condition(Must.NOT_EXIST)),
    st.just(Condition(Must.EXIST)),
    numbers.map(lambda version: Condition(Must.HAVE_VERSION, version=version)),
    values.map(lambda value: Condition(Must.HAVE_VALUE, value=value)),
)
operations = st.lists(
    st.one_of(
        st.builds(SetEntity, texts, values, st.none() | numbers, st.none() | conditions),
        st.builds(DeleteEntity, texts),
        st.builds(Relate, texts, texts, texts),
        st.builds(Unrelate, texts, texts, texts),
    ),
    min_size=1,
    max_size=5,
)


def tree_of(operation: Operation) -> dict[str, Any]:
    """Return the JSON form of an operation as documented in docs/reference/ledger.md."""
    match operation:
        case SetEntity(key, value, expires_at_ms, condition):
            setting: dict[str, Any] = {"key": key, "value": b64encode(value).decode()}
            if expires_at_ms is not None:
                setting["expires_at_ms"] = expires_at_ms
            if condition is not None:
                setting["condition"] = {
                    Must.NOT_EXIST: {"must_not_exist": True},
                    Must.EXIST: {"must_exist": True},
                    Must.HAVE_VERSION: {"version_is": condition.version},
                    Must.HAVE_VALUE: {"value_equals": b64encode(condition.value).decode()},
                }[condition.must]
            return {"set_entity": setting}
        case DeleteEntity(key):
            return {"delete_entity": {"key": key}}
        case Relate(resource, relation, subject):
            return {"create_relationship": {"resource": resource, "relation": relation, "subject": subject}}
        case Unrelate(resource, relation, subject):
            return {"delete_relationship": {"resource": resource, "relation": relation, "subject": subject}}


@pytest.mark.rule("LG-18", "CO-1")
@given(operations)
def test_transaction_body_is_canonical_and_round_trips(given_operations: list[Operation]) -> None:
    body = encode_operations(given_operations)
    assert body == canonical({"operations": [tree_of(one) for one in given_operations]})
    read = msgspec.convert(parse(body)["operations"], list[OperationJson])
    assert list(operations_from_json(read)) == given_operations


@pytest.mark.parametrize(
    "operation",
    [
        SetEntity("\ud800", b""),
        DeleteEntity("a\udfff"),
        Relate("a", "\ud800", "b"),
        SetEntity("a", b"", expires_at_ms=2**53),
        SetEntity("a", b"", condition=Condition(Must.HAVE_VERSION, version=2**53)),
    ],
)
def test_value_without_canonical_form_is_refused(operation: Operation) -> None:
    with pytest.raises(CanonicalError):
        encode_operations([operation])


@pytest.mark.rule("LG-14")
@given(operations, operations)
def test_different_operations_have_different_hashes(one: list[Operation], other: list[Operation]) -> None:
    assert (request_hash(one) == request_hash(other)) == (one == other)


@pytest.mark.rule("LG-14")
def test_request_hash_covers_length_prefixed_frames() -> None:
    """The vectors of test_identity follow the same rule. Here, the bytes of an entity with all fields are assembled by
    hand.
    """
    operation = SetEntity("clé", b"\0v", 7, Condition(Must.HAVE_VERSION, version=3))
    condition = frame(b"must", b"have_version") + frame(b"version", b"3") + frame(b"value", b"")
    framed = (
        frame(b"kind", b"set")
        + frame(b"key", "clé".encode())
        + frame(b"value", b"\0v")
        + frame(b"expires_at_ms", b"7")
        + frame(b"condition", condition)
    )
    from hashlib import sha256  # noqa: PLC0415 - for this alone

    assert request_hash([operation]) == sha256(frame(b"operation", framed)).digest()


def test_ledger_scopes_do_not_collide() -> None:
    assert ledger_scope("acme") == "ledger/acme"
    assert ledger_scope("acme", "main") == "ledger/acme/main"
    assert ledger_scope("acme/main") == "ledger/acme%2Fmain"
    assert ledger_scope("acme%2Fmain") == "ledger/acme%252Fmain"


@given(st.integers(0, 2**15 - 1), st.integers(1, 2**48 - 1))
def test_transaction_id_encodes_its_position(lane: int, position: int) -> None:
    assert parse_tx_id(format_tx_id(lane, position)) == (lane, position)


@pytest.mark.parametrize("text", ["", "0", "0" * 15, "0" * 17, "000400000000000G", "000400000000000A", "٠" * 16])
def test_invalid_transaction_id_is_refused(text: str) -> None:
    assert parse_tx_id(text) is None


@pytest.mark.parametrize(
    ("operation", "path", "reason"),
    [
        (SetEntity("", b""), "operations[0].set_entity.key", "must have 1 to 1024 characters, not 0"),
        (SetEntity("a" * 1025, b""), "operations[0].set_entity.key", "must have 1 to 1024 characters, not 1025"),
        (SetEntity("a\0", b""), "operations[0].set_entity.key", "must not contain U+0000"),
        (SetEntity("a", b"12345"), "operations[0].set_entity.value", "must have at most 4 bytes, not 5"),
        (SetEntity("a", b"", -1), "operations[0].set_entity.expires_at_ms", f"must be from 0 to {2**53 - 1}, not -1"),
        (
            SetEntity("a", b"", None, Condition(Must.HAVE_VERSION, version=2**53)),
            "operations[0].set_entity.condition.version_is",
            f"must be from 0 to {2**53 - 1}, not {2**53}",
        ),
        (
            SetEntity("a", b"", None, Condition(Must.HAVE_VALUE, value=b"12345")),
            "operations[0].set_entity.condition.value_equals",
            "must have at most 4 bytes, not 5",
        ),
        (DeleteEntity(""), "operations[0].delete_entity.key", "must have 1 to 1024 characters, not 0"),
        (Relate("a", "", "c"), "operations[0].create_relationship.relation", "must have 1 to 1024 characters, not 0"),
        (Unrelate("a", "b", "\0"), "operations[0].delete_relationship.subject", "must not contain U+0000"),
    ],
)
def test_invalid_operation_is_refused_with_its_path(operation: Operation, path: str, reason: str) -> None:
    with pytest.raises(CanonicalError) as caught:
        check_operations([operation], 4)
    assert (caught.value.path, caught.value.reason) == (path, reason)


@pytest.mark.rule("LG-2")
def test_empty_and_oversized_transactions_are_refused() -> None:
    with pytest.raises(CanonicalError, match="must not be empty"):
        check_operations([], 4)
    with pytest.raises(CanonicalError, match="at most 10000 entries, not 10001"):
        check_operations([DeleteEntity("a")] * 10_001, 4)
    check_operations([DeleteEntity("a")] * 10_000, 4)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{}", "exactly one of set_entity"),
        ('{"delete_entity":{"key":"a"},"set_entity":{"key":"a"}}', "exactly one of set_entity"),
        ('{"set_entity":{"key":"a","condition":{}}}', "exactly one of must_not_exist"),
        ('{"set_entity":{"key":"a","condition":{"must_exist":true,"version_is":1}}}', "exactly one of must_not_exist"),
        ('{"set_entity":{"key":"a","condition":{"must_exist":false}}}', "must be true"),
        ('{"set_entity":{"key":"a","condition":{"must_not_exist":false}}}', "must be true"),
    ],
)
def test_json_operation_has_exactly_one_kind(text: str, words: str) -> None:
    with pytest.raises(CanonicalError) as caught:
        operations_from_json([msgspec.json.decode(text, type=OperationJson)])
    assert words in caught.value.reason
    assert caught.value.path.startswith("operations[0]")


@pytest.mark.parametrize(
    "text",
    [
        '{"set_entity":null,"delete_entity":{"key":"a"}}',
        '{"set_entity":{"key":"a","condition":null}}',
        '{"set_entity":{"key":"a","condition":{"must_not_exists":true}}}',
        '{"set_entity":{"key":"a","expires_at_ms":null}}',
        '{"set_entity":{"key":"a","value":"a"}}',
        '{"delete_entity":{"key":"a","condition":{"must_exist":true}}}',
    ],
)
def test_misspelt_condition_is_refused(text: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(text, type=OperationJson)


def test_transaction_becomes_a_ledger_submission() -> None:
    made = transaction("ledger/acme", "c1", 7, [DeleteEntity("a")], key=bytes(15) + b"1", actor="client:c1")
    assert (made.policy.name, made.scope, made.client, made.client_sequence) == ("ledger", "ledger/acme", "c1", 7)
    assert made.body == b'{"operations":[{"delete_entity":{"key":"a"}}]}'
    assert made.fingerprint == request_hash([DeleteEntity("a")])
