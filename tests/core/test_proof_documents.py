"""Proof documents (LG-18): every change is detected, and an invalid document is refused with the path of its error."""

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

import oncelog.proof
from core.proof_samples import SALT, prove_alone
from oncelog.core.operations import Condition, DeleteEntity, Must, SetEntity
from oncelog.core.transactions import encode_operations, ledger_scope, transaction
from oncelog.core.values import Record
from oncelog.engine.read_results import Proven
from oncelog.errors import OncelogError, ProofError
from oncelog.proof import (
    DOCUMENT_BYTES_MAX,
    PATH_HASHES_MAX,
    ProofDocument,
    Verification,
    decode,
    encode,
    proof_document,
    verify,
)

UINT32_MAX = 2**32 - 1
UINT64_MAX = 2**64 - 1
OPERATIONS = (SetEntity("balance:7", b"250", 17, Condition(Must.HAVE_VERSION, 3)), DeleteEntity("größe"))

EVENT = Record(
    lane=0,
    position=12,
    sequence=0,
    log_time_ms=1_767_225_601_234,
    height=4,
    policy="events",
    scope="",
    key=bytes(range(16)),
    fingerprint=bytes(range(32)),
    actor="user:zoë",
    client="",
    client_sequence=0,
    partitions=("a", "b/ü", 'with "quotes"'),
    body='{"text":"Grüße"}'.encode(),
)
SENT = transaction(ledger_scope("acme", "main"), "till-3", UINT64_MAX, OPERATIONS, actor="client:till-3")
TRANSACTION = Record(
    lane=3,
    position=UINT64_MAX,
    sequence=6,
    log_time_ms=1_767_225_601_234,
    height=UINT64_MAX,
    policy="ledger",
    scope=SENT.scope,
    key=b"",
    fingerprint=SENT.fingerprint,
    actor=SENT.actor,
    client=SENT.client,
    client_sequence=SENT.client_sequence,
    partitions=(),
    body=SENT.body,
)


def erase_body(found: Proven) -> Proven:
    """Return the same record and proof after an erasure of the body."""
    return replace(found, record=replace(found.record, body=b"", erased=True), salt=b"")


DOCUMENTS = {
    "event": proof_document(prove_alone(EVENT)),
    "transaction": proof_document(prove_alone(TRANSACTION, 6, 7)),
    "erased": proof_document(erase_body(prove_alone(EVENT))),
    "alone": proof_document(prove_alone(replace(EVENT, body=b""), 0, 1)),
}
each_document = pytest.mark.parametrize("document", DOCUMENTS.values(), ids=DOCUMENTS)


def is_detected(data: bytes) -> bool:
    """Return whether a changed document is refused or fails verification."""
    try:
        return not verify(decode(data)).is_valid
    except ProofError:
        return True


# --- records and positions -------------------------------------------------------------------------------

names = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
numbers = st.integers(0, UINT64_MAX) | st.integers(0, 300)
any_record = st.builds(
    Record,
    lane=st.integers(0, UINT32_MAX),
    position=st.integers(100, UINT64_MAX),
    sequence=numbers,
    log_time_ms=numbers,
    height=numbers,
    policy=st.sampled_from(["events", "chat", "notes"]),
    scope=names,
    key=st.binary(max_size=255),
    fingerprint=st.binary(max_size=64),
    actor=names,
    client=names,
    client_sequence=numbers,
    partitions=st.lists(names, max_size=5).map(tuple),
    body=st.binary(max_size=100),
)
places = st.integers(1, 70).flatmap(lambda count: st.tuples(st.integers(0, count - 1), st.just(count)))


