"""What no gateway takes is refused where it is edited, with a name, and nothing is changed by it."""

from typing import Any

import pytest

from client.deltas.test_deltas_client_store import NOW_MS, opened
from oncelog.core.deltas import deltas_body, read_push
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
        ("notes", "1", [("a", 1)], "columns must be given by their names"),
        ("notes", "1", {"a": float("nan")}, r"\$\.a: NaN"),
        ("notes", "1", {"a": [{"b": 2**53}]}, r"\$\.a\[0\]\.b: integer beyond"),
        ("notes", "1", {"a": {1}}, r"\$\.a: JSON has no form for set"),
        ("notes", "1", {"a": "\ud800"}, r"\$\.a: lone surrogate"),
        ("notes", "1", {f"c{number}": 1 for number in range(1001)}, "more than 1000 columns"),
        ("notes", "1", {"a": nested(509)}, "nested deeper"),
        ("notes", "1", {"a": "x" * 262_143}, r"\$\.a: must have at most 262144 bytes .* not 262145"),
    ],
)
def test_it_is_refused_by_name(table: Any, row_id: Any, columns: Any, words: str) -> None:
    store = opened()
    with pytest.raises(CanonicalError, match=words):
        store.transact(lambda edits: edits.put(table, row_id, columns), NOW_MS)
    assert store.standing.pending == 0
    assert store.rows("notes", "", 10) == []


def test_a_row_has_no_more_than_its_bytes() -> None:
    store = opened(value_bytes_max=2_000_002)

    def put(name: str) -> None:
        store.transact(lambda edits: edits.put("notes", "1", {name: "x" * 2_000_000}), NOW_MS)

    put("a")
    put("b")
    with pytest.raises(CanonicalError, match="more than 4194304 bytes of values"):
        put("c")


@pytest.mark.parametrize("levels", range(495, 512))
def test_what_is_taken_here_can_be_pushed(levels: int) -> None:
    store = opened()
    try:
        store.transact(lambda edits: edits.put("notes", "1", {"a": nested(levels)}), NOW_MS)
    except CanonicalError:
        assert levels > 500
        return
    body = store.pending(None, 1, 10**9)[0].body
    read_push(deltas_body([body]))  # raises what the door would refuse


def test_values_that_are_taken() -> None:
    columns = {"a": -0.0, "b": 1e300, "c": None, "d": {"é": [True, "\0"]}, "_E9": ""}
    store = opened()
    store.transact(lambda edits: edits.put("notes", "row/1 é\U0001f600", columns), NOW_MS)
    assert store.row("notes", "row/1 é\U0001f600") == {**columns, "a": 0}
