"""Reads the state derived from records: clients, entities, relationships, and the blocks of a lane."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from oncelog.core.identity import compute_lane
from oncelog.core.merge import Row
from oncelog.core.operations import Entity
from oncelog.core.policy import LEDGER, Policy
from oncelog.core.proof import Attestation
from oncelog.core.read_set import ReadSet
from oncelog.core.rules.members import get_effective_role
from oncelog.core.values import ClientEntry, MemberIdentity, Receipt, Record, Roster, Snapshot
from oncelog.engine.answer_cache import AnswerCache
from oncelog.engine.limits import Limits, clamp_limit
from oncelog.engine.tailer import Tailers
from oncelog.errors import ClosedError
from oncelog.storage.store import (
    EntityPage,
    MemberPage,
    Membership,
    MembershipPage,
    Query,
    RelationshipPage,
    RelationshipQuery,
    RowPage,
    ScopedBlock,
    Store,
)

BLOCKS_PER_PAGE: Final = 100
"""Default number of blocks per read."""


@dataclass(eq=False)
class StateReader:
    """The read methods of `Log.state`. Each read sees all commits, by this process and by others."""

    _store: Store
    _cache: AnswerCache
    _tailers: Tailers
    _limits: Limits
    _get_open_store: Callable[[], Store]
    """Raises ClosedError unless the log is open."""
    _get_ledger_policy: Callable[[], Policy] = lambda: LEDGER
    """Returns the ledger policy of the open log. Its time to live may differ from that of `LEDGER`."""

    def lane(self, scope: str) -> int:
        """Return the lane of a scope's records and blocks."""
        return compute_lane(scope, self._store.settings.lanes)

    async def _load(self, read_set: ReadSet) -> Snapshot:
        return (await self._get_open_store().side_state(read_set)).snapshot

    async def client(self, scope: str, client: str, policy: Policy | None = None) -> ClientEntry | None:
        """Return a client's entry in a scope, or None if it is unknown or evicted.

        Without `policy`, the entry is that of the ledger policy.
        """
        store = self._get_open_store()
        policy = policy or self._get_ledger_policy()
        lane, identity = self.lane(scope), (policy.name, scope, client)
        found = await store.side_state(ReadSet(lanes={lane}, clients={identity}))
        entry, head = found.snapshot.clients.get(identity), found.snapshot.heads[lane]
        if entry is None:
            return None
        is_known = policy.retention.remembers(entry.last_seen_ms, found.get_time_ms(lane), head.eviction_time_ms)
        return entry if is_known else None

    async def entity(self, scope: str, key: str) -> Entity | None:
        """Return an entity, or None if it does not exist or has expired."""
        lane = self.lane(scope)
        found = await self._get_open_store().side_state(ReadSet(lanes={lane}, entities={(scope, key)}))
        entity = found.snapshot.entities.get((scope, key))
        return entity if entity is not None and entity.is_live(found.get_time_ms(lane)) else None

    async def entities(self, scope: str, *, prefix: str = "", after: str = "", limit: int = 500) -> EntityPage:
        """Return the entities whose keys have a prefix and sort after a given key, in key order."""
        return await self._get_open_store().entities(
            scope, prefix, after, clamp_limit(limit, self._limits), self._limits.page_bytes_max
        )

    async def newest(self, scope: str) -> int:
        """Return the newest sequence of a stream, or 0 if it is empty."""
        return (await self._load(ReadSet(lanes={self.lane(scope)}, streams={scope}))).streams.get(scope, 0)

    async def horizon(self, scope: str) -> int | None:
        """Return the tombstone horizon of a gateway, as a clock reading, or None if no tombstones were dropped."""
        return (await self.newest_and_horizon(scope))[1]

    async def newest_and_horizon(self, scope: str) -> tuple[int, int | None]:
        """Return the newest sequence and the tombstone horizon of a gateway from one snapshot."""
        read_set = ReadSet(lanes={self.lane(scope)}, streams={scope}, horizons={scope})
        found = await self._load(read_set)
        return found.streams.get(scope, 0), found.horizons.get(scope)

    async def sequence_before(self, scope: str, upto: int, count: int) -> int:
        """Return the sequence `count` records before `upto` in a stream, or 0 if there are fewer."""
        return await self._get_open_store().sequence_before(scope, upto, max(1, count))

    async def row(self, scope: str, table: str, row_id: str) -> Row | None:
        """Return a merged row, which may be deleted, or None if it never existed or its tombstone was dropped."""
        identity = (scope, table, row_id)
        return (await self._load(ReadSet(lanes={self.lane(scope)}, rows={identity}))).rows.get(identity)

    async def rows(
        self, scope: str, *, table: str = "", after: tuple[str, str] = ("", ""), limit: int = 500
    ) -> RowPage:
        """Return merged rows of one table or of all tables, sorted by table and row id, including deleted rows."""
        return await self._get_open_store().rows(
            scope, table, after, clamp_limit(limit, self._limits), self._limits.page_bytes_max
        )

    async def relationship(self, scope: str, resource: str, relation: str, subject: str) -> int | None:
        """Return the version that created a relationship, or None if it does not exist."""
        identity = (scope, resource, relation, subject)
        found = await self._load(ReadSet(lanes={self.lane(scope)}, relationships={identity}))
        return found.relationships.get(identity)

    async def relationships(self, query: RelationshipQuery) -> RelationshipPage:
        """Return a page of relationships, sorted by resource, relation and subject."""
        if query.relation and not (query.resource or query.subject):
            raise ValueError("a query by relation also needs a resource or a subject")
        return await self._get_open_store().relationships(query)

    # --- members

    async def find_membership(self, scope: str, member: str) -> Membership | None:
        """Return a member's membership in a stream, from one snapshot, or None if it is not a member."""
        identity = (scope, member)
        read_set = ReadSet(
            lanes={self.lane(scope)},
            streams={scope},
            members={identity},
            rosters={scope},
            acknowledged={identity},
        )
        found = await self._load(read_set)
        known = found.members.get(identity)
        if known is None:
            return None
        role = get_effective_role(known, found.rosters.get(scope) or Roster())
        return Membership(scope, found.streams.get(scope, 0), found.acknowledged.get(identity, 0), role)

    async def members_among(self, identities: Iterable[MemberIdentity]) -> set[MemberIdentity]:
        """Return which of the given (stream, name) pairs are memberships, from one snapshot."""
        wanted = set(identities)
        read_set = ReadSet(lanes={self.lane(scope) for scope, _ in wanted}, members=wanted)
        return set((await self._load(read_set)).members)

    async def members(self, scope: str, *, after: str = "", limit: int = 500) -> MemberPage:
        """Return members of a stream, sorted by name, each with its role and acknowledged sequence."""
        return await self._get_open_store().members(scope, after, clamp_limit(limit, self._limits))

    async def memberships(self, member: str, *, prefix: str, after: str = "", limit: int = 500) -> MembershipPage:
        """Return a member's streams whose names start with a prefix, sorted by name."""
        if not prefix:
            raise ValueError("prefix must not be empty")
        return await self._get_open_store().memberships(member, prefix, after, clamp_limit(limit, self._limits))

    async def record(self, lane: int, position: int) -> Record | None:
        """Return the record at a position of a lane, or None if the position has no record."""
        heads = await self._get_open_store().heads()
        if lane not in heads or not 1 <= position <= heads[lane].position:
            return None
        page = await self._get_open_store().read(Query(lane=lane, after=position - 1, upto=position, limit=1))
        return page.records[0] if page.records else None  # a leap skipped the position

    def find_attestation(self, receipt: Receipt, now_ms: int | None = None) -> Attestation | None:
        """Return the attestation of a record if this process has its block in the cache.

        If `now_ms` is given, also return None for a record older than `limits.cache_ttl_ms`, like a retry.
        """
        return self._cache.find_attestation(receipt, now_ms)

    # --- blocks

    async def blocks(self, scope: str, after: int = 0, limit: int = BLOCKS_PER_PAGE) -> list[ScopedBlock]:
        """Return blocks of the scope's lane above a height, each with the positions of the scope's records in it."""
        return await self._get_open_store().blocks(self.lane(scope), after, limit, scope)

    async def follow_blocks(self, scope: str, after: int = 0) -> AsyncGenerator[Sequence[ScopedBlock], None]:
        """Iterate over all blocks above a height and all later ones, each once, in order. Close the iterator with
        `aclosing`."""
        lane = self.lane(scope)
        commit_signal = _CommitSignal()
        await self._tailers.listen(lane, commit_signal)
        try:
            while True:
                while blocks := await self.blocks(scope, after):
                    after = blocks[-1].block.height
                    yield blocks
                await commit_signal.wait()
        finally:
            self._tailers.unlisten(lane, commit_signal)


class _CommitSignal:
    """Listener that signals new records of a lane. It ignores the records themselves."""

    def __init__(self) -> None:
        self._signal = asyncio.Event()
        self._error: Exception | None = None

    def deliver(self, records: Sequence[Record]) -> None:  # noqa: ARG002 - they are read as blocks
        self._signal.set()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._signal.set()

    def close(self) -> None:
        self.fail(ClosedError("the log is closed"))

    async def wait(self) -> None:
        """Wait for new records. Raises the error that stops delivery."""
        await self._signal.wait()
        self._signal.clear()
        if self._error is not None:
            raise self._error
