"""The SQLite store: a writer thread, two reader threads, and asyncio in front of them.

Small batches are decided and written on the event loop's thread, and only made durable by the writer's. What they have
written is moved from the write-ahead log into the file by a thread of its own, beside the commits.
"""

import asyncio
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any, Final, TypeVar

from oncelog.core.footprint import Footprint
from oncelog.core.plan import Validate
from oncelog.core.policy import Policy
from oncelog.core.proof import Block
from oncelog.core.tenants import Tenant, Usage
from oncelog.core.values import (
    KeyIdentity,
    LaneHead,
    Record,
    RecordAct,
    Remembered,
    Request,
    Settings,
    Submission,
    WantedSettings,
)
from oncelog.errors import ClosedError, CorruptError
from oncelog.stores.clock import JUMP_MS_MAX, Clock, SystemClock
from oncelog.stores.leaps import NO_OPERATOR, NO_REPLACED_LOG, Operator, Renewed
from oncelog.stores.protocol import (
    BriefPage,
    Consumer,
    Decided,
    Draw,
    EntityPage,
    Evidence,
    MemberChange,
    MemberPage,
    MemberPlace,
    MembershipPage,
    Page,
    Query,
    RelationshipPage,
    RelationshipQuery,
    RowPage,
    ScopedBlock,
    Show,
    SideState,
    Standing,
)
from oncelog.stores.rows import DAMAGE_ERRORS
from oncelog.stores.sqlite import delta_reading, ledger_reading, member_reading, reading
from oncelog.stores.sqlite import tenants as tenants_of_file
from oncelog.stores.sqlite.files import Driver, SqliteDriver, connect, translated
from oncelog.stores.sqlite.filters import read_filters
from oncelog.stores.sqlite.index import SEAL_KEYS, lane_and_position
from oncelog.stores.sqlite.session import Session
from oncelog.stores.sqlite.statements import SQL
from oncelog.stores.sqlite.worker import Worker
from oncelog.stores.tenants import COUNT_TRIES, Count, list_of
from oncelog.stores.tenants import text_of as kept_text

logger: Final = logging.getLogger("oncelog.sqlite")

READERS: Final = 2
PREPARED_ITEMS_MAX: Final = 1024
PREPARED_BYTES_MAX: Final = 1024 * 1024
"""A batch of more is left to the writer's thread: what else the event loop has to do must not wait for it."""
WAITED_S_MAX: Final = 0.1
APART_S: Final = 5.0
"""A disk that has let the event loop wait for longer than the first is left to the writer's thread for the second."""
AT_ONCE_RECORDS: Final = 64
"""Of so many records COMMIT begins at once, beside what the event loop has to do. For fewer that is not worth the
change of threads, which the loop has to wait for."""
MOVE_RECORDS: Final = 1024
MOVE_PAUSE_S: Final = 0.1
"""So many records are moved into the file at a time, or more, with a pause after it. If they are large, the write-ahead
log comes to CHECKPOINT_PAGES before, and a commit moves them."""
T = TypeVar("T")


