"""The file that a log is moved out of. Until the end it is in use: every look at it is a short one."""

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import lru_cache
from itertools import pairwise
from typing import Any, Final

import msgspec

from oncelog.core.gaps import Gap, missing_numbers
from oncelog.errors import CorruptError, StoreUnavailableError
from oncelog.stores.about import About
from oncelog.stores.clock import ClockMark
from oncelog.stores.key_hash import hash_of
from oncelog.stores.leaps import NO_GAPS, LaneGaps
from oncelog.stores.moving.values import COUNTED, SOURCE_SQL, Reached, Row, Slice, State
from oncelog.stores.rows import DAMAGE_ERRORS
from oncelog.stores.side_state import KEPT, Table
from oncelog.stores.sqlite.files import SqliteDriver, connect
from oncelog.stores.sqlite.index import lane_and_position, place_of
from oncelog.stores.sqlite.looking import ExistingFile, in_our_words, look_at_current
from oncelog.stores.sqlite.moved import Moved, moved, set_moved
from oncelog.stores.sqlite.reading import gaps, heads
from oncelog.stores.sqlite.session import make_durable
from oncelog.stores.sqlite.statements import SQL

SLICE_ROWS: Final = 10_000
SLICE_BYTES: Final = 16 * 2**20
"""Of bodies. One that is longer is a slice of its own."""
_FETCH: Final = 200
_partitions: Final = lru_cache(maxsize=1024)(msgspec.json.Decoder(tuple[str, ...]).decode)


@contextmanager
def opened_source(path: str) -> Iterator["Source"]:
    """A log in a file that is there. Raises StoreErrors, never an error of SQLite's."""
    driver = ExistingFile(query_only=False)
    driver.check(path)
    try:
        with closing(connect(driver, path)) as connection:
            yield Source(path, connection, look_at_current(connection, path))
    except sqlite3.Error as error:
        raise in_our_words(error, path) from error
    except DAMAGE_ERRORS as error:
        raise CorruptError(f"{path} holds what no log has written: {error}") from error


