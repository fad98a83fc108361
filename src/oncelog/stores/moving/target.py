"""The database that a log is moved into. Until the end no gateway opens it (`oncelog_state.move`).

Whatever comes here comes in transactions that leave it fit to go on from: how far a move has come is known by what is
there, and by nothing else. Every call to it comes to an end (`limiting.py`).
"""

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, suppress
from typing import Any, Final

import asyncpg
import msgspec

from oncelog.core.values import LaneHead
from oncelog.errors import CorruptError, StoreError
from oncelog.stores.about import About
from oncelog.stores.address import shown
from oncelog.stores.moving.limiting import LimitedConnection
from oncelog.stores.moving.source import Source
from oncelog.stores.moving.values import (
    BLOCK,
    COUNTED,
    PARTITION_RECORD,
    POLICY,
    RECORD,
    TARGET_SQL,
    Move,
    Reached,
    Row,
    Slice,
    State,
)
from oncelog.stores.postgres.connecting import Timeouts, connect, demand_standby, pass_barrier
from oncelog.stores.postgres.database import demand_database, look_at_any, make, migrate
from oncelog.stores.postgres.reading import heads
from oncelog.stores.postgres.statements import SCHEMA_VERSION, SQL
from oncelog.stores.postgres.tables import columns_of, digest_of, has_digest
from oncelog.stores.postgres.troubles import OF_POSTGRES, translated
from oncelog.stores.side_state import KEPT, Table

PATIENCE_MS: Final = 10_000
"""For another mover, which may be one that was killed and whose session the server has not ended yet."""
CALL_MS: Final = 60_000
"""For the answer to a statement, or for a COPY of a slice. Then the session is let go."""
LOCKED_CALL_MS: Final = 30_000
"""The same while nobody can write to the file."""
RECORD_US: Final = 100
"""So much longer, for each record there is, may take what grows with the log: to count, to vacuum, to drop rows."""
_TIMEOUTS: Final = Timeouts(lane_ms=60_000)
_MOVE: Final = msgspec.json.Decoder(Move)


@asynccontextmanager
async def opened_target(address: str) -> AsyncIterator["Target"]:
    """A database that can be written to, for one mover. Raises OncelogErrors, never an error of PostgreSQL's."""
    name = shown(address)
    try:
        connection = LimitedConnection(await connect(address, _TIMEOUTS), CALL_MS)
        try:
            await demand_standby(connection, _TIMEOUTS)
            await pass_barrier(connection)
            await demand_database(connection, name)
            await _be_alone(connection, name)
            yield Target(connection, name)
        except BaseException:
            connection.terminate()
            raise
        with suppress(*OF_POSTGRES):  # all is done, and durable
            await connection.close(PATIENCE_MS)
    except OF_POSTGRES as error:
        ours = translated(error, name)
        if ours is error:
            raise StoreError(f"{name}: {error}") from error
        raise ours from error


async def _be_alone(connection: LimitedConnection, name: str) -> None:
    """And counts whole tables, which gateways never do."""
    await connection.execute(f"SET enable_seqscan = on; SET lock_timeout = {PATIENCE_MS}")
    try:
        await connection.execute(TARGET_SQL["alone"])
    except asyncpg.LockNotAvailableError as error:
        raise StoreError(f"another `oncelog move` into {name} is under way") from error
    await connection.execute(f"SET lock_timeout = {_TIMEOUTS.lock_ms}")


