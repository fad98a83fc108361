"""Values that go into `plan` and come out of it: submissions, verdicts, records and side state.

Everything here is frozen but Snapshot and Changes, which are the stores' tables: mappings from the keys below to
the values below. Times are log time in milliseconds, and names end in their unit. None of the values can be part of a
cycle, so the collector need not look at them (`gc=False`): a log makes and keeps many.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from itertools import chain
from operator import attrgetter
from typing import Any, Final, Generic, Never, TypeGuard, TypeVar

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

R = TypeVar("R")

# --- what comes in -----------------------------------------------------------------------------------


class Rate(Struct, frozen=True, gc=False):
    """How many new writes one actor may make."""

    per_second: int
    """In the long run."""
    burst: int
    """At once, after a pause."""


class KeyedItem(Struct, frozen=True, gc=False, kw_only=True):
    """What the items have in common that name a key."""

    policy: Policy
    scope: str
    """Where the key is unique. With Order.STREAM it names the stream as well."""
    key: bytes


class Submission(KeyedItem, frozen=True, gc=False, kw_only=True):
    """A write as an API hands it to the log. Its shape, its sender and the sender's rights are already checked."""

    fingerprint: bytes
    """What the write says, as a hash: equal fingerprints are equal writes."""
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
    """The holder of the lease under which this write was made, and the number that came with it."""
    known_only: bool = False
    """Answer the submission only if its key is stored; refuse a new write with NOT_KNOWN."""
    rate: Rate | None = None
    """The limit of the actor's new writes: in the log where the order is the lane, else in the stream.

    A new write takes one of what it allows. Work under a lease takes none: it was let in when it was claimed.
    """
    stream_rate: Rate | None = None
    """The limit of all new writes in the stream, whoever makes them. The actor must be named."""


class Claim(KeyedItem, frozen=True, gc=False, kw_only=True):
    """Asks for the right to work on a key. Answered with what became of the key if it is already known."""

    fingerprint: bytes
    holder: str
    """Names the caller: a claim repeated by its holder gets the same lease again."""
    lease_ms: int = LEASE_MS_DEFAULT
    waited_for: int = 0
    """The fence of the lease that this caller waited for: if that work failed, it is told its error."""
    known_only: bool = False
    """Answer the claim only if its key is stored; refuse new work with NOT_KNOWN."""


class LeaseItem(KeyedItem, frozen=True, gc=False, kw_only=True):
    """Fields of the items that name a lease."""

    holder: str
    fence: int


class Renew(LeaseItem, frozen=True, gc=False, kw_only=True):
    """Extends a lease while the work goes on."""

    lease_ms: int = LEASE_MS_DEFAULT


class Release(LeaseItem, frozen=True, gc=False, kw_only=True):
    """Gives a lease back without a result."""

    failure: bytes | None = None
    """What those who wait for the work are told; None where it did not fail but was given up."""
    actor: str = ""
    """An operator who releases the lease of any holder: then only the fence must be that of the lease."""


class MemberItem(Struct, frozen=True, gc=False):
    """What the items have in common that name a member of a stream."""

    scope: str
    member: str


class OpenStream(MemberItem, frozen=True, gc=False):
    """Creates a stream with its first member. Only members may open a stream that exists; it does not change."""

    rate: Rate | None = None
    """The limit of new streams that the member opens, over all lanes. An existing stream takes none of it."""
    known_only: bool = False
    """Refuse a new stream of a client with NOT_KNOWN; answer one that exists."""


class Role(Enum):
    """What a member of a stream may do (core/rules/members.py)."""

    OWNER = "owner"
    """May also add and remove members, and name owners."""
    MEMBER = "member"


class SetMember(MemberItem, frozen=True, gc=False):
    """Adds a member to a stream, removes one, or sets its role."""

    present: bool = True
    actor: str = ""
    """The caller, which must be an owner unless it removes itself; empty for the application itself."""
    role: Role | None = None
    """The role that the member gets. None leaves that of a member as it is, and adds a plain member."""
    only_if_member: bool = False
    """Refuse a user that is not a member instead of adding it."""
    known_only: bool = False
    """Refuse an addition or a new role by a client with NOT_KNOWN. Removals are never refused for it."""


