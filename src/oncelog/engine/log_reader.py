"""The read methods of a log: pages, followers, lookups, proofs and the audit trail."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Final
from uuid import UUID

from msgspec.structs import replace

from oncelog.core.identity import check_text, compute_lane, normal_partitions
from oncelog.core.limits import PARTITIONS_MAX
from oncelog.core.policy import EVENTS, Policy
from oncelog.core.tenants import Tenant, Usage
from oncelog.core.values import KeyIdentity, LaneHead, Receipt, Record, Settings
from oncelog.engine.audit import AuditFilter, AuditPage, AuditScan, decode_cursor, encode_cursor
from oncelog.engine.limits import Limits, clamp_limit
from oncelog.engine.member_tailer import MemberListener
from oncelog.engine.outcome import Outcome, Status, describe_outcome
from oncelog.engine.read_results import Cursor, Follower, Proven, Reading, format_order, prove_position
from oncelog.engine.subscription import Subscription
from oncelog.engine.tailer import RecordListener, Tailers
from oncelog.engine.tracing import Tracer
from oncelog.error_translation import shorten_middle
from oncelog.errors import ClosedError, HistoryChangedError
from oncelog.storage.store import Consumer, EncodeViews, Query, RecordViewPage, Store

FOLLOW_RECORDS: Final = 500


class LogReader:
    """Base class of `Log` with all read methods."""

    def __init__(self, store: Store, limits: Limits, tracer: Tracer | None = None) -> None:
        self._store = store
        self._limits = limits
        self._tailers = Tailers(store, limits, tracer)
        self._is_open = False

    @property
    def epoch(self) -> str:
        """The name of the history to which cursors belong. Restoring a backup starts a new epoch."""
        return self._store.epoch

    async def previous_epochs(self) -> tuple[str, ...]:
        """Return the epochs that ended with the restore of a backup. The log continues the history of each of them."""
        return await self._store.previous_epochs()

    @property
    def settings(self) -> Settings:
        """The settings with which the log was created."""
        return self._store.settings

    @property
    def limits(self) -> Limits:
        """The limits of the log in this process."""
        return self._limits

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
        """Read a page of records after a cursor, from one or more partitions, a stream, or a lane.

            page = await log.read(partition="orders")
            for record in page.records:
                print(record.position, record.body)
            if page.has_more:
                page = await log.read(partition="orders", after=page.cursor, upto=page.upto)

        Records are in the order of their commits; `record.body` is canonical JSON in bytes. Without a partition, stream
        or lane, the page contains the records of lane 0, which are all events. `after` is exclusive: a position, or the
        cursor of an earlier page or its string form. `upto` is the last position to read.

        `limit` is clamped: values below 1 count as 1, and values above `Limits.page_records_max` as that limit.

        Raises HistoryChangedError for a cursor from a different epoch or ahead of the log.
        """
        check_lane(lane, self._open_store.settings)
        query = await self._build_query(
            normalize_partitions(partition, partitions, stream),
            stream,
            lane,
            after,
            check_integer(limit, "limit"),
            None if upto is None else check_integer(upto, "upto"),
        )
        return await self._read_page(query)

    async def read_untraced(self, stream: str, *, after: int, upto: int | None = None, limit: int = 500) -> Reading:
        """Like `read` of a stream, but the records have no trace contexts. For servers that do not show them."""
        query = await self._build_query((), stream, 0, after, limit, upto)
        return await self._read_page(replace(query, with_traces=False))

    async def _read_page(self, query: Query) -> Reading:
        page = await self._store.read(query)
        return Reading(
            page.records,
            Cursor(page.next, self.epoch, format_order(query.stream, query.lane)),
            page.upto,
            page.has_more,
            page.newest,
        )

    async def read_views(
        self, show: EncodeViews, *, partitions: Sequence[str], after: int = 0, upto: int | None = None, limit: int = 500
    ) -> RecordViewPage:
        """Read a page of the events in some partitions as views, which `show` encodes. For servers."""
        query = Query(
            partitions=normalize_partitions(None, partitions, None),
            after=after,
            upto=upto,
            limit=clamp_limit(limit, self._limits),
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
        """Iterate over all records after a cursor, and over later records as they are committed, until closed.
        Use `async with log.follow(…) as records` if the loop may end early.

            async for record in log.follow(partition="orders", consumer="mailer"):
                await send_mail(record)
                await log.commit_cursor("mailer", record.position)

        Each record is returned once and in order. The parameters are those of `read`. With `consumer`, the iterator
        starts at that consumer's stored cursor (`commit_cursor`), or at `after` if it has none.

        Raises HistoryChangedError for a cursor from a different epoch, and StoreUnavailableError or CorruptError if the
        store has been unreadable for too long: follow again, from the position of the last record.
        """
        partitions = normalize_partitions(partition, partitions, stream)
        return Follower(_flatten(self._follow_batches(partitions, stream, after, lane, consumer)))

    def follow_several(
        self, *, partitions: Sequence[str] = (), stream: str | None = None, after: int | Cursor | str = 0
    ) -> AsyncGenerator[Sequence[Record], None]:
        """Follow lane 0 or a stream in batches of records, for servers. Close the iterator with `aclosing`."""
        return self._follow_batches(normalize_partitions(None, partitions, stream), stream, after)

    def _follow_batches(
        self,
        partitions: tuple[str, ...],
        stream: str | None,
        after: int | Cursor | str,
        lane: int = 0,
        consumer: str | None = None,
    ) -> AsyncGenerator[Sequence[Record], None]:
        async def build_query() -> Query:
            check_lane(lane, self._open_store.settings)
            start = after
            if consumer is not None:
                if lane:
                    raise ValueError(
                        f"a consumer can follow only lane 0 or a stream, not lane {lane}; omit `consumer` or `lane`"
                    )
                start = await self.cursor_of(consumer, stream or "") or after
            return await self._build_query(partitions, stream, lane, start, FOLLOW_RECORDS)

        return self._tailers.follow(build_query)

    async def _build_query(
        self,
        partitions: tuple[str, ...],
        stream: str | None,
        lane: int,
        after: int | Cursor | str,
        limit: int,
        upto: int | None = None,
    ) -> Query:
        return Query(
            lane=lane,
            partitions=partitions,
            stream=stream,
            after=await resolve_cursor(self._store, after, stream, lane),
            upto=upto,
            limit=clamp_limit(limit, self._limits),
            bytes_max=self._limits.page_bytes_max,
        )

    async def subscribe(
        self, *, partitions: Sequence[str] = (), stream: str | None = None, lane: int = 0
    ) -> Subscription:
        """Subscribe to later records only. The caller must keep emptying the subscription's bounded queue. For
        servers."""
        check_lane(lane, self._open_store.settings)
        if stream is not None:
            lane = compute_lane(stream, self.settings.lanes)
        return await self._tailers.subscribe(lane, normalize_partitions(None, partitions, stream), stream)

    async def listen(self, listener: RecordListener, lane: int = 0) -> int:
        """Deliver all records of a lane after the returned position to a listener, in order and as they are committed.

        For servers that distribute records themselves: delivery uses no queue and no task, and loses nothing.
        `unlisten` stops it.
        """
        check_lane(lane, self._open_store.settings)
        return await self._tailers.listen(lane, listener)

    def unlisten(self, listener: RecordListener, lane: int = 0) -> None:
        """Stop delivery to a listener."""
        self._tailers.unlisten(lane, listener)

    async def listen_members(self, listener: MemberListener) -> None:
        """Deliver all later membership changes and acknowledgements, in all streams, to a listener.

        Changes by this process are delivered immediately, before the records of the same commit. Changes by other
        processes are delivered after the next poll.
        """
        self._check_open()
        await self._tailers.listen_members(listener)

    async def lookup(
        self, key: bytes | UUID | str, *, policy: Policy = EVENTS, scope: str | None = None, client: str = ""
    ) -> Outcome:
        """Return the status of an identity and the reason for that status.

        Without a `scope`, the identity is looked up in the scope of the whole log. If tenants of the log have separate
        ids, an unknown event may belong to one of them, and the lookup raises LookupError. Pass `event_scope("acme")`
        for events of the tenant `acme`, or `""` for events outside these tenants.
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
                f'scope, such as oncelog.event_scope("{owners[0]}"), or scope="" for an event outside these tenants'
            )

    async def prove(self, receipt: Receipt) -> Proven:
        """Return the proof that a record is in the chain of blocks. Raises LookupError for a receipt from a different
        log."""
        block, evidence = await self._open_store.block(receipt.lane, receipt.height)
        proven = prove_position(block, evidence, receipt.position)
        if proven is None or proven.record.receipt != receipt:
            raise LookupError(f"the receipt does not belong to this log: {receipt}")
        return proven

    async def heads(self) -> Mapping[int, LaneHead]:
        """Return the head of each lane."""
        return await self._open_store.heads()

    async def cursor_of(self, consumer: str, stream: str = "") -> Cursor | None:
        """Return a consumer's stored cursor, or None for an unknown consumer."""
        for known_consumer in await self.consumers():
            if (known_consumer.name, known_consumer.scope) == (consumer, stream):
                return Cursor(known_consumer.cursor, self.epoch, format_order(stream or None, 0))
        return None

    async def consumers(self) -> list[Consumer]:
        """Return all named consumers, each with its cursor and lag."""
        return await self._open_store.consumers()

    async def usage(self) -> list[tuple[Tenant, Usage]]:
        """Return the tenants that have quotas, each with its usage."""
        return await self._open_store.usage()

    async def audit(self, after: str = "", limit: int = 100, wanted: AuditFilter | None = None) -> AuditPage:
        """Return a page of the audit records of all lanes, sorted by log time.

        `after` is the cursor of an earlier page (`audit_cursor`). Raises ValueError for any other string, and
        HistoryChangedError for a cursor from a different epoch.
        """
        self._check_open()
        scan = AuditScan(decode_cursor(after, self.epoch, self.settings.lanes), limit, wanted or AuditFilter())
        page = None
        while page is None:
            page = scan.add(await self._store.internal_records(scan.after, scan.next_read_count))
        return page

    def audit_cursor(self, page: AuditPage) -> str:
        """Return the cursor from which the next page continues."""
        return encode_cursor(self.epoch, page.after)

    @property
    def _open_store(self) -> Store:
        self._check_open()
        return self._store

    def _check_open(self) -> None:
        if not self._is_open:
            raise ClosedError("the log is not open; use it inside `async with oncelog.open(…)`")


