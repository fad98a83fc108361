"""Read set of a batch: the keys that a store loads, in a constant number of statements, before `plan` decides."""

from collections.abc import Sequence

from msgspec import Struct, field

from oncelog.core.identity import compute_lane
from oncelog.core.limits import STORED_INTEGER_MAX
from oncelog.core.operations import DeleteEntity, SetEntity
from oncelog.core.policy import STREAM
from oncelog.core.rules.audit import act_identity
from oncelog.core.rules.quotas import iterate_rates
from oncelog.core.validation import check_item
from oncelog.core.values import (
    Acknowledge,
    Claim,
    ClientIdentity,
    ConsumerIdentity,
    DropTombstones,
    EntityIdentity,
    FoldRows,
    KeyIdentity,
    Leap,
    MemberIdentity,
    OpenStream,
    OtherItem,
    RateIdentity,
    RecordAct,
    Refused,
    RelationshipIdentity,
    Release,
    Renew,
    Request,
    RowIdentity,
    SequenceIdentity,
    SetCursor,
    SetMember,
    Settings,
    Submission,
    client_identity,
    enumerate_items,
    key_identity,
)


class ReadSet(Struct):
    """Keys that a batch may read or write, by snapshot table."""

    faults: dict[int, Refused] = field(default_factory=dict)
    """Refusals of malformed items by index in the batch, so that `plan` need not validate the items again."""
    lanes: set[int] = field(default_factory=set)
    keys: set[KeyIdentity] = field(default_factory=set)
    """`build_read_set` omits the identities of events in other scopes; `collect_event_identities` returns them."""
    sequences: set[SequenceIdentity] = field(default_factory=set)
    clients: set[ClientIdentity] = field(default_factory=set)
    streams: set[str] = field(default_factory=set)
    floors: set[str] = field(default_factory=set)
    """`build_read_set` leaves it empty. In a log with leaps, stores add the batch's streams (core/rules/leaps.py)."""
    entities: set[EntityIdentity] = field(default_factory=set)
    relationships: set[RelationshipIdentity] = field(default_factory=set)
    rows: set[RowIdentity] = field(default_factory=set)
    leases: set[KeyIdentity] = field(default_factory=set)
    members: set[MemberIdentity] = field(default_factory=set)
    oldest: dict[str, int] = field(default_factory=dict)
    """How many of the oldest members to load, by stream: one more than the batch can remove, so that one is left.

    Their acknowledgements are loaded with them.
    """
    rosters: set[str] = field(default_factory=set)
    acknowledged: set[MemberIdentity] = field(default_factory=set)
    consumers: set[ConsumerIdentity] = field(default_factory=set)
    horizons: set[str] = field(default_factory=set)
    rates: set[RateIdentity] = field(default_factory=set)
    usage: set[str] = field(default_factory=set)
    """Tenant prefixes. Stores add them once the lanes are locked and the tenants are known (`collect_usage_keys`)."""
    past_members: set[MemberIdentity] = field(default_factory=set)
    """Stores add these together with `usage`."""


def build_read_set(batch: Sequence[Request], settings: Settings) -> ReadSet:
    """Collect the keys of everything that `plan` reads for the batch. Stores lock the lanes in ascending order.

    Malformed items are refused without a lookup, because a store may be unable to represent their names.
    """
    read_set = ReadSet()
    for index, item in enumerate_items(batch):
        refused = check_item(item)
        if refused is not None:
            read_set.faults[index] = refused
        elif isinstance(item, Submission):
            _add_submission(item, read_set)
        else:
            _add_item(item, read_set, settings)
    read_set.lanes.update(compute_lane(stream, settings.lanes) for stream in read_set.streams)
    return read_set


def _add_item(item: OtherItem, read_set: ReadSet, settings: Settings) -> None:
    match item:
        case Claim() | Renew() | Release():
            read_set.leases.add(key_identity(item))
            if isinstance(item, Claim):
                read_set.keys.add(key_identity(item))
        case OpenStream() | SetMember():
            _add_member_change(item, read_set, settings)
        case Acknowledge():
            read_set.members.add((item.scope, item.member))
            read_set.acknowledged.add((item.scope, item.member))
        case SetCursor():
            read_set.consumers.add((item.scope, item.consumer))
        case DropTombstones():
            read_set.horizons.add(item.scope)
            read_set.consumers.update((item.scope, name) for name in item.consumers)
            read_set.rows.update((item.scope, tombstone.table, tombstone.row_id) for tombstone in item.tombstones)
        case FoldRows():
            read_set.rows.update((item.scope, table, row_id) for table, row_id in item.rows)
        case RecordAct() if item.key:
            read_set.keys.add(act_identity(item))
    _add_lanes(item, read_set, settings)


def _add_lanes(item: OtherItem, read_set: ReadSet, settings: Settings) -> None:
    """Add the stream of an item, or the lanes of an item without a stream."""
    if isinstance(item, Leap):
        read_set.lanes.update(range(settings.lanes + 1))
    elif item.scope:
        read_set.streams.add(item.scope)
    else:
        lane = item.lane if isinstance(item, RecordAct) else 0
        read_set.lanes.add(min(lane, settings.lanes))  # `plan` refuses a higher lane


def _add_member_change(item: OpenStream | SetMember, read_set: ReadSet, settings: Settings) -> None:
    scope = item.scope
    read_set.members.add((scope, item.member))
    read_set.rosters.add(scope)
    if isinstance(item, OpenStream):
        for _, bucket in iterate_rates(item):
            read_set.rates.add(bucket)
            read_set.lanes.add(compute_lane(bucket[0], settings.lanes))
        return
    if item.actor:
        read_set.members.add((scope, item.actor))
    if item.present:
        read_set.acknowledged.add((scope, item.member))
    else:
        read_set.oldest[scope] = read_set.oldest.get(scope, 1) + 1


def _add_submission(submission: Submission, read_set: ReadSet) -> None:
    policy, scope = submission.policy, submission.scope
    if submission.key:
        read_set.keys.add(key_identity(submission))
    if policy.order is STREAM:
        read_set.streams.add(scope)
    else:
        read_set.lanes.add(0)
    if policy.members_only:
        read_set.members.add((scope, submission.actor))
    if submission.rate is not None or submission.stream_rate is not None:
        read_set.rates.update(bucket for _, bucket in iterate_rates(submission))
    if policy.leased:
        read_set.leases.add(key_identity(submission))
    if policy.client_sequence:
        identity = client_identity(submission)
        read_set.clients.add(identity)
        if submission.client_sequence <= STORED_INTEGER_MAX:  # a higher sequence is always a gap
            read_set.sequences.add((*identity, submission.client_sequence))
    if policy.rows or policy.entities:
        add_effects(submission, read_set)


def add_effects(submission: Submission, read_set: ReadSet) -> None:
    """Add the entities, relationships and rows that a write's operations or delta may read or change."""
    scope = submission.scope
    if submission.delta is not None:
        read_set.rows.add((scope, submission.delta.table, submission.delta.row_id))
        read_set.horizons.add(scope)
    for operation in submission.operations:
        if isinstance(operation, SetEntity | DeleteEntity):
            read_set.entities.add((scope, operation.key))
        else:
            read_set.relationships.add((scope, operation.resource, operation.relation, operation.subject))
