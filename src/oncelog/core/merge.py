"""Last-writer-wins merge of rows, column by column.

Every write of a column has a stamp: clock, client and delta id, compared in this order. A column keeps the value with
its highest stamp. A row keeps the highest stamp of its writes and the highest stamp of its deletes, and drops columns
whose stamps are lower than the stamp of the newest delete. Because all of these stamps are maxima, the result does not
depend on the order of arrival.

Merged rows are stored in MessagePack. A column is stored with its stamp only if that differs from the stamp of the
newest write.
"""

from collections.abc import Mapping
from enum import Enum
from functools import lru_cache
from typing import Final

import msgspec
from msgspec import Struct

from oncelog.core.canonical import JsonValue, canonical_at, format_path, parse, utf16_sort_key
from oncelog.core.hlc import format_hlc
from oncelog.core.identity import check_text, delta_id
from oncelog.errors import CanonicalError

Stamp = tuple[int, bytes, bytes]
"""Clock, client (in UTF-16), and delta id."""

NEVER: Stamp = (-1, b"", b"")
"""Lower than every stamp."""


class Op(Enum):
    """What a delta does to its row."""

    INSERT = "INSERT"
    UPDATE = "UPDATE"
    DELETE = "DELETE"

    __hash__ = object.__hash__  # the hash of Enum is a slow Python function, and every delta needs it


_DELETE: Final = Op.DELETE  # constant because Python 3.11 is slow to look up an enum member

_utf16_sort_key: Final = lru_cache(maxsize=4096)(utf16_sort_key)  # most deltas come from recently seen clients


class RowDelta(Struct, frozen=True, gc=False):
    """A change to one row, with values in canonical form."""

    op: Op
    table: str
    row_id: str
    client_id: str
    hlc: int
    columns: tuple[tuple[str, bytes], ...]
    delta_id: bytes

    @property
    def stamp(self) -> Stamp:
        """Rank among all deltas of the row."""
        return (self.hlc, _utf16_sort_key(self.client_id), self.delta_id)


class Row(Struct, frozen=True, gc=False):
    """Merged state of a row."""

    columns: Mapping[str, tuple[bytes, Stamp]] = {}
    written: Stamp = NEVER
    deleted: Stamp = NEVER

    @property
    def is_empty(self) -> bool:
        """Whether no delta has been merged yet."""
        return self.written == NEVER and self.deleted == NEVER

    @property
    def exists(self) -> bool:
        """Whether the newest write outranks the newest delete. A row that exists may have no columns."""
        return self.written > self.deleted

    @property
    def values(self) -> dict[str, bytes]:
        """Columns in canonical form, without stamps. Empty for a row that does not exist."""
        return {name: value for name, (value, _) in self.columns.items()}


def merge(row: Row, delta: RowDelta) -> Row:
    """Merge a delta into a row. Returns the same object if the delta changes nothing."""
    stamp = delta.stamp
    if delta.op is _DELETE:
        if stamp <= row.deleted:
            return row
        surviving = {name: column for name, column in row.columns.items() if column[1] > stamp}
        return Row(surviving, row.written, stamp)
    if stamp > row.written and stamp > row.deleted:
        # The common case: the delta is newer than the whole row, so columns need no comparison.
        merged = dict(row.columns)
        for name, value in delta.columns:
            merged[name] = (value, stamp)
        return Row(merged, stamp, row.deleted)
    won = {
        name: (value, stamp)
        for name, value in delta.columns
        if stamp > row.deleted and (name not in row.columns or stamp > row.columns[name][1])
    }
    if not won and stamp <= row.written:
        return row
    return Row({**row.columns, **won}, max(row.written, stamp), row.deleted)


class _PackedRow(Struct, frozen=True, array_like=True, gc=False):
    """Stored form of a row. A column has a stamp only if it differs from the stamp of the newest write."""

    columns: dict[str, bytes | tuple[bytes, Stamp]]
    written: Stamp
    deleted: Stamp | None


_PACKED_DECODER: Final = msgspec.msgpack.Decoder(_PackedRow)
_LEGACY_PREFIX: Final = b"\x83"
"""Start of the earlier stored form: a map instead of an array. The next change of the row replaces it."""


def encode_row(row: Row) -> bytes:
    """Encode a merged row."""
    written, deleted = row.written, row.deleted
    columns = {
        name: column[0] if column[1] is written or column[1] == written else column
        for name, column in row.columns.items()
    }
    return msgspec.msgpack.encode(_PackedRow(columns, written, None if deleted == NEVER else deleted))


def decode_row(state: bytes) -> Row:
    """Decode a merged row. Raises msgspec.MsgspecError."""
    if state.startswith(_LEGACY_PREFIX):
        return msgspec.msgpack.decode(state, type=Row)
    packed = _PACKED_DECODER.decode(state)
    written = packed.written
    columns = {
        name: (column, written) if isinstance(column, bytes) else column for name, column in packed.columns.items()
    }
    return Row(columns, written, packed.deleted or NEVER)


def extract(
    before: Mapping[str, JsonValue] | None,
    after: Mapping[str, JsonValue] | None,
    *,
    client_id: str,
    hlc: int,
    table: str,
    row_id: str,
) -> RowDelta | None:
    """Return the delta between two states of a row, or None if they are equal.

    Columns are sorted by UTF-16 code units, regardless of their order in the rows. A client that rebuilds the delta
    after a crash, from the same rows, clock and names, therefore gets the same id.
    """
    if after is None:
        return None if before is None else _build_delta(Op.DELETE, {}, client_id, hlc, table, row_id)
    changed = _diff_columns(before or {}, after)
    if before is not None and not changed:
        return None
    return _build_delta(Op.INSERT if before is None else Op.UPDATE, changed, client_id, hlc, table, row_id)


def _diff_columns(before: Mapping[str, JsonValue], after: Mapping[str, JsonValue]) -> dict[str, bytes]:
    for name in after:
        check_text(name, "$")
    for name in before:
        if name not in after:
            reason = "is missing after the change; a column cannot be removed, but it can be set to null"
            raise CanonicalError(format_path([name]), reason)
    forms = {name: canonical_at(after[name], format_path([name])) for name in sorted(after, key=utf16_sort_key)}
    return {
        name: form
        for name, form in forms.items()
        if name not in before or form != canonical_at(before[name], format_path([name]))
    }


def _build_delta(op: Op, columns: Mapping[str, bytes], client_id: str, hlc: int, table: str, row_id: str) -> RowDelta:
    listed = [{"column": name, "value": parse(form)} for name, form in columns.items()]
    return RowDelta(
        op=op,
        table=table,
        row_id=row_id,
        client_id=client_id,
        hlc=hlc,
        columns=tuple(columns.items()),
        delta_id=delta_id(client_id, format_hlc(hlc), table, row_id, listed),
    )
