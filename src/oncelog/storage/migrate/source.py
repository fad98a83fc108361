"""Source of a migration: an SQLite file. It stays in use until the end, so every read is short."""

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import lru_cache
from itertools import pairwise
from typing import Any, Final

import msgspec

from oncelog.core.internal_records import Gap, count_missing_numbers
from oncelog.errors import CorruptError, StoreUnavailableError
from oncelog.storage.clock import ClockMark
from oncelog.storage.key_hash import hash_identity
from oncelog.storage.leaps import NO_GAPS, LaneGaps
from oncelog.storage.metadata import LogMetadata
from oncelog.storage.migrate.values import COUNT_NAMES, SOURCE_SQL, LaneProgress, RecordSlice, RowTuple, SourceState
from oncelog.storage.queries.records import load_gaps, load_heads
from oncelog.storage.record_rows import DAMAGE_ERRORS
from oncelog.storage.side_state import STORED_TABLES, SideStateTable
from oncelog.storage.sqlite.database_file import SqliteDriver, connect
from oncelog.storage.sqlite.key_index.index import decode_place, encode_place
from oncelog.storage.sqlite.moved_marker import MovedMarker, load_marker, save_marker
from oncelog.storage.sqlite.query_driver import run_query
from oncelog.storage.sqlite.read_transaction import ExistingFileDriver, load_current_metadata, to_store_error
from oncelog.storage.sqlite.statements import SQL
from oncelog.storage.sqlite.writer import make_durable

SLICE_ROWS: Final = 10_000
SLICE_BYTES: Final = 16 * 2**20
"""Of bodies. One that is longer is a slice of its own."""
_FETCH_ROWS: Final = 200
_decode_partitions: Final = lru_cache(maxsize=1024)(msgspec.json.Decoder(tuple[str, ...]).decode)


@contextmanager
def open_source(path: str) -> Iterator["MigrationSource"]:
    """A log in a file that is there. Raises StoreErrors, never an error of SQLite's."""
    driver = ExistingFileDriver(query_only=False)
    driver.check(path)
    try:
        with closing(connect(driver, path)) as connection:
            yield MigrationSource(path, connection, load_current_metadata(connection, path))
    except sqlite3.Error as error:
        raise to_store_error(error, path) from error
    except DAMAGE_ERRORS as error:
        raise CorruptError(f"{path} holds what no log has written: {error}") from error


