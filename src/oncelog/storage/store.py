"""The protocol of all stores, and the values that they return. `oncelog.testing.contract` tests the protocol.

A store manages tables and transactions and makes no decisions. `commit` is the only entry point for a batch: in one
transaction, it loads what `build_read_set` requests, calls `plan`, closes the blocks and saves the changes.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from struct import Struct as Packing
from time import monotonic
from typing import Final, Protocol, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from oncelog.core.identity import compute_lane
from oncelog.core.merge import Row
from oncelog.core.operations import Entity
from oncelog.core.plan import Plan, Validate, plan
from oncelog.core.policy import Policy
from oncelog.core.proof import SALT_BYTES, Block, Evidence, SealedBatch, seal
from oncelog.core.read_set import ReadSet
from oncelog.core.rules.audit import add_detail
from oncelog.core.tenants import Tenant, Usage
from oncelog.core.validation import check_item
from oncelog.core.values import (
    Changes,
    ClientEntry,
    KeyIdentity,
    LaneHead,
    Lease,
    Record,
    RecordAct,
    Refused,
    Remembered,
    Request,
    Role,
    Settings,
    Snapshot,
    Verdict,
)
from oncelog.errors import HistoryChangedError, PolicyError
from oncelog.storage.metadata import EpochRenewal, Operator
from oncelog.storage.side_state import MEMBERSHIP
from oncelog.storage.tenants import encode_partitions

T = TypeVar("T")

logger: Final = logging.getLogger("oncelog.engine")

WARNING_INTERVAL_S: Final = 600
"""Minimum time between two warnings about readers of the same history."""
_EPOCHS_MAX: Final = 100
_last_warning_s: dict[str, float] = {}
"""Time of the last warning, by epoch."""
_SALT: Final = Packing(f"{SALT_BYTES}s")
Draw = Callable[[int], bytes]
"""Returns as many random bytes as requested."""


class BatchTraces(Struct, frozen=True):
    """Trace contexts of a batch, as values of the W3C header `traceparent`."""

    commit: str
    """Context of the group commit."""
    items: Sequence[str]
    """Context of each item's request, or "" for an item that is not traced."""


class BatchResult(Struct):
    """Result of a batch. It is durable once `Store.commit` returns it."""

    verdicts: list[list[Verdict]]
    changes: Changes
    salts: Sequence[bytes]
    sealed: SealedBatch
    erasures: int = 0
    """The erasure count before the decision. A cache must not keep answers that are older than the newest erasure."""
    evicted_clients: int = 0
    """How many expired client entries the transaction deleted."""
    sync_s: float = 0.0
    """Duration of COMMIT in seconds, which makes the batch durable. 0 if the batch changed nothing."""
    prepared_s: float = 0.0
    """When the batch was ready for COMMIT, by `time.perf_counter`. 0 if the store does not measure it."""
    synced_s: float = 0.0
    """When COMMIT returned, by the same clock."""
    lacks_trace_table: bool = False
    """Whether trace contexts were not stored, because their table has been dropped."""


def plan_batch(
    batch: Sequence[Request],
    snapshot: Snapshot,
    now_ms: int,
    validate: Validate | None,
    draw: Draw,
    faults: Mapping[int, Refused] | None = None,
    jumped: Exception | None = None,
) -> BatchResult:
    """Plan a batch and close its blocks. The caller saves the result.

    `jumped` is the error to raise if the clock has jumped. It is raised unless the batch changes nothing or is a
    restore.
    """
    planned = plan(batch, snapshot, now_ms, validate, faults)
    if jumped is not None and not (planned.changes.is_empty or planned.changes.leap):
        raise jumped
    random_bytes = draw(SALT_BYTES * len(planned.changes.records))
    return seal_blocks(planned, list(chain.from_iterable(_SALT.iter_unpack(random_bytes))))


def seal_blocks(planned: Plan, salts: Sequence[bytes]) -> BatchResult:
    """Close the blocks of a planned batch, with one salt per record."""
    sealed = seal(planned.changes, salts)
    return BatchResult(planned.verdicts, replace(planned.changes, heads=sealed.heads), salts, sealed)


