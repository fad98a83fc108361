"""Encoding of merged rows: MessagePack, with a stamp per column only where it differs from the newest write's."""

from typing import Final

import msgspec

from oncelog.core.merge import NEVER, Row, Stamp


class _PackedRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Stored form of a row. A column has a stamp only where it differs from the stamp of the newest write."""

    columns: dict[str, bytes | tuple[bytes, Stamp]]
    written: Stamp
    deleted: Stamp | None


_PACKED_DECODER: Final = msgspec.msgpack.Decoder(_PackedRow)
_LEGACY_ROW_DECODER: Final = msgspec.msgpack.Decoder(Row)
"""Earlier stored form: a map, where `_PackedRow` is an array. The next change of such a row replaces it."""
_LEGACY_PREFIX: Final = b"\x83"


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
        return _LEGACY_ROW_DECODER.decode(state)
    packed = _PACKED_DECODER.decode(state)
    written = packed.written
    columns = {
        name: (column, written) if isinstance(column, bytes) else column for name, column in packed.columns.items()
    }
    return Row(columns, written, packed.deleted or NEVER)
