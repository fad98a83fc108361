"""What a store must load before a batch can be decided, named all at once: a constant number of statements."""

from collections.abc import Sequence
from typing import Final

from msgspec import Struct, field

from oncelog.core.audit import act_identity
from oncelog.core.identity import lane_of
from oncelog.core.limits import STORED_INTEGER_MAX
from oncelog.core.operations import DeleteEntity, SetEntity
from oncelog.core.policy import Order
from oncelog.core.shape import malformed
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
    key_identity,
    open_rate_identity,
    rate_identity,
    stream_rate_identity,
)

_STREAM: Final = Order.STREAM  # as in `desk`: asked for every item


class Footprint(Struct):
    """The keys of every table of a snapshot that a batch may read or write."""

    faults: dict[int, Refused] = field(default_factory=dict)
    """What is malformed, by the item's `id`, for as long as the batch lives: `plan` need not check again."""
    lanes: set[int] = field(default_factory=set)
    keys: set[KeyIdentity] = field(default_factory=set)
    """Those of events in other scopes are not named by `footprint`, as `usage` (`event_id_needs`)."""
    sequences: set[SequenceIdentity] = field(default_factory=set)
    clients: set[ClientIdentity] = field(default_factory=set)
    streams: set[str] = field(default_factory=set)
    floors: set[str] = field(default_factory=set)
    """Not named by `footprint`: the streams of the batch, in a log that has leapt (core/leaps.py)."""
    entities: set[EntityIdentity] = field(default_factory=set)
    relationships: set[RelationshipIdentity] = field(default_factory=set)
    rows: set[RowIdentity] = field(default_factory=set)
    leases: set[KeyIdentity] = field(default_factory=set)
    members: set[MemberIdentity] = field(default_factory=set)
    oldest: dict[str, int] = field(default_factory=dict)
    """How many of the oldest members to load, by stream: one more than the batch can remove, so that one is left.

    What they have acknowledged is loaded with them.
    """
    rosters: set[str] = field(default_factory=set)
    acknowledged: set[MemberIdentity] = field(default_factory=set)
    consumers: set[ConsumerIdentity] = field(default_factory=set)
    horizons: set[str] = field(default_factory=set)
    rates: set[RateIdentity] = field(default_factory=set)
    usage: set[str] = field(default_factory=set)
    """By prefix. Not named by `footprint`: the tenants are known once the lanes are locked (`quota_needs`)."""
    past_members: set[MemberIdentity] = field(default_factory=set)
    """Also named by `quota_needs`."""


def footprint(batch: Sequence[Request], settings: Settings) -> Footprint:
    """Names everything that `plan` looks at for the batch. Lanes are to be locked in ascending order.

    What is malformed is refused before anything is looked at, and might not even be a name that a store can look for.
    """
    needs = Footprint()
    for request in batch:
        for item in request.items:
            refused = malformed(item)
            if refused is not None:
                needs.faults[id(item)] = refused
            elif isinstance(item, Submission):
                _add_submission(item, needs)
            else:
                _add(item, needs, settings)
    needs.lanes.update(lane_of(stream, settings.lanes) for stream in needs.streams)
    return needs


def _add(item: OtherItem, needs: Footprint, settings: Settings) -> None:
    match item:
        case Claim():
            needs.keys.add(key_identity(item))
            _add_lease(item, needs)
        case Renew() | Release():
            _add_lease(item, needs)
        case OpenStream() | SetMember() | Acknowledge():
            _add_member(item, needs, settings)
        case SetCursor():
            needs.consumers.add((item.scope, item.consumer))
            _add_lane(item.scope, 0, needs)
        case DropTombstones() | FoldRows():
            _add_compaction(item, needs)
        case Leap():
            needs.lanes.update(range(settings.lanes + 1))
        case RecordAct():
            _add_act(item, needs, settings)


def _add_lease(item: Claim | Renew | Release, needs: Footprint) -> None:
    needs.leases.add(key_identity(item))
    needs.streams.add(item.scope)


def _add_member(item: OpenStream | SetMember | Acknowledge, needs: Footprint, settings: Settings) -> None:
    needs.members.add((item.scope, item.member))
    needs.streams.add(item.scope)
    if isinstance(item, Acknowledge):
        needs.acknowledged.add((item.scope, item.member))
    else:
        _add_member_change(item, needs, settings)


def _add_act(item: RecordAct, needs: Footprint, settings: Settings) -> None:
    if item.key:
        needs.keys.add(act_identity(item))
    if item.lane <= settings.lanes:  # `plan` refuses another lane
        _add_lane(item.scope, item.lane, needs)


def _add_lane(scope: str, lane: int, needs: Footprint) -> None:
    """Add the lane of a stream, or the given one where no stream is named."""
    if scope:
        needs.streams.add(scope)
    else:
        needs.lanes.add(lane)


def _add_member_change(item: OpenStream | SetMember, needs: Footprint, settings: Settings) -> None:
    needs.rosters.add(item.scope)
    if isinstance(item, OpenStream):
        if item.rate is not None:
            identity = open_rate_identity(item)
            needs.rates.add(identity)
            needs.lanes.add(lane_of(identity[0], settings.lanes))
        return
    if item.actor:
        needs.members.add((item.scope, item.actor))
    if item.present:
        needs.acknowledged.add((item.scope, item.member))
    else:
        needs.oldest[item.scope] = needs.oldest.get(item.scope, 1) + 1


def _add_compaction(item: DropTombstones | FoldRows, needs: Footprint) -> None:
    scope = item.scope
    needs.streams.add(scope)
    if isinstance(item, FoldRows):
        needs.rows.update((scope, table, row_id) for table, row_id in item.rows)
        return
    needs.horizons.add(scope)
    needs.consumers.update((scope, name) for name in item.consumers)
    needs.rows.update((scope, one.table, one.row_id) for one in item.tombstones)


def _add_submission(submission: Submission, needs: Footprint) -> None:
    policy, scope = submission.policy, submission.scope
    if submission.key:
        needs.keys.add(key_identity(submission))
    if policy.order is _STREAM:
        needs.streams.add(scope)
    else:
        needs.lanes.add(0)
    if policy.members_only:
        needs.members.add((scope, submission.actor))
    if submission.rate is not None:
        needs.rates.add(rate_identity(submission))
    if submission.stream_rate is not None:
        needs.rates.add(stream_rate_identity(submission))
    if policy.leased:
        needs.leases.add(key_identity(submission))
    if policy.client_sequence:
        identity = client_identity(submission)
        needs.clients.add(identity)
        if submission.client_sequence <= STORED_INTEGER_MAX:  # a higher one can only be a gap
            needs.sequences.add((*identity, submission.client_sequence))
    if policy.rows or policy.entities:
        add_effects(submission, needs)


def add_effects(submission: Submission, needs: Footprint) -> None:
    """Name the entities, relationships and rows that a write's operations or delta may read or change."""
    scope = submission.scope
    if submission.delta is not None:
        needs.rows.add((scope, submission.delta.table, submission.delta.row_id))
        needs.horizons.add(scope)
    for operation in submission.operations:
        if isinstance(operation, SetEntity | DeleteEntity):
            needs.entities.add((scope, operation.key))
        else:
            needs.relationships.add((scope, operation.resource, operation.relation, operation.subject))
