"""Base class of the SQLite and PostgreSQL stores: reads, and counts of usage that do not block commits.

A method decorated with `shared_query` is a generator: it yields statements, which the engine runs on a read connection
(`queries.statement`).
"""

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from functools import partial, wraps
from itertools import count
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

from msgspec.structs import replace

from oncelog.core.merge import decode_row
from oncelog.core.proof import Block, Evidence
from oncelog.core.read_set import ReadSet
from oncelog.core.tenants import Tenant, Usage
from oncelog.core.values import LaneHead, Record, RecordAct, Settings, Snapshot
from oncelog.storage.clock import ClockMark
from oncelog.storage.metadata import LogMetadata, logger
from oncelog.storage.queries import records
from oncelog.storage.queries import tenants as tenant_queries
from oncelog.storage.queries.record_pages import Rows, read_rows
from oncelog.storage.queries.side_state import load_tables
from oncelog.storage.queries.statement import PagedStatement, QuerySteps, SharedQuery, Statement
from oncelog.storage.queries.traces import attach_traces, create_traces
from oncelog.storage.queries.writes import EraseValues, erase_bodies
from oncelog.storage.record_rows import decode_record
from oncelog.storage.side_state import compute_prefix_end, decode_entity, lane_of_scope
from oncelog.storage.store import (
    Consumer,
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
    RecordView,
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
    to_role,
)
from oncelog.storage.tenants import COUNT_ATTEMPTS_MAX, UsageCount, encode_tenants, list_tenants

S = TypeVar("S", bound="SqlStore")
P = ParamSpec("P")
T = TypeVar("T")

_PART_VIEWS: Final = 100
"""Views per call to the encoder (`RecordViewPage.encoded`)."""


def shared_query(
    query: Callable[Concatenate[S, P], QuerySteps[T]],
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, T]]:
    """Turn a generator method into an async method that runs the query."""

    @wraps(query)
    async def run(store: S, /, *arguments: P.args, **options: P.kwargs) -> T:
        return await store._run_query(partial(query, store, *arguments, **options))  # noqa: SLF001

    return run


