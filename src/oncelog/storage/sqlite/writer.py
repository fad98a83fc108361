"""The writer: one connection, one thread, one transaction at a time. COMMIT syncs the file (`synchronous=FULL`).

Several processes may each have a writer on the same file. A writer therefore uses cached state only after it has taken
the write lock (BEGIN IMMEDIATE) and seen what the other processes have written.
"""

import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import msgspec

from oncelog.core.plan import Validate
from oncelog.core.read_set import ReadSet
from oncelog.core.values import KeyIdentity, Remembered, Request, RequestedSettings, Settings
from oncelog.error_translation import raise_translated
from oncelog.errors import ClosedError, CorruptError, LogReplacedError, StoreUnavailableError
from oncelog.sqlite_files import roll_back, transaction
from oncelog.storage.clock import ClockMark
from oncelog.storage.metadata import (
    DAMAGE_HINT,
    EpochRenewal,
    LogMetadata,
    Operator,
    ReplacedLog,
    build_leap_request,
    new_epoch,
)
from oncelog.storage.queries.statement import SharedQuery
from oncelog.storage.record_rows import DAMAGE_ERRORS
from oncelog.storage.sqlite.database_file import (
    BUSY_TIMEOUT_MS,
    Driver,
    connect,
    create_or_open,
    translate_error,
)
from oncelog.storage.sqlite.key_index.index import KeyIndex
from oncelog.storage.sqlite.moved_marker import check_not_moved
from oncelog.storage.sqlite.query_driver import run_steps
from oncelog.storage.sqlite.statements import SQL
from oncelog.storage.sqlite.transaction import StoreTransaction, TransactionOptions, TransactionState, load_key_status
from oncelog.storage.store import BatchResult, BatchTraces, KeyStatus

T = TypeVar("T")

_RETRY_HINT: Final = "; submit again under the same identity"