def build_act_request(act: RecordAct, lane: int, lanes: int, records: int | None = None) -> Request:
    """Return the batch that records an act in the act's own transaction.

    `lane` is the lane that the act concerns, in a log with `lanes` lanes. `records` is how many records the act
    changed, for its details. Raises ValueError if the act cannot be recorded.
    """
    if records is not None:
        act = add_detail(act, "records", records)
    refused = check_item(act)
    if refused is not None:
        raise ValueError(f"the act cannot be recorded: {refused.field} {refused.message}")
    recorded_in = compute_lane(act.scope, lanes) if act.scope else act.lane
    if recorded_in != lane:
        raise ValueError(f"an act in lane {lane} cannot be recorded in lane {recorded_in}")
    return Request((act,))


def select_new_policies(known: Mapping[str, Policy], policies: Sequence[Policy]) -> dict[str, Policy]:
    """Return the policies that the log does not have yet.

    Raises PolicyError if the log has a different policy of the same name.
    """
    declared: dict[str, Policy] = {}
    for policy in policies:
        before = known.get(policy.name) or declared.setdefault(policy.name, policy)
        if before != policy:
            raise PolicyError(
                f"the log already has a different policy named {policy.name!r}: {before}; "
                "stored keys depend on it, so declare the new policy under a new name"
            )
    return declared


def _warn_of_reader_ahead(order: str, cursor: int, newest: int, epoch: str) -> None:
    """Warn that a cursor is ahead of the order that it reads: the log may have been reset to an earlier state."""
    now_s = monotonic()
    if now_s - _last_warning_s.get(epoch, -WARNING_INTERVAL_S) < WARNING_INTERVAL_S:
        return
    if len(_last_warning_s) >= _EPOCHS_MAX:
        _last_warning_s.clear()
    _last_warning_s[epoch] = now_s
    logger.warning(
        "a reader of %s sent the cursor %d, ahead of the newest record, %d. This is usually a mistake of the client. "
        "If the log was restored without `oncelog restore`, stop all programs that use it and run "
        "`oncelog epoch LOG --renew`",
        order,
        cursor,
        newest,
    )


class Query(Struct, frozen=True, kw_only=True):
    """Selects records and their order: the records of a lane, of partitions in a lane, or of a stream."""

    lane: int = 0
    partitions: tuple[str, ...] = ()
    stream: str | None = None
    """Name of a stream. The page is then ordered by the stream's sequences rather than by the lane's positions."""
    after: int = 0
    """Cursor. The page begins after this number."""
    upto: int | None = None
    """Last number that the page may contain, or None for the newest."""
    limit: int = 500
    bytes_max: int = 8 * 2**20
    """Total size of bodies at which a page ends. A page has at least one record if any record matches."""
    with_traces: bool = True
    """Whether records have their stored trace contexts, if the log has tracing."""

    def clamp(self, newest: int, epoch: str) -> tuple["Query", int]:
        """Return the query with its numbers clamped to the valid range, and the last number that its pages may contain.

        Raises HistoryChangedError if the cursor is beyond the newest number.
        """
        if self.after > newest:
            order = f"lane {self.lane}" if self.stream is None else f"the stream {self.stream!r}"
            _warn_of_reader_ahead(order, self.after, newest, epoch)
            message = (
                f"the cursor {self.after} is ahead of the newest record, {newest}: it belongs to a different history"
            )
            raise HistoryChangedError(message, epoch, newest)
        upto = newest if self.upto is None else min(self.upto, newest)
        return replace(self, after=max(0, self.after), upto=upto, limit=max(1, self.limit)), upto


class Page(Struct, frozen=True):
    """Records in order, and the cursor of the next page."""

    records: list[Record]
    next: int
    """Cursor after this page. The last page ends at the bound, even if no record matched."""
    upto: int
    """Bound of the query. A reader that passes it with its next query reaches the end, however fast the log grows."""
    has_more: bool
    newest: int
    """Newest number in the order, whether or not its record matches."""


RecordView = tuple[int, int, str, str, str, bytes, str, str | None]
"""A record as readers see it: position, log time in ms, actor, client, scope, key, partitions as a JSON array, and the
body as text (None if erased). Fields that serve only as proof are left out, which halves the work of reading a
record."""


def to_record_view(record: Record) -> RecordView:
    """Return the view of a record."""
    return (
        record.position,
        record.log_time_ms,
        record.actor,
        record.client,
        record.scope,
        record.key,
        encode_partitions(record.partitions),
        None if record.erased else record.body.decode(),
    )


