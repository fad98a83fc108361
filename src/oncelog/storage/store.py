"""What every store does: memory, SQLite, and what comes after them. `oncelog.testing.contract` says it in tests.

A store keeps tables and transactions; it decides nothing. `commit` is the one way in for a batch: load what
`build_read_set` names, hand it to `plan`, close the blocks, save the changes, all in one transaction.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from struct import Struct as Packing
from time import monotonic
from typing import Final, Protocol, TypeVar

import orjson
from msgspec import Struct
from msgspec.structs import replace

from oncelog.core.identity import compute_lane
from oncelog.core.merge import Row
from oncelog.core.operations import Entity
from oncelog.core.plan import Plan, Validate, plan
from oncelog.core.policy import Policy
from oncelog.core.proof import SALT_BYTES, Block, SealedBatch, seal
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
from oncelog.storage.leaps import NO_OPERATOR, EpochRenewal, Operator
from oncelog.storage.side_state import MEMBERSHIP

T = TypeVar("T")

logger: Final = logging.getLogger("oncelog.engine")

WARNING_INTERVAL_S: Final = 600
"""Pause between two warnings about readers of the same history."""
_EPOCHS_MAX: Final = 100
_last_warning_s: dict[str, float] = {}
"""When the last warning was logged, by epoch."""
_SALT: Final = Packing(f"{SALT_BYTES}s")
Draw = Callable[[int], bytes]
"""Gives so many random bytes."""


class BatchResult(Struct):
    """What became of a batch, once it is durable."""

    verdicts: list[list[Verdict]]
    changes: Changes
    salts: Sequence[bytes]
    sealed: SealedBatch
    erasures: int = 0
    """How many there had been when it was decided: answers that are older than an erasure must not be kept."""
    evicted_clients: int = 0
    """Entries of forgotten clients that were deleted with it."""


def plan_batch(
    batch: Sequence[Request],
    snapshot: Snapshot,
    now_ms: int,
    validate: Validate | None,
    draw: Draw,
    faults: Mapping[int, Refused] | None = None,
) -> BatchResult:
    """Plans a batch and closes its blocks. Nothing has been saved when it returns."""
    planned = plan(batch, snapshot, now_ms, validate, faults)
    random_bytes = draw(SALT_BYTES * len(planned.changes.records))
    return seal_blocks(planned, list(chain.from_iterable(_SALT.iter_unpack(random_bytes))))


def seal_blocks(planned: Plan, salts: Sequence[bytes]) -> BatchResult:
    """Closes the blocks of a planned batch, with one salt a record."""
    sealed = seal(planned.changes, salts)
    return BatchResult(planned.verdicts, replace(planned.changes, heads=sealed.heads), salts, sealed)


def build_act_request(act: RecordAct, lane: int, lanes: int, records: int | None = None) -> Request:
    """Return the batch of an act that is recorded in the transaction of the act. Raises ValueError if it cannot be.

    `lane` is the lane that the act concerns, of a log with `lanes` of them. `records` is the number of records that the
    act changed, for its details.
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
    """Those that the log does not know yet. Raises PolicyError for another of a known name."""
    declared: dict[str, Policy] = {}
    for policy in policies:
        before = known.get(policy.name) or declared.setdefault(policy.name, policy)
        if before != policy:
            raise PolicyError(
                f"the log knows another policy named {policy.name!r}: {before}; "
                "what it remembers depends on it, so declare the new one under a new name"
            )
    return declared


def _warn_of_reader_ahead(order: str, cursor: int, newest: int, epoch: str) -> None:
    """Log that a cursor is ahead of the order that it reads: the log may have been put back to an earlier state."""
    now_s = monotonic()
    if now_s - _last_warning_s.get(epoch, -WARNING_INTERVAL_S) < WARNING_INTERVAL_S:
        return
    if len(_last_warning_s) >= _EPOCHS_MAX:
        _last_warning_s.clear()
    _last_warning_s[epoch] = now_s
    logger.warning(
        "a reader of %s is at %d, ahead of the newest record, %d. If the log was restored without `oncelog restore`, "
        "stop everything that uses it and run `oncelog epoch LOG --renew`",
        order,
        cursor,
        newest,
    )


