"""Edits of local rows, and the deltas that they create. The caller supplies the rows, so this module does no I/O."""

from collections.abc import Callable, Mapping
from typing import Final

from msgspec import Struct, field

from oncelog.client.deltas.codec import OutboxEntry
from oncelog.client.deltas.values import Change, DeltasLimits, parse_columns
from oncelog.core.canonical import JsonValue, canonical_text
from oncelog.core.deltas import (
    IDENTIFIER_CHARACTERS_MAX,
    ROW_ID_CHARACTERS_MAX,
    encode_delta,
    encode_push,
    is_identifier,
)
from oncelog.core.hlc import ClockExhausted, tick
from oncelog.core.identity import check_text
from oncelog.core.limits import ROW_BYTES_MAX, ROW_COLUMNS_MAX
from oncelog.core.merge import Row, RowDelta, extract, merge
from oncelog.errors import CanonicalError, ClientError, LimitExceededError

RowKey = tuple[str, str]
"""Table and row."""
_NESTING_CHECK_MIN: Final = 256
"""A delta with at most this many arrays and objects cannot exceed the nesting limit of a push."""


class OutboxUsage(Struct, frozen=True):
    """Number and total size of the deltas in the outbox."""

    deltas: int
    bytes: int


class Edits(Struct):
    """Edits of one transaction. Each edit sees the earlier ones."""

    client_id: str
    hlc: int
    """Last reading of the hybrid logical clock."""
    wall_now_ms: int
    load: Callable[[str, str], Row]
    limits: DeltasLimits
    outbox_usage: OutboxUsage
    new_deltas: list[OutboxEntry] = field(default_factory=list)
    rows: dict[RowKey, tuple[Row, Row]] = field(default_factory=dict)
    """Rows that the transaction has loaded, each in its state before and after the edits."""
    _bytes: int = 0
    _is_over: bool = False

    def row(self, table: str, row_id: str) -> dict[str, JsonValue] | None:
        """Return a row with the edits of this transaction, or None if it does not exist."""
        self._check_open()
        check_names(table, row_id)
        return parse_columns(get_visible_columns(get_row(self.rows, (table, row_id), self.load)))

    def put(self, table: str, row_id: str, columns: Mapping[str, JsonValue]) -> str | None:
        """Set columns and keep the others. Create the row if it does not exist.

        Returns the id of the delta, or None if nothing changed. Raises CanonicalError for a name or value that gateways
        refuse, or LimitExceededError.
        """
        if not isinstance(columns, Mapping):
            raise CanonicalError("$", f"columns must be a mapping from names to values, not {type(columns).__name__}")
        before = self.row(table, row_id)
        return self._apply_change(table, row_id, before, {**(before or {}), **columns})

    def delete(self, table: str, row_id: str) -> str | None:
        """Delete a row. Return the id of the delta, or None if the row does not exist."""
        return self._apply_change(table, row_id, self.row(table, row_id), None)

    def end(self) -> None:
        """Refuse further edits."""
        self._is_over = True

    def changes(self) -> list[Change]:
        """Return the combined changes of all edits."""
        return list_changes(self.rows, is_local=True)

    def _check_open(self) -> None:
        if self._is_over:
            raise ClientError("the transaction has ended: use its edits only inside the function that received them")

    def _apply_change(
        self,
        table: str,
        row_id: str,
        before: Mapping[str, JsonValue] | None,
        after: Mapping[str, JsonValue] | None,
    ) -> str | None:
        for name in after or {}:
            check_identifier(name, "column")
        hlc = tick(self.hlc, self.wall_now_ms)
        if isinstance(hlc, ClockExhausted):
            raise ClientError("this client's clock has reached its maximum: no further edit is possible")
        delta = extract(before, after, client_id=self.client_id, hlc=hlc, table=table, row_id=row_id)
        if delta is None:
            return None
        first, current = self.rows[table, row_id]
        row = merge(current, delta)
        new_delta = OutboxEntry(0, delta.delta_id, encode_delta(delta))
        self._check_acceptable(delta, row, new_delta.body)
        self.hlc = hlc
        self.rows[table, row_id] = (first, row)
        self.new_deltas.append(new_delta)
        self._bytes += len(new_delta.body)
        return delta.delta_id.hex()

    def _check_acceptable(self, delta: RowDelta, row: Row, body: bytes) -> None:
        """Raise an error for a delta that the gateway would refuse. Once sent, it would block all deltas behind it."""
        limits = self.limits
        for name, value in delta.columns:
            if len(value) > limits.value_bytes_max:
                reason = f"must have at most {limits.value_bytes_max} bytes in JSON (value_bytes_max), not {len(value)}"
                raise CanonicalError(f"$.{name}", reason)
        if len(row.columns) > ROW_COLUMNS_MAX:
            raise CanonicalError("$", f"the row {delta.row_id!r} would have more than {ROW_COLUMNS_MAX} columns")
        if sum(len(value) for value, _ in row.columns.values()) > ROW_BYTES_MAX:
            raise CanonicalError("$", f"the row {delta.row_id!r} would have more than {ROW_BYTES_MAX} bytes of values")
        if len(body) > limits.delta_bytes_max:
            reason = f"the delta of the row {delta.row_id!r} would have {len(body)} bytes"
            raise LimitExceededError("delta_bytes_max", limits.delta_bytes_max, reason)
        if self.outbox_usage.deltas + len(self.new_deltas) + 1 > limits.outbox_deltas_max:
            raise LimitExceededError("outbox_deltas_max", limits.outbox_deltas_max)
        if self.outbox_usage.bytes + self._bytes + len(body) > limits.outbox_bytes_max:
            raise LimitExceededError("outbox_bytes_max", limits.outbox_bytes_max)
        if body.count(b"[") + body.count(b"{") > _NESTING_CHECK_MIN:
            canonical_text(encode_push([body]))


def get_row(rows: dict[RowKey, tuple[Row, Row]], key: RowKey, load: Callable[[str, str], Row]) -> Row:
    """Return the current state of a row. A row that is not in `rows` is loaded and added."""
    if key not in rows:
        loaded = load(*key)
        rows[key] = (loaded, loaded)
    return rows[key][1]


def check_names(table: str, row_id: str) -> None:
    """Raise CanonicalError for a table or row id that gateways refuse."""
    check_identifier(table, "table")
    check_text(row_id, "rowId")
    if not 1 <= len(row_id) <= ROW_ID_CHARACTERS_MAX or "\0" in row_id:
        raise CanonicalError("rowId", f"must have 1 to {ROW_ID_CHARACTERS_MAX} characters and no U+0000")


def check_identifier(name: object, field: str) -> None:
    """Raise CanonicalError for an invalid table or column name. `field` is the path in the error."""
    if not isinstance(name, str) or not is_identifier(name):
        raise CanonicalError(
            field,
            "must be an identifier (letters, digits and _, not starting with a digit) of 1 to "
            f"{IDENTIFIER_CHARACTERS_MAX} characters, not {str(name)[:200]!r}",
        )


def get_visible_columns(row: Row) -> dict[str, bytes] | None:
    """Return the columns of a row in canonical form, or None if the row does not exist."""
    return row.values if row.exists else None


def list_changes(rows: Mapping[RowKey, tuple[Row, Row]], *, is_local: bool) -> list[Change]:
    """Return the visible changes of rows, given their states before and after."""
    changes: list[Change] = []
    for (table, row_id), (first, last) in rows.items():
        if first is last:
            continue
        before, after = get_visible_columns(first), get_visible_columns(last)
        if before != after:
            changes.append(Change(table, row_id, before, after, is_local))
    return changes
