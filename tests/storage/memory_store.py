"""A store based on dictionaries. Tests compare the database stores with it.

It shares `plan` with them, but no queries.
"""

import os
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from heapq import merge
from itertools import groupby
from operator import attrgetter, itemgetter

from msgspec.structs import replace

from oncelog.core.identity import compute_lane
from oncelog.core.internal_records import is_internal
from oncelog.core.merge import encode_row
from oncelog.core.plan import Validate
from oncelog.core.policy import RESTORE_POLICY, Policy
from oncelog.core.proof import Block, Evidence, hash_body
from oncelog.core.read_set import ReadSet
from oncelog.core.rules.members import get_effective_role
from oncelog.core.stored_bytes import utf8_bytes
from oncelog.core.tenants import Tenant, Usage
from oncelog.core.values import (
    KeyIdentity,
    LaneHead,
    Record,
    RecordAct,
    Remembered,
    Request,
    RequestedSettings,
    Role,
    Settings,
    Snapshot,
)
from oncelog.errors import ClosedError
from oncelog.storage.clock import JUMP_MS_MAX, Clock, ClockMark, SystemClock
from oncelog.storage.metadata import (
    PREVIOUS_EPOCHS_MAX,
    EpochRenewal,
    LogMetadata,
    Operator,
    build_leap_request,
    decode_previous_epochs,
    new_epoch,
    new_settings,
)
from oncelog.storage.queries.traces import add_traces
from oncelog.storage.side_state import TABLES, build_member_change_rows, lane_of_scope
from oncelog.storage.store import (
    BatchResult,
    BatchTraces,
    Consumer,
    Draw,
    EncodeViews,
    EntityPage,
    KeyStatus,
    MemberChange,
    MemberCursor,
    MemberPage,
    Membership,
    MembershipPage,
    Page,
    Query,
    RecordViewPage,
    RelationshipPage,
    RelationshipQuery,
    RowPage,
    ScopedBlock,
    SideState,
    StreamMember,
    build_act_request,
    count_fitting,
    cut_page,
    plan_batch,
    select_new_policies,
    to_record_view,
)
from oncelog.storage.tenants import (
    CountStart,
    SizeRow,
    StateRow,
    UsageCount,
    decode_tenants,
    encode_partitions,
    encode_tenants,
    list_tenants,
)
from oncelog.testing.memory_log import MemoryLog


