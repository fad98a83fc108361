"""The current encoding of merged rows, and the encoding used by earlier versions."""

import sqlite3
from contextlib import closing
from hashlib import sha256
from pathlib import Path

import msgspec
import pytest

from databases import BOTH_STORES, is_postgres, log_at, query
from oncelog.core.deltas import delta, deltas_scope
from oncelog.core.merge import NEVER, Row, RowDelta, Stamp, decode_row, extract, merge
from oncelog.core.values import Committed
from oncelog.engine.log import open_log
from oncelog.storage.side_state import TABLES

SCOPE = deltas_scope("shop")
(ROWS,) = (table for table in TABLES if table.name == "rows")


def stamp(hlc: int) -> Stamp:
    return (hlc, "c1".encode("utf-16-be"), sha256(b"%d" % hlc).digest())


STATES = {
    "empty": Row(),
    "written": Row({"a": (b"1", stamp(5)), "b": (b'"x"', stamp(5))}, stamp(5)),
    "written twice": Row({"a": (b"1", stamp(5)), "b": (b'"x"', stamp(2**64 - 1))}, stamp(2**64 - 1)),
    "deleted": Row({}, stamp(5), stamp(7)),
    "deleted, and never written": Row({}, NEVER, stamp(7)),
    "written, deleted and written again": Row({"a": (b"[]", stamp(9))}, stamp(9), stamp(7)),
    "without columns": Row({}, stamp(0)),
}


@pytest.mark.rule("DE-7")
@pytest.mark.parametrize("row", STATES.values(), ids=STATES)
def test_current_and_earlier_row_encodings_are_decoded(row: Row) -> None:
    (kept,) = ROWS.encode_value(row)
    before = msgspec.msgpack.encode(row)
    assert decode_row(kept) == decode_row(before) == row
    assert len(kept) < len(before)


@pytest.mark.parametrize("state", [b"", b"\x00", b"\x83", b"\x93\x80", b"\x80", b"\xc0"])
def test_malformed_row_state_is_refused(state: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        decode_row(state)


def rewrite_in_earlier_encoding(path: Path) -> None:
    """Rewrite every row of the log in the earlier encoding."""
    if is_postgres():
        for row_id, state in query(log_at(path), "SELECT row_id, state FROM oncelog_rows"):
            before = msgspec.msgpack.encode(decode_row(state))
            query(log_at(path), "UPDATE oncelog_rows SET state = $2 WHERE row_id = $1", row_id, before)
        return
    with closing(sqlite3.connect(path)) as connection, connection:
        for row_id, state in connection.execute("SELECT row_id, state FROM oncelog_rows").fetchall():
            before = msgspec.msgpack.encode(decode_row(state))
            connection.execute("UPDATE oncelog_rows SET state = ? WHERE row_id = ?", (before, row_id))


@BOTH_STORES
@pytest.mark.rule("DE-7")
async def test_log_with_rows_in_the_earlier_encoding_is_usable(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    names = [f"r{number}" for number in range(20)]
    expected = {name: Row() for name in names}

    def build_change(hlc: int, name: str, **columns: int) -> RowDelta:
        found = extract(None, columns, client_id="c1", hlc=hlc, table="t", row_id=name)
        assert found is not None
        expected[name] = merge(expected[name], found)
        return found

    async def push(*changes: RowDelta) -> None:
        async with open_log(log_at(path)) as log:
            verdicts = await log.submit_many([delta(SCOPE, change) for change in changes])
            assert all(isinstance(verdict, Committed) for verdict in verdicts)
            page = await log.state.rows(SCOPE, table="t")
            assert {row_id: row for _, row_id, row in page.rows} == expected
            assert await log.state.row(SCOPE, "t", "r7") == expected["r7"]

    await push(*[build_change(5, name, a=1, b=2) for name in names])
    rewrite_in_earlier_encoding(path)
    await push(build_change(6, "r7", b=3))  # only one row is rewritten
    await push(*[build_change(hlc, name, a=hlc, c=4) for hlc in (4, 8) for name in names])
