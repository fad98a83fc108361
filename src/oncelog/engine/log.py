"""The log that an application opens.

async with oncelog.open("app.db") as log:
    verdict = await log.submit(oncelog.event(id, {"type": "order.placed"}, ["orders"]))
    async for record in log.follow(partition="orders"):
        ...
"""

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from types import TracebackType
from typing import Final, Self
from uuid import UUID

from msgspec.structs import replace

from oncelog.core.canonical import canonical
from oncelog.core.identity import check_text, compute_lane, normal_partitions
from oncelog.core.limits import PARTITIONS_MAX, STORED_INTEGER_MAX
from oncelog.core.plan import Validate
from oncelog.core.policy import BUILT_IN_POLICIES, DELTAS, EVENTS, LEDGER, Policy
from oncelog.core.proof import encode_record_header, hash_leaf, prove
from oncelog.core.read_set import ReadSet
from oncelog.core.rules.audit import (
    APPLICATION_ACTOR,
    COMPACT,
    ERASE,
    QUOTA_CHANGE,
    READ_ONLY_OFF,
    READ_ONLY_ON,
    add_detail,
)
from oncelog.core.tenants import Tenant, Usage, check_tenants
from oncelog.core.values import (
    Applied,
    FoldRows,
    Item,
    KeyIdentity,
    LaneHead,
    Mode,
    Receipt,
    Record,
    RecordAct,
    Refused,
    Remembered,
    Request,
    RequestedSettings,
    SetCursor,
    Settings,
    Verdict,
)
from oncelog.deprecation import alias_method, alias_property
from oncelog.engine.answer_cache import AnswerCache
from oncelog.engine.audit import (
    LOG_ACTOR,
    UNRECORDABLE,
    ActQueue,
    AuditFilter,
    AuditPage,
    AuditScan,
    decode_cursor,
    describe_quota_change,
    encode_cursor,
)
from oncelog.engine.committer import Committer, VerdictSink
from oncelog.engine.compaction import COMPACTION_CONSUMER, build_fold, sweep_tombstones
from oncelog.engine.follower import Follower
from oncelog.engine.leases import LeaseManager
from oncelog.engine.limits import Limits
from oncelog.engine.member_tailer import MemberListener
from oncelog.engine.outcome import Outcome, Status, describe_outcome
from oncelog.engine.read_results import Compacted, Cursor, Proven, Reading, format_order
from oncelog.engine.result_cache import ResultCache, WorkResult
from oncelog.engine.state_reader import StateReader
from oncelog.engine.subscription import Subscription
from oncelog.engine.tailer import RecordListener, Tailers
from oncelog.engine.write_gate import DiskLimits, ReadOnlyReason, WriteGate
from oncelog.errors import (
    ClosedError,
    HistoryChangedError,
    LogReplacedError,
    PolicyError,
    SettingsError,
    StoreUnavailableError,
)
from oncelog.file_modes import OWNER_ONLY, check_file_mode
from oncelog.storage.address import POSTGRES_TIMEOUTS, create_postgres_store, is_address
from oncelog.storage.clock import Clock, SystemClock
from oncelog.storage.memory import MemoryStore
from oncelog.storage.sqlite import SqliteStore
from oncelog.storage.sqlite.database_file import SqliteDriver
from oncelog.storage.store import BatchResult, Consumer, EncodeViews, Query, RecordViewPage, Store

logger: Final = logging.getLogger("oncelog.engine")

ERASE_RECORDS = 500
"""Erased in one transaction."""
SCRUB_ATTEMPTS = 200
SCRUB_PAUSE_S = 0.05
"""How often, in all ten seconds, the write-ahead log is tried to be emptied between the commits."""
FOLLOW_RECORDS = 500
ERASURES_POLL_MS = 1000
"""How often a log with answers in memory looks whether another process has erased something."""


