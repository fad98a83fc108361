"""Commits to a log inside a transaction that the application began, on the application's connection.

A lock on the key serializes the callers that use the key. The lane is locked only at the end, while the call's record
is written, so that a slow function does not block the lane. The function must not end the transaction. If it tries to,
the deferred foreign key of the table oncelog_shared makes PostgreSQL roll the transaction back.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, Final, TypeVar

import asyncpg

from oncelog.core.policy import Policy
from oncelog.core.values import KeyIdentity, Request, Submission
from oncelog.error_translation import raise_translated
from oncelog.errors import ClosedError, InFlightError, SettingsError, StoreUnavailableError, TransactionError
from oncelog.storage.clock import JUMP_MS_MAX, Clock
from oncelog.storage.postgres.connection import WEAK_COMMIT_MODES, Connection, check_replicated
from oncelog.storage.postgres.database import load_metadata
from oncelog.storage.postgres.database_clock import DatabaseClock
from oncelog.storage.postgres.errors import POSTGRES_ERRORS, translate_error
from oncelog.storage.postgres.query_driver import run_query
from oncelog.storage.postgres.statements import SQL
from oncelog.storage.postgres.transaction import StoreTransaction, declare_alone
from oncelog.storage.queries.statement import SharedQuery
from oncelog.storage.queries.writes import encode_policy
from oncelog.storage.store import BatchResult

T = TypeVar("T")

IDLE_TIMEOUT: Final = "30s"
"""Maximum time between two statements of the application's function, after which the server closes the session."""
LANE_TIMEOUT: Final = "5s"
"""The same limit while the lane is locked, and the limit for waiting for the lane."""
COMMIT_TIMEOUT_S: Final = 10**6
"""Overrides the connection's command timeout, after which asyncpg would cancel the COMMIT on the server too."""
CANCELLED_WAIT_S: Final = 1.0
"""How long a cancelled caller waits for its COMMIT before it closes the socket."""
TOKEN_BYTES: Final = 16
_ABSENT_TOKEN: Final = b"never there"
_RETRY_HINT: Final = "; call again with the same key"
_DATABASE_NAME: Final = "the connection's database"


