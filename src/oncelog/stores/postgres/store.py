"""The PostgreSQL store: one session that writes, a few that read, one that is woken by other gateways."""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any, Final, TypeVar

import asyncpg
from msgspec.structs import replace

from oncelog.core.footprint import Footprint
from oncelog.core.plan import Validate
from oncelog.core.policy import Policy
from oncelog.core.proof import Block, body_hash
from oncelog.core.tenants import Tenant, Usage
from oncelog.core.values import (
    KeyIdentity,
    LaneHead,
    Record,
    RecordAct,
    Remembered,
    Request,
    Settings,
    Snapshot,
    WantedSettings,
)
from oncelog.errors import ClosedError, CorruptError, LogReplacedError
from oncelog.stores.about import About, new_epoch
from oncelog.stores.address import shown
from oncelog.stores.clock import JUMP_MS_MAX, Clock
from oncelog.stores.erasure import Content
from oncelog.stores.leaps import NO_OPERATOR, Operator, Renewed, leap_request
from oncelog.stores.postgres import delta_reading, ledger_reading, member_reading, news, reading
from oncelog.stores.postgres import tenants as tenants_of_database
from oncelog.stores.postgres.connecting import (
    Connection,
    Timeouts,
    abandoning,
    connect,
    demand_standby,
    is_refused,
    pass_barrier,
)
from oncelog.stores.postgres.database import look, make_or_open
from oncelog.stores.postgres.erasure import erase_values
from oncelog.stores.postgres.news import News
from oncelog.stores.postgres.session import Patience, Writer
from oncelog.stores.postgres.sessions import Sessions
from oncelog.stores.postgres.standing import standing_of
from oncelog.stores.postgres.statements import SQL
from oncelog.stores.postgres.timing import KEEP_MS, DatabaseTime
from oncelog.stores.postgres.troubles import OF_POSTGRES, is_lost, translated
from oncelog.stores.postgres.writing import Writing
from oncelog.stores.protocol import (
    BriefPage,
    Consumer,
    Decided,
    Draw,
    EntityPage,
    Evidence,
    MemberChange,
    MemberPage,
    MemberPlace,
    MembershipPage,
    Page,
    Query,
    RelationshipPage,
    RelationshipQuery,
    RowPage,
    ScopedBlock,
    Show,
    SideState,
    Standing,
    act_request,
    decide,
)
from oncelog.stores.rows import DAMAGE_ERRORS
from oncelog.stores.tenants import COUNT_TRIES, Count, Seen, counts_for_stream, list_of
from oncelog.stores.tenants import text_of as kept_text

logger: Final = logging.getLogger("oncelog.postgres")

READERS: Final = 4
MIGRATE_MS: Final = 3_600_000
"""How long opening a log may take: a migration may build the indexes of large tables."""
VACUUM_MS: Final = 3_600_000

T = TypeVar("T")


