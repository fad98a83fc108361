"""The blocking twin of `Log`: the same methods, each of which waits for its result.

    with oncelog.open_blocking("app.db") as log:
        verdict = log.submit(oncelog.event(id, {"type": "order.placed"}, ["orders"]))

Any number of threads may share one; their writes meet in the same group commits.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from types import TracebackType
from typing import ParamSpec, Self, TypeVar
from uuid import UUID

from oncelog.core.merge import Row
from oncelog.core.operations import Entity
from oncelog.core.policy import EVENTS, Policy
from oncelog.core.rules.audit import APPLICATION_ACTOR
from oncelog.core.tenants import Tenant, Usage
from oncelog.core.values import (
    Applied,
    ClientEntry,
    Item,
    LaneHead,
    MemberIdentity,
    Mode,
    Receipt,
    Record,
    RecordAct,
    Refused,
    Settings,
    Verdict,
)
from oncelog.deprecation import alias_property
from oncelog.engine.answer_cache import Attestation
from oncelog.engine.audit import AuditFilter, AuditPage
from oncelog.engine.held_lease import HeldLease, Work, active_keys, mark_active
from oncelog.engine.leases import LeaseManager
from oncelog.engine.limits import Limits
from oncelog.engine.log import Log, open_log
from oncelog.engine.outcome import Outcome
from oncelog.engine.read_results import Compacted, Cursor, Proven, Reading
from oncelog.engine.result_cache import WorkResult
from oncelog.engine.state_reader import BLOCKS_PER_PAGE, StateReader
from oncelog.errors import ClosedError
from oncelog.portal import Portal
from oncelog.storage.store import (
    Consumer,
    EntityPage,
    MemberPage,
    Membership,
    MembershipPage,
    RelationshipPage,
    RelationshipQuery,
    RowPage,
    ScopedBlock,
)

P = ParamSpec("P")
T = TypeVar("T")


class BlockingLog:
    """One log in this process, for code without an event loop. Each method does what `Log`'s of that name does."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._open_portal: Portal | None = None

    def __enter__(self) -> Self:
        portal = Portal("oncelog", _build_closed_error)
        try:
            portal.call(self._log.__aenter__)
        except BaseException:
            portal.close()
            raise
        self._open_portal = portal
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """As `Log.close`."""
        portal, self._open_portal = self._open_portal, None
        if portal is not None and not portal.is_forked:
            try:
                portal.call(self._log.close)
            finally:
                portal.close()

    @property
    def _portal(self) -> Portal:
        if self._open_portal is None:
            raise _build_closed_error()
        return self._open_portal

    @property
    def epoch(self) -> str:
        """As `Log.epoch`."""
        return self._log.epoch

    @property
    def settings(self) -> Settings:
        """As `Log.settings`."""
        return self._log.settings

    @property
    def limits(self) -> Limits:
        """As `Log.limits`."""
        return self._log.limits

    @property
    def policies(self) -> Mapping[str, Policy]:
        """As `Log.policies`."""
        return self._log.policies

    @property
    def leases(self) -> "BlockingLeaseManager":
        """As `Log.leases`."""
        return BlockingLeaseManager(self._log.leases, self._portal)

    @property
    def state(self) -> "BlockingStateReader":
        """As `Log.state`."""
        return BlockingStateReader(self._log.state, self._portal)

    books = alias_property("BlockingLog.books", "state")
    works = alias_property("BlockingLog.works", "leases")

    def submit(self, item: Item) -> Verdict:
        """As `Log.submit`."""
        return self._portal.call(self._log.submit, item)

    def submit_many(
        self, items: Sequence[Item], mode: Mode = Mode.EACH, *, is_admitted_whole: bool = False
    ) -> list[Verdict]:
        """As `Log.submit_many`."""
        return self._portal.call(self._log.submit_many, items, mode, is_admitted_whole=is_admitted_whole)

    def erase(
        self,
        *,
        key: bytes | UUID | str | None = None,
        policy: Policy = EVENTS,
        scope: str | None = None,
        client: str = "",
        partition: str | None = None,
        stream: str | None = None,
        actor: str = APPLICATION_ACTOR,
    ) -> int:
        """As `Log.erase`."""
        return self._portal.call(
            self._log.erase,
            key=key,
            policy=policy,
            scope=scope,
            client=client,
            partition=partition,
            stream=stream,
            actor=actor,
        )

    def compact(  # noqa: PLR0913 - each of them is asked for by its name
        self,
        scope: str,
        *,
        upto: int | None = None,
        keep: int | None = None,
        limit: int = 2**53,
        tombstone_age_ms: int | None = None,
        after_row: tuple[str, str] = ("", ""),
        rows_max: int = 2**53,
        actor: str = APPLICATION_ACTOR,
    ) -> Compacted:
        """As `Log.compact`."""
        return self._portal.call(
            self._log.compact,
            scope,
            upto=upto,
            keep=keep,
            limit=limit,
            tombstone_age_ms=tombstone_age_ms,
            after_row=after_row,
            rows_max=rows_max,
            actor=actor,
        )

    def read(
        self,
        *,
        partition: str | None = None,
        partitions: Sequence[str] = (),
        stream: str | None = None,
        lane: int = 0,
        after: int | Cursor | str = 0,
        upto: int | None = None,
        limit: int = 500,
    ) -> Reading:
        """As `Log.read`."""
        return self._portal.call(
            self._log.read,
            partition=partition,
            partitions=partitions,
            stream=stream,
            lane=lane,
            after=after,
            upto=upto,
            limit=limit,
        )

    def follow(
        self,
        *,
        partition: str | None = None,
        partitions: Sequence[str] = (),
        stream: str | None = None,
        lane: int = 0,
        after: int | Cursor | str = 0,
        consumer: str | None = None,
    ) -> Iterator[Record]:
        """As `Log.follow`: the loop waits for each next record. Leave it with `break`."""
        follower = self._log.follow(
            partition=partition, partitions=partitions, stream=stream, lane=lane, after=after, consumer=consumer
        )
        return self._iterate_until_closed(self._portal.iterate(follower))

    def _iterate_until_closed(self, records: Iterator[Record]) -> Iterator[Record]:
        """As with `Log.follow`, a log that is closed ends those that follow it, wherever they are in their loop."""
        try:
            yield from records
        except ClosedError:
            if self._open_portal is not None:
                raise

    def lookup(
        self, key: bytes | UUID | str, *, policy: Policy = EVENTS, scope: str | None = None, client: str = ""
    ) -> Outcome:
        """As `Log.lookup`."""
        return self._portal.call(self._log.lookup, key, policy=policy, scope=scope, client=client)

    def prove(self, receipt: Receipt) -> Proven:
        """As `Log.prove`."""
        return self._portal.call(self._log.prove, receipt)

    def heads(self) -> Mapping[int, LaneHead]:
        """As `Log.heads`."""
        return self._portal.call(self._log.heads)

    def commit_cursor(
        self, consumer: str, cursor: int | Cursor | str | None, *, stream: str = "", rewind: bool = False
    ) -> Applied | Refused:
        """As `Log.commit_cursor`."""
        return self._portal.call(self._log.commit_cursor, consumer, cursor, stream=stream, rewind=rewind)

    def cursor_of(self, consumer: str, stream: str = "") -> Cursor | None:
        """As `Log.cursor_of`."""
        return self._portal.call(self._log.cursor_of, consumer, stream)

    def consumers(self) -> list[Consumer]:
        """As `Log.consumers`."""
        return self._portal.call(self._log.consumers)

    def confirm_clock(self) -> None:
        """As `Log.confirm_clock`."""
        self._portal.call(self._log.confirm_clock)

    def set_tenants(self, tenants: Sequence[Tenant], actor: str = APPLICATION_ACTOR) -> bool:
        """As `Log.set_tenants`."""
        return self._portal.call(self._log.set_tenants, tenants, actor)

    def record(self, act: RecordAct) -> None:
        """As `Log.record`."""

        async def put() -> None:
            self._log.record(act)

        self._portal.call(put)

    def audit(self, after: str = "", limit: int = 100, wanted: AuditFilter | None = None) -> AuditPage:
        """As `Log.audit`."""
        return self._portal.call(self._log.audit, after, limit, wanted)

    def audit_cursor(self, page: AuditPage) -> str:
        """As `Log.audit_cursor`."""
        return self._log.audit_cursor(page)

    def previous_epochs(self) -> tuple[str, ...]:
        """As `Log.previous_epochs`."""
        return self._portal.call(self._log.previous_epochs)

    def usage(self) -> list[tuple[Tenant, Usage]]:
        """As `Log.usage`."""
        return self._portal.call(self._log.usage)

    @property
    def read_only(self) -> str:
        """As `Log.read_only`."""
        return self._log.read_only

    def set_read_only(self, is_read_only: bool = True, actor: str = APPLICATION_ACTOR) -> None:
        """As `Log.set_read_only`."""

        async def set_flag() -> None:
            self._log.set_read_only(is_read_only, actor)

        self._portal.call(set_flag)


