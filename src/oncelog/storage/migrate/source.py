"""Source of a migration: an SQLite file. The file remains in use until the end, so every read is short."""

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.resources import files
from itertools import pairwise
from typing import Any, Final, NamedTuple

from msgspec import Struct

from oncelog.core.internal_records import Gap, count_missing_numbers
from oncelog.core.values import LaneHead, decode_place, encode_place
from oncelog.errors import CorruptError, StoreUnavailableError
from oncelog.sql_files import parse_statements
from oncelog.storage.clock import ClockMark
from oncelog.storage.inspect.inspector import RowTuple
from oncelog.storage.inspect.sqlite import FileView
from oncelog.storage.key_hash import hash_identity
from oncelog.storage.metadata import DAMAGE_HINT, NO_GAPS, LaneGaps, LogMetadata, count_records
from oncelog.storage.queries.records import load_gaps, load_heads
from oncelog.storage.side_state import STORED_TABLES, SideStateTable
from oncelog.storage.sqlite.database_file import SqliteDriver
from oncelog.storage.sqlite.moved_marker import MovedMarker, save_marker
from oncelog.storage.sqlite.read_transaction import load_current_metadata, open_existing
from oncelog.storage.sqlite.statements import SQL
from oncelog.storage.sqlite.writer import make_durable
from oncelog.storage.tenants import decode_partitions

SQL_DIRECTORY: Final = files("oncelog.storage.migrate") / "sql"
_MIGRATION_SQL: Final = parse_statements((SQL_DIRECTORY / "source.sql").read_text(encoding="utf-8"))
_COUNTED: Final = {
    "records": "records",
    "erased records": "records WHERE body IS NULL",
    "blocks": "blocks",
    "records of partitions": "partition_records",
    "policies": "policies",
    **{table.name: table.name for table in STORED_TABLES},
}
"""Tables and rows whose counts must be equal in both logs, by their names in messages."""
SLICE_ROWS: Final = 10_000
SLICE_BYTES: Final = 16 * 2**20
"""Maximum bytes of bodies in a slice. A longer body forms a slice alone."""


class RecordSlice(NamedTuple):
    """Consecutive records of a lane, with their partitions and blocks, which are copied in one transaction."""

    records: list[RowTuple]
    partition_records: list[RowTuple]
    blocks: list[RowTuple]


class SourceState(NamedTuple):
    """The state of the log at one point in time."""

    heads: dict[int, LaneHead]
    erasures: int
    clock: ClockMark
    log_state: RowTuple
    """The columns of the statement `log_state`, erasures first."""
    gaps: Mapping[int, LaneGaps]
    """The numbers that leaps skipped in each lane."""

    @property
    def record_count(self) -> int:
        """Return the number of records."""
        return count_records(self.heads, self.gaps)


class PendingMove(Struct, frozen=True):
    """An incomplete move, as the database stores it."""

    source_epoch: str
    started_ms: int
    id: str
    """Unique id, which the marker in the file contains too."""


@contextmanager
def open_source(path: str) -> Iterator["MigrationSource"]:
    """Open the log in an existing file. Raises StoreErrors, never SQLite errors."""
    with open_existing(path, query_only=False) as connection:
        yield MigrationSource(path, connection, load_current_metadata(connection, path))


