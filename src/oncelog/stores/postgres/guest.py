"""A log through its caller's own session: what it writes and what the caller writes are one transaction.

Callers of one key take turns by a lock on the key; the lane is held only at the end, while the memory of the call is
written, so that a function that takes long keeps nobody else from the lane. The caller's function must not end the
transaction: if it does, PostgreSQL rolls it back (the table oncelog_shared).
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

import asyncpg
from msgspec.structs import replace

from oncelog.core.policy import Policy
from oncelog.core.values import KeyIdentity, Receipt, Record, Request, Submission, Verdict
from oncelog.errors import ClosedError, InFlightError, SettingsError, StoreUnavailableError, TransactionError
from oncelog.stores.clock import JUMP_MS_MAX, Clock
from oncelog.stores.postgres import reading
from oncelog.stores.postgres.connecting import WEAK, Connection, warnings_of
from oncelog.stores.postgres.database import look
from oncelog.stores.postgres.statements import SQL
from oncelog.stores.postgres.timing import DatabaseTime
from oncelog.stores.postgres.troubles import OF_POSTGRES, translated
from oncelog.stores.postgres.writing import Writing, encoded
from oncelog.stores.protocol import Query

IDLE_LIMIT: Final = "30s"
"""How long the caller's function may leave its session without a statement, before the server ends it."""
LANE_LIMIT: Final = "5s"
"""The same while the lane is held, and for how long it is waited for."""
COMMIT_LIMIT_S: Final = 10**6
"""A connection may have a limit for its commands. Beyond it asyncpg would cancel the COMMIT on the server as well."""
CANCELLED_WAIT_S: Final = 1.0
"""For so long a caller who is cancelled waits for his COMMIT; then its socket is let go."""
TOKEN_BYTES: Final = 16
_NEVER: Final = b"never there"
_LOOK_MS: Final = 1
"""Tells the decision that a new write is not taken: it is only asked about."""
_HINT: Final = "; call again with the same key"
_NAME: Final = "the connection's database"


