"""Merging rows by last writer wins (DE-7), and the delta between two rows (DE-11)."""

import json
from collections.abc import Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncelog.core.canonical import INTEGER_MAX, canonical
from oncelog.core.identity import delta_id
from oncelog.core.merge import NEVER, Op, Row, RowDelta, extract, merge
from oncelog.errors import CanonicalError

VECTORS = json.loads((Path(__file__).parents[2] / "vectors" / "delta_ids.json").read_text(encoding="utf-8"))

# The private use area sorts before characters beyond the BMP by code point, and after them by UTF-16 code unit.
PRIVATE, LAST_IN_BMP, FIRST_BEYOND, EMOJI = "\ue000", "\uffff", "\U00010000", "\U0001f600"
CLIENTS = ["", "a", "a\x00", "b", "é", "\ud7ff", PRIVATE, LAST_IN_BMP, FIRST_BEYOND, EMOJI, EMOJI + "a", "a" + PRIVATE]


def build_id(number: int) -> bytes:
    return number.to_bytes(32, "big")


def build_delta(
    op: Op = Op.UPDATE, hlc: int = 1, client_id: str = "a", number: int = 1, /, **columns: int | None
) -> RowDelta:
    written = tuple((name, canonical(value)) for name, value in columns.items())
    return RowDelta(op, "todos", "row-1", client_id, hlc, written, build_id(number))


def merge_all(deltas: Sequence[RowDelta], row: Row | None = None) -> Row:
    row = row or Row()
    for delta in deltas:
        row = merge(row, delta)
    return row


# --- a model of the rule -------------------------------------------------------------------------------


def code_units(text: str) -> list[int]:
    """Encode to UTF-16 code units: two units for characters beyond the BMP."""
    units: list[int] = []
    for point in map(ord, text):
        if point < 0x10000:
            units.append(point)
        else:
            units += [0xD800 + (point - 0x10000 >> 10), 0xDC00 + (point - 0x10000 & 0x3FF)]
    return units


def model_row(deltas: Sequence[RowDelta]) -> dict[str, bytes] | None:
    """DE-7, applied literally in the order of the rule. Return None if the row does not exist."""
    row: dict[str, bytes] | None = None
    for delta in sorted(deltas, key=lambda one: (one.hlc, code_units(one.client_id), one.delta_id.hex())):
        row = None if delta.op is Op.DELETE else {**(row or {}), **dict(delta.columns)}
    return row


# Few clocks, clients and columns, so that every kind of tie is common.
values = st.sampled_from([b"0", b"1", b'"x"', b"null"])
deltas = st.builds(
    RowDelta,
    op=st.sampled_from(Op),
    table=st.just("todos"),
    row_id=st.just("row-1"),
    client_id=st.sampled_from(CLIENTS),
    hlc=st.integers(0, 3) | st.sampled_from([2**64 - 2, 2**64 - 1]),
    columns=st.dictionaries(st.sampled_from("xyz"), values, max_size=3).map(lambda one: tuple(one.items())),
    delta_id=st.integers(0, 20).map(build_id) | st.binary(min_size=32, max_size=32),
)


def histories(max_size: int) -> st.SearchStrategy[list[RowDelta]]:
    return st.lists(deltas, max_size=max_size, unique_by=lambda one: one.delta_id)


@pytest.mark.rule("DE-7")
@given(histories(5))
def test_merge_does_not_depend_on_the_order_of_arrival(history: list[RowDelta]) -> None:
    first = merge_all(history)
    for order in permutations(history):
        assert merge_all(order) == first


@pytest.mark.rule("DE-7")
@given(histories(12).flatmap(lambda history: st.tuples(st.just(history), st.permutations(history))))
def test_merge_of_long_histories_does_not_depend_on_order(both: tuple[list[RowDelta], list[RowDelta]]) -> None:
    history, reordered = both
    assert merge_all(history) == merge_all(reordered)


@pytest.mark.rule("DE-7")
@given(histories(12))
def test_merged_row_follows_the_rule(history: list[RowDelta]) -> None:
    row, expected = merge_all(history), model_row(history)
    assert row.exists == (expected is not None)
    assert row.values == (expected or {})


