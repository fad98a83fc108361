"""The writer: runs one transaction at a time, replaces a lost session, and finds out the outcome of its COMMIT.

The writer never cancels a COMMIT. If it did, a server that is waiting for a standby would stop waiting, and show the
commit to every reader as if a standby had it. Instead, the writer closes the socket and reads the outcome on a new
session. The old session's locks delay the new one until the old transaction has ended. No verdict is sent before the
outcome is known.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Final, TypeVar

import asyncpg

from oncelog.core.proof import Block
from oncelog.errors import StoreUnavailableError
from oncelog.storage.postgres import side_state_tables
from oncelog.storage.postgres.connection import (
    Connection,
    Timeouts,
    check_replicated,
    logger,
    terminate_after,
    terminate_on_error,
)
from oncelog.storage.postgres.errors import POSTGRES_ERRORS, is_lost, is_transient, translate_error
from oncelog.storage.postgres.statements import SQL
from oncelog.storage.postgres.transaction import build_begin

PAUSE_S_MIN: Final = 0.01
PAUSE_S_MAX: Final = 0.5
RETRY_HINT: Final = "; submit again under the same identity"
_STATEMENT_NAMES: Final = (
    *("state", "keys", "sequences", "save", "save_lanes", "save_clock", "roots", "policies"),
    *("epoch", "declare_policy", "oldest_members", "tenants", "lock_usage", "set_bytes"),
    *("bodies", "erase", "erase_values", "erase_all_values", "erase_long_values"),
    *("touch_lane", "count_erasure", "own_transaction"),
)
STATEMENTS: Final = (
    *(SQL[name] for name in _STATEMENT_NAMES),
    *side_state_tables.STATEMENTS,
)
"""Statements that the writer runs while it holds lanes or the lock for declarations. A session keeps them prepared.

