"""Deltas in JSON, their stored form, and invalid deltas (DE-1, DE-2, DE-3, DE-10)."""

import json
from hashlib import sha256
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

import oncelog
from core import vectors
from core.delta_faults import FAULTS, GOOD, NOT_JSON, Fault, delta_json, delta_text, id_of
from oncelog.core.canonical import INTEGER_MAX, canonical, canonical_text
from oncelog.core.deltas import (
    WrongIdError,
    decode_delta,
    decode_push,
    encode_delta,
    encode_push,
    is_identifier,
    to_row_delta,
)
from oncelog.core.identity import delta_id_from_json
from oncelog.core.merge import Op, RowDelta, extract
from oncelog.errors import CanonicalError

identifiers = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,9}", fullmatch=True)
texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8).filter(lambda one: "\0" not in one)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-INTEGER_MAX, INTEGER_MAX)
    | st.floats(-(2.0**52), 2.0**52)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3), max_leaves=6
)
good_deltas = st.fixed_dictionaries(
    {
        "op": st.sampled_from([op.value for op in Op]),
        "table": identifiers,
        "rowId": texts,
        "clientId": texts,
        "hlc": st.integers(0, 2**64 - 1).map(str),
        "columns": st.lists(
            st.fixed_dictionaries({"column": identifiers, "value": values}),
            max_size=4,
            unique_by=lambda one: str(one["column"]),
        ),
    }
)


def with_id(members: dict[str, Any]) -> dict[str, Any]:
    return {**members, "deltaId": delta_id_from_json(members).hex()}


def decode_all(body: bytes) -> list[RowDelta]:
    """Check and return all deltas of the body."""
    return [
        to_row_delta(given, given.compute_id(), f"deltas[{index}]")
        for index, given in enumerate(decode_push(body).deltas)
    ]


def push_text(*deltas: str) -> bytes:
    return f'{{"deltas":[{",".join(deltas)}]}}'.encode()


# --- valid deltas --------------------------------------------------------------------------------------------


@pytest.mark.rule("DE-1", "DE-2")
@pytest.mark.parametrize("vector", [pytest.param(one, id=one["name"]) for one in vectors.load("delta_ids")])
def test_delta_ids_match_the_vectors(vector: dict[str, Any]) -> None:
    text = json.dumps({**vector["input"], "deltaId": "", "op": "UPDATE"})
    (given,) = decode_push(push_text(text)).deltas
    assert given.compute_id().hex() == vector["deltaId"]


@pytest.mark.rule("DE-1", "DE-2")
@given(good_deltas)
def test_delta_id_equals_the_hash_of_the_canonical_form(members: dict[str, Any]) -> None:
    for text in (json.dumps(with_id(members)), json.dumps(with_id(members), ensure_ascii=False, indent=1)):
        (given,) = decode_push(push_text(text)).deltas
        assert given.compute_id() == delta_id_from_json(members)


@pytest.mark.rule("DE-1", "DE-2")
@given(good_deltas)
def test_delta_round_trips_through_its_canonical_form(members: dict[str, Any]) -> None:
    change = decode_delta(json.dumps(with_id(members)).encode())
    body = encode_delta(change)
    assert body == canonical(with_id(members)) == canonical_text(body)
    assert decode_delta(body) == change
    assert decode_all(encode_push([body, body])) == [change, change]
    assert canonical_text(encode_push([body, body])) == encode_push([body, body])
    submission = oncelog.delta("deltas/shop", change, actor="user:ada")
    assert (submission.key, submission.fingerprint) == (delta_id_from_json(members), members["op"].encode())
    assert (submission.body, submission.client, submission.actor) == (body, members["clientId"], "user:ada")


@pytest.mark.rule("DE-2", "DE-10")
def test_equivalent_spellings_are_the_same_delta() -> None:
    good = decode_delta(delta_text().encode())
    for text in (
        delta_text(op='"UPDATE"', rowId=r'"row\u002d1"'),
        delta_text(columns='[ {"value":1.0,"column":"a"}, {"value":{"y":[null,"\\u00e9"],"x":15e-1},"column":"b"} ]'),
        "\n" + delta_text(note='{"retries": 3}'),
    ):
        assert decode_delta(text.encode()) == good
    other = decode_delta(delta_text(op='"DELETE"').encode())
    assert (other.delta_id, other.op) == (good.delta_id, Op.DELETE)


