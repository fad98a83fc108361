"""A store that tests can block, break and observe, and a manual clock for the event loop."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final
from uuid import UUID

import pytest_asyncio

from deadlines import turns, until
from oncelog.core.plan import Validate
from oncelog.core.policy import OnReuse, Order, Policy, kept_for
from oncelog.core.proof import Block, Evidence
from oncelog.core.read_set import ReadSet
from oncelog.core.tenants import Tenant, Usage
from oncelog.core.values import Item, KeyIdentity, LaneHead, Record, RecordAct, Remembered, Request, Settings
from oncelog.engine.limits import Limits
from oncelog.engine.log import Log
from oncelog.storage.metadata import EpochRenewal, Operator
from oncelog.storage.store import (
    BatchResult,
    BatchTraces,
    Consumer,
    EncodeViews,
    EntityPage,
    KeyStatus,
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
    Store,
)
from oncelog.testing.clock import ManualClock
from storage.memory_store import MemoryStore

Open = Callable[..., Log]
"""Type of the fixture `open_log`."""


async def do_nothing(*_: object) -> None:
    """Do nothing; the default of every hook."""


@pytest_asyncio.fixture
async def loop_clock() -> "LoopClock":
    return LoopClock(asyncio.get_running_loop())


PAYMENTS: Final = Policy(
    name="payments", key_bytes=(1, 64), order=Order.STREAM, on_reuse=OnReuse.REFUSE, retention=kept_for(hours=24)
)


def uuid(number: int) -> UUID:
    return UUID(int=number)


class LoopClock:
    """Event loop time that a test advances. A timer fires as soon as the test reaches its time."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._time = loop.time
        self._ahead_s = 0.0
        loop.time = self.time  # type: ignore[method-assign]

    def time(self) -> float:
        return self._time() + self._ahead_s

    def advance(self, seconds: float) -> None:
        self._ahead_s += seconds

    async def advance_until(self, condition: Callable[[], bool], step_s: float) -> None:
        """Advance the time step by step until the condition holds."""

        async def is_true_after_a_step() -> bool:
            self.advance(step_s)
            await turns()
            return condition()

        if not condition():
            await until(is_true_after_a_step, lambda: f"{condition} after {self._ahead_s} s of the event loop")