class Target:
    """Of one session."""

    def __init__(self, connection: LimitedConnection, name: str) -> None:
        self._connection = connection
        self.name = name

    def hurrying(self) -> AbstractContextManager[None]:
        """While the file is locked."""
        return self._connection.limited_to(LOCKED_CALL_MS)

    # --- what is there

    async def about(self) -> tuple[About, Move | None] | None:
        """The log that is there, and the move that it has still to wait for. None if there is no log."""
        if not await self._connection.fetchval(SQL["is_there"]):
            return None
        about = await look_at_any(self._connection, self.name)
        text = await self._connection.fetchval(SQL["move"])
        try:
            return about, None if text is None else _MOVE.decode(text)
        except msgspec.MsgspecError as error:
            raise CorruptError(f"{self.name} says of a move what no move says: {error}") from error

    async def reached(self) -> dict[int, Reached]:
        """How far the copying of each lane has come."""
        rows = await self._connection.fetch(TARGET_SQL["reached"])
        return {lane: Reached(position, height) for lane, position, height in rows}

    async def block(self, lane: int, height: int) -> Row | None:
        """The columns of a block."""
        row = await self._connection.fetchrow(SQL["block"], lane, height)
        return None if row is None else tuple(row)

    async def erasures(self) -> int:
        """How many erasures of the source are known to have been taken over."""
        return int(await self._connection.fetchval(SQL["erasures"]))

    async def heads(self) -> dict[int, LaneHead]:
        """The heads of all lanes."""
        return await heads(self._connection)

    async def counts(self, records: int) -> dict[str, int]:
        """How many there are of everything that is copied. There should be so many records."""
        connection = self._connection
        with self._longer_for(records):
            found = dict(zip(COUNTED, await connection.fetchrow(TARGET_SQL["counts"]), strict=True))
            for table in KEPT:
                found[table.name] = await connection.fetchval(f"SELECT count(*) FROM oncelog_{table.name}")  # noqa: S608
        return found

    # --- what comes

    async def begin(self, source: About, erasures: int, move: Move) -> None:
        """Makes a log like the one in the source, without a record."""
        async with self._connection.transaction():
            await self._connection.execute(SQL["alone"])
            await make(self._connection, source.settings, source.created_ms, source.epoch, source.index_secret)
            await self._connection.execute(TARGET_SQL["begin"], _text(move), erasures)

    async def go_on(self, about: About) -> None:
        """An earlier version of Oncelog may have begun the move."""
        if about.schema_version < SCHEMA_VERSION:
            async with self._connection.transaction():
                await self._connection.execute(SQL["alone"])
                await migrate(self._connection, about.schema_version)

    async def take(self, part: Slice) -> None:
        """All of a slice, or nothing of it.

        Its COMMIT waits for no disk and no standby: that of `replace` does, which comes after all of them. What a
        server loses before that is copied again by the next run.
        """
        async with self._connection.transaction():
            await self._connection.execute("SET LOCAL synchronous_commit = off")
            await self._copy("records", RECORD, part.records)
            await self._copy("partition_records", PARTITION_RECORD, part.partition_records)
            await self._copy("blocks", BLOCK, part.blocks)

    async def erase(self, pages: Iterator[list[Row]], records: int) -> None:
        """Drops bodies that have been erased in the source since they were copied, and what was kept of them."""
        for page in pages:
            await self._connection.execute(TARGET_SQL["erase"], *columns_of(page))
        with self._longer_for(records):
            await self._connection.execute("VACUUM oncelog_records")

    async def replace(self, source: Source, state: State) -> None:
        """Everything that is no record, in place of whatever an earlier attempt has left. The source is locked."""
        connection = self._connection
        async with connection.transaction():
            await connection.execute(SQL["alone"])
            for table in KEPT:
                with self._longer_for(state.records):
                    await connection.execute(f"DELETE FROM oncelog_{table.name}")  # noqa: S608
                for page in source.side_state(table):
                    await self._copy_side_state(table, page)
            await connection.execute("DELETE FROM oncelog_policies")
            await self._copy("policies", POLICY, source.policies())
            await connection.execute(TARGET_SQL["set_erasures"], state.erasures)
            await connection.execute(SQL["set_tenants"], state.tenants, state.usage_version)
            await connection.execute(SQL["set_leaps"], state.leaps)
            await connection.execute(SQL["forget_clocks"])
            if state.clock.boot:  # a gateway on the same machine notices if the database's clock is far ahead of it
                await connection.execute(SQL["save_clock"], *msgspec.structs.astuple(state.clock))
            if state.heads:
                lanes = [(lane, *msgspec.structs.astuple(head)) for lane, head in sorted(state.heads.items())]
                await connection.execute(SQL["save_lanes"], *columns_of(lanes))

    async def end(self, move: Move) -> None:
        """From now on gateways may open it."""
        async with self._connection.transaction():
            if await self._connection.fetchval(TARGET_SQL["end"], _text(move)) is None:
                raise StoreError(f"{self.name} has been changed by somebody else while the log was moved there")

    async def _copy_side_state(self, table: Table, rows: list[Any]) -> None:
        columns = ("lane", *table.keys, *table.values)
        if has_digest(table):
            end = 1 + len(table.keys)
            columns, rows = (*columns, "digest"), [(*row, digest_of(row[1:end])) for row in rows]
        await self._copy(table.name, columns, rows)

    async def _copy(self, table: str, columns: Sequence[str], rows: list[Any]) -> None:
        if rows:
            await self._connection.copy(f"oncelog_{table}", columns, rows)

    def _longer_for(self, records: int) -> AbstractContextManager[None]:
        return self._connection.longer_by(records * RECORD_US // 1000)


def _text(move: Move) -> str:
    return msgspec.json.encode(move).decode()
