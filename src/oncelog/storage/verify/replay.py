"""Rebuilds side state from the records of a log, in a temporary file.

The replay takes the records ordered by lane and position. It applies them in batches to a `BatchState`, as a commit
does, so that only the entries of one batch are in memory.
"""

import os
import sqlite3
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from oncelog.core.batch_state import BatchState
from oncelog.core.operations import DeleteEntity, Operation, Unrelate
from oncelog.core.policy import FOLD_POLICY, Policy
from oncelog.core.read_set import ReadSet, add_effects
from oncelog.core.replay import drop_conditions, has_effects, rebuild_submission, replay_record
from oncelog.core.rules.compaction import Fold, FoldedRow, decode_fold
from oncelog.core.values import Changes, Record, Refused, Replayed, Settings, Snapshot, Submission, client_identity
from oncelog.error_translation import translate_raised
from oncelog.errors import StoreUnavailableError
from oncelog.storage.inspect.inspector import RowTuple
from oncelog.storage.queries.side_state import load_tables
from oncelog.storage.side_state import TABLES, SideStateTable
from oncelog.storage.sqlite.query_driver import run_query
from oncelog.storage.sqlite.side_state_tables import save_tables
from oncelog.storage.verify.findings import InconsistencyError
from oncelog.storage.verify.source import LogState

REBUILT_TABLES: Final = tuple(table for table in TABLES if table.is_rebuilt)
"""The tables whose rows the records determine."""
_CACHE_KIB: Final = 32 * 1024
_FILE_PREFIX: Final = ".oncelog-verify-"
_SCHEMA: Final = """
-- Records whose effects are not known. `is_erased` is 0 if the body exists, but is not in the format of the
-- policy's API.
-- `is_folded` is 1 for a delta whose rows are in a fold record.
CREATE TABLE unknown (lane, scope, sequence, is_erased, is_folded, PRIMARY KEY (lane, scope, sequence)) WITHOUT ROWID;
CREATE TABLE unknown_deltas (lane, scope, delta_id, PRIMARY KEY (lane, scope, delta_id)) WITHOUT ROWID;
-- The newest fold of each row that no known delta has changed since.
CREATE TABLE folds (
    lane, scope, table_name, row_id, sequence, digest, deleted_hlc, PRIMARY KEY (lane, scope, table_name, row_id)
) WITHOUT ROWID;
-- The last known deletions, in scopes that also have unknown records.
CREATE TABLE removed (lane, scope, name, sequence, PRIMARY KEY (lane, scope, name)) WITHOUT ROWID;
"""


_ROWS_AND_FOLDS: Final = """
SELECT lane, scope, table_name, row_id, state FROM oncelog_rows
UNION ALL
SELECT lane, scope, table_name, row_id, NULL FROM folds AS f WHERE digest <> '' AND NOT EXISTS (
    SELECT 1 FROM oncelog_rows AS r
    WHERE r.lane = f.lane AND r.scope = f.scope AND r.table_name = f.table_name AND r.row_id = f.row_id
)
ORDER BY lane, scope, table_name, row_id
"""