class Acknowledge(MemberItem, frozen=True, gc=False):
    """A member has received everything in the stream up to `sequence`."""

    sequence: int


class SetCursor(Struct, frozen=True, gc=False):
    """A named consumer keeps in the log how far it has read. It moves forward only, unless it is told to rewind."""

    consumer: str
    cursor: int | None
    """The last it has dealt with; 0 before the first. None removes the consumer."""
    scope: str = ""
    """Empty: the cursor is a position of lane 0. Else it is a sequence of the stream of that name."""
    rewind: bool = False
    """Take the cursor also where it is below the one that is kept."""


class Tombstone(Struct, frozen=True, gc=False):
    """A deleted row that may be dropped, with the record of its DELETE."""

    table: str
    row_id: str
    deleted: Stamp
    """The stamp of the DELETE. The row is dropped only if this is still its newest."""
    sequence: int
    """The sequence of the DELETE in the stream."""
    log_time_ms: int
    """The log time at which the DELETE was committed."""


class DropTombstones(Struct, frozen=True, gc=False):
    """Compaction drops deleted rows of a gateway, and raises the gateway's tombstone horizon above them."""

    scope: str
    tombstones: tuple[Tombstone, ...]
    """Candidates: a row that changed since they were read stays."""
    age_ms: int
    """A DELETE must have been committed this long ago."""
    consumers: tuple[str, ...]
    """Named consumers of the stream. A DELETE that one of them has not read yet stays."""
    actor: str = ""
    """The principal that compacts; empty for the application itself."""


class FoldRows(Struct, frozen=True, gc=False):
    """Commit a digest of rows of a gateway before compaction drops the bodies of their deltas (rules/compaction.py)."""

    scope: str
    deltas: tuple[tuple[int, int], ...]
    """The sequences whose bodies will be dropped, as ranges: the first and the last of each."""
    rows: tuple[tuple[str, str], ...]
    """Table and row id of every row that these deltas changed."""


class Leap(Struct, frozen=True, gc=False):
    """All numbers of the log continue above this one (core/rules/leaps.py). The only item of its batch."""

    above: int
    body: bytes = b""
    """Of the restore records."""


class RecordAct(Struct, frozen=True, gc=False, kw_only=True):
    """Commits an audit record of an administrative act that happened outside of a batch (core/rules/audit.py)."""

    act: str
    """The name of the act, such as those of `core.audit`."""
    actor: str
    scope: str = ""
    """The stream that the act concerns. Empty: it concerns the log, or a lane of it."""
    lane: int = 0
    """The lane of the record, where no stream is named."""
    target: str = ""
    """What the act was done to: a partition, a tenant, the id of a key."""
    details: bytes = b"{}"
    """A JSON object in canonical form."""
    time_ms: int = 0
    """When the act happened, if the record could not be committed then; 0 is the log time of the record."""
    key: bytes = b""
    """Hash of the act, so that several processes that notice it record it once. Empty: it is recorded each time."""


CompactionItem = DropTombstones | FoldRows
OtherItem = (
    Claim | Renew | Release | OpenStream | SetMember | Acknowledge | SetCursor | CompactionItem | Leap | RecordAct
)
Item = Submission | OtherItem
AuditedItem = SetMember | OpenStream | DropTombstones | RecordAct | Release


def is_audited(item: Item) -> TypeGuard[AuditedItem]:
    """Return whether an item may append an audit record."""
    return isinstance(item, SetMember | OpenStream | DropTombstones | RecordAct) or (
        isinstance(item, Release) and item.actor != ""
    )


class Mode(Enum):
    """What a refused item means for the others of its request."""

    EACH = "each"
    """Nothing: each item has its own outcome."""
    ALL = "all"
    """Nothing of the request happens."""
    UNTIL_REFUSED = "until_refused"
    """What stands before it happens, what stands behind it does not."""


class Request(Struct, frozen=True, gc=False):
    """Items that one caller sent together."""

    items: tuple[Item, ...]
    mode: Mode = Mode.EACH
    is_admitted_whole: bool = False
    """Where a rate or quota refuses one new item, nothing of the request happens, whatever the mode.

    A request with more new items than the burst of a rate is admitted when its bucket is full. It has at most
    `core.limits.WHOLE_REQUEST_ITEMS_MAX` items.
    """


