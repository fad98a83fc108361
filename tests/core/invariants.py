"""What must hold over any history, as functions: a recorded run, a store on disk, a simulation.

Each function takes a History and yields the violations that it finds. The first four have the names of the chat
document (CH-13), the others belong to the commit (CO-10 to CO-14, CO-17).
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
    """What a caller was told about a write."""

    identity: KeyIdentity
    fingerprint: bytes
    verdict: Verdict
    client_sequence: int = 0
    """As it was sent, where clients number their writes."""


class ObservedRead(Struct, frozen=True):
    """What a reader of a lane saw, in the order it saw it, until it had caught up with `upto`."""

    reader: str
    lane: int
    after: int
    upto: int
    seen: Sequence[tuple[int, KeyIdentity]]
    """Position and identity of each record."""
    partition: str | None = None
    """Only records that touch it, where named."""


class ObservedSync(Struct, frozen=True):
    """What a client had of a stream after it caught up from `after` with `upto`, the newest at that time."""

    client: str
    scope: str
    after: int
    upto: int
    sequences: Sequence[int]


class History(Struct):
    """Everything that is known about a run. What was not recorded stays empty and is not judged."""

    records: Sequence[Record]
    """What the store holds."""
    settings: Settings = Settings()
    policies: Mapping[str, Policy] = field(
        default_factory=lambda: {policy.name: policy for policy in BUILT_IN_POLICIES}
    )
    answers: Sequence[Answer] = ()
    """In the order in which they were told."""
    readings: Sequence[ObservedRead] = ()
    syncs: Sequence[ObservedSync] = ()
    acknowledged: Mapping[MemberIdentity, int] = field(default_factory=dict)
    members: Mapping[MemberIdentity, Member] | None = None
    rosters: Mapping[str, Roster] = field(default_factory=dict)
    keys: Mapping[KeyIdentity, Remembered] | None = None
    """What the store remembers of keys that have not been forgotten."""
    streams: Mapping[str, int] | None = None
    positions: Mapping[int, int] | None = None
    """The newest position of each lane, by its head."""


class Violation(Struct, frozen=True):
    """Something that must not be."""

    invariant: str
    message: str


Invariant = Callable[[History], Iterator[str]]


# --- the four of the chat document -------------------------------------------------------------------


def sequence_monotonic(history: History) -> Iterator[str]:
    """In each stream, what was persisted later has the higher sequence."""
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
    """While a key, or a client's sequence number, is remembered there is one record of it."""
    evictions = _Evictions(history)
    groups: list[tuple[KeyIdentity | SequenceIdentity, list[Record]]] = [*_group_by_key(history).items()]
    groups += _group_by_client_sequence(history).items()
    for name, records in groups:
        retention = find_retention(name[0], history.policies)
        if retention is None:
            yield f"{_format_identity(name)}: the policy is not known"
            continue
        for before, after in pairwise(records):
            if not evictions.is_forgotten(retention, before, after):
                yield f"{_format_identity(name)}: stored at position {before.position} and again at {after.position}"


def sync_completeness(history: History) -> Iterator[str]:
    """A client that has caught up has every record of its range."""
    stored: dict[str, set[int]] = defaultdict(set)
    for record in history.records:
        stored[record.scope].add(record.sequence)
    for sync in history.syncs:
        wanted = {sequence for sequence in stored[sync.scope] if sync.after < sequence <= sync.upto}
        missing = sorted(wanted.difference(sync.sequences))
        if missing:
            yield f"{sync.client} caught up on {sync.scope!r} from {sync.after} without {missing[:10]}"


def delivery_state_consistency(history: History) -> Iterator[str]:
    """Nobody has acknowledged what does not exist."""
    last: dict[str, int] = defaultdict(int)
    for record in history.records:
        last[record.scope] = max(last[record.scope], record.sequence)
    for (scope, member), sequence in history.acknowledged.items():
        if sequence > last[scope]:
            yield f"{member} has acknowledged {sequence} of {scope!r}, which ends at {last[scope]}"


def streams_have_owners(history: History) -> Iterator[str]:
    """CH-19: a stream with members has an owner once one was named, and its roster counts what there is."""
    if history.members is None:
        return
    members: dict[str, list[Member]] = defaultdict(list)
    for (scope, _), member in history.members.items():
        members[scope].append(member)
    for scope in members.keys() | history.rosters.keys():
        known, roster = members[scope], history.rosters.get(scope)
        owners = sum(member.is_owner for member in known)
        if roster is None or (roster.members, roster.owners or 0) != (len(known), owners):
            yield f"stream {scope!r} has {len(known)} members and {owners} owners, and its roster is {roster}"
        elif known and roster.owners == 0:
            yield f"stream {scope!r} has members and no owner"
        elif len({member.joined for member in known if 1 <= member.joined <= roster.joined}) != len(known):
            yield f"stream {scope!r}: the order of joining has repeated or unknown numbers"


# --- those of the commit -----------------------------------------------------------------------------


def commits_are_whole(history: History) -> Iterator[str]:
    """CO-10: a record, its key, its sequence and its lane's head are there together or not at all, without holes."""
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
    """CO-17: in a lane, what was committed later has no earlier log time."""
    for before, after in pairwise(_sort_by_position(history.records)):
        if before.lane == after.lane and before.log_time_ms > after.log_time_ms:
            yield f"lane {after.lane}: log time goes back at position {after.position}"