class BorrowedTransaction:
    """The log in a connection's database. As with the connection itself, only one task at a time may use it."""

    def __init__(self, connection: Connection, *, clock: Clock | None = None) -> None:
        if not isinstance(connection, asyncpg.Connection | asyncpg.pool.PoolConnectionProxy):
            raise TypeError(f"the connection must be an asyncpg.Connection, not {type(connection).__name__}")
        self._connection = connection
        self._clock = clock
        self._token = b""
        self._loaded_transaction: StoreTransaction | None = None

    @asynccontextmanager
    async def transaction(
        self, policy: Policy, identity: KeyIdentity, *, waits: bool, wait_ms: int | None
    ) -> AsyncIterator["BorrowedTransaction"]:
        """Lock the key, and commit at the end of the block. An exception rolls the transaction back.

        Raises InFlightError if another caller holds the key: immediately without `waits`, otherwise after `wait_ms`.
        """
        connection = self._connection
        if connection.is_in_transaction():
            raise TransactionError("a transaction is open on this connection: commit it or roll it back first")
        with _translate_errors():
            if self._loaded_transaction is None:
                self._loaded_transaction = StoreTransaction(
                    await load_metadata(connection, _DATABASE_NAME),
                    DatabaseClock(self._clock, JUMP_MS_MAX),
                    secrets.token_bytes,
                )
            await self._declare(policy)
            await self._check_synchronous()
            transaction = connection.transaction(isolation="read_committed", readonly=False)
            await transaction.start()
        self._token = secrets.token_bytes(TOKEN_BYTES)
        try:
            with _translate_errors():
                await self._begin(identity, waits, wait_ms)
            yield self
            with _translate_errors():
                await _commit(connection)
        except BaseException:
            if not _is_closed(connection) and connection.is_in_transaction():
                with suppress(*POSTGRES_ERRORS):
                    await transaction.rollback()
            raise
        self._loaded_transaction.confirm()
        with suppress(*POSTGRES_ERRORS):
            await connection.execute(SQL["notify"], f"oncelog_{self._loaded_transaction.metadata.epoch}", "")

    @asynccontextmanager
    async def guard_transaction(self) -> AsyncIterator[None]:
        """Guard the application's statements. Raises TransactionError if one of them has ended the transaction.

        An exception undoes only these statements.
        """
        connection = self._connection
        savepoint = connection.transaction()
        await savepoint.start()
        try:
            yield
        except BaseException as error:
            await self._check_in_transaction(error)
            await savepoint.rollback()
            raise
        await self._check_in_transaction(None)
        with _translate_errors():
            await savepoint.commit()

    async def _declare(self, policy: Policy) -> None:
        """Declare a policy in a separate transaction, so that no other caller waits for the application's function."""
        connection = self._connection
        if not await connection.fetchval(SQL["is_declared"], policy.name, encode_policy(policy)):
            async with connection.transaction():
                await run_query(connection, declare_alone, [policy])

    # --- inside a transaction

    async def run(self, query: SharedQuery[T], *arguments: Any) -> T:
        """Run a query. The batches that it commits are durable once the transaction has been committed."""
        with _translate_errors():
            return await run_query(self._connection, query, *arguments, commit=self._commit_batch)

    async def end(self) -> None:
        """Allow the transaction to end without a commit to the log, because the write was already known."""
        with _translate_errors():
            await self._connection.execute(SQL["end_shared"], self._token)

    async def _commit_batch(self, connection: Connection, batch: Sequence[Request]) -> BatchResult:
        needs = self._store_transaction.compute_read_set(batch)
        if not all(item.known_only for request in batch for item in request.items if isinstance(item, Submission)):
            await self.end()
            # The function may have turned synchronous_commit off for its transaction, but verdicts must be durable.
            await connection.execute(SQL["be_durable"])
            await connection.execute(SQL["limit_idle"], LANE_TIMEOUT)
            await connection.execute(SQL["limit_lock"], LANE_TIMEOUT)
            await connection.execute(SQL["lock_lanes"], sorted(needs.lanes))
        return await self._store_transaction.commit(connection, batch, needs)

    async def _begin(self, identity: KeyIdentity, waits: bool, wait_ms: int | None) -> None:
        connection = self._connection
        await connection.execute(SQL["limit_shared"], IDLE_TIMEOUT)
        await connection.execute(SQL["begin_shared"], self._token, _ABSENT_TOKEN)
        key = self._store_transaction.hash_identity(identity)
        if not waits:
            if not await connection.fetchval(SQL["try_lock_key"], key):
                raise InFlightError("another caller is doing this work")
            return
        if wait_ms is None:
            await connection.execute(SQL["lock_key"], key)
            return
        before = await connection.fetchval("SHOW lock_timeout")
        await connection.execute(SQL["limit_lock"], f"{wait_ms}ms")
        try:
            await connection.execute(SQL["lock_key"], key)
        except asyncpg.LockNotAvailableError as error:
            raise InFlightError("another caller is still doing this work") from error
        await connection.execute(SQL["limit_lock"], before)

    @property
    def _store_transaction(self) -> StoreTransaction:
        if self._loaded_transaction is None:
            raise ClosedError("no transaction has been started")
        return self._loaded_transaction

    async def _check_synchronous(self) -> None:
        if await self._connection.fetchval("SHOW synchronous_commit") in WEAK_COMMIT_MODES:
            raise SettingsError(
                "the connection must have synchronous_commit = on (or remote_apply), otherwise commits can be lost"
            )

    async def _check_in_transaction(self, error: BaseException | None) -> None:
        """Raise an error unless the transaction is still open. Its row in oncelog_shared identifies it."""
        connection = self._connection
        if _is_closed(connection):
            raise StoreUnavailableError(f"the session was lost while the function ran{_RETRY_HINT}") from error
        if connection.is_in_transaction():
            try:
                if await connection.fetchval(SQL["is_shared"], self._token):
                    return
            except asyncpg.InFailedSQLTransactionError:
                return  # the transaction is open but can only be rolled back
        raise TransactionError(
            "the function must not end its transaction (COMMIT, ROLLBACK): what it had written was rolled back"
        ) from error


def _is_closed(connection: Connection) -> bool:
    try:
        return bool(connection.is_closed())
    except asyncpg.InterfaceError:  # the pool has reclaimed the connection because its session was lost
        return True


async def _commit(connection: Connection) -> None:
    """Commit the transaction. The COMMIT is never cancelled, even if the caller is (see `writer`)."""
    async with check_replicated(connection):
        commit = asyncio.ensure_future(connection.execute("COMMIT", timeout=COMMIT_TIMEOUT_S))
        try:
            command_tag = await asyncio.shield(commit)
        except asyncio.CancelledError:
            await asyncio.wait([commit], timeout=CANCELLED_WAIT_S)
            if not commit.done():
                connection.terminate()
                await asyncio.wait([commit])
                commit.exception()
            raise
        finally:
            if not _is_closed(connection):
                # asyncpg began the transaction, and offers no way to commit it with a different time limit.
                raw_connection: Any = getattr(connection, "_con", connection)
                raw_connection._top_xact = None  # noqa: SLF001
    if command_tag != "COMMIT":
        raise StoreUnavailableError(f"the server answered COMMIT with {command_tag}{_RETRY_HINT}")


@contextmanager
def _translate_errors() -> Iterator[None]:
    try:
        yield
    except asyncpg.ForeignKeyViolationError as error:
        raise TransactionError("other code ended the transaction too early; it was rolled back") from error
    except POSTGRES_ERRORS as error:
        raise_translated(translate_error(error, _DATABASE_NAME, _RETRY_HINT), error)