class SqliteStore:
    """A log in a file. See `stores.protocol.Store` for what each method promises."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        settings: Settings | WantedSettings | None = None,
        *,
        clock: Clock | None = None,
        draw: Draw = os.urandom,
        driver: Driver | None = None,
        jump_ms_max: int = JUMP_MS_MAX,
        seal_keys: int = SEAL_KEYS,
    ) -> None:
        self._path = os.fspath(path)
        self._wanted = settings
        self._driver = driver or SqliteDriver()
        self._session = Session(self._path, self._driver, clock or SystemClock(), draw, jump_ms_max, seal_keys)
        self._writer: Worker | None = None
        self._readers: ThreadPoolExecutor | Worker | None = None
        self._mover: ThreadPoolExecutor | None = None
        self._move_turn = asyncio.Lock()
        self._moving: asyncio.Task[None] | None = None
        self._unmoved_records = 0
        self._brief_turn = asyncio.Lock()
        self._reader_connections: list[Any] = []
        self._thread = threading.local()
        self._process = 0
        self._filling: asyncio.Task[None] | None = None
        self._prepares_from_s = 0.0
        """Until then batches are written by the writer's thread alone."""

    @property
    def epoch(self) -> str:
        """As `Store` says."""
        return self._session.file.epoch

    @property
    def settings(self) -> Settings:
        """As `Store` says."""
        return self._session.file.settings

    async def open(self) -> None:
        """As `Store` says. Several processes may open one file, each after it was forked."""
        self._process = os.getpid()
        self._writer = Worker("oncelog-writer")
        self._readers = ThreadPoolExecutor(READERS, "oncelog-reader") if self._driver.is_shared else self._writer
        self._mover = ThreadPoolExecutor(1, "oncelog-mover") if self._driver.is_shared else None
        try:
            await self._write(self._session.open, self._wanted)
            await self._count_again()
        except BaseException:
            await self.close()
            raise
        self._fill_if_needed()

    async def close(self) -> None:
        """As `Store` says."""
        if self._writer is None or self._readers is None:
            return
        if self._filling is not None:
            self._filling.cancel()
        if self._moving is not None:
            self._moving.cancel()
        writer, readers, mover = self._writer, self._readers, self._mover
        self._writer = self._readers = self._mover = None
        if mover is not None:
            await asyncio.to_thread(mover.shutdown)
        if isinstance(readers, ThreadPoolExecutor):
            await asyncio.to_thread(readers.shutdown)
        for connection in self._reader_connections:
            connection.close()
        self._reader_connections.clear()
        await writer.start(self._session.close)
        await asyncio.to_thread(writer.stop)

    def sibling(self) -> "SqliteStore | None":
        """As `Store` says: with a separate connection, as another process has one."""
        if not self._driver.is_shared:
            return None
        store = SqliteStore(self._path, driver=self._driver)
        store._session = self._session.sibling()
        return store

    async def declare(self, policies: Sequence[Policy]) -> Mapping[str, Policy]:
        """As `Store` says."""
        return await self._write(self._session.declare, policies)

    async def commit(self, batch: Sequence[Request], validate: Validate | None = None) -> Decided:
        """As `Store` says."""
        writer = self._writer
        if writer is None or validate is not None or (decided := self._prepared(batch)) is None:
            decided = await self._write(self._session.commit, batch, validate)
        elif not decided.changes.is_empty:
            # Whoever waits for it may go. The transaction must come to its end all the same, or nobody could write.
            try:
                is_large = len(decided.changes.records) >= AT_ONCE_RECORDS
                finishing = writer.start(self._session.finish, at_once=is_large)
            except RuntimeError:  # the interpreter is about to end
                self._session.abandon()
                raise
            await asyncio.shield(finishing)
        if self._session.unfiltered is not None:
            self._fill_if_needed()
        self._unmoved_records += len(decided.changes.records)
        if self._unmoved_records >= MOVE_RECORDS:
            self._move_if_idle()
        return decided

    async def remembered(self, identities: Sequence[KeyIdentity]) -> list[Remembered | None]:
        """As `Store` says."""
        return await self._write(self._session.remembered, identities)

    async def standing(self, identity: KeyIdentity) -> Standing:
        """As `Store` says."""
        return await self._write(self._session.standing, identity)

    async def erase(self, lane: int, positions: Sequence[int], act: RecordAct | None = None) -> int:
        """As `Store` says."""
        return await self._write(self._session.erase, lane, positions, act)

    async def set_tenants(self, tenants: Sequence[Tenant], act: RecordAct | None = None) -> bool:
        """As `Store` says."""
        text = kept_text(tenants)
        for tried in count(1):
            begun = await self._read(tenants_of_file.seen)
            if begun.is_counted(text):
                return False
            counted = Count(begun, tenants)
            for lane, newest in begun.positions.items() if counted.is_needed else ():
                after = 0
                while rows := await self._read(tenants_of_file.sizes, lane, after, newest):
                    counted.add(rows)
                    after = lane_and_position(rows[-1][0])[1]
            if await self._write(self._session.set_tenants, text, counted, begun, tried >= COUNT_TRIES, act):
                return True
        raise AssertionError("it is tried until it is done")

    async def _count_again(self) -> None:
        """Count usage that was counted by an earlier version of Oncelog."""
        begun = await self._write(self._session.seen_tenants)
        if not begun.is_counted(begun.text):
            await self.set_tenants(list_of(begun.text))

    async def usage(self) -> list[tuple[Tenant, Usage]]:
        """As `Store` says."""
        return await self._read(tenants_of_file.usage)

    async def scrub(self) -> bool:
        """As `Store` says."""
        async with self._move_turn:  # or the mover would be taken for a reader that is in the way
            return await self._write(self._session.scrub)

    def free_bytes(self) -> int | None:
        """As `Store` says. What lies in the write-ahead log must still be moved into the file, which grows by it."""
        free = self._driver.free_bytes(self._path)
        return None if free is None else max(0, free - _size_of(f"{self._path}-wal"))

    async def size_bytes(self) -> int | None:
        """As `Store` says: the file, and what lies beside it."""
        sizes = [_size_of(f"{self._path}{end}") for end in ("", "-wal")]
        return sum(sizes) if any(sizes) else None

    async def probe(self) -> None:
        """As `Store` says."""
        async with self._move_turn:  # as in `scrub`
            await self._write(self._session.probe)

    async def confirm_clock(self) -> None:
        """As `Store` says."""
        await self._write(self._session.confirm_clock)

    async def renew(self, above: int | None = None, operator: Operator = NO_OPERATOR) -> Renewed:
        """As `Store` says."""
        return await self._write(self._session.renew, above, NO_REPLACED_LOG, operator)

    async def previous_epochs(self) -> tuple[str, ...]:
        """As `Store` says."""
        return await self._read(reading.previous_epochs)

    def listen(self, wake: Callable[[], None]) -> None:
        """As `Store` says: SQLite does not tell."""

    async def read(self, query: Query) -> Page:
        """As `Store` says."""
        return await self._read(reading.read, query, self.settings.lanes, self.epoch)

    async def read_brief(self, query: Query, policy: str, show: Show) -> BriefPage:
        """As `Store` says."""
        # One at a time. Every row lets go of the interpreter and takes it again: two that do so at once make each other
        # wait, and both together take twice as long as one after the other.
        async with self._brief_turn:
            return await self._read(reading.read_brief, query, policy, show, self.epoch)

    async def internal_records(self, after: Mapping[int, int], limit: int) -> list[Record]:
        """As `Store` says."""
        return await self._read(reading.internal_records, after, limit)

    async def sequence_before(self, stream: str, upto: int, count: int) -> int:
        """As `Store` says."""
        return await self._read(reading.sequence_before, stream, upto, count, self.settings.lanes)

    async def sequence_after(self, stream: str, after: int, count: int) -> int:
        """As `Store` says."""
        return await self._read(reading.sequence_after, stream, after, count, self.settings.lanes)

    async def heads(self) -> Mapping[int, LaneHead]:
        """As `Store` says."""
        self._session.check_file()
        return await self._read(reading.heads)

    async def block(self, lane: int, height: int) -> tuple[Block, list[Evidence]]:
        """As `Store` says."""
        return await self._read(reading.block, lane, height)

    async def blocks(self, lane: int, after: int, limit: int, scope: str) -> list[ScopedBlock]:
        """As `Store` says."""
        return await self._read(ledger_reading.blocks, lane, after, limit, scope)

    async def side_state(self, needs: Footprint) -> SideState:
        """As `Store` says."""
        return await self._read(ledger_reading.side_state, needs, self.settings, self._session.time_of)

    async def entities(self, scope: str, prefix: str, after: str, limit: int, bytes_max: int) -> EntityPage:
        """As `Store` says."""
        bounds = (scope, prefix, after, limit, bytes_max)
        return await self._read(ledger_reading.entities, bounds, self.settings, self._session.time_of)

    async def rows(self, scope: str, table: str, after: tuple[str, str], limit: int, bytes_max: int) -> RowPage:
        """As `Store` says."""
        return await self._read(delta_reading.rows, (scope, table, after, limit, bytes_max), self.settings)

    async def relationships(self, query: RelationshipQuery) -> RelationshipPage:
        """As `Store` says."""
        return await self._read(ledger_reading.relationships, query, self.settings)

    async def members(self, scope: str, after: str, limit: int) -> MemberPage:
        """As `Store` says."""
        return await self._read(member_reading.members, scope, after, limit, self.settings)

    async def memberships(self, member: str, prefix: str, after: str, limit: int) -> MembershipPage:
        """As `Store` says."""
        return await self._read(member_reading.memberships, member, prefix, after, limit)

    async def member_changes(self, lane: int, after: MemberPlace, limit: int) -> list[MemberChange]:
        """As `Store` says."""
        return await self._read(member_reading.member_changes, lane, after, limit)

    async def erasures(self) -> int:
        """As `Store` says."""
        self._session.check_file()
        return await self._read(_erasures)

    async def consumers(self) -> list[Consumer]:
        """As `Store` says."""
        return await self._read(reading.consumers, self.settings.lanes)

    @property
    def index_memory_bytes(self) -> tuple[int, int]:
        """How many keys the index knows, and what it takes of memory for them, roughly."""
        index = self._session.index
        return index.hot_keys + index.sealed_keys, index.memory_bytes

    # --- threads

    async def _write(self, function: Callable[..., T], *arguments: Any) -> T:
        return await self._run(self._writer, function, *arguments)

    async def _read(self, function: Callable[..., T], *arguments: Any) -> T:
        return await self._run(self._readers, self._in_transaction, function, *arguments)

    async def _run(
        self, executor: ThreadPoolExecutor | Worker | None, function: Callable[..., T], *arguments: Any
    ) -> T:
        if executor is None:
            raise ClosedError(f"the log {self._path} is closed")
        if os.getpid() != self._process:
            raise ClosedError(f"the log {self._path} was opened before this process was forked; open it after")
        if isinstance(executor, Worker):
            return await executor.start(function, *arguments)
        return await asyncio.wrap_future(executor.submit(function, *arguments))

    def _prepared(self, batch: Sequence[Request]) -> Decided | None:
        """What becomes of a batch, decided and written on this thread, but for COMMIT. None where that may take long.

        A thread of its own for it must take the interpreter from the event loop, and the loop must take it back, many
        times a batch: with both busy that costs as much as the work (docs/decisions/0010). What really waits for the
        disk, COMMIT, does not need the interpreter.
        """
        if self._writer is None or not self._writer.is_idle or os.getpid() != self._process:
            return None
        began_s = time.monotonic()
        if began_s < self._prepares_from_s or not _is_short(batch):
            return None
        cpu_s = time.thread_time()
        try:
            return self._session.prepare(batch)
        finally:
            waited_s = time.monotonic() - began_s - (time.thread_time() - cpu_s)
            if waited_s > WAITED_S_MAX:  # for the disk, most likely: the loop must not
                self._prepares_from_s = began_s + APART_S

    def _in_transaction(self, function: Callable[..., T], *arguments: Any) -> T:
        try:
            connection = self._reader_connection()
            connection.execute("BEGIN")
            try:
                return function(connection, *arguments)
            finally:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
        except sqlite3.Error as error:
            self._forget_reader_connection()
            ours = translated(error, self._path)
            if ours is error:
                raise
            raise ours from error
        except DAMAGE_ERRORS as error:
            raise CorruptError(f"{self._path} is damaged: {error}; see `oncelog verify`") from error

    def _reader_connection(self, use: str = "reader") -> Any:
        """This thread's own, one for each use."""
        if not self._driver.is_shared:
            return self._session.connection
        connection = getattr(self._thread, use, None)
        if connection is None:
            connection = connect(self._driver, self._path)
            connection.execute("PRAGMA query_only = ON")
            setattr(self._thread, use, connection)
            self._reader_connections.append(connection)
        return connection

    def _forget_reader_connection(self, use: str = "reader") -> None:
        connection = getattr(self._thread, use, None)
        if connection is not None:
            setattr(self._thread, use, None)
            self._reader_connections.remove(connection)
            connection.close()

    # --- from the write-ahead log into the file, beside the commits

    def _move_if_idle(self) -> None:
        if self._mover is not None and (self._moving is None or self._moving.done()):
            self._moving = asyncio.get_running_loop().create_task(self._move(self._mover))

    async def _move(self, mover: ThreadPoolExecutor) -> None:
        """Else a commit would, and all who wait for it: 10 ms and more, again and again.

        What comes in meanwhile is left for the next time, or for a commit that finds too much of it.
        """
        try:
            async with self._move_turn:
                self._unmoved_records = 0
                await asyncio.wrap_future(mover.submit(self._moved))
        except Exception:  # a commit will try
            logger.debug("the write-ahead log was not moved into the file", exc_info=True)
        await asyncio.sleep(MOVE_PAUSE_S)

    def _moved(self) -> None:
        """One connection moves, and another one reads meanwhile.

        Before SQLite 3.51.3 a checkpoint could mistake the log that a commit has just begun anew for the old one, and
        spoil the file (docs/decisions/0008). While somebody reads, no commit begins it anew; or there is nothing to
        move, and then he is in the way of the checkpoint.
        """
        try:
            reader, mover = self._reader_connection(), self._reader_connection("mover")
            reader.execute("BEGIN")
            try:
                reader.execute(SQL["state"]).fetchone()
                mover.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
            finally:
                reader.execute("ROLLBACK")
        except BaseException:
            self._forget_reader_connection()
            self._forget_reader_connection("mover")
            raise

    # --- the filter of the key index, filled beside the commits

    def _fill_if_needed(self) -> None:
        if self._session.unfiltered is not None and (self._filling is None or self._filling.done()):
            self._filling = asyncio.get_running_loop().create_task(self._fill())

    async def _fill(self) -> None:
        index = self._session.unfiltered
        if index is None:
            return
        try:
            filters = await self._read(read_filters, index.sealed_keys)
            await self._write(index.use_filters, filters)
        except Exception:
            logger.warning("the key filter could not be filled; it is tried again with the next commit", exc_info=True)


def _is_short(batch: Sequence[Request]) -> bool:
    if sum([len(request.items) for request in batch]) > PREPARED_ITEMS_MAX:
        return False
    bodies = [len(item.body) for request in batch for item in request.items if type(item) is Submission]
    return sum(bodies) <= PREPARED_BYTES_MAX


def _size_of(path: str) -> int:
    try:
        return os.stat(path).st_size  # noqa: PTH116 - as in `Driver.mark`
    except OSError:
        return 0


def _erasures(connection: Any) -> int:
    return int(connection.execute(SQL["state"]).fetchone()[1])
