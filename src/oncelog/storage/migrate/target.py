"""Target of a migration: a PostgreSQL database. Servers cannot open it before the migration is complete
(`oncelog_state.move`).

Every transaction leaves the database in a state from which a later run can continue. The progress of a migration is
derived from the copied rows. Every call has a time limit (`timeout_connection.py`).
"""

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, suppress
from typing import Any, Final, TypeVar

import asyncpg
import msgspec

from oncelog.core.values import LaneHead
from oncelog.errors import CorruptError, StoreError
from oncelog.sql_files import parse_statements
from oncelog.storage.address import redact_address
from oncelog.storage.inspect.inspector import RowTuple
from oncelog.storage.metadata import LogMetadata
from oncelog.storage.migrate.source import (
    SQL_DIRECTORY,
    MigrationSource,
    PendingMove,
    RecordSlice,
    SourceState,
    build_count_sql,
)
from oncelog.storage.migrate.timeout_connection import TimeoutConnection
from oncelog.storage.postgres.connection import Timeouts, connect_behind_barrier, terminate_on_error
from oncelog.storage.postgres.database import check_database, create_log, load_any_metadata, migrate_schema
from oncelog.storage.postgres.errors import POSTGRES_ERRORS, translate_error
from oncelog.storage.postgres.query_driver import run_query
from oncelog.storage.postgres.side_state_tables import compute_digest, to_columns
from oncelog.storage.postgres.statements import SCHEMA_VERSION, SQL
from oncelog.storage.queries.statement import SharedQuery
from oncelog.storage.side_state import STORED_TABLES, SideStateTable

_MIGRATION_SQL: Final = parse_statements((SQL_DIRECTORY / "target.sql").read_text(encoding="utf-8"))
RECORD_COLUMNS: Final = (
    *("lane", "position", "sequence", "log_time_ms", "height", "client_sequence", "key_hash", "sequence_hash"),
    *("policy", "scope", "client", "key", "fingerprint", "actor", "partitions", "salt", "body_hash", "body"),
)
BLOCK_COLUMNS: Final = ("lane", "height", "first_position", "count", "log_time_ms", "previous", "root")
PARTITION_RECORD_COLUMNS: Final = ("lane", "partition", "position")
POLICY_COLUMNS: Final = ("name", "declaration")

LOCK_TIMEOUT_MS: Final = 10_000
"""Maximum wait for another migration, possibly a killed one whose session the server has not closed yet."""
CALL_TIMEOUT_MS: Final = 60_000
"""Time limit for the answer to a statement or a COPY. The session is closed once it is exceeded."""
LOCKED_CALL_TIMEOUT_MS: Final = 30_000
"""The same limit while the file is locked."""
RECORD_EXTRA_US: Final = 100
"""Added to the limit for each record in the log, for calls that count, vacuum or delete the rows of whole tables."""
_TIMEOUTS: Final = Timeouts(lane_ms=60_000)
T = TypeVar("T")
_MOVE_DECODER: Final = msgspec.json.Decoder(PendingMove)


@asynccontextmanager
async def open_target(address: str) -> AsyncIterator["MigrationTarget"]:
    """Open the database for one migration at a time. Raises OncelogErrors, never PostgreSQL errors."""
    name = redact_address(address)
    try:
        connection = TimeoutConnection(await connect_behind_barrier(address, _TIMEOUTS), CALL_TIMEOUT_MS)
        with terminate_on_error(connection):
            await check_database(connection, name)
            await _acquire_lock(connection, name)
            yield MigrationTarget(connection, name)
        with suppress(*POSTGRES_ERRORS):  # everything is already durable
            await connection.close(LOCK_TIMEOUT_MS)
    except POSTGRES_ERRORS as error:
        store_error = translate_error(error, name)
        if store_error is error:
            raise StoreError(f"{name}: {error}") from error
        raise store_error from error


async def _acquire_lock(connection: TimeoutConnection, name: str) -> None:
    """Lock out other migrations, and allow plans that read whole tables."""
    await connection.execute(f"SET enable_seqscan = on; SET lock_timeout = {LOCK_TIMEOUT_MS}")
    try:
        await connection.execute(_MIGRATION_SQL["alone"])
    except asyncpg.LockNotAvailableError as error:
        raise StoreError(f"another `oncelog move` into {name} is in progress") from error
    await connection.execute(f"SET lock_timeout = {_TIMEOUTS.lock_ms}")


