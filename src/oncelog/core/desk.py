"""Where a batch is worked out: what the store remembers, with what this batch has changed so far laid over it.

Nothing here decides anything. It reads, writes, forgets by log time, and can be put back to an earlier state when a
request that is all or nothing turns out to be nothing.
"""

from collections.abc import Iterator, Mapping
from hashlib import sha256
from typing import Any, Final, Generic, NamedTuple, TypeVar

from msgspec.structs import replace

from oncelog.core.admission import Admission
from oncelog.core.identity import lane_of
from oncelog.core.merge import Row
from oncelog.core.operations import Entity
from oncelog.core.policy import Order, Policy, Retention
from oncelog.core.values import (
    Changes,
    ClientEntry,
    ClientIdentity,
    ConsumerIdentity,
    EntityIdentity,
    KeyIdentity,
    LaneHead,
    Lease,
    Member,
    MemberIdentity,
    Record,
    Refused,
    RelationshipIdentity,
    RowIdentity,
    Snapshot,
)

K = TypeVar("K")
V = TypeVar("V")

_ABSENT: Any = object()
_STREAM: Final = Order.STREAM  # Python 3.11 takes long to find an enum's member, and this is asked for every item


class _Journal:
    """While it is open, what every overlay had before each change."""

    __slots__ = ("entries", "is_open")

    def __init__(self) -> None:
        self.is_open = False
        self.entries: list[tuple[dict[Any, Any], Any, Any]] = []

    def undo(self) -> None:
        for changed, key, before in reversed(self.entries):
            if before is _ABSENT:
                del changed[key]
            else:
                changed[key] = before


class Overlay(Generic[K, V]):
    """One table of the snapshot, with changes on top."""

    __slots__ = ("_base", "_journal", "changed")

    def __init__(self, base: Mapping[K, V], journal: _Journal) -> None:
        self._base = base
        self._journal = journal
        self.changed: dict[K, V] = {}

    def get(self, key: K) -> V | None:
        """The value as this batch sees it; None if there is none."""
        value = self.changed.get(key, _ABSENT)
        return self._base.get(key) if value is _ABSENT else value

    def items(self) -> Iterator[tuple[K, V]]:
        """Yield what the store loaded and what this batch set. A removed entry has the value None."""
        for key, value in self._base.items():
            if key not in self.changed:
                yield key, value
        yield from self.changed.items()

    def put(self, key: K, value: V) -> None:
        """Sets the value. In tables whose entries can be removed None does that."""
        if self._journal.is_open:
            self._journal.entries.append((self.changed, key, self.changed.get(key, _ABSENT)))
        self.changed[key] = value


class LaneState(NamedTuple):
    """What changes in a lane while a batch is worked out."""

    position: int
    eviction_time_ms: int
    fence: int
    is_touched: bool