class Source:
    """Not for two threads at once."""

    def __init__(self, path: str, connection: sqlite3.Connection, about: About) -> None:
        self._path = path
        self._file = SqliteDriver().mark(path)
        self._connection = connection
        self.about = about

    def state(self) -> State:
        """Where the log stands."""
        with self._moment() as connection:
            _, erasures, *clock = connection.execute(SQL["state"]).fetchone()
            tenants, usage_version = connection.execute(SQL["tenants"]).fetchone()
            (leaps,) = connection.execute(SQL["leaps"]).fetchone()
            return State(
                heads(connection), erasures, ClockMark(*clock), tenants, usage_version, leaps, gaps(connection)
            )

    def moved(self) -> Moved | None:
        """The mark of an earlier run that came to its end."""
        return moved(self._connection)

    def settle(self) -> None:
        """Makes durable what has been committed: nothing is copied that the next loss of power could undo."""
        make_durable(self._connection)

    # --- the end: nobody else writes

    def lock(self) -> None:
        """Keeps all others from writing, until `mark` or `unlock`."""
        if SqliteDriver().mark(self._path) != self._file:
            raise StoreUnavailableError(f"{self._path} has been removed or replaced since it was opened")
        self._connection.execute("BEGIN IMMEDIATE")

    def unlock(self) -> None:
        """Lets the others write again, if they cannot yet."""
        if self._connection.in_transaction:
            self._connection.execute("ROLLBACK")

    def mark(self, mark: Moved) -> None:
        """Ends the lock, and with it all writing to the file."""
        set_moved(self._connection, mark)
        self._connection.execute("COMMIT")

    # --- what is copied

    def slices(self, upto: State, reached: Mapping[int, Reached]) -> Iterator[Slice]:
        """All records up to the heads of a state that have not been reached yet."""
        for lane, head in sorted(upto.heads.items()):
            at = reached.get(lane, Reached())
            while at.position < head.position:
                found = self._slice(lane, at, head.position, upto.gaps.get(lane, NO_GAPS))
                yield found
                at = Reached(found.records[-1][1], found.records[-1][4])

    def _slice(self, lane: int, at: Reached, upto: int, gaps: LaneGaps) -> Slice:
        with self._moment() as connection:
            bounds = (place_of(lane, at.position), place_of(lane, upto), SLICE_ROWS)
            rows = _fitting(connection.execute(SOURCE_SQL["records"], bounds))
            _demand_dense(lane, [lane_and_position(row[0])[1] for row in rows], at.position, gaps.positions)
            height = rows[-1][3]
            blocks = connection.execute(SOURCE_SQL["blocks"], (lane, at.height, height)).fetchall()
        if len(blocks) != height - at.height - missing_numbers(gaps.heights, at.height, height):
            raise CorruptError(f"lane {lane}: a block below height {height} is missing; see `oncelog verify`")
        records = [self._columns(row) for row in rows]
        partitions = sorted((lane, name, record[1]) for record in records for name in _partitions(record[14]))
        return Slice(records, partitions, blocks)

    def _columns(self, row: Row) -> Row:
        """As the database has them: the place in two, and what the record is found by."""
        place, sequence, log_time_ms, height, number, policy, scope, client, key, *others = row
        secret = self.about.index_secret
        return (
            *lane_and_position(place),
            sequence,
            log_time_ms,
            height,
            number,
            hash_of(secret, (policy, scope, client if number else "", key)) if key else None,
            hash_of(secret, (policy, scope, client, number)) if number else None,
            policy,
            scope,
            client,
            key,
            *others,
        )

    def erased(self) -> Iterator[list[Row]]:
        """Lane, position and hash of the body of all records that are erased, in pages. Only under the lock."""
        return _pages(self._connection.execute(SOURCE_SQL["erased"]))

    def side_state(self, table: Table) -> Iterator[list[Row]]:
        """All rows of a table, in pages. Only under the lock."""
        columns = ", ".join(("lane", *table.keys, *table.values))
        return _pages(self._connection.execute(f"SELECT {columns} FROM oncelog_{table.name}"))  # noqa: S608

    def policies(self) -> list[Row]:
        """Name and declaration of each."""
        return self._connection.execute(SQL["policies"]).fetchall()

    def tables_of_others(self) -> list[str]:
        """What an application keeps beside the log in the same file. It stays there."""
        return [name for (name,) in self._connection.execute(SOURCE_SQL["tables_of_others"])]

    # --- what is compared

    def block(self, lane: int, height: int) -> Row | None:
        """The columns of a block."""
        row: Row | None = self._connection.execute(SQL["block"], (lane, height)).fetchone()
        return row

    def counts(self) -> dict[str, int]:
        """How many there are of everything that is copied."""
        found = dict(zip(COUNTED, self._connection.execute(SOURCE_SQL["counts"]).fetchone(), strict=True))
        for table in KEPT:
            (count,) = self._connection.execute(f"SELECT count(*) FROM oncelog_{table.name}").fetchone()  # noqa: S608
            found[table.name] = count
        return found

    @contextmanager
    def _moment(self) -> Iterator[sqlite3.Connection]:
        """Everything inside is of one moment. It ends soon, so that the write-ahead log can be emptied."""
        if self._connection.in_transaction:
            yield self._connection
            return
        self._connection.execute("BEGIN")
        try:
            yield self._connection
        finally:
            self.unlock()


def _fitting(cursor: sqlite3.Cursor) -> list[Row]:
    """As many rows as a slice may have by the bytes of its bodies, and one at least."""
    rows: list[Row] = []
    size = 0
    while found := cursor.fetchmany(_FETCH):
        for row in found:
            size += len(row[-1] or b"")
            if rows and size > SLICE_BYTES:
                return rows
            rows.append(row)
    return rows


def _demand_dense(lane: int, positions: list[int], after: int, gaps: Sequence[Gap]) -> None:
    """Raise CorruptError if the positions do not follow each other, or if the list is empty.

    A gap is valid where the log has leapt.
    """
    for before, position in pairwise([after, *(positions or [-1])]):
        if position != before + 1 and (before, position) not in gaps:
            raise CorruptError(f"lane {lane}, position {before + 1}: the record is missing; see `oncelog verify`")


def _pages(cursor: Any) -> Iterator[list[Row]]:
    while rows := cursor.fetchmany(SLICE_ROWS):
        yield rows