async def _flatten(batches: AsyncGenerator[Sequence[Record], None]) -> AsyncGenerator[Record, None]:
    async with aclosing(batches):
        async for records in batches:
            for record in records:
                yield record


# --- arguments


async def resolve_cursor(store: Store, cursor: int | Cursor | str, stream: str | None, lane: int = 0) -> int:
    """Return the position of a cursor.

    Raises:
        HistoryChangedError: the cursor belongs to a different epoch.
        ValueError: the cursor is negative, or belongs to a different stream or lane.
    """
    if isinstance(cursor, str):
        cursor = Cursor.parse(cursor)
    if type(cursor) is int:
        if cursor < 0:
            raise ValueError(f"a cursor must be at least 0, not {cursor}")
        return cursor
    if not isinstance(cursor, Cursor):
        raise TypeError(f"a cursor must be an integer, a Cursor or its string form, not {type(cursor).__name__}")
    if cursor.epoch != store.epoch:
        page = await store.read(Query(lane=lane, stream=stream, limit=1))
        raise HistoryChangedError(
            f"the cursor belongs to epoch {cursor.epoch}, but the log is in epoch {store.epoch}: its history has "
            "changed, so read again from a known position, or from 0",
            store.epoch,
            page.newest,
        )
    if cursor.order != format_order(stream, lane):
        expected = format_order(stream, lane) or "lane 0"
        raise ValueError(f"the cursor belongs to {cursor.order or 'lane 0'!r}, not to {expected!r}")
    return cursor.position