class PostgresStore:
    """A log in a database. See `stores.protocol.Store` for what each method promises."""

    def __init__(
        self,
        address: str,
        settings: Settings | WantedSettings | None = None,
        *,
        clock: Clock | None = None,
        draw: Draw = os.urandom,
        jump_ms_max: int = JUMP_MS_MAX,
        timeouts: Timeouts | None = None,
        keep_clock_ms: int = KEEP_MS,
    ) -> None:
        self._address = address
        self._name = shown(address)
        self._wanted = settings
        self._draw = draw
        self._timeouts = timeouts or Timeouts()
        self._new_time = partial(DatabaseTime, clock, jump_ms_max, keep_clock_ms)
        self._time = self._new_time()
        self._has_own_time = clock is not None
        self._writing: Writing | None = None
        self._sessions = Sessions(address, self._timeouts, self._demand_this_log)
        self._writer = Writer(self._sessions.new, self._name, self._timeouts)
        self._durable: dict[int, int] = {}
        """Up to which position each lane is known to be as durable as the server makes its commits."""
        self._epoch_checked_s = 0.0
        """Time of the event loop at the last check of the epoch, except for checks by commits."""
        self._erasing = ""
        """The transaction behind which VACUUM is to come."""
        self._pool: Any = None
        self._wakes_others = True
        self._news: News | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def epoch(self) -> str:
        """As `Store` says."""
        return self._about.epoch

    @property
    def settings(self) -> Settings:
        """As `Store` says."""
        return self._about.settings

    @property
    def _about(self) -> About:
        if self._writing is None:
            raise ClosedError(f"the log {self._name} has not been opened")
        return self._writing.about

    # --- opening and closing

    async def open(self) -> None:
        """As `Store` says. Any number of processes may have it open."""
        patience = Patience(self._name, self._timeouts.patience_ms)
        while self._writing is None:
            try:
                self._writing = await self._opened()
            except OF_POSTGRES as error:
                # A server that is not there at all is one that was named wrongly, more often than not: no waiting.
                if not is_lost(error) or is_refused(error):
                    raise translated(error, self._name) from error
                await patience.wait_for_another(error)
        about = self._writing.about
        self._pool = await asyncpg.create_pool(
            connect=self._reader_connected, min_size=0, max_size=READERS, reset=_left_as_it_is
        )
        if self._wakes_others:
            self._news = News(self._sessions.new, self._look, f"oncelog_{about.epoch}")
        await self._count_again()

    async def _opened(self) -> Writing:
        connection = await connect(self._address, self._timeouts)
        try:
            with abandoning(connection, self._timeouts.commit_ms):
                await demand_standby(connection, self._timeouts)
                await pass_barrier(connection)
            now_ms = self._time.now_ms(0) if self._has_own_time else None
            with abandoning(connection, MIGRATE_MS):
                about = await make_or_open(connection, self._name, self._wanted, now_ms)
            with abandoning(connection, self._timeouts.commit_ms):
                await _warn_of_no_sync(connection, self._name)
                await connection.close()
        finally:
            connection.terminate()
        return Writing(about, self._time, self._draw)

    async def close(self) -> None:
        """As `Store` says."""
        pool, self._pool = self._pool, None
        if pool is None:
            return
        while self._tasks:
            await asyncio.wait(self._tasks)
        if self._news is not None:
            await self._news.close()
        self._sessions.close()
        await self._writer.close()
        timer = asyncio.get_running_loop().call_later(self._timeouts.connect_ms / 1000, pool.terminate)
        try:
            await pool.close()
        except OF_POSTGRES:
            pool.terminate()
        finally:
            timer.cancel()

    def sibling(self) -> "PostgresStore":
        """As `Store` says: with separate sessions, as another server has them. It does not wake other servers."""
        store = PostgresStore(self._address, draw=self._draw, timeouts=self._timeouts)
        store._time = self._new_time()
        store._writing = Writing(self._about, store._time, self._draw)
        store._wakes_others = False
        return store

    async def _reader_connected(self, *_: Any, **__: Any) -> Connection:
        return await self._sessions.new()

    async def _demand_this_log(self, connection: Connection) -> None:
        about = await look(connection, self._name)
        writing = self._writing
        if writing is None or about.epoch not in (writing.about.epoch, writing.next_epoch):
            raise LogReplacedError(
                f"{self._name} has another log than the one that was opened, or a new epoch: start this process again"
            )

    # --- writing

    async def declare(self, policies: Sequence[Policy]) -> Mapping[str, Policy]:
        """As `Store` says."""
        writing = self._demand_open()

        async def work(connection: Connection) -> Mapping[str, Policy]:
            await self._check_epoch(connection)
            return await writing.declare(connection, policies)

        return await self._alone(work)

    async def commit(self, batch: Sequence[Request], validate: Validate | None = None) -> Decided:
        """As `Store` says."""
        writing = self._demand_open()
        needs = writing.footprint(batch)
        if not needs.lanes:  # all of it is malformed
            return decide(batch, Snapshot(settings=self.settings), 0, validate, self._draw, needs.faults)

        async def work(connection: Connection) -> Decided:
            return await writing.commit(connection, batch, needs, validate)

        decided = await self._transacted(needs.lanes, work, lambda decided: decided.sealed.blocks)
        writing.confirm()
        self._note_durable({lane: head.position for lane, head in decided.changes.heads.items()})
        if not decided.changes.is_empty and self._news is not None:
            self._news.tell()
        return decided

    async def erase(self, lane: int, positions: Sequence[int], act: RecordAct | None = None) -> int:
        """As `Store` says."""
        writing = self._demand_open()
        wanted = sorted(set(positions))
        erased = 0

        async def work(connection: Connection) -> int:
            nonlocal erased
            await self._check_epoch(connection)
            rows = await connection.fetch(SQL["bodies"], lane, wanted)
            if rows:
                hashes = [body_hash(salt, body) for _, salt, body, *_ in rows]
                await connection.execute(SQL["erase"], lane, [row[0] for row in rows], hashes)
                sizes = [(row[0], counts_for_stream(*tuple(row)[3:6]), row[6], row[7], len(row[2])) for row in rows]
                contents = [Content(row[3], row[6], row[8], row[2]) for row in rows]
                values = await erase_values(connection, lane, contents)
                await tenants_of_database.give_back(connection, [*sizes, *values])
                await connection.execute(SQL["touch_lane"], lane)
                await connection.execute(SQL["count_erasure"])
                self._erasing = await connection.fetchval(SQL["own_transaction"])
                if act is not None:
                    await _record(writing, connection, act_request(act, lane, self.settings.lanes, len(rows)))
            # Done again because nobody could tell whether it had been committed, it may find nothing left to do.
            erased = max(erased, len(rows))
            return erased

        await self._transacted((lane,), work, lambda _: ())
        self._tell_others()
        return erased

    async def set_tenants(self, tenants: Sequence[Tenant], act: RecordAct | None = None) -> bool:
        """As `Store` says."""
        text = kept_text(tenants)
        for tried in count(1):
            begun = await self._read(tenants_of_database.seen)
            if begun.is_counted(text):
                return False
            counted = Count(begun, tenants)
            for lane, newest in begun.positions.items() if counted.is_needed else ():
                after = 0
                while rows := await self._read(tenants_of_database.sizes, lane, after, newest):
                    counted.add(rows)
                    after = rows[-1][0]
            if await self._replaced_tenants(text, counted, begun, act, is_last=tried >= COUNT_TRIES):
                return True
        raise AssertionError("it is tried until it is done")

    async def _replaced_tenants(
        self, text: str | None, counted: Count, begun: Seen, act: RecordAct | None, *, is_last: bool
    ) -> bool:
        writing = self._demand_open()
        before = counted.usage

        async def work(connection: Connection) -> bool:
            await self._check_epoch(connection)
            counted.usage = dict(before)  # it may be begun again
            is_done = await connection.fetchval(SQL["tenants"]) == text  # by a COMMIT whose answer was lost
            is_replaced = await tenants_of_database.replace(connection, text, counted, begun, is_last=is_last)
            if is_replaced and not is_done and act is not None:
                await _record(writing, connection, act_request(act, 0, self.settings.lanes))
            return is_replaced

        is_replaced = await self._transacted(range(self.settings.lanes + 1), work, lambda _: ())
        self._tell_others()
        return is_replaced

    def _tell_others(self) -> None:
        """Wake the other servers: an audit record may have been committed. The clock that it was given is not kept."""
        if self._news is not None:
            self._news.tell()

    async def _count_again(self) -> None:
        """Count usage that was counted by an earlier version of Oncelog."""
        begun = await self._read(tenants_of_database.seen)
        if not begun.is_counted(begun.text):
            await self.set_tenants(list_of(begun.text))

    async def usage(self) -> list[tuple[Tenant, Usage]]:
        """As `Store` says."""
        return await self._read(tenants_of_database.usage)

    async def scrub(self) -> bool:
        """As `Store` says, as far as tables go: the write-ahead log, its archive and backups are the operator's."""
        if await self._read(self._vacuum, limit_ms=VACUUM_MS):
            self._erasing = ""
            return True
        return False

    def free_bytes(self) -> int | None:
        """As `Store` says: nobody can see the server's disk from here."""
        return None

    async def size_bytes(self) -> int | None:
        """As `Store` says: of the whole database, whoever else is in it."""
        return int(await self._read(_size))

    async def probe(self) -> None:
        """As `Store` says."""

        async def work(connection: Connection) -> None:
            await connection.execute(SQL["touch_state"])

        await self._alone(work)

    async def confirm_clock(self) -> None:
        """As `Store` says. All gateways believe it."""

        async def work(connection: Connection) -> None:
            mark = self._time.mark_of(await connection.fetchval(SQL["time"]))
            await connection.execute(SQL["count_confirmation"])
            await connection.execute(SQL["forget_clocks"])
            await connection.execute(SQL["save_clock"], mark.boot, mark.elapsed_ms, mark.time_ms)

        await self._alone(work)

    async def renew(self, above: int | None = None, operator: Operator = NO_OPERATOR) -> Renewed:
        """As `Store` says. All lanes are locked."""
        writing = self._demand_open()
        epoch = writing.next_epoch = new_epoch()
        lanes = range(self.settings.lanes + 1)
        renewed: Renewed | None = None

        async def work(connection: Connection) -> Decided:
            nonlocal renewed
            state = await writing.state(connection, lanes)
            now_ms = self._time.latest_ms(state.database_ms, state.confirmations, state.clock)
            request, renewed = leap_request(state.heads, self._about, above, now_ms, epoch, operator=operator)
            decided = await writing.commit(connection, [request], writing.footprint([request]), None)
            await connection.execute(SQL["set_epoch"], epoch)
            return decided

        decided = await self._transacted(lanes, work, lambda decided: decided.sealed.blocks)
        writing.confirm()
        self._note_durable({lane: head.position for lane, head in decided.changes.heads.items()})
        writing.about = replace(writing.about, epoch=epoch)
        if renewed is None:
            raise AssertionError("a leap that was committed was decided")
        return renewed

    async def previous_epochs(self) -> tuple[str, ...]:
        """As `Store` says."""
        return await self._read(reading.previous_epochs)

    # --- reading

    async def remembered(self, identities: Sequence[KeyIdentity]) -> list[Remembered | None]:
        """As `Store` says."""
        writing = self._demand_open()
        needs = Footprint(keys=set(identities))
        snapshot = await self._read(lambda connection: writing.load(connection, needs, {}))
        return [snapshot.keys.get(identity) for identity in identities]

    async def standing(self, identity: KeyIdentity) -> Standing:
        """As `Store` says."""
        return await self._read(self._standing, identity)

    async def read(self, query: Query) -> Page:
        """As `Store` says."""
        return await self._read(reading.read, query, self.settings.lanes, self.epoch)

    async def read_brief(self, query: Query, policy: str, show: Show) -> BriefPage:
        """As `Store` says."""
        return await self._read(reading.read_brief, query, policy, show, self.epoch)

    async def internal_records(self, after: Mapping[int, int], limit: int) -> list[Record]:
        """As `Store` says."""
        return await self._read(reading.internal_records, after, limit)

    async def sequence_before(self, stream: str, upto: int, count: int) -> int:
        """As `Store` says."""
        return await self._read(reading.sequence_before, stream, upto, count, self.settings.lanes)

    async def sequence_after(self, stream: str, after: int, count: int) -> int:
        """As `Store` says."""
        return await self._read(reading.sequence_after, stream, after, count, self.settings.lanes)

    async def heads(self) -> Mapping[int, LaneHead]:
        """As `Store` says."""
        return await self._read(reading.heads)

    async def block(self, lane: int, height: int) -> tuple[Block, list[Evidence]]:
        """As `Store` says."""
        return await self._read(reading.block, lane, height)

    async def blocks(self, lane: int, after: int, limit: int, scope: str) -> list[ScopedBlock]:
        """As `Store` says."""
        return await self._read(ledger_reading.blocks, lane, after, limit, scope)

    async def side_state(self, needs: Footprint) -> SideState:
        """As `Store` says."""
        return await self._read(ledger_reading.side_state, needs, self.settings, self._time)

    async def entities(self, scope: str, prefix: str, after: str, limit: int, bytes_max: int) -> EntityPage:
        """As `Store` says."""
        bounds = (scope, prefix, after, limit, bytes_max)
        return await self._read(ledger_reading.entities, bounds, self.settings, self._time)

    async def rows(self, scope: str, table: str, after: tuple[str, str], limit: int, bytes_max: int) -> RowPage:
        """As `Store` says."""
        return await self._read(delta_reading.rows, (scope, table, after, limit, bytes_max), self.settings)

    async def relationships(self, query: RelationshipQuery) -> RelationshipPage:
        """As `Store` says."""
        return await self._read(ledger_reading.relationships, query, self.settings)

    async def members(self, scope: str, after: str, limit: int) -> MemberPage:
        """As `Store` says."""
        return await self._read(member_reading.members, scope, after, limit, self.settings)

    async def memberships(self, member: str, prefix: str, after: str, limit: int) -> MembershipPage:
        """As `Store` says."""
        return await self._read(member_reading.memberships, member, prefix, after, limit)

    async def member_changes(self, lane: int, after: MemberPlace, limit: int) -> list[MemberChange]:
        """As `Store` says."""
        return await self._read(member_reading.member_changes, lane, after, limit)

    async def erasures(self) -> int:
        """As `Store` says."""
        return await self._read(_erasures)

    async def consumers(self) -> list[Consumer]:
        """As `Store` says."""
        return await self._read(reading.consumers)

    def listen(self, wake: Callable[[], None]) -> None:
        """As `Store` says."""
        if self._news is not None:
            self._news.listen(wake)

    # --- inside

    def _demand_open(self) -> Writing:
        if self._pool is None or self._writing is None:
            raise ClosedError(f"the log {self._name} is closed")
        self._writing.check_renewed()
        return self._writing

    async def _look(self, connection: Connection) -> None:
        """Check now and then, for a process that only reads, that server and epoch are still the same."""
        await self._sessions.look(connection)
        await self._check_epoch(connection)

    async def _check_epoch(self, connection: Connection) -> None:
        """Raise LogReplacedError if another process has renewed the epoch. Commits read it with the heads."""
        self._demand_open().check_epoch(await connection.fetchval(SQL["epoch"]))
        self._epoch_checked_s = asyncio.get_running_loop().time()

    async def _check_epoch_if_due(self, connection: Connection) -> None:
        """Check the epoch after a read, in a process that does not follow the log and so has no other check."""
        if asyncio.get_running_loop().time() - self._epoch_checked_s >= news.LOOK_MS / 1000:
            await self._check_epoch(connection)

    async def _standing(self, connection: Connection, identity: KeyIdentity) -> Standing:
        writing = self._demand_open()
        standing = await standing_of(connection, identity, writing.about)
        database_ms, _, confirmations, *kept = await connection.fetchrow(SQL["look_at_state"], self._time.boot)
        mark, _ = self._time.proposed(database_ms, confirmations, (kept[0], kept[1]))
        return replace(standing, time_ms=mark.time_ms)

    async def _vacuum(self, connection: Connection) -> bool:
        """False while somebody can still see what was erased, and so VACUUM leaves it."""
        self._erasing = self._erasing or await connection.fetchval(SQL["own_transaction"])
        if not await connection.fetchval(SQL["is_behind_all"], self._erasing):
            return False
        try:
            await connection.execute("VACUUM oncelog_records, oncelog_entities")
        except asyncpg.LockNotAvailableError:  # another VACUUM is at it
            return False
        return True

    async def _alone(self, work: Callable[[Connection], Awaitable[T]]) -> T:
        return await self._transacted((), work, lambda _: ())

    async def _transacted(
        self, lanes: Any, work: Callable[[Connection], Awaitable[T]], blocks: Callable[[T], Sequence[Block]]
    ) -> T:
        """Goes on though its caller does not: a statement that is cancelled is cancelled on the server as well."""
        self._demand_open()

        async def whole() -> T:
            async with self._writer.turn:
                return await self._writer.transact(lanes, work, blocks)

        return await self._kept(whole())

    async def _kept(self, coroutine: Coroutine[Any, Any, T]) -> T:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # looked at: its caller may have gone

    async def _read(self, function: Callable[..., Awaitable[T]], *arguments: Any, limit_ms: int = 0) -> T:
        """Goes on though its caller does not: asyncpg would have to ask the server to cancel, and wait for that."""
        self._demand_open()
        return await self._kept(self._read_on(function, *arguments, limit_ms=limit_ms))

    async def _read_on(self, function: Callable[..., Awaitable[T]], *arguments: Any, limit_ms: int) -> T:
        """On a session of those that read. One that was lost meanwhile is tried again on another, with patience."""
        patience = Patience(self._name, self._timeouts.patience_ms)
        while True:
            self._demand_open()
            try:
                async with self._pool.acquire(timeout=self._timeouts.patience_ms / 1000) as connection:
                    # A network that loses all it is given must not stop those who follow.
                    with abandoning(connection, limit_ms or self._timeouts.transaction_ms):
                        result = await function(connection, *arguments)
                        await self._check_epoch_if_due(connection)
                        await self._prove(connection)
                        return result
            except OF_POSTGRES as error:
                if self._pool is None:
                    raise ClosedError(f"the log {self._name} is closed") from error
                if not is_lost(error):
                    raise translated(error, self._name) from error
                await patience.wait_for_another(error)
            except DAMAGE_ERRORS as error:
                raise CorruptError(f"{self._name} is damaged: {error}; see `oncelog verify`") from error

    async def _prove(self, connection: Connection) -> None:
        """Returns when all that was read on the session before is on a standby, if any is waited for.

        A commit whose wait for the standby was broken off, as by a server that is shut down because it was cut off, is
        shown to all, and may be lost with that server. Whoever has been told of it could not be told that it is gone.
        So what nobody has acknowledged here yet is told only when a barrier behind it has been passed.
        """
        if not self._sessions.waits_for_standbys:
            return
        seen: dict[int, int] = dict(await connection.fetch(SQL["positions"]))
        if any(position > self._durable.get(lane, 0) for lane, position in seen.items()):
            await pass_barrier(connection)
            self._note_durable(seen)

    def _note_durable(self, positions: Mapping[int, int]) -> None:
        for lane, position in positions.items():
            self._durable[lane] = max(position, self._durable.get(lane, 0))


async def _record(writing: Writing, connection: Connection, request: Request) -> None:
    """Commit an audit record in a transaction that other statements are part of, and that holds its lane."""
    await writing.commit(connection, [request], writing.footprint([request]), None)


async def _left_as_it_is(_connection: Connection) -> None:
    """Between two readers: none of ours leaves anything behind in its session."""


async def _size(connection: Connection) -> Any:
    return await connection.fetchval(SQL["database_size"])


async def _erasures(connection: Connection) -> int:
    return int(await connection.fetchval(SQL["erasures"]))


async def _warn_of_no_sync(connection: Connection, name: str) -> None:
    if await connection.fetchval("SHOW fsync") != "on":
        logger.warning("%s runs with fsync off: what is committed can be lost with the power", name)