@pytest.mark.rule("DE-7", "DE-4")
@given(histories(8), st.data())
def test_merging_a_delta_again_changes_nothing(history: list[RowDelta], data: st.DataObject) -> None:
    row = merge_all(history)
    for delta in data.draw(st.permutations(history)):
        assert merge(row, delta) is row


@pytest.mark.rule("DE-7")
@given(histories(8), deltas)
def test_merge_returns_a_new_row_only_for_a_change(history: list[RowDelta], delta: RowDelta) -> None:
    row = merge_all(history)
    after = merge(row, delta)
    assert (after is row) == (after == row)


@pytest.mark.rule("DE-7")
@given(histories(8), deltas)
def test_merge_does_not_modify_the_old_row(history: list[RowDelta], delta: RowDelta) -> None:
    row = merge_all(history)
    copy = Row(dict(row.columns), row.written, row.deleted)
    merge(row, delta)
    assert row == copy


# --- which delta wins ------------------------------------------------------------------------------------------


def assert_wins(winner: RowDelta, loser: RowDelta) -> None:
    """Assert that the winner's value remains in either order, and that a late loser changes nothing."""
    for order in permutations([winner, loser]):
        assert merge_all(order).values == dict(winner.columns)
    row = merge_all([winner])
    assert merge(row, loser) is row


@pytest.mark.rule("DE-7")
def test_higher_hlc_wins() -> None:
    assert_wins(build_delta(Op.UPDATE, 2, "a", 1, x=2), build_delta(Op.UPDATE, 1, "b", 2, x=1))
    assert_wins(build_delta(Op.INSERT, 2**64 - 1, "a", 1, x=2), build_delta(Op.UPDATE, 9, "b", 2, x=1))


@pytest.mark.rule("DE-7")
@pytest.mark.parametrize(
    ("higher", "lower"),
    [
        ("b", "a"),
        ("a", ""),
        ("aa", "a"),
        ("a\x00", "a"),
        ("a", "Z"),
        ("é", "z"),
        ("10", "1"),
        ("9", "10"),
        (PRIVATE, EMOJI),
        (PRIVATE, FIRST_BEYOND),
        (LAST_IN_BMP, "\U0010ffff"),
        (FIRST_BEYOND, "\ud7ff"),
        (EMOJI, FIRST_BEYOND),
        ("a" + PRIVATE, "a" + EMOJI),
        ("ab", "a" + "\x00b"),
    ],
)
def test_equal_hlc_is_decided_by_client_in_utf16_order(higher: str, lower: str) -> None:
    assert code_units(higher) > code_units(lower)
    assert_wins(build_delta(Op.UPDATE, 5, higher, 1, x=2), build_delta(Op.UPDATE, 5, lower, 2, x=1))


@pytest.mark.rule("DE-7")
@pytest.mark.parametrize(("higher", "lower"), [(2, 1), (256, 255), (1 << 255, (1 << 255) - 1)])
def test_equal_hlc_and_client_is_decided_by_delta_id(higher: int, lower: int) -> None:
    assert_wins(build_delta(Op.UPDATE, 5, "a", higher, x=2), build_delta(Op.UPDATE, 5, "a", lower, x=1))


@pytest.mark.rule("DE-7")
def test_columns_are_merged_separately() -> None:
    old, new = build_delta(Op.INSERT, 1, "a", 1, x=1, y=1), build_delta(Op.UPDATE, 2, "a", 2, y=2, z=2)
    for order in permutations([old, new]):
        assert merge_all(order).values == {"x": b"1", "y": b"2", "z": b"2"}


@pytest.mark.rule("DE-7")
def test_null_is_merged_like_any_value() -> None:
    assert_wins(build_delta(Op.UPDATE, 2, "a", 1, x=None), build_delta(Op.UPDATE, 1, "a", 2, x=1))


# --- deletes -------------------------------------------------------------------------------------------

TIES = [
    pytest.param((2, "a", 1), (1, "b", 2), id="by clock"),
    pytest.param((5, PRIVATE, 1), (5, EMOJI, 2), id="by client"),
    pytest.param((5, "a", 2), (5, "a", 1), id="by delta id"),
]
Rank = tuple[int, str, int]


