"""State of a batch while it is decided: the snapshot, overlaid with the changes of the batch so far.

This module decides nothing. It reads, writes, forgets by log time, and can roll back to a savepoint when a request that
is all or nothing is refused.
"""

from collections.abc import Iterator, Mapping
from hashlib import sha256
from typing import Any, Final, Generic, NamedTuple, TypeVar

from msgspec.structs import replace

from oncelog.core.admission import Admission
from oncelog.core.identity import compute_lane
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
    get_state_tables,
)

K = TypeVar("K")
V = TypeVar("V")

_ABSENT: Any = object()
_STREAM: Final = Order.STREAM  # Python 3.11 takes long to find an enum's member, and this is asked for every item


class _UndoLog:
    """While it is open, what every overlay had before each change."""

    __slots__ = ("entries", "is_open")

    def __init__(self) -> None:
        self.is_open = False
        self.entries: list[tuple[dict[Any, Any], Any, Any]] = []

    def rollback(self) -> None:
        for changed, key, before in reversed(self.entries):
            if before is _ABSENT:
                del changed[key]
            else:
                changed[key] = before


class Overlay(Generic[K, V]):
    """One table of the snapshot, with changes on top."""

    __slots__ = ("_base", "_undo_log", "changes")

    def __init__(self, base: Mapping[K, V], undo_log: _UndoLog) -> None:
        self._base = base
        self._undo_log = undo_log
        self.changes: dict[K, V] = {}

    def get(self, key: K) -> V | None:
        """The value as this batch sees it; None if there is none."""
        value = self.changes.get(key, _ABSENT)
        return self._base.get(key) if value is _ABSENT else value

    def items(self) -> Iterator[tuple[K, V]]:
        """Yield what the store loaded and what this batch set. A removed entry has the value None."""
        for key, value in self._base.items():
            if key not in self.changes:
                yield key, value
        yield from self.changes.items()

    def put(self, key: K, value: V) -> None:
        """Sets the value. In tables whose entries can be removed None does that."""
        if self._undo_log.is_open:
            self._undo_log.entries.append((self.changes, key, self.changes.get(key, _ABSENT)))
        self.changes[key] = value


class LaneSavepoint(NamedTuple):
    """What changes in a lane while a batch is worked out."""

    position: int
    eviction_time_ms: int
    fence: int
    is_touched: bool


class LaneDraft:
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

    def advance_position(self) -> int:
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

    def savepoint(self) -> LaneSavepoint:
        """What changes while a batch is worked out, to be put back by `restore`."""
        return LaneSavepoint(self.position, self.eviction_time_ms, self.fence, self.is_touched)

    def rollback(self, savepoint: LaneSavepoint | None) -> None:
        """Back to an earlier `state`; None is the state before anything happened."""
        head = self._head
        savepoint = savepoint or LaneSavepoint(head.position, head.eviction_time_ms, head.fence, is_touched=False)
        self.position, self.eviction_time_ms, self.fence, self.is_touched = savepoint

    def build_head(self) -> LaneHead | None:
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


class Savepoint(NamedTuple):
    """How things stood: the number of records, and the lanes that had been touched."""

    records: int
    lanes: dict[int, LaneSavepoint]