@pytest.mark.rule("LG-18")
@given(any_record, places, st.binary(min_size=16, max_size=16), st.booleans())
def test_any_record_is_proven_at_any_position(
    record: Record, place: tuple[int, int], salt: bytes, is_erased: bool
) -> None:
    found = prove_alone(record, *place, salt)
    document = proof_document(erase_body(found) if is_erased else found)
    assert decode(encode(document)) == document
    assert encode(decode(encode(document))) == encode(document)
    assert verify(document, block_hash=found.block.hash) == Verification((), is_erased) == verify(document)
    assert verify(document).is_valid
    assert document.body == (None if is_erased else record.body)


@pytest.mark.rule("LG-18")
@pytest.mark.parametrize("count", [*range(1, 34), 64, 100, 1000])
def test_record_at_every_index_of_a_block_can_be_proven(count: int) -> None:
    for index in range(count) if count < 34 else (0, 1, count // 2, count - 2, count - 1):
        document = proof_document(prove_alone(replace(EVENT, position=5000), index, count))
        assert verify(document).is_valid
        for other in {index - 1, index + 1, 0, count - 1} - {index, -1}:
            assert not verify(replace(document, index=other)).is_valid


def test_document_has_the_documented_members() -> None:
    said = json.loads(encode(DOCUMENTS["transaction"]))
    assert list(said) == ["record", "salt", "body", "body_hash", "index", "count", "path", "block"]
    assert list(said["record"]) == [
        *("lane", "position", "sequence", "log_time_ms", "height", "client_sequence", "policy", "scope"),
        *("key", "fingerprint", "actor", "client", "partitions"),
    ]
    assert list(said["block"]) == [
        *("lane", "height", "first_position", "count", "timestamp_ms", "previous_hash", "merkle_root", "hash")
    ]
    assert (said["salt"], said["record"]["client_sequence"]) == (SALT.hex(), UINT64_MAX)
    gone = json.loads(encode(DOCUMENTS["erased"]))
    assert (gone["salt"], gone["body"]) == (None, None)
    assert gone["body_hash"] == json.loads(encode(DOCUMENTS["event"]))["body_hash"]


def test_whitespace_and_member_order_do_not_matter() -> None:
    document = DOCUMENTS["event"]
    said = json.loads(encode(document))
    assert decode(json.dumps(dict(reversed(said.items())), indent=2).encode()) == document


# --- modified documents ----------------------------------------------------------------------------------


@pytest.mark.rule("LG-18")
@each_document
def test_every_changed_byte_is_found(document: ProofDocument) -> None:
    data = encode(document)
    for place, byte in enumerate(data):
        others = {byte ^ 1, byte ^ 0x20, byte ^ 0x80, *b' 07af"'} - {byte}  # 0x20 changes the case of a letter
        for other in others:
            changed = data[:place] + bytes([other]) + data[place + 1 :]
            assert is_detected(changed), changed[max(0, place - 40) : place + 40]


@pytest.mark.rule("LG-18")
@given(st.data(), st.sampled_from(list(DOCUMENTS.values())))
def test_inserted_removed_or_replaced_text_is_found(data: st.DataObject, document: ProofDocument) -> None:
    before = encode(document)
    start = data.draw(st.integers(0, len(before)))
    end = data.draw(st.integers(start, min(len(before), start + 8)))
    changed = before[:start] + data.draw(st.binary(max_size=8) | st.text(max_size=8).map(str.encode)) + before[end:]
    try:
        found = decode(changed)
    except ProofError:
        return
    assert found == document or not verify(found).is_valid


@pytest.mark.rule("LG-18")
@given(any_record, places, st.data())
def test_field_of_another_proof_is_found(record: Record, place: tuple[int, int], data: st.DataObject) -> None:
    document, other = proof_document(prove_alone(record, *place)), DOCUMENTS["event"]
    field = data.draw(st.sampled_from(document.record.__struct_fields__))
    value = getattr(other.record, field)
    if value != getattr(document.record, field):
        assert not verify(replace(document, record=replace(document.record, **{field: value}))).is_valid
    field = data.draw(st.sampled_from(document.block.__struct_fields__))
    value = getattr(other.block, field)
    if value != getattr(document.block, field):
        assert not verify(replace(document, block=replace(document.block, **{field: value}))).is_valid


def changed_values(value: Any) -> Iterator[Any]:
    """Yield copies of a JSON value with one change each."""
    match value:
        case dict():
            for name, member in value.items():
                yield {other: one for other, one in value.items() if other != name}
                yield from ({**value, name: one} for one in changed_values(member))
            yield {**value, "more": 1}
        case list():
            yield from (value + value[:1] or [""], value[:-1] or [""], [*value, "00" * 32])
            if len(value) > 1:
                yield value[::-1]
            for index, one in enumerate(value):
                yield from ([*value[:index], other, *value[index + 1 :]] for other in changed_values(one))
        case int():
            others = {0, value + 1, value - 1, value ^ 256, value + 2**31, value + 2**32, value + 2**64, -value}
            yield from (*(others - {value}), str(value), None, value + 0.5)
        case str():
            yield from (value + "0", value + "00", "00" + value, value[2:] or "x", value[:-1] or "x", value + "\n")
            yield from (None, 0, [value])
            if value != value.upper():
                yield value.upper()
        case None:
            yield from ("", "00" * 16, "00" * 32)


@pytest.mark.rule("LG-18")
@each_document
def test_every_changed_field_is_found(document: ProofDocument) -> None:
    changes = list(changed_values(json.loads(encode(document))))
    assert len(changes) > 200
    for changed in changes:
        assert is_detected(json.dumps(changed).encode()), changed


def test_byte_cannot_move_between_salt_and_body() -> None:
    said = json.loads(encode(proof_document(prove_alone(replace(EVENT, body=b"body")))))
    with pytest.raises(ProofError) as raised:
        decode(json.dumps({**said, "salt": said["salt"] + b"b".hex(), "body": "b2R5"}).encode())
    assert (raised.value.path, raised.value.reason) == ("$.salt", "must have 32 hexadecimal digits, not 34")


# --- reasons for a failure -------------------------------------------------------------------------------


def find_reason(document: ProofDocument, **more: Any) -> tuple[str, ...]:
    result = verify(document, **more)
    assert result.is_valid is (not result.findings)
    return result.findings


def test_failed_verification_states_the_reason() -> None:
    document = DOCUMENTS["event"]
    block, record = document.block, document.record
    not_its_hash = "the block's hash does not match its fields"
    nowhere = "the path does not lead from the record to the block's Merkle root"
    assert find_reason(replace(document, block=replace(block, hash="00" * 32))) == (not_its_hash,)
    assert find_reason(replace(document, block=replace(block, previous_hash="00" * 32))) == (not_its_hash,)
    assert find_reason(replace(document, record=replace(record, actor="user:zoe"))) == (nowhere,)
    assert find_reason(replace(document, record=replace(record, lane=1))) == (
        "the record has lane 1 but its block has lane 0",
    )
    assert find_reason(replace(document, record=replace(record, height=5))) == (
        "the record has height 5 but its block has height 4",
    )
    assert find_reason(replace(document, record=replace(record, log_time_ms=5))) == (
        "the record has log_time_ms 5 but its block has 1767225601234",
    )
    assert find_reason(replace(document, index=3)) == (
        "the record has position 12 but its index in the block gives position 13",
    )
    assert find_reason(replace(document, count=6)) == ("the proof is for a block with 6 records but the block has 5",)
    assert find_reason(replace(document, path=document.path[:-1])) == (nowhere,)
    assert find_reason(replace(document, body=b"other")) == ("the body hash does not match the salt and the body",)
    assert find_reason(replace(document, salt="00" * 16)) == ("the body hash does not match the salt and the body",)
    assert find_reason(replace(document, body_hash="00" * 32)) == (
        nowhere,
        "the body hash does not match the salt and the body",
    )


def test_index_beyond_the_block_is_refused() -> None:
    document = DOCUMENTS["alone"]
    block = replace(document.block, first_position=10)
    assert "index 2 is out of range for a proof with 1 records" in find_reason(replace(document, index=2, block=block))


@pytest.mark.rule("LG-18")
@each_document
def test_block_must_equal_the_trusted_one(document: ProofDocument) -> None:
    trusted = bytes.fromhex(document.block.hash)
    assert find_reason(document, block_hash=trusted) == ()
    for other in (bytes(32), trusted[:-1], trusted[::-1], b""):
        assert find_reason(document, block_hash=other) == (
            f"the block has the hash {trusted.hex()}, not {other.hex()}",
        )
    # Verification computes the block's hash and does not trust the hash in the document.
    forged = replace(document, block=replace(document.block, hash="00" * 32))
    assert len(find_reason(forged, block_hash=bytes(32))) == 2


@pytest.mark.rule("LG-18", "CO-41")
def test_header_of_an_erased_record_can_be_proven() -> None:
    document = DOCUMENTS["erased"]
    assert verify(document) == Verification((), is_erased=True)
    assert not verify(replace(document, body_hash="00" * 32)).is_valid
    assert not verify(replace(document, record=replace(document.record, actor=""))).is_valid
    # A reader who kept the body and the salt can still prove that body, but no other body.
    whole = replace(document, salt=SALT.hex(), body=EVENT.body)
    assert verify(whole) == Verification((), is_erased=False)
    assert not verify(replace(whole, body=b"another")).is_valid


@pytest.mark.rule("LG-18")
def test_body_of_a_transaction_must_match_its_fingerprint() -> None:
    """A body that does not match is detected even if the log has stored and hashed it."""
    other = encode_operations([SetEntity("balance:7", b"251")])
    for body, words in (
        (other, "the body does not match the fingerprint"),
        (encode_operations([*OPERATIONS, DeleteEntity("more")]), "the body does not match the fingerprint"),
        (b'{"operations":[]}', "the body does not match the fingerprint"),
        (b"", "the body is not a ledger transaction"),
        (b'{"operations":[{}]}', "the body is not a ledger transaction"),
        (b'{"operations":[{"delete_entity":{"key":"\xff"}}]}', "the body is not a ledger transaction"),
        (b"[" * 100_000, "the body is not a ledger transaction"),
    ):
        assert find_reason(proof_document(prove_alone(replace(TRANSACTION, body=body)))) == (words,)
        # Bodies under other policies are not compared, and an erased record has no body to compare.
        assert find_reason(proof_document(prove_alone(replace(TRANSACTION, body=body, policy="notes")))) == ()
        assert find_reason(proof_document(erase_body(prove_alone(replace(TRANSACTION, body=body))))) == ()


# --- invalid documents -----------------------------------------------------------------------------------


def get_refusal(data: bytes) -> tuple[str, str]:
    with pytest.raises(ProofError) as raised:
        decode(data)
    assert isinstance(raised.value, OncelogError)
    assert str(raised.value) == f"{raised.value.path}: {raised.value.reason}"
    assert str(raised.value).isprintable()
    assert len(str(raised.value)) < 500
    return raised.value.path, raised.value.reason


HEX = "must be lower-case hexadecimal with two digits per byte"
BAD: list[tuple[str, Any, str, str]] = [
    ("record.lane", "0", "$.record.lane", "Expected `int`, got `str`"),
    ("record.lane", 2**32, "$.record.lane", "must be from 0 to 4294967295"),
    ("record.position", -1, "$.record.position", "must be from 0 to 18446744073709551615"),
    ("record.sequence", 2**64, "$.record.sequence", "must be from 0 to 18446744073709551615"),
    ("record.height", 1.5, "$.record.height", "Expected `int`, got `float`"),
    ("record.log_time_ms", True, "$.record.log_time_ms", "Expected `int`, got `bool`"),
    ("record.client_sequence", None, "$.record.client_sequence", "Expected `int`, got `null`"),
    ("record.key", "0", "$.record.key", HEX),
    ("record.key", "zz", "$.record.key", HEX),
    ("record.key", "AB", "$.record.key", HEX),
    ("record.key", "ab\n0", "$.record.key", HEX),
    ("record.key", "٣٣", "$.record.key", HEX),
    ("record.key", "00" * 256, "$.record.key", "must have at most 510 hexadecimal digits, not 512"),
    ("record.fingerprint", "00" * 65, "$.record.fingerprint", "must have at most 128 hexadecimal digits, not 130"),
    ("record.policy", "p" * 65, "$.record.policy", "must have at most 64 characters, not 65"),
    ("record.scope", "s" * 513, "$.record.scope", "must have at most 512 characters, not 513"),
    ("record.actor", 7, "$.record.actor", "Expected `str`, got `int`"),
    ("record.partitions", ["p"] * 65, "$.record.partitions", "must have at most 64 entries, not 65"),
    ("record.partitions", ["a", 1], "$.record.partitions[1]", "Expected `str`, got `int`"),
    ("record.partitions", ["a", "p" * 257], "$.record.partitions[1]", "must have at most 256 characters, not 257"),
    ("record.more", 1, "$.record", "Object contains unknown field `more`"),
    ("salt", "00" * 15, "$.salt", "must have 32 hexadecimal digits, not 30"),
    ("salt", None, "$.salt", "must be null if, and only if, body is null"),
    ("body", None, "$.salt", "must be null if, and only if, body is null"),
    ("body", "A", "$.body", "Invalid base64 encoded string"),
    ("body", "AB==", "$.body", "must be canonical base64: the unused bits at the end must be zero"),
    ("body_hash", "00" * 33, "$.body_hash", "must have 64 hexadecimal digits, not 66"),
    ("body_hash", "", "$.body_hash", "must have 64 hexadecimal digits, not 0"),
    ("index", -1, "$.index", "must be from 0 to 4294967295"),
    ("count", 2**32, "$.count", "must be from 0 to 4294967295"),
    ("path", ["00" * 32] * (PATH_HASHES_MAX + 1), "$.path", "must have at most 64 hashes, not 65"),
    ("path", ["00" * 32, "00" * 31], "$.path[1]", "must have 64 hexadecimal digits, not 62"),
    ("path", ["00" * 32, "0g" * 32], "$.path[1]", HEX),
    ("path", "00" * 32, "$.path", "Expected `array`, got `str`"),
    ("block", [], "$.block", "Expected `object`, got `array`"),
    ("block.count", 2**32, "$.block.count", "must be from 0 to 4294967295"),
    ("block.timestamp_ms", 2**64, "$.block.timestamp_ms", "must be from 0 to 18446744073709551615"),
    ("block.previous_hash", "00", "$.block.previous_hash", "must have 64 hexadecimal digits, not 2"),
    ("block.hash", "G" * 64, "$.block.hash", HEX),
    ("more", 1, "$", "Object contains unknown field `more`"),
]


@pytest.mark.parametrize(("member", "value", "path", "reason"), BAD, ids=[f"{one[0]}-{n}" for n, one in enumerate(BAD)])
def test_error_identifies_the_invalid_member(member: str, value: Any, path: str, reason: str) -> None:
    said = json.loads(encode(DOCUMENTS["event"]))
    inside, _, name = member.rpartition(".")
    (said[inside] if inside else said)[name] = value
    assert get_refusal(json.dumps(said).encode()) == (path, reason)


def test_error_identifies_the_missing_member() -> None:
    said = json.loads(encode(DOCUMENTS["event"]))
    assert get_refusal(json.dumps({**said, "block": {}}).encode()) == (
        "$.block",
        "Object missing required field `lane`",
    )
    del said["salt"]
    assert get_refusal(json.dumps(said).encode()) == ("$", "Object missing required field `salt`")


@pytest.mark.parametrize("name", [b'"actor":', b'"path":', b'"\\u0070ath":'])
def test_repeated_member_is_refused(name: bytes) -> None:
    """JSON parsers differ in which of two repeated members they use, so a verified document could show a wrong one."""
    data = encode(DOCUMENTS["event"])
    plain = name.replace(b"\\u0070", b"p")
    value = data.partition(plain)[2][: data.partition(plain)[2].index(b'"]' if b"ath" in name else b'",') + 2]
    twice = data.replace(plain, name + value.rstrip(b",") + b"," + plain, 1)
    assert get_refusal(twice) == (json.loads(name.rstrip(b":")), "is repeated")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"null",
        b"7",
        b"[" * 100_000,
        b'{"record":' * 10_000,
        b'{"\x1b[2J":1}',
        b'{"' + b"long" * 100_000 + b'":1}',
        b'{"a\\u001b[2J":1}',
        b'{"record":{"lane":1' + b"0" * 5000 + b"}}",
        b'{"record":{"lane":NaN}}',
        encode(DOCUMENTS["event"]) + b"{}",
        encode(DOCUMENTS["event"])[:-1],
        b"\xef\xbb\xbf" + encode(DOCUMENTS["event"]),
        encode(DOCUMENTS["event"]).decode().encode("utf-16"),
        encode(DOCUMENTS["event"]).replace("zoë".encode(), b"zo\xff"),
        encode(DOCUMENTS["event"]).replace("zoë".encode(), b"zo\\ud800"),
        encode(DOCUMENTS["event"]).replace("zoë".encode(), b"zo\\udc00"),
        encode(DOCUMENTS["event"]).replace("zoë".encode(), b"zo\xed\xa0\x80"),
    ],
    ids=lambda data: repr(data[:24]),
)
def test_invalid_document_is_refused(data: bytes) -> None:
    path, reason = get_refusal(data)
    assert path.startswith("$")
    assert reason