def normalize_partitions(partition: str | None, partitions: Sequence[str], stream: str | None) -> tuple[str, ...]:
    """Return the partitions of a query in normal form. Raises TypeError, ValueError or CanonicalError."""
    if isinstance(partitions, str):
        raise TypeError("partitions must be a list of names; use partition for a single name")
    if sum((partition is not None, bool(partitions), stream is not None)) > 1:
        raise ValueError("pass only one of partition, partitions and stream")
    if stream is not None:
        check_text(stream, "$.stream")
    normal = normal_partitions((partition,) if partition is not None else partitions)
    if len(normal) > PARTITIONS_MAX:
        raise ValueError(f"partitions must have at most {PARTITIONS_MAX} different names, not {len(normal)}")
    return normal


def check_lane(lane: int, settings: Settings) -> None:
    """Raise ValueError for a lane that the log does not have."""
    if type(lane) is not int or not 0 <= lane <= settings.lanes:
        raise ValueError(f"lane must be from 0 to {settings.lanes}, not {lane!r}")


def check_integer(number: object, name: str) -> int:
    """Return the number. Raises TypeError unless it is an integer."""
    if type(number) is not int:
        raise TypeError(f"{name} must be a whole number, not {number!r}")
    return number


def build_identity(policy: Policy, scope: str, client: str, key: bytes | UUID | str) -> KeyIdentity:
    """Return the identity of a key. Raises TypeError, ValueError or CanonicalError for an invalid argument."""
    try:
        raw = UUID(key).bytes if isinstance(key, str) else key.bytes if isinstance(key, UUID) else key
    except ValueError as error:
        raise ValueError(f"key must be a UUID, or bytes for other keys, not {shorten_middle(repr(key))}") from error
    if type(raw) is not bytes:
        raise TypeError(f"a key must be bytes or a UUID, not {type(key).__name__}")
    check_text(scope, "$.scope")
    check_text(client, "$.client")
    return (policy.name, scope, client if policy.client_sequence else "", raw)
