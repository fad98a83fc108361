"""Reads of a log: pages, followers, look-ups, proofs and recorded acts."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Final
from uuid import UUID

from oncelog.core.identity import compute_lane
from oncelog.core.policy import EVENTS, Policy
from oncelog.core.tenants import Tenant, Usage
from oncelog.core.values import LaneHead, Receipt, Record, Settings
from oncelog.engine.arguments import (
    build_identity,
    check_integer,
    check_lane,
    clamp_limit,
    normalize_partitions,
    resolve_cursor,
)
from oncelog.engine.audit import AuditFilter, AuditPage, AuditScan, decode_cursor, encode_cursor
from oncelog.engine.limits import Limits
from oncelog.engine.member_tailer import MemberListener
from oncelog.engine.outcome import Outcome, Status, describe_outcome
from oncelog.engine.read_results import Cursor, Follower, Proven, Reading, format_order, prove_position
from oncelog.engine.subscription import Subscription
from oncelog.engine.tailer import RecordListener, Tailers
from oncelog.errors import ClosedError
from oncelog.storage.store import Consumer, EncodeViews, Query, RecordViewPage, Store

FOLLOW_RECORDS: Final = 500


class LogReader:
    """Base of `Log`: everything that reads."""

    def __init__(self, store: Store, limits: Limits) -> None:
        self._store = store
        self._limits = limits
        self._tailers = Tailers(store, limits)
        self._is_open = False

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
            await self._build_query(
                normalize_partitions(partition, partitions, stream),
                stream,
                lane,
                after,
                check_integer(limit, "limit"),
                None if upto is None else check_integer(upto, "upto"),
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
        """All records after a cursor, then those to come, each once and in order, until it is closed.

        With `consumer` it begins where that consumer's kept cursor is (`commit_cursor`).
        """
        partitions = normalize_partitions(partition, partitions, stream)
        return Follower(_flatten(self._follow_batches(partitions, stream, after, lane, consumer)))

    def follow_several(
        self, *, partitions: Sequence[str] = (), stream: str | None = None, after: int | Cursor | str = 0
    ) -> AsyncGenerator[Sequence[Record], None]:
        """As `follow`, of lane 0 or a stream, with all that has come at a time: for servers. Close it (`aclosing`)."""
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
                    raise ValueError("a consumer keeps a cursor of lane 0 or of a stream, not of another lane")
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

    async def cursor_of(self, consumer: str, stream: str = "") -> Cursor | None:
        """The cursor that a consumer kept."""
        for known_consumer in await self.consumers():
            if (known_consumer.name, known_consumer.scope) == (consumer, stream):
                return Cursor(known_consumer.cursor, self.epoch, format_order(stream or None, 0))
        return None

    async def consumers(self) -> list[Consumer]:
        """All named consumers, with how far each is behind."""
        return await self._open_store.consumers()

    async def usage(self) -> list[tuple[Tenant, Usage]]:
        """The tenants that the log counts for, and what each of them has."""
        return await self._open_store.usage()

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