@pytest.mark.rule("DE-10")
def test_minus_zero_equals_zero_and_null_is_a_value() -> None:
    def columns(value: str) -> Any:
        return delta_text(columns=f'[{{"column":"a","value":{value}}}]')

    zero = delta_json(columns=[{"column": "a", "value": 0}])["deltaId"]
    for text in ("0", "-0", "-0.0", "0e7", "-0E-3"):
        (given,) = decode_push(push_text(columns(text))).deltas
        assert given.compute_id().hex() == zero
        assert to_row_delta(given, given.compute_id(), "").columns == (("a", b"0"),)
    (given,) = decode_push(push_text(columns("null"))).deltas
    assert given.compute_id().hex() == id_of({**GOOD, "columns": [{"column": "a", "value": None}]}) != zero
    assert to_row_delta(given, given.compute_id(), "").columns == (("a", b"null"),)


@pytest.mark.rule("DE-1")
def test_values_at_the_limits_are_accepted() -> None:
    ends: list[dict[str, Any]] = [
        {"hlc": "0"},
        {"hlc": str(2**64 - 1)},
        {"table": "t" * 128},
        {"table": "_"},
        {"rowId": "r" * 512},
        {"rowId": "\U0001f600" * 512},
        {"clientId": "\x01"},
        {"columns": []},
        {"columns": [{"column": f"c{number}", "value": number} for number in range(1000)]},
    ]
    for members in ends:
        change = decode_delta(json.dumps(delta_json(**members)).encode())
        assert encode_delta(change) == canonical(delta_json(**members))


def test_names_are_checked_as_ascii() -> None:
    assert all(map(is_identifier, ("a", "_", "A9_", "id", "a" * 128)))
    assert not any(map(is_identifier, ("", "9a", "a\n", "é", "ﬁ", "a" * 129, "a b", "\u0430")))


# --- invalid deltas -------------------------------------------------------------------------------------------


@pytest.mark.rule("DE-10")
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
@pytest.mark.parametrize("index", [0, 2])
def test_invalid_delta_is_refused_with_its_path(fault: Fault, index: int) -> None:
    texts = [delta_text()] * 3
    texts[index] = delta_text(**fault.raw)
    with pytest.raises(CanonicalError) as raised:
        decode_all(push_text(*texts))
    assert raised.value.path.removeprefix("$.").startswith(f"deltas[{index}]{fault.path}")
    assert fault.words in raised.value.reason
    with pytest.raises(CanonicalError):
        decode_delta(texts[index].encode())


@pytest.mark.rule("DE-10")
@pytest.mark.parametrize("text", NOT_JSON.values(), ids=NOT_JSON)
def test_invalid_json_is_refused(text: str) -> None:
    with pytest.raises(CanonicalError):
        decode_all(push_text(text))


@pytest.mark.rule("DE-10")
@pytest.mark.parametrize(
    ("body", "path"),
    [
        (b"", "body"),
        (b"\xff", "body"),
        (b'{"deltas":["\xff"]}', "body"),
        (b"[]", "body"),
        (b"null", "body"),
        (b"{}", "deltas"),
        (b'{"deltas":null}', "deltas"),
        (b'{"deltas":{}}', "deltas"),
        (b'{"deltas":[],"deltas":[]}', "deltas"),
        (b'{"deltas":[null]}', "deltas[0]"),
        (b'{"deltas":[1]}', "deltas[0]"),
        (b'{"deltas":[[]]}', "deltas[0]"),
        (b"[" * 100_000, "body"),
        (b'{"deltas":' + b"[" * 5000 + b"]" * 5000 + b"}", "body"),
    ],
)
def test_invalid_push_is_refused(body: bytes, path: str) -> None:
    with pytest.raises(CanonicalError) as raised:
        decode_all(body)
    path_found = raised.value.path.removeprefix("$").removeprefix(".") or "body"
    assert path_found.startswith(path), raised.value


