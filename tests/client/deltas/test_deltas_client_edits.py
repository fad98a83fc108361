"""The client refuses edits that every gateway would refuse. The error names the field, and nothing changes."""

from typing import Any

import pytest

from client.deltas.test_deltas_client_store import NOW_MS, open_store
from oncelog.core.deltas import decode_push, encode_push
from oncelog.errors import CanonicalError


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.rule("DE-10")
@pytest.mark.parametrize(
    ("table", "row_id", "columns", "words"),
    [
        ("", "1", {}, "table: must be an identifier"),
        ("1a", "1", {}, "table: must be an identifier .* not '1a'"),
        ("a b", "1", {}, "table: must be an identifier"),
        ("é", "1", {}, "table: must be an identifier"),
        ("a" * 129, "1", {}, "table: must be an identifier .* of 1 to 128 characters"),
        (7, "1", {}, "table: must be an identifier"),
        ("notes", "", {}, "rowId: must have 1 to 512 characters"),
        ("notes", "x" * 513, {}, "rowId: must have 1 to 512 characters"),
        ("notes", "\0", {}, "rowId: .* no U\\+0000"),
        ("notes", "\ud800", {}, "rowId: lone surrogate"),
        ("notes", 7, {}, "rowId: must be a string"),
        ("notes", "1", {"a-b": 1}, "column: must be an identifier .* not 'a-b'"),
        ("notes", "1", {7: 1}, "column: must be an identifier"),
        ("notes", "1", [("a", 1)], "columns must be a mapping"),
        ("notes", "1", {"a": float("nan")}, r"\$\.a: NaN"),
        ("notes", "1", {"a": [{"b": 2**53 + 1}]}, r"\$\.a\[0\]\.b: integer that would become 9007199254740992 "),
        ("notes", "1", {"a": {1}}, r"\$\.a: a value of type set has no JSON form"),
        ("notes", "1", {"a": "\ud800"}, r"\$\.a: lone surrogate"),
        ("notes", "1", {f"c{number}": 1 for number in range(1001)}, "more than 1000 columns"),
        ("notes", "1", {"a": nested(509)}, "nested deeper"),
        ("notes", "1", {"a": "x" * 262_143}, r"\$\.a: must have at most 262144 bytes .* not 262145"),
    ],
)
def test_invalid_edit_is_refused_with_the_name_of_the_field(table: Any, row_id: Any, columns: Any, words: str) -> None:
    store = open_store()
    with pytest.raises(CanonicalError, match=words):
        store.transact(lambda edits: edits.put(table, row_id, columns), NOW_MS)
    assert store.sync_state.pending == 0
    assert store.list_rows("notes", "", 10) == []


def test_row_above_the_size_limit_is_refused() -> None:
    store = open_store(value_bytes_max=2_000_002)

    def put(name: str) -> None:
        store.transact(lambda edits: edits.put("notes", "1", {name: "x" * 2_000_000}), NOW_MS)

    put("a")
    put("b")
    with pytest.raises(CanonicalError, match="more than 4194304 bytes of values"):
        put("c")


@pytest.mark.parametrize("levels", range(495, 512))
def test_accepted_edit_can_be_pushed_at_any_nesting_depth(levels: int) -> None:
    store = open_store()
    try:
        store.transact(lambda edits: edits.put("notes", "1", {"a": nested(levels)}), NOW_MS)
    except CanonicalError:
        assert levels > 500
        return
    body = store.list_pending(None, 1, 10**9)[0].body
    decode_push(encode_push([body]))  # raises if the server would refuse the push


def test_json_values_are_stored_unchanged() -> None:
    columns = {"a": -0.0, "b": 1e300, "c": None, "d": {"é": [True, "\0"]}, "_E9": ""}
    store = open_store()
    store.transact(lambda edits: edits.put("notes", "row/1 é\U0001f600", columns), NOW_MS)
    assert store.load_row("notes", "row/1 é\U0001f600") == {**columns, "a": 0}
