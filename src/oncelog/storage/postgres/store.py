"""The PostgreSQL store: one session that writes, a few that read, and one that listens for notifications."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Final

import asyncpg
from msgspec.structs import replace

from oncelog.background_tasks import BackgroundTasks
from oncelog.core.plan import Validate
from oncelog.core.policy import Policy
from oncelog.core.read_set import ReadSet
from oncelog.core.values import KeyIdentity, RecordAct, Remembered, Request, RequestedSettings, Settings, Snapshot
from oncelog.errors import ClosedError, CorruptError, LogReplacedError
from oncelog.storage.address import redact_address
from oncelog.storage.clock import JUMP_MS_MAX, Clock, ClockMark
from oncelog.storage.metadata import DAMAGE_HINT, EpochRenewal, LogMetadata, Operator, build_leap_request, new_epoch
from oncelog.storage.postgres import notify
from oncelog.storage.postgres.connection import (
    Connection,
    Timeouts,
    connect_behind_barrier,
    is_refused,
    logger,
    pass_barrier,
    terminate_after,
)
from oncelog.storage.postgres.database import create_or_open, load_metadata
from oncelog.storage.postgres.database_clock import CLOCK_SAVE_MS, DatabaseClock
from oncelog.storage.postgres.errors import POSTGRES_ERRORS, is_lost, translate_error
from oncelog.storage.postgres.notify import Notifier
from oncelog.storage.postgres.query_driver import run_query
from oncelog.storage.postgres.session_factory import SessionFactory
from oncelog.storage.postgres.side_state_tables import erase_values
from oncelog.storage.postgres.statements import SQL
from oncelog.storage.postgres.trace_rights import check_trace_rights
from oncelog.storage.postgres.transaction import StoreTransaction, declare_alone, load_key_status
from oncelog.storage.postgres.writer import GetBlocks, RetryDeadline, Work, Writer
from oncelog.storage.queries.sql_store import SqlStore, T, shared_query
from oncelog.storage.queries.statement import QuerySteps, SharedQuery, Statement
from oncelog.storage.record_rows import DAMAGE_ERRORS
from oncelog.storage.store import BatchResult, BatchTraces, Draw, KeyStatus, plan_batch

READERS: Final = 4
MIGRATE_MS: Final = 3_600_000
"""Time limit for opening a log, during which a migration may build indexes on large tables."""
VACUUM_MS: Final = 3_600_000
TRACE_STATEMENTS: Final = ("find_traces", "save_traces", "expire_traces")


class PostgresStore(SqlStore):
    """A log in a database. See `storage.store.Store` for the contract of each method."""

    _view_fetch_rows_max = 1000
    """A high number, because every statement of `read_views` needs a round trip."""
    _erase_values = staticmethod(erase_values)

    def __init__(
        self,
        address: str,
        settings: Settings | RequestedSettings | None = None,
        *,
        clock: Clock | None = None,
        draw: Draw = os.urandom,
        jump_ms_max: int = JUMP_MS_MAX,
        timeouts: Timeouts | None = None,
        keep_clock_ms: int = CLOCK_SAVE_MS,
    ) -> None:
        self._address = address
        self._name = redact_address(address)
        self._requested_settings = settings
        self._draw = draw
        self._timeouts = timeouts or Timeouts()
        self._create_clock = partial(DatabaseClock, clock, jump_ms_max, keep_clock_ms)
        self._clock = self._create_clock()
        self._has_own_clock = clock is not None
        self._store_transaction: StoreTransaction | None = None
        self._sessions = SessionFactory(address, self._timeouts, self._check_same_log)
        self._writer = Writer(self._sessions.create, self._name, self._timeouts)
        self._durable_positions: dict[int, int] = {}
        """Position up to which each lane is known to have reached the standbys that commits wait for."""
        self._epoch_checked_s = 0.0
        """Event-loop time of the newest epoch check, except for checks by commits."""
        self._erasing_transaction = ""
        """Transaction id of the newest erasure, which must be visible to all sessions before VACUUM."""
        self._pool: Any = None
        self._notifies_others = True
        self._notifier: Notifier | None = None
        self._tasks = BackgroundTasks(logger)

    @property
    def _metadata(self) -> LogMetadata:
        if self._store_transaction is None:
            raise ClosedError(f"the log {self._name} has not been opened")
        return self._store_transaction.metadata

    # --- opening and closing

    async def open(self) -> None:
        """See `Store`. Any number of processes may have the log open."""
        retry_deadline = RetryDeadline(self._name, self._timeouts.patience_ms)
        while self._store_transaction is None:
            try:
                self._store_transaction = await self._open_log()
            except POSTGRES_ERRORS as error:
                # Do not retry if no server is listening there: usually, the address is wrong.
                if not is_lost(error) or is_refused(error):
                    raise translate_error(error, self._name) from error
                await retry_deadline.wait(error)
        metadata = self._store_transaction.metadata
        self._pool = await asyncpg.create_pool(
            connect=lambda *_, **__: self._sessions.create(), min_size=0, max_size=READERS, reset=_skip_reset
        )
        if self._notifies_others:
            self._notifier = Notifier(self._sessions.create, self._poll_session, f"oncelog_{metadata.epoch}")
        try:
            await self._recount_usage()
        except BaseException:
            await self.close()
            raise

    async def _open_log(self) -> StoreTransaction:
        connection = await connect_behind_barrier(self._address, self._timeouts)
        try:
            now_ms = self._clock.now_ms(0) if self._has_own_clock else None
            with terminate_after(connection, MIGRATE_MS):
                metadata = await create_or_open(connection, self._name, self._requested_settings, now_ms)
            with terminate_after(connection, self._timeouts.commit_ms):
                if await connection.fetchval("SHOW fsync") != "on":
                    logger.warning("%s runs with fsync off: a power failure can lose commits", self._name)
                await connection.close()
        finally:
            connection.terminate()
        return StoreTransaction(metadata, self._clock, self._draw)

    async def close(self) -> None:
        """See `Store`."""
        pool, self._pool = self._pool, None
        if pool is None:
            return
        await self._tasks.wait()
        if self._notifier is not None:
            await self._notifier.close()
        self._sessions.close()
        await self._writer.close()
        try:
            with terminate_after(pool, self._timeouts.connect_ms):
                await pool.close()
        except POSTGRES_ERRORS:
            pool.terminate()

    def create_sibling(self) -> "PostgresStore":
        """See `Store`. The sibling has its own sessions, like a separate server. It does not wake other servers."""
        store = PostgresStore(self._address, draw=self._draw, timeouts=self._timeouts)
        store._clock = self._create_clock()
        store._store_transaction = StoreTransaction(self._metadata, store._clock, self._draw)
        store._notifies_others = False
        return store

    async def _check_same_log(self, connection: Connection) -> None:
        metadata = await load_metadata(connection, self._name)
        store_transaction = self._store_transaction
        if store_transaction is None or metadata.epoch not in (
            store_transaction.metadata.epoch,
            store_transaction.next_epoch,
        ):
            raise LogReplacedError(
                f"{self._name} contains a different log from the one that was opened, or has a new epoch: "
                "restart this process"
            )

    # --- writing

    async def declare(self, policies: Sequence[Policy]) -> Mapping[str, Policy]:
        """See `Store`."""
        return await self._run_write((), declare_alone, policies)

    async def commit(
        self, batch: Sequence[Request], validate: Validate | None = None, traces: BatchTraces | None = None
    ) -> BatchResult:
        """See `Store`."""
        store_transaction = self._check_open()
        needs = store_transaction.compute_read_set(batch)
        if not needs.lanes:  # every request is malformed
            return plan_batch(batch, Snapshot(settings=self.settings), 0, validate, self._draw, needs.faults)

        result = await self._commit(
            lambda connection: store_transaction.commit(connection, batch, needs, validate, traces), needs.lanes
        )
        if result.lacks_trace_table:
            self._report_dropped_traces()
        if not result.changes.is_empty:
            result.sync_s, result.synced_s = self._writer.sync_s, self._writer.synced_s
            result.prepared_s = result.synced_s - result.sync_s
            self._notify_others()
        return result

    async def enable_traces(self) -> None:
        """See `Store`. Raises SettingsError if the user lacks rights on the table."""
        await self._run_query(check_trace_rights)
        await super().enable_traces()
        await self._tasks.shield(self._writer.add_optional_statements(*map(SQL.__getitem__, TRACE_STATEMENTS)))

    def _notify_others(self) -> None:
        if self._notifier is not None:
            self._notifier.notify()

    async def scrub(self) -> bool:
        """See `Store`. Covers only the tables; the operator cleans the write-ahead log, its archive and the backups."""
        if await self._read(self._vacuum, limit_ms=VACUUM_MS):
            self._erasing_transaction = ""
            return True
        return False

    def free_bytes(self) -> int | None:
        """See `Store`. Returns None, because the server does not report free space."""
        return None

    async def size_bytes(self) -> int | None:
        """See `Store`. Returns the size of the whole database, including all other tables."""
        return int(await self._read(lambda connection: connection.fetchval(SQL["database_size"])))

    async def probe(self) -> None:
        """See `Store`."""

        await self._transact(lambda connection: connection.execute(SQL["touch_state"]))

    async def confirm_clock(self) -> None:
        """See `Store`. The confirmation applies to all processes."""

        async def work(connection: Connection) -> None:
            mark = self._clock.create_mark(await connection.fetchval(SQL["time"]))
            await connection.execute(SQL["count_confirmation"])
            await connection.execute(SQL["forget_clocks"])
            await connection.execute(SQL["save_clock"], mark.boot, mark.elapsed_ms, mark.time_ms)

        await self._transact(work)

    async def renew_epoch(self, above: int | None = None, operator: Operator = Operator()) -> EpochRenewal:
        """See `Store`. Locks all lanes."""
        store_transaction = self._check_open()
        epoch = store_transaction.next_epoch = new_epoch()
        lanes = range(self.settings.lanes + 1)

        async def work(connection: Connection) -> BatchResult:
            state = await store_transaction.load_state(connection, lanes)
            now_ms = self._clock.get_latest_ms(state.database_ms, state.confirmations, state.clock)
            request, _ = build_leap_request(state.heads, self._metadata, above, now_ms, epoch, operator=operator)
            result = await store_transaction.commit(connection, [request])
            await connection.execute(SQL["set_epoch"], epoch)
            return result

        result = await self._commit(work, lanes)
        renewal = EpochRenewal(self.epoch, epoch, result.changes.leap)
        store_transaction.metadata = replace(store_transaction.metadata, epoch=epoch)
        return renewal

    # --- reading

    async def find_keys(self, identities: Sequence[KeyIdentity]) -> list[Remembered | None]:
        """See `Store`."""
        store_transaction = self._check_open()
        needs = ReadSet(keys=set(identities))
        snapshot = await self._read(lambda connection: store_transaction.load_snapshot(connection, needs, {}))
        return [snapshot.keys.get(identity) for identity in identities]

    async def get_key_status(self, identity: KeyIdentity) -> KeyStatus:
        """See `Store`."""
        return await self._attach_trace(await self._load_key_status(identity))

    @shared_query
    def _load_key_status(self, identity: KeyIdentity) -> QuerySteps[KeyStatus]:
        key_status = yield from load_key_status(self._metadata, identity)
        mark, _ = yield from self._propose_mark()
        return replace(key_status, time_ms=mark.time_ms)

    def listen(self, wake: Callable[[], None]) -> None:
        """See `Store`."""
        if self._notifier is not None:
            self._notifier.listen(wake)

    async def _run_query(self, query: SharedQuery[T], *arguments: Any) -> T:
        return await self._read(run_query, query, *arguments)

    def _erase_bodies(self, lane: int, positions: Sequence[int], act: RecordAct | None) -> QuerySteps[int]:
        erased = yield from super()._erase_bodies(lane, positions, act)
        if erased:
            [(self._erasing_transaction,)] = yield Statement("own_transaction")
        return erased

    async def _run_write(self, lanes: Collection[int], query: SharedQuery[T], *arguments: Any) -> T:
        store_transaction = self._check_open()

        async def work(connection: Connection) -> T:
            await self._check_epoch(connection)
            return await run_query(connection, query, *arguments, commit=store_transaction.commit)

        return await self._transact(work, lanes)

    def _propose_mark(self) -> QuerySteps[tuple[ClockMark, Exception | None]]:
        [(database_ms, _, confirmations, elapsed_ms, time_ms)] = yield Statement("look_at_state", self._clock.boot)
        return self._clock.propose(database_ms, confirmations, (elapsed_ms, time_ms))

    # --- internals

    def _check_open(self) -> StoreTransaction:
        if self._pool is None or self._store_transaction is None:
            raise ClosedError(f"the log {self._name} is closed")
        self._store_transaction.check_renewed()
        return self._store_transaction

    async def _poll_session(self, connection: Connection) -> None:
        """Check that the server and the epoch are unchanged. The notifier calls this periodically for readers."""
        await self._sessions.poll(connection)
        await self._check_epoch(connection)

    async def _check_epoch(self, connection: Connection) -> None:
        """Raise LogReplacedError if another process has renewed the epoch.

        Commits check the epoch themselves when they read the heads.
        """
        self._check_open().check_epoch(await connection.fetchval(SQL["epoch"]))
        self._epoch_checked_s = asyncio.get_running_loop().time()

    async def _vacuum(self, connection: Connection) -> bool:
        """Run VACUUM. Returns False while a transaction can still see erased rows, because VACUUM then keeps them."""
        self._erasing_transaction = self._erasing_transaction or await connection.fetchval(SQL["own_transaction"])
        if not await connection.fetchval(SQL["is_behind_all"], self._erasing_transaction):
            return False
        try:
            await connection.execute("VACUUM oncelog_records, oncelog_entities")
        except asyncpg.LockNotAvailableError:  # another VACUUM is running
            return False
        return True

    async def _commit(self, work: Work[BatchResult], lanes: Collection[int]) -> BatchResult:
        """Run a transaction that plans and stores a batch. Updates memory once the transaction is durable."""
        store_transaction = self._check_open()
        result = await self._transact(work, lanes, lambda result: result.sealed.blocks)
        store_transaction.confirm()
        self._record_durable({lane: head.position for lane, head in result.changes.heads.items()})
        return result

    async def _transact(self, work: Work[T], lanes: Collection[int] = (), get_blocks: GetBlocks[T] = lambda _: ()) -> T:
        """Run `Writer.transact` to completion. Cancelling the caller must not cancel the statement on the server."""
        self._check_open()
        return await self._tasks.shield(self._writer.transact(lanes, work, get_blocks))

    async def _read(self, function: Callable[..., Awaitable[T]], *arguments: Any, limit_ms: int = 0) -> T:
        """Run a read to completion. Cancelling the caller must not cancel the statement on the server."""
        self._check_open()
        return await self._tasks.shield(self._read_with_retries(function, *arguments, limit_ms=limit_ms))

    async def _read_with_retries(self, function: Callable[..., Awaitable[T]], *arguments: Any, limit_ms: int) -> T:
        """Run a read on a pooled session, and retry on another one if the session is lost."""
        retry_deadline = RetryDeadline(self._name, self._timeouts.patience_ms)
        while True:
            self._check_open()
            try:
                async with self._pool.acquire(timeout=self._timeouts.patience_ms / 1000) as connection:
                    # A network that has gone silent must not block readers for long.
                    with terminate_after(connection, limit_ms or self._timeouts.transaction_ms):
                        result = await function(connection, *arguments)
                        # This is the only check in a process that does not follow the log.
                        if asyncio.get_running_loop().time() - self._epoch_checked_s >= notify.POLL_MS / 1000:
                            await self._check_epoch(connection)
                        await self._check_durable(connection)
                        return result
            except POSTGRES_ERRORS as error:
                if self._pool is None:
                    raise ClosedError(f"the log {self._name} is closed") from error
                if not is_lost(error):
                    raise translate_error(error, self._name) from error
                await retry_deadline.wait(error)
            except DAMAGE_ERRORS as error:
                raise CorruptError(f"{self._name} is damaged: {error}; {DAMAGE_HINT}") from error

    async def _check_durable(self, connection: Connection) -> None:
        """If commits wait for standbys, wait until everything that the session has read is on a standby.

        A commit's wait for its standby can be cut short, for example when a server that was cut off is shut down. The
        commit is then visible to all readers, and may be lost with the server. Records that this process has not
        acknowledged yet therefore reach readers only after a later barrier.
        """
        if not self._sessions.waits_for_standbys:
            return
        seen: dict[int, int] = dict(await connection.fetch(SQL["positions"]))
        if any(position > self._durable_positions.get(lane, 0) for lane, position in seen.items()):
            await pass_barrier(connection)
            self._record_durable(seen)

    def _record_durable(self, positions: Mapping[int, int]) -> None:
        for lane, position in positions.items():
            self._durable_positions[lane] = max(position, self._durable_positions.get(lane, 0))


async def _skip_reset(_connection: Connection) -> None:
    """Do nothing between two uses of a session: reads leave no state in it."""