@pytest.mark.rule("DE-3")
@pytest.mark.parametrize("forged", ["", "0" * 64, delta_json()["deltaId"].upper(), delta_json()["deltaId"] + " "])
def test_wrong_delta_id_is_refused_with_the_right_one(forged: str) -> None:
    with pytest.raises(WrongIdError) as raised:
        decode_delta(delta_text(deltaId=json.dumps(forged)).encode())
    assert (raised.value.path, raised.value.expected) == ("$.deltaId", delta_json()["deltaId"])


@pytest.mark.rule("DE-2")
def test_field_text_cannot_be_confused_with_the_next_field() -> None:
    """The id is built from text, so a value that looks like the next field must not be confused with it."""
    honest = id_of({**GOOD, "hlc": "1", "rowId": "x"})
    for members in (
        {"hlc": '1","rowId":"x'},
        {"rowId": 'x","table":"todos'},
        {"clientId": 'client-1","columns":[],"hlc":"1'},
        {"hlc": '1","rowId":"x","table":"todos"}', "rowId": "", "table": ""},
    ):
        (given,) = decode_push(push_text(json.dumps(delta_json(**members)))).deltas
        assert given.compute_id().hex() != honest


# --- deltas built in Python ----------------------------------------------------------------------------------


def build_delta(*columns: tuple[str, bytes], **members: Any) -> RowDelta:
    """Build a delta with the right id, even if other fields are invalid."""
    body = b",".join(b'{"column":"%b","value":%b}' % (name.encode(), value) for name, value in columns)
    hlc = members.get("hlc", 1)
    text = b'{"clientId":"c","columns":[%b],"hlc":"%d","rowId":"r","table":"t"}' % (body, hlc)
    return RowDelta(Op.UPDATE, "t", "r", "c", hlc, columns, sha256(text).digest())


def test_valid_handmade_delta_is_accepted() -> None:
    change = build_delta(("a", b"1"), ("b", b'{"x":[null,1.5]}'))
    assert oncelog.delta("deltas/shop", change).delta == change
    extracted = extract(None, {"b": 1, "a": 2.0}, client_id="c", hlc=5, table="t", row_id="r")
    assert extracted is not None
    assert oncelog.delta("deltas/shop", extracted).delta == extracted


@pytest.mark.rule("DE-10")
@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"not json",
        b"NaN",
        b"-0",
        b"1.0",
        b" 1",
        b'{"b":1,"a":2}',
        b'"\\u0061"',
        b"9007199254740993",
        b"1000000000000000000000",
        b"\xff",
        b'1},{"column":"b","value":2',
        b'1,"value":2',
    ],
)
def test_values_not_in_canonical_form_are_refused(value: bytes) -> None:
    for columns in ((("a", value),), (("z", b"1"), ("a", value))):
        with pytest.raises(CanonicalError) as raised:
            oncelog.delta("deltas/shop", build_delta(*columns))
        assert raised.value.path == f"$.columns[{len(columns) - 1}].value"


@pytest.mark.rule("DE-10")
def test_invalid_handmade_delta_is_refused() -> None:
    good = build_delta(("a", b"1"))
    for change, path in (
        (replace(good, delta_id=bytes(32)), "$.deltaId"),
        (build_delta(("a", b"1"), ("a", b"2")), "$.columns[1].column"),
        (build_delta(('a","x":"', b"1")), "$.columns[0].column"),
        (replace(good, table="no name"), "$.table"),
        (replace(good, row_id=""), "$.rowId"),
        (replace(good, client_id="\ud800"), "$.clientId"),
        (replace(good, hlc=-1), "$.hlc"),
        (replace(good, hlc=2**64), "$.hlc"),
    ):
        with pytest.raises(CanonicalError) as raised:
            oncelog.delta("deltas/shop", change)
        assert raised.value.path == path
