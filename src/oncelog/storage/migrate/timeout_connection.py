"""A PostgreSQL connection with a time limit for every call.

In its last phase, a migration holds the file's write lock. The limit ensures that it releases the lock, whatever
happens to the network or the server.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import asyncpg

from oncelog.storage.postgres.connection import Connection, check_replicated, terminate_on_error


class TimeoutConnection:
    """The methods of an asyncpg connection that a migration needs.

    A call that exceeds its limit closes the connection.
    """

    def __init__(self, connection: Connection, limit_ms: int) -> None:
        self._connection = connection
        self.limit_ms = limit_ms

    @contextmanager
    def use_limit(self, limit_ms: int) -> Iterator[None]:
        """Set the limit of each call in the block."""
        before, self.limit_ms = self.limit_ms, limit_ms
        try:
            yield
        finally:
            self.limit_ms = before

    async def execute(self, statement: str, *parameters: Any) -> Any:
        """See the asyncpg method."""
        return await self._await_answer(self._connection.execute(statement, *parameters))

    async def fetch(self, statement: str, *parameters: Any) -> Any:
        """See the asyncpg method."""
        return await self._await_answer(self._connection.fetch(statement, *parameters))

    async def fetchval(self, statement: str, *parameters: Any) -> Any:
        """See the asyncpg method."""
        return await self._await_answer(self._connection.fetchval(statement, *parameters))

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[None]:
        """Run the block in a transaction, which commits at the end. An error closes the connection, so that the server
        rolls back.

        A ROLLBACK would be one more call to wait for, while the file is locked, on a server that may not answer.
        """
        await self.execute("BEGIN")
        with terminate_on_error(self._connection):
            yield
        async with check_replicated(self._connection):
            await self.execute("COMMIT")

    async def copy_rows(self, table: str, columns: Sequence[str], rows: list[Any]) -> None:
        """Add rows to a table with COPY.

        asyncpg waits until the socket accepts more data, even after the session was lost or terminated. Losing the
        session therefore cancels the call.
        """
        copying = asyncio.ensure_future(
            self._await_answer(self._connection.copy_records_to_table(table, columns=columns, records=rows))
        )

        def cancel(_: Any) -> None:
            copying.cancel()

        self._connection.add_termination_listener(cancel)
        try:
            await copying
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise asyncpg.ConnectionDoesNotExistError("connection was lost during COPY") from None
        finally:
            self._connection.remove_termination_listener(cancel)

    def terminate(self) -> None:
        """Close the socket without waiting for the server."""
        self._connection.terminate()

    async def close(self, limit_ms: int) -> None:
        """Close the session."""
        await self._connection.close(timeout=limit_ms / 1000)

    async def _await_answer(self, call: Awaitable[Any]) -> Any:
        limit_s = self.limit_ms / 1000
        try:
            async with asyncio.timeout(limit_s):
                try:
                    return await call
                except asyncio.CancelledError:
                    # Otherwise, asyncpg opens a connection in the next turn of the event loop to cancel the statement
                    # on the server.
                    self._connection.terminate()
                    raise
        except TimeoutError as error:
            raise TimeoutError(f"no response within {round(limit_s, 1):g} seconds") from error