@pytest.mark.rule("DE-7")
@pytest.mark.parametrize(("higher", "lower"), TIES)
@pytest.mark.parametrize("op", [Op.INSERT, Op.UPDATE])
def test_delete_removes_columns_of_lower_rank(op: Op, higher: Rank, lower: Rank) -> None:
    for order in permutations([build_delta(Op.DELETE, *higher), build_delta(op, *lower, x=1)]):
        row = merge_all(order)
        assert (row.exists, row.values) == (False, {})


@pytest.mark.rule("DE-7")
@pytest.mark.parametrize(("higher", "lower"), TIES)
@pytest.mark.parametrize("op", [Op.INSERT, Op.UPDATE])
def test_delete_keeps_columns_of_higher_rank(op: Op, higher: Rank, lower: Rank) -> None:
    for order in permutations([build_delta(Op.DELETE, *lower), build_delta(op, *higher, x=1)]):
        row = merge_all(order)
        assert (row.exists, row.values) == (True, {"x": b"1"})


@pytest.mark.rule("DE-7")
@pytest.mark.parametrize("op", [Op.INSERT, Op.UPDATE])
def test_newer_write_restores_the_row_without_old_columns(op: Op) -> None:
    history = [
        build_delta(Op.INSERT, 1, "a", 1, x=1, y=1),
        build_delta(Op.DELETE, 2, "a", 2),
        build_delta(op, 3, "a", 3, y=3),
    ]
    for order in permutations(history):
        row = merge_all(order)
        assert (row.exists, row.values) == (True, {"y": b"3"})


@pytest.mark.rule("DE-7")
@pytest.mark.parametrize("op", [Op.INSERT, Op.UPDATE])
def test_newer_write_without_columns_restores_the_row(op: Op) -> None:
    history = [build_delta(Op.INSERT, 1, "a", 1, x=1), build_delta(Op.DELETE, 2, "a", 2), build_delta(op, 3, "a", 3)]
    for order in permutations(history):
        row = merge_all(order)
        assert (row.exists, row.values) == (True, {})


@pytest.mark.rule("DE-7")
def test_late_column_older_than_the_delete_is_not_restored() -> None:
    row = merge_all([build_delta(Op.DELETE, 2, "a", 1), build_delta(Op.UPDATE, 3, "a", 2, x=3)])
    late = build_delta(Op.UPDATE, 1, "a", 3, y=1)
    assert merge(row, late) is row


@pytest.mark.rule("DE-7")
def test_older_delete_has_no_effect() -> None:
    row = merge_all([build_delta(Op.DELETE, 2, "a", 1)])
    assert merge(row, build_delta(Op.DELETE, 1, "a", 2)) is row


@pytest.mark.rule("DE-7")
def test_late_delete_removes_only_columns_of_lower_rank() -> None:
    row = merge_all([build_delta(Op.INSERT, 1, "a", 1, x=1, y=1), build_delta(Op.UPDATE, 3, "a", 2, y=3)])
    row = merge(row, build_delta(Op.DELETE, 2, "a", 3))
    assert (row.exists, row.values) == (True, {"y": b"3"})


@pytest.mark.rule("DE-7")
def test_row_without_deltas_does_not_exist() -> None:
    assert (Row().exists, Row().values) == (False, {})
    assert build_delta(Op.UPDATE, 0, "", 0).stamp > NEVER


# --- extract -------------------------------------------------------------------------------------------

numbers = st.integers(-INTEGER_MAX, INTEGER_MAX) | st.floats(-1e6, 1e6)
json_values = st.recursive(
    st.none() | st.booleans() | numbers | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)
names = st.sampled_from(["x", "y", "z", PRIVATE, EMOJI, FIRST_BEYOND]) | st.text(max_size=3)
rows = st.dictionaries(names, json_values, max_size=4)


@st.composite
def changes(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, Any]]:
    """Draw two rows; the second has all columns of the first, changed or unchanged."""
    before = draw(rows)
    kept = {name: value for name, value in before.items() if draw(st.booleans())}
    return before, {**draw(rows), **{name: draw(json_values) for name in before}, **kept}


def extract_delta(before: dict[str, Any] | None, after: dict[str, Any] | None, hlc: int = 7) -> RowDelta | None:
    return extract(before, after, client_id="client-1", hlc=hlc, table="todos", row_id="row-1")