EncodeViews = Callable[[Sequence[RecordView]], bytes]
"""Encodes views of records for their readers."""


class RecordViewPage(Struct, frozen=True):
    """Like `Page`, with encoded views."""

    encoded: list[bytes]
    """All views in order, several in each element. The store encodes a hundred at a time and releases their parts
    before it continues, so the process never allocates and frees the memory for a whole page."""
    count: int
    next: int
    upto: int
    has_more: bool
    newest: int


class Consumer(Struct, frozen=True):
    """A named reader and its lag."""

    scope: str
    name: str
    cursor: int
    lag: int


class KeyStatus(Struct, frozen=True):
    """What a store knows about an identity."""

    record: Record | None
    """The newest record under the identity, whether or not it has expired."""
    lease: Lease | None
    head: LaneHead
    """Head of the lane, which determines whether the record and the lease have expired."""
    time_ms: int = 0
    """Time at which a write under the identity would be decided now."""
    positions: tuple[int, ...] = ()
    """Positions of all records under the identity, oldest first: several if the key expired and was reused."""
    client_entry: ClientEntry | None = None
    """Sequence entry of the record's client, evicted or not, if clients number their writes."""


class SideState(Struct, frozen=True):
    """The requested side state, read at one point in time, and the time that determines its expiry."""

    snapshot: Snapshot
    """Includes the heads of the requested lanes."""
    time_ms: int
    """Time at which a write would be decided now, unless the time of its lane is later. It is 0 after a clock
    jump until an operator confirms the clock, so that time does not advance for readers either."""

    def get_time_ms(self, lane: int) -> int:
        """Return the time at which a write to the lane would be decided."""
        head = self.snapshot.heads.get(lane)
        return self.time_ms if head is None else max(self.time_ms, head.log_time_ms)


def count_fitting(sizes: Sequence[int], items_max: int, bytes_max: int, *, is_first: bool = True) -> int:
    """Return how many items of the given sizes fit into a page. The first item of a page always fits."""
    if len(sizes) <= items_max and sum(sizes) <= bytes_max:
        return len(sizes)
    for index, size in enumerate(sizes):
        bytes_max -= size
        if index == items_max or (bytes_max < 0 and not (is_first and not index)):
            return index
    return len(sizes)


def cut_page(items: Sequence[T], count: int) -> tuple[list[T], bool]:
    """Return the first `count` items, and whether there are more."""
    return list(items[:count]), len(items) > count


def to_role(is_owner: object) -> Role:
    """Return the role for a value of the column `is_owner`."""
    return Role.OWNER if is_owner else Role.MEMBER


class EntityPage(Struct, frozen=True):
    """Live entities of a scope, ordered by key."""

    entities: list[tuple[str, Entity]]
    has_more: bool


class RowPage(Struct, frozen=True):
    """Rows of a scope, ordered by table and row id, including deleted rows."""

    rows: list[tuple[str, str, Row]]
    """Table, row id, and the merged state of the row."""
    has_more: bool


class RelationshipQuery(Struct, frozen=True, kw_only=True):
    """Selects relationships of a scope.

    An empty field matches anything. No index supports a search by relation alone.
    """

    scope: str
    resource: str = ""
    relation: str = ""
    subject: str = ""
    after: tuple[str, str, str] = ("", "", "")
    """Cursor: resource, relation and subject. A query with a `subject` ignores the subject of the cursor."""
    limit: int = 500

    @property
    def search_field(self) -> str:
        """Return the field whose index serves the search.

        This is the subject, the relation (of a resource) or the resource, or "" for all relationships.
        """
        if self.subject:
            return "subject"
        return "relation" if self.resource and self.relation else "resource" if self.resource else ""


class RelationshipPage(Struct, frozen=True):
    """Relationships ordered by resource, relation and subject, each with the version that created it."""

    relationships: list[tuple[str, str, str, int]]
    has_more: bool


class StreamMember(Struct, frozen=True):
    """A member of a stream."""

    name: str
    acknowledged: int
    """Sequence up to which the member has received the stream."""
    role: Role


class MemberPage(Struct, frozen=True):
    """The members of a stream, ordered by name."""

    members: list[StreamMember]
    has_more: bool


