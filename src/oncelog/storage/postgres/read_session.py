"""A read-only session for commands: creates, migrates and changes nothing.

Commands have no event loop. So a session has one of its own, which runs while an answer is waited for.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final, TypeVar

import asyncpg

from oncelog.errors import CorruptError, OncelogError, StoreError, StoreUnavailableError
from oncelog.storage.address import redact_address
from oncelog.storage.metadata import LogMetadata
from oncelog.storage.postgres.connection import (
    Connection,
    Timeouts,
    check_standby,
    connect,
    pass_barrier,
    terminate_after,
)
from oncelog.storage.postgres.database import load_metadata
from oncelog.storage.postgres.errors import POSTGRES_ERRORS, translate_error
from oncelog.storage.postgres.query_driver import run_query
from oncelog.storage.postgres.statements import SCHEMA_VERSION
from oncelog.storage.queries.statement import SharedQuery
from oncelog.storage.record_rows import DAMAGE_ERRORS

PAGE_ROWS: Final = 100
IDLE_MS: Final = 600_000
"""Who has stopped a command must not keep the server from clearing up for ever."""
_TIMEOUTS: Final = Timeouts()
_SESSION_SETTINGS: Final = (
    f"SET idle_in_transaction_session_timeout = {IDLE_MS}",
    # All is read in the order of an index: nothing has to be sorted on the server's disk, and the index is looked at.
    "SET enable_sort = off",
    "SET enable_bitmapscan = off",
)

T = TypeVar("T")


class ReadSession:
    """A session inside one transaction."""

    def __init__(self, runner: asyncio.Runner, connection: Connection, name: str) -> None:
        self._runner = runner
        self._connection = connection
        self._name = name

    def call(self, function: Callable[..., Awaitable[T]], *arguments: Any) -> T:
        """What a function says that takes the connection first. Raises errors of ours, never PostgreSQL's."""

        async def invoke() -> T:
            return await function(self._connection, *arguments)

        with translate_errors(self._name):
            return self._runner.run(invoke())

    def run_query(self, query: SharedQuery[T], *arguments: Any) -> T:
        """Return the result of a shared query."""
        result: T = self.call(run_query, query, *arguments)
        return result

    def iterate_rows(self, statement: str, *parameters: Any, page_rows: int = PAGE_ROWS) -> Iterator[tuple[Any, ...]]:
        """What a statement gives, a page at a time."""
        cursor = self.call(_open_cursor, statement, parameters)
        while page := self.call(_fetch_page, cursor, page_rows):
            yield from page

    def fetch_first(self, statement: str, *parameters: Any) -> tuple[Any, ...] | None:
        """Its first row."""
        row = self.call(_fetch_row, statement, parameters)
        return None if row is None else tuple(row)


@contextmanager
def open_read_transaction(address: str) -> Iterator[tuple[ReadSession, LogMetadata]]:
    """A session inside one read transaction, and what the log says about itself.

    What others commit meanwhile is not seen. Raises NotALogError, NewerSchemaError, CorruptError or
    StoreUnavailableError, never an error of PostgreSQL's.
    """
    with open_session(address) as session:
        session.call(_begin)
        yield session, session.call(_load_current_metadata, redact_address(address))


@contextmanager
def open_session(address: str) -> Iterator[ReadSession]:
    """A session that is in no transaction yet."""
    name = redact_address(address)
    with asyncio.Runner() as runner:
        with translate_errors(name):
            connection = runner.run(_connect(address))
        try:
            yield ReadSession(runner, connection, name)
        finally:
            with suppress(*POSTGRES_ERRORS):
                runner.run(connection.close(timeout=_TIMEOUTS.connect_ms / 1000))


@contextmanager
def translate_errors(name: str) -> Iterator[None]:
    """What an error means to someone who looks at a database."""
    try:
        yield
    except OncelogError:
        raise
    except POSTGRES_ERRORS as error:
        if isinstance(error, OSError) and not str(error):
            raise StoreUnavailableError(f"{name} does not answer") from error
        store_error = translate_error(error, name)
        if isinstance(store_error, OncelogError):
            raise store_error from error
        raise CorruptError(f"{name} is not as a log should be: {error}") from error
    except DAMAGE_ERRORS as error:
        raise CorruptError(f"{name} holds what no log has written: {error}") from error


async def _connect(address: str) -> Connection:
    try:
        connection = await connect(address, _TIMEOUTS)
    except asyncpg.TargetServerAttributeNotMatched as error:
        raise StoreUnavailableError(
            f"{redact_address(address)}: who answers is a standby; "
            "to look at one add target_session_attrs=any to the address"
        ) from error
    except OSError as error:
        reason = error.strerror or str(error) or "it does not answer"
        raise StoreUnavailableError(f"{redact_address(address)} cannot be reached: {reason}") from error
    try:
        with terminate_after(connection, _TIMEOUTS.commit_ms):
            # A head that is exported must not be of a commit that can still be lost. (A standby has none to lose.)
            if not await connection.fetchval("SELECT pg_is_in_recovery()"):
                await check_standby(connection, _TIMEOUTS)
                await pass_barrier(connection)
    except TimeoutError as error:
        connection.terminate()
        raise StoreUnavailableError(f"{redact_address(address)}: {error}") from error
    except BaseException:
        connection.terminate()
        raise
    return connection


async def _begin(connection: Connection) -> None:
    for setting in _SESSION_SETTINGS:
        await connection.execute(setting)
    await connection.transaction(isolation="repeatable_read", readonly=True).start()


async def _load_current_metadata(connection: Connection, name: str) -> LogMetadata:
    metadata = await load_metadata(connection, name)
    if metadata.schema_version < SCHEMA_VERSION:
        raise StoreError(
            f"{name} has schema {metadata.schema_version}; this Oncelog reads schema {SCHEMA_VERSION}. "
            "Opening the log with it once brings the database up to date."
        )
    if await connection.fetchval("SELECT count(*) FROM oncelog_state") != 1:
        raise CorruptError(f"{name} says it is a log, but its table oncelog_state has no row")
    return metadata


async def _open_cursor(connection: Connection, statement: str, parameters: tuple[Any, ...]) -> Any:
    return await connection.cursor(statement, *parameters)


async def _fetch_page(_connection: Connection, cursor: Any, rows: int) -> list[tuple[Any, ...]]:
    return [tuple(row) for row in await cursor.fetch(rows)]


async def _fetch_row(connection: Connection, statement: str, parameters: tuple[Any, ...]) -> Any:
    return await connection.fetchrow(statement, *parameters)