class BlockingLeaseManager:
    """The blocking twin of `LeaseManager`."""

    def __init__(self, lease_manager: LeaseManager, portal: Portal) -> None:
        self._lease_manager = lease_manager
        self._portal = portal

    def recall(self, work: Work) -> WorkResult | None:
        """As `Works.recall`: on the caller's own thread."""
        if self._portal.is_forked:  # a fork, in which somebody may hold the memory's lock for ever
            raise _build_closed_error()
        return self._lease_manager.recall(work)

    def begin(self, work: Work) -> WorkResult | HeldLease:
        """As `Works.begin`."""
        results: list[WorkResult | HeldLease] = []
        active = active_keys.get()

        async def begin() -> WorkResult | HeldLease:
            active_keys.set(active)  # on the loop's thread nobody knows what the caller's is doing
            results.append(await self._lease_manager.begin(work))
            return results[0]

        try:
            return self._portal.call(begin)
        except BaseException:
            if results and isinstance(results[0], HeldLease):  # interrupted with the lease on its way
                self.release(results[0])
            raise

    def complete(self, lease: HeldLease, body: bytes) -> WorkResult:
        """As `Works.complete`."""
        return self._portal.call(self._lease_manager.complete, lease, body)

    def fail(self, lease: HeldLease, error: BaseException) -> None:
        """As `Works.fail`."""
        self._portal.call(self._lease_manager.fail, lease, error)

    def run(self, lease: HeldLease, call: Callable[[], tuple[bytes, T]]) -> tuple[WorkResult, T]:
        """As `LeaseManager.run`: on the caller's own thread."""
        try:
            with mark_active(lease):
                body, value = call()
        except Exception as error:
            self.fail(lease, error)
            raise
        except BaseException:
            self.release(lease)
            raise
        return self.complete(lease, body), value

    def release(self, lease: HeldLease) -> None:
        """As `LeaseManager.release`."""
        self._portal.call(self._lease_manager.release, lease)