class Membership(Struct, frozen=True):
    """A stream that a member belongs to."""

    scope: str
    newest: int
    """Newest sequence of the stream."""
    acknowledged: int
    """Sequence up to which the member has received the stream."""
    role: Role


class MembershipPage(Struct, frozen=True):
    """The streams of a member, ordered by name."""

    memberships: list[Membership]
    has_more: bool


class MemberChange(Struct, frozen=True, gc=False):
    """The current state of a member that was added, removed or promoted, or that acknowledged a sequence."""

    revision: int
    """Revision of the lane."""
    scope: str
    member: str
    kind: int
    """`side_state.MEMBERSHIP` or `ACKNOWLEDGEMENT`: the part that has changed."""
    present: bool
    acknowledged: int
    """Sequence that a current member has acknowledged. A member that returns keeps the acknowledgement."""
    role: Role | None
    """Role of a member that was added or has a new role, or None for a removed member and for an acknowledgement."""

    @classmethod
    def from_row(
        cls, revision: int, scope: str, member: str, kind: int, present: object, acknowledged: int, role: Role
    ) -> "MemberChange":
        """Return a change from its columns."""
        has_role = present and kind == MEMBERSHIP
        return cls(revision, scope, member, kind, bool(present), acknowledged, role if has_role else None)

    @property
    def cursor(self) -> "MemberCursor":
        """Return the change's place in the order of its lane."""
        return (self.revision, self.scope, self.member, self.kind)


MemberCursor = tuple[int, str, str, int]
"""Revision, scope, member and kind: the order of changes in a lane."""


class ScopedBlock(Struct, frozen=True):
    """A block, and the positions of its records that are in one scope."""

    block: Block
    positions: tuple[int, ...]


