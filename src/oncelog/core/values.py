"""Input and output values of `plan`: submissions, verdicts, records and side state.

All values are frozen except Snapshot and Changes, which hold a store's tables: mappings from the keys to the values
defined below. Times are log time in milliseconds, and their names end with the unit. No value can be part of a
reference cycle, so the garbage collector does not track them (`gc=False`). This matters because a log creates and keeps
many of them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, Literal, Never, NoReturn, Self, TypeGuard, TypeVar

from msgspec import Struct, field, structs

from oncelog.core.limits import (
    EVICTION_INTERVAL_DEFAULT,
    EVICTION_INTERVAL_MAX,
    LANES_DEFAULT,
    LANES_MAX,
    LEASE_MS_DEFAULT,
    check_whole_numbers,
)
from oncelog.core.merge import Row, RowDelta, Stamp
from oncelog.core.operations import Entity, Operation
from oncelog.core.policy import Policy
from oncelog.core.tenants import Tenants, Usage
from oncelog.errors import RefusedError, RetryLaterError
from oncelog.refusal_reasons import TEMPORARY_REASONS
from oncelog.refusal_reasons import Reason as Reason  # noqa: PLC0414 - values and their reasons are imported together

if TYPE_CHECKING:
    import typing_extensions  # type variables have no defaults before Python 3.13

    ReceiptT_co = typing_extensions.TypeVar(
        "ReceiptT_co", bound="Receipt | None", default="Receipt | None", covariant=True
    )
else:
    ReceiptT_co = TypeVar("ReceiptT_co", covariant=True)

ReceiptT = TypeVar("ReceiptT", bound="Receipt | None")
R = TypeVar("R")

# --- input -------------------------------------------------------------------------------------------


class Rate(Struct, frozen=True, gc=False):
    """Limit on new writes."""

    per_second: int
    """Sustained rate."""
    burst: int
    """Largest burst of new writes after a pause."""


class KeyedItem(Struct, frozen=True, gc=False, kw_only=True):
    """Fields of the items that refer to a key."""

    policy: Policy
    scope: str
    """Namespace in which the key is unique. With Order.STREAM it is also the name of the stream."""
    key: bytes


class Submission(KeyedItem, Generic[ReceiptT_co], frozen=True, gc=False, kw_only=True):
    """A write as an API submits it to the log. The API has already checked its shape, its sender and the sender's
    rights.

    The type argument is the receipt of a retry. `Submission[Receipt]` is a write whose retries always get a receipt. It
    is `Receipt | None` if a client numbers its writes, because the log can know that a write was committed although it
    has forgotten its receipt.
    """

    fingerprint: bytes
    """Hash of the content: equal fingerprints mean equal writes."""
    body: bytes = b""
    actor: str = ""
    partitions: tuple[str, ...] = ()
    client: str = ""
    client_sequence: int = 0
    expected_position: int | None = None
    """Commit only if this is the newest position of the lane."""
    expected_sequence: int | None = None
    """Commit only if this is the newest sequence of the stream."""
    operations: tuple[Operation, ...] = ()
    delta: RowDelta | None = None
    holder: str = ""
    fence: int = 0
    """`holder` and `fence` identify the lease under which the client did the work for this write."""
    known_only: bool = False
    """Answer the submission only if its key is stored; refuse a new write with NOT_KNOWN."""
    rate: Rate | None = None
    """Limit on the actor's new writes, per stream, or in the whole log with Order.LANE.

    A new write takes one token. Work under a lease takes none, because the claim took it.
    """
    stream_rate: Rate | None = None
    """Limit on all new writes in the stream, by any actor. The submission must have an actor."""


class Claim(KeyedItem, frozen=True, gc=False, kw_only=True):
    """Requests the right to work on a key. If the key is known, the answer is the stored one."""

    fingerprint: bytes
    holder: str
    """Secret name of the caller. If the holder repeats the claim, it gets the same lease again."""
    lease_ms: int = LEASE_MS_DEFAULT
    waited_for: int = 0
    """Fence of the lease that this caller waited for. If the work under it failed, the answer is its error."""
    known_only: bool = False
    """Answer the claim only if its key is stored; refuse new work with NOT_KNOWN."""


class LeaseItem(KeyedItem, frozen=True, gc=False, kw_only=True):
    """Fields of the items that refer to a lease."""

    holder: str
    fence: int


class Renew(LeaseItem, frozen=True, gc=False, kw_only=True):
    """Extends a lease while the work continues."""

    lease_ms: int = LEASE_MS_DEFAULT


class Release(LeaseItem, frozen=True, gc=False, kw_only=True):
    """Releases a lease without a result."""

    failure: bytes | None = None
    """Error for the callers that wait for the work, or None if the holder gave up the lease without a failure."""
    actor: str = ""
    """Operator that releases the lease of any holder. If set, only the fence must match."""


class MemberItem(Struct, frozen=True, gc=False):
    """Fields of the items that refer to a member of a stream."""

    scope: str
    member: str


class OpenStream(MemberItem, frozen=True, gc=False):
    """Creates a stream with its first member. If the stream exists, only members may open it and nothing changes."""

    rate: Rate | None = None
    """Limit on the new streams that the member opens, over all lanes. An existing stream takes no token."""
    known_only: bool = False
    """Refuse a client's new stream with NOT_KNOWN; answer an existing one."""