class BlockingStateReader:
    """The blocking twin of `StateReader`."""

    def __init__(self, state_reader: StateReader, portal: Portal) -> None:
        self._state_reader = state_reader
        self._portal = portal

    def lane(self, scope: str) -> int:
        """As `StateReader.lane`."""
        return self._state_reader.lane(scope)

    def client(self, scope: str, client: str, policy: Policy | None = None) -> ClientEntry | None:
        """As `StateReader.client`."""
        return self._portal.call(self._state_reader.client, scope, client, policy)

    def entity(self, scope: str, key: str) -> Entity | None:
        """As `StateReader.entity`."""
        return self._portal.call(self._state_reader.entity, scope, key)

    def entities(self, scope: str, *, prefix: str = "", after: str = "", limit: int = 500) -> EntityPage:
        """As `StateReader.entities`."""
        return self._portal.call(self._state_reader.entities, scope, prefix=prefix, after=after, limit=limit)

    def newest(self, scope: str) -> int:
        """As `StateReader.newest`."""
        return self._portal.call(self._state_reader.newest, scope)

    def horizon(self, scope: str) -> int | None:
        """As `StateReader.horizon`."""
        return self._portal.call(self._state_reader.horizon, scope)

    def newest_and_horizon(self, scope: str) -> tuple[int, int | None]:
        """As `StateReader.newest_and_horizon`."""
        return self._portal.call(self._state_reader.newest_and_horizon, scope)

    def sequence_before(self, scope: str, upto: int, count: int) -> int:
        """As `StateReader.sequence_before`."""
        return self._portal.call(self._state_reader.sequence_before, scope, upto, count)

    def row(self, scope: str, table: str, row_id: str) -> Row | None:
        """As `StateReader.row`."""
        return self._portal.call(self._state_reader.row, scope, table, row_id)

    def rows(self, scope: str, *, table: str = "", after: tuple[str, str] = ("", ""), limit: int = 500) -> RowPage:
        """As `StateReader.rows`."""
        return self._portal.call(self._state_reader.rows, scope, table=table, after=after, limit=limit)

    def relationship(self, scope: str, resource: str, relation: str, subject: str) -> int | None:
        """As `StateReader.relationship`."""
        return self._portal.call(self._state_reader.relationship, scope, resource, relation, subject)

    def relationships(self, query: RelationshipQuery) -> RelationshipPage:
        """As `StateReader.relationships`."""
        return self._portal.call(self._state_reader.relationships, query)

    def find_membership(self, scope: str, member: str) -> Membership | None:
        """As `StateReader.find_membership`."""
        return self._portal.call(self._state_reader.find_membership, scope, member)

    def members_among(self, identities: Iterable[MemberIdentity]) -> set[MemberIdentity]:
        """As `StateReader.members_among`."""
        return self._portal.call(self._state_reader.members_among, identities)

    def members(self, scope: str, *, after: str = "", limit: int = 500) -> MemberPage:
        """As `StateReader.members`."""
        return self._portal.call(self._state_reader.members, scope, after=after, limit=limit)

    def memberships(self, member: str, *, prefix: str, after: str = "", limit: int = 500) -> MembershipPage:
        """As `StateReader.memberships`."""
        return self._portal.call(self._state_reader.memberships, member, prefix=prefix, after=after, limit=limit)

    def record(self, lane: int, position: int) -> Record | None:
        """As `StateReader.record`."""
        return self._portal.call(self._state_reader.record, lane, position)

    def find_attestation(self, receipt: Receipt, now_ms: int | None = None) -> Attestation | None:
        """As `StateReader.find_attestation`."""
        return self._portal.call(self._find_attestation, receipt, now_ms)

    async def _find_attestation(self, receipt: Receipt, now_ms: int | None) -> Attestation | None:
        return self._state_reader.find_attestation(receipt, now_ms)

    def blocks(self, scope: str, after: int = 0, limit: int = BLOCKS_PER_PAGE) -> list[ScopedBlock]:
        """As `StateReader.blocks`."""
        return self._portal.call(self._state_reader.blocks, scope, after, limit)

    def follow_blocks(self, scope: str, after: int = 0) -> Iterator[Sequence[ScopedBlock]]:
        """As `StateReader.follow_blocks`. Leave it with `break`."""
        return self._portal.iterate(self._state_reader.follow_blocks(scope, after))


def _build_closed_error() -> ClosedError:
    return ClosedError("the log is not open; use it inside `with oncelog.open_blocking(…)`")


def _wrap_blocking(open_async: Callable[P, Log]) -> Callable[P, BlockingLog]:
    @wraps(open_async)
    def open_twin(*args: P.args, **kwargs: P.kwargs) -> BlockingLog:
        return BlockingLog(open_async(*args, **kwargs))

    return open_twin


open_blocking = _wrap_blocking(open_log)