class MemoryStore:
    """Log in memory. `storage.store.Store` documents the contract of each method."""

    def __init__(
        self,
        settings: Settings | RequestedSettings | None = None,
        *,
        clock: Clock | None = None,
        draw: Draw = os.urandom,
        jump_ms_max: int = JUMP_MS_MAX,
    ) -> None:
        self._log = MemoryLog(new_settings(settings), draw)
        self._index = _RecordIndex()
        self._clock = clock or SystemClock()
        self._draw = draw
        self._jump_ms_max = jump_ms_max
        self._mark = ClockMark()
        self._policies: dict[str, Policy] = {}
        self._tenants: str | None = None
        self._body_hashes: dict[int, bytes] = {}
        self._erasures = 0
        self._metadata = LogMetadata(0, new_epoch(), self._log.snapshot.settings, b"", self._clock.wall_ms())
        self._is_open = False

    @property
    def epoch(self) -> str:
        """See `Store`."""
        return self._metadata.epoch

    @property
    def settings(self) -> Settings:
        """See `Store`."""
        return self._metadata.settings

    async def open(self) -> None:
        """See `Store`."""
        self._is_open = True

    async def close(self) -> None:
        """See `Store`. The content lasts as long as the store object."""
        self._is_open = False

    def create_sibling(self) -> None:
        """See `Store`: the log is in the memory of this store."""

    async def declare(self, policies: Sequence[Policy]) -> Mapping[str, Policy]:
        """See `Store`."""
        self._check_open()
        self._policies.update(select_new_policies(self._policies, policies))
        return dict(self._policies)

    async def enable_traces(self) -> None:
        """See `Store`: the records in memory have their contexts."""

    async def commit(
        self, batch: Sequence[Request], validate: Validate | None = None, traces: BatchTraces | None = None
    ) -> BatchResult:
        """See `Store`."""
        log = self._check_open()
        mark, jumped = self._mark.propose(ClockMark.read(self._clock), self._jump_ms_max)
        result = plan_batch(batch, log.snapshot, mark.time_ms, validate, self._draw, jumped=jumped)
        result.erasures = self._erasures
        if result.changes.is_empty:
            return result
        if traces is not None:
            result.changes.records = add_traces(result, traces)
        self._index.add(result, len(log.records), self.settings.lanes)
        log.keep(result)
        self._mark = self._mark if jumped is not None else mark
        return result

    async def find_keys(self, identities: Sequence[KeyIdentity]) -> list[Remembered | None]:
        """See `Store`."""
        keys = self._check_open().snapshot.keys
        return [keys.get(identity) for identity in identities]

    async def get_key_status(self, identity: KeyIdentity) -> KeyStatus:
        """See `Store`."""
        snapshot = self._check_open().snapshot
        remembered = snapshot.keys.get(identity)
        if remembered is None:
            lane, records = lane_of_scope(identity[1], self.settings.lanes), []
        else:
            lane = remembered.receipt.lane
            candidates = (self._log.records[index] for _, index in self._index.get_order(lane))
            records = [record for record in candidates if record.identity == identity]
        head = snapshot.heads.get(lane) or LaneHead()
        mark, _ = self._mark.propose(ClockMark.read(self._clock), self._jump_ms_max)
        client_entry = snapshot.clients.get(identity[:3])
        positions = tuple(record.position for record in records)
        newest = records[-1] if records else None
        return KeyStatus(newest, snapshot.leases.get(identity), head, mark.time_ms, positions, client_entry)

    async def read(self, query: Query) -> Page:
        """See `Store`."""
        return self._read_page(query, None)

    def _read_page(self, query: Query, policy: str | None) -> Page:
        self._check_open()
        newest = self._get_newest(query.stream, query.lane)
        query, upto = query.clamp(newest, self.epoch)
        records: list[Record] = []
        following, size = query.after, 0
        for number, record in self._iterate_records(query, upto):
            if policy is not None and record.policy != policy:
                continue
            size += len(record.body)
            if len(records) == query.limit or (records and size > query.bytes_max):
                return Page(records, following, upto, has_more=True, newest=newest)
            records.append(record)
            following = number
        return Page(records, max(upto, query.after), upto, has_more=False, newest=newest)

    async def read_views(self, query: Query, policy: str, encode: EncodeViews) -> RecordViewPage:
        """See `Store`."""
        page = self._read_page(query, policy)
        views = [to_record_view(record) for record in page.records]
        encoded = [encode(views)] if views else []
        return RecordViewPage(encoded, len(views), page.next, page.upto, page.has_more, page.newest)

    async def internal_records(self, after: Mapping[int, int], limit: int) -> list[Record]:
        """See `Store`."""
        self._check_open()
        found = [
            record
            for record in self._log.records
            if is_internal(record) and record.position > after.get(record.lane, 0)
        ]
        return sorted(found, key=attrgetter("log_time_ms", "lane", "position"))[:limit]

    async def sequence_before(self, stream: str, upto: int, count: int) -> int:
        """See `Store`."""
        self._check_open()
        sequences = self._index.get_order(stream)
        place = _count_upto(sequences, upto) - count
        return sequences[place][0] if place >= 0 else 0

    async def sequence_after(self, stream: str, after: int, count: int) -> int:
        """See `Store`."""
        self._check_open()
        sequences = self._index.get_order(stream)
        first = _count_upto(sequences, after)
        return sequences[first : first + count][-1][0] if first < len(sequences) else after

    async def heads(self) -> Mapping[int, LaneHead]:
        """See `Store`."""
        return dict(sorted(self._check_open().snapshot.heads.items()))

    async def block(self, lane: int, height: int) -> tuple[Block, list[Evidence]]:
        """See `Store`."""
        self._check_open()
        blocks = self._index.list_blocks(lane, height - 1, 1)
        if not blocks or blocks[0].height != height:
            raise LookupError(f"lane {lane} has no block at height {height}")
        return blocks[0], [self._get_evidence(index) for _, index in self._index.iterate_block(blocks[0])]

    async def blocks(self, lane: int, after: int, limit: int, scope: str) -> list[ScopedBlock]:
        """See `Store`."""
        records = self._check_open().records
        found = []
        for block in self._index.list_blocks(lane, after, limit):
            positions = [
                position
                for position, index in self._index.iterate_block(block)
                if records[index].sequence and records[index].scope == scope
            ]
            found.append(ScopedBlock(block, tuple(positions)))
        return found

    async def side_state(self, read_set: ReadSet) -> SideState:
        """See `Store`."""
        snapshot = self._check_open().snapshot
        found = Snapshot(settings=self.settings)
        found.heads = {lane: snapshot.heads.get(lane) or LaneHead() for lane in read_set.lanes}
        for table in TABLES:
            values = getattr(snapshot, table.name)
            setattr(found, table.name, {key: values[key] for key in getattr(read_set, table.name) if key in values})
        mark, jumped = self._mark.propose(ClockMark.read(self._clock), self._jump_ms_max)
        return SideState(found, mark.time_ms if jumped is None else 0)

    async def entities(self, scope: str, prefix: str, after: str, limit: int, bytes_max: int) -> EntityPage:
        """See `Store`."""
        lane = compute_lane(scope, self.settings.lanes)
        time_ms = (await self.side_state(ReadSet(lanes={lane}))).get_time_ms(lane)
        wanted = [
            (key, entity)
            for (where, key), entity in self._log.snapshot.entities.items()
            if where == scope and key.startswith(prefix) and key > after and entity.is_live(time_ms)
        ]
        wanted.sort(key=itemgetter(0))
        fitting = count_fitting([len(entity.value) for _, entity in wanted], limit, bytes_max)
        return EntityPage(*cut_page(wanted, fitting))

    async def rows(self, scope: str, table: str, after: tuple[str, str], limit: int, bytes_max: int) -> RowPage:
        """See `Store`."""
        found = sorted(
            (
                (name, row_id, row)
                for (where, name, row_id), row in self._check_open().snapshot.rows.items()
                if where == scope and table in ("", name) and (name, row_id) > after
            ),
            key=itemgetter(0, 1),
        )
        sizes = [sum(len(value) for value in row.values.values()) for _, _, row in found]
        return RowPage(*cut_page(found, count_fitting(sizes, limit, bytes_max)))

    async def relationships(self, query: RelationshipQuery) -> RelationshipPage:
        """See `Store`."""
        terms = (query.resource, query.relation, query.subject)
        after = (*query.after[:2], query.subject or query.after[2])
        found = sorted(
            (resource, relation, subject, version)
            for (scope, resource, relation, subject), version in self._check_open().snapshot.relationships.items()
            if scope == query.scope
            and (resource, relation, subject) > after
            and all(term in ("", name) for term, name in zip(terms, (resource, relation, subject), strict=True))
        )
        return RelationshipPage(*cut_page(found, query.limit))

    async def members(self, scope: str, after: str, limit: int) -> MemberPage:
        """See `Store`."""
        snapshot = self._check_open().snapshot
        names = sorted(member for where, member in snapshot.members if where == scope and member > after)
        return MemberPage(
            *cut_page([StreamMember(name, *self._get_member_state(scope, name)) for name in names], limit)
        )

    def _get_member_state(self, scope: str, member: str) -> tuple[int, Role]:
        """Return the sequence that a member has acknowledged, and the role of the member."""
        snapshot = self._log.snapshot
        found = snapshot.members.get((scope, member))
        role = Role.MEMBER if found is None else get_effective_role(found, snapshot.rosters[scope])
        return snapshot.acknowledged.get((scope, member), 0), role

    async def memberships(self, member: str, prefix: str, after: str, limit: int) -> MembershipPage:
        """See `Store`."""
        snapshot = self._check_open().snapshot
        found = [
            Membership(scope, snapshot.streams.get(scope, 0), *self._get_member_state(scope, name))
            for scope, name in sorted(snapshot.members)
            if name == member and scope > after and scope.startswith(prefix)
        ]
        return MembershipPage(*cut_page(found, limit))

    async def member_changes(self, lane: int, after: MemberCursor, limit: int) -> list[MemberChange]:
        """See `Store`."""
        members = self._check_open().snapshot.members
        changed = sorted(
            (revision, scope, member, kind)
            for (where, scope, member, kind), revision in self._index.member_changes.items()
            if where == lane and (revision, scope, member, kind) > after
        )
        return [
            MemberChange.from_row(
                revision, scope, member, kind, (scope, member) in members, *self._get_member_state(scope, member)
            )
            for revision, scope, member, kind in changed[:limit]
        ]

    async def erase(self, lane: int, positions: Sequence[int], act: RecordAct | None = None) -> int:
        """See `Store`."""
        log = self._check_open()
        indexes = [self._index.find_index(lane, position) for position in sorted(set(positions))]
        erased = [index for index in indexes if index is not None and not log.records[index].erased]
        if erased and act is not None:
            # Before the erasure, because the commit can fail.
            await self.commit([build_act_request(act, lane, self.settings.lanes, len(erased))])
        for index in erased:
            self._body_hashes[index] = log.erase(index)
        if erased:
            log.touch(lane)
            self._erasures += 1
        return len(erased)

    async def set_tenants(self, tenants: Sequence[Tenant], act: RecordAct | None = None) -> bool:
        """See `Store`."""
        log, text = self._check_open(), encode_tenants(tenants)
        if text == self._tenants:
            return False
        # Counting comes before the commit, because it can raise.
        count = UsageCount(CountStart(self._tenants, self._erasures, {}), tenants)
        if act is not None:
            await self.commit([build_act_request(act, 0, self.settings.lanes)])
        count.add(map(_measure_record, log.records))
        count.add_state(_measure_state(log.snapshot))
        count.add_members((scope, 1, utf8_bytes(member)) for scope, member in log.snapshot.past_members)
        log.snapshot.tenants, self._tenants = decode_tenants(text), text
        log.keep_usage({**dict.fromkeys(count.removed_prefixes), **count.usage})
        return True

    async def usage(self) -> list[tuple[Tenant, Usage]]:
        """See `Store`."""
        known = self._check_open().snapshot.usage
        return [(tenant, known[tenant.prefix]) for tenant in list_tenants(self._tenants)]

    async def erasures(self) -> int:
        """See `Store`."""
        self._check_open()
        return self._erasures

    async def consumers(self) -> list[Consumer]:
        """See `Store`."""
        cursors = sorted(self._check_open().snapshot.consumers.items())
        return [
            Consumer(scope, name, cursor, self._index.count_after(scope, cursor)) for (scope, name), cursor in cursors
        ]

    async def scrub(self) -> bool:
        """See `Store`."""
        self._check_open()
        return True

    def listen(self, wake: Callable[[], None]) -> None:
        """See `Store`. No other process can reach the log."""

    def free_bytes(self) -> int | None:
        """See `Store`. The store has no file system."""
        return None

    async def size_bytes(self) -> int | None:
        """See `Store`. The store has no file."""
        return None

    async def probe(self) -> None:
        """See `Store`."""
        self._check_open()

    async def confirm_clock(self) -> None:
        """See `Store`."""
        self._check_open()
        self._mark = ClockMark.read(self._clock)

    async def renew_epoch(self, above: int | None = None, operator: Operator = Operator()) -> EpochRenewal:
        """See `Store`."""
        log = self._check_open()
        now_ms = self._mark.get_latest_ms(ClockMark.read(self._clock))
        request, renewed = build_leap_request(
            log.snapshot.heads, self._metadata, above, now_ms, new_epoch(), operator=operator
        )
        await self.commit([request])
        self._metadata = replace(self._metadata, epoch=renewed.new_epoch)
        return renewed

    async def previous_epochs(self) -> tuple[str, ...]:
        """See `Store`."""
        records = self._check_open().records
        restored = [record.body for record in records if record.policy == RESTORE_POLICY and record.lane == 0]
        return decode_previous_epochs(restored[-PREVIOUS_EPOCHS_MAX:])

    # --- internals

    def _check_open(self) -> MemoryLog:
        if not self._is_open:
            raise ClosedError("the log in memory is not open")
        return self._log

    def _get_newest(self, stream: str | None, lane: int) -> int:
        snapshot = self._log.snapshot
        if stream is not None:
            return snapshot.streams.get(stream, 0)
        return (snapshot.heads.get(lane) or LaneHead()).position

    def _iterate_records(self, query: Query, upto: int) -> Iterator[tuple[int, Record]]:
        """Iterate over the records of a query in order, each once, with its number in that order."""
        names: list[_OrderName] = [query.lane] if query.stream is None else [query.stream]
        if query.stream is None and query.partitions:
            names = [(query.lane, partition) for partition in query.partitions]
        orders = [self._index.iterate_between(name, query.after, upto) for name in names]
        for (number, index), _ in groupby(merge(*orders)):  # a record can be in several partitions
            yield number, self._log.records[index]

    def _get_evidence(self, index: int) -> Evidence:
        record, salt = self._log.records[index], self._log.salts[index]
        kept_hash = self._body_hashes.get(index)
        return Evidence(record, salt, hash_body(salt, record.body) if kept_hash is None else kept_hash)