class Writer:
    """Runs everything that needs the writer's connection.

    Any thread may use it, but only one at a time.
    """

    def __init__(self, path: str, driver: Driver, options: TransactionOptions) -> None:
        self._path = path
        self._driver = driver
        self._options = options
        self._connection: Any = None
        self._store_transaction: StoreTransaction | None = None
        self._settings: Settings | RequestedSettings | None = None
        self._has_begun = False
        self._waits_for_lock = True
        self._file_id: object = None

    def open(self, settings: Settings | RequestedSettings | None) -> LogMetadata:
        """Create or open the file, and prepare the key index."""
        self._settings = settings
        self.check_file()
        self._driver.check(self._path)
        try:
            with self._read_transaction():
                return self.metadata
        except DAMAGE_ERRORS as error:
            raise CorruptError(f"{self._path} is damaged: {error}; {DAMAGE_HINT}") from error

    def create_sibling(self) -> "Writer":
        """Return a new, unopened writer on the same file. It uses a large key index without its filter."""
        sibling = Writer(self._path, self._driver, self._options._replace(fills_later=False))
        sibling._file_id = self._file_id
        sibling._store_transaction = StoreTransaction(self.metadata, sibling._options)
        return sibling

    def close(self) -> None:
        """Close the connection. The last connection that any process closes moves the write-ahead log into the file."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    # --- the commit

    def commit(
        self, batch: Sequence[Request], validate: Validate | None, traces: BatchTraces | None = None
    ) -> BatchResult:
        """Load, decide and save a batch in one transaction. After a StoreUnavailableError, no verdict may be sent."""
        with self._transaction(hint=_RETRY_HINT) as connection:
            result = self.store_transaction.commit(connection, batch, validate, traces=traces)
            decided_s = time.perf_counter()
        if not result.changes.is_empty:
            result.prepared_s, result.synced_s = decided_s, time.perf_counter()
            result.sync_s = result.synced_s - decided_s
        self.store_transaction.confirm()
        return result

    def prepare(self, batch: Sequence[Request], traces: BatchTraces | None = None) -> BatchResult | None:
        """Decide and save a batch without waiting and without COMMIT. `finish` must follow, unless the batch changes
        nothing.

        Does nothing and returns None if another process is writing or has written much, or if the file must be opened
        first.
        """
        if self._connection is None:
            return None
        with self._translate_errors(_RETRY_HINT):
            connection = self.connection
            if not self._try_begin(connection):
                return None
            try:
                current_state = self.store_transaction.load_state_if_current(connection)
                if current_state is None:
                    connection.execute("ROLLBACK")
                    return None
                result = self.store_transaction.commit(connection, batch, None, current_state, traces)
                if result.changes.is_empty:
                    self._commit_prepared(connection)
            except BaseException:
                self.abandon()
                raise
            return result

    def abandon(self) -> None:
        """Roll back a batch that will not be finished."""
        if self._connection is not None and self._connection.in_transaction:
            self.store_transaction.roll_back()
            roll_back(self._connection)

    def finish(self) -> tuple[float, float]:
        """Make a prepared batch durable. Return how many seconds that took, and when it ended.

        Raises StoreUnavailableError, as `commit` does.
        """
        began_s = time.perf_counter()
        with self._translate_errors(_RETRY_HINT):
            self._commit_prepared(self._connection)
        ended_s = time.perf_counter()
        return ended_s - began_s, ended_s

    def _commit_prepared(self, connection: Any) -> None:
        try:
            connection.execute("COMMIT")
        finally:
            if connection.in_transaction:
                roll_back(connection)
        self.store_transaction.confirm()

    def _try_begin(self, connection: Any) -> bool:
        self._has_begun = False
        self._set_busy_timeout(connection, waits=False)
        try:
            connection.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as error:
            if not (getattr(error, "sqlite_errorname", None) or "").startswith("SQLITE_BUSY"):
                raise
            return False
        self._has_begun = True
        return True

    def _set_busy_timeout(self, connection: Any, *, waits: bool) -> None:
        """Set whether to wait for other processes.

        Most batches need the same setting as the previous one, and then this method runs no statement.
        """
        if waits != self._waits_for_lock:
            connection.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS if waits else 0}")
            self._waits_for_lock = waits

    # --- other uses of the writer

    def find_keys(self, identities: Sequence[KeyIdentity]) -> list[Remembered | None]:
        """Return the stored answer for each identity, from its newest record."""
        with self._read_transaction() as (connection, state):
            needs = ReadSet(keys=set(identities))
            snapshot, _ = self.store_transaction.load_identities(connection, self.index, needs, state)
        return [snapshot.keys.get(identity) for identity in identities]

    def get_key_status(self, identity: KeyIdentity) -> KeyStatus:
        """Return the newest record of an identity, its lease, and the head that determines whether they have
        expired."""
        with self._read_transaction() as (connection, state):
            mark, _ = self.store_transaction.propose_clock(state.clock)
            status = load_key_status(connection, self.index, identity, self.metadata.settings.lanes)
            return msgspec.structs.replace(status, time_ms=mark.time_ms)

    def run_write(self, query: SharedQuery[T], *arguments: Any) -> T:
        """Run a query in a write transaction that overwrites deleted bytes, as erasures require.

        `scrub` overwrites them in the file when it moves the write-ahead log there.
        """
        with self._transaction() as connection:
            check_not_moved(connection)
            connection.execute("PRAGMA secure_delete = ON")
            try:
                result = run_steps(connection, query(*arguments), commit=self._commit_part)
            finally:
                connection.execute("PRAGMA secure_delete = FAST")
        self.store_transaction.confirm()
        return result

    def _commit_part(self, connection: Any, batch: Sequence[Request]) -> BatchResult:
        """Commit a batch in a transaction that also contains other statements."""
        try:
            return self.store_transaction.commit(connection, batch)
        except BaseException:
            self.store_transaction.reset()  # the index may include commits that have been rolled back
            raise

    def scrub(self) -> bool:
        """Move the write-ahead log into the file and empty it. Returns False if a reader prevents that.

        The method does not wait for the reader, because commits would then have to wait too.
        """
        self._has_begun = False  # a failure leaves the caches valid
        with self._translate_errors():
            connection = self.connection
            self._set_busy_timeout(connection, waits=False)
            return not connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]

    def probe(self) -> None:
        """Checkpoint all commits, then commit a transaction that changes nothing.

        On a full disk, the checkpoint is the operation that fails on the next start, and the write-ahead log is the
        first space that can be reused.
        """
        self.scrub()
        with self._transaction() as connection:
            connection.execute(SQL["touch_state"])

    def confirm_clock(self) -> None:
        """Accept the current wall clock."""
        with self._transaction() as connection:
            check_not_moved(connection)
            connection.execute(SQL["save_state"], msgspec.structs.astuple(ClockMark.read(self._options.clock)))

    def renew_epoch(
        self, above: int | None, replaced: ReplacedLog = ReplacedLog(), operator: Operator = Operator()
    ) -> EpochRenewal:
        """Start a new history in one transaction (see `Store`). For `replaced`, see `build_leap_request`."""
        with self._transaction() as connection:
            state = self.store_transaction.load_state(connection)
            now_ms = state.clock.get_latest_ms(ClockMark.read(self._options.clock))
            request, renewed = build_leap_request(
                state.heads, self.metadata, above, now_ms, new_epoch(), replaced, operator
            )
            self.store_transaction.commit(connection, [request])
            connection.execute(SQL["set_epoch"], (renewed.new_epoch,))
        self.store_transaction.confirm()
        self.store_transaction.metadata = msgspec.structs.replace(self.metadata, epoch=renewed.new_epoch)
        return renewed

    # --- the key index and its filter

    @property
    def store_transaction(self) -> StoreTransaction:
        """Return the object that runs the store's part of each transaction."""
        if self._store_transaction is None:
            raise ClosedError(f"the log {self._path} has not been opened")
        return self._store_transaction

    @property
    def metadata(self) -> LogMetadata:
        """Return the file's metadata."""
        return self.store_transaction.metadata

    @property
    def index(self) -> KeyIndex:
        """Return the key index as of the newest transaction."""
        index = self.store_transaction.index
        if index is None:
            raise ClosedError(f"the log {self._path} has not been opened")
        return index

    @property
    def index_without_filter(self) -> KeyIndex | None:
        """Return the index if its filter is missing and is still to be filled."""
        if not self._options.fills_later:
            return None
        # Read the attribute once: the writer thread may discard the index at any time.
        index = None if self._store_transaction is None else self._store_transaction.index
        return index if index is not None and not index.has_filter else None

    # --- connection and transaction

    @property
    def connection(self) -> Any:
        """Return the writer's connection, opening it if necessary."""
        if self._connection is not None:
            self.check_file()
        else:
            if self._store_transaction is not None:
                self._driver.check(self._path)
            connection = connect(self._driver, self._path)
            try:
                now_ms = self._options.clock.wall_ms()
                self._use_metadata(create_or_open(connection, self._path, self._settings, now_ms))
                self._file_id = self._driver.get_file_id(self._path)
                make_durable(connection)
            except BaseException:
                connection.close()
                raise
            self._connection, self._waits_for_lock = connection, True
        return self._connection

    def check_file(self) -> None:
        """Raise LogReplacedError if the file was removed or replaced.

        Connections to an open file cannot detect that themselves.
        """
        if self._file_id is not None and self._driver.get_file_id(self._path) != self._file_id:
            raise LogReplacedError(
                f"{self._path} has been removed or replaced since it was opened; open the log again, or restart "
                "the server"
            )

    def _use_metadata(self, metadata: LogMetadata) -> None:
        """Keep the metadata of the opened file.

        After an error, the file is opened again, and may then be a different log.
        """
        if self._store_transaction is None:
            self._store_transaction = StoreTransaction(metadata, self._options)
        elif self._store_transaction.metadata.epoch != metadata.epoch:
            raise LogReplacedError(f"{self._path} is a different log from the one that was opened; open it again")
        else:
            self._store_transaction.reset()

    @contextmanager
    def _translate_errors(self, hint: str = "") -> Iterator[None]:
        """Translate SQLite errors, and discard all cached state after one.

        The connection is kept open if only the disk fails. A commit whose sync failed can still be read from the
        write-ahead log, but Linux never writes it to the disk. This connection knows that the commit is void and
        overwrites it. A new connection would treat it as valid and append further commits, which the next
        power failure would remove together with it.
        """
        try:
            yield
        except sqlite3.Error as error:
            if self._has_begun and self._store_transaction is not None:
                self._store_transaction.reset()  # BEGIN failed, so nothing was read: another process holds the lock
            store_error = translate_error(error, self._path, hint)
            connection = self._connection
            if connection is not None and (
                connection.in_transaction or not isinstance(store_error, StoreUnavailableError)
            ):
                connection.close()
                self._connection = None
            raise_translated(store_error, error)
        except (UnicodeError, msgspec.MsgspecError) as error:  # sqlite3 and msgspec raise these for damaged values
            raise CorruptError(f"{self._path} is damaged: {error}; {DAMAGE_HINT}") from error

    @contextmanager
    def _transaction(self, begin: str = "BEGIN IMMEDIATE", hint: str = "") -> Iterator[Any]:
        """Run the block in a transaction on the writer's connection."""
        with self._translate_errors(hint):
            connection = self.connection
            self._has_begun = False
            self._set_busy_timeout(connection, waits=True)
            try:
                with transaction(connection, begin):
                    self._has_begun = True
                    yield connection
            except BaseException:
                # Do this after any error, even one outside SQLite: staged index changes must not be confirmed later.
                self.store_transaction.roll_back()
                raise

    @contextmanager
    def _read_transaction(self) -> Iterator[tuple[Any, TransactionState]]:
        """Run the block in a read transaction, with the log's state and a current key index."""
        with self._transaction("BEGIN") as connection:
            state = self.store_transaction.load_state(connection)
            self.store_transaction.get_current_index(connection, state)
            yield connection, state


def make_durable(connection: Any) -> None:
    """Sync commits that other processes have left behind, before any caller learns of them.

    A process that dies between writing and syncing a commit leaves it in the write-ahead log. The next process to open
    the file reads it as committed, but a power failure could still undo it. A new commit syncs the log, including
    everything before the commit.

    That is not enough if the process died after a failed sync: Linux then drops the pages, and the next sync does not
    write them. The write-ahead log is therefore first moved into the file, which writes its contents again, and then
    restarted. Other processes that have the file open can prevent this, but they did the same when they opened the
    file.
    """
    connection.execute("PRAGMA busy_timeout = 0")
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    connection.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
    with transaction(connection):
        connection.execute(SQL["touch_state"])