class Role(Enum):
    """Rights of a member of a stream (core/rules/members.py)."""

    OWNER = "owner"
    """May write, add and remove members, and change roles."""
    MEMBER = "member"


class SetMember(MemberItem, frozen=True, gc=False):
    """Adds a member to a stream, removes one, or sets its role."""

    present: bool = True
    actor: str = ""
    """The caller: an owner, or the member that removes itself. Empty for the application."""
    role: Role | None = None
    """New role of the member. None keeps an existing member's role and adds a new member without ownership."""
    only_if_member: bool = False
    """Refuse a user that is not a member instead of adding it."""
    known_only: bool = False
    """Refuse a client's addition or new role with NOT_KNOWN. Removals are always accepted."""


class Acknowledge(MemberItem, frozen=True, gc=False):
    """A member confirms that it has received the stream up to `sequence`."""

    sequence: int


class SetCursor(Struct, frozen=True, gc=False):
    """Stores how far a named consumer has read. The cursor only moves forward, unless `rewind` is set."""

    consumer: str
    cursor: int | None
    """Last position or sequence that the consumer has processed, or 0 before the first. None removes the consumer."""
    scope: str = ""
    """Name of the stream whose sequences the cursor counts. Empty: the cursor is a position of lane 0."""
    rewind: bool = False
    """Also accept a cursor below the stored one."""


class Tombstone(Struct, frozen=True, gc=False):
    """A deleted row that compaction may drop, with the record of its DELETE."""

    table: str
    row_id: str
    deleted: Stamp
    """Stamp of the DELETE. The row is dropped only if this is still its newest stamp."""
    sequence: int
    """Sequence of the DELETE in the stream."""
    log_time_ms: int
    """Log time at which the DELETE was committed."""


class DropTombstones(Struct, frozen=True, gc=False):
    """Drops deleted rows of a gateway and raises the gateway's tombstone horizon above them."""

    scope: str
    tombstones: tuple[Tombstone, ...]
    """Candidates. A row that has changed since they were read is kept."""
    age_ms: int
    """Minimum time since the DELETE was committed."""
    consumers: tuple[str, ...]
    """Named consumers of the stream. A DELETE is kept until all of them have read it."""
    actor: str = ""
    """Principal that runs the compaction; empty for the application."""


class FoldRows(Struct, frozen=True, gc=False):
    """Commits digests of a gateway's rows before compaction drops the bodies of their deltas (rules/compaction.py)."""

    scope: str
    deltas: tuple[tuple[int, int], ...]
    """Sequences whose bodies compaction will drop, as ranges with their first and last sequence."""
    rows: tuple[tuple[str, str], ...]
    """Table and row id of every row that these deltas changed."""