_OrderName = int | str | tuple[int, str]
"""The number of a lane, the name of a stream, or the lane and name of a partition."""


class _RecordIndex:
    """Index of the records of a log by their numbers in each order, and of its blocks and member changes."""

    def __init__(self) -> None:
        self._orders: defaultdict[_OrderName, list[tuple[int, int]]] = defaultdict(list)
        """Numbers in ascending order, with gaps after leaps, each with the index of its record."""
        self._blocks: defaultdict[int, list[Block]] = defaultdict(list)
        """Blocks of each lane in order of height."""
        self.member_changes: dict[tuple[int, str, str, int], int] = {}
        """The revision of the newest change per lane, scope, member and kind."""

    def add(self, result: BatchResult, first_index: int, lanes: int) -> None:
        """Add records that are about to be appended to the log, starting at an index."""
        for lane, scope, member, kind, revision in build_member_change_rows(result.changes, lanes):
            self.member_changes[lane, scope, member, kind] = revision
        for block in result.sealed.blocks:
            self._blocks[block.lane].append(block)
        for index, record in enumerate(result.changes.records, first_index):
            self._orders[record.lane].append((record.position, index))
            for partition in dict.fromkeys(record.partitions):
                self._orders[record.lane, partition].append((record.position, index))
            if record.sequence:
                self._orders[record.scope].append((record.sequence, index))

    def get_order(self, name: _OrderName) -> Sequence[tuple[int, int]]:
        """Return all numbers of an order with the indexes of their records. An unknown name is not stored."""
        return self._orders.get(name, ())

    def iterate_between(self, name: _OrderName, after: int, upto: int) -> Iterator[tuple[int, int]]:
        """Iterate over the numbers of an order above `after` and up to `upto`, with the indexes of their records."""
        order = self.get_order(name)
        return map(order.__getitem__, range(_count_upto(order, after), _count_upto(order, upto)))

    def find_index(self, lane: int, position: int) -> int | None:
        """Return the index of the record at a position, or None."""
        return next((index for _, index in self.iterate_between(lane, position - 1, position)), None)

    def count_after(self, stream: str, cursor: int) -> int:
        """Count the records after a cursor in a stream, or in lane 0 if `stream` is empty."""
        order = self.get_order(stream or 0)
        return len(order) - _count_upto(order, cursor)

    def iterate_block(self, block: Block) -> Iterator[tuple[int, int]]:
        """Iterate over the positions of the records in a block, with the indexes of the records."""
        return self.iterate_between(block.lane, block.first_position - 1, block.first_position + block.count - 1)

    def list_blocks(self, lane: int, after: int, limit: int) -> list[Block]:
        """Return the first blocks of a lane above a height."""
        blocks = self._blocks.get(lane, [])
        first = bisect_right(blocks, after, key=attrgetter("height"))
        return blocks[first : first + limit]


def _count_upto(order: Sequence[tuple[int, int]], number: int) -> int:
    """Count the numbers of an order up to a number."""
    return bisect_right(order, number, key=itemgetter(0))


def _measure_state(snapshot: Snapshot) -> Iterator[StateRow]:
    for (scope, key), entity in snapshot.entities.items():
        head = snapshot.heads[compute_lane(scope, snapshot.settings.lanes)]
        if entity.is_live(head.log_time_ms):
            yield scope, 1, utf8_bytes(key), len(entity.value)
    for scope, *names in snapshot.relationships:
        yield scope, 1, sum(map(utf8_bytes, names)), 0
    for (scope, table, row_id), row in snapshot.rows.items():
        yield scope, 1, utf8_bytes(table) + utf8_bytes(row_id), len(encode_row(row))


def _measure_record(record: Record) -> SizeRow:
    names = sum(map(utf8_bytes, (record.scope, record.client, record.actor))) + len(record.key)
    partitions = encode_partitions(record.partitions)
    columns = (record.position, record.sequence, record.policy, record.actor, record.scope)
    return (*columns, partitions, len(record.body), names)