class ScratchDatabase:
    """Rebuilt side state in an unlinked SQLite file.

    The file disappears with the process, even if the process is killed.
    """

    def __init__(self, settings: Settings, temp_dir: str | None, log_directory: str | None) -> None:
        self._settings = settings
        with translate_errors():
            self._connection = _connect(temp_dir, log_directory)
            self._create_tables()

    def _create_tables(self) -> None:
        for pragma in ("synchronous = OFF", f"cache_size = -{_CACHE_KIB}"):
            self._connection.execute(f"PRAGMA {pragma}")
        for table in REBUILT_TABLES:
            columns, keys = ", ".join(table.columns), ", ".join(("lane", *table.keys))
            self._connection.execute(
                f"CREATE TABLE oncelog_{table.name} ({columns}, PRIMARY KEY ({keys})) WITHOUT ROWID"
            )
        self._connection.executescript(_SCHEMA)
        self._connection.execute("BEGIN")

    def close(self) -> None:
        """Close the file, which frees its space."""
        self._connection.close()

    # --- used by the replay, inside `translate_errors`

    def load(self, read_set: ReadSet) -> Snapshot:
        """Return the rebuilt entries that a read set requests."""
        snapshot = Snapshot(settings=self._settings)
        run_query(self._connection, load_tables, read_set, snapshot)
        return snapshot

    def save(self, changes: Changes, stored: Snapshot) -> None:
        """Save the changed entries. `stored` is what `load` returned."""
        save_tables(self._connection, changes, self._settings.lanes, stored)

    def add_unknown(self, lane: int, scope: str, sequence: int, is_erased: bool, delta_id: bytes | None) -> None:
        """Add a record whose effects are not known. `delta_id` is its id if it is a delta."""
        self._connection.execute("INSERT INTO unknown VALUES (?, ?, ?, ?, 0)", (lane, scope, sequence, is_erased))
        if delta_id is not None:
            self._connection.execute("INSERT OR IGNORE INTO unknown_deltas VALUES (?, ?, ?)", (lane, scope, delta_id))

    def add_deletions(self, rows: Iterable[tuple[int, str, str, int]]) -> None:
        """Store the sequences at which entries were deleted."""
        self._connection.executemany("INSERT OR REPLACE INTO removed VALUES (?, ?, ?, ?)", rows)

    def add_fold(self, lane: int, fold: Fold) -> None:
        """Store the digests of a fold record, and the deltas that it replaces."""
        self._connection.executemany(
            "UPDATE unknown SET is_folded = 1 WHERE lane = ? AND scope = ? AND sequence BETWEEN ? AND ?",
            [(lane, fold.scope, first, last) for first, last in fold.deltas],
        )
        self._connection.executemany(
            "INSERT OR REPLACE INTO folds VALUES (?, ?, ?, ?, ?, ?, ?)",
            [
                (lane, fold.scope, row.table, row.row_id, fold.sequence, row.digest, row.deleted_hlc)
                for row in fold.rows
            ],
        )

    def remove_fold(self, lane: int, scope: str, table: str, row_id: str) -> None:
        """Delete the digest of a row that a known delta has changed since."""
        self._connection.execute(
            "DELETE FROM folds WHERE lane = ? AND scope = ? AND table_name = ? AND row_id = ?",
            (lane, scope, table, row_id),
        )

    # --- used by the comparison

    def find_fold(self, lane: int, scope: str, table: str, row_id: str) -> tuple[int, FoldedRow] | None:
        """Return the newest digest of a row, and the sequence of the newest delta that it contains."""
        found = self._connection.execute(
            "SELECT sequence, table_name, row_id, digest, deleted_hlc FROM folds "
            "WHERE lane = ? AND scope = ? AND table_name = ? AND row_id = ?",
            (lane, scope, table, row_id),
        ).fetchone()
        return None if found is None else (found[0], FoldedRow(*found[1:]))

    def has_unfolded(self, lane: int, scope: str, after: int = 0) -> bool:
        """Return whether a stream has records above `after` whose effects are neither known nor in a fold."""
        return self._has_record("sequence > ? AND NOT is_folded", lane, scope, after)

    def iterate_table(self, table: SideStateTable) -> Iterator[RowTuple]:
        """Return the rebuilt rows of a table: lane, key and values, ordered by lane and key.

        A row that exists only in a fold has no values.
        """
        keys = ", ".join(("lane", *table.keys))
        columns = ", ".join((keys, *table.values))
        if table.name == "rows":
            return iter(self._connection.execute(_ROWS_AND_FOLDS))
        return iter(self._connection.execute(f"SELECT {columns} FROM oncelog_{table.name} ORDER BY {keys}"))  # noqa: S608

    def count_rows(self, table: SideStateTable) -> int:
        """Return the number of rebuilt rows of a table."""
        return int(self._connection.execute(f"SELECT count(*) FROM oncelog_{table.name}").fetchone()[0])  # noqa: S608

    def is_unknown(self, lane: int, scope: str, sequence: int) -> bool:
        """Return whether the record at a sequence has unknown effects."""
        return self._has_record("sequence = ?", lane, scope, sequence)

    def is_erased(self, lane: int, scope: str, sequence: int) -> bool:
        """Return whether the record at a sequence has been erased."""
        return self._has_record("sequence = ? AND is_erased", lane, scope, sequence)

    def has_unknown(self, lane: int, scope: str, after: int = 0) -> bool:
        """Return whether a stream has records with unknown effects above `after`."""
        return self._has_record("sequence > ?", lane, scope, after)

    def is_unknown_delta(self, lane: int, scope: str, delta_id: bytes) -> bool:
        """Return whether a stream has a delta with this id and unknown content."""
        statement = "SELECT 1 FROM unknown_deltas WHERE lane = ? AND scope = ? AND delta_id = ?"
        return self._connection.execute(statement, (lane, scope, delta_id)).fetchone() is not None

    def find_deletion(self, lane: int, scope: str, name: str) -> int:
        """Return the sequence at which an entry was last deleted, or 0 if no known record deleted it."""
        found = self._connection.execute(
            "SELECT sequence FROM removed WHERE lane = ? AND scope = ? AND name = ?", (lane, scope, name)
        ).fetchone()
        return 0 if found is None else int(found[0])

    def _has_record(self, condition: str, lane: int, scope: str, sequence: int) -> bool:
        statement = f"SELECT 1 FROM unknown WHERE lane = ? AND scope = ? AND {condition} LIMIT 1"  # noqa: S608
        return self._connection.execute(statement, (lane, scope, sequence)).fetchone() is not None