def reordered(value: Any) -> Any:
    """Return the same value with the members of every object in reverse order."""
    if isinstance(value, dict):
        return {name: reordered(value[name]) for name in reversed(value)}
    return [reordered(item) for item in value] if isinstance(value, list) else value


@pytest.mark.rule("DE-11")
@given(changes())
def test_extracted_delta_does_not_depend_on_order(both: tuple[dict[str, Any], dict[str, Any]]) -> None:
    before, after = both
    assert (
        extract_delta(before, after)
        == extract_delta(reordered(before), after)
        == extract_delta(before, reordered(after))
    )
    assert extract_delta(None, after) == extract_delta(None, reordered(after))


@pytest.mark.rule("DE-11")
@given(changes())
def test_merging_the_extracted_delta_gives_the_second_row(both: tuple[dict[str, Any], dict[str, Any]]) -> None:
    before, after = both
    insert = extract_delta(None, before, hlc=1)
    assert insert is not None
    row = merge(Row(), insert)
    delta = extract_delta(before, after, hlc=2)
    if delta is not None:
        row = merge(row, delta)
    assert row.exists
    assert row.values == {name: canonical(value) for name, value in after.items()}


@pytest.mark.rule("DE-11")
@given(rows, rows)
def test_extracted_deltas_delete_and_restore_a_row(before: dict[str, Any], after: dict[str, Any]) -> None:
    insert, delete, again = (
        extract_delta(None, before, 1),
        extract_delta(before, None, 2),
        extract_delta(None, after, 3),
    )
    assert insert is not None
    assert delete is not None
    assert again is not None
    assert not merge_all([insert, delete]).exists
    assert merge_all([insert, delete, again]).values == {name: canonical(value) for name, value in after.items()}


@pytest.mark.rule("DE-11", "DE-2")
@given(st.none() | rows, rows, st.text(max_size=5), st.integers(0, 2**64 - 1))
def test_extracted_delta_has_the_id_of_its_fields(
    before: dict[str, Any] | None, after: dict[str, Any], name: str, hlc: int
) -> None:
    delta = extract(
        before and {column: before[column] for column in before if column in after},
        after,
        client_id=name + "c",
        hlc=hlc,
        table=name + "t",
        row_id=name + "r",
    )
    if delta is not None:
        assert (delta.client_id, delta.hlc, delta.table, delta.row_id) == (name + "c", hlc, name + "t", name + "r")
        columns = [{"column": column, "value": json.loads(value)} for column, value in delta.columns]
        assert delta.delta_id == delta_id(name + "c", str(hlc), name + "t", name + "r", columns)


def is_in_extract_order(columns: list[dict[str, Any]]) -> bool:
    """Whether the columns of a vector are in the order that `extract` produces, without other members."""
    names = [code_units(column["column"]) for column in columns]
    return names == sorted(names) and all(column.keys() == {"column", "value"} for column in columns)


@pytest.mark.rule("DE-11", "DE-2")
@pytest.mark.parametrize(
    "vector",
    [pytest.param(one, id=one["name"]) for one in VECTORS if is_in_extract_order(one["input"]["columns"])],
)
def test_extracted_ids_match_the_vectors(vector: dict[str, Any]) -> None:
    fields = vector["input"]
    delta = extract(
        None,
        {column["column"]: column["value"] for column in fields["columns"]},
        client_id=fields["clientId"],
        hlc=int(fields["hlc"]),
        table=fields["table"],
        row_id=fields["rowId"],
    )
    assert delta is not None
    assert delta.delta_id.hex() == vector["deltaId"]


def test_most_vectors_can_be_extracted() -> None:
    assert sum(is_in_extract_order(one["input"]["columns"]) for one in VECTORS) >= len(VECTORS) * 3 // 4


