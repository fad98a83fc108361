"""The SQLite file of a deltas client: its rows with the state that a merge needs, its outbox, its clock and its cursor.

All methods block, and only one thread may call them at a time.
"""

import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, TypeVar

import msgspec
from msgspec import Struct

from oncelog.client.deltas.codec import OutboxEntry, PushReply, SnapshotRow
from oncelog.client.deltas.edits import Edits, OutboxUsage, RowKey, get_row, get_visible_columns, list_changes
from oncelog.client.deltas.values import Change, DeltasLimits, LocalRow, parse_columns
from oncelog.client.runtime.client import ClientRuntime
from oncelog.client.runtime.store_file import BaseStore, StoreSchema
from oncelog.core.canonical import JsonValue
from oncelog.core.deltas import decode_delta
from oncelog.core.merge import NEVER, Row, RowDelta, Stamp, merge
from oncelog.core.rules.compaction import build_row_without_state
from oncelog.sql_files import run_script

T = TypeVar("T")
Received = TypeVar("Received", RowDelta, SnapshotRow)

SCHEMA: Final = StoreSchema("deltas client", "oncelog.client.deltas", 1, application_id=0x4F4C4443)  # "OLDC"
SQL: Final = SCHEMA.load_queries()
NUMBER_MAX: Final = 2**63 - 1
_ROW_DECODER: Final = msgspec.msgpack.Decoder(Row)


class SyncState(Struct):
    """In-memory copy of frequently used values in the file, which other threads may read."""

    hlc: int = 0
    cursor: int = 0
    epoch: str = ""
    is_reset_wanted: bool = False
    pending: int = 0
    pending_bytes: int = 0
    oldest_number: int = 0
    """Number of the oldest delta in the outbox, or 0 if the outbox is empty."""
    newest_number: int = 0
    """Highest number that the outbox has ever assigned to a delta."""


