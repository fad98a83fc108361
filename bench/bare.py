"""The cost of bare SQLite: a loop that inserts a log's rows without decisions, hashes or answers.

The store's code creates the file, so tables, pragmas and fsyncs are the same as in a log. The rows are prepared before
the measurement.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

from oncelog.storage.sqlite.database_file import SqliteDriver, connect, create_or_open
from oncelog.storage.sqlite.key_index.key_run import pack_runs, unpack_run
from oncelog.storage.sqlite.statements import SQL

Row = tuple[Any, ...]

RECORDS: Final = "oncelog_records"
PARTITIONS: Final = "oncelog_partition_records"
KEYS: Final = "oncelog_key_runs"


class Batch(NamedTuple):
    """The rows of one transaction."""

    records: Sequence[Row]
    partitions: Sequence[Row]
    keys: Sequence[Row]
    block: Row
    lane: Row


class BareFile:
    """An empty log that the benchmark fills with SQL, without Oncelog."""

    def __init__(self, path: Path) -> None:
        self._connection = connect(SqliteDriver(), str(path))
        create_or_open(self._connection, str(path), None, 0)
        self._insert_record, self._insert_partition, self._insert_key = (
            _insert(self._connection, table) for table in (RECORDS, PARTITIONS, KEYS)
        )
        self._position = self._height = 0

    def insert(self, batch: Batch) -> None:
        """Insert a batch in one transaction."""
        execute, insert_many = self._connection.execute, self._connection.executemany
        execute("BEGIN IMMEDIATE")
        insert_many(self._insert_record, batch.records)
        insert_many(self._insert_partition, batch.partitions)
        if batch.keys:
            insert_many(self._insert_key, batch.keys)
        execute(SQL["save_block"], batch.block)
        execute(SQL["save_lane"], batch.lane)
        execute(SQL["save_state"], ("", 0, 0))
        execute("COMMIT")
        self._position += len(batch.records)
        self._height += 1

    def insert_timed(self, batches: Iterable[Batch]) -> list[float]:
        """Insert batches, and return the duration of each transaction in seconds."""
        times = [time.perf_counter()]
        for batch in batches:
            self.insert(batch)
            times.append(time.perf_counter())
        return [after - before for before, after in pairwise(times)]

    def following(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the same rows with the next positions and with ascending keys.

        Each row is appended to its table, so that its cost is independent of the number of rows.
        """
        columns = _columns(self._connection, RECORDS)
        position = self._position
        for height, before in enumerate(batches, self._height + 1):
            count = len(before.records)
            places = range(position + 1, position + count + 1)
            records = []
            for place, row in zip(places, before.records, strict=True):
                moved = {"id": place, "place": place, "key": place.to_bytes(16, "big")}
                records.append(tuple(moved.get(name, value) for name, value in zip(columns, row, strict=True)))
            partitions = [(*row[:2], place) for place, row in zip(places, before.partitions, strict=True)]
            keys = [(1, last, packed) for last, packed in pack_runs((places, places))]
            yield Batch(records, sorted(partitions), keys, *_block_and_lane(height, position + 1, count))
            position += count

    def close(self) -> None:
        """Close the file."""
        self._connection.close()


def batches_of(path: Path, size: int | None = None, records_max: int = -1) -> list[Batch]:
    """Return the rows of lane 0 of a log, in its committed batches or in batches of a fixed size.

    Key runs are inserted as in the log: a whole segment together, after its last record.
    """
    with closing(connect(SqliteDriver(), str(path))) as connection:
        records = _select(connection, RECORDS, f"ORDER BY place LIMIT {records_max}")
        partitions = iter(_select(connection, PARTITIONS, f"ORDER BY position LIMIT {records_max}"))
        keys: dict[int, list[Row]] = {}
        for row in _select(connection, KEYS, "ORDER BY segment, last"):
            keys.setdefault(row[0], []).append(row)
        blocks = connection.execute("SELECT count FROM oncelog_blocks ORDER BY height").fetchall()
    counts = [count for (count,) in blocks] if size is None else [size] * (len(records) // size)
    due = sorted((max(max(unpack_run(row[2])[1]) for row in rows), rows) for rows in keys.values())
    source, position, batches = iter(records), 0, []
    for height, count in enumerate(counts, 1):
        first, position = position + 1, position + count
        sealed: list[Row] = []
        while due and due[0][0] <= position:
            sealed += due.pop(0)[1]
        batches.append(
            Batch(
                list(islice(source, count)),
                sorted(islice(partitions, count)),  # in table order, as in a log
                sealed,
                *_block_and_lane(height, first, count),
            )
        )
    return batches


def _block_and_lane(height: int, first: int, count: int) -> tuple[Row, Row]:
    some_hash = height.to_bytes(32, "big")
    block = (0, height, first, count, 0, some_hash, some_hash)
    return block, (0, first + count - 1, 0, 0, 0, height, height, some_hash)


def _insert(connection: Any, table: str) -> str:
    marks = ", ".join("?" * len(_columns(connection, table)))
    return f"INSERT INTO {table} VALUES ({marks})"  # noqa: S608


def _select(connection: Any, table: str, rest: str) -> list[Row]:
    rows: list[Row] = connection.execute(f"SELECT * FROM {table} {rest}").fetchall()  # noqa: S608
    return rows


def _columns(connection: Any, table: str) -> list[str]:
    return [row[1] for row in connection.execute(f"PRAGMA table_info({table})").fetchall()]
