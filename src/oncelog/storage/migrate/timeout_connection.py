"""A PostgreSQL connection whose every call ends: with its answer, or with an error at its time limit.

Whoever moves a log holds the write lock of a file at the end. Nothing that becomes of the network, or of the server,
may make that last for ever.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import asyncpg

from oncelog.storage.postgres.connection import Connection, check_replicated, terminate_after
from oncelog.storage.postgres.errors import POSTGRES_ERRORS


class TimeoutConnection:
    """As a connection of asyncpg's, as far as a move needs one. After an error that is the session's it is closed."""

    def __init__(self, connection: Connection, limit_ms: int) -> None:
        self._connection = connection
        self._limit_ms = limit_ms

    @contextmanager
    def use_limit(self, limit_ms: int) -> Iterator[None]:
        """Each call inside may take so long."""
        before, self._limit_ms = self._limit_ms, limit_ms
        try:
            yield
        finally:
            self._limit_ms = before

    @contextmanager
    def extend_limit(self, more_ms: int) -> Iterator[None]:
        """Each call inside may take so much longer."""
        with self.use_limit(self._limit_ms + more_ms):
            yield

    async def execute(self, statement: str, *parameters: Any) -> Any:
        """As asyncpg's."""
        return await self._await_answer(self._connection.execute(statement, *parameters))

    async def fetch(self, statement: str, *parameters: Any) -> Any:
        """As asyncpg's."""
        return await self._await_answer(self._connection.fetch(statement, *parameters))

    async def fetchrow(self, statement: str, *parameters: Any) -> Any:
        """As asyncpg's."""
        return await self._await_answer(self._connection.fetchrow(statement, *parameters))

    async def fetchval(self, statement: str, *parameters: Any) -> Any:
        """As asyncpg's."""
        return await self._await_answer(self._connection.fetchval(statement, *parameters))

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[None]:
        """Commits at the end. After an error there is no ROLLBACK: the session is let go, and that is as good.

        It would be one more call to wait for, to a server that may not answer, while the file is locked.
        """
        await self.execute("BEGIN")
        try:
            yield
        except BaseException:
            self._connection.terminate()
            raise
        async with check_replicated(self._connection):
            await self.execute("COMMIT")

    async def copy_rows(self, table: str, columns: Sequence[str], rows: list[Any]) -> None:
        """Adds rows to a table, by COPY.

        asyncpg stops when the socket takes no more, and waits for it to take more: also when the session is lost
        meanwhile, or terminated, for ever. So it is not left alone with that.
        """
        connection, limit_ms = self._connection, self._limit_ms
        lost = asyncio.Event()

        def set_lost(_: Any) -> None:
            lost.set()

        connection.add_termination_listener(set_lost)
        copying = asyncio.ensure_future(self._copy_records(table, columns, rows))
        losing = asyncio.ensure_future(lost.wait())
        try:
            await asyncio.wait((copying, losing), timeout=limit_ms / 1000, return_when=asyncio.FIRST_COMPLETED)
            if copying.done():
                await copying
                return
        finally:
            losing.cancel()
            connection.remove_termination_listener(set_lost)
            if not copying.done():
                # In this order: of a session that was terminated asyncpg could not take the COPY back, and would
                # leave an error behind that is logged.
                copying.cancel()
                await asyncio.wait((copying,))
                connection.terminate()
                copying.cancelled() or copying.exception()
        if lost.is_set():
            raise asyncpg.ConnectionDoesNotExistError("connection was lost in the middle of COPY")
        raise _build_timeout_error(limit_ms)

    def terminate(self) -> None:
        """Lets the session go as it is."""
        self._connection.terminate()

    async def close(self, limit_ms: int) -> None:
        """Ends the session, and waits for that."""
        await self._connection.close(timeout=limit_ms / 1000)

    async def _copy_records(self, table: str, columns: Sequence[str], rows: list[Any]) -> None:
        with self._terminate_on_cancel():
            await self._connection.copy_records_to_table(table, columns=columns, records=rows)

    @contextmanager
    def _terminate_on_cancel(self) -> Iterator[None]:
        """Who is cancelled lets the session go in the same turn of the loop.

        In the next one asyncpg would connect to the server once more, to ask it to cancel.
        """
        try:
            yield
        except asyncio.CancelledError:
            self._connection.terminate()
            raise

    async def _await_answer(self, call: Awaitable[Any]) -> Any:
        limit_ms, loop = self._limit_ms, asyncio.get_running_loop()
        until = loop.time() + limit_ms / 1000
        try:
            with terminate_after(self._connection, limit_ms), self._terminate_on_cancel():
                return await call
        except POSTGRES_ERRORS as error:
            if self._connection.is_closed() and loop.time() >= until:
                raise _build_timeout_error(limit_ms) from error
            raise


def _build_timeout_error(limit_ms: int) -> TimeoutError:
    return TimeoutError(f"no answer within {round(limit_ms / 1000, 1):g} seconds")