class MigrationSource(FileView):
    """The source file. Only one thread at a time may use it. Only the lock keeps a transaction open between calls."""

    def __init__(self, path: str, connection: sqlite3.Connection, metadata: LogMetadata) -> None:
        super().__init__(connection, path, metadata)
        self._name = path
        self._file_id = SqliteDriver().get_file_id(path)

    def load_state(self) -> SourceState:
        """Load the state of the log."""
        with self._read_transaction() as connection:
            [(_, erasures, *clock)] = connection.execute(SQL["state"])
            [log_state] = connection.execute(_MIGRATION_SQL["log_state"])
            heads, gaps = self.run_query(load_heads), self.run_query(load_gaps)
            return SourceState(heads, erasures, ClockMark(*clock), log_state, gaps)

    def make_durable(self) -> None:
        """Make all commits durable, so that a power failure cannot undo a copied commit."""
        make_durable(self.connection)

    # --- the last phase, without other writers

    def lock(self) -> None:
        """Block other writers until `save_marker` or `unlock`."""
        if SqliteDriver().get_file_id(self._name) != self._file_id:
            raise StoreUnavailableError(f"{self._name} has been removed or replaced since it was opened")
        self.connection.execute("BEGIN IMMEDIATE")

    def unlock(self) -> None:
        """Release the lock, unless `save_marker` has released it."""
        if self.connection.in_transaction:
            self.connection.execute("ROLLBACK")

    def save_marker(self, marker: MovedMarker) -> None:
        """Mark the file as moved, so that processes stop writing to it, and release the lock."""
        save_marker(self.connection, marker)
        self.connection.execute("COMMIT")

    # --- copying

    def iterate_slices(self, upto: SourceState, reached: Mapping[int, LaneHead]) -> Iterator[RecordSlice]:
        """Yield the records above the heads in `reached`, up to the heads of a state."""
        for lane, head in sorted(upto.heads.items()):
            at = reached.get(lane, LaneHead())
            while at.position < head.position:
                found = self._read_slice(lane, at, head.position, upto.gaps.get(lane, NO_GAPS))
                yield found
                at = LaneHead(position=found.records[-1][1], height=found.records[-1][4])

    def _read_slice(self, lane: int, at: LaneHead, upto: int, gaps: LaneGaps) -> RecordSlice:
        with self._read_transaction() as connection:
            bounds = (encode_place(lane, at.position), encode_place(lane, upto), SLICE_ROWS)
            rows = _fetch_slice_rows(connection.execute(_MIGRATION_SQL["records"], bounds))
            _check_dense(lane, [decode_place(row[0])[1] for row in rows], at.position, gaps.positions)
            height = rows[-1][3]
            blocks = connection.execute(_MIGRATION_SQL["blocks"], (lane, at.height, height)).fetchall()
        if len(blocks) != height - at.height - count_missing_numbers(gaps.heights, at.height, height):
            raise CorruptError(f"lane {lane}: a block below height {height} is missing; {DAMAGE_HINT}")
        records = [self._to_target_row(row) for row in rows]
        partitions = sorted((lane, name, record[1]) for record in records for name in decode_partitions(record[14]))
        return RecordSlice(records, partitions, blocks)

    def _to_target_row(self, row: RowTuple) -> RowTuple:
        """Return a record's columns in the database: lane and position, and the hashes for looking up the record."""
        place, sequence, log_time_ms, height, number, policy, scope, client, key, *others = row
        secret = self.metadata.index_secret
        return (
            *decode_place(place),
            sequence,
            log_time_ms,
            height,
            number,
            hash_identity(secret, (policy, scope, client if number else "", key)) if key else None,
            hash_identity(secret, (policy, scope, client, number)) if number else None,
            policy,
            scope,
            client,
            key,
            *others,
        )

    def iterate_erasures(self) -> Iterator[list[RowTuple]]:
        """Yield pages of erased records: lane, position and hash of the body. Call this under the lock."""
        return _iterate_pages(self.connection.execute(_MIGRATION_SQL["erased"]))

    def iterate_side_state(self, table: SideStateTable) -> Iterator[list[RowTuple]]:
        """Yield pages of the rows of a table. Call this under the lock."""
        columns = ", ".join(table.columns)
        return _iterate_pages(self.connection.execute(f"SELECT {columns} FROM oncelog_{table.name}"))  # noqa: S608

    def count_rows(self) -> dict[str, int]:
        """Count all rows that are copied, by name."""
        return dict(self.connection.execute(build_count_sql("stream_records")))

    @contextmanager
    def _read_transaction(self) -> Iterator[sqlite3.Connection]:
        """Begin a read transaction unless one is open. Keep it short, because it prevents the truncation of the WAL."""
        if self.connection.in_transaction:
            yield self.connection
            return
        self.connection.execute("BEGIN")
        try:
            yield self.connection
        finally:
            self.unlock()


def build_count_sql(stream_records: str) -> str:
    """Return the SQL that counts everything that is copied.

    The rows that index streams differ between the databases.
    """
    counted = _COUNTED | {"records of streams": stream_records}
    return " UNION ALL ".join(f"SELECT '{name}', count(*) FROM oncelog_{rows}" for name, rows in counted.items())  # noqa: S608


def _fetch_slice_rows(cursor: sqlite3.Cursor) -> list[RowTuple]:
    """Return rows up to the size limit for bodies, but at least one row."""
    rows: list[RowTuple] = []
    size = 0
    for row in cursor:
        size += len(row[-1] or b"")
        if rows and size > SLICE_BYTES:
            break
        rows.append(row)
    return rows


def _check_dense(lane: int, positions: list[int], after: int, gaps: Sequence[Gap]) -> None:
    """Raise CorruptError if the positions are not consecutive, or if the list is empty.

    Only a leap of the log may leave a gap.
    """
    for before, position in pairwise([after, *(positions or [-1])]):
        if position != before + 1 and (before, position) not in gaps:
            raise CorruptError(f"lane {lane}, position {before + 1}: the record is missing; {DAMAGE_HINT}")


def _iterate_pages(cursor: Any) -> Iterator[list[RowTuple]]:
    while rows := cursor.fetchmany(SLICE_ROWS):
        yield rows