class DeltasStore(BaseStore):
    """Store of one deltas client."""

    _schema = SCHEMA

    def __init__(self, path: str, limits: DeltasLimits) -> None:
        super().__init__(path)
        self._limits = limits
        self._client_id = ""
        self.sync_state = SyncState()

    # --- opening

    def open(self, client_id: str, gateway: str) -> None:
        """Open the file.

        Raises StoreInUseError or another StoreError, or SettingsError if it belongs to a different client or gateway.
        """
        with self._file.open() as (connection, is_new):
            if is_new:
                connection.execute(SQL["make_client"], (client_id, gateway))
            known_client, known_gateway, *_ = connection.execute(SQL["client"]).fetchone()
            self._check_owner("client", known_client, client_id)
            self._check_owner("gateway", known_gateway, gateway)
            run_script(connection, SCHEMA.read_script("staging.sql"))
            sync_state = self._load_sync_state(connection, counts_outbox=True)
        self.sync_state = sync_state
        self._client_id = client_id

    @contextmanager
    def _transaction(self, *, is_durable: bool, changes_outbox: bool = False) -> Iterator[sqlite3.Connection]:
        """Run a transaction, then reload the in-memory copy of the values that it changed."""
        with self._file.transaction(is_durable=is_durable) as connection:
            yield connection
            after = self._load_sync_state(connection, counts_outbox=changes_outbox)
        self.sync_state = after

    def _load_sync_state(self, connection: sqlite3.Connection, *, counts_outbox: bool) -> SyncState:
        _, _, hlc, cursor, epoch, is_reset_wanted = connection.execute(SQL["client"]).fetchone()
        before = self.sync_state
        counts = before.pending, before.pending_bytes, before.oldest_number, before.newest_number
        if counts_outbox:  # slow for a long outbox
            counts = connection.execute(SQL["outbox_counts"]).fetchone()
        return SyncState(int(hlc), cursor, epoch, bool(is_reset_wanted), *counts)

    # --- rows

    def load_row(self, table: str, row_id: str) -> dict[str, JsonValue] | None:
        """Return the columns of a row, or None if it does not exist."""
        with self._file.translate_errors(), self._file.translate_damage():
            return parse_columns(get_visible_columns(self._load_state(self._file.connection, table, row_id)))

    def list_rows(self, table: str, after: str, limit: int) -> list[LocalRow]:
        """Return the rows that exist, in code point order of `row_id`."""
        with self._file.translate_errors(), self._file.translate_damage():
            found = self._file.connection.execute(SQL["rows_after"], (table, after, limit)).fetchall()
            return [LocalRow(row_id, parse_columns(_ROW_DECODER.decode(state).values) or {}) for row_id, state in found]

    def _load_state(self, connection: sqlite3.Connection, table: str, row_id: str, statement: str = "row") -> Row:
        found = connection.execute(SQL[statement], (table, row_id)).fetchone()
        if found is None:
            return Row()
        with self._file.translate_damage():
            return _ROW_DECODER.decode(found[0])

    # --- edits

    def transact(self, function: Callable[[Edits], T], wall_now_ms: int) -> tuple[T, list[Change]]:
        """Call the function with `Edits` and save their changes. On return the changes are on disk."""
        before = self.sync_state
        with self._file.transaction(is_durable=True) as connection:
            edits = Edits(
                client_id=self._client_id,
                hlc=before.hlc,
                wall_now_ms=wall_now_ms,
                load=lambda table, row_id: self._load_state(connection, table, row_id),
                limits=self._limits,
                outbox_usage=OutboxUsage(before.pending, before.pending_bytes),
            )
            try:
                result = function(edits)
            finally:
                edits.end()
            if edits.new_deltas:
                _save_rows(connection, edits.rows)
                numbers = [
                    connection.execute(SQL["append"], (delta.delta_id, delta.body)).lastrowid
                    for delta in edits.new_deltas
                ]
                connection.execute(SQL["save_hlc"], (str(edits.hlc),))
        if edits.new_deltas:
            self.sync_state = msgspec.structs.replace(
                before,
                hlc=edits.hlc,
                pending=before.pending + len(numbers),
                pending_bytes=before.pending_bytes + sum(len(delta.body) for delta in edits.new_deltas),
                oldest_number=before.oldest_number or numbers[0] or 0,
                newest_number=numbers[-1] or 0,
            )
        return result, edits.changes()

    # --- outbox

    def list_pending(self, before: int | None, deltas_max: int, bytes_max: int) -> list[OutboxEntry]:
        """Return the oldest deltas in the outbox, in order. The first is returned regardless of its size."""
        batch: list[OutboxEntry] = []
        size = 0
        with self._file.translate_errors():
            number_below = NUMBER_MAX if before is None else before
            for row in self._file.connection.execute(SQL["pending"], (number_below, deltas_max)):
                size += len(row[2]) + 1
                if batch and size > bytes_max:
                    break
                batch.append(OutboxEntry(*row))
        return batch

    def acknowledge(self, number: int, answer: PushReply) -> bool:
        """Remove the deltas up to this number. If the answer is from a different history, return False instead.

        A late answer may come from a history that a restore has replaced, and the restore may have lost the deltas. The
        answer's history must therefore be the one that the client knows, or a continuation of it. During a reset this
        method only marks the deltas; `replace` checks their history.
        """
        epoch = answer.epoch
        if self.sync_state.epoch not in ("", epoch, *answer.previous_epochs) and not self.sync_state.is_reset_wanted:
            return False
        with self._transaction(is_durable=False, changes_outbox=True) as connection:
            connection.execute(SQL["acknowledge"], (epoch, number))
            connection.execute(SQL["save_first_epoch"], (epoch,))
            if not self.sync_state.is_reset_wanted:
                connection.execute(SQL["forget_acknowledged"])
        return True

    def discard(self, delta_ids: Iterable[bytes]) -> int:
        """Remove deltas from the outbox, and request a reset, because the client cannot compute the rows without them.

        Return how many deltas were removed.
        """
        with self._transaction(is_durable=True, changes_outbox=True) as connection:
            count = sum(connection.execute(SQL["discard"], (delta_id,)).rowcount for delta_id in delta_ids)
            if count:
                connection.execute(SQL["want_reset"])
        return count

    # --- data from the gateway

    def apply(self, deltas: Sequence[RowDelta], cursor: int, epoch: str) -> list[Change]:
        """Merge deltas and move the cursor, in one transaction."""
        return self._merge(deltas, merge, (delta.hlc for delta in deltas), cursor, epoch)

    def join(self, snapshot: Sequence[SnapshotRow], cursor: int | None, epoch: str) -> list[Change]:
        """Merge a page of a snapshot into the rows. Only the last page has a cursor."""
        clocks = (get_newest_hlc(snapshot_row.row) for snapshot_row in snapshot)
        moved = self.sync_state.cursor if cursor is None else cursor
        return self._merge(snapshot, lambda row, received: join_rows(row, received.row), clocks, moved, epoch)

    def _merge(
        self,
        received: Sequence[Received],
        merge_into: Callable[[Row, Received], Row],
        clocks: Iterable[int],
        cursor: int,
        epoch: str,
    ) -> list[Change]:
        """Merge deltas or rows of a snapshot and move the cursor, in one transaction. Return the visible changes."""
        # Losing the transaction in a crash is harmless, because the gateway sends the data again.
        rows: dict[RowKey, tuple[Row, Row]] = {}
        with self._transaction(is_durable=False) as connection:
            for part in received:
                key = (part.table, part.row_id)
                merged = merge_into(get_row(rows, key, partial(self._load_state, connection)), part)
                rows[key] = (rows[key][0], merged)
            _save_rows(connection, rows)
            self._save_cursor(connection, clocks, cursor, epoch)
        return list_changes(rows, is_local=False)

    def request_reset(self) -> None:
        """Record that all rows must be read again."""
        with self._transaction(is_durable=True) as connection:
            connection.execute(SQL["want_reset"])

    def stage(self, snapshot: Sequence[SnapshotRow], is_first: bool, horizon: int | None = None) -> None:
        """Stage a page of a snapshot. Staged rows are temporary: after a crash the client reads the snapshot again."""
        with self._transaction(is_durable=False) as connection:
            if is_first:
                connection.execute(SQL["clear_staged"])
            _stage(
                connection, [((snapshot_row.table, snapshot_row.row_id), snapshot_row.row) for snapshot_row in snapshot]
            )
            clocks = (horizon or 0, *(get_newest_hlc(snapshot_row.row) for snapshot_row in snapshot))
            self._save_cursor(connection, clocks, self.sync_state.cursor, self.sync_state.epoch)

    def replace(self, cursor: int, epoch: str, changes_max: int, horizon: int | None = None) -> list[Change] | None:
        """Replace all rows with the staged ones and apply the outbox. Return the changes, or None if they are too
        many."""
        with self._transaction(is_durable=True, changes_outbox=True) as connection:
            for (body,) in connection.execute(SQL["outbox_of_epoch"], (epoch,)):
                with self._file.translate_damage():
                    delta = decode_delta(body)
                staged = self._load_state(connection, delta.table, delta.row_id, "staged_row")
                if staged.is_empty:  # the gateway may have dropped the row, so deltas below the horizon lose
                    staged = build_row_without_state(horizon, delta.table, delta.row_id)
                _stage(connection, [((delta.table, delta.row_id), merge(staged, delta))])
            replaced = self._compute_replacement(connection, changes_max)
            for statement in ("clear_rows", "unstage", "clear_staged", "end_reset", "forget_acknowledged"):
                connection.execute(SQL[statement])
            connection.execute(
                SQL["save_cursor"], (str(self._compute_clock_after_reset(connection, horizon)), cursor, epoch)
            )
        return replaced

    def _compute_clock_after_reset(self, connection: sqlite3.Connection, horizon: int | None) -> int:
        """Return the clock after a reset: if the outbox is empty, the highest clock reading in the rows.

        If the clock was far ahead, this corrects it once the deltas from that time have been withdrawn. The clock is
        never below the tombstone horizon, because an edit below it would lose.
        """
        pending, *_ = connection.execute(SQL["outbox_counts"]).fetchone()
        if pending:
            return self.sync_state.hlc
        newest = horizon or 0
        for (state,) in connection.execute(SQL["row_states"]):
            with self._file.translate_damage():
                newest = max(newest, get_newest_hlc(_ROW_DECODER.decode(state)))
        return newest

    def _compute_replacement(self, connection: sqlite3.Connection, changes_max: int) -> list[Change] | None:
        changes: list[Change] = []
        for table, row_id, old, new in connection.execute(SQL["replaced_rows"]):
            with self._file.translate_damage():
                pair = tuple(Row() if state is None else _ROW_DECODER.decode(state) for state in (old, new))
            changes += list_changes({(table, row_id): (pair[0], pair[1])}, is_local=False)
            if len(changes) > changes_max:
                return None
        return changes

    def _save_cursor(self, connection: sqlite3.Connection, clocks: Iterable[int], cursor: int, epoch: str) -> None:
        """Move the cursor, and advance the clock to the highest reading received, however far ahead it is (DE-8)."""
        hlc = max(self.sync_state.hlc, max(clocks, default=0))
        connection.execute(SQL["save_cursor"], (str(hlc), cursor, epoch))


