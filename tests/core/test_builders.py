"""Submissions built from JSON."""

import unicodedata
from hashlib import sha256
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.item_builders import Log, assert_committed, assert_refused, assert_replayed
from oncelog.core.builders import event, write
from oncelog.core.canonical import canonical
from oncelog.core.identity import fingerprint_from_json
from oncelog.core.policy import CHAT, EVENTS, FOREVER, OnReuse, Order, Policy, evicted_after
from oncelog.core.validation import check_item
from oncelog.core.values import Reason, Submission
from oncelog.errors import CanonicalError

ID = "0190b3a2-6f1e-7c3d-8a4b-5c6d7e8f9a0b"
PLACED = {"type": "placed", "order": 17}
NOTES = Policy(name="notes", key_bytes=(1, 64), order=Order.STREAM, on_reuse=OnReuse.REFUSE, retention=FOREVER)

# --- events ------------------------------------------------------------------------------------------


@pytest.mark.rule("EV-9")
def test_event_becomes_a_submission_in_canonical_form() -> None:
    written = event(ID, {"type": "placed", "order": 17.0}, ["b", "a", "b"], actor="user:ann", expected_position=4)
    assert written == Submission(
        policy=EVENTS,
        scope="",
        key=bytes.fromhex("0190b3a26f1e7c3d8a4b5c6d7e8f9a0b"),
        fingerprint=sha256(b'{"event":{"order":17,"type":"placed"},"partitions":["a","b"]}').digest(),
        body=b'{"order":17,"type":"placed"}',
        actor="user:ann",
        partitions=("a", "b"),
        expected_position=4,
    )
    assert event(ID, PLACED, ("a",), scope="tenant").scope == "tenant"


@pytest.mark.rule("EV-9")
@given(st.uuids())
def test_event_id_is_case_insensitive(one: UUID) -> None:
    mixed = "".join(character.upper() if place % 2 else character for place, character in enumerate(str(one)))
    for spelling in (one, str(one), str(one).upper(), mixed):
        assert event(spelling, PLACED, ["a"]).key == one.bytes


@pytest.mark.rule("EV-9")
@pytest.mark.parametrize(
    "wrong",
    [
        "",
        "x",
        ID[:-1],
        ID + "0",
        ID.replace("-", ""),
        "{" + ID + "}",
        "urn:uuid:" + ID,
        " " + ID,
        ID + "\n",
        ID.replace("-", "", 1) + "-",
        ID.replace("0", "٠"),
        ID.replace("0", "0_", 1).replace("b-", "-"),
        ID.replace("a", "g"),
        "\ud800" * 32,
        None,
        17,
        b"0123456789abcdef",
        [ID],
    ],
)
def test_invalid_event_id_is_refused(wrong: Any) -> None:
    with pytest.raises(CanonicalError) as raised:
        event(wrong, PLACED, ["a"])
    assert raised.value.path == "$.id"


@pytest.mark.rule("EV-9")
@pytest.mark.parametrize(
    ("partitions", "path"),
    [
        ([], "$.partitions"),
        ((), "$.partitions"),
        ("a", "$.partitions"),
        (None, "$.partitions"),
        (7, "$.partitions"),
        ({"a": 1}, "$.partitions"),
        ({"a"}, "$.partitions"),
        ([str(number) for number in range(65)], "$.partitions"),
        ([""], "$.partitions"),
        (["a", ""], "$.partitions"),
        (["a" * 257], "$.partitions"),
        (["a", "é" * 257], "$.partitions"),
        (["a", 7], "$.partitions[1]"),
        ([None], "$.partitions[0]"),
        (["\ud800"], "$.partitions[0]"),
        (b"a", "$.partitions[0]"),
    ],
)
def test_partitions_are_1_to_64_texts_of_1_to_256_characters(partitions: Any, path: str) -> None:
    with pytest.raises(CanonicalError) as raised:
        event(ID, PLACED, partitions)
    assert raised.value.path == path


@pytest.mark.parametrize("name", ["expected_position", "expected_sequence"])
def test_negative_expectation_is_refused(name: str) -> None:
    expected: Any = {name: -1}
    with pytest.raises(CanonicalError, match=rf"\$\.{name}: must be 0 or more, not -1"):
        write(NOTES, "s", "k", {}, **expected)


@pytest.mark.rule("EV-9")
def test_plan_accepts_partitions_at_their_limits() -> None:
    most = [str(number) for number in range(64)]
    for partitions in (
        ["a"],
        ["a" * 256],
        ["é" * 256],
        ["a"] * 65,
        most,
        most * 2,
        [one.rjust(256, "x") for one in most],
    ):
        written = event(ID, PLACED, partitions)
        assert set(written.partitions) == set(partitions)
        assert check_item(written) is None


@pytest.mark.rule("EV-9")
def test_partition_length_is_checked_after_normalisation() -> None:
    short, long = "é" * 256, unicodedata.normalize("NFD", "é" * 256)
    assert len(long) == 512
    assert event(ID, PLACED, [short]) == event(ID, PLACED, [long]) == event(ID, PLACED, [short, long])
    grows = "\u0958" * 256
    assert len(unicodedata.normalize("NFC", grows)) == 512
    with pytest.raises(CanonicalError):
        event(ID, PLACED, [grows])