class Query(Struct, frozen=True, kw_only=True):
    """Which records, in which order: of a lane, of some partitions in it, or of a stream."""

    lane: int = 0
    partitions: tuple[str, ...] = ()
    stream: str | None = None
    """Names the order to read by: sequences of this stream, in place of positions of the lane."""
    after: int = 0
    """The cursor: only what comes after it."""
    upto: int | None = None
    """And nothing beyond; None for the newest."""
    limit: int = 500
    bytes_max: int = 8 * 2**20
    """A page ends early, but never empty, when its bodies have come to this."""

    def clamp(self, newest: int, epoch: str) -> tuple["Query", int]:
        """Return the query with its numbers in range, and its bound, which is at most the newest number.

        Raises HistoryChangedError for a cursor beyond the newest number.
        """
        if self.after > newest:
            order = f"lane {self.lane}" if self.stream is None else f"the stream {self.stream!r}"
            _warn_of_reader_ahead(order, self.after, newest, epoch)
            message = f"the cursor {self.after} is ahead of the newest, {newest}: this is not the log it was read from"
            raise HistoryChangedError(message, epoch, newest)
        upto = newest if self.upto is None else min(self.upto, newest)
        return replace(self, after=max(0, self.after), upto=upto, limit=max(1, self.limit)), upto


class Page(Struct, frozen=True):
    """Some records in order, and how to go on."""

    records: list[Record]
    next: int
    """The cursor after this page. Behind the last page it is the bound, also where no record matched."""
    upto: int
    """The bound of the reading: ask for it again, and paging ends however fast the log grows."""
    has_more: bool
    newest: int
    """Of the order that was read, matching or not."""


RecordView = tuple[int, int, str, str, str, bytes, str, str | None]
"""A record as readers see it: position, log time in ms, actor, client, scope, key, partitions as a JSON array, and the
body as text (None if erased). It has nothing that proves the record, which halves the work of reading it."""


def to_record_view(record: Record) -> RecordView:
    """A record in brief."""
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


@lru_cache(maxsize=1024)
def encode_partitions(partitions: tuple[str, ...]) -> str:
    """Partitions as a JSON array."""
    return orjson.dumps(partitions).decode()


EncodeViews = Callable[[Sequence[RecordView]], bytes]
"""Makes bytes of some records in brief, for whoever reads them."""


class RecordViewPage(Struct, frozen=True):
    """As `Page`, in brief."""

    encoded: list[bytes]
    """All of them in order, some in each: what is made of a hundred lets its parts go before the next are made, and
    never has the system give memory to the process and take it back."""
    count: int
    next: int
    upto: int
    has_more: bool
    newest: int


class Evidence(Struct, frozen=True):
    """A record with all that its hash is made of."""

    record: Record
    salt: bytes
    """Empty once erased."""
    body_hash: bytes


class Consumer(Struct, frozen=True):
    """A named reader, and how far it is behind."""

    scope: str
    name: str
    cursor: int
    lag: int


class KeyStatus(Struct, frozen=True):
    """What a store knows about an identity."""

    record: Record | None
    """The newest under it, forgotten or not."""
    lease: Lease | None
    head: LaneHead
    """Of its lane, to judge both by."""
    time_ms: int = 0
    """At which a write under it would be decided now."""
    positions: tuple[int, ...] = ()
    """Of all records under it, oldest first: there are several where it was forgotten and used again."""
    client_entry: ClientEntry | None = None
    """The sequence of the record's client, evicted or not, where clients number their writes."""


class SideState(Struct, frozen=True):
    """Side state that was asked for, all of one moment, and by what it is to be judged."""

    snapshot: Snapshot
    """With the heads of the lanes that were named."""
    time_ms: int
    """At which a write would be decided now, if its lane's time were not ahead of that. 0 while the clock is in doubt:
    then time stands still, for readers too."""

    def get_time_ms(self, lane: int) -> int:
        """At which a write to the lane would be decided."""
        head = self.snapshot.heads.get(lane)
        return self.time_ms if head is None else max(self.time_ms, head.log_time_ms)


def count_fitting(sizes: Sequence[int], items_max: int, bytes_max: int, *, is_first: bool = True) -> int:
    """Return how many items of these sizes fit into a page. The first item of a page always fits."""
    if len(sizes) <= items_max and sum(sizes) <= bytes_max:
        return len(sizes)
    for index, size in enumerate(sizes):
        bytes_max -= size
        if index == items_max or (bytes_max < 0 and not (is_first and not index)):
            return index
    return len(sizes)


def cut_page(items: Sequence[T], count: int) -> tuple[list[T], bool]:
    """Return the first items, and whether there are more."""
    return list(items[:count]), len(items) > count


def to_role(is_owner: object) -> Role:
    """Return the role that a column stands for."""
    return Role.OWNER if is_owner else Role.MEMBER


class EntityPage(Struct, frozen=True):
    """Some entities of a scope in the order of their keys, none of them expired."""

    entities: list[tuple[str, Entity]]
    has_more: bool