asyncpg prepares a statement on first use, and the server treats the session as busy until that request has finished. A
process that freezes at that point inside a transaction is not idle, so no server limit would release its lanes. A new
session therefore prepares all of these statements before its first transaction. Statements of rare acts that hold all
lanes (new quotas, a new epoch) are left out.
"""

T = TypeVar("T")
Work = Callable[[Connection], Awaitable[T]]
GetBlocks = Callable[[T], Sequence[Block]]


class Writer:
    """Owns the session that writes. It runs one transaction at a time; other callers wait."""

    def __init__(self, connect: Callable[[], Awaitable[Connection]], name: str, timeouts: Timeouts) -> None:
        self._connect = connect
        self._name = name
        self._timeouts = timeouts
        self._connection: Connection | None = None
        self._lock = asyncio.Lock()
        self._optional_statements: tuple[str, ...] = ()
        self.sync_s = 0.0
        """Duration of the newest COMMIT in seconds."""
        self.synced_s = 0.0
        """When the newest COMMIT returned, by `time.perf_counter`."""

    async def add_optional_statements(self, *statements: str) -> None:
        """Also keep these statements prepared, unless their tables are missing."""
        async with self._lock:
            self._optional_statements += statements
            self.abandon()  # the next session prepares them

    async def transact(self, lanes: Iterable[int], work: Work[T], get_blocks: GetBlocks[T]) -> T:
        """Run `work` in a transaction that holds the lanes, and return its result once it is durable.

        `work` may run again. `get_blocks` returns the blocks that it wrote, which identify its COMMIT. Work that writes
        no block must be idempotent. Raises StoreUnavailableError if the transaction was not committed, or if its
        outcome cannot be determined.
        """
        lanes = sorted(lanes)
        async with self._lock:
            retry_deadline = RetryDeadline(self._name, self._timeouts.patience_ms, RETRY_HINT)
            while True:
                result: T | None = None
                try:
                    async with self._transaction(lanes) as connection:
                        result = await work(connection)
                except POSTGRES_ERRORS as error:
                    if not (is_lost(error) or is_transient(error)):
                        raise translate_error(error, self._name, RETRY_HINT) from error
                    # If there is a result, the session was lost at COMMIT, whose outcome is unknown.
                    blocks = get_blocks(result) if result is not None and is_lost(error) else ()
                    if blocks and await self._is_committed(lanes, blocks, retry_deadline, error):
                        return result  # type: ignore[return-value]
                    await retry_deadline.wait(error)
                else:
                    return result

    def abandon(self) -> None:
        """Close the socket without waiting for the server."""
        if self._connection is not None:
            self._connection.terminate()
            self._connection = None

    async def close(self) -> None:
        """Close the session."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(*POSTGRES_ERRORS):
                await self._run_within(connection, self._timeouts.connect_ms, connection.close())

    # --- the outcome of a COMMIT

    async def _is_committed(
        self, lanes: Sequence[int], blocks: Sequence[Block], retry_deadline: "RetryDeadline", unknown: BaseException
    ) -> bool:
        """Return whether the blocks exist.

        The new session locks the lanes, and thereby waits for the old transaction.
        """
        roots = ([block.lane for block in blocks], [block.height for block in blocks], [block.root for block in blocks])
        logger.warning("a session was lost at COMMIT; its outcome is being queried: %s", unknown)
        while True:
            try:
                # Query in a transaction that commits: the caller reports the blocks as durable, and this COMMIT makes
                # sure they are.
                async with self._transaction(lanes) as connection:
                    found = await connection.fetchval(SQL["roots"], *roots)
            except POSTGRES_ERRORS as error:
                await retry_deadline.wait(error)
            else:
                logger.warning("the transaction was %s", "committed" if found else "not committed")
                return bool(found)

    # --- sessions

    @asynccontextmanager
    async def _session(self) -> AsyncIterator[Connection]:
        if self._connection is None or self._connection.is_closed():
            connection = await self._connect()
            with terminate_on_error(connection):
                for statement in STATEMENTS:
                    await self._prepare(connection, statement)
                for statement in self._optional_statements:
                    with suppress(asyncpg.UndefinedTableError):
                        await self._prepare(connection, statement)
            self._connection = connection
        try:
            yield self._connection
        except BaseException as error:
            # Reuse the session only if the statement itself was at fault, and never after a cancellation.
            if not isinstance(error, Exception) or is_lost(error):
                self.abandon()
            raise

    async def _prepare(self, connection: Connection, statement: str) -> None:
        with terminate_after(connection, self._timeouts.connect_ms):
            # `execute` and `fetch` do not find statements that asyncpg's `prepare` created.
            await connection._get_statement(statement, None)  # noqa: SLF001

    @asynccontextmanager
    async def _transaction(self, lanes: Sequence[int]) -> AsyncIterator[Connection]:
        """Begin a transaction, lock the lanes, and commit at the end of the block.

        Any error rolls the transaction back.
        """
        async with self._session() as connection:
            limit_ms = self._timeouts.transaction_ms
            try:
                await self._run_within(connection, limit_ms, connection.execute(build_begin(lanes)))
                with terminate_after(connection, limit_ms):
                    yield connection
            except BaseException:
                await self._roll_back(connection)
                raise
            await self._commit(connection)

    async def _commit(self, connection: Connection) -> None:
        began_s = time.perf_counter()
        async with check_replicated(connection):
            command_tag = await self._run_within(connection, self._timeouts.commit_ms, connection.execute("COMMIT"))
        self.synced_s = time.perf_counter()
        self.sync_s = self.synced_s - began_s
        if command_tag != "COMMIT":
            raise StoreUnavailableError(f"{self._name}: the server answered COMMIT with {command_tag}{RETRY_HINT}")

    async def _roll_back(self, connection: Connection) -> None:
        if connection.is_closed():
            return
        try:
            await self._run_within(connection, self._timeouts.lane_ms, connection.execute("ROLLBACK"))
        except POSTGRES_ERRORS:
            connection.terminate()

    async def _run_within(self, connection: Connection, limit_ms: int, call: Awaitable[T]) -> T:
        with terminate_after(connection, limit_ms):
            return await call


class RetryDeadline:
    """Waits between retries, up to a time limit."""

    def __init__(self, name: str, limit_ms: int, hint: str = "") -> None:
        self._name = name
        self._hint = hint
        self._limit_s = limit_ms / 1000
        self._deadline: float | None = None
        """Set by the first error."""
        self._pause_s = 0.0

    async def wait(self, error: BaseException) -> None:
        """Wait until the next retry. Raises the translated error once the limit is exceeded."""
        now_s = asyncio.get_running_loop().time()
        if self._deadline is None:
            self._deadline = now_s + self._limit_s
        if now_s + self._pause_s > self._deadline:
            raise translate_error(error, self._name, self._hint) from error
        logger.debug("retrying on another session after %s: %s", type(error).__name__, error)
        await asyncio.sleep(self._pause_s)
        self._pause_s = min(max(PAUSE_S_MIN, 2 * self._pause_s), PAUSE_S_MAX)