class Leap(Struct, frozen=True, gc=False):
    """Makes all numbers continue above `above` (core/rules/leaps.py). It must be the only item of its batch."""

    above: int
    body: bytes = b""
    """Body of the restore records."""


class RecordAct(Struct, frozen=True, gc=False, kw_only=True):
    """Commits an audit record of an administrative act that was not part of a batch (core/rules/audit.py)."""

    act: str
    """Name of the act: a constant of `core.rules.audit`."""
    actor: str
    scope: str = ""
    """Stream that the act concerns. Empty for the log or a lane."""
    lane: int = 0
    """Lane of the record if `scope` is empty."""
    target: str = ""
    """What the act was done to: a partition, a tenant, the id of an API key."""
    details: bytes = b"{}"
    """A JSON object in canonical form."""
    time_ms: int = 0
    """Time of the act if its record could not be committed then. 0 means the record's log time."""
    key: bytes = b""
    """Hash of the act, so that several processes that notice the act record it once. Without a key, every item is
    recorded."""


OtherItem = (
    Claim
    | Renew
    | Release
    | OpenStream
    | SetMember
    | Acknowledge
    | SetCursor
    | DropTombstones
    | FoldRows
    | Leap
    | RecordAct
)
Item = Submission | OtherItem
AuditedItem = SetMember | OpenStream | DropTombstones | RecordAct | Release


def is_audited(item: Item) -> TypeGuard[AuditedItem]:
    """Return whether an item may append an audit record."""
    return isinstance(item, SetMember | OpenStream | DropTombstones | RecordAct) or (
        isinstance(item, Release) and item.actor != ""
    )


class Mode(Enum):
    """How a refused item affects the other items of its request."""

    EACH = "each"
    """Not at all: each item has a separate outcome."""
    ALL = "all"
    """Any refusal undoes the whole request."""
    UNTIL_REFUSED = "until_refused"
    """The items before the refused one are kept, and those after it are skipped."""


class Request(Struct, frozen=True, gc=False):
    """Items that one caller submits together."""

    items: tuple[Item, ...]
    mode: Mode = Mode.EACH
    is_admitted_whole: bool = False
    """Undo the whole request if a rate or a quota refuses one new item, in every mode.

    A request with more new items than a rate's burst is admitted when the bucket is full. Such a request has at most
    `core.limits.WHOLE_REQUEST_ITEMS_MAX` items.
    """


# --- output: verdicts --------------------------------------------------------------------------------


def enumerate_items(batch: Sequence[Request]) -> Iterator[tuple[int, Item]]:
    """Yield the items of all requests in a batch, each with its index in the batch."""
    return enumerate(chain.from_iterable(request.items for request in batch))


class Receipt(Struct, frozen=True, gc=False):
    """Where a write is stored. Every retry gets the same receipt."""

    lane: int
    position: int
    sequence: int
    """Place in the stream, or 0 with Order.LANE."""
    log_time_ms: int
    height: int
    """Height of the block that contains the record."""
    client_sequence: int


class Committed(Struct, frozen=True, gc=False):
    """A new write was committed at this place."""

    ok: ClassVar[Literal[True]] = True
    """Whether the log has the write."""
    receipt: Receipt

    def unwrap(self) -> Receipt:
        """Return the receipt."""
        return self.receipt


class Replayed(Struct, Generic[ReceiptT_co], frozen=True, gc=False):
    """The write is known. This is its original answer; nothing was written."""

    ok: ClassVar[Literal[True]] = True
    """Whether the log has the write."""
    receipt: ReceiptT_co
    """None if the write was committed, but the log has forgotten its place."""
    mismatch: bool = False
    """Whether the retry has different content. The log keeps the first write."""
    erased: bool = False
    """Whether the content has been erased."""

    def unwrap(self) -> ReceiptT_co:
        """Return the receipt of the first attempt."""
        return self.receipt