@pytest.mark.rule("DE-11")
@pytest.mark.parametrize(
    ("before", "after", "op", "columns"),
    [
        (None, {}, Op.INSERT, ()),
        (None, {"b": 1, "a": None}, Op.INSERT, (("a", b"null"), ("b", b"1"))),
        ({}, {"a": 1}, Op.UPDATE, (("a", b"1"),)),
        ({"a": 1, "b": 2}, {"a": 1, "b": 3}, Op.UPDATE, (("b", b"3"),)),
        ({"a": 1}, {"a": None}, Op.UPDATE, (("a", b"null"),)),
        ({"a": 1}, {"a": "1"}, Op.UPDATE, (("a", b'"1"'),)),
        ({"a": 1}, {"a": True}, Op.UPDATE, (("a", b"true"),)),
        ({"a": 0}, {"a": False}, Op.UPDATE, (("a", b"false"),)),
        ({"a": None}, {"a": 0}, Op.UPDATE, (("a", b"0"),)),
        ({"a": [1, 2]}, {"a": [2, 1]}, Op.UPDATE, (("a", b"[2,1]"),)),
        ({"a": "é"}, {"a": "e\u0301"}, Op.UPDATE, (("a", '"e\u0301"'.encode()),)),
        ({"a": 1}, None, Op.DELETE, ()),
        ({}, None, Op.DELETE, ()),
        (
            None,
            {PRIVATE: 1, EMOJI: 2, "z": 3, "10": 4, "9": 5},
            Op.INSERT,
            (("10", b"4"), ("9", b"5"), ("z", b"3"), (EMOJI, b"2"), (PRIVATE, b"1")),
        ),
    ],
)
def test_extracted_delta_matches_the_example(
    before: dict[str, Any] | None, after: dict[str, Any] | None, op: Op, columns: tuple[tuple[str, bytes], ...]
) -> None:
    delta = extract_delta(before, after)
    assert delta is not None
    assert (delta.op, delta.columns) == (op, columns)


@pytest.mark.rule("DE-11")
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, None),
        ({}, {}),
        ({"a": 1}, {"a": 1}),
        ({"a": 1}, {"a": 1.0}),
        ({"a": 0}, {"a": -0.0}),
        ({"a": [1, {"x": 1, "y": 2.0}]}, {"a": [1.0, {"y": 2, "x": 1}]}),
        ({"a": 1, "b": None}, {"b": None, "a": 1}),
    ],
)
def test_equal_rows_give_no_delta(before: dict[str, Any] | None, after: dict[str, Any] | None) -> None:
    assert extract_delta(before, after) is None


@pytest.mark.rule("DE-11")
@pytest.mark.parametrize("after", [{}, {"title": 1}, {"title": 2, "more": 3}])
def test_removed_column_is_refused_with_its_name(after: dict[str, Any]) -> None:
    with pytest.raises(CanonicalError, match="cannot be removed") as refused:
        extract_delta({"title": 1, "done": None}, after)
    assert refused.value.path in {"$.title", "$.done"} - {f"$.{name}" for name in after}


@pytest.mark.rule("DE-11")
def test_removed_column_with_special_name_is_quoted_in_the_path() -> None:
    with pytest.raises(CanonicalError) as refused:
        extract_delta({"a b": 1}, {})
    assert refused.value.path == '$["a b"]'


@pytest.mark.rule("DE-11")
@pytest.mark.parametrize("hlc", [-1, 2**64])
def test_hlc_out_of_range_is_refused(hlc: int) -> None:
    with pytest.raises(CanonicalError) as refused:
        extract(None, {"a": 1}, client_id="c", hlc=hlc, table="t", row_id="r")
    assert refused.value.path == "$.hlc"


@pytest.mark.rule("DE-11", "CO-2")
@pytest.mark.parametrize("before", [None, {}, {"a": 1}])
def test_value_without_canonical_form_is_refused_with_its_column(before: dict[str, Any] | None) -> None:
    with pytest.raises(CanonicalError) as refused:
        extract_delta(before, {"a": [1, float("nan")]})
    assert refused.value.path == "$.a[1]"


@pytest.mark.rule("DE-11")
def test_delta_id_depends_on_clock_and_names_but_not_on_the_operation() -> None:
    parts = {"client_id": "c", "hlc": 1, "table": "t", "row_id": "r"}
    insert, update = extract(None, {"a": 1}, **parts), extract({}, {"a": 1}, **parts)  # type: ignore[arg-type]
    assert insert is not None
    assert update is not None
    assert insert.delta_id == update.delta_id
    for name, other in {"client_id": "d", "hlc": 2, "table": "u", "row_id": "s"}.items():
        changed = extract(None, {"a": 1}, **{**parts, name: other})  # type: ignore[arg-type]
        assert changed is not None
        assert changed.delta_id != insert.delta_id