class SqlStore(ABC):
    """Base class of the stores. See `storage.store.Store` for the contract of each method."""

    _view_fetch_rows_max: int
    """Maximum number of rows that one statement of `read_views` fetches."""
    _erase_values: EraseValues
    _has_traces = False
    """Whether reads return stored trace contexts."""
    _has_reported_drop = False
    """Whether a warning about the dropped table of trace contexts was logged."""

    @property
    @abstractmethod
    def _metadata(self) -> LogMetadata:
        """Metadata of the open log."""

    @abstractmethod
    async def _run_query(self, query: SharedQuery[T], *arguments: Any) -> T:
        """Run a query on a read connection. If the connection is lost, the query restarts on another one."""

    @abstractmethod
    def _propose_mark(self) -> QuerySteps[tuple[ClockMark, Exception | None]]:
        """Return the clock mark of a commit made now, and an error if the clock has jumped."""

    @abstractmethod
    async def _run_write(self, lanes: Collection[int], query: SharedQuery[T], *arguments: Any) -> T:
        """Run a query in a write transaction that holds the lanes. The query may run again if the session is lost."""

    def _notify_others(self) -> None:  # noqa: B027 - not every database has notifications
        """Wake the other processes that have the log open."""

    @property
    def epoch(self) -> str:
        """See `Store`."""
        return self._metadata.epoch

    @property
    def settings(self) -> Settings:
        """See `Store`."""
        return self._metadata.settings

    def _get_lane(self, scope: str) -> int:
        return lane_of_scope(scope, self.settings.lanes)

    # --- pages of records

    @shared_query
    def read(self, query: Query) -> QuerySteps[Page]:
        """See `Store`.

        A page needs no transaction: positions become visible in order, so every record up to the newest position that
        one statement sees is visible to the next statement.
        """
        lane = query.lane if query.stream is None else self._get_lane(query.stream)
        found: list[Record] = []
        end = yield from read_rows(query, lane, self.epoch, None, lambda rows: found.extend(map(decode_record, rows)))
        if self._has_traces and query.with_traces:
            found = yield from self._attach_traces(found)
        return Page(found, *end)

    @shared_query
    def read_views(self, query: Query, policy: str, encode: EncodeViews) -> QuerySteps[RecordViewPage]:
        """See `Store`."""
        encoded: list[bytes] = []
        total = 0

        def encode_rows(rows: Rows) -> None:
            nonlocal total
            total += len(rows)
            parts = (rows[start : start + _PART_VIEWS] for start in range(0, len(rows), _PART_VIEWS))
            encoded.extend(encode(_decode_views(part)) for part in parts)

        end = yield from read_rows(query, query.lane, self.epoch, policy, encode_rows, self._view_fetch_rows_max)
        return RecordViewPage(encoded, total, *end)

    # --- trace contexts

    async def enable_traces(self) -> None:
        """See `Store`."""
        await self._run_write((0,), create_traces)
        self._has_traces = True

    async def _attach_trace(self, status: KeyStatus) -> KeyStatus:
        if not self._has_traces or status.record is None:
            return status
        [record] = await self._run_query(self._attach_traces, [status.record])
        return replace(status, record=record)

    def _attach_traces(self, records: Sequence[Record]) -> QuerySteps[list[Record]]:
        found = yield from attach_traces(records)
        if found is None:
            self._report_dropped_traces()
            return list(records)
        return found

    def _report_dropped_traces(self) -> None:
        """Log a warning, once until the log is opened again."""
        if not self._has_reported_drop:
            self._has_reported_drop = True
            logger.warning(
                "the table _oncelog_traces has been dropped while the log is open with tracing: no trace contexts are "
                "stored until the log is opened again"
            )

    # --- records, blocks and heads

    async def internal_records(self, after: Mapping[int, int], limit: int) -> list[Record]:
        """See `Store`."""
        return await self._run_query(records.list_internal_records, after, limit)

    @shared_query
    def sequence_before(self, stream: str, upto: int, count: int) -> QuerySteps[int]:
        """See `Store`."""
        rows = yield Statement("sequence_before", self._get_lane(stream), stream, upto, count - 1)
        return int(records.get_value(rows, 0))

    @shared_query
    def sequence_after(self, stream: str, after: int, count: int) -> QuerySteps[int]:
        """See `Store`."""
        rows = yield Statement("sequence_after", self._get_lane(stream), stream, after, count)
        return int(records.get_value(rows, after))

    async def heads(self) -> Mapping[int, LaneHead]:
        """See `Store`."""
        return await self._run_query(records.load_heads)

    async def block(self, lane: int, height: int) -> tuple[Block, list[Evidence]]:
        """See `Store`."""
        return await self._run_query(records.load_block, lane, height)

    @shared_query
    def blocks(self, lane: int, after: int, limit: int, scope: str) -> QuerySteps[list[ScopedBlock]]:
        """See `Store`."""
        rows = yield Statement("blocks", lane, after, limit)
        blocks = [Block(*row) for row in rows]
        if not blocks:
            return []
        bounds = (blocks[0].first_position - 1, blocks[-1].first_position + blocks[-1].count - 1)
        rows = yield Statement("scoped_positions", lane, *bounds, scope)
        positions = [position for (position,) in rows]
        starts = [bisect_left(positions, block.first_position) for block in blocks]
        ends = [*starts[1:], len(positions)]
        return [
            ScopedBlock(block, tuple(positions[start:end]))
            for block, start, end in zip(blocks, starts, ends, strict=True)
        ]

    async def erasures(self) -> int:
        """See `Store`."""
        return await self._run_query(records.count_erasures)

    async def consumers(self) -> list[Consumer]:
        """See `Store`."""
        return await self._run_query(records.list_consumers)

    async def previous_epochs(self) -> tuple[str, ...]:
        """See `Store`."""
        return await self._run_query(records.load_previous_epochs)

    # --- side state

    @shared_query
    def side_state(self, read_set: ReadSet) -> QuerySteps[SideState]:
        """See `Store`."""
        return self._load_side_state(read_set)

    def _load_side_state(self, read_set: ReadSet) -> QuerySteps[SideState]:
        """Load the heads before the side state: with heads that are newer than the rows, rows could look expired."""
        mark, jumped = yield from self._propose_mark()
        heads = yield from records.load_heads()
        snapshot = Snapshot(
            settings=self.settings, heads={lane: heads.get(lane) or LaneHead() for lane in read_set.lanes}
        )
        yield from load_tables(read_set, snapshot)
        return SideState(snapshot, mark.time_ms if jumped is None else 0)

    @shared_query
    def entities(self, scope: str, prefix: str, after: str, limit: int, bytes_max: int) -> QuerySteps[EntityPage]:
        """See `Store`."""
        lane = self._get_lane(scope)
        state = yield from self._load_side_state(ReadSet(lanes={lane}))
        bounds = (lane, scope, after, prefix, compute_prefix_end(prefix), state.get_time_ms(lane))
        rows = yield PagedStatement("entity_page", *bounds, size_column=1, limit=limit, bytes_max=bytes_max)
        fitting = count_fitting([len(value) for _, value, *_ in rows], limit, bytes_max)
        return EntityPage(*cut_page([(key, decode_entity(entity)) for key, *entity in rows], fitting))

    @shared_query
    def rows(self, scope: str, table: str, after: tuple[str, str], limit: int, bytes_max: int) -> QuerySteps[RowPage]:
        """See `Store`."""
        if table and after[0] != table:
            after = (table, "")
        statement = "row_page_of_table" if table else "row_page"
        bounds = (self._get_lane(scope), scope, *after)
        rows = yield PagedStatement(statement, *bounds, size_column=2, limit=limit, bytes_max=bytes_max)
        fitting = count_fitting([len(state) for _, _, state in rows], limit, bytes_max)
        return RowPage(*cut_page([(name, row_id, decode_row(state)) for name, row_id, state in rows], fitting))

    @shared_query
    def relationships(self, query: RelationshipQuery) -> QuerySteps[RelationshipPage]:
        """See `Store`."""
        field = query.search_field
        named: tuple[Any, ...] = {"resource": (query.resource,), "": ()}.get(field, (query.resource, query.relation))
        after = (*query.after[:2], query.subject or query.after[2])
        statement = f"relationship_page_of_{field}" if field else "relationship_page"
        place = (self._get_lane(query.scope), query.scope)
        rows = yield Statement(statement, *place, *after, query.limit + 1, *named)
        return RelationshipPage(*cut_page([tuple(row) for row in rows], query.limit))

    @shared_query
    def members(self, scope: str, after: str, limit: int) -> QuerySteps[MemberPage]:
        """See `Store`."""
        rows = yield Statement("member_page", self._get_lane(scope), scope, after, limit + 1)
        members = [StreamMember(name, acknowledged, to_role(is_owner)) for name, acknowledged, is_owner in rows]
        return MemberPage(*cut_page(members, limit))

    @shared_query
    def memberships(self, member: str, prefix: str, after: str, limit: int) -> QuerySteps[MembershipPage]:
        """See `Store`."""
        rows = yield Statement("membership_page", member, after, prefix, compute_prefix_end(prefix), limit + 1)
        memberships = [
            Membership(scope, newest, acknowledged, to_role(is_owner)) for scope, newest, acknowledged, is_owner in rows
        ]
        return MembershipPage(*cut_page(memberships, limit))

    @shared_query
    def member_changes(self, lane: int, after: MemberCursor, limit: int) -> QuerySteps[list[MemberChange]]:
        """See `Store`."""
        rows = yield Statement("member_changes", lane, *after, limit)
        return [
            MemberChange.from_row(revision, scope, member, kind, present, acknowledged, to_role(is_owner))
            for revision, scope, member, kind, present, acknowledged, is_owner in rows
        ]

    async def erase(self, lane: int, positions: Sequence[int], act: RecordAct | None = None) -> int:
        """See `Store`."""
        counts: list[int] = []

        def erase_and_count() -> QuerySteps[int]:
            counts.append((yield from self._erase_bodies(lane, positions, act)))
            return max(counts)  # a retry after an unknown outcome finds no body left to erase

        erased = await self._run_write((lane,), erase_and_count)
        self._notify_others()
        return erased

    def _erase_bodies(self, lane: int, positions: Sequence[int], act: RecordAct | None) -> QuerySteps[int]:
        return erase_bodies(lane, positions, act, self.settings.lanes, self._erase_values)

    # --- tenants

    async def usage(self) -> list[tuple[Tenant, Usage]]:
        """See `Store`."""
        return await self._run_query(tenant_queries.load_usage)

    async def set_tenants(self, tenants: Sequence[Tenant], act: RecordAct | None = None) -> bool:
        """See `Store`."""
        text, lanes = encode_tenants(tenants), self.settings.lanes
        for tried in count(1):
            start = await self._run_query(tenant_queries.load_count_start)
            if start.is_counted(text):
                return False
            counted = UsageCount(start, tenants)
            for lane, newest in start.positions.items() if counted.is_needed else ():
                after = 0
                while rows := await self._run_query(tenant_queries.load_sizes, lane, after, newest):
                    counted.add(rows)
                    after = rows[-1][0]
            request = None if act is None else build_act_request(act, 0, lanes)
            save = partial(tenant_queries.replace_tenants, is_last=tried >= COUNT_ATTEMPTS_MAX)
            is_saved = await self._run_write(range(lanes + 1), save, text, counted, start, request)
            self._notify_others()
            if is_saved:
                return True
        raise AssertionError("the last attempt always succeeds")

    async def _recount_usage(self) -> None:
        """Recount usage that an earlier version of Oncelog counted."""
        start = await self._run_query(tenant_queries.load_count_start)
        if not start.is_counted(start.text):
            await self.set_tenants(list_tenants(start.text))


def _decode_views(rows: Rows) -> Sequence[RecordView]:
    """Return rows with their bodies as text. SQLite's rows are tuples, whose bodies are text already."""
    if type(rows[0]) is tuple:
        return rows
    return [(*columns, None if body is None else body.decode()) for *columns, body in rows]