class Granted(Struct, frozen=True, gc=False):
    """The caller may work on the key until `until_ms` and completes the work under `fence`."""

    ok: ClassVar[Literal[True]] = True
    """Whether the caller has the lease."""
    fence: int
    until_ms: int

    def unwrap(self) -> Self:
        """Return this verdict, which has no receipt."""
        return self


class Applied(Struct, frozen=True, gc=False):
    """Side state now has the requested value. `changed` is False if it already had that value."""

    ok: ClassVar[Literal[True]] = True
    """Whether the state has the requested value."""
    changed: bool
    count: int = 0
    """Number of dropped tombstones or folded rows."""

    def unwrap(self) -> Self:
        """Return this verdict, which has no receipt."""
        return self


class Refused(Struct, frozen=True, gc=False):
    """A refusal: nothing was written."""

    ok: ClassVar[Literal[False]] = False
    """Whether the log has the write."""
    reason: Reason
    message: str
    field: str = ""
    """Name of the faulty field, or the key of the entity if a condition failed."""
    current: int = 0
    """Current value in the log that the reason refers to: position, sequence, version, fence or log time."""
    value: bytes | None = None
    """Current value of the entity, or the error of a failed run."""
    retry_after_ms: int = 0
    index: int = -1
    """Index of the faulty operation, or of the refused item if the reason is NOT_PROCESSED."""
    tenant: str = ""
    """Prefix of the tenant with the quota. If set, `field` is the name of the quota and `current` its usage."""
    limit: int = 0
    """Value of that quota."""

    def unwrap(self) -> NoReturn:
        """Raise the refusal as an exception.

        Raises:
            RetryLaterError: the log may accept the same write after `retry_after_ms`.
            RefusedError: the write is refused for a different reason.
        """
        fields = (self.reason, self.message, self.field, self.current)
        if self.reason in TEMPORARY_REASONS:
            raise RetryLaterError(*fields, retry_after_ms=self.retry_after_ms)
        raise RefusedError(*fields)


EventVerdict = Committed | Replayed[Receipt] | Refused
"""Verdict on an event, or on any write of a client that does not number its writes."""
Verdict = Committed | Replayed | Granted | Applied | Refused
NOT_KNOWN: Final = Refused(Reason.NOT_KNOWN, "this write is not in the log, and the request accepts only known writes")
"""Answer to a `known_only` item with an unknown key."""

# --- stored state ------------------------------------------------------------------------------------

KeyIdentity = tuple[str, str, str, bytes]
"""Policy, scope, client (empty unless clients number their writes) and key."""
SequenceIdentity = tuple[str, str, str, int]
"""Policy, scope, client and client sequence."""
ClientIdentity = tuple[str, str, str]
"""Policy, scope and client."""
EntityIdentity = tuple[str, str]
"""Scope and key."""
RelationshipIdentity = tuple[str, str, str, str]
"""Scope, resource, relation and subject."""
RowIdentity = tuple[str, str, str]
"""Scope, table and row."""
MemberIdentity = tuple[str, str]
"""Scope and member."""
ConsumerIdentity = tuple[str, str]
"""Scope (empty for lane 0) and consumer."""
RateIdentity = tuple[str, str]
"""Scope (empty for lane 0) and actor, which identify a rate's bucket (core/rules/quotas.py)."""


def key_identity(item: Submission | Claim | Renew | Release) -> KeyIdentity:
    """Return the identity under which the log stores and leases a write.

    If clients number their writes, each client has separate keys.
    """
    policy = item.policy
    if policy.client_sequence and isinstance(item, Submission):
        return (policy.name, item.scope, item.client, item.key)
    return (policy.name, item.scope, "", item.key)


def client_identity(submission: Submission) -> ClientIdentity:
    """Return the identity of the client whose sequence the submission continues."""
    return (submission.policy.name, submission.scope, submission.client)


POSITION_BITS: Final = 48