class Gate:
    """Blocks callers until it is opened, and reports the first caller."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self._opened = asyncio.Event()
        self._opened.set()

    def shut(self) -> None:
        self.reached.clear()
        self._opened.clear()

    def open(self) -> None:
        self._opened.set()

    async def __call__(self, *_: object) -> None:
        self.reached.set()
        await self._opened.wait()


class WatchedStore:
    """Delegates to another store and calls hooks before and after commits and reads."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.batches: list[list[Item]] = []
        """Items of each commit, including failed ones."""
        self.queries: list[Query] = []
        self.before_commit: Callable[[Sequence[Request]], Awaitable[None]] = do_nothing
        self.after_commit: Callable[[BatchResult], Awaitable[None]] = do_nothing
        self.before_read: Callable[[Query], Awaitable[None]] = do_nothing
        self.after_read: Callable[[Query], Awaitable[None]] = do_nothing
        self.before_heads: Callable[[], Awaitable[None]] = do_nothing
        self.before_erasures: Callable[[], Awaitable[None]] = do_nothing

    @property
    def epoch(self) -> str:
        return self.inner.epoch

    @property
    def settings(self) -> Settings:
        return self.inner.settings

    async def open(self) -> None:
        await self.inner.open()

    async def close(self) -> None:
        await self.inner.close()

    def create_sibling(self) -> Store | None:
        return self.inner.create_sibling()

    async def enable_traces(self) -> None:
        await self.inner.enable_traces()

    async def declare(self, policies: Sequence[Policy]) -> Mapping[str, Policy]:
        return await self.inner.declare(policies)

    async def commit(
        self, batch: Sequence[Request], validate: Validate | None = None, traces: BatchTraces | None = None
    ) -> BatchResult:
        self.batches.append([item for request in batch for item in request.items])
        await self.before_commit(batch)
        decided = await self.inner.commit(batch, validate, traces)
        await self.after_commit(decided)
        return decided

    async def find_keys(self, identities: Sequence[KeyIdentity]) -> list[Remembered | None]:
        return await self.inner.find_keys(identities)

    async def get_key_status(self, identity: KeyIdentity) -> KeyStatus:
        return await self.inner.get_key_status(identity)

    async def read(self, query: Query) -> Page:
        self.queries.append(query)
        await self.before_read(query)
        page = await self.inner.read(query)
        await self.after_read(query)
        return page

    async def read_views(self, query: Query, policy: str, encode: EncodeViews) -> RecordViewPage:
        self.queries.append(query)
        await self.before_read(query)
        page = await self.inner.read_views(query, policy, encode)
        await self.after_read(query)
        return page

    async def internal_records(self, after: Mapping[int, int], limit: int) -> list[Record]:
        return await self.inner.internal_records(after, limit)

    async def heads(self) -> Mapping[int, LaneHead]:
        await self.before_heads()
        return await self.inner.heads()

    async def block(self, lane: int, height: int) -> tuple[Block, list[Evidence]]:
        return await self.inner.block(lane, height)

    async def blocks(self, lane: int, after: int, limit: int, scope: str) -> list[ScopedBlock]:
        return await self.inner.blocks(lane, after, limit, scope)

    async def side_state(self, read_set: ReadSet) -> SideState:
        return await self.inner.side_state(read_set)

    async def entities(self, scope: str, prefix: str, after: str, limit: int, bytes_max: int) -> EntityPage:
        return await self.inner.entities(scope, prefix, after, limit, bytes_max)

    async def rows(self, scope: str, table: str, after: tuple[str, str], limit: int, bytes_max: int) -> RowPage:
        return await self.inner.rows(scope, table, after, limit, bytes_max)

    async def relationships(self, query: RelationshipQuery) -> RelationshipPage:
        return await self.inner.relationships(query)

    async def members(self, scope: str, after: str, limit: int) -> MemberPage:
        return await self.inner.members(scope, after, limit)

    async def memberships(self, member: str, prefix: str, after: str, limit: int) -> MembershipPage:
        return await self.inner.memberships(member, prefix, after, limit)

    async def member_changes(self, lane: int, after: MemberCursor, limit: int) -> list[MemberChange]:
        return await self.inner.member_changes(lane, after, limit)

    async def erase(self, lane: int, positions: Sequence[int], act: RecordAct | None = None) -> int:
        return await self.inner.erase(lane, positions, act)

    async def scrub(self) -> bool:
        return await self.inner.scrub()

    async def set_tenants(self, tenants: Sequence[Tenant], act: RecordAct | None = None) -> bool:
        return await self.inner.set_tenants(tenants, act)

    async def usage(self) -> list[tuple[Tenant, Usage]]:
        return await self.inner.usage()

    def free_bytes(self) -> int | None:
        return self.inner.free_bytes()

    async def size_bytes(self) -> int | None:
        return await self.inner.size_bytes()

    async def probe(self) -> None:
        await self.inner.probe()

    async def erasures(self) -> int:
        await self.before_erasures()
        return await self.inner.erasures()

    async def consumers(self) -> list[Consumer]:
        return await self.inner.consumers()

    async def confirm_clock(self) -> None:
        await self.inner.confirm_clock()

    async def sequence_before(self, stream: str, upto: int, count: int) -> int:
        return await self.inner.sequence_before(stream, upto, count)

    async def sequence_after(self, stream: str, after: int, count: int) -> int:
        return await self.inner.sequence_after(stream, after, count)

    async def previous_epochs(self) -> tuple[str, ...]:
        return await self.inner.previous_epochs()

    async def renew_epoch(self, above: int | None = None, operator: Operator = Operator()) -> EpochRenewal:
        return await self.inner.renew_epoch(above, operator)

    def listen(self, wake: Callable[[], None]) -> None:
        self.inner.listen(wake)


class WatchedLog(Log):
    """A log in memory over a watched store and a manual clock."""

    def __init__(
        self,
        *,
        policies: Sequence[Policy] = (),
        validate: Validate | None = None,
        settings: Settings | None = None,
        **limits: int,
    ) -> None:
        self.clock = ManualClock()
        self.store = WatchedStore(MemoryStore(settings, clock=self.clock))
        named = Limits(**limits)
        super().__init__(self.store, policies=policies, validate=validate, limits=named, clock=self.clock)
        self.gate = Gate()

    def hold_commits(self) -> None:
        """Block the next commit before it is decided, until the gate is opened."""
        self.gate.shut()
        self.store.before_commit = self.gate

    async def commit_elsewhere(self, *items: Item) -> None:
        """Commit like another process, without notifying this log."""
        await self.store.inner.commit([Request(items)])

    def submit_concurrently(self, *items: Item) -> list[asyncio.Task[Any]]:
        """Submit each item from a separate task."""
        return [asyncio.ensure_future(self.submit(item)) for item in items]


def positions(records: Sequence[Record]) -> list[int]:
    return [record.position for record in records]


def count_leases(log: Log) -> int:
    """Return the number of held leases in a log."""
    return sum(map(len, log.leases._groups.values()))