@pytest.mark.rule("EV-9", "CO-2", "CO-3")
@pytest.mark.parametrize(
    ("value", "path"),
    [
        (None, "$.event"),
        ([], "$.event"),
        ("placed", "$.event"),
        ({}, "$.event.type"),
        ({"Type": "placed"}, "$.event.type"),
        ({"type": ""}, "$.event.type"),
        ({"type": None}, "$.event.type"),
        ({"type": 7}, "$.event.type"),
        ({"type": "\ud800"}, "$.event.type"),
        ({"type": "placed", "at": [0, 2**53 + 1]}, "$.event.at[1]"),
        ({"type": "placed", "at": float("nan")}, "$.event.at"),
        ({"type": "placed", "at": {1}}, "$.event.at"),
    ],
)
def test_event_must_be_an_object_with_a_type_and_a_canonical_form(value: Any, path: str) -> None:
    with pytest.raises(CanonicalError) as raised:
        event(ID, value, ["a"])
    assert raised.value.path == path


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53) + 1, 2**53 - 1) | st.floats(-1e9, 1e9) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.text(max_size=3), json_values, max_size=3), st.lists(st.text(min_size=1), min_size=1))
def test_fingerprint_equals_that_of_the_received_event(more: dict[str, Any], names: list[str]) -> None:
    said = {**more, "type": "t"}
    written = event(ID, said, names)
    assert written.fingerprint == fingerprint_from_json({"partitions": names, "event": said})
    assert written.body == canonical(said)


@pytest.mark.rule("EV-3", "EV-5", "EV-9")
def test_equivalent_spelling_of_an_event_is_a_retry() -> None:
    log = Log()
    receipt = assert_committed(log(event(ID, PLACED, ["a", "b"])))
    assert assert_replayed(log(event(UUID(ID), {"order": 17.0, "type": "placed"}, ["b", "a"]))).receipt == receipt
    assert assert_replayed(log(event(ID.upper(), PLACED, ["a", "b", "a"]))).receipt == receipt
    assert_refused(log(event(ID, PLACED, ["a"])), Reason.IDENTITY_REUSED)
    assert_refused(log(event(ID, {**PLACED, "order": 18}, ["a", "b"])), Reason.IDENTITY_REUSED)


# --- writes under user policies ----------------------------------------------------------------------


def test_write_becomes_a_submission_in_canonical_form() -> None:
    numbered = Policy(
        name="numbered",
        key_bytes=(1, 64),
        order=Order.STREAM,
        on_reuse=OnReuse.REFUSE,
        retention=evicted_after(hours=1),
        client_sequence=True,
    )
    written = write(
        numbered,
        "s",
        b"k",
        {"b": 1.0, "a": None},
        actor="user:ann",
        client="c",
        client_sequence=1,
        expected_sequence=0,
        expected_position=0,
    )
    assert written == Submission(
        policy=numbered,
        scope="s",
        key=b"k",
        fingerprint=sha256(b'{"a":null,"b":1}').digest(),
        body=b'{"a":null,"b":1}',
        actor="user:ann",
        client="c",
        client_sequence=1,
        expected_sequence=0,
        expected_position=0,
    )
    assert assert_committed(Log()(written)).client_sequence == 1


@pytest.mark.parametrize(
    ("key", "as_bytes"),
    [
        (b"\x00\xff", b"\x00\xff"),
        ("order-17", b"order-17"),
        ("é", b"\xc3\xa9"),
        (ID, ID.encode()),
        (UUID(ID), bytes.fromhex(ID.replace("-", ""))),
    ],
)
def test_key_may_be_bytes_text_or_uuid(key: bytes | str | UUID, as_bytes: bytes) -> None:
    assert write(NOTES, "s", key, None).key == as_bytes


@pytest.mark.parametrize("key", [None, 7, "\ud800", ["k"], bytearray(b"k")])
def test_invalid_key_is_refused(key: Any) -> None:
    with pytest.raises(CanonicalError) as raised:
        write(NOTES, "s", key, None)
    assert raised.value.path == "$.key"


@pytest.mark.rule("CO-2", "CO-3")
@pytest.mark.parametrize(("body", "path"), [(2**53 + 1, "$.body"), ({"a": [b""]}, "$.body.a[0]")])
def test_body_without_canonical_form_is_refused_with_its_path(body: Any, path: str) -> None:
    with pytest.raises(CanonicalError) as raised:
        write(NOTES, "s", "k", body)
    assert raised.value.path == path


@given(json_values, json_values)
def test_bodies_are_equal_if_their_canonical_forms_are(one: Any, other: Any) -> None:
    first, second = write(CHAT, "s", UUID(ID), one), write(CHAT, "s", UUID(ID), other)
    assert first.body == canonical(one)
    assert (first == second) == (first.fingerprint == second.fingerprint) == (canonical(one) == canonical(other))


def test_repeated_write_is_a_retry() -> None:
    log = Log()
    receipt = assert_committed(log(write(NOTES, "s", "k", {"a": 1, "b": 2}, expected_sequence=0)))
    assert assert_replayed(log(write(NOTES, "s", b"k", {"b": 2.0, "a": 1.0}))).receipt == receipt
    assert_refused(log(write(NOTES, "s", "k", {"a": 1})), Reason.IDENTITY_REUSED)
    assert_refused(log(write(NOTES, "s", "l", {}, expected_sequence=0)), Reason.UNEXPECTED_POSITION)