class Log:
    """One log in this process. Made by `oncelog.open`, used in one event loop, inside `async with`."""

    def __init__(  # noqa: PLR0913 - each of them is asked for by its name
        self,
        store: Store,
        *,
        policies: Sequence[Policy] = (),
        validate: Validate | None = None,
        limits: Limits | None = None,
        clock: Clock | None = None,
        room: DiskLimits | None = None,
        tenants: Sequence[Tenant] | None = None,
        actor: str = APPLICATION_ACTOR,
    ) -> None:
        if tenants is not None:
            check_tenants(tenants)
        self._tenants = tenants
        self._actor = actor
        self._write_gate = WriteGate(store, room)
        self._store = store
        self._limits = limits or Limits()
        self._clock = clock or SystemClock()
        self._declared_policies = (*(policy for policy in BUILT_IN_POLICIES if policy is not LEDGER), *policies)
        self._requested_ledger = next((policy for policy in policies if policy.name == LEDGER.name), None)
        self._policies: Mapping[str, Policy] = {}
        self._cache = AnswerCache(self._limits.cache_entries_max, self._limits.cache_ttl_ms)
        self._tailers = Tailers(store, self._limits)
        self._committer = Committer(
            store, self._cache, self._clock, self._limits, validate, self._on_commit, self._write_gate
        )
        self._results = ResultCache(self._clock, self._limits.results_bytes_max, self._limits.cache_ttl_ms)
        self._lease_manager = LeaseManager(self._submit_work, store, self._results, self._cache_result)
        self._act_queue = ActQueue(
            self._submit_work, self._clock, lambda: ReadOnlyReason.FULL in self._write_gate.reasons
        )
        self._write_gate.on_change = self._record_read_only
        self._state_reader = StateReader(store, self._cache, self._tailers, self._limits, self._check_open)
        self._poll_task: asyncio.Task[None] | None = None
        self._close_task: asyncio.Task[None] | None = None
        self._is_open = False
        self._was_opened = False
        self._evictions = 0
        self._evicted_clients = 0

    # --- opening and closing

    async def __aenter__(self) -> Self:
        if self._was_opened:
            raise ClosedError("a log is opened once; make another with `oncelog.open(…)`")
        await self._store.open()
        try:
            await self._declare_policies()
            self._cache.erasures = await self._store.erasures()
            if self._tenants is not None:
                await self._replace_tenants(self._tenants, self._actor)
            await self._write_gate.start()
        except BaseException:
            await self._store.close()
            raise
        self._is_open = self._was_opened = True
        self._act_queue.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Takes nothing more, finishes what was accepted, ends all followers, lets the store go."""
        if self._is_open:
            self._is_open = False
            self._close_task = asyncio.get_running_loop().create_task(self._close())
        if self._close_task is not None:
            await asyncio.shield(self._close_task)  # who does not want to wait for it does not keep it from being done

    async def _close(self) -> None:
        try:
            await self._lease_manager.close()
            await self._act_queue.close()
            await self._committer.close()
        finally:
            await self._write_gate.stop()
            if self._poll_task is not None:
                self._poll_task.cancel()
            await self._tailers.close()
            await self._store.close()

    @property
    def epoch(self) -> str:
        """The history that cursors belong to: new when a backup is restored."""
        return self._store.epoch

    async def previous_epochs(self) -> tuple[str, ...]:
        """Return the epochs that restores have ended. The history of this log continues theirs."""
        return await self._store.previous_epochs()

    @property
    def settings(self) -> Settings:
        """What the log was made with."""
        return self._store.settings

    @property
    def limits(self) -> Limits:
        """What this process holds at most."""
        return self._limits

    @property
    def policies(self) -> Mapping[str, Policy]:
        """All policies that the log knows, by name."""
        return self._policies

    @property
    def leases(self) -> LeaseManager:
        """Work that is done once. `oncelog.once`, `Runs` and the middleware stand on it."""
        return self._lease_manager

    @property
    def state(self) -> StateReader:
        """What the records have left: clients, entities, relationships, blocks."""
        return self._state_reader

    # --- for operators

    @property
    def write_gate(self) -> WriteGate:
        """Whether new writes are taken, why not, and how full the disk is: for servers."""
        return self._write_gate

    books = alias_property("Log.books", "state")
    guard = alias_property("Log.guard", "write_gate")
    read_brief = alias_method("Log.read_brief", "read_views")
    evicted_clients = alias_property("Log.evicted_clients", "client_evictions")
    queued = alias_property("Log.queued", "queue_length")
    settled = alias_method("Log.settled", "wait_idle")
    works = alias_property("Log.works", "leases")

    @property
    def evictions(self) -> int:
        """Evictions at the positions that this process has committed: for servers."""
        return self._evictions

    @property
    def client_evictions(self) -> int:
        """Entries of forgotten clients that this process has deleted from the store, in later commits: for servers."""
        return self._evicted_clients

    @property
    def read_only(self) -> str:
        """Why this process takes no new writes for now; empty if it does."""
        return self._write_gate.message

    def set_read_only(self, is_read_only: bool = True, actor: str = APPLICATION_ACTOR) -> None:
        """Whether this process takes new writes. What is known is answered all the same, and all can be read."""
        self._write_gate.set_read_only(is_read_only=is_read_only, actor=actor)

    def _record_read_only(self, is_read_only: bool, reason: str, actor: str) -> None:
        act = READ_ONLY_ON if is_read_only else READ_ONLY_OFF
        self.record(RecordAct(act=act, actor=actor or LOG_ACTOR, details=canonical({"reason": reason})))

    def record(self, act: RecordAct) -> None:
        """Record an act that happened outside of the log, soon: it waits in memory while the log cannot be written."""
        self._act_queue.put(act)

    async def audit(self, after: str = "", limit: int = 100, wanted: AuditFilter | None = None) -> AuditPage:
        """Return a page of the acts that were recorded, in all lanes, by log time.

        `after` is the text of an earlier page's place (`audit_cursor`). Raises ValueError and HistoryChangedError for
        another one.
        """
        self._check_open()
        scan = AuditScan(decode_cursor(after, self.epoch, self.settings.lanes), limit, wanted or AuditFilter())
        while True:
            requested = scan.next_read_count
            page = scan.add(await self._store.internal_records(scan.after, requested), requested)
            if page is not None:
                return page

    def audit_cursor(self, page: AuditPage) -> str:
        """Return the text with which the next page begins."""
        return encode_cursor(self.epoch, page.after)

    async def set_tenants(self, tenants: Sequence[Tenant], actor: str = APPLICATION_ACTOR) -> bool:
        """The log has these quotas from now on, whoever writes to it. False if they are those that it has.

        What a new tenant has already is counted, once: that takes a look at every record.
        """
        self._check_open()
        check_tenants(tenants)
        return await self._replace_tenants(tenants, actor)

    async def _replace_tenants(self, tenants: Sequence[Tenant], actor: str) -> bool:
        before = [tenant for tenant, _ in await self._store.usage()]
        act = RecordAct(act=QUOTA_CHANGE, actor=actor, details=canonical(describe_quota_change(before, tenants)))
        try:
            is_changed = await self._store.set_tenants(tenants, act)
        except UNRECORDABLE:
            is_changed = await self._store.set_tenants(tenants)
            if is_changed:
                self.record(act)
        if is_changed and before:
            logger.warning(
                "the quotas of the log are others from now on: of %d tenants %d are gone or changed, and there are %d",
                len(before),
                len(set(before) - set(tenants)),
                len(tenants),
            )
        return is_changed

    async def usage(self) -> list[tuple[Tenant, Usage]]:
        """The tenants that the log counts for, and what each of them has."""
        self._check_open()
        return await self._store.usage()

    # --- writing

    async def submit(self, item: Item) -> Verdict:
        """What becomes of a write, once that is durable: Committed, Replayed or Refused; never an exception for it.

        Raises StoreUnavailableError when the disk fails, and ClockJumpedError: submit again under the same identity.
        """
        if not self._has_policy(item):
            await self._declare_policy(item)
        outcome = self._committer.submit(item)
        return await outcome if isinstance(outcome, asyncio.Future) else outcome

    def submit_nowait(self, item: Item, receiver: VerdictSink[Verdict]) -> Verdict | None:
        """As `submit`, for servers that have no task to wait in: the verdict if it is known already, else None.

        Then the receiver is told it when it is durable. The policy must be one that the log knows.
        """
        if not self._has_policy(item):
            raise PolicyError("the policy must be declared when the log is opened")
        return self._committer.submit(item, receiver)

    def submit_many_nowait(
        self,
        items: Sequence[Item],
        receiver: VerdictSink[list[Verdict]],
        mode: Mode = Mode.EACH,
        *,
        is_admitted_whole: bool = False,
    ) -> list[Verdict] | None:
        """As `submit_many`, in the same way."""
        items = tuple(items)
        if not all(map(self._has_policy, items)):
            raise PolicyError("the policy must be declared when the log is opened")
        return self._committer.submit_request(Request(items, mode, is_admitted_whole), receiver)

    async def _submit_work(self, item: Item) -> Verdict:
        """As `submit`, also while the log is being closed: what was begun is to be ended."""
        if not self._was_opened:
            self._check_open()
        if not self._is_policy_known(item):
            await self._declare_policy(item)
        outcome = self._committer.submit(item)
        return await outcome if isinstance(outcome, asyncio.Future) else outcome

    async def submit_many(
        self, items: Sequence[Item], mode: Mode = Mode.EACH, *, is_admitted_whole: bool = False
    ) -> list[Verdict]:
        """One verdict an item, in order. `mode` says what a refused one means for the others.

        With `is_admitted_whole`, nothing of the request happens where a rate or quota refuses one new item.
        """
        items = tuple(items)
        for item in items:
            if not self._has_policy(item):
                await self._declare_policy(item)
        outcome = self._committer.submit_request(Request(items, mode, is_admitted_whole))
        return await outcome if isinstance(outcome, asyncio.Future) else outcome

    def recall(self, policy: Policy, scope: str, keys: Sequence[bytes]) -> list[Remembered] | None:
        """What is remembered of some keys, if all of them are in memory: for servers, which have checked who asks."""
        self._check_open()
        return self._committer.recall(policy, scope, keys)

    async def erase(
        self,
        *,
        key: bytes | UUID | str | None = None,
        policy: Policy = EVENTS,
        scope: str | None = None,
        client: str = "",
        partition: str | None = None,
        stream: str | None = None,
        actor: str = APPLICATION_ACTOR,
    ) -> int:
        """Erases the content of records: of one identity, of a partition, or of a stream. Gives how many had one.

        Position, identity, fingerprint and hashes stay; a retry gets its answer, marked as erased. Every transaction
        that erases something records it, with the `actor`. `scope` is that of the key, as for `lookup`.
        """
        self._check_open()
        if (key is not None) + (partition is not None) + (stream is not None) != 1:
            raise ValueError("erase takes one of key, partition and stream")
        try:
            if key is not None:
                if scope is None and policy.name == EVENTS.name:
                    await self.lookup(key)  # raises LookupError if the id may be a tenant's
                erased = await self._erase_identity(_build_identity(policy, scope or "", client, key), actor)
            elif stream is not None:
                act = RecordAct(act=ERASE, actor=actor, scope=stream, target=stream)
                erased = await self._erase_all(Query(stream=stream, limit=ERASE_RECORDS), act)
            else:
                # Streams may have records in it too, in whatever lanes they are.
                partitions = normal_partitions((partition or "",))
                queries = [Query(lane=lane, partitions=partitions, limit=ERASE_RECORDS) for lane in await self.heads()]
                act = RecordAct(act=ERASE, actor=actor, target=partitions[0] if partitions else "")
                erased = sum([await self._erase_all(query, replace(act, lane=query.lane)) for query in queries])
        finally:
            self._clear_caches()
        await self._scrub()
        return erased

    async def compact(  # noqa: PLR0913 - each of them is asked for by its name
        self,
        scope: str,
        *,
        upto: int | None = None,
        keep: int | None = None,
        limit: int = 2**53,
        tombstone_age_ms: int | None = None,
        after_row: tuple[str, str] = ("", ""),
        rows_max: int = 2**53,
        actor: str = APPLICATION_ACTOR,
    ) -> Compacted:
        """Drop the bodies of a stream's deltas up to a sequence, or of all but the newest; then drop old deleted rows.

        Ids, sequences, hashes and the rows that exist stay. It can be repeated, goes on where it was interrupted, and
        stops at `limit`. A deleted row is dropped when its DELETE has no body any more, was committed
        `tombstone_age_ms` ago (`limits.tombstone_age_ms` if not given), and was read by every named consumer of the
        stream. At most `rows_max` rows are read: pass `next_row` of the result on as `after_row` to read the others.
        """
        self._check_open()
        if (upto is None) == (keep is None):
            raise ValueError("compact takes one of upto and keep")
        age_ms = self._limits.tombstone_age_ms if tombstone_age_ms is None else tombstone_age_ms
        if type(age_ms) is not int or not 0 <= age_ms <= STORED_INTEGER_MAX:
            raise ValueError(f"tombstone_age_ms must be a whole number from 0 to {STORED_INTEGER_MAX}, not {age_ms!r}")
        identity = (scope, COMPACTION_CONSUMER)
        read_set = ReadSet(lanes={compute_lane(scope, self.settings.lanes)}, streams={scope}, consumers={identity})
        known = (await self._store.side_state(read_set)).snapshot
        newest, after = known.streams.get(scope, 0), known.consumers.get(identity, 0)
        if keep is not None:
            wanted = await self._store.sequence_before(scope, newest, max(0, _check_integer(keep, "keep")) + 1)
        else:
            wanted = min(newest, _check_integer(upto, "upto"))
        bound = min(wanted, await self._store.sequence_after(scope, after, max(0, _check_integer(limit, "limit"))))
        erased = 0
        if bound > after:
            try:
                act = RecordAct(act=COMPACT, actor=actor, scope=scope, details=canonical({"upto": bound}))
                query = Query(stream=scope, after=after, upto=bound, limit=ERASE_RECORDS)
                erased = await self._erase_all(query, act, policy=DELTAS.name)
            finally:
                self._clear_caches()
            await self._scrub()
            await self._submit_work(SetCursor(COMPACTION_CONSUMER, bound, scope))
            if bound < wanted:
                return Compacted(erased, bound, has_more=True)
        upto = max(bound, after)
        if upto == 0:
            return Compacted(0, 0)
        sweep = await sweep_tombstones(
            self._store,
            self._submit_work,
            scope,
            upto=upto,
            age_ms=age_ms,
            after=after_row,
            rows_max=rows_max,
            actor=actor,
        )
        return Compacted(erased, upto, dropped=sweep.dropped, next_row=sweep.next_row, held_by=sweep.held_by)

    async def _scrub(self) -> None:
        """Also where nothing was left to erase: the last time may have failed here."""
        for _ in range(SCRUB_ATTEMPTS):
            if await self._store.scrub():
                return
            await asyncio.sleep(SCRUB_PAUSE_S)
        raise StoreUnavailableError(
            "it is erased, but a reader (a backup, a verification) holds on to the log as it was, so that its bytes "
            "are still on the disk; erase it again when the reader is done"
        )

    async def _erase_identity(self, identity: KeyIdentity, actor: str) -> int:
        key_status = await self._store.get_key_status(identity)
        record = key_status.record
        if record is None:
            return 0
        act = RecordAct(
            act=ERASE,
            actor=actor,
            scope=record.scope if record.sequence else "",
            lane=record.lane,
            target=record.key.hex(),
            details=canonical({"policy": record.policy}),
        )
        return await self._erase(record.lane, key_status.positions, act)

    async def _erase(self, lane: int, positions: Sequence[int], act: RecordAct) -> int:
        """Erase bodies and record it in one transaction, or record it later if it cannot be recorded now."""
        try:
            return await self._store.erase(lane, positions, act)
        except UNRECORDABLE:
            erased = await self._store.erase(lane, positions)
            if erased:
                self.record(add_detail(act, "records", erased))
            return erased

    async def _erase_all(self, query: Query, act: RecordAct, policy: str | None = None) -> int:
        erased = 0
        while True:
            page = await self._store.read(query)
            full = [
                page_record
                for page_record in page.records
                if not page_record.erased and policy in (None, page_record.policy)
            ]
            if full and act.act == COMPACT:
                await self._commit_fold(build_fold(query.stream or "", full))
            if full:
                erased += await self._erase(full[0].lane, [record.position for record in full], act)
                self._tailers.drop_buffered()
            if not page.has_more:
                return erased
            query = replace(query, after=page.next, upto=page.upto)

    async def _commit_fold(self, fold: FoldRows) -> None:
        """Commit the digests of rows, before the bodies of their deltas are dropped.

        Without them, as on a full disk, `verify` cannot check these rows; the bodies are dropped all the same.
        """
        if not fold.rows:
            return
        with suppress(*UNRECORDABLE):
            verdict = await self._submit_work(fold)
            if not isinstance(verdict, Applied):
                raise TypeError(f"a fold was answered with {verdict!r}")

    # --- reading

    async def read(
        self,
        *,
        partition: str | None = None,
        partitions: Sequence[str] = (),
        stream: str | None = None,
        lane: int = 0,
        after: int | Cursor | str = 0,
        upto: int | None = None,
        limit: int = 500,
    ) -> Reading:
        """A page of records after a cursor: of one partition or several, of a stream, or of a whole lane.

        Raises HistoryChangedError for a cursor of another epoch, or one that is ahead of the log.
        """
        self._check_open()
        self._check_lane(lane)
        page = await self._store.read(
            Query(
                lane=lane,
                partitions=self._normalize_partitions(partition, partitions, stream),
                stream=stream,
                after=await self._resolve_cursor(after, stream, lane),
                upto=None if upto is None else _check_integer(upto, "upto"),
                limit=max(1, min(_check_integer(limit, "limit"), self._limits.page_records_max)),
                bytes_max=self._limits.page_bytes_max,
            )
        )
        return Reading(
            page.records,
            Cursor(page.next, self.epoch, format_order(stream, lane)),
            page.upto,
            page.has_more,
            page.newest,
        )

    async def read_views(
        self, show: EncodeViews, *, partitions: Sequence[str], after: int = 0, upto: int | None = None, limit: int = 500
    ) -> RecordViewPage:
        """As `read`, of events in partitions of lane 0, as `show` makes them of what readers are shown: for servers."""
        self._check_open()
        query = Query(
            partitions=self._normalize_partitions(None, partitions, None),
            after=after,
            upto=upto,
            limit=max(1, min(limit, self._limits.page_records_max)),
            bytes_max=self._limits.page_bytes_max,
        )
        return await self._store.read_views(query, EVENTS.name, show)

    def follow(
        self,
        *,
        partition: str | None = None,
        partitions: Sequence[str] = (),
        stream: str | None = None,
        lane: int = 0,
        after: int | Cursor | str = 0,
        consumer: str | None = None,
    ) -> Follower:
        """All records after a cursor, then those to come, each once and in order, until it is closed.

        With `consumer` it begins where that consumer's kept cursor is (`commit_cursor`).
        """
        return Follower(
            self._follow(self._normalize_partitions(partition, partitions, stream), stream, lane, after, consumer)
        )

    async def _follow(
        self,
        partitions: tuple[str, ...],
        stream: str | None,
        lane: int,
        after: int | Cursor | str,
        consumer: str | None,
    ) -> AsyncGenerator[Record, None]:
        async with aclosing(self._follow_batches(partitions, stream, lane, after, consumer)) as batches:
            async for records in batches:
                for record in records:
                    yield record

    def follow_several(
        self, *, partitions: Sequence[str] = (), stream: str | None = None, after: int | Cursor | str = 0
    ) -> AsyncGenerator[Sequence[Record], None]:
        """As `follow`, of lane 0 or a stream, with all that has come at a time: for servers. Close it (`aclosing`)."""
        return self._follow_batches(self._normalize_partitions(None, partitions, stream), stream, 0, after, None)

    async def _follow_batches(
        self,
        partitions: tuple[str, ...],
        stream: str | None,
        lane: int,
        after: int | Cursor | str,
        consumer: str | None,
    ) -> AsyncGenerator[Sequence[Record], None]:
        self._check_open()
        self._check_lane(lane)
        if consumer is not None:
            if lane:
                raise ValueError("a consumer keeps a cursor of lane 0 or of a stream, not of another lane")
            after = await self.cursor_of(consumer, stream or "") or after
        query = Query(
            lane=lane,
            partitions=partitions,
            stream=stream,
            after=await self._resolve_cursor(after, stream, lane),
            limit=min(FOLLOW_RECORDS, self._limits.page_records_max),
            bytes_max=self._limits.page_bytes_max,
        )
        async with aclosing(self._tailers.follow(query, self._store.settings.lanes)) as batches:
            async for records in batches:
                yield records

    async def subscribe(
        self, *, partitions: Sequence[str] = (), stream: str | None = None, lane: int = 0
    ) -> Subscription:
        """The live part alone, with a bounded queue that the caller empties: for servers that feed many readers."""
        self._check_open()
        self._check_lane(lane)
        if stream is not None:
            lane = compute_lane(stream, self.settings.lanes)
        return await self._tailers.subscribe(lane, self._normalize_partitions(None, partitions, stream), stream)

    async def listen(self, listener: RecordListener, lane: int = 0) -> int:
        """Hands every record of a lane after the position that it gives to the listener, in order, as they come.

        For a server that feeds its readers itself: no queue, no task, no loss. Call `unlisten` when it is over.
        """
        self._check_open()
        self._check_lane(lane)
        return await self._tailers.listen(lane, listener)

    def unlisten(self, listener: RecordListener, lane: int = 0) -> None:
        """The listener gets nothing more."""
        self._tailers.unlisten(lane, listener)

    async def listen_members(self, listener: MemberListener) -> None:
        """Tells the listener from now on of whoever comes, goes or acknowledges something, in whatever stream.

        What this process commits is told at once and before the records that came with it, what others do soon.
        """
        self._check_open()
        await self._tailers.listen_members(listener)

    def watch_commits(self, watcher: Callable[[int, float], None]) -> None:
        """Tells the watcher of every group commit: how many writes, how many seconds. It must not raise."""
        self._committer.on_batch = watcher

    async def wait_idle(self) -> None:
        """Wait until no write waits for its commit."""
        await self._committer.wait_idle()

    @property
    def queue_length(self) -> int:
        """Writes that wait for their commit."""
        return self._committer.queue_length

    async def lookup(
        self, key: bytes | UUID | str, *, policy: Policy = EVENTS, scope: str | None = None, client: str = ""
    ) -> Outcome:
        """Return what became of an identity, and why.

        Without a `scope` the identity is looked up in that of the whole log. If tenants of the log have separate ids,
        an unknown event may belong to one of them: then this raises LookupError. Pass
        `event_scope("acme")` for events of the tenant `acme`, or `""` for events of no such tenant.
        """
        self._check_open()
        outcome = describe_outcome(
            policy, await self._store.get_key_status(_build_identity(policy, scope or "", client, key))
        )
        if scope is None and outcome.status is Status.UNKNOWN and policy.name == EVENTS.name:
            await self._check_no_separate_ids()
        return outcome

    async def _check_no_separate_ids(self) -> None:
        owners = [tenant.prefix for tenant, _ in await self._store.usage() if tenant.own_ids]
        if owners:
            raise LookupError(
                f"{len(owners)} tenants of this log have separate ids, and the event may belong to one of them: pass "
                f'scope, such as oncelog.event_scope("{owners[0]}"), or scope="" for an event of no such tenant'
            )

    async def prove(self, receipt: Receipt) -> Proven:
        """The proof that a record stands in the chain. Raises LookupError for a receipt of another log."""
        self._check_open()
        block, evidence = await self._store.block(receipt.lane, receipt.height)
        index = receipt.position - block.first_position
        if not 0 <= index < len(evidence) or evidence[index].record.receipt != receipt:
            raise LookupError(f"position {receipt.position} of lane {receipt.lane} is not this log's: {receipt}")
        leaves = [
            hash_leaf(encode_record_header(evidence_entry.record), evidence_entry.body_hash)
            for evidence_entry in evidence
        ]
        found = evidence[index]
        return Proven(found.record, found.salt, found.body_hash, prove(leaves, index), block)

    async def heads(self) -> Mapping[int, LaneHead]:
        """The newest of everything, lane by lane."""
        self._check_open()
        return await self._store.heads()

    # --- named consumers

    async def commit_cursor(
        self, consumer: str, cursor: int | Cursor | str | None, *, stream: str = "", rewind: bool = False
    ) -> Applied | Refused:
        """Keeps a consumer's cursor in the log: it moves forward only, unless told to rewind. None removes it."""
        position = None if cursor is None else await self._resolve_cursor(cursor, stream or None)
        verdict = await self.submit(SetCursor(consumer, position, stream, rewind))
        if not isinstance(verdict, Applied | Refused):
            raise TypeError(f"a cursor was answered with {verdict!r}")
        return verdict

    async def cursor_of(self, consumer: str, stream: str = "") -> Cursor | None:
        """The cursor that a consumer kept."""
        for known_consumer in await self.consumers():
            if (known_consumer.name, known_consumer.scope) == (consumer, stream):
                return Cursor(known_consumer.cursor, self.epoch, format_order(stream or None, 0))
        return None

    async def consumers(self) -> list[Consumer]:
        """All named consumers, with how far each is behind."""
        self._check_open()
        return await self._store.consumers()

    async def confirm_clock(self) -> None:
        """Believes the wall clock as it is, after a jump stopped commits."""
        self._check_open()
        await self._store.confirm_clock()

    # --- inside

    def _check_open(self) -> None:
        if not self._is_open:
            raise ClosedError("the log is not open; use it inside `async with oncelog.open(…)`")

    def _has_policy(self, item: Item) -> bool:
        if not self._is_open:
            self._check_open()
        return self._is_policy_known(item)

    def _is_policy_known(self, item: Item) -> bool:
        """Whether the item's policy, if it has one, is the one that the log knows by its name."""
        policy: Policy | None = getattr(item, "policy", None)
        if policy is None:
            return True
        known = self._policies.get(policy.name)
        return known is policy or known == policy

    async def _declare_policies(self) -> None:
        """At the opening. The log keeps the ledger's time to live that it was made with; SettingsError for another."""
        requested = self._requested_ledger
        known = await self._store.declare([policy for policy in self._declared_policies if policy is not requested])
        if LEDGER.name not in known:
            known = await self._store.declare([requested or LEDGER])
        stored = known[LEDGER.name]
        if requested is not None and requested != stored:
            raise SettingsError(
                f"the log was made with a time to live of {stored.retention.ttl_ms} ms for ledgers and cannot be "
                f"opened with {requested.retention.ttl_ms} ms. Leave it out to open the log with what it has."
            )
        self._policies = {**known, **{policy.name: policy for policy in self._declared_policies}}
        self._state_reader.ledger = stored

    async def _declare_policy(self, item: Item) -> None:
        """At a policy's first use. Raises PolicyError if the log knows another one by its name."""
        policy: Policy = getattr(item, "policy")  # noqa: B009 - not every item has one, but this one does
        known = await self._store.declare([policy])
        self._policies = {**known, **self._policies, policy.name: policy}

    async def _resolve_cursor(self, cursor: int | Cursor | str, stream: str | None, lane: int = 0) -> int:
        if isinstance(cursor, str):
            cursor = Cursor.parse(cursor)
        if type(cursor) is int:
            if cursor < 0:
                raise ValueError(f"a cursor must be from 0 on, not {cursor}")
            return cursor
        if not isinstance(cursor, Cursor):
            raise TypeError(f"a cursor is a number, a Cursor or its text, not {type(cursor).__name__}")
        if cursor.epoch != self.epoch:
            page = await self._store.read(Query(lane=lane, stream=stream, limit=1))
            raise HistoryChangedError(
                f"the cursor belongs to epoch {cursor.epoch}, but this log's is {self.epoch}: its history has changed, "
                "so read again from a point that you know, or from 0",
                self.epoch,
                page.newest,
            )
        if cursor.order != format_order(stream, lane):
            raise ValueError(f"the cursor is of {cursor.order or 'lane 0'!r}, and would mean nothing here")
        return cursor.position

    def _normalize_partitions(
        self, partition: str | None, partitions: Sequence[str], stream: str | None
    ) -> tuple[str, ...]:
        if isinstance(partitions, str):
            raise TypeError("partitions is a list of names; for one name use partition")
        if sum((partition is not None, bool(partitions), stream is not None)) > 1:
            raise ValueError("name one of partition, partitions and stream")
        if stream is not None:
            check_text(stream, "$.stream")
        normal = normal_partitions((partition,) if partition is not None else partitions)
        if len(normal) > PARTITIONS_MAX:
            raise ValueError(f"partitions must be at most {PARTITIONS_MAX} different ones, not {len(normal)}")
        return normal

    def _check_lane(self, lane: int) -> None:
        if type(lane) is not int or not 0 <= lane <= self.settings.lanes:
            raise ValueError(f"lane must be from 0 to {self.settings.lanes}, not {lane!r}")

    def _on_commit(self, result: BatchResult) -> None:
        if not result.changes.is_empty:
            self._tailers.notify_commit(result.changes)
            self._count_evictions(result)
        if not self._cache.is_empty:
            self._start_polling()

    def _count_evictions(self, result: BatchResult) -> None:
        interval, before = self._store.settings.eviction_interval, self._evictions
        for block in result.sealed.blocks:
            last = block.first_position + block.count - 1
            self._evictions += last // interval - (block.first_position - 1) // interval
        self._evicted_clients += result.evicted_clients
        if self._evictions > before or result.evicted_clients:
            logger.debug(
                "%d evictions; %d entries of forgotten clients deleted",
                self._evictions - before,
                result.evicted_clients,
            )

    def _cache_result(self, identity: KeyIdentity, result: WorkResult, generation: int) -> None:
        self._results.put(identity, result, generation)
        self._start_polling()

    def _clear_caches(self) -> None:
        self._cache.clear()
        self._results.clear()
        self._tailers.drop_buffered()

    def _start_polling(self) -> None:
        if self._poll_task is None:
            self._poll_task = asyncio.get_running_loop().create_task(self._poll_erasures())

    async def _poll_erasures(self) -> None:
        """Answers in memory do not know what another process has erased, nor how far it has brought the log's time."""
        level = logging.WARNING
        while self._is_open:
            await asyncio.sleep(ERASURES_POLL_MS / 1000)
            try:
                erasures = await self._store.erasures()
                heads = await self._store.heads()
            except LogReplacedError as error:
                logger.log(level, "answers in memory are dropped: %s", error)
                level = logging.DEBUG  # logged once
                self._clear_caches()
                continue
            except Exception:  # those who submit are told; here the next look will do
                logger.log(level, "the log could not be looked at for erasures", exc_info=True)
                level = logging.DEBUG  # said once an outage
                continue
            level = logging.WARNING
            newest_ms = max((head.log_time_ms for head in heads.values()), default=0)
            self._cache.log_time_ms = max(self._cache.log_time_ms, newest_ms)
            self._results.advance(newest_ms)
            if erasures != self._cache.erasures:
                self._cache.erasures = erasures
                self._clear_caches()