def translate_errors() -> AbstractContextManager[None]:
    """Report errors of the temporary file as such rather than as damage to the log."""
    return translate_raised(
        sqlite3.Error,
        lambda error: StoreUnavailableError(f"the temporary file of the verification cannot be written: {error}"),
    )


def _connect(temp_dir: str | None, log_directory: str | None) -> sqlite3.Connection:
    """Create a file with mode 0600 and unlink it, so that no other process can open it and no cleanup is needed.

    Without `temp_dir`, the file is created in `TMPDIR`, the log's directory or the system's temporary directory.
    """
    directories = [temp_dir] if temp_dir else [os.environ.get("TMPDIR"), log_directory, tempfile.gettempdir()]
    failure: OSError | None = None
    for directory in filter(None, directories):
        try:
            handle, path = tempfile.mkstemp(prefix=_FILE_PREFIX, suffix=".db", dir=directory)
        except OSError as error:
            failure = error
            continue
        os.close(handle)
        try:
            connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            connection.execute("PRAGMA journal_mode = OFF")
            connection.execute("PRAGMA locking_mode = EXCLUSIVE")
            connection.execute("CREATE TABLE opened (id)")  # SQLite opens the file at the first statement
            return connection
        finally:
            Path(path).unlink()
    raise StoreUnavailableError(f"no temporary file can be created: {failure}") from failure


_BATCH_RECORDS: Final = 1000
_BATCH_BYTES: Final = 4 * 2**20
"""Maximum bytes of bodies in a batch, so that a batch of long bodies does not fill the memory."""


class _PendingRecord(Struct, frozen=True, gc=False):
    record: Record
    submission: Submission
    eviction_time_ms: int
    """Time of the lane's last eviction before the record."""