# --- what comes out: verdicts ------------------------------------------------------------------------


def enumerate_items(batch: Sequence[Request]) -> Iterator[tuple[int, Item]]:
    """Yield the items of all requests of a batch with their index in the batch."""
    return enumerate(chain.from_iterable(request.items for request in batch))


class Receipt(Struct, frozen=True, gc=False):
    """The place a write got. The same for every retry."""

    lane: int
    position: int
    sequence: int
    """In its stream; 0 where the policy's order is the lane."""
    log_time_ms: int
    height: int
    """Of the block that holds it."""
    client_sequence: int


class Committed(Struct, frozen=True, gc=False):
    """A new write got its place."""

    receipt: Receipt


class Replayed(Struct, frozen=True, gc=False):
    """The write is known: this is its original answer, and nothing was written."""

    receipt: Receipt | None
    """None where the write is known to have committed but its place has been forgotten."""
    mismatch: bool = False
    """The retry said something else; the first one stays."""
    erased: bool = False
    """The content has been erased since."""


class Granted(Struct, frozen=True, gc=False):
    """The caller may work on the key until `until_ms`, and completes it under `fence`."""

    fence: int
    until_ms: int


class Applied(Struct, frozen=True, gc=False):
    """Side state is as asked. `changed` is False where it already was."""

    changed: bool
    count: int = 0
    """Dropped tombstones."""


class Reason(Enum):
    """Why an item was refused. Each API has one table from these to its error codes."""

    MALFORMED = "malformed"
    NOT_A_MEMBER = "not_a_member"
    NOT_AN_OWNER = "not_an_owner"
    LAST_OWNER = "last_owner"
    """The stream would have members and no owner."""
    IDENTITY_REUSED = "identity_reused"
    SEQUENCE_GAP = "sequence_gap"
    SEQUENCE_REUSED = "sequence_reused"
    IN_FLIGHT = "in_flight"
    RUN_FAILED = "run_failed"
    LEASE_LOST = "lease_lost"
    UNEXPECTED_POSITION = "unexpected_position"
    KEY_EXISTS = "key_exists"
    KEY_NOT_FOUND = "key_not_found"
    VERSION_MISMATCH = "version_mismatch"
    VALUE_MISMATCH = "value_mismatch"
    TOO_MANY_COLUMNS = "too_many_columns"
    ROW_TOO_LARGE = "row_too_large"
    CLOCK_DRIFT = "clock_drift"
    INVALID = "invalid"
    RATE_LIMITED = "rate_limited"
    QUOTA_EXCEEDED = "quota_exceeded"
    """A tenant would have more than it may: nothing was written. Sent again it may fit, once there is room."""
    READ_ONLY = "read_only"
    """Said by an engine that takes no new writes for now, never by the decision: nothing was written, try later."""
    BUSY = "busy"
    """The queue of the engine is full: nothing was written, try again later."""
    WRONG_SCOPE = "wrong_scope"
    """The id of a new event belongs into another scope (`core.event_ids`): nothing was written.

    The writer does not know the tenants of the log. A retry with its present scope is refused again.
    """
    INVALID_ACKNOWLEDGEMENT = "invalid_acknowledgement"
    INVALID_CURSOR = "invalid_cursor"
    NOT_PROCESSED = "not_processed"
    NOT_KNOWN = "not_known"
    """The item is `known_only`, and the log does not know it: nothing was written. Engines translate this reason."""
    UNSTORABLE = "unstorable"
    """The engine's answer, never the decision's: the store cannot hold this write. A retry gets the same answer."""


class Refused(Struct, frozen=True, gc=False):
    """Nothing was written, and this is why."""

    reason: Reason
    message: str
    field: str = ""
    """The field that is at fault; with a failed condition the entity's key."""
    current: int = 0
    """What the log has instead, as the reason says: position, sequence, version, fence or log time."""
    value: bytes | None = None
    """The entity's current value, or what a failed run left."""
    retry_after_ms: int = 0
    index: int = -1
    """The operation at fault; with NOT_PROCESSED the item that stood in the way."""
    tenant: str = ""
    """Whose quota it is; `field` has its name then, and `current` what the tenant has."""
    limit: int = 0
    """Of that quota."""