class Store(Protocol):
    """One log. It is opened once, closed once, and used by one event loop.

    A method raises StoreUnavailableError if it temporarily cannot work, and NotALogError or a related error if the file
    or database is not a log.
    """

    @property
    def epoch(self) -> str:
        """Epoch of the history that cursors belong to."""

    @property
    def settings(self) -> Settings:
        """Settings of the log, fixed at its creation."""

    async def open(self) -> None:
        """Create the log if it does not exist, and prepare for commits."""

    async def close(self) -> None:
        """Finish running operations and release all resources."""

    def create_sibling(self) -> "Store | None":
        """Return a second, unopened store on the same log, for the event loop of another thread.

        Opening it never creates a log. Returns None if only this store can reach the log.
        """

    async def declare(self, policies: Sequence[Policy]) -> Mapping[str, Policy]:
        """Save new policies, and return all policies of the log.

        Raises PolicyError if a name already has a different policy.
        """

    async def commit(
        self, batch: Sequence[Request], validate: Validate | None = None, traces: BatchTraces | None = None
    ) -> BatchResult:
        """Decide a batch and make all of its changes durable, or raise an error and store nothing.

        The result's records have the trace contexts that `traces` contains for their items.
        """

    async def enable_traces(self) -> None:
        """Store the trace contexts of later commits, and return them with the records that are read."""

    async def find_keys(self, identities: Sequence[KeyIdentity]) -> list[Remembered | None]:
        """Return the stored answer for each key. The result may still include expired keys."""

    async def get_key_status(self, identity: KeyIdentity) -> KeyStatus:
        """Return everything that the log knows about an identity."""

    async def read(self, query: Query) -> Page:
        """Return a page of records. Raises HistoryChangedError if the cursor is beyond the newest record."""

    async def read_views(self, query: Query, policy: str, encode: EncodeViews) -> RecordViewPage:
        """Return a page of one policy's records, whose bodies must be text, from a lane or from partitions of it.

        The store may call `encode` in another thread, and never passes it an empty sequence.
        """

    async def internal_records(self, after: Mapping[int, int], limit: int) -> list[Record]:
        """Return at most `limit` audit and restore records, oldest first, ordered by log time, lane and position.

        `after` has the position in each lane after which to continue. A lane without one is read from the beginning.
        """

    async def sequence_before(self, stream: str, upto: int, count: int) -> int:
        """Return the sequence `count` records back, counting from the record at `upto`, or 0 if there are fewer
        records.

        Leaps leave gaps between sequences, so the result cannot be computed without the records.
        """

    async def sequence_after(self, stream: str, after: int, count: int) -> int:
        """Return the sequence `count` records after `after`, or the newest sequence if fewer records follow.

        Returns `after` if no record follows.
        """

    async def heads(self) -> Mapping[int, LaneHead]:
        """Return the heads of the lanes that have records."""

    async def block(self, lane: int, height: int) -> tuple[Block, list[Evidence]]:
        """Return a block and its records. Raises LookupError if the block does not exist."""

    async def blocks(self, lane: int, after: int, limit: int, scope: str) -> list[ScopedBlock]:
        """Return at most `limit` blocks of a lane: the first ones above a height."""

    async def side_state(self, read_set: ReadSet) -> SideState:
        """Return the current side state that a read set requests. Keys and sequences are not loaded."""

    async def entities(self, scope: str, prefix: str, after: str, limit: int, bytes_max: int) -> EntityPage:
        """Return entities whose keys begin with the prefix and follow a key. A page ends early at `bytes_max`."""

    async def rows(self, scope: str, table: str, after: tuple[str, str], limit: int, bytes_max: int) -> RowPage:
        """Return the rows after a table and row id, of one table or of all. A page ends early at `bytes_max`."""

    async def relationships(self, query: RelationshipQuery) -> RelationshipPage:
        """Return a page of relationships."""

    async def members(self, scope: str, after: str, limit: int) -> MemberPage:
        """Return a stream's members whose names sort after the given one."""

    async def memberships(self, member: str, prefix: str, after: str, limit: int) -> MembershipPage:
        """Return a member's streams whose names sort after a name and begin with the prefix, which must not be
        empty."""

    async def member_changes(self, lane: int, after: MemberCursor, limit: int) -> list[MemberChange]:
        """Return the member changes of a lane after a cursor, in cursor order.

        For each member, the log keeps only the newest change of each kind.
        """

    async def erase(self, lane: int, positions: Sequence[int], act: RecordAct | None = None) -> int:
        """Erase the bodies of records, and return how many were erased. `scrub` removes the remaining traces.

        If any body was erased, the same transaction records the act, with the number of records in its details. The act
        must belong to the same lane.
        """

    async def set_tenants(self, tenants: Sequence[Tenant], act: RecordAct | None = None) -> bool:
        """Replace the log's quotas. Returns False if the log already has these quotas.

        The store counts the existing usage of new tenants while commits continue. From then on, all servers of the log
        count usage by the new quotas. The transaction that saves the quotas records the act.
        """

    async def usage(self) -> list[tuple[Tenant, Usage]]:
        """Return the tenants with their quotas and usage, ordered by prefix."""

    async def scrub(self) -> bool:
        """Remove all traces of erased bodies.

        Returns False if that is currently impossible; the caller then tries again later.
        """

    async def erasures(self) -> int:
        """Return a number that grows with every erasure. If it has grown, a cache must discard its answers."""

    async def consumers(self) -> list[Consumer]:
        """Return all named consumers."""

    def free_bytes(self) -> int | None:
        """Return the free bytes in the file system, minus what stored commits still need.

        Returns None if the store cannot see the file system. The method does not block.
        """

    async def size_bytes(self) -> int | None:
        """Return the size of the file or database, or None if the store has no size."""

    async def probe(self) -> None:
        """Commit a transaction that changes nothing. Raises an error if the store cannot commit."""

    async def confirm_clock(self) -> None:
        """Accept the current wall clock after a jump."""

    async def renew_epoch(self, above: int | None = None, operator: Operator = Operator()) -> EpochRenewal:
        """Start a new history after a restore: a new epoch, and numbers that continue above the old ones.

        Without `above` the store computes it from the time since the newest commit (`core.rules.leaps`). No other
        process may be using the log, because it would continue with the old epoch. The restore records identify the
        `operator`. Raises SettingsError if `above` is below a number that the log has assigned.
        """

    async def previous_epochs(self) -> tuple[str, ...]:
        """Return the epochs of the histories that this one continues, from its newest restore records."""

    def listen(self, wake: Callable[[], None]) -> None:
        """Register `wake`, which the store calls in the event loop when another process may have committed.

        Notifications can be missing, and some stores never send any, so a reader also polls.
        """
