"""Base of both SQL stores: reads by shared queries, and the counting of usage while commits go on."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any, TypeVar

from oncelog.core.proof import Block
from oncelog.core.read_set import ReadSet
from oncelog.core.tenants import Tenant, Usage
from oncelog.core.values import LaneHead, Record, RecordAct, Settings
from oncelog.storage.queries import records, side_state
from oncelog.storage.queries import tenants as tenant_queries
from oncelog.storage.queries.statement import QuerySteps, SharedQuery
from oncelog.storage.store import (
    Consumer,
    EncodeViews,
    EntityPage,
    Evidence,
    MemberChange,
    MemberCursor,
    MemberPage,
    MembershipPage,
    Page,
    Query,
    RecordViewPage,
    RelationshipPage,
    RelationshipQuery,
    RowPage,
    ScopedBlock,
    SideState,
)
from oncelog.storage.tenants import COUNT_ATTEMPTS_MAX, CountStart, UsageCount, encode_tenants, list_tenants

T = TypeVar("T")


class SqlStore(ABC):
    """Base of the stores. See `storage.store.Store` for what each method promises."""

    _view_fetch_rows_max: int
    """Rows that one statement of `read_views` fetches at most."""

    @property
    @abstractmethod
    def epoch(self) -> str:
        """As `Store` says."""

    @property
    @abstractmethod
    def settings(self) -> Settings:
        """As `Store` says."""

    @abstractmethod
    async def _run_query(self, query: SharedQuery[T], *arguments: Any) -> T:
        """Run a query on a connection for reads. It may be started again on another connection."""

    @abstractmethod
    def _propose_time_ms(self) -> QuerySteps[int]:
        """Return the time at which a write would be decided now; 0 while the clock is in doubt."""

    @abstractmethod
    async def _replace_tenants(
        self, text: str | None, counted: UsageCount, start: CountStart, act: RecordAct | None, *, is_last: bool
    ) -> bool:
        """Save tenants and their usage. Returns False if it must be counted again (`queries.tenants`)."""

    # --- records

    async def read(self, query: Query) -> Page:
        """As `Store` says."""
        return await self._run_query(records.read_page, query, self.settings.lanes, self.epoch)

    async def read_views(self, query: Query, policy: str, encode: EncodeViews) -> RecordViewPage:
        """As `Store` says."""
        return await self._run_query(records.read_views, query, policy, encode, self.epoch, self._view_fetch_rows_max)

    async def internal_records(self, after: Mapping[int, int], limit: int) -> list[Record]:
        """As `Store` says."""
        return await self._run_query(records.list_internal_records, after, limit)

    async def sequence_before(self, stream: str, upto: int, count: int) -> int:
        """As `Store` says."""
        return await self._run_query(records.find_sequence_before, stream, upto, count, self.settings.lanes)

    async def sequence_after(self, stream: str, after: int, count: int) -> int:
        """As `Store` says."""
        return await self._run_query(records.find_sequence_after, stream, after, count, self.settings.lanes)

    async def heads(self) -> Mapping[int, LaneHead]:
        """As `Store` says."""
        return await self._run_query(records.load_heads)

    async def block(self, lane: int, height: int) -> tuple[Block, list[Evidence]]:
        """As `Store` says."""
        return await self._run_query(records.load_block, lane, height)

    async def blocks(self, lane: int, after: int, limit: int, scope: str) -> list[ScopedBlock]:
        """As `Store` says."""
        return await self._run_query(records.list_blocks, lane, after, limit, scope)

    async def erasures(self) -> int:
        """As `Store` says."""
        return await self._run_query(records.count_erasures)

    async def consumers(self) -> list[Consumer]:
        """As `Store` says."""
        return await self._run_query(records.list_consumers)

    async def previous_epochs(self) -> tuple[str, ...]:
        """As `Store` says."""
        return await self._run_query(records.list_previous_epochs)

    # --- side state

    async def side_state(self, read_set: ReadSet) -> SideState:
        """As `Store` says."""
        return await self._run_query(side_state.load_side_state, read_set, self.settings, self._propose_time_ms)

    async def entities(self, scope: str, prefix: str, after: str, limit: int, bytes_max: int) -> EntityPage:
        """As `Store` says."""
        bounds = (scope, prefix, after, limit, bytes_max)
        return await self._run_query(side_state.list_entities, *bounds, self.settings, self._propose_time_ms)

    async def rows(self, scope: str, table: str, after: tuple[str, str], limit: int, bytes_max: int) -> RowPage:
        """As `Store` says."""
        return await self._run_query(side_state.list_rows, scope, table, after, limit, bytes_max, self.settings)

    async def relationships(self, query: RelationshipQuery) -> RelationshipPage:
        """As `Store` says."""
        return await self._run_query(side_state.list_relationships, query, self.settings)

    async def members(self, scope: str, after: str, limit: int) -> MemberPage:
        """As `Store` says."""
        return await self._run_query(side_state.list_members, scope, after, limit, self.settings)

    async def memberships(self, member: str, prefix: str, after: str, limit: int) -> MembershipPage:
        """As `Store` says."""
        return await self._run_query(side_state.list_memberships, member, prefix, after, limit)

    async def member_changes(self, lane: int, after: MemberCursor, limit: int) -> list[MemberChange]:
        """As `Store` says."""
        return await self._run_query(side_state.list_member_changes, lane, after, limit)

    # --- tenants

    async def usage(self) -> list[tuple[Tenant, Usage]]:
        """As `Store` says."""
        return await self._run_query(tenant_queries.load_usage)

    async def set_tenants(self, tenants: Sequence[Tenant], act: RecordAct | None = None) -> bool:
        """As `Store` says."""
        text = encode_tenants(tenants)
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
            if await self._replace_tenants(text, counted, start, act, is_last=tried >= COUNT_ATTEMPTS_MAX):
                return True
        raise AssertionError("it is tried until it is done")

    async def _recount_usage(self, start: CountStart) -> None:
        """Count usage that was counted by an earlier version of Oncelog."""
        if not start.is_counted(start.text):
            await self.set_tenants(list_tenants(start.text))