class SideStateReplay:
    """Replays records. If `with_effects` is False, it replays only the sequences of clients."""

    def __init__(self, state: LogState, scratch: ScratchDatabase, *, with_effects: bool = True) -> None:
        self._state = state
        self._scratch = scratch
        self._with_effects = with_effects
        self._evictions_ms: dict[int, int] = {}
        self._pending: list[_PendingRecord] = []
        self._bytes = 0
        self._unknown_scopes: dict[str, bool] = {}
        """Whether a scope has a record whose effects are not known, for the scopes of the batch."""

    def add(self, record: Record) -> None:
        """See `RecordCollector`."""
        if record.policy == FOLD_POLICY and self._with_effects:
            self._add_fold(record)
        policy = self._state.policies.get(record.policy)
        has_effects = self._with_effects and policy is not None and (policy.entities or policy.rows)
        if policy is not None and (policy.client_sequence or has_effects):
            self._add(record, policy)
        if record.position % self._state.settings.eviction_interval == 0:
            self._evictions_ms[record.lane] = record.log_time_ms

    def _add(self, record: Record, policy: Policy) -> None:
        # A record without its body still has its client sequence, but no effects.
        submission = rebuild_submission(record if self._with_effects else replace(record, erased=True), policy)
        eviction_time_ms = self._evictions_ms.get(record.lane, 0)
        self._pending.append(_PendingRecord(record, submission, eviction_time_ms))
        self._bytes += len(record.body)
        if len(self._pending) >= _BATCH_RECORDS or self._bytes >= _BATCH_BYTES:
            self.flush()

    def _add_fold(self, record: Record) -> None:
        self.flush()
        if not record.erased:
            with translate_errors():
                self._scratch.add_fold(record.lane, decode_fold(record))

    def flush(self) -> None:
        """Replay the records of the batch. Call it after the last record. Raises InconsistencyError."""
        pending, self._pending, self._bytes = self._pending, [], 0
        if pending:
            with translate_errors():
                self._replay_batch(pending)

    def _replay_batch(self, pending: list[_PendingRecord]) -> None:
        needs = ReadSet()
        for pending_record in pending:
            if pending_record.submission.policy.client_sequence:
                needs.clients.add(client_identity(pending_record.submission))
            add_effects(pending_record.submission, needs)
        needs.horizons.clear()
        snapshot = self._scratch.load(needs)
        state = BatchState(snapshot, 0)
        self._unknown_scopes.clear()
        for pending_record in pending:
            self._replay(pending_record, state)
        self._scratch.save(state.collect_changes(), snapshot)

    def _replay(self, pending: _PendingRecord, state: BatchState) -> None:
        record, submission = pending.record, pending.submission
        policy = submission.policy
        if self._with_effects and (policy.entities or policy.rows):
            if not has_effects(submission):
                self._add_unknown(record, policy)
            elif policy.entities and self._has_unknown(record.lane, record.scope):
                submission = drop_conditions(submission)
        answer = replay_record(record, submission, pending.eviction_time_ms, state)
        if isinstance(answer, Refused) and policy.rows and self._has_unknown(record.lane, record.scope):
            # Only the rebuilt row exceeds a limit: the replay could not apply an unknown delta that deleted columns.
            self._add_unknown(record, policy)
        elif answer is not None:
            raise InconsistencyError(_describe_fault(record, answer), record.lane, record.position)
        if submission.delta is not None:
            self._scratch.remove_fold(record.lane, record.scope, submission.delta.table, submission.delta.row_id)
        self._record_deletions(record, submission)

    def _has_unknown(self, lane: int, scope: str) -> bool:
        known = self._unknown_scopes.get(scope)
        if known is None:
            known = self._unknown_scopes[scope] = self._scratch.has_unknown(lane, scope)
        return known

    def _add_unknown(self, record: Record, policy: Policy) -> None:
        delta_id = record.key if policy.rows else None
        self._scratch.add_unknown(record.lane, record.scope, record.sequence, record.erased, delta_id)
        self._unknown_scopes[record.scope] = True

    def _record_deletions(self, record: Record, submission: Submission) -> None:
        """Store deletions of entries that an earlier unknown record may have set."""
        names = [name for name in map(get_deleted_name, submission.operations) if name is not None]
        if names and self._has_unknown(record.lane, record.scope):
            self._scratch.add_deletions([(record.lane, record.scope, name, record.sequence) for name in names])


def get_deleted_name(operation: Operation) -> str | None:
    """Return the name of the deleted entry for `ScratchDatabase.find_deletion`, or None if nothing is deleted."""
    match operation:
        case DeleteEntity(key):
            return join_key(key)
        case Unrelate(resource, relation, subject):
            return join_key(resource, relation, subject)
    return None


def join_key(*key: str) -> str:
    """Join the key of an entity (one part) or of a relationship (three parts) into one string."""
    return "\0".join(key)  # no part contains U+0000


def _describe_fault(record: Record, answer: Refused | Replayed) -> str:
    if isinstance(answer, Refused) and answer.field != "client_sequence":
        return f"the record of {record.scope!r} could not have been committed: {answer.message}"
    last = f" after {answer.current}" if isinstance(answer, Refused) else ", which is not the next one"
    return f"client {record.client!r} of {record.scope!r} has sequence {record.client_sequence}{last}"
