"""Delivers records in the order of their positions, whether or not their writers have received the verdicts.

One tailer per lane reads the store from the last delivered position. It is woken by the committer, or by a poll that
detects commits by other processes. The tailer delivers each record to all subscriptions that include it. A commit whose
answer was lost is therefore still delivered once, and a retry is not delivered again.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Final, Protocol

from msgspec.structs import replace

from oncelog.core.identity import compute_lane
from oncelog.core.values import Changes, LaneHead, Record
from oncelog.engine import logger
from oncelog.engine.limits import Limits
from oncelog.engine.member_tailer import LaneReader, MemberListener, MemberTailer
from oncelog.engine.read_results import Cursor, format_order
from oncelog.engine.subscription import Subscription
from oncelog.engine.tracing import Tracer
from oncelog.errors import ClosedError, HistoryChangedError, LimitExceededError, SlowReaderError, StoreError
from oncelog.storage.store import Query, Store

PAGE_RECORDS: Final = 500
BUFFERED_RECORDS_MAX: Final = 5_000
BUFFERED_BYTES_MAX: Final = 8 * 1024 * 1024
"""Limit on the commits that are buffered during a read. Above it the buffer is dropped and the store is read
instead."""
FAILED_POLLS_MAX: Final = 100
"""Number of failed polls in a row after which readers receive the error. Earlier failures are only logged."""


class RecordListener(Protocol):
    """Receives the records of a lane without a queue."""

    def deliver(self, records: Sequence[Record]) -> None:
        """Handle the next records, in order and without gaps. Must be fast and must not raise."""

    def fail(self, error: Exception) -> None:
        """Handle the error that stops delivery."""

    def close(self) -> None:
        """Handle the end of delivery, because the log is being closed."""


class Tailer(LaneReader):
    """The only reader of a lane. It runs while there are subscriptions or listeners.

    It delivers a record only after all earlier membership changes, so that a removed member receives no record that was
    committed after its removal.
    """

    def __init__(self, store: Store, lane: int, position: int, limits: Limits, tracer: Tracer | None = None) -> None:
        super().__init__(lane, f"lane {lane}")
        self.position = position
        """All records up to this position are delivered."""
        self.members = MemberTailer(store, lane)
        self._store = store
        self._limits = limits
        self._subscriptions: set[Subscription] = set()
        self._groups: defaultdict[tuple[str, str], set[Subscription]] = defaultdict(set)
        """Subscriptions by `Subscription.keys`."""
        self.listeners: list[RecordListener] = []
        self._newest = position
        self._revision = 0
        """Revision at the newest position. Membership changes up to it are delivered first."""
        self._buffered: list[tuple[Sequence[Record], LaneHead]] = []
        """Commits that this process made during a read."""
        self._buffered_records = 0
        self._buffered_bytes = 0
        self._rewinds = 0
        """How often the lane has been rewound."""
        self._tracer = tracer

    def __len__(self) -> int:
        return len(self._subscriptions) + len(self.listeners)

    @property
    def _has_more(self) -> bool:
        return len(self) > 0 and self.position < self._newest

    def subscribe(self, partitions: frozenset[str], stream: str | None) -> Subscription:
        """Return a subscription to all later records in some partitions, in a stream, or in the lane."""
        if not self._subscriptions:
            self._error, self._failed_polls = None, 0
        start = Cursor(self.position, self._store.epoch, format_order(None, self.lane))
        subscription = Subscription(start, self.lane, partitions, stream, self._limits, self._remove)
        self._subscriptions.add(subscription)
        for key in subscription.keys:
            self._groups[key].add(subscription)
        return subscription

    def _remove(self, subscription: Subscription) -> None:
        self._subscriptions.discard(subscription)
        for key in subscription.keys:
            self._groups[key].discard(subscription)
            if not self._groups[key]:
                del self._groups[key]

    def wake(self, newest: int, revision: int = 0) -> None:
        """Read up to a position and revision of the lane, unless both are already delivered."""
        self._newest = max(self._newest, newest)
        self._revision = max(self._revision, revision)
        self._wake()

    def notify_commit(self, records: Sequence[Record], head: LaneHead) -> None:
        """Handle records that this process made durable, and the resulting head.

        Records that follow the last delivered position are delivered without a read. If another process committed in
        between, the tailer reads the store. During a read the records are buffered, because otherwise the tailer would
        never catch up under a steady load.
        """
        if self._task is not None:
            if records:
                self._buffer_commit(records, head)
        elif len(self):
            self._deliver_next(records, head)
        self.wake(head.position, head.revision)

    def _buffer_commit(self, records: Sequence[Record], head: LaneHead) -> None:
        self._buffered.append((records, head))
        self._buffered_records += len(records)
        self._buffered_bytes += sum([len(record.body) for record in records])
        if self._buffered_records > BUFFERED_RECORDS_MAX or self._buffered_bytes > BUFFERED_BYTES_MAX:
            self.take_buffered()

    def _deliver_buffered(self) -> None:
        """Deliver the commits that were buffered during a read. The read may have returned some of their records."""
        for records, head in self.take_buffered():
            if records and records[0].position <= self.position:
                records = [record for record in records if record.position > self.position]  # noqa: PLW2901
            self._deliver_next(records, head)

    def take_buffered(self) -> list[tuple[Sequence[Record], LaneHead]]:
        """Return the buffered commits and empty the buffer. Records that are not delivered from it are read from the
        store."""
        buffered, self._buffered = self._buffered, []
        self._buffered_records = self._buffered_bytes = 0
        return buffered

    def _deliver_next(self, records: Sequence[Record], head: LaneHead) -> None:
        """Deliver records that follow the last delivered position, if all earlier membership changes are delivered."""
        is_next = bool(records) and records[0].position == self.position + 1
        if is_next and not self.members.is_behind(head.revision):
            self._newest = max(self._newest, head.position)
            self._deliver(records)

    def poll(self, newest: int, revision: int = 0) -> None:
        """Like `wake`, but called at regular intervals. Counts failed reads.

        Failures are counted per poll. If they were counted per read, a high commit rate would reach the limit
        immediately.
        """
        if self._error is not None:
            self.count_failed_poll(self._error)
        elif self._task is None:
            self._failed_polls = 0
        self.wake(newest, revision)

    def count_failed_poll(self, error: Exception) -> None:
        """Count a failed read. After `FAILED_POLLS_MAX` in a row, readers receive the error."""
        self._error = None
        self._failed_polls += 1
        if self._failed_polls >= FAILED_POLLS_MAX:
            self._fail(error)

    def rewind(self, head: LaneHead) -> None:
        """Stop delivery, because the lane has lost records that its readers have. The readers must start again."""
        message = f"lane {self.lane} went back to revision {head.revision}: it has lost records that were read"
        self._fail(HistoryChangedError(message, self._store.epoch, head.position))
        self.position = self._newest = head.position
        self._revision = head.revision
        self._rewinds += 1
        self.take_buffered()
        self.members.reset(head.revision)

    def _fail(self, error: Exception) -> None:
        for reader in self._take_readers():
            reader.fail(error)

    async def close(self) -> None:
        """End all subscriptions."""
        for reader in self._take_readers():
            reader.close()
        if self._task is not None:
            await asyncio.wait([self._task])
        await self.members.close()

    def _take_readers(self) -> list[Subscription | RecordListener]:
        readers: list[Subscription | RecordListener] = [*self._subscriptions, *self.listeners]
        self.listeners = []
        return readers

    async def _run(self) -> None:
        try:
            await super()._run()
        finally:
            self.take_buffered()

    async def _read_next(self) -> bool:
        # Do not read beyond the newest position: a commit during the read may follow a membership change.
        query = Query(lane=self.lane, after=self.position, upto=self._newest, limit=PAGE_RECORDS)
        history = self._rewinds
        await self.members.wait_for_revision(self._revision)
        try:
            page = await self._store.read(query)
        except HistoryChangedError as error:  # later reads would fail as well
            self._fail(error)
            return False
        if history != self._rewinds:
            return True  # the page belongs to the history before the rewind
        if not page.records and page.next <= self.position:
            return False  # the store does not have the announced records: the next poll finds the head
        self._deliver(page.records)
        self.position = max(self.position, page.next)
        self._deliver_buffered()
        return True

    def _deliver(self, records: Sequence[Record]) -> None:
        if self.listeners and self._tracer is not None:
            self._broadcast_traced(self._tracer, records)
        else:
            for listener in self.listeners:
                listener.deliver(records)
        if self._subscriptions:
            for record in records:
                concerned = set(self._groups.get(("", ""), ()))
                for partition in record.partitions:
                    concerned.update(self._groups.get(("partition", partition), ()))
                if record.sequence:
                    concerned.update(self._groups.get(("stream", record.scope), ()))
                for subscription in concerned:
                    subscription.deliver(record)
        if records:
            self.position = max(self.position, records[-1].position)

    def _broadcast_traced(self, tracer: Tracer, records: Sequence[Record]) -> None:
        attributes = {"oncelog.lane": self.lane, "oncelog.records": len(records)}
        span = tracer.start_delivery("oncelog.broadcast", records, attributes)
        for listener in self.listeners:
            listener.deliver(records)
        if span is not None:
            span.end()


class Tailers:
    """The tailers of all lanes, and the poll that detects commits by other processes."""

    def __init__(self, store: Store, limits: Limits, tracer: Tracer | None = None) -> None:
        self._store = store
        self._limits = limits
        self._tracer = tracer
        self._tailers: dict[int, Tailer] = {}
        self._watch_task: asyncio.Task[None] | None = None
        self._wakeup = asyncio.Event()
        """Set when another process announces a commit."""
        self._is_closed = False

    async def subscribe(self, lane: int, partitions: Iterable[str] = (), stream: str | None = None) -> Subscription:
        """Return a subscription to a lane, to some of its partitions, or to one of its streams."""
        tailer = await self._get_tailer(lane)
        if sum(map(len, self._tailers.values())) >= self._limits.subscriptions_max:
            raise LimitExceededError("subscriptions_max", self._limits.subscriptions_max)
        return tailer.subscribe(frozenset(partitions), stream)

    async def listen(self, lane: int, listener: RecordListener) -> int:
        """Deliver all records after the returned position to a listener."""
        tailer = await self._get_tailer(lane)
        tailer.listeners.append(listener)
        return tailer.position

    def unlisten(self, lane: int, listener: RecordListener) -> None:
        """Stop delivery to a listener."""
        if lane in self._tailers:
            with suppress(ValueError):
                self._tailers[lane].listeners.remove(listener)

    async def listen_members(self, listener: MemberListener) -> None:
        """Deliver all later membership changes and acknowledgements, in the streams of all lanes, to a listener."""
        heads = await self._get_heads()
        for lane in range(1, self._store.settings.lanes + 1):
            head = heads.get(lane) or LaneHead()
            members = self._add_tailer(lane, head).members
            if not members.listeners:
                members.reset(head.revision)
            members.listeners.append(listener)
        self._start_watching()

    async def _get_heads(self) -> Mapping[int, LaneHead]:
        if self._is_closed:
            raise ClosedError("the log is closed")
        heads = await self._store.heads()
        if self._is_closed:
            raise ClosedError("the log is closed")
        return heads

    async def _get_tailer(self, lane: int) -> Tailer:
        """Return the tailer of a lane and start watching it. The caller must add a reader before any `await`.

        A tailer without readers starts at the newest position.
        """
        tailer = self._tailers.get(lane)
        if tailer is None or not len(tailer):
            head = (await self._get_heads()).get(lane) or LaneHead()
            tailer = self._add_tailer(lane, head)
            if not len(tailer):
                tailer.position = max(tailer.position, head.position)
        self._start_watching()
        return tailer

    def _add_tailer(self, lane: int, head: LaneHead) -> Tailer:
        """Return the tailer of a lane, adding it unless another caller has done so in the meantime."""
        return self._tailers.setdefault(lane, Tailer(self._store, lane, head.position, self._limits, self._tracer))

    def _start_watching(self) -> None:
        if self._watch_task is None:
            self._store.listen(self._wakeup.set)
            self._watch_task = asyncio.get_running_loop().create_task(self._watch())

    def follow(self, build_query: Callable[[], Awaitable[Query]]) -> AsyncGenerator[Sequence[Record], None]:
        """Follow a query, as `_follow` does. With tracing, each batch has a span, which lasts until the reader requests
        the next one."""
        batches = self._follow(build_query)
        return batches if self._tracer is None else self._follow_traced(self._tracer, batches)

    async def _follow_traced(
        self, tracer: Tracer, batches: AsyncGenerator[Sequence[Record], None]
    ) -> AsyncGenerator[Sequence[Record], None]:
        async with aclosing(batches):
            async for records in batches:
                attributes = {"oncelog.lane": records[0].lane, "oncelog.records": len(records)}
                span = tracer.start_delivery("oncelog.follow", records, attributes)
                try:
                    yield records
                finally:
                    if span is not None:
                        span.end()

    async def _follow(self, build_query: Callable[[], Awaitable[Query]]) -> AsyncGenerator[Sequence[Record], None]:
        """Yield all records of a query in batches: first from the store, then as they are committed.

        A slow reader continues from the store, so it needs no more memory than other readers and misses nothing. The
        iterator ends when the log is closed. Raises the store's error after `FAILED_POLLS_MAX` failed polls.
        """
        query = await build_query()
        lane = query.lane if query.stream is None else compute_lane(query.stream, self._store.settings.lanes)
        cursor = query.after
        subscription: Subscription | None = None
        try:
            while not self._is_closed:
                async for records in self._iterate_stored(query, cursor):
                    yield records
                    cursor = _get_order_number(records[-1], query)
                if subscription is None:
                    subscription = await self.subscribe(lane, query.partitions, query.stream)
                    continue  # read up to the subscription's start; it may deliver some records again
                with suppress(SlowReaderError):
                    while True:
                        records = await subscription.next()
                        if _get_order_number(records[0], query) <= cursor:
                            records = [record for record in records if _get_order_number(record, query) > cursor]
                        if records:
                            yield records
                            cursor = _get_order_number(records[-1], query)
                subscription = None
        except ClosedError:
            if not self._is_closed:
                raise  # the subscription was closed, not the log
        finally:
            if subscription is not None:
                subscription.close()

    async def _iterate_stored(self, query: Query, cursor: int) -> AsyncGenerator[Sequence[Record], None]:
        has_more = True
        while has_more:
            page = await self._store.read(replace(query, after=cursor))
            if page.records:
                yield page.records
            cursor, has_more = page.next, page.has_more

    def notify_commit(self, changes: Changes) -> None:
        """Handle the changes of a batch that this process made durable."""
        by_lane: defaultdict[int, list[Record]] = defaultdict(list)
        if any(map(len, self._tailers.values())):
            for record in changes.records:
                by_lane[record.lane].append(record)
        for lane, head in changes.heads.items():
            tailer = self._tailers.get(lane)
            if tailer is not None:
                # Deliver membership changes first: a removed member must not receive records of the commit that removed
                # it.
                tailer.members.notify_commit(changes, head)
                if len(tailer):
                    tailer.notify_commit(by_lane[lane], head)

    def drop_buffered(self) -> None:
        """Drop the buffers, because records were erased. Tailers read the store instead."""
        for tailer in self._tailers.values():
            tailer.take_buffered()

    async def close(self) -> None:
        """End all subscriptions."""
        self._is_closed = True
        if self._watch_task is not None:
            self._watch_task.cancel()
        for tailer in self._tailers.values():
            await tailer.close()

    async def _watch(self) -> None:
        has_logged = False
        while any(len(tailer) or tailer.members.listeners for tailer in self._tailers.values()):
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wakeup.wait(), self._limits.poll_ms / 1000)
            self._wakeup.clear()
            # Read the revisions before the poll: a commit during the poll may be newer than the heads that the poll
            # returns.
            revisions = {lane: tailer.members.revision for lane, tailer in self._tailers.items()}
            try:
                heads = await self._store.heads()
            except Exception as error:  # the next poll may succeed
                if not has_logged:
                    exc_info = not isinstance(error, StoreError)
                    logger.warning("polling the log for its subscribers failed: %s", error, exc_info=exc_info)
                has_logged = True
                for tailer in self._tailers.values():
                    tailer.count_failed_poll(error)
                continue
            has_logged = False
            for lane, revision in revisions.items():
                tailer, head = self._tailers[lane], heads.get(lane) or LaneHead()
                if tailer.members.listeners and head.revision < revision:
                    tailer.rewind(head)
                tailer.members.poll(head.revision)
                tailer.poll(head.position, head.revision)
        self._watch_task = None


def _get_order_number(record: Record, query: Query) -> int:
    """Return the number of a record in the order of a query."""
    return record.position if query.stream is None else record.sequence