class LaneDesk:
    """A lane's head while the batch is being worked out. `log_time_ms` is this batch's and never goes back."""

    __slots__ = ("_head", "eviction_time_ms", "fence", "height", "is_touched", "log_time_ms", "number", "position")

    def __init__(self, number: int, head: LaneHead, now_ms: int) -> None:
        self._head = head
        self.number = number
        self.log_time_ms = max(head.log_time_ms, now_ms)
        self.height = head.height + 1
        self.position = head.position
        self.eviction_time_ms = head.eviction_time_ms
        self.fence = head.fence
        self.is_touched = False

    def touch(self) -> None:
        """Something in the lane has changed, a record or side state: its head is to be saved."""
        self.is_touched = True

    def next_position(self) -> int:
        """The lane grows by a record."""
        self.is_touched = True
        self.position += 1
        return self.position

    @property
    def highest_number(self) -> int:
        """The highest number of any order in the lane."""
        return max(self.position, self.fence, self._head.revision)

    def leap(self, above: int) -> None:
        """Position, height, fencing number and revision continue above a number, with a record at the next one."""
        self.is_touched = True
        self.position = self.height = above + 1
        self.fence = above
        self._head = replace(self._head, revision=above)

    def remembers(self, retention: Retention, since_ms: int) -> bool:
        """False if what was last seen at `since_ms` has been forgotten."""
        return retention.remembers(since_ms, self.log_time_ms, self.eviction_time_ms)

    def state(self) -> LaneState:
        """What changes while a batch is worked out, to be put back by `restore`."""
        return LaneState(self.position, self.eviction_time_ms, self.fence, self.is_touched)

    def restore(self, state: LaneState | None) -> None:
        """Back to an earlier `state`; None is the state before anything happened."""
        head = self._head
        state = state or LaneState(head.position, head.eviction_time_ms, head.fence, is_touched=False)
        self.position, self.eviction_time_ms, self.fence, self.is_touched = state

    def new_head(self) -> LaneHead | None:
        """The head to save, or None if nothing in the lane has changed."""
        head = self._head
        if not self.is_touched:
            return None
        return LaneHead(
            position=self.position,
            log_time_ms=self.log_time_ms,
            eviction_time_ms=self.eviction_time_ms,
            fence=self.fence,
            revision=head.revision + 1,
            height=self.height if self.position > head.position else head.height,
            block_hash=head.block_hash,
        )


class Mark(NamedTuple):
    """How things stood: the number of records, and the lanes that had been touched."""

    records: int
    lanes: dict[int, LaneState]