def answers_are_durable(history: History) -> Iterator[str]:
    """CO-11: whoever was told of a commit was told of a record that is there, and is that write's."""
    stored = {record.receipt: (identity, record) for identity, record in _iterate_with_identity(history)}
    for answer in history.answers:
        if not isinstance(answer.verdict, Committed | Replayed):
            continue
        receipt = answer.verdict.receipt
        if receipt is None:
            policy = history.policies.get(answer.identity[0])
            if policy is None or not policy.client_sequence:
                yield f"{_format_identity(answer.identity)}: answered as committed, without a place"
        elif receipt not in stored:
            yield f"{_format_identity(answer.identity)}: answered as {receipt}, which is not stored"
        elif not _matches_record(answer, *stored[receipt]):
            yield f"{_format_identity(answer.identity)}: answered with the place of another write"


def numbers_are_never_reused(history: History) -> Iterator[str]:
    """CO-12: a position, and a sequence of a stream, belong to one write for ever, whoever saw it."""
    positions: dict[tuple[int, int], KeyIdentity] = {}
    sequences: dict[tuple[str, int], KeyIdentity] = {}
    for lane, position, scope, sequence, identity in _iterate_numbers(history):
        if positions.setdefault((lane, position), identity) != identity:
            yield f"position {position} of lane {lane} was given to two writes"
        if sequence and sequences.setdefault((scope, sequence), identity) != identity:
            yield f"sequence {sequence} of stream {scope!r} was given to two writes"


def readers_miss_nothing(history: History) -> Iterator[str]:
    """CO-13: a reader sees every record after its cursor once, in order."""
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
    """CO-14: one submission is told that it committed; equal ones get its answer, others are told that they differ."""
    stored = _group_by_key(history)
    evictions = _Evictions(history)
    first_receipts: set[Receipt] = set()
    committed: set[tuple[KeyIdentity, bytes]] = set()
    for answer in history.answers:
        verdict, name = answer.verdict, _format_identity(answer.identity)
        if isinstance(verdict, Committed):
            if verdict.receipt in first_receipts:
                yield f"{name}: two submissions were told that they committed"
            first_receipts.add(verdict.receipt)
        records = stored.get(answer.identity, [])
        policy = history.policies.get(answer.identity[0])
        if policy is None or not records or _is_sequence_retry(answer, records):
            continue
        if all(record.fingerprint != answer.fingerprint for record in records):
            if _hides_mismatch(verdict, policy):
                yield f"{name}: a submission with different content was not told so"
        elif isinstance(verdict, Committed | Replayed) and not _reports_mismatch(verdict):
            committed.add((answer.identity, answer.fingerprint))
        elif (
            # What was refused before the commit, or after the key was forgotten, was refused rightly.
            _reports_mismatch(verdict)
            and (answer.identity, answer.fingerprint) in committed
            and len(records) == 1
            and evictions.is_remembered(policy.retention, records[0])
        ):
            yield f"{name}: an equal submission was told that it differs"


def _is_sequence_retry(answer: Answer, records: Sequence[Record]) -> bool:
    """Answered as the retry of a client's number, while the key that came with it is another write's, or was later."""
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
    """All that is wrong with a history."""
    return [
        Violation(getattr(invariant, "__name__", repr(invariant)), message)
        for invariant in invariants
        for message in invariant(history)
    ]


# --- how they look things up -------------------------------------------------------------------------


class _Evictions:
    """The positions at which a lane evicted, read off its records."""

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
        """Whether what `before` left to remember was gone when `after` was decided."""
        evicted = bisect_left(self._positions[before.lane], after.position)
        eviction_time_ms = self._times_ms[before.lane][evicted - 1] if evicted else 0
        return not retention.remembers(before.log_time_ms, after.log_time_ms, eviction_time_ms)

    def is_remembered(self, retention: Retention, record: Record) -> bool:
        """Whether what the record left to remember is still there after the newest record of its lane."""
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
    """The records of each key, oldest first. One that came without a key is known by its client sequence only."""
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
    """An answer is the record's by its key, or by the number that the client gave it."""
    if answer.identity == identity and record.key:
        return True
    is_same_sequence = bool(record.client_sequence) and answer.client_sequence == record.client_sequence
    return is_same_sequence and answer.identity[:3] == identity[:3]


def _iterate_numbers(history: History) -> Iterator[tuple[int, int, str, int, KeyIdentity]]:
    """Lane, position, scope, sequence and identity of every write, by everyone who has seen it."""
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
            yield f"{_format_identity(identity)}: remembered otherwise than stored at position {records[-1].position}"


def _find_records_without_keys(history: History, keys: Mapping[KeyIdentity, Remembered]) -> Iterator[str]:
    """A key may be missing only if it has been forgotten by the newest record of its lane."""
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
            yield f"the head of {kind} {key!r} says {newest.get(key, 0)}, its records say {last}"


def _format_identity(identity: KeyIdentity | SequenceIdentity) -> str:
    policy, scope, client, key = identity
    return f"{policy} {scope!r} {f'{client!r} ' if client else ''}{key.hex() if isinstance(key, bytes) else key}"