def _check_integer(number: object, name: str) -> int:
    if type(number) is not int:
        raise TypeError(f"{name} is a whole number, not {number!r}")
    return number


def _build_identity(policy: Policy, scope: str, client: str, key: bytes | UUID | str) -> KeyIdentity:
    raw = UUID(key).bytes if isinstance(key, str) else key.bytes if isinstance(key, UUID) else key
    if type(raw) is not bytes:
        raise TypeError(f"a key is bytes or a UUID, not {type(key).__name__}")
    check_text(scope, "$.scope")
    check_text(client, "$.client")
    return (policy.name, scope, client if policy.client_sequence else "", raw)


def open_log(  # noqa: PLR0913 - each of them is asked for by its name
    path: str | os.PathLike[str],
    *,
    policies: Sequence[Policy] = (),
    validate: Validate | None = None,
    settings: Settings | RequestedSettings | None = None,
    limits: Limits | None = None,
    clock: Clock | None = None,
    room: DiskLimits | None = None,
    tenants: Sequence[Tenant] | None = None,
    actor: str = APPLICATION_ACTOR,
    file_mode: int = OWNER_ONLY,
) -> Log:
    """A log in the file at `path`, made there if there is none; `:memory:` is one that is gone when it is closed.

    An address, `postgresql://user@host/database`, is one in a database (`pip install oncelog[postgres]`).
    `policies` are the application's own, `validate` its check of new writes, `settings` what a new log is made with,
    `room` how full its disk may become, `tenants` the new quotas of the log (None keeps its quotas),
    `actor` the actor of that change.
    `file_mode` is the mode of a file that is created: 0o600, or 0o640 or 0o660 for a group. Raises SettingsError.
    """
    limits = limits or Limits()
    store = _build_store(os.fspath(path), settings, limits, clock, check_file_mode(file_mode))
    return Log(
        store,
        policies=policies,
        validate=validate,
        limits=limits,
        clock=clock,
        room=room,
        tenants=tenants,
        actor=actor,
    )


def _build_store(
    path: str, settings: Settings | RequestedSettings | None, limits: Limits, clock: Clock | None, file_mode: int
) -> Store:
    jump_ms_max = limits.clock_jump_ms_max
    if is_address(path):
        timeouts_ms = {name: getattr(limits, f"postgres_{name}") for name in POSTGRES_TIMEOUTS}
        return create_postgres_store(path, settings, clock=clock, jump_ms_max=jump_ms_max, timeouts_ms=timeouts_ms)
    if path == ":memory:":
        return MemoryStore(settings, clock=clock, jump_ms_max=jump_ms_max)
    return SqliteStore(path, settings, clock=clock, jump_ms_max=jump_ms_max, driver=SqliteDriver(file_mode))
