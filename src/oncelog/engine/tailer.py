"""Delivery by position, never by verdict.

One tailer a lane reads the store from the last position it has delivered, woken by the committer or by a look at what
other processes have done, and hands every record to the subscriptions that it concerns. So a commit whose answer was
lost is delivered all the same, once, and a retry is not delivered again.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import suppress
from itertools import chain
from typing import Final, Protocol

from msgspec.structs import replace

from oncelog.core.identity import compute_lane
from oncelog.core.values import Changes, LaneHead, Record
from oncelog.engine.limits import Limits
from oncelog.engine.member_tailer import MemberListener, MemberTailer
from oncelog.engine.read_results import Cursor, format_order
from oncelog.engine.subscription import Subscription
from oncelog.errors import ClosedError, HistoryChangedError, LimitExceededError, SlowReaderError, StoreError
from oncelog.storage.store import Query, Store

logger: Final = logging.getLogger("oncelog.engine")

PAGE_RECORDS: Final = 500
BUFFERED_RECORDS_MAX: Final = 5_000
BUFFERED_BYTES_MAX: Final = 8 * 1024 * 1024
"""What is committed while the store is read is kept up to here, and read as well if it is more."""
FAILED_POLLS_MAX: Final = 100
"""So many looks in a row at a store that cannot be read are only logged; then those who follow are told."""


class RecordListener(Protocol):
    """Takes the records of a lane as they come, at once and without a queue: what it does with them is its own."""

    def deliver(self, records: Sequence[Record]) -> None:
        """The next records, in order, none left out. Must not raise, and must not take long."""

    def fail(self, error: Exception) -> None:
        """Nothing more arrives, and that is why."""

    def close(self) -> None:
        """Nothing more arrives: the log is being closed."""


class Tailer:
    """The one reader of a lane. Runs while there are subscriptions.

    Where changes of members are listened to, they come first: no record is delivered before everything has been told
    that was changed up to it, so that whoever was removed gets nothing that was committed after that.
    """

    def __init__(
        self, store: Store, lane: int, position: int, limits: Limits, members: Sequence[MemberTailer] = ()
    ) -> None:
        self.lane = lane
        self.position = position
        """Everything up to here has been delivered."""
        self._store = store
        self._limits = limits
        self._members = members
        """Of the same lane. Others put more into it."""
        self._subscriptions: set[Subscription] = set()
        self._by_partition: dict[str, set[Subscription]] = {}
        self._by_stream: dict[str, set[Subscription]] = {}
        self._unfiltered: set[Subscription] = set()
        self._listeners: list[RecordListener] = []
        self._newest = position
        self._revision = 0
        """As of the newest position: members must be known up to here before it is delivered."""
        self._task: asyncio.Task[None] | None = None
        self._buffered: list[tuple[Sequence[Record], LaneHead]] = []
        """What was committed here during a reading."""
        self._buffered_records = 0
        self._buffered_bytes = 0
        self._error: Exception | None = None
        """Of the newest reading, until the next look."""
        self._failed_polls = 0
        self._rewinds = 0
        """How often the lane has gone back."""

    def __len__(self) -> int:
        return len(self._subscriptions) + len(self._listeners)

    @property
    def cursor(self) -> Cursor:
        """Everything up to here has been delivered, in this history."""
        return Cursor(self.position, self._store.epoch, format_order(None, self.lane))

    def subscribe(self, partitions: frozenset[str], stream: str | None) -> Subscription:
        """From now on everything after `position` that is in its scope reaches the subscription."""
        if not self._subscriptions:
            self._error, self._failed_polls = None, 0
        subscription = Subscription(self, partitions, stream, self._limits)
        self._subscriptions.add(subscription)
        for group in self._groups(subscription):
            group.add(subscription)
        return subscription

    def listen(self, listener: RecordListener) -> None:
        """From now on everything after `position` reaches the listener."""
        self._listeners.append(listener)

    def unlisten(self, listener: RecordListener) -> None:
        """The listener gets nothing more."""
        if listener in self._listeners:
            self._listeners.remove(listener)

    def remove(self, subscription: Subscription) -> None:
        """The subscription gets nothing more."""
        if subscription not in self._subscriptions:
            return
        self._subscriptions.discard(subscription)
        for group in self._groups(subscription):
            group.discard(subscription)
        for partition in subscription.partitions:
            if not self._by_partition[partition]:
                del self._by_partition[partition]
        if subscription.stream is not None and not self._by_stream[subscription.stream]:
            del self._by_stream[subscription.stream]

    def wake(self, newest: int, revision: int = 0) -> None:
        """The lane has records up to `newest`, and is at this revision."""
        self._newest = max(self._newest, newest)
        self._revision = max(self._revision, revision)
        if self._task is None and len(self) and self.position < self._newest:
            self._task = asyncio.get_running_loop().create_task(self._run())

    def notify_commit(self, records: Sequence[Record], head: LaneHead) -> None:
        """These were made durable here, up to the head.

        They are delivered as they are, and not read again, if they come right after what has been delivered. If
        another process has committed in between, all of it comes from the store. If a reading is under way they wait
        for its end: under a steady load a tailer that reads would never find that it has read everything.
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
        """What was read may have some of it already."""
        for records, head in self.take_buffered():
            if records and records[0].position <= self.position:
                records = [record for record in records if record.position > self.position]  # noqa: PLW2901
            self._deliver_next(records, head)

    def take_buffered(self) -> list[tuple[Sequence[Record], LaneHead]]:
        """It will be read: there may be too much of it, or something of it has been erased."""
        buffered, self._buffered = self._buffered, []
        self._buffered_records = self._buffered_bytes = 0
        return buffered

    def _deliver_next(self, records: Sequence[Record], head: LaneHead) -> None:
        """If they are the next ones."""
        is_next = bool(records) and records[0].position == self.position + 1
        if is_next and not self._has_lagging_members(head.revision):
            self._newest = max(self._newest, head.position)
            self._deliver(records)

    def _has_lagging_members(self, revision: int) -> bool:
        return any(members.is_behind(revision) for members in self._members)

    def poll(self, newest: int, revision: int = 0) -> None:
        """As `wake`, and now and then whether or not anything was committed: readings that failed are counted here.

        Not where they fail: many commits a second would use up all patience with a store in an instant.
        """
        if self._error is not None:
            self.count_failed_poll(self._error)
        elif self._task is None:
            self._failed_polls = 0
        self.wake(newest, revision)

    def count_failed_poll(self, error: Exception) -> None:
        """The store could not be read, again. After many times in a row the subscribers are told."""
        self._error = None
        self._failed_polls += 1
        if self._failed_polls >= FAILED_POLLS_MAX:
            self._fail(error)

    def rewind(self, head: LaneHead) -> None:
        """The lane has less than it had: those who follow have read what is no more, and must begin anew."""
        message = f"lane {self.lane} is back at revision {head.revision}: it has lost what was read from it"
        self._fail(HistoryChangedError(message, self._store.epoch, head.position))
        self.position = self._newest = head.position
        self._revision = head.revision
        self._rewinds += 1
        self.take_buffered()

    def _fail(self, error: Exception) -> None:
        for subscription in list(self._subscriptions):
            subscription.fail(error)
        listeners, self._listeners = self._listeners, []
        for listener in listeners:
            listener.fail(error)

    async def close(self) -> None:
        """Ends all subscriptions."""
        for subscription in list(self._subscriptions):
            subscription.close()
        listeners, self._listeners = self._listeners, []
        for listener in listeners:
            listener.close()
        if self._task is not None:
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        try:
            while len(self) and self.position < self._newest:
                # Not beyond: what is committed while this is read may come behind a change of members.
                query = Query(lane=self.lane, after=self.position, upto=self._newest, limit=PAGE_RECORDS)
                history = self._rewinds
                for members in list(self._members):
                    await members.wait_for_revision(self._revision)
                page = await self._store.read(query)
                if history != self._rewinds:
                    continue  # what was read is of the history that is no more
                if not page.records and page.next <= self.position:
                    break  # what was announced is not there (any more): the next look says what is
                self._deliver(page.records)
                self.position = max(self.position, page.next)
                self._deliver_buffered()
                self._error, self._failed_polls = None, 0
        except HistoryChangedError as error:  # no later reading would be better
            self._fail(error)
        except Exception as error:  # the next wake tries again
            if self._error is None and not self._failed_polls:
                logger.warning(
                    "lane %d could not be read for its subscribers: %s",
                    self.lane,
                    error,
                    exc_info=not isinstance(error, StoreError),
                )
            self._error = error
        finally:
            self._task = None
            self.take_buffered()

    def _deliver(self, records: Sequence[Record]) -> None:
        for listener in self._listeners:
            listener.deliver(records)
        if self._subscriptions:
            for record in records:
                self._deliver_one(record)
        if records:
            self.position = max(self.position, records[-1].position)

    def _deliver_one(self, record: Record) -> None:
        self.position = max(self.position, record.position)
        concerned: set[Subscription] = set(self._unfiltered)
        for partition in record.partitions:
            concerned.update(self._by_partition.get(partition, ()))
        if record.sequence:
            concerned.update(self._by_stream.get(record.scope, ()))
        for subscription in concerned:
            subscription.deliver(record)

    def _groups(self, subscription: Subscription) -> Iterable[set[Subscription]]:
        if subscription.stream is not None:
            return [self._by_stream.setdefault(subscription.stream, set())]
        if subscription.partitions:
            return [self._by_partition.setdefault(partition, set()) for partition in subscription.partitions]
        return [self._unfiltered]


