"""State of a batch while `plan` decides it: the snapshot, overlaid with the batch's changes so far.

This module decides nothing. It reads and writes tables, treats expired state as absent, and rolls back to a savepoint
when `plan` undoes a request.
"""

from collections.abc import Iterator, Mapping
from hashlib import sha256
from typing import Any, Generic, TypeVar

from msgspec import Struct, field
from msgspec.structs import replace

from oncelog.core.identity import compute_lane
from oncelog.core.merge import Row
from oncelog.core.operations import Entity
from oncelog.core.policy import STREAM, Policy, Retention
from oncelog.core.values import (
    Changes,
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


class _UndoLog(Struct):
    """Previous values of changed entries, recorded between `savepoint` and `release` or `rollback`."""

    is_open: bool = False
    entries: list[tuple[dict[Any, Any], Any, Any]] = field(default_factory=list)

    def rollback(self) -> None:
        for changed, key, before in reversed(self.entries):
            if before is _ABSENT:
                del changed[key]
            else:
                changed[key] = before


class Overlay(Struct, Generic[K, V]):
    """A snapshot table with the batch's changes on top."""

    _base: Mapping[K, V]
    _undo_log: _UndoLog
    changes: dict[K, V] = field(default_factory=dict)

    def get(self, key: K) -> V | None:
        """Return the value that this batch sees, or None if the entry is absent."""
        value = self.changes.get(key, _ABSENT)
        return self._base.get(key) if value is _ABSENT else value

    def items(self) -> Iterator[tuple[K, V]]:
        """Yield all entries that were loaded or that this batch has set. A removed entry has the value None."""
        for key, value in self._base.items():
            if key not in self.changes:
                yield key, value
        yield from self.changes.items()

    def put(self, key: K, value: V) -> None:
        """Set the value. None removes the entry from a table that allows it."""
        if self._undo_log.is_open:
            self._undo_log.entries.append((self.changes, key, self.changes.get(key, _ABSENT)))
        self.changes[key] = value


class LaneDraft(Struct, gc=False):
    """Head of a lane while a batch is being decided."""

    number: int
    head: LaneHead
    """Head before the batch."""
    log_time_ms: int
    """Log time of the batch in this lane, never before the log time of the head."""
    height: int
    position: int
    eviction_time_ms: int
    fence: int
    is_touched: bool = False
    """Whether the batch has added a record to the lane or changed its side state. If so, the head must be saved."""

    def advance_position(self) -> int:
        """Move to the position of the next record and return it."""
        self.is_touched = True
        self.position += 1
        return self.position

    def leap(self, above: int) -> None:
        """Skip all numbers of the lane up to `above`. The restore record gets position and height `above + 1`."""
        self.is_touched = True
        self.position = self.height = above + 1
        self.fence = above
        self.head = replace(self.head, revision=above)

    def remembers(self, retention: Retention, since_ms: int) -> bool:
        """Return whether the lane still remembers state from `since_ms`."""
        return retention.remembers(since_ms, self.log_time_ms, self.eviction_time_ms)

    def build_head(self) -> LaneHead:
        """Return the head to save."""
        head = self.head
        return LaneHead(
            position=self.position,
            log_time_ms=self.log_time_ms,
            eviction_time_ms=self.eviction_time_ms,
            fence=self.fence,
            revision=head.revision + 1,
            height=self.height if self.position > head.position else head.height,
            block_hash=head.block_hash,
        )


class Admission(Struct):
    """Rate limiting of a request that is admitted as a whole.

    Each item of the request takes its token first. After the last item, `plan` checks `refusal`.

    A request with more new items than the burst may overdraw a bucket that was full, because it would never fit
    otherwise. The bucket then refills from a negative balance.
    """

    _full_at_us: dict[object, int] = field(default_factory=dict)
    """Time at which each bucket is full again, not counting the tokens that the request takes."""
    _longest_wait_us: int = 0
    refusal: Refused | None = None
    """Refusal with the longest wait, or None while the request is admitted."""

    def compute_wait_us(self, bucket: object, full_at_us: int, wait_us: int, now_us: int) -> int:
        """Return how long the request must wait for a token that one of its items takes from a bucket.

        The request waits for the token, but at most until the bucket is full again, not counting the tokens that the
        request takes. `full_at_us` is the time at which the bucket is full again, not counting this token. The token
        is available after `wait_us`.
        """
        return min(self._full_at_us.setdefault(bucket, full_at_us) - now_us, wait_us)

    def refuse(self, refusal: Refused, wait_us: int) -> None:
        """Refuse the request, unless another refusal has a longer wait."""
        if wait_us > self._longest_wait_us:
            self._longest_wait_us, self.refusal = wait_us, refusal


class BatchState:
    """Tables and lanes of one batch."""

    def __init__(self, snapshot: Snapshot, now_ms: int, faults: Mapping[int, Refused] | None = None) -> None:
        self.faults = faults
        """Refusals of malformed items by index in the batch, or None if `plan` must validate the items."""
        self.settings = snapshot.settings
        self._heads = snapshot.heads
        self.now_ms = now_ms
        """Proposed time of the batch. Decisions about a write use its lane's log time (`LaneDraft.log_time_ms`)."""
        self.tenants = snapshot.tenants
        self.admission: Admission | None = None
        """Set while `plan` decides a request that is admitted as a whole."""
        self._lanes: dict[int, LaneDraft] = {}
        self._undo_log = _UndoLog()
        self.records: list[Record] = []
        self.keys = Overlay(snapshot.keys, self._undo_log)
        self.sequences = Overlay(snapshot.sequences, self._undo_log)
        self.clients = Overlay(snapshot.clients, self._undo_log)
        self.streams = Overlay(snapshot.streams, self._undo_log)
        self.floors: Overlay[str, int | None] = Overlay(snapshot.floors, self._undo_log)
        self.has_floors = bool(snapshot.floors)
        """False in nearly all batches; their writes skip the floor lookup."""
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
        """Return the lane for writes under a policy in a scope: the stream's lane, or lane 0 for Order.LANE."""
        if policy.order is STREAM:
            return self.get_stream_lane(scope)
        return self._lanes.get(0) or self.get_lane(0)

    def get_stream_lane(self, stream: str) -> LaneDraft:
        """Return the lane of a stream. The empty name means lane 0, the global log."""
        return self.get_lane(compute_lane(stream, self.settings.lanes) if stream else 0)

    def get_lane(self, number: int) -> LaneDraft:
        """Return a lane by its number. The log must have this lane."""
        lane = self._lanes.get(number)
        if lane is None:
            head = self._heads.get(number) or LaneHead()
            log_time_ms = max(head.log_time_ms, self.now_ms)
            height = head.height + 1
            lane = LaneDraft(number, head, log_time_ms, height, head.position, head.eviction_time_ms, head.fence)
            self._lanes[number] = lane
        return lane

    # --- internal records

    def append_internal(
        self, lane: LaneDraft, policy: str, actor: str, body: bytes, *, scope: str = "", key: bytes = b""
    ) -> Record:
        """Append an internal record (`core.internal_records`) at the lane's position, which the caller has already
        advanced."""
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
        self.append(record, lane)
        return record

    def append(self, record: Record, lane: LaneDraft) -> None:
        """Append a record at its lane's position, which the caller has already advanced."""
        self.records.append(record)
        if lane.position % self.settings.eviction_interval == 0:
            # The eviction comes after the record, so it keeps the state that the record renewed.
            lane.eviction_time_ms = lane.log_time_ms

    # --- savepoints

    def savepoint(self) -> None:
        """Start recording changes, until `release` or `rollback`."""
        self._undo_log.is_open = True
        self._savepoint = (len(self.records), {number: replace(lane) for number, lane in self._lanes.items()})

    def release(self) -> None:
        """Keep the changes since the savepoint."""
        self._undo_log.is_open = False
        self._undo_log.entries.clear()

    def rollback(self) -> None:
        """Undo all changes since the savepoint."""
        self._undo_log.rollback()
        self.release()
        records, self._lanes = self._savepoint
        del self.records[records:]

    def collect_changes(self) -> Changes:
        """Return the changes to save."""
        tables: list[Any] = [overlay.changes for overlay in get_state_tables(self)]
        heads = {number: lane.build_head() for number, lane in self._lanes.items() if lane.is_touched}
        return Changes(*[*tables, self.records, heads, self.leap_above])