def test_document_above_the_size_limit_is_refused() -> None:
    assert get_refusal(b" " * (DOCUMENT_BYTES_MAX + 1)) == ("$", "must have at most 67108864 bytes")
    data = encode(DOCUMENTS["event"])
    assert decode(data, bytes_max=len(data)) == DOCUMENTS["event"]
    with pytest.raises(ProofError):
        decode(data, bytes_max=len(data) - 1)


def test_handmade_document_is_validated() -> None:
    document = DOCUMENTS["event"]
    for made in (lambda: replace(document, salt="00"), lambda: replace(document.block, hash="x" * 64)):
        with pytest.raises(ProofError):
            made()
    with pytest.raises(ProofError, match="actor: lone surrogate"):
        replace(document.record, actor="\ud800")


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
any_json = st.recursive(scalars, lambda inside: st.lists(inside) | st.dictionaries(st.text(), inside), max_leaves=5)


@given(any_json)
def test_any_json_is_verified_or_refused(value: Any) -> None:
    said = json.loads(encode(DOCUMENTS["event"]))
    for member in ("record", "salt", "body_hash", "index", "path", "block"):
        assert is_detected(json.dumps({**said, member: value}).encode()) or said[member] == value
        assert is_detected(json.dumps({**said, "record": {**said["record"], "scope": value}}).encode()) or value == ""


# --- imports ---------------------------------------------------------------------------------------------


def test_verifier_imports_only_the_core() -> None:
    tree = ast.parse(Path(oncelog.proof.__file__).read_text(encoding="utf-8"))
    imported = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {one.name for node in ast.walk(tree) if isinstance(node, ast.Import) for one in node.names}
    ours = {name for name in imported if name.startswith("oncelog")}
    assert all(name == "oncelog.errors" or name.startswith("oncelog.core") for name in ours)
    assert imported - ours == {"base64", "json", "msgspec", "re", "typing"}