DeltasRuntime = ClientRuntime[DeltasStore, DeltasLimits]
"""Runtime of a deltas client."""


def _save_rows(connection: sqlite3.Connection, rows: dict[RowKey, tuple[Row, Row]]) -> None:
    changed = [_encode_row(name, last) for name, (first, last) in rows.items() if first is not last]
    connection.executemany(SQL["save_row"], changed)


def _stage(connection: sqlite3.Connection, rows: Iterable[tuple[RowKey, Row]]) -> None:
    connection.executemany(SQL["stage"], [_encode_row(name, row) for name, row in rows])


def _encode_row(name: RowKey, row: Row) -> tuple[Any, ...]:
    return *name, int(row.exists), msgspec.msgpack.encode(row)


def join_rows(first: Row, second: Row) -> Row:
    """Return the join of two states of a row, or `first` itself if `second` adds nothing.

    Every part is a maximum, as in `merge`, so the result does not depend on the number or order of joins.
    """
    deleted = max(first.deleted, second.deleted)
    columns = dict(first.columns)
    for name, column in second.columns.items():
        if name not in columns or column[1] > columns[name][1]:
            columns[name] = column
    columns = {name: column for name, column in columns.items() if column[1] > deleted}
    row = Row(columns, max(first.written, second.written), deleted)
    return first if row == first else row


def get_newest_hlc(row: Row) -> int:
    """Return the highest clock reading in a row, or a negative number for an empty row."""
    stamps: Iterable[Stamp] = (row.written, row.deleted, *(stamp for _, stamp in row.columns.values()))
    return max(stamps, default=NEVER)[0]
