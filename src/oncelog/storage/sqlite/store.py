"""The SQLite store: a writer thread, two reader threads, and asyncio in front of them.

The event loop's thread decides and writes small batches itself, and the writer thread only makes them durable. A
separate thread moves committed pages from the write-ahead log into the file while commits continue.
"""

import asyncio
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from oncelog.core.latency import Cause
from oncelog.core.plan import Validate
from oncelog.core.policy import Policy
from oncelog.core.values import (
    KeyIdentity,
    LaneHead,
    Remembered,
    Request,
    RequestedSettings,
    Settings,
    Submission,
)
from oncelog.error_translation import raise_translated
from oncelog.errors import ClosedError
from oncelog.sqlite_files import logger
from oncelog.storage.clock import JUMP_MS_MAX, Clock, ClockMark, SystemClock
from oncelog.storage.metadata import EpochRenewal, LogMetadata, Operator, ReplacedLog
from oncelog.storage.pauses import PauseLog
from oncelog.storage.queries.sql_store import SqlStore, T
from oncelog.storage.queries.statement import QuerySteps, SharedQuery, Statement
from oncelog.storage.queries.writes import declare_policies
from oncelog.storage.record_rows import DAMAGE_ERRORS
from oncelog.storage.sqlite.database_file import Driver, SqliteDriver, connect, translate_error
from oncelog.storage.sqlite.key_index.filters import load_filters
from oncelog.storage.sqlite.key_index.index import SEAL_KEYS, KeyIndex
from oncelog.storage.sqlite.query_driver import run_query
from oncelog.storage.sqlite.side_state_tables import erase_values
from oncelog.storage.sqlite.statements import SQL
from oncelog.storage.sqlite.transaction import TransactionOptions
from oncelog.storage.sqlite.worker_thread import WorkerThread
from oncelog.storage.sqlite.writer import Writer
from oncelog.storage.store import BatchResult, BatchTraces, Draw, EncodeViews, KeyStatus, Query, RecordViewPage

READERS: Final = 2
PREPARED_ITEMS_MAX: Final = 1024
PREPARED_BYTES_MAX: Final = 1024 * 1024
"""Limits for a batch that the event loop's thread writes. Larger batches go to the writer thread."""
LOOP_WAIT_S_MAX: Final = 0.1
OFF_LOOP_S: Final = 5.0
"""How long the writer thread writes all batches after one has blocked the event loop for over LOOP_WAIT_S_MAX."""
IMMEDIATE_COMMIT_RECORDS: Final = 64
"""Minimum number of records in a batch whose COMMIT starts immediately, in parallel with the event loop. For fewer
records, the loop loses more time to the thread switch than it saves."""
CHECKPOINT_RECORDS: Final = 1024
CHECKPOINT_PAUSE_S: Final = 0.1
"""Pause after a checkpoint, which moves the write-ahead log into the file after CHECKPOINT_RECORDS records. With large
records, the log reaches CHECKPOINT_PAGES first, and a commit runs the checkpoint."""


