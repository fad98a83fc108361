"""Looking at a log that is there, for the command line: nothing is made, migrated or changed.

Commands have no event loop. So a session has one of its own, which runs while an answer is waited for.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final, TypeVar

import asyncpg

from oncelog.errors import CorruptError, OncelogError, StoreError, StoreUnavailableError
from oncelog.stores.about import About
from oncelog.stores.address import shown
from oncelog.stores.postgres.connecting import Connection, Timeouts, abandoning, connect, demand_standby, pass_barrier
from oncelog.stores.postgres.database import look
from oncelog.stores.postgres.statements import SCHEMA_VERSION
from oncelog.stores.postgres.troubles import OF_POSTGRES, translated
from oncelog.stores.rows import DAMAGE_ERRORS

PAGE_ROWS: Final = 100
IDLE_MS: Final = 600_000
"""Who has stopped a command must not keep the server from clearing up for ever."""
_TIMEOUTS: Final = Timeouts()
_LOOKING: Final = (
    f"SET idle_in_transaction_session_timeout = {IDLE_MS}",
    # All is read in the order of an index: nothing has to be sorted on the server's disk, and the index is looked at.
    "SET enable_sort = off",
    "SET enable_bitmapscan = off",
)

T = TypeVar("T")


class Looking:
    """A session inside one transaction."""

    def __init__(self, runner: asyncio.Runner, connection: Connection, name: str) -> None:
        self._runner = runner
        self._connection = connection
        self._name = name

    def call(self, function: Callable[..., Awaitable[T]], *arguments: Any) -> T:
        """What a function says that takes the connection first. Raises errors of ours, never PostgreSQL's."""

        async def called() -> T:
            return await function(self._connection, *arguments)

        with in_our_words(self._name):
            return self._runner.run(called())

    def rows(self, statement: str, *parameters: Any, page_rows: int = PAGE_ROWS) -> Iterator[tuple[Any, ...]]:
        """What a statement gives, a page at a time."""
        cursor = self.call(_cursor, statement, parameters)
        while page := self.call(_page, cursor, page_rows):
            yield from page

    def first(self, statement: str, *parameters: Any) -> tuple[Any, ...] | None:
        """Its first row."""
        row = self.call(_row, statement, parameters)
        return None if row is None else tuple(row)


@contextmanager
def looking_at(address: str) -> Iterator[tuple[Looking, About]]:
    """A session inside one read transaction, and what the log says about itself.

    What others commit meanwhile is not seen. Raises NotALogError, NewerSchemaError, CorruptError or
    StoreUnavailableError, never an error of PostgreSQL's.
    """
    with session_at(address) as session:
        session.call(_begin)
        yield session, session.call(_look, shown(address))


@contextmanager
def session_at(address: str) -> Iterator[Looking]:
    """A session that is in no transaction yet."""
    name = shown(address)
    with asyncio.Runner() as runner:
        with in_our_words(name):
            connection = runner.run(_connected(address))
        try:
            yield Looking(runner, connection, name)
        finally:
            with suppress(*OF_POSTGRES):
                runner.run(connection.close(timeout=_TIMEOUTS.connect_ms / 1000))


@contextmanager
def in_our_words(name: str) -> Iterator[None]:
    """What an error means to someone who looks at a database."""
    try:
        yield
    except OncelogError:
        raise
    except OF_POSTGRES as error:
        if isinstance(error, OSError) and not str(error):
            raise StoreUnavailableError(f"{name} does not answer") from error
        ours = translated(error, name)
        if isinstance(ours, OncelogError):
            raise ours from error
        raise CorruptError(f"{name} is not as a log should be: {error}") from error
    except DAMAGE_ERRORS as error:
        raise CorruptError(f"{name} holds what no log has written: {error}") from error


async def _connected(address: str) -> Connection:
    try:
        connection = await connect(address, _TIMEOUTS)
    except asyncpg.TargetServerAttributeNotMatched as error:
        raise StoreUnavailableError(
            f"{shown(address)}: who answers is a standby; to look at one add target_session_attrs=any to the address"
        ) from error
    except OSError as error:
        said = error.strerror or str(error) or "it does not answer"
        raise StoreUnavailableError(f"{shown(address)} cannot be reached: {said}") from error
    try:
        with abandoning(connection, _TIMEOUTS.commit_ms):
            # A head that is exported must not be of a commit that can still be lost. (A standby has none to lose.)
            if not await connection.fetchval("SELECT pg_is_in_recovery()"):
                await demand_standby(connection, _TIMEOUTS)
                await pass_barrier(connection)
    except TimeoutError as error:
        connection.terminate()
        raise StoreUnavailableError(f"{shown(address)}: {error}") from error
    except BaseException:
        connection.terminate()
        raise
    return connection


async def _begin(connection: Connection) -> None:
    for setting in _LOOKING:
        await connection.execute(setting)
    await connection.transaction(isolation="repeatable_read", readonly=True).start()


async def _look(connection: Connection, name: str) -> About:
    about = await look(connection, name)
    if about.schema_version < SCHEMA_VERSION:
        raise StoreError(
            f"{name} has schema {about.schema_version}; this Oncelog reads schema {SCHEMA_VERSION}. "
            "Opening the log with it once brings the database up to date."
        )
    if await connection.fetchval("SELECT count(*) FROM oncelog_state") != 1:
        raise CorruptError(f"{name} says it is a log, but its table oncelog_state has no row")
    return about


async def _cursor(connection: Connection, statement: str, parameters: tuple[Any, ...]) -> Any:
    return await connection.cursor(statement, *parameters)


async def _page(_connection: Connection, cursor: Any, rows: int) -> list[tuple[Any, ...]]:
    return [tuple(row) for row in await cursor.fetch(rows)]


async def _row(connection: Connection, statement: str, parameters: tuple[Any, ...]) -> Any:
    return await connection.fetchrow(statement, *parameters)