def encode_place(lane: int, position: int) -> int:
    """Encode a lane and a position as one number."""
    return lane << POSITION_BITS | position


def decode_place(place: int) -> tuple[int, int]:
    """Decode a place into its lane and position."""
    return place >> POSITION_BITS, place & (1 << POSITION_BITS) - 1


class Settings(Struct, frozen=True):
    """Settings of a log. They never change, so every replay makes the same decisions."""

    lanes: int = LANES_DEFAULT
    """Number of lanes for streams, in addition to lane 0."""
    eviction_interval: int = EVICTION_INTERVAL_DEFAULT
    """Evictions happen at the positions of a lane that are multiples of this number."""

    def __post_init__(self) -> None:
        check_whole_numbers(self, ["lanes"], highest=LANES_MAX)
        check_whole_numbers(self, ["eviction_interval"], highest=EVICTION_INTERVAL_MAX)


class RequestedSettings(Struct, frozen=True):
    """Settings for a new log, or required settings of an existing one. None means the default, or any value."""

    lanes: int | None = None
    eviction_interval: int | None = None

    def to_settings(self) -> Settings:
        """Return the settings of a new log. Raises SettingsError for a value out of range."""
        return Settings(**{name: value for name, value in structs.asdict(self).items() if value is not None})


class LaneHead(Struct, frozen=True, gc=False):
    """Newest numbers of a lane."""

    position: int = 0
    log_time_ms: int = 0
    eviction_time_ms: int = 0
    """Log time of the last eviction. State that had outlived its time to live by then is absent."""
    fence: int = 0
    """Last fencing number. Fencing numbers are never reused."""
    revision: int = 0
    """How many batches have changed the lane or its side state. An equal revision means equal state."""
    height: int = 0
    block_hash: bytes = bytes(32)


class Remembered(Struct, frozen=True, gc=False):
    """Stored answer for a committed identity."""

    receipt: Receipt
    fingerprint: bytes
    erased: bool = False


class ClientEntry(Struct, frozen=True, gc=False):
    """Newest write of a client in a scope."""

    sequence: int
    last_seen_ms: int
    last_key: bytes
    last_fingerprint: bytes


class Lease(Struct, frozen=True, gc=False):
    """Right to work on a key."""

    fence: int
    holder: str
    """Empty after a release."""
    until_ms: int
    fingerprint: bytes
    failed_fence: int = 0
    """Fence of the newest lease of this key whose work failed. It is kept, with `failure`, when another caller claims
    the key."""
    failure: bytes = b""


class Member(Struct, frozen=True, gc=False):
    """A member of a stream."""

    joined: int
    """Rank in the order of joining the stream, from 1. A returning member gets a new number."""
    is_owner: bool = False
    """Whether the member was made an owner. Without a count in `Roster.owners`, every member acts as an owner."""


class Roster(Struct, frozen=True, gc=False):
    """How many members and owners a stream has."""

    members: int = 0
    owners: int | None = 0
    """None in a stream created before roles existed, where every member acts as an owner until one is appointed."""
    joined: int = 0
    """Highest `Member.joined` assigned so far."""


class Bucket(Struct, frozen=True, gc=False):
    """Token bucket of one actor's or stream's rate."""

    full_at_us: int
    """Log time in microseconds at which the bucket is full again. From then on it is treated as absent."""


class RecordTrace(Struct, frozen=True, gc=False):
    """Trace contexts of a record, as values of the W3C header `traceparent`. They are not part of its identity."""

    traceparent: str
    """Context of the request that submitted the record. Readers continue it."""
    commit: str
    """Context of the group commit, which has requests of several traces."""