class SqliteStore(SqlStore):
    """A log in a file. See `storage.store.Store` for the contract of each method."""

    _view_fetch_rows_max = 200
    """How many rows `read_views` reads and releases at a time."""
    _erase_values = staticmethod(erase_values)

    def __init__(
        self,
        path: str | os.PathLike[str],
        settings: Settings | RequestedSettings | None = None,
        *,
        clock: Clock | None = None,
        draw: Draw = os.urandom,
        driver: Driver | None = None,
        jump_ms_max: int = JUMP_MS_MAX,
        seal_keys: int = SEAL_KEYS,
    ) -> None:
        self._path = os.fspath(path)
        self._requested_settings = settings
        self._driver = driver or SqliteDriver()
        self.pauses = PauseLog()
        """Pauses by checkpoints and by the key index."""
        options = TransactionOptions(clock or SystemClock(), draw, jump_ms_max, seal_keys, pauses=self.pauses)
        self._file_writer = Writer(self._path, self._driver, options)
        self._writer_thread: WorkerThread | None = None
        self._readers: ThreadPoolExecutor | WorkerThread | None = None
        self._checkpointer: ThreadPoolExecutor | None = None
        self._checkpoint_lock = asyncio.Lock()
        self._checkpoint_task: asyncio.Task[None] | None = None
        self._uncheckpointed_records = 0
        self._views_lock = asyncio.Lock()
        self._reader_connections: dict[tuple[int, str], Any] = {}
        """Connections by thread and use."""
        self._process = 0
        self._fill_task: asyncio.Task[None] | None = None
        self._prepare_after_s = 0.0
        """Until this time the writer thread writes all batches."""

    @property
    def _metadata(self) -> LogMetadata:
        return self._file_writer.metadata

    async def open(self) -> None:
        """See `Store`. Several processes may open one file. A forked process must open it after the fork."""
        self._process = os.getpid()
        self._writer_thread = WorkerThread("oncelog-writer")
        self._readers = ThreadPoolExecutor(READERS, "oncelog-reader") if self._driver.is_shared else self._writer_thread
        self._checkpointer = ThreadPoolExecutor(1, "oncelog-checkpointer") if self._driver.is_shared else None
        try:
            await self._write(self._file_writer.open, self._requested_settings)
            await self._recount_usage()
        except BaseException:
            await self.close()
            raise
        self._start_fill()

    async def close(self) -> None:
        """See `Store`."""
        if self._writer_thread is None or self._readers is None:
            return
        if self._fill_task is not None:
            self._fill_task.cancel()
        if self._checkpoint_task is not None:
            self._checkpoint_task.cancel()
        writer, readers, checkpointer = self._writer_thread, self._readers, self._checkpointer
        self._writer_thread = self._readers = self._checkpointer = None
        if checkpointer is not None:
            await asyncio.to_thread(checkpointer.shutdown)
        if isinstance(readers, ThreadPoolExecutor):
            await asyncio.to_thread(readers.shutdown)
        for connection in self._reader_connections.values():
            connection.close()
        self._reader_connections.clear()
        await writer.submit(self._file_writer.close)
        await asyncio.to_thread(writer.stop)

    def create_sibling(self) -> "SqliteStore | None":
        """See `Store`. The sibling has a separate connection, like another process."""
        if not self._driver.is_shared:
            return None
        store = SqliteStore(self._path, driver=self._driver)
        store._file_writer = self._file_writer.create_sibling()
        return store

    async def declare(self, policies: Sequence[Policy]) -> Mapping[str, Policy]:
        """See `Store`."""
        return await self._run_write((), declare_policies, policies)

    async def commit(
        self, batch: Sequence[Request], validate: Validate | None = None, traces: BatchTraces | None = None
    ) -> BatchResult:
        """See `Store`."""
        writer = self._writer_thread
        if writer is None or validate is not None or (result := self._prepare(batch, traces)) is None:
            result = await self._write(self._file_writer.commit, batch, validate, traces)
        elif not result.changes.is_empty:
            result.prepared_s = time.perf_counter()
            # The transaction must end even if the caller is cancelled; otherwise no other write could begin.
            try:
                is_large = len(result.changes.records) >= IMMEDIATE_COMMIT_RECORDS
                finishing = writer.submit(self._file_writer.finish, start_now=is_large)
            except RuntimeError:  # the interpreter is shutting down
                self._file_writer.abandon()
                raise
            result.sync_s, result.synced_s = await asyncio.shield(finishing)
        if result.lacks_trace_table:
            self._report_dropped_traces()
        self._start_fill()
        self._uncheckpointed_records += len(result.changes.records)
        if self._uncheckpointed_records >= CHECKPOINT_RECORDS:
            self._start_checkpoint()
        return result

    async def find_keys(self, identities: Sequence[KeyIdentity]) -> list[Remembered | None]:
        """See `Store`."""
        return await self._write(self._file_writer.find_keys, identities)

    async def get_key_status(self, identity: KeyIdentity) -> KeyStatus:
        """See `Store`."""
        return await self._attach_trace(await self._write(self._file_writer.get_key_status, identity))

    async def scrub(self) -> bool:
        """See `Store`."""
        # Without the lock, the checkpointer could act as a reader that blocks the truncation.
        async with self._checkpoint_lock:
            return await self._write(self._file_writer.scrub)

    def free_bytes(self) -> int | None:
        """See `Store`. Subtracts the pages of the write-ahead log, which still have to fit into the file."""
        free = self._driver.get_free_bytes(self._path)
        return None if free is None else max(0, free - _get_file_size(f"{self._path}-wal"))

    async def size_bytes(self) -> int | None:
        """See `Store`. The size includes the write-ahead log."""
        sizes = [_get_file_size(f"{self._path}{end}") for end in ("", "-wal")]
        return sum(sizes) if any(sizes) else None

    async def probe(self) -> None:
        """See `Store`."""
        async with self._checkpoint_lock:  # as in `scrub`
            await self._write(self._file_writer.probe)

    async def confirm_clock(self) -> None:
        """See `Store`."""
        await self._write(self._file_writer.confirm_clock)

    async def renew_epoch(self, above: int | None = None, operator: Operator = Operator()) -> EpochRenewal:
        """See `Store`."""
        return await self._write(self._file_writer.renew_epoch, above, ReplacedLog(), operator)

    def listen(self, wake: Callable[[], None]) -> None:
        """See `Store`. SQLite sends no notifications."""

    async def read_views(self, query: Query, policy: str, encode: EncodeViews) -> RecordViewPage:
        """See `Store`."""
        # One read at a time. Every row releases the GIL and reacquires it, so two concurrent reads slow each other down
        # and together take twice as long as in sequence.
        async with self._views_lock:
            return await super().read_views(query, policy, encode)

    async def heads(self) -> Mapping[int, LaneHead]:
        """See `Store`."""
        self._file_writer.check_file()
        return await super().heads()

    async def erasures(self) -> int:
        """See `Store`."""
        self._file_writer.check_file()
        return await super().erasures()

    async def _run_query(self, query: SharedQuery[T], *arguments: Any) -> T:
        return await self._read(run_query, query, *arguments)

    def _propose_mark(self) -> QuerySteps[tuple[ClockMark, Exception | None]]:
        [(_, _, *newest)] = yield Statement("state")
        return self._file_writer.store_transaction.propose_clock(ClockMark(*newest))

    async def _run_write(self, lanes: Collection[int], query: SharedQuery[T], *arguments: Any) -> T:  # noqa: ARG002
        return await self._write(self._file_writer.run_write, query, *arguments)

    # --- threads

    async def _write(self, function: Callable[..., T], *arguments: Any) -> T:
        return await self._run(self._writer_thread, function, *arguments)

    async def _read(self, function: Callable[..., T], *arguments: Any) -> T:
        return await self._run(self._readers, self._run_read, function, *arguments)

    async def _run(
        self, executor: ThreadPoolExecutor | WorkerThread | None, function: Callable[..., T], *arguments: Any
    ) -> T:
        if executor is None:
            raise ClosedError(f"the log {self._path} is closed")
        if os.getpid() != self._process:
            raise ClosedError(f"the log {self._path} was opened before this process was forked; open it after the fork")
        if isinstance(executor, WorkerThread):
            return await executor.submit(function, *arguments)
        return await asyncio.wrap_future(executor.submit(function, *arguments))

    def _prepare(self, batch: Sequence[Request], traces: BatchTraces | None) -> BatchResult | None:
        """Decide and write a batch on the event loop's thread, without COMMIT. Returns None if that could block for
        long.

        A separate thread would take the GIL from the event loop and hand it back many times per batch. If both threads
        are busy, the switches cost as much as the work (docs/decisions/0010). COMMIT, which waits for the disk, does
        not need the GIL.
        """
        if self._writer_thread is None or not self._writer_thread.is_idle or os.getpid() != self._process:
            return None
        began_s = time.monotonic()
        if began_s < self._prepare_after_s or not _is_small_batch(batch):
            return None
        cpu_s = time.thread_time()
        try:
            return self._file_writer.prepare(batch, traces)
        finally:
            waited_s = time.monotonic() - began_s - (time.thread_time() - cpu_s)
            if waited_s > LOOP_WAIT_S_MAX:  # probably for the disk, which must not block the loop
                self._prepare_after_s = began_s + OFF_LOOP_S

    def _run_read(self, function: Callable[..., T], *arguments: Any) -> T:
        try:
            connection = self._reader_connection()
            connection.execute("BEGIN")
            try:
                return function(connection, *arguments)
            finally:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
        except (sqlite3.Error, *DAMAGE_ERRORS) as error:
            self._close_reader_connection()
            raise_translated(translate_error(error, self._path), error)

    def _reader_connection(self, use: str = "reader") -> Any:
        """Return the current thread's connection for a use."""
        if not self._driver.is_shared:
            return self._file_writer.connection
        place = (threading.get_ident(), use)
        connection = self._reader_connections.get(place)
        if connection is None:
            connection = self._reader_connections[place] = connect(self._driver, self._path)
            connection.execute("PRAGMA query_only = ON")
        return connection

    def _close_reader_connection(self, use: str = "reader") -> None:
        connection = self._reader_connections.pop((threading.get_ident(), use), None)
        if connection is not None:
            connection.close()

    # --- checkpoints while commits continue

    def _start_checkpoint(self) -> None:
        if self._checkpointer is not None and (self._checkpoint_task is None or self._checkpoint_task.done()):
            self._checkpoint_task = asyncio.get_running_loop().create_task(self._run_checkpoint(self._checkpointer))

    async def _run_checkpoint(self, checkpointer: ThreadPoolExecutor) -> None:
        """Run a checkpoint, so that no commit has to run it and delay its caller by 10 ms or more.

        Records that are committed during the checkpoint wait for the next one, or for a commit that finds a large
        write-ahead log.
        """
        try:
            async with self._checkpoint_lock:
                self._uncheckpointed_records = 0
                await asyncio.wrap_future(checkpointer.submit(self._checkpoint))
        except Exception:  # a commit will retry
            logger.debug("the checkpoint failed", exc_info=True)
        await asyncio.sleep(CHECKPOINT_PAUSE_S)

    def _checkpoint(self) -> None:
        """Run a checkpoint on one connection while a second one holds a read transaction.

        Before SQLite 3.51.3, a checkpoint could mistake a write-ahead log that a commit had just restarted for the
        previous one, and corrupt the file (docs/decisions/0008). A read transaction prevents commits from restarting
        the log. If there is nothing to move, the read transaction would only block the checkpoint.
        """
        try:
            reader, checkpointer = self._reader_connection(), self._reader_connection("checkpointer")
            reader.execute("BEGIN")
            try:
                reader.execute(SQL["state"]).fetchone()
                with self.pauses.measure(Cause.CHECKPOINT):
                    checkpointer.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
            finally:
                reader.execute("ROLLBACK")
        except BaseException:
            self._close_reader_connection()
            self._close_reader_connection("checkpointer")
            raise

    # --- filling the filter of the key index while commits continue

    def _start_fill(self) -> None:
        index = self._file_writer.index_without_filter
        if index is not None and (self._fill_task is None or self._fill_task.done()):
            self._fill_task = asyncio.get_running_loop().create_task(self._fill_filters(index))

    async def _fill_filters(self, index: KeyIndex) -> None:
        try:
            filters = await self._read(load_filters, index.segment_keys)
            await self._write(index.set_filters, filters)
        except Exception:
            logger.warning("the key filter could not be filled; the next commit tries again", exc_info=True)


def _is_small_batch(batch: Sequence[Request]) -> bool:
    if sum([len(request.items) for request in batch]) > PREPARED_ITEMS_MAX:
        return False
    bodies = [len(item.body) for request in batch for item in request.items if type(item) is Submission]
    return sum(bodies) <= PREPARED_BYTES_MAX


def _get_file_size(path: str) -> int:
    try:
        return os.stat(path).st_size  # noqa: PTH116 - as in `Driver.get_file_id`
    except OSError:
        return 0