class Guest:
    """The log in the database of a connection. Used as the connection is: by one task at a time."""

    def __init__(self, connection: Connection, *, clock: Clock | None = None) -> None:
        if not isinstance(connection, asyncpg.Connection | asyncpg.pool.PoolConnectionProxy):
            raise TypeError(f"a connection of asyncpg is shared, not {type(connection).__name__}")
        self._connection = connection
        self._clock = clock
        self._token = b""
        self._known: Writing | None = None

    @asynccontextmanager
    async def transaction(
        self, policy: Policy, identity: KeyIdentity, *, waits: bool, wait_ms: int | None
    ) -> AsyncIterator["Guest"]:
        """Keeps others from the key inside, and commits at the end; rolls back if anything is raised.

        Raises InFlightError where another caller has the key, and this one does not want to wait, or no longer.
        """
        connection = self._connection
        if connection.is_in_transaction():
            raise TransactionError("a transaction is open on this connection: commit it or roll it back before")
        async with _translating():
            if self._known is None:
                self._known = Writing(await look(connection, _NAME), self._time(), secrets.token_bytes)
            await self._declare(policy)
            await self._demand_synced()
            transaction = connection.transaction(isolation="read_committed", readonly=False)
            await transaction.start()
        self._token = secrets.token_bytes(TOKEN_BYTES)
        try:
            async with _translating():
                await self._begin(identity, waits, wait_ms)
            yield self
            async with _translating():
                await _committed(connection)
        except BaseException:
            if not _is_closed(connection) and connection.is_in_transaction():
                with suppress(*OF_POSTGRES):
                    await transaction.rollback()
            raise
        self._known.confirm()
        with suppress(*OF_POSTGRES):
            await connection.execute(SQL["notify"], f"oncelog_{self._known.about.epoch}", "")

    @asynccontextmanager
    async def not_ended(self) -> AsyncIterator[None]:
        """The caller's own statements. Raises TransactionError if one of them ended the transaction.

        What they did is undone if they raise; what was done before them stands.
        """
        connection = self._connection
        savepoint = connection.transaction()
        await savepoint.start()
        try:
            yield
        except BaseException as error:
            await self._demand_transaction(error)
            await savepoint.rollback()
            raise
        await self._demand_transaction(None)
        async with _translating():
            await savepoint.commit()

    async def _declare(self, policy: Policy) -> None:
        """In a transaction of its own: others must not wait with it for the caller's function."""
        connection = self._connection
        if not await connection.fetchval(SQL["is_declared"], policy.name, encoded(policy)):
            async with connection.transaction():
                await self._writing.declare(connection, [policy])

    # --- inside a transaction

    async def look(self, submission: Submission) -> Verdict:
        """What would become of it, with RATE_LIMITED if it is new and nothing stands in its way."""
        return await self._decided(replace(submission, retry_after_ms=_LOOK_MS))

    async def commit(self, submission: Submission) -> Verdict:
        """Decides it. It is durable when the transaction has ended."""
        async with _translating():
            await self._connection.execute(SQL["end_shared"], self._token)
        return await self._decided(submission)

    async def end(self) -> None:
        """There is nothing to commit: it was known."""
        async with _translating():
            await self._connection.execute(SQL["end_shared"], self._token)

    async def record(self, receipt: Receipt) -> Record:
        """The record at a place."""
        query = Query(lane=receipt.lane, after=receipt.position - 1, upto=receipt.position, limit=1)
        about = self._writing.about
        async with _translating():
            page = await reading.read(self._connection, query, about.settings.lanes, about.epoch)
        return page.records[0]

    async def _decided(self, submission: Submission) -> Verdict:
        batch: Sequence[Request] = [Request((submission,))]
        needs = self._writing.footprint(batch)
        async with _translating():
            if not submission.retry_after_ms:
                # The function may have set it for its transaction, and what is told must be on the disk.
                await self._connection.execute(SQL["be_durable"])
                await self._connection.execute(SQL["limit_idle"], LANE_LIMIT)
                await self._connection.execute(SQL["limit_lock"], LANE_LIMIT)
                await self._connection.execute(SQL["lock_lanes"], sorted(needs.lanes))
            decided = await self._writing.commit(self._connection, batch, needs, None)
        return decided.verdicts[0][0]

    async def _begin(self, identity: KeyIdentity, waits: bool, wait_ms: int | None) -> None:
        connection = self._connection
        await connection.execute(SQL["limit_shared"], IDLE_LIMIT)
        await connection.execute(SQL["begin_shared"], self._token, _NEVER)
        key = self._writing.hash_of(identity)
        if not waits:
            if not await connection.fetchval(SQL["try_lock_key"], key):
                raise InFlightError("another caller works on it")
            return
        if wait_ms is None:
            await connection.execute(SQL["lock_key"], key)
            return
        before = await connection.fetchval("SHOW lock_timeout")
        await connection.execute(SQL["limit_lock"], f"{wait_ms}ms")
        try:
            await connection.execute(SQL["lock_key"], key)
        except asyncpg.LockNotAvailableError as error:
            raise InFlightError("another caller still works on it") from error
        await connection.execute(SQL["limit_lock"], before)

    @property
    def _writing(self) -> Writing:
        if self._known is None:
            raise ClosedError("the log has not been looked at")
        return self._known

    def _time(self) -> DatabaseTime:
        return DatabaseTime(self._clock, JUMP_MS_MAX)

    async def _demand_synced(self) -> None:
        if await self._connection.fetchval("SHOW synchronous_commit") in WEAK:
            raise SettingsError(
                "the connection must have synchronous_commit = on (or remote_apply): what is not synced can be lost"
            )

    async def _demand_transaction(self, error: BaseException | None) -> None:
        """The caller's statements may have ended it, and begun another: then our row is not in it."""
        connection = self._connection
        if _is_closed(connection):
            raise StoreUnavailableError(f"the session was lost while the function ran{_HINT}") from error
        if connection.is_in_transaction():
            try:
                if await connection.fetchval(SQL["is_shared"], self._token):
                    return
            except asyncpg.InFailedSQLTransactionError:
                return  # it stands, and can only be rolled back: to the savepoint, or whole
        raise TransactionError(
            "the function must not end its transaction (COMMIT, ROLLBACK): what it wrote before that was rolled back"
        ) from error


def _is_closed(connection: Connection) -> bool:
    try:
        return bool(connection.is_closed())
    except asyncpg.InterfaceError:  # a pool takes a connection back when its session is lost
        return True


async def _committed(connection: Connection) -> None:
    """Ends the transaction. The COMMIT is never cancelled, whatever becomes of its caller.

    A server that waits for a standby would stop waiting, and show the commit to everybody as if a standby had it.
    """
    commit = asyncio.ensure_future(connection.execute("COMMIT", timeout=COMMIT_LIMIT_S))
    with warnings_of(connection) as warnings:
        try:
            said = await asyncio.shield(commit)
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            await asyncio.wait([commit], timeout=CANCELLED_WAIT_S)
            if not commit.done():
                connection.terminate()
                await asyncio.wait([commit])
                commit.exception()
            raise
        finally:
            if not _is_closed(connection):
                # The transaction was begun through asyncpg, which offers no way to end it with a limit of ours.
                own: Any = getattr(connection, "_con", connection)
                own._top_xact = None  # noqa: SLF001
    if said != "COMMIT" or warnings:
        raise StoreUnavailableError(f"COMMIT was answered with {said}: {'; '.join(warnings)}{_HINT}")


@asynccontextmanager
async def _translating() -> AsyncIterator[None]:
    try:
        yield
    except asyncpg.ForeignKeyViolationError as error:
        raise TransactionError("the transaction was ended before its end; it was rolled back") from error
    except OF_POSTGRES as error:
        ours = translated(error, _NAME, _HINT)
        if ours is error:
            raise
        raise ours from error