Verdict = Committed | Replayed | Granted | Applied | Refused
NOT_KNOWN: Final = Refused(Reason.NOT_KNOWN, "the log does not know this write, and was asked for known writes only")
"""Answer of a `known_only` item that would have to be written."""

# --- what is remembered ------------------------------------------------------------------------------

KeyIdentity = tuple[str, str, str, bytes]
"""Policy, scope, client (only where clients number their writes, else empty), key."""
SequenceIdentity = tuple[str, str, str, int]
"""Policy, scope, client, client sequence."""
ClientIdentity = tuple[str, str, str]
"""Policy, scope, client."""
EntityIdentity = tuple[str, str]
"""Scope, key."""
RelationshipIdentity = tuple[str, str, str, str]
"""Scope, resource, relation, subject."""
RowIdentity = tuple[str, str, str]
"""Scope, table, row."""
MemberIdentity = tuple[str, str]
"""Scope, member."""
ConsumerIdentity = tuple[str, str]
"""Scope (empty for lane 0), consumer."""
RateIdentity = tuple[str, str]
"""Scope (empty for lane 0) and actor: the bucket of a rate (core/rules/rates.py)."""


def key_identity(item: Submission | Claim | Renew | Release) -> KeyIdentity:
    """Under what a write is remembered and leased. Where clients number their writes, their keys are their own."""
    policy = item.policy
    if policy.client_sequence and isinstance(item, Submission):
        return (policy.name, item.scope, item.client, item.key)
    return (policy.name, item.scope, "", item.key)


def client_identity(submission: Submission) -> ClientIdentity:
    """Whose sequence it is."""
    return (submission.policy.name, submission.scope, submission.client)


class Settings(Struct, frozen=True):
    """What a log is made with and keeps for ever, so that every replay decides the same."""

    lanes: int = LANES_DEFAULT
    """How many lanes streams are spread over, besides lane 0."""
    eviction_interval: int = EVICTION_INTERVAL_DEFAULT
    """Evictions happen at the lane positions that are a multiple of this."""

    def __post_init__(self) -> None:
        check_whole_numbers(self, ["lanes"], highest=LANES_MAX)
        check_whole_numbers(self, ["eviction_interval"], highest=EVICTION_INTERVAL_MAX)


class RequestedSettings(Struct, frozen=True):
    """Settings that a new log is made with, and that an existing log must have. None takes the default, or any."""

    lanes: int | None = None
    eviction_interval: int | None = None

    def to_settings(self) -> Settings:
        """The settings of a new log. Raises SettingsError for one out of its range."""
        return Settings(**{name: value for name, value in structs.asdict(self).items() if value is not None})


class LaneHead(Struct, frozen=True, gc=False):
    """The newest of everything in a lane."""

    position: int = 0
    log_time_ms: int = 0
    eviction_time_ms: int = 0
    """Log time of the last eviction: what is older than its time to live by then is absent."""
    fence: int = 0
    """The last fencing number given out; never given out again."""
    revision: int = 0
    """Goes up with every batch that changed anything in the lane, side state too: who knows it knows all."""
    height: int = 0
    block_hash: bytes = bytes(32)


class Remembered(Struct, frozen=True, gc=False):
    """What is kept of a committed identity."""

    receipt: Receipt
    fingerprint: bytes
    erased: bool = False


class ClientEntry(Struct, frozen=True, gc=False):
    """Where a client stands in a scope."""

    sequence: int
    last_seen_ms: int
    last_key: bytes
    last_fingerprint: bytes


class Lease(Struct, frozen=True, gc=False):
    """Who works on a key."""

    fence: int
    holder: str
    """Empty once released."""
    until_ms: int
    fingerprint: bytes
    failed_fence: int = 0
    """The newest lease of this key whose work failed, and how: kept when another caller claims the key."""
    failure: bytes = b""


class Member(Struct, frozen=True, gc=False):
    """A member of a stream."""

    joined: int
    """Order of joining in the stream, from 1. A returning member gets a new number."""
    is_owner: bool = False
    """Whether it was named an owner. Where the roster has no owners, every member acts as one."""