class MigrationTarget:
    """The database, in one session."""

    def __init__(self, connection: TimeoutConnection, name: str) -> None:
        self._connection = connection
        self.name = name

    def use_locked_limit(self) -> AbstractContextManager[None]:
        """Limit each call in the block to LOCKED_CALL_TIMEOUT_MS."""
        return self._connection.use_limit(LOCKED_CALL_TIMEOUT_MS)

    # --- reading

    async def load_metadata(self) -> tuple[LogMetadata, PendingMove | None] | None:
        """Return the log's metadata and its move (None once complete), or None if the database has no log."""
        if not await self._connection.fetchval(SQL["is_there"]):
            return None
        metadata = await load_any_metadata(self._connection, self.name)
        text = await self._connection.fetchval(SQL["move"])
        try:
            return metadata, None if text is None else _MOVE_DECODER.decode(text)
        except msgspec.MsgspecError as error:
            raise CorruptError(f"the description of the move in {self.name} cannot be read: {error}") from error

    async def load_progress(self) -> dict[int, LaneHead]:
        """Return the position and height up to which each lane has been copied."""
        rows = await self._connection.fetch(_MIGRATION_SQL["reached"])
        return {lane: LaneHead(position=position, height=height) for lane, position, height in rows}

    async def run_query(self, query: SharedQuery[T], *arguments: Any) -> T:
        """Return the result of a shared query."""
        return await run_query(self._connection, query, *arguments)

    async def count_rows(self, records: int) -> dict[str, int]:
        """Count all rows that are copied, by name. The time limit grows with the number of records."""
        with self._extend_limit(records):
            return dict(await self._connection.fetch(build_count_sql("records WHERE sequence > 0")))

    # --- writing

    async def begin(self, source: LogMetadata, erasures: int, move: PendingMove) -> None:
        """Create a log with the metadata of the source, without records."""
        async with self._connection.transaction():
            await self._connection.execute(SQL["alone"])
            await create_log(self._connection, source.settings, source.created_ms, source.epoch, source.index_secret)
            await self._connection.execute(_MIGRATION_SQL["begin"], _encode_move(move), erasures)

    async def resume(self, metadata: LogMetadata) -> None:
        """Migrate the schema if an older version of Oncelog began the move."""
        if metadata.schema_version < SCHEMA_VERSION:
            async with self._connection.transaction():
                await self._connection.execute(SQL["alone"])
                await migrate_schema(self._connection, metadata.schema_version)

    async def save_slice(self, part: RecordSlice) -> None:
        """Save a slice in one transaction.

        The COMMIT does not wait for the disk or a standby, but the later COMMIT of `replace_side_state` does. If the
        server loses slices before then, the next run copies them again.
        """
        async with self._connection.transaction():
            await self._connection.execute("SET LOCAL synchronous_commit = off")
            await self._copy("records", RECORD_COLUMNS, part.records)
            await self._copy("partition_records", PARTITION_RECORD_COLUMNS, part.partition_records)
            await self._copy("blocks", BLOCK_COLUMNS, part.blocks)

    async def erase(self, pages: Iterator[list[RowTuple]], records: int) -> None:
        """Erase the bodies that were erased in the source after they were copied, and remove them from the disk."""
        for page in pages:
            await self._connection.execute(_MIGRATION_SQL["erase"], *to_columns(page))
        with self._extend_limit(records):
            await self._connection.execute("VACUUM oncelog_records")

    async def replace_side_state(self, source: MigrationSource, state: SourceState) -> None:
        """Copy everything except records, replacing the rows of an earlier run. The source must be locked."""
        connection = self._connection
        async with connection.transaction():
            await connection.execute(SQL["alone"])
            for table in STORED_TABLES:
                with self._extend_limit(state.record_count):
                    await connection.execute(f"DELETE FROM oncelog_{table.name}")  # noqa: S608
                for page in source.iterate_side_state(table):
                    await self._copy_side_state(table, page)
            await connection.execute("DELETE FROM oncelog_policies")
            await self._copy("policies", POLICY_COLUMNS, list(source.iterate_rows("policies")))
            await connection.execute(_MIGRATION_SQL["set_log_state"], *state.log_state)
            await connection.execute(SQL["forget_clocks"])
            if state.clock.boot:  # lets a process on this machine detect a database clock that is far ahead
                await connection.execute(SQL["save_clock"], *msgspec.structs.astuple(state.clock))
            if state.heads:
                lanes = [(lane, *msgspec.structs.astuple(head)) for lane, head in sorted(state.heads.items())]
                await connection.execute(SQL["save_lanes"], *to_columns(lanes))

    async def finish(self, move: PendingMove) -> None:
        """Open the database for servers."""
        async with self._connection.transaction():
            if await self._connection.fetchval(_MIGRATION_SQL["end"], _encode_move(move)) is None:
                raise StoreError(f"another program changed {self.name} during the move")

    async def _copy_side_state(self, table: SideStateTable, rows: list[Any]) -> None:
        columns = table.columns
        if table.has_long_keys:
            end = 1 + len(table.keys)
            columns, rows = (*columns, "digest"), [(*row, compute_digest(row[1:end])) for row in rows]
        await self._copy(table.name, columns, rows)

    async def _copy(self, table: str, columns: Sequence[str], rows: list[Any]) -> None:
        if rows:
            await self._connection.copy_rows(f"oncelog_{table}", columns, rows)

    def _extend_limit(self, records: int) -> AbstractContextManager[None]:
        return self._connection.use_limit(self._connection.limit_ms + records * RECORD_EXTRA_US // 1000)


def _encode_move(move: PendingMove) -> str:
    return msgspec.json.encode(move).decode()