class Desk:
    """All tables of a batch. Make one a batch."""

    def __init__(self, snapshot: Snapshot, now_ms: int, faults: Mapping[int, Refused] | None = None) -> None:
        self.faults = faults
        """The items that are malformed, by id; None if they have not been checked yet."""
        self.settings = snapshot.settings
        self._heads = snapshot.heads
        self.now_ms = now_ms
        """The time at which the batch is proposed. Of a write it is its lane's that counts (`LaneDesk.log_time_ms`)."""
        self.tenants = snapshot.tenants
        self.admission: Admission | None = None
        """Set while a request is decided that the rates admit as a whole or not at all."""
        self._lanes: dict[int, LaneDesk] = {}
        self._zero: LaneDesk | None = None
        self._lane_of_stream: dict[str, LaneDesk] = {}
        self._journal = _Journal()
        self.records: list[Record] = []
        self.keys = Overlay(snapshot.keys, self._journal)
        self.sequences = Overlay(snapshot.sequences, self._journal)
        self.clients = Overlay(snapshot.clients, self._journal)
        self.streams = Overlay(snapshot.streams, self._journal)
        self.floors: Overlay[str, int | None] = Overlay(snapshot.floors, self._journal)
        self.has_floors = bool(snapshot.floors)
        """False in nearly all batches: then no write looks for a floor."""
        self.leap = 0
        self.entities: Overlay[EntityIdentity, Entity | None] = Overlay(snapshot.entities, self._journal)
        self.relationships: Overlay[RelationshipIdentity, int | None] = Overlay(snapshot.relationships, self._journal)
        self.rows: Overlay[RowIdentity, Row | None] = Overlay(snapshot.rows, self._journal)
        self.leases: Overlay[KeyIdentity, Lease | None] = Overlay(snapshot.leases, self._journal)
        self.members: Overlay[MemberIdentity, Member | None] = Overlay(snapshot.members, self._journal)
        self.rosters = Overlay(snapshot.rosters, self._journal)
        self.acknowledged: Overlay[MemberIdentity, int | None] = Overlay(snapshot.acknowledged, self._journal)
        self.consumers: Overlay[ConsumerIdentity, int | None] = Overlay(snapshot.consumers, self._journal)
        self.horizons = Overlay(snapshot.horizons, self._journal)
        self.rates = Overlay(snapshot.rates, self._journal)
        self.usage = Overlay(snapshot.usage, self._journal)
        self.past_members = Overlay(snapshot.past_members, self._journal)

    # --- lanes

    def lane(self, policy: Policy, scope: str) -> LaneDesk:
        """The lane that a policy's writes in a scope go to."""
        if policy.order is _STREAM:
            return self.stream_lane(scope)
        return self._zero or self.lane_zero()

    def lane_zero(self) -> LaneDesk:
        """The lane of all that is in no stream: the global log."""
        if self._zero is None:
            self._zero = self._lane(0)
        return self._zero

    def stream_lane(self, stream: str) -> LaneDesk:
        """The lane of a stream."""
        lane = self._lane_of_stream.get(stream)
        if lane is None:
            lane = self._lane_of_stream[stream] = self._lane(lane_of(stream, self.settings.lanes))
        return lane

    def numbered_lane(self, number: int) -> LaneDesk:
        """Return a lane by its number, which must be one of the log's."""
        return self._lane(number)

    def all_lanes(self) -> list[LaneDesk]:
        """Every lane of the log, whether or not it has been written to."""
        return [self._lane(number) for number in range(self.settings.lanes + 1)]

    def _lane(self, number: int) -> LaneDesk:
        lane = self._lanes.get(number)
        if lane is None:
            head = self._heads.get(number) or LaneHead()
            lane = self._lanes[number] = LaneDesk(number, head, self.now_ms)
        return lane

    # --- what is remembered, as far as it has not been forgotten

    def client(self, policy: Policy, identity: ClientIdentity, lane: LaneDesk) -> ClientEntry | None:
        """Where a client stands; None for one never seen or forgotten."""
        entry = self.clients.get(identity)
        if entry is None or not lane.remembers(policy.retention, entry.last_seen_ms):
            return None
        return entry

    # --- internal records

    def append_internal(
        self, lane: LaneDesk, policy: str, actor: str, body: bytes, *, scope: str = "", key: bytes = b""
    ) -> Record:
        """Append an internal record at the position of the lane, which the caller has advanced (internal_records)."""
        record = Record(
            lane=lane.number,
            position=lane.position,
            sequence=0,
            log_time_ms=lane.log_time_ms,
            height=lane.height,
            policy=policy,
            scope=scope,
            key=key,
            fingerprint=sha256(body).digest(),
            actor=actor,
            client="",
            client_sequence=0,
            partitions=(),
            body=body,
        )
        self.records.append(record)
        if lane.position % self.settings.eviction_interval == 0:
            lane.eviction_time_ms = lane.log_time_ms
        return record

    # --- all or nothing

    def mark(self) -> Mark:
        """Remembers how things stand, until `keep` or `undo`."""
        self._journal.is_open = True
        return Mark(len(self.records), {number: lane.state() for number, lane in self._lanes.items()})

    def keep(self) -> None:
        """What has changed since the mark stays."""
        self._journal.is_open = False
        self._journal.entries.clear()

    def undo(self, mark: Mark) -> None:
        """As if nothing had happened since the mark."""
        self._journal.undo()
        self.keep()
        del self.records[mark.records :]
        for number, lane in self._lanes.items():
            lane.restore(mark.lanes.get(number))

    def changes(self) -> Changes:
        """Everything to be saved."""
        heads = {number: lane.new_head() for number, lane in self._lanes.items()}
        return Changes(
            records=self.records,
            heads={number: head for number, head in heads.items() if head is not None},
            keys=self.keys.changed,
            sequences=self.sequences.changed,
            clients=self.clients.changed,
            streams=self.streams.changed,
            floors=self.floors.changed,
            entities=self.entities.changed,
            relationships=self.relationships.changed,
            rows=self.rows.changed,
            leases=self.leases.changed,
            members=self.members.changed,
            rosters=self.rosters.changed,
            acknowledged=self.acknowledged.changed,
            consumers=self.consumers.changed,
            horizons=self.horizons.changed,
            rates=self.rates.changed,
            usage=self.usage.changed,
            leap=self.leap,
        )