class Roster(Struct, frozen=True, gc=False):
    """Counts of a stream's members."""

    members: int = 0
    owners: int | None = 0
    """None in a stream from before roles, until an owner is named: every member acts as an owner."""
    joined: int = 0
    """The last number of `Member.joined` that was given out."""


class Bucket(Struct, frozen=True, gc=False):
    """What an actor has left of a rate."""

    full_at_us: int
    """The log time, in microseconds, at which nothing is taken any more: from then on it counts as absent."""


class Record(Struct, frozen=True, gc=False):
    """A committed submission. Immutable but for the erasure of its body."""

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
    """The body has been erased; it is empty here."""

    @property
    def identity(self) -> KeyIdentity:
        """Under what it is remembered, if it has a key. Where clients number their writes, their keys are their own."""
        return (self.policy, self.scope, self.client if self.client_sequence else "", self.key)

    @property
    def receipt(self) -> Receipt:
        """What its first answer carried, and what every retry gets."""
        return Receipt(self.lane, self.position, self.sequence, self.log_time_ms, self.height, self.client_sequence)

    @property
    def remembered(self) -> Remembered:
        """What is kept of its identity."""
        return Remembered(self.receipt, self.fingerprint, self.erased)


class StateTables(Struct, Generic[R]):
    """The mappings of a log's state besides its records.

    `R` is the type of a removed entry: a snapshot has none, changes have None. `storage.side_state` describes the
    tables of all but `keys` and `sequences`, which are found through the records.
    """

    keys: Mapping[KeyIdentity, Remembered] = field(default_factory=dict)
    sequences: Mapping[SequenceIdentity, Remembered] = field(default_factory=dict)
    clients: Mapping[ClientIdentity, ClientEntry] = field(default_factory=dict)
    streams: Mapping[str, int] = field(default_factory=dict)
    """The newest sequence of each stream."""
    floors: Mapping[str, int | R] = field(default_factory=dict)
    """Of streams without a write since the last leap: their next sequence is above it."""
    entities: Mapping[EntityIdentity, Entity | R] = field(default_factory=dict)
    relationships: Mapping[RelationshipIdentity, int | R] = field(default_factory=dict)
    """The stream sequence at which each relationship was made."""
    rows: Mapping[RowIdentity, Row | R] = field(default_factory=dict)
    leases: Mapping[KeyIdentity, Lease | R] = field(default_factory=dict)
    members: Mapping[MemberIdentity, Member | R] = field(default_factory=dict)
    rosters: Mapping[str, Roster] = field(default_factory=dict)
    acknowledged: Mapping[MemberIdentity, int | R] = field(default_factory=dict)
    consumers: Mapping[ConsumerIdentity, int | R] = field(default_factory=dict)
    """The cursor of each."""
    horizons: Mapping[str, int] = field(default_factory=dict)
    """The tombstone horizon of each gateway that has dropped tombstones, as a clock reading (`tombstones`)."""
    rates: Mapping[RateIdentity, Bucket] = field(default_factory=dict)
    usage: Mapping[str, Usage] = field(default_factory=dict)
    """By the tenant's prefix."""


STATE_TABLES: Final = StateTables.__struct_fields__
"""Names of the mappings."""
get_state_tables: Final[Callable[[Any], tuple[Any, ...]]] = attrgetter(*STATE_TABLES)
"""Returns the attributes with these names in their order, faster than a loop."""


class Snapshot(StateTables[Never]):
    """What the store remembers about a batch. A mapping may hold more than the batch needs, never less."""

    settings: Settings = Settings()
    heads: Mapping[int, LaneHead] = field(default_factory=dict)
    past_members: Mapping[MemberIdentity, bool] = field(default_factory=dict)
    """Members that are or were in a stream, as far as quotas need them. Stores derive it from changes of `members`."""
    tenants: Tenants | None = None
    """None where there are no quotas: then nothing is counted."""


class Changes(StateTables[None]):
    """What to save, in one transaction. None in a mapping removes the entry."""

    records: list[Record] = field(default_factory=list)
    heads: dict[int, LaneHead] = field(default_factory=dict)
    leap: int = 0
    """The number that a leap goes above; 0 without one. All streams that the log has get it as their floor."""

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to save. Whatever changes touches a lane, so that its head is here."""
        return not self.records and not self.heads