class RowPage(Struct, frozen=True):
    """Some rows of a scope in the order of table and row id, those that were deleted too."""

    rows: list[tuple[str, str, Row]]
    """Table, row id, and what is left of its deltas."""
    has_more: bool


class RelationshipQuery(Struct, frozen=True, kw_only=True):
    """Which relationships of a scope. What is empty is any; the relation alone is not enough to find one by."""

    scope: str
    resource: str = ""
    relation: str = ""
    subject: str = ""
    after: tuple[str, str, str] = ("", "", "")
    """Only those that come after it: resource, relation, subject (where one is asked for, that one)."""
    limit: int = 500

    @property
    def search_field(self) -> str:
        """What they are found by: subject, relation (of a resource), resource; "" where all are asked for."""
        if self.subject:
            return "subject"
        return "relation" if self.resource and self.relation else "resource" if self.resource else ""


class RelationshipPage(Struct, frozen=True):
    """Some relationships in the order of resource, relation and subject, each with the version that made it."""

    relationships: list[tuple[str, str, str, int]]
    has_more: bool


class StreamMember(Struct, frozen=True):
    """A member as readers of a stream see it."""

    name: str
    acknowledged: int
    """The sequence up to which it has received the stream."""
    role: Role


class MemberPage(Struct, frozen=True):
    """Some members of a stream in the order of their names."""

    members: list[StreamMember]
    has_more: bool


class Membership(Struct, frozen=True):
    """A stream of which somebody is a member."""

    scope: str
    newest: int
    """The newest sequence of the stream."""
    acknowledged: int
    """Up to where the member has received it."""
    role: Role


class MembershipPage(Struct, frozen=True):
    """Some streams of a member in the order of their names."""

    memberships: list[Membership]
    has_more: bool


class MemberChange(Struct, frozen=True, gc=False):
    """Somebody who has come or gone, or has acknowledged something, as it stands now."""

    revision: int
    """Of the lane."""
    scope: str
    member: str
    kind: int
    """`side_state.MEMBERSHIP` or `ACKNOWLEDGEMENT`: what has changed."""
    present: bool
    acknowledged: int
    """Of one who is present; who comes back has what he had."""
    role: Role | None
    """Of a member that was added or got another role; None of one that is gone, and of an acknowledgement."""

    @classmethod
    def from_row(
        cls, revision: int, scope: str, member: str, kind: int, present: object, acknowledged: int, role: Role
    ) -> "MemberChange":
        """Return a change from its columns."""
        has_role = present and kind == MEMBERSHIP
        return cls(revision, scope, member, kind, bool(present), acknowledged, role if has_role else None)

    @property
    def cursor(self) -> "MemberCursor":
        """Where it stands in the order of its lane."""
        return (self.revision, self.scope, self.member, self.kind)


MemberCursor = tuple[int, str, str, int]
"""Revision, scope, member and kind: the order of changes in a lane."""


class ScopedBlock(Struct, frozen=True):
    """A block, and which of its records are of one scope."""

    block: Block
    positions: tuple[int, ...]