class Tailers:
    """The tailers of all lanes, and the look at what other processes have committed."""

    def __init__(self, store: Store, limits: Limits) -> None:
        self._store = store
        self._limits = limits
        self._tailers: dict[int, Tailer] = {}
        self._member_tailers: defaultdict[int, list[MemberTailer]] = defaultdict(list)
        self._watch_task: asyncio.Task[None] | None = None
        self._wakeup = asyncio.Event()
        """Another process says that it has committed something."""
        self._is_closed = False

    async def subscribe(self, lane: int, partitions: Iterable[str] = (), stream: str | None = None) -> Subscription:
        """A subscription to a lane, to some partitions in it, or to a stream in it."""
        tailer = await self._get_tailer(lane)
        if sum(map(len, self._tailers.values())) >= self._limits.subscriptions_max:
            raise LimitExceededError("subscriptions_max", self._limits.subscriptions_max)
        subscription = tailer.subscribe(frozenset(partitions), stream)
        self._start_watching()
        return subscription

    async def listen(self, lane: int, listener: RecordListener) -> int:
        """Everything after the position that it gives reaches the listener."""
        tailer = await self._get_tailer(lane)
        tailer.listen(listener)
        self._start_watching()
        return tailer.position

    def unlisten(self, lane: int, listener: RecordListener) -> None:
        """The listener gets nothing more."""
        tailer = self._tailers.get(lane)
        if tailer is not None:
            tailer.unlisten(listener)

    async def listen_members(self, listener: MemberListener) -> None:
        """From now on whoever comes, goes or acknowledges in a stream of any lane is told to the listener."""
        heads = await self._store.heads()
        if self._is_closed:
            raise ClosedError("the log is closed")
        for lane in range(1, self._store.settings.lanes + 1):
            revision = heads[lane].revision if lane in heads else 0
            self._member_tailers[lane].append(MemberTailer(self._store, lane, revision, listener))
        self._start_watching()

    async def _get_tailer(self, lane: int) -> Tailer:
        """The lane's. One that nobody has listened to begins at the newest; the caller must not wait before he does."""
        if self._is_closed:
            raise ClosedError("the log is closed")
        tailer = self._tailers.get(lane)
        if tailer is None or not len(tailer):
            heads = await self._store.heads()
            if self._is_closed:
                raise ClosedError("the log is closed")
            position = heads[lane].position if lane in heads else 0
            # Another caller may have made it while this one waited.
            new_tailer = Tailer(self._store, lane, position, self._limits, self._member_tailers[lane])
            tailer = self._tailers.setdefault(lane, new_tailer)
            if not len(tailer):
                tailer.position = max(tailer.position, position)
        return tailer

    def _start_watching(self) -> None:
        if self._watch_task is None:
            self._store.listen(self._wakeup.set)
            self._watch_task = asyncio.get_running_loop().create_task(self._watch())

    async def follow(self, query: Query, lanes: int) -> AsyncGenerator[Sequence[Record], None]:
        """Everything after a cursor, from the store as long as there is much, then as it comes; several at a time.

        A reader that falls behind is back at the store: it costs no more memory than any other, and misses nothing.
        Ends when the log is closed. Raises the store's error when it could not be read for long.
        """
        lane = query.lane if query.stream is None else compute_lane(query.stream, lanes)
        cursor = query.after
        subscription: Subscription | None = None
        try:
            while not self._is_closed:
                async for records in self._iterate_stored(query, cursor):
                    yield records
                    cursor = _get_order_number(records[-1], query)
                subscription = await self.subscribe(lane, query.partitions, query.stream)
                # What was committed before the subscription began; what it brings of that is known already.
                async for records in self._iterate_stored(query, cursor):
                    yield records
                    cursor = _get_order_number(records[-1], query)
                with suppress(SlowReaderError):
                    while True:
                        records = await subscription.next()
                        if _get_order_number(records[0], query) <= cursor:
                            records = [record for record in records if _get_order_number(record, query) > cursor]
                        if records:
                            yield records
                            cursor = _get_order_number(records[-1], query)
        except ClosedError:
            if not self._is_closed:
                raise  # not by us
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
        """A batch has been made durable here."""
        by_lane: defaultdict[int, list[Record]] = defaultdict(list)
        if any(map(len, self._tailers.values())):
            for record in changes.records:
                by_lane[record.lane].append(record)
        for lane, head in changes.heads.items():
            # Members first: whoever has been removed gets nothing more, also of what came with the removal.
            for members in self._member_tailers[lane]:
                members.notify_commit(changes, head)
            tailer = self._tailers.get(lane)
            if tailer is not None and len(tailer):
                tailer.notify_commit(by_lane[lane], head)

    def drop_buffered(self) -> None:
        """The content of some records is gone: what has not been delivered yet comes without it."""
        for tailer in self._tailers.values():
            tailer.take_buffered()

    async def close(self) -> None:
        """Ends all subscriptions."""
        self._is_closed = True
        if self._watch_task is not None:
            self._watch_task.cancel()
        for tailer in self._tailers.values():
            await tailer.close()
        for members in chain.from_iterable(self._member_tailers.values()):
            await members.close()

    async def _watch(self) -> None:
        is_in_vain = False
        while any(self._member_tailers.values()) or any(map(len, self._tailers.values())):
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wakeup.wait(), self._limits.poll_ms / 1000)
            self._wakeup.clear()
            # From before the look: what is committed here meanwhile may be newer than what it finds.
            revisions = {
                lane: max(member_tailer.revision for member_tailer in member_tailers)
                for lane, member_tailers in self._member_tailers.items()
                if member_tailers
            }
            try:
                heads = await self._store.heads()
            except Exception as error:  # the store may be back at the next look
                if not is_in_vain:
                    logger.warning(
                        "the log could not be looked at for its subscribers: %s",
                        error,
                        exc_info=not isinstance(error, StoreError),
                    )
                is_in_vain = True
                for tailer in self._tailers.values():
                    tailer.count_failed_poll(error)
                continue
            is_in_vain = False
            for lane, member_tailers in self._member_tailers.items():
                head = heads.get(lane) or LaneHead()
                if head.revision < revisions.get(lane, 0):
                    self._rewind_lane(lane, head)
                for members in member_tailers:
                    members.poll(head.revision)
            for lane, tailer in self._tailers.items():
                head = heads.get(lane) or LaneHead()
                tailer.poll(head.position, head.revision)
        self._watch_task = None

    def _rewind_lane(self, lane: int, head: LaneHead) -> None:
        for members in self._member_tailers[lane]:
            members.reset(head.revision)
        if lane in self._tailers:
            self._tailers[lane].rewind(head)


def _get_order_number(record: Record, query: Query) -> int:
    """The record's place in the order that is read."""
    return record.position if query.stream is None else record.sequence
