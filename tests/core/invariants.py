"""Invariants of any history: a recorded run, a store on disk or a simulation.

Each invariant is a function that takes a History and yields the violations that it finds. The first four are
named as in the chat document (CH-13); the others check commits (CO-10 to CO-14, CO-17).
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from itertools import pairwise
from typing import Final, TypeVar

from msgspec import Struct, field
from msgspec.structs import replace

from oncelog.core.policy import BUILT_IN_POLICIES, RESTORE_POLICY, OnReuse, Policy, Retention, find_retention
from oncelog.core.values import (
    Committed,
    KeyIdentity,
    Member,
    MemberIdentity,
    Reason,
    Receipt,
    Record,
    Refused,
    Remembered,
    Replayed,
    Roster,
    SequenceIdentity,
    Settings,
    Verdict,
)

_Key = TypeVar("_Key", int, str)


class Answer(Struct, frozen=True):
    """The verdict that a caller received for a write."""

    identity: KeyIdentity
    fingerprint: bytes
    verdict: Verdict
    client_sequence: int = 0
    """The client sequence of the write, or 0 if its policy has none."""


class ObservedRead(Struct, frozen=True):
    """The records that a reader of a lane received, in order of arrival, until it caught up with `upto`."""

    reader: str
    lane: int
    after: int
    upto: int
    seen: Sequence[tuple[int, KeyIdentity]]
    """Position and identity of each record."""
    partition: str | None = None
    """The partition that was read, or None for all records."""


class ObservedSync(Struct, frozen=True):
    """The sequences that a client received while it caught up from `after` to `upto`, the newest at that time."""

    client: str
    scope: str
    after: int
    upto: int
    sequences: Sequence[int]


class History(Struct):
    """Everything recorded about a run. A field that was not recorded remains empty and is not checked."""

    records: Sequence[Record]
    """All records in the store."""
    settings: Settings = Settings()
    policies: Mapping[str, Policy] = field(
        default_factory=lambda: {policy.name: policy for policy in BUILT_IN_POLICIES}
    )
    answers: Sequence[Answer] = ()
    """In the order in which the callers received them."""
    readings: Sequence[ObservedRead] = ()
    syncs: Sequence[ObservedSync] = ()
    acknowledged: Mapping[MemberIdentity, int] = field(default_factory=dict)
    members: Mapping[MemberIdentity, Member] | None = None
    rosters: Mapping[str, Roster] = field(default_factory=dict)
    keys: Mapping[KeyIdentity, Remembered] | None = None
    """The keys that the store remembers, or None if they were not read."""
    streams: Mapping[str, int] | None = None
    positions: Mapping[int, int] | None = None
    """The newest position of each lane according to its head."""


class Violation(Struct, frozen=True):
    """An invariant that does not hold, and where."""

    invariant: str
    message: str


Invariant = Callable[[History], Iterator[str]]


# --- invariants from the chat document ---------------------------------------------------------------


def sequence_monotonic(history: History) -> Iterator[str]:
    """Sequences of a stream increase with the position."""
    last: dict[str, Record] = {}
    for record in _sort_by_position(history.records):
        if not record.sequence:
            continue
        before = last.get(record.scope)
        if before is not None and before.lane != record.lane:
            yield f"stream {record.scope!r} is in lanes {before.lane} and {record.lane}"
        if before is not None and before.sequence >= record.sequence:
            yield (
                f"stream {record.scope!r}: sequence {record.sequence} at position {record.position} "
                f"comes after {before.sequence} at position {before.position}"
            )
        last[record.scope] = record


def idempotency_guarantee(history: History) -> Iterator[str]:
    """A key or client sequence has one record as long as it is remembered."""
    evictions = _Evictions(history)
    groups: list[tuple[KeyIdentity | SequenceIdentity, list[Record]]] = [*_group_by_key(history).items()]
    groups += _group_by_client_sequence(history).items()
    for name, records in groups:
        retention = find_retention(name[0], history.policies)
        if retention is None:
            yield f"{_format_identity(name)}: unknown policy"
            continue
        for before, after in pairwise(records):
            if not evictions.is_forgotten(retention, before, after):
                yield f"{_format_identity(name)}: stored at position {before.position} and again at {after.position}"


def sync_completeness(history: History) -> Iterator[str]:
    """A client that has caught up has every record in its range."""
    stored: dict[str, set[int]] = defaultdict(set)
    for record in history.records:
        stored[record.scope].add(record.sequence)
    for sync in history.syncs:
        wanted = {sequence for sequence in stored[sync.scope] if sync.after < sequence <= sync.upto}
        missing = sorted(wanted.difference(sync.sequences))
        if missing:
            yield f"{sync.client} caught up on {sync.scope!r} from {sync.after} without {missing[:10]}"


def delivery_state_consistency(history: History) -> Iterator[str]:
    """Acknowledged sequences exist."""
    last: dict[str, int] = defaultdict(int)
    for record in history.records:
        last[record.scope] = max(last[record.scope], record.sequence)
    for (scope, member), sequence in history.acknowledged.items():
        if sequence > last[scope]:
            yield f"{member} has acknowledged {sequence} of {scope!r}, which ends at {last[scope]}"


def streams_have_owners(history: History) -> Iterator[str]:
    """CH-19: a stream with members has an owner, and its roster has the right counts."""
    if history.members is None:
        return
    members: dict[str, list[Member]] = defaultdict(list)
    for (scope, _), member in history.members.items():
        members[scope].append(member)
    for scope in members.keys() | history.rosters.keys():
        known, roster = members[scope], history.rosters.get(scope)
        owners = sum(member.is_owner for member in known)
        if roster is None or (roster.members, roster.owners or 0) != (len(known), owners):
            yield f"stream {scope!r} has {len(known)} members and {owners} owners, but its roster is {roster}"
        elif known and roster.owners == 0:
            yield f"stream {scope!r} has members but no owner"
        elif len({member.joined for member in known if 1 <= member.joined <= roster.joined}) != len(known):
            yield f"stream {scope!r}: the order of joining has repeated or unknown numbers"


# --- invariants of commits ---------------------------------------------------------------------------


def commits_are_whole(history: History) -> Iterator[str]:
    """CO-10: a record, its key, its sequence and the lane head are stored together, and numbers have no holes."""
    positions: dict[int, list[int]] = defaultdict(list)
    streams: dict[str, list[int]] = defaultdict(list)
    for record in history.records:
        positions[record.lane].append(record.position)
        if record.sequence:
            streams[record.scope].append(record.sequence)
    leaps = {record.position - 1 for record in history.records if record.policy == RESTORE_POLICY}
    yield from _find_holes("lane", positions, history.positions, leaps)
    yield from _find_holes("stream", streams, history.streams, leaps)
    if history.keys is not None:
        yield from _find_keys_without_records(history, history.keys)
        yield from _find_records_without_keys(history, history.keys)


def log_time_never_goes_back(history: History) -> Iterator[str]:
    """CO-17: log time never decreases within a lane."""
    for before, after in pairwise(_sort_by_position(history.records)):
        if before.lane == after.lane and before.log_time_ms > after.log_time_ms:
            yield f"lane {after.lane}: log time goes back at position {after.position}"


def answers_are_durable(history: History) -> Iterator[str]:
    """CO-11: the receipt in a verdict belongs to a stored record of the same write."""
    stored = {record.receipt: (identity, record) for identity, record in _iterate_with_identity(history)}
    for answer in history.answers:
        if not isinstance(answer.verdict, Committed | Replayed):
            continue
        receipt = answer.verdict.receipt
        if receipt is None:
            policy = history.policies.get(answer.identity[0])
            if policy is None or not policy.client_sequence:
                yield f"{_format_identity(answer.identity)}: answered as committed, but without a receipt"
        elif receipt not in stored:
            yield f"{_format_identity(answer.identity)}: answered as {receipt}, which is not stored"
        elif not _matches_record(answer, *stored[receipt]):
            yield f"{_format_identity(answer.identity)}: answered with the receipt of a different write"


def numbers_are_never_reused(history: History) -> Iterator[str]:
    """CO-12: a position or a sequence of a stream belongs to one write in all answers and reads."""
    positions: dict[tuple[int, int], KeyIdentity] = {}
    sequences: dict[tuple[str, int], KeyIdentity] = {}
    for lane, position, scope, sequence, identity in _iterate_numbers(history):
        if positions.setdefault((lane, position), identity) != identity:
            yield f"position {position} of lane {lane} was given to two writes"
        if sequence and sequences.setdefault((scope, sequence), identity) != identity:
            yield f"sequence {sequence} of stream {scope!r} was given to two writes"


def readers_miss_nothing(history: History) -> Iterator[str]:
    """CO-13: a reader receives every record after its cursor once, in order."""
    lanes: dict[int, list[Record]] = defaultdict(list)
    for record in _sort_by_position(history.records):
        lanes[record.lane].append(record)
    for reading in history.readings:
        wanted = [
            record.position
            for record in lanes[reading.lane]
            if reading.after < record.position <= reading.upto
            and (reading.partition is None or reading.partition in record.partitions)
        ]
        seen = [position for position, _ in reading.seen]
        if seen != wanted:
            place = next(place for place in range(len(seen) + 1) if seen[: place + 1] != wanted[: place + 1])
            yield (
                f"{reading.reader} on lane {reading.lane} from {reading.after}: "
                f"saw {seen[place : place + 3]} where {wanted[place : place + 3]} was next"
            )


def one_outcome_each_identity(history: History) -> Iterator[str]:
    """CO-14: one submission commits, equal submissions get the same receipt, and different content is reported."""
    stored = _group_by_key(history)
    evictions = _Evictions(history)
    first_receipts: set[Receipt] = set()
    committed: set[tuple[KeyIdentity, bytes]] = set()
    for answer in history.answers:
        verdict, name = answer.verdict, _format_identity(answer.identity)
        if isinstance(verdict, Committed):
            if verdict.receipt in first_receipts:
                yield f"{name}: two submissions were answered as committed"
            first_receipts.add(verdict.receipt)
        records = stored.get(answer.identity, [])
        policy = history.policies.get(answer.identity[0])
        if policy is None or not records or _is_sequence_retry(answer, records):
            continue
        if all(record.fingerprint != answer.fingerprint for record in records):
            if _hides_mismatch(verdict, policy):
                yield f"{name}: a submission with different content was not answered as a mismatch"
        elif isinstance(verdict, Committed | Replayed) and not _reports_mismatch(verdict):
            committed.add((answer.identity, answer.fingerprint))
        elif (
            # A refusal before the commit, or after the key was forgotten, is correct.
            _reports_mismatch(verdict)
            and (answer.identity, answer.fingerprint) in committed
            and len(records) == 1
            and evictions.is_remembered(policy.retention, records[0])
        ):
            yield f"{name}: a submission with equal content was answered as a mismatch"


def _is_sequence_retry(answer: Answer, records: Sequence[Record]) -> bool:
    """Whether a submission was replayed by its client sequence, while its key belongs to a different write."""
    if not answer.client_sequence or not isinstance(answer.verdict, Replayed):
        return False
    return answer.verdict.receipt not in [record.receipt for record in records]


def _hides_mismatch(verdict: Verdict, policy: Policy) -> bool:
    if isinstance(verdict, Replayed) and verdict.receipt is not None:
        return policy.on_reuse is OnReuse.REFUSE or not verdict.mismatch
    return isinstance(verdict, Committed)


def _reports_mismatch(verdict: Verdict) -> bool:
    if isinstance(verdict, Refused):
        return verdict.reason in {Reason.IDENTITY_REUSED, Reason.SEQUENCE_REUSED}
    return isinstance(verdict, Replayed) and verdict.mismatch


INVARIANTS: Final[Sequence[Invariant]] = (
    sequence_monotonic,
    idempotency_guarantee,
    sync_completeness,
    delivery_state_consistency,
    streams_have_owners,
    commits_are_whole,
    log_time_never_goes_back,
    answers_are_durable,
    numbers_are_never_reused,
    readers_miss_nothing,
    one_outcome_each_identity,
)


def find_violations(history: History, invariants: Iterable[Invariant] = INVARIANTS) -> list[Violation]:
    """Return all violations in a history."""
    return [
        Violation(getattr(invariant, "__name__", repr(invariant)), message)
        for invariant in invariants
        for message in invariant(history)
    ]


# --- lookups -----------------------------------------------------------------------------------------


class _Evictions:
    """The positions at which each lane evicted keys, derived from its records."""

    def __init__(self, history: History) -> None:
        interval = history.settings.eviction_interval
        self._positions: dict[int, list[int]] = defaultdict(list)
        self._times_ms: dict[int, list[int]] = defaultdict(list)
        self._newest: dict[int, Record] = {}
        for record in _sort_by_position(history.records):
            self._newest[record.lane] = record
            if record.position % interval == 0:
                self._positions[record.lane].append(record.position)
                self._times_ms[record.lane].append(record.log_time_ms)

    def is_forgotten(self, retention: Retention, before: Record, after: Record) -> bool:
        """Whether the key of `before` was forgotten when `after` was decided."""
        evicted = bisect_left(self._positions[before.lane], after.position)
        eviction_time_ms = self._times_ms[before.lane][evicted - 1] if evicted else 0
        return not retention.remembers(before.log_time_ms, after.log_time_ms, eviction_time_ms)

    def is_remembered(self, retention: Retention, record: Record) -> bool:
        """Whether the key of the record is still remembered after the newest record of its lane."""
        newest = self._newest[record.lane]
        return not self.is_forgotten(retention, record, replace(newest, position=newest.position + 1))


def _sort_by_position(records: Iterable[Record]) -> list[Record]:
    return sorted(records, key=lambda record: (record.lane, record.position))


def _iterate_with_identity(history: History) -> Iterator[tuple[KeyIdentity, Record]]:
    for record in history.records:
        policy = history.policies.get(record.policy)
        client = record.client if policy is not None and policy.client_sequence else ""
        yield (record.policy, record.scope, client, record.key), record


def _group_by_key(history: History) -> dict[KeyIdentity, list[Record]]:
    """Group the records by key, oldest first. Records without a key are omitted."""
    found: dict[KeyIdentity, list[Record]] = defaultdict(list)
    for identity, record in _iterate_with_identity(history):
        if record.key:
            found[identity].append(record)
    return {identity: _sort_by_position(records) for identity, records in found.items()}


def _group_by_client_sequence(history: History) -> dict[SequenceIdentity, list[Record]]:
    found: dict[SequenceIdentity, list[Record]] = defaultdict(list)
    for record in history.records:
        if record.client_sequence:
            found[record.policy, record.scope, record.client, record.client_sequence].append(record)
    return {identity: _sort_by_position(records) for identity, records in found.items()}


def _matches_record(answer: Answer, identity: KeyIdentity, record: Record) -> bool:
    """Whether an answer belongs to the record by its key or by its client sequence."""
    if answer.identity == identity and record.key:
        return True
    is_same_sequence = bool(record.client_sequence) and answer.client_sequence == record.client_sequence
    return is_same_sequence and answer.identity[:3] == identity[:3]


def _iterate_numbers(history: History) -> Iterator[tuple[int, int, str, int, KeyIdentity]]:
    """Yield lane, position, scope, sequence and identity of writes from all records, answers and reads."""
    for identity, record in _iterate_with_identity(history):
        yield record.lane, record.position, record.scope, record.sequence, identity
    owners = {
        (record.lane, record.position): (identity, record) for identity, record in _iterate_with_identity(history)
    }
    for answer in history.answers:
        receipt = answer.verdict.receipt if isinstance(answer.verdict, Committed | Replayed) else None
        if receipt is not None:
            owner = owners.get((receipt.lane, receipt.position))
            identity = owner[0] if owner is not None and _matches_record(answer, *owner) else answer.identity
            yield receipt.lane, receipt.position, answer.identity[1], receipt.sequence, identity
    for reading in history.readings:
        for position, identity in reading.seen:
            yield reading.lane, position, identity[1], 0, identity


def _find_keys_without_records(history: History, keys: Mapping[KeyIdentity, Remembered]) -> Iterator[str]:
    stored = _group_by_key(history)
    for identity, remembered in keys.items():
        records = stored.get(identity)
        if not records:
            yield f"{_format_identity(identity)}: remembered, but not stored"
        elif (records[-1].receipt, records[-1].fingerprint) != (remembered.receipt, remembered.fingerprint):
            yield f"{_format_identity(identity)}: remembered differently from position {records[-1].position}"


def _find_records_without_keys(history: History, keys: Mapping[KeyIdentity, Remembered]) -> Iterator[str]:
    """Yield records whose keys are missing although they must still be remembered."""
    evictions = _Evictions(history)
    for identity, records in _group_by_key(history).items():
        retention = find_retention(identity[0], history.policies)
        if identity not in keys and retention is not None and evictions.is_remembered(retention, records[-1]):
            yield f"{_format_identity(identity)}: stored, but not remembered"


def _find_holes(
    kind: str, numbers: Mapping[_Key, list[int]], newest: Mapping[_Key, int] | None, leaps: Set[int]
) -> Iterator[str]:
    for key, found in numbers.items():
        in_order: list[int] = sorted(found)
        for before, after in pairwise([0, *in_order]):
            if after != before + 1 and after - 1 not in leaps:
                yield f"the records of {kind} {key!r} are not dense: {after} follows {before}, without a leap"
    for key in () if newest is None else sorted(numbers.keys() | newest.keys(), key=repr):
        last = max(numbers.get(key, ()), default=0)
        if newest is not None and newest.get(key, 0) != last:
            yield f"the head of {kind} {key!r} is at {newest.get(key, 0)}, its newest record at {last}"


def _format_identity(identity: KeyIdentity | SequenceIdentity) -> str:
    policy, scope, client, key = identity
    return f"{policy} {scope!r} {f'{client!r} ' if client else ''}{key.hex() if isinstance(key, bytes) else key}"