class MigrationSource:
    """Not for two threads at once."""

    def __init__(self, path: str, connection: sqlite3.Connection, metadata: LogMetadata) -> None:
        self._path = path
        self._file_id = SqliteDriver().get_file_id(path)
        self._connection = connection
        self.metadata = metadata

    def load_state(self) -> SourceState:
        """Where the log stands."""
        with self._read_transaction() as connection:
            _, erasures, *clock = connection.execute(SQL["state"]).fetchone()
            tenants, usage_version = connection.execute(SQL["tenants"]).fetchone()
            (leaps,) = connection.execute(SQL["leaps"]).fetchone()
            return SourceState(
                run_query(connection, load_heads),
                erasures,
                ClockMark(*clock),
                tenants,
                usage_version,
                leaps,
                run_query(connection, load_gaps),
            )

    def load_marker(self) -> MovedMarker | None:
        """The mark of an earlier run that came to its end."""
        return load_marker(self._connection)

    def make_durable(self) -> None:
        """Makes durable what has been committed: nothing is copied that the next loss of power could undo."""
        make_durable(self._connection)

    # --- the end: nobody else writes

    def lock(self) -> None:
        """Keeps all others from writing, until `save_marker` or `unlock`."""
        if SqliteDriver().get_file_id(self._path) != self._file_id:
            raise StoreUnavailableError(f"{self._path} has been removed or replaced since it was opened")
        self._connection.execute("BEGIN IMMEDIATE")

    def unlock(self) -> None:
        """Lets the others write again, if they cannot yet."""
        if self._connection.in_transaction:
            self._connection.execute("ROLLBACK")

    def save_marker(self, marker: MovedMarker) -> None:
        """Ends the lock, and with it all writing to the file."""
        save_marker(self._connection, marker)
        self._connection.execute("COMMIT")

    # --- what is copied

    def iterate_slices(self, upto: SourceState, reached: Mapping[int, LaneProgress]) -> Iterator[RecordSlice]:
        """All records up to the heads of a state that have not been reached yet."""
        for lane, head in sorted(upto.heads.items()):
            at = reached.get(lane, LaneProgress())
            while at.position < head.position:
                found = self._read_slice(lane, at, head.position, upto.gaps.get(lane, NO_GAPS))
                yield found
                at = LaneProgress(found.records[-1][1], found.records[-1][4])

    def _read_slice(self, lane: int, at: LaneProgress, upto: int, gaps: LaneGaps) -> RecordSlice:
        with self._read_transaction() as connection:
            bounds = (encode_place(lane, at.position), encode_place(lane, upto), SLICE_ROWS)
            rows = _fetch_slice_rows(connection.execute(SOURCE_SQL["records"], bounds))
            _check_dense(lane, [decode_place(row[0])[1] for row in rows], at.position, gaps.positions)
            height = rows[-1][3]
            blocks = connection.execute(SOURCE_SQL["blocks"], (lane, at.height, height)).fetchall()
        if len(blocks) != height - at.height - count_missing_numbers(gaps.heights, at.height, height):
            raise CorruptError(f"lane {lane}: a block below height {height} is missing; see `oncelog verify`")
        records = [self._to_target_row(row) for row in rows]
        partitions = sorted((lane, name, record[1]) for record in records for name in _decode_partitions(record[14]))
        return RecordSlice(records, partitions, blocks)

    def _to_target_row(self, row: RowTuple) -> RowTuple:
        """As the database has them: the place in two, and what the record is found by."""
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
        """Lane, position and hash of the body of all records that are erased, in pages. Only under the lock."""
        return _iterate_pages(self._connection.execute(SOURCE_SQL["erased"]))

    def iterate_side_state(self, table: SideStateTable) -> Iterator[list[RowTuple]]:
        """All rows of a table, in pages. Only under the lock."""
        columns = ", ".join(table.columns)
        return _iterate_pages(self._connection.execute(f"SELECT {columns} FROM oncelog_{table.name}"))  # noqa: S608

    def list_policies(self) -> list[RowTuple]:
        """Name and declaration of each."""
        return self._connection.execute(SQL["policies"]).fetchall()

    def list_foreign_tables(self) -> list[str]:
        """What an application keeps beside the log in the same file. It stays there."""
        return [name for (name,) in self._connection.execute(SOURCE_SQL["tables_of_others"])]

    # --- what is compared

    def load_block(self, lane: int, height: int) -> RowTuple | None:
        """The columns of a block."""
        row: RowTuple | None = self._connection.execute(SQL["block"], (lane, height)).fetchone()
        return row

    def count_rows(self) -> dict[str, int]:
        """How many there are of everything that is copied."""
        found = dict(zip(COUNT_NAMES, self._connection.execute(SOURCE_SQL["counts"]).fetchone(), strict=True))
        for table in STORED_TABLES:
            (count,) = self._connection.execute(f"SELECT count(*) FROM oncelog_{table.name}").fetchone()  # noqa: S608
            found[table.name] = count
        return found

    @contextmanager
    def _read_transaction(self) -> Iterator[sqlite3.Connection]:
        """Everything inside is of one moment. It ends soon, so that the write-ahead log can be emptied."""
        if self._connection.in_transaction:
            yield self._connection
            return
        self._connection.execute("BEGIN")
        try:
            yield self._connection
        finally:
            self.unlock()


def _fetch_slice_rows(cursor: sqlite3.Cursor) -> list[RowTuple]:
    """As many rows as a slice may have by the bytes of its bodies, and one at least."""
    rows: list[RowTuple] = []
    size = 0
    while found := cursor.fetchmany(_FETCH_ROWS):
        for row in found:
            size += len(row[-1] or b"")
            if rows and size > SLICE_BYTES:
                return rows
            rows.append(row)
    return rows


def _check_dense(lane: int, positions: list[int], after: int, gaps: Sequence[Gap]) -> None:
    """Raise CorruptError if the positions do not follow each other, or if the list is empty.

    A gap is valid where the log has leapt.
    """
    for before, position in pairwise([after, *(positions or [-1])]):
        if position != before + 1 and (before, position) not in gaps:
            raise CorruptError(f"lane {lane}, position {before + 1}: the record is missing; see `oncelog verify`")


def _iterate_pages(cursor: Any) -> Iterator[list[RowTuple]]:
    while rows := cursor.fetchmany(SLICE_ROWS):
        yield rows