class Store(Protocol):
    """One log. Opened once, closed once, used by one event loop.

    Whatever cannot be done right now raises StoreUnavailableError; what is not a log, NotALogError and its kin.
    """

    @property
    def epoch(self) -> str:
        """The history that cursors belong to."""

    @property
    def settings(self) -> Settings:
        """What the log was made with."""

    async def open(self) -> None:
        """Makes the log if it is not there, else gets ready what commits need."""

    async def close(self) -> None:
        """Ends what is under way and lets everything go."""

    def create_sibling(self) -> "Store | None":
        """Return a second store on the same log, not yet open, for the event loop of another thread.

        Opening it never creates a log. Returns None if only this store can reach the log.
        """

    async def declare(self, policies: Sequence[Policy]) -> Mapping[str, Policy]:
        """Keeps the declarations and gives all that the log knows. Raises PolicyError for another of a known name."""

    async def commit(self, batch: Sequence[Request], validate: Validate | None = None) -> BatchResult:
        """Decides a batch and makes it durable: all of it, or nothing and an error."""

    async def find_keys(self, identities: Sequence[KeyIdentity]) -> list[Remembered | None]:
        """What is remembered of keys, as of now; forgotten ones may still be among them."""

    async def get_key_status(self, identity: KeyIdentity) -> KeyStatus:
        """All there is about one identity."""

    async def read(self, query: Query) -> Page:
        """A page of records. Raises HistoryChangedError for a cursor beyond the newest."""

    async def read_views(self, query: Query, policy: str, encode: EncodeViews) -> RecordViewPage:
        """A page of the records of one policy, whose bodies are texts; of a lane or of partitions in it.

        `encode` is called in a thread that may not be the caller's, never with none.
        """

    async def internal_records(self, after: Mapping[int, int], limit: int) -> list[Record]:
        """Return the oldest audit and restore records, at most `limit`, by log time, lane and position.

        `after` has the position in each lane that they come after; a lane that it does not name is read from 0.
        """

    async def sequence_before(self, stream: str, upto: int, count: int) -> int:
        """Return the sequence `count` records back; the record at `upto` is the first. 0 if there are fewer records.

        Sequences are not dense where the log has leapt, so that they cannot be computed.
        """

    async def sequence_after(self, stream: str, after: int, count: int) -> int:
        """Return the sequence `count` records after another one, or the last; `after` if no record follows."""

    async def heads(self) -> Mapping[int, LaneHead]:
        """The heads of the lanes that have been written to."""

    async def block(self, lane: int, height: int) -> tuple[Block, list[Evidence]]:
        """A block and its records. Raises LookupError where there is none."""

    async def blocks(self, lane: int, after: int, limit: int, scope: str) -> list[ScopedBlock]:
        """Blocks of a lane above a height, in order, at most so many."""

    async def side_state(self, read_set: ReadSet) -> SideState:
        """Return the present side state that a read set names. Keys and sequences are not loaded."""

    async def entities(self, scope: str, prefix: str, after: str, limit: int, bytes_max: int) -> EntityPage:
        """Entities whose keys begin with the prefix and come after a key. A page ends early when it is that large."""

    async def rows(self, scope: str, table: str, after: tuple[str, str], limit: int, bytes_max: int) -> RowPage:
        """Rows of a table, or of all where none is named, that come after a table and row id. Pages end early too."""

    async def relationships(self, query: RelationshipQuery) -> RelationshipPage:
        """A page of relationships."""

    async def members(self, scope: str, after: str, limit: int) -> MemberPage:
        """Members of a stream that come after a name."""

    async def memberships(self, member: str, prefix: str, after: str, limit: int) -> MembershipPage:
        """Streams of a member whose names begin with the prefix, which must not be empty, and come after a name."""

    async def member_changes(self, lane: int, after: MemberCursor, limit: int) -> list[MemberChange]:
        """Who has come, gone or acknowledged something in the lane after that place, in order, each once."""

    async def erase(self, lane: int, positions: Sequence[int], act: RecordAct | None = None) -> int:
        """Erases the bodies of records and gives how many had one. The bytes may lie about until `scrub` is done.

        In the same transaction the act is recorded, with the number of records in its details, unless that is 0. The
        act must be of the same lane.
        """

    async def set_tenants(self, tenants: Sequence[Tenant], act: RecordAct | None = None) -> bool:
        """The log has these quotas from now on, and no others. False if they are those that it has.

        What new tenants have already is counted, beside those who write. Whoever has the log open counts with it.
        In the same transaction the act is recorded.
        """

    async def usage(self) -> list[tuple[Tenant, Usage]]:
        """The tenants with their quotas, and what each has, by prefix."""

    async def scrub(self) -> bool:
        """Leaves no trace of what was erased. False if that cannot be done right now; then it is to be called again."""

    async def erasures(self) -> int:
        """Goes up with every erasure: who keeps answers in memory must let them go."""

    async def consumers(self) -> list[Consumer]:
        """All named consumers."""

    def free_bytes(self) -> int | None:
        """What is free on the file system that the log is on, and not needed for what was committed already.

        None where the store cannot see it. Does not wait.
        """

    async def size_bytes(self) -> int | None:
        """What the file or the database has, with all that is in it; None where that has no meaning."""

    async def probe(self) -> None:
        """Commits something that changes nothing, so that it is known whether that can be done. Raises if not."""

    async def confirm_clock(self) -> None:
        """Believes the wall clock as it is, after it jumped."""

    async def renew_epoch(self, above: int | None = None, operator: Operator = NO_OPERATOR) -> EpochRenewal:
        """Start a new history after a restore: another epoch, and numbers that continue above those of the lost one.

        Without `above` it is computed from the time since the newest commit (`core.rules.leaps`). Nothing else may use
        the log: others would continue with the old epoch. The restore records name the `operator`. Raises SettingsError
        for an `above` that is below a number of the log.
        """

    async def previous_epochs(self) -> tuple[str, ...]:
        """Return the epochs of histories that this one continues, from its newest restore records."""

    def listen(self, wake: Callable[[], None]) -> None:
        """From now on `wake` is called, in the event loop, when another process may have committed something.

        A store that cannot tell never calls it, and no store always does: whoever follows looks by himself too.
        """