class BatchState:
    """All tables of a batch. Make one a batch."""

    def __init__(self, snapshot: Snapshot, now_ms: int, faults: Mapping[int, Refused] | None = None) -> None:
        self.faults = faults
        """The items that are malformed, by id; None if they have not been checked yet."""
        self.settings = snapshot.settings
        self._heads = snapshot.heads
        self.now_ms = now_ms
        """Time at which the batch is proposed. Of a write it is its lane's that counts (`LaneDraft.log_time_ms`)."""
        self.tenants = snapshot.tenants
        self.admission: Admission | None = None
        """Set while a request is decided that the rates admit as a whole or not at all."""
        self._lanes: dict[int, LaneDraft] = {}
        self._lane_zero: LaneDraft | None = None
        self._stream_lanes: dict[str, LaneDraft] = {}
        self._undo_log = _UndoLog()
        self.records: list[Record] = []
        self.keys = Overlay(snapshot.keys, self._undo_log)
        self.sequences = Overlay(snapshot.sequences, self._undo_log)
        self.clients = Overlay(snapshot.clients, self._undo_log)
        self.streams = Overlay(snapshot.streams, self._undo_log)
        self.floors: Overlay[str, int | None] = Overlay(snapshot.floors, self._undo_log)
        self.has_floors = bool(snapshot.floors)
        """False in nearly all batches: then no write looks for a floor."""
        self.leap_above = 0
        self.entities: Overlay[EntityIdentity, Entity | None] = Overlay(snapshot.entities, self._undo_log)
        self.relationships: Overlay[RelationshipIdentity, int | None] = Overlay(snapshot.relationships, self._undo_log)
        self.rows: Overlay[RowIdentity, Row | None] = Overlay(snapshot.rows, self._undo_log)
        self.leases: Overlay[KeyIdentity, Lease | None] = Overlay(snapshot.leases, self._undo_log)
        self.members: Overlay[MemberIdentity, Member | None] = Overlay(snapshot.members, self._undo_log)
        self.rosters = Overlay(snapshot.rosters, self._undo_log)
        self.acknowledged: Overlay[MemberIdentity, int | None] = Overlay(snapshot.acknowledged, self._undo_log)
        self.consumers: Overlay[ConsumerIdentity, int | None] = Overlay(snapshot.consumers, self._undo_log)
        self.horizons = Overlay(snapshot.horizons, self._undo_log)
        self.rates = Overlay(snapshot.rates, self._undo_log)
        self.usage = Overlay(snapshot.usage, self._undo_log)
        self.past_members = Overlay(snapshot.past_members, self._undo_log)

    # --- lanes

    def get_policy_lane(self, policy: Policy, scope: str) -> LaneDraft:
        """The lane that a policy's writes in a scope go to."""
        if policy.order is _STREAM:
            return self.get_stream_lane(scope)
        return self._lane_zero or self.get_lane_zero()

    def get_lane_zero(self) -> LaneDraft:
        """The lane of all that is in no stream: the global log."""
        if self._lane_zero is None:
            self._lane_zero = self._get_or_create_lane(0)
        return self._lane_zero

    def get_stream_lane(self, stream: str) -> LaneDraft:
        """The lane of a stream."""
        lane = self._stream_lanes.get(stream)
        if lane is None:
            lane = self._stream_lanes[stream] = self._get_or_create_lane(compute_lane(stream, self.settings.lanes))
        return lane

    def get_lane(self, number: int) -> LaneDraft:
        """Return a lane by its number, which must be one of the log's."""
        return self._get_or_create_lane(number)

    def list_lanes(self) -> list[LaneDraft]:
        """Every lane of the log, whether or not it has been written to."""
        return [self._get_or_create_lane(number) for number in range(self.settings.lanes + 1)]

    def _get_or_create_lane(self, number: int) -> LaneDraft:
        lane = self._lanes.get(number)
        if lane is None:
            head = self._heads.get(number) or LaneHead()
            lane = self._lanes[number] = LaneDraft(number, head, self.now_ms)
        return lane

    # --- what is remembered, as far as it has not been forgotten

    def find_client(self, policy: Policy, identity: ClientIdentity, lane: LaneDraft) -> ClientEntry | None:
        """Where a client stands; None for one never seen or forgotten."""
        entry = self.clients.get(identity)
        if entry is None or not lane.remembers(policy.retention, entry.last_seen_ms):
            return None
        return entry

    # --- internal records

    def append_internal(
        self, lane: LaneDraft, policy: str, actor: str, body: bytes, *, scope: str = "", key: bytes = b""
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

    def savepoint(self) -> Savepoint:
        """Remembers how things stand, until `release` or `rollback`."""
        self._undo_log.is_open = True
        return Savepoint(len(self.records), {number: lane.savepoint() for number, lane in self._lanes.items()})

    def release(self) -> None:
        """What has changed since the mark stays."""
        self._undo_log.is_open = False
        self._undo_log.entries.clear()

    def rollback(self, savepoint: Savepoint) -> None:
        """As if nothing had happened since the mark."""
        self._undo_log.rollback()
        self.release()
        del self.records[savepoint.records :]
        for number, lane in self._lanes.items():
            lane.rollback(savepoint.lanes.get(number))

    def collect_changes(self) -> Changes:
        """Everything to be saved."""
        heads = {number: lane.build_head() for number, lane in self._lanes.items()}
        tables: list[Any] = [overlay.changes for overlay in get_state_tables(self)]
        touched = {number: head for number, head in heads.items() if head is not None}
        return Changes(*[*tables, self.records, touched, self.leap_above])