class Record(Struct, frozen=True, gc=False):
    """A committed submission. It never changes, except that its body may be erased."""

    lane: int
    position: int
    sequence: int
    log_time_ms: int
    height: int
    policy: str
    scope: str
    key: bytes
    fingerprint: bytes
    actor: str
    client: str
    client_sequence: int
    partitions: tuple[str, ...]
    body: bytes
    erased: bool = False
    """Whether the body has been erased. If so, `body` is empty."""
    trace: RecordTrace | None = None
    """Trace contexts, if the log was opened with tracing and the trace of the request was sampled."""

    @property
    def identity(self) -> KeyIdentity:
        """The identity under which the log stores the record, if it has a key (`key_identity`)."""
        return (self.policy, self.scope, self.client if self.client_sequence else "", self.key)

    @property
    def receipt(self) -> Receipt:
        """The receipt that the first answer and every retry return."""
        return Receipt(self.lane, self.position, self.sequence, self.log_time_ms, self.height, self.client_sequence)

    @property
    def remembered(self) -> Remembered:
        """The entry that the log stores for the record's identity."""
        return Remembered(self.receipt, self.fingerprint, self.erased)


class StateTables(Struct, Generic[R]):
    """Tables of a log's state other than its records.

    `R` is the type of a removed entry: Never in a snapshot, None in changes. `storage.side_state` describes all tables
    except `keys` and `sequences`, which stores derive from the records.
    """

    keys: Mapping[KeyIdentity, Remembered] = field(default_factory=dict)
    sequences: Mapping[SequenceIdentity, Remembered] = field(default_factory=dict)
    clients: Mapping[ClientIdentity, ClientEntry] = field(default_factory=dict)
    streams: Mapping[str, int] = field(default_factory=dict)
    """Newest sequence of each stream."""
    floors: Mapping[str, int | R] = field(default_factory=dict)
    """Floors of the streams without a write since the last leap: their next sequence is above the floor."""
    entities: Mapping[EntityIdentity, Entity | R] = field(default_factory=dict)
    relationships: Mapping[RelationshipIdentity, int | R] = field(default_factory=dict)
    """Stream sequence at which each relationship was created."""
    rows: Mapping[RowIdentity, Row | R] = field(default_factory=dict)
    leases: Mapping[KeyIdentity, Lease | R] = field(default_factory=dict)
    members: Mapping[MemberIdentity, Member | R] = field(default_factory=dict)
    rosters: Mapping[str, Roster] = field(default_factory=dict)
    acknowledged: Mapping[MemberIdentity, int | R] = field(default_factory=dict)
    consumers: Mapping[ConsumerIdentity, int | R] = field(default_factory=dict)
    """Cursor of each consumer."""
    horizons: Mapping[str, int] = field(default_factory=dict)
    """Tombstone horizon of each gateway that has dropped tombstones, as a clock reading (core/rules/compaction.py)."""
    rates: Mapping[RateIdentity, Bucket] = field(default_factory=dict)
    usage: Mapping[str, Usage] = field(default_factory=dict)
    """Usage by tenant prefix."""


STATE_TABLES: Final = StateTables.__struct_fields__
"""Names of the tables."""
get_state_tables: Final[Callable[[Any], tuple[Any, ...]]] = attrgetter(*STATE_TABLES)
"""Returns an object's tables in the order of `STATE_TABLES`, faster than a loop."""


class Snapshot(StateTables[Never]):
    """Stored state that a batch needs. A mapping may have more entries than the batch reads, but never fewer."""

    settings: Settings = Settings()
    heads: Mapping[int, LaneHead] = field(default_factory=dict)
    past_members: Mapping[MemberIdentity, bool] = field(default_factory=dict)
    """Current and past members that quotas count. Stores derive them from changes to `members`."""
    tenants: Tenants | None = None
    """None for a log without quotas, which does not track usage."""


class Changes(StateTables[None]):
    """Changes to save in one transaction. None in a mapping removes the entry."""

    records: list[Record] = field(default_factory=list)
    heads: dict[int, LaneHead] = field(default_factory=dict)
    leap: int = 0
    """Floor of all streams after a leap: all later numbers are higher. 0 if no leap has happened."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to save. Every change touches a lane and so adds its head to `heads`."""
        return not self.records and not self.heads
