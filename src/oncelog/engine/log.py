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
from contextlib import aclosing
from types import TracebackType
from typing import Final, Self
from uuid import UUID

from oncelog.core.canonical import canonical
from oncelog.core.identity import compute_lane
from oncelog.core.limits import STORED_INTEGER_MAX
from oncelog.core.plan import Validate
from oncelog.core.policy import EVENTS, Policy
from oncelog.core.rules.audit import (
    APPLICATION_ACTOR,
    QUOTA_CHANGE,
    READ_ONLY_OFF,
    READ_ONLY_ON,
)
from oncelog.core.tenants import Tenant, Usage, check_tenants
from oncelog.core.values import (
    Applied,
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
from oncelog.engine.answer_cache import AnswerCache, ResultCache, WorkResult
from oncelog.engine.arguments import build_identity, check_integer, check_lane, normalize_partitions, resolve_cursor
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
from oncelog.engine.eraser import Eraser
from oncelog.engine.leases import LeaseManager
from oncelog.engine.limits import Limits
from oncelog.engine.member_tailer import MemberListener
from oncelog.engine.outcome import Outcome, Status, describe_outcome
from oncelog.engine.policy_registry import PolicyRegistry
from oncelog.engine.read_results import Compacted, Cursor, Follower, Proven, Reading, format_order, prove_position
from oncelog.engine.state_reader import StateReader
from oncelog.engine.subscription import Subscription
from oncelog.engine.tailer import RecordListener, Tailers
from oncelog.engine.write_gate import DiskLimits, ReadOnlyReason, WriteGate
from oncelog.errors import (
    ClosedError,
    LogReplacedError,
    PolicyError,
)
from oncelog.file_modes import OWNER_ONLY, check_file_mode
from oncelog.storage.address import POSTGRES_TIMEOUTS, check_scheme, create_postgres_store, is_address
from oncelog.storage.clock import Clock, SystemClock
from oncelog.storage.memory import MemoryStore
from oncelog.storage.sqlite import SqliteStore
from oncelog.storage.sqlite.database_file import SqliteDriver
from oncelog.storage.store import BatchResult, Consumer, EncodeViews, Query, RecordViewPage, Store

logger: Final = logging.getLogger("oncelog.engine")

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
        self._policies = PolicyRegistry(store, policies)
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
        self._eraser = Eraser(
            store, self._submit_work, self._act_queue, self._tailers.drop_buffered, self._clear_caches
        )
        self._write_gate.on_change = self._record_read_only
        self._state_reader = StateReader(store, self._cache, self._tailers, self._limits, lambda: self._open_store)
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
            await self._policies.declare_all()
            self._state_reader.ledger = self._policies.ledger
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
        return self._policies.by_name

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
        return await self._open_store.usage()

    # --- writing

    async def submit(self, item: Item) -> Verdict:
        """What becomes of a write, once that is durable: Committed, Replayed or Refused; never an exception for it.

        Raises StoreUnavailableError when the disk fails, and ClockJumpedError: submit again under the same identity.
        """
        if not self._has_policy(item):
            await self._policies.declare(item)
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
        if not self._policies.knows(item):
            await self._policies.declare(item)
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
                await self._policies.declare(item)
        future: asyncio.Future[list[Verdict]] = self._committer.create_future()
        verdicts = self._committer.submit_request(Request(items, mode, is_admitted_whole), future)
        return await future if verdicts is None else verdicts

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
        if key is not None:
            if scope is None and policy.name == EVENTS.name:
                await self.lookup(key)  # raises LookupError if the id may be a tenant's
            return await self._eraser.erase_identity(build_identity(policy, scope or "", client, key), actor)
        if stream is not None:
            return await self._eraser.erase_stream(stream, actor)
        return await self._eraser.erase_partition(partition or "", actor)

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
        return await self._eraser.compact(
            scope,
            upto=None if upto is None else check_integer(upto, "upto"),
            keep=0 if keep is None else check_integer(keep, "keep"),
            limit=check_integer(limit, "limit"),
            tombstone_age_ms=age_ms,
            after_row=after_row,
            rows_max=rows_max,
            actor=actor,
        )

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
        check_lane(lane, self._open_store.settings)
        page = await self._store.read(
            Query(
                lane=lane,
                partitions=normalize_partitions(partition, partitions, stream),
                stream=stream,
                after=await resolve_cursor(self._store, after, stream, lane),
                upto=None if upto is None else check_integer(upto, "upto"),
                limit=max(1, min(check_integer(limit, "limit"), self._limits.page_records_max)),
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
        query = Query(
            partitions=normalize_partitions(None, partitions, None),
            after=after,
            upto=upto,
            limit=max(1, min(limit, self._limits.page_records_max)),
            bytes_max=self._limits.page_bytes_max,
        )
        return await self._open_store.read_views(query, EVENTS.name, show)

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
            self._follow(normalize_partitions(partition, partitions, stream), stream, lane, after, consumer)
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
        return self._follow_batches(normalize_partitions(None, partitions, stream), stream, 0, after, None)

    async def _follow_batches(
        self,
        partitions: tuple[str, ...],
        stream: str | None,
        lane: int,
        after: int | Cursor | str,
        consumer: str | None,
    ) -> AsyncGenerator[Sequence[Record], None]:
        check_lane(lane, self._open_store.settings)
        if consumer is not None:
            if lane:
                raise ValueError("a consumer keeps a cursor of lane 0 or of a stream, not of another lane")
            after = await self.cursor_of(consumer, stream or "") or after
        query = Query(
            lane=lane,
            partitions=partitions,
            stream=stream,
            after=await resolve_cursor(self._store, after, stream, lane),
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
        check_lane(lane, self._open_store.settings)
        if stream is not None:
            lane = compute_lane(stream, self.settings.lanes)
        return await self._tailers.subscribe(lane, normalize_partitions(None, partitions, stream), stream)

    async def listen(self, listener: RecordListener, lane: int = 0) -> int:
        """Hands every record of a lane after the position that it gives to the listener, in order, as they come.

        For a server that feeds its readers itself: no queue, no task, no loss. Call `unlisten` when it is over.
        """
        check_lane(lane, self._open_store.settings)
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
        key_status = await self._open_store.get_key_status(build_identity(policy, scope or "", client, key))
        outcome = describe_outcome(policy, key_status)
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
        block, evidence = await self._open_store.block(receipt.lane, receipt.height)
        proven = prove_position(block, evidence, receipt.position)
        if proven is None or proven.record.receipt != receipt:
            raise LookupError(f"position {receipt.position} of lane {receipt.lane} is not this log's: {receipt}")
        return proven

    async def heads(self) -> Mapping[int, LaneHead]:
        """The newest of everything, lane by lane."""
        return await self._open_store.heads()

    # --- named consumers

    async def commit_cursor(
        self, consumer: str, cursor: int | Cursor | str | None, *, stream: str = "", rewind: bool = False
    ) -> Applied | Refused:
        """Keeps a consumer's cursor in the log: it moves forward only, unless told to rewind. None removes it."""
        position = None if cursor is None else await resolve_cursor(self._store, cursor, stream or None)
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
        return await self._open_store.consumers()

    async def confirm_clock(self) -> None:
        """Believes the wall clock as it is, after a jump stopped commits."""
        await self._open_store.confirm_clock()

    # --- inside

    @property
    def _open_store(self) -> Store:
        self._check_open()
        return self._store

    def _check_open(self) -> None:
        if not self._is_open:
            raise ClosedError("the log is not open; use it inside `async with oncelog.open(…)`")

    def _has_policy(self, item: Item) -> bool:
        if not self._is_open:
            self._check_open()
        return self._policies.knows(item)

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
            self._cache.advance(newest_ms)
            self._results.advance(newest_ms)
            if erasures != self._cache.erasures:
                self._cache.erasures = erasures
                self._clear_caches()


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
    check_scheme(path)
    return SqliteStore(path, settings, clock=clock, jump_ms_max=jump_ms_max, driver=SqliteDriver(file_mode))
