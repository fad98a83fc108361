"""Inspection of a log in a PostgreSQL database, for the command line.

Commands are synchronous. Each view therefore has an event loop, which runs only while the view waits for an answer.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, TypeVar

import asyncpg
from msgspec.structs import replace

from oncelog.core.values import KeyIdentity
from oncelog.errors import CorruptError, OncelogError, StoreError, StoreUnavailableError
from oncelog.storage.address import redact_address
from oncelog.storage.clock import ClockMark, SystemClock
from oncelog.storage.inspect.inspector import SCAN_PAGE_RECORDS, ClockStatus, LogView, RowTuple
from oncelog.storage.key_hash import hash_identities
from oncelog.storage.metadata import EpochRenewal, Operator
from oncelog.storage.postgres.connection import Connection, Timeouts, connect, connect_behind_barrier
from oncelog.storage.postgres.database import check_database, load_metadata
from oncelog.storage.postgres.errors import POSTGRES_ERRORS, describe_error, translate_error
from oncelog.storage.postgres.query_driver import run_query
from oncelog.storage.postgres.statements import SCHEMA_VERSION, SQL
from oncelog.storage.postgres.store import PostgresStore
from oncelog.storage.postgres.transaction import load_key_status
from oncelog.storage.queries.records import load_heads
from oncelog.storage.queries.statement import SharedQuery
from oncelog.storage.record_rows import DAMAGE_ERRORS
from oncelog.storage.store import KeyStatus

PAGE_ROWS: Final = 1000
VALUES_PAGE_ROWS: Final = 100
"""Rows per page if each row may have a long value."""
_TIMEOUTS: Final = Timeouts()
_RENEW_TIMEOUTS: Final = Timeouts(lane_ms=60_000)
"""Longer than the default, because a leap writes a row for each stream in one transaction."""
_IDLE_TIMEOUT_MS: Final = 600_000
"""Without this limit, a suspended command would prevent VACUUM until it resumes or ends."""
_BEGIN: Final = f"""
SET idle_in_transaction_session_timeout = {_IDLE_TIMEOUT_MS};
-- Read in the order of an index: nothing is sorted on the server's disk, and the verification covers the index.
SET enable_sort = off;
SET enable_bitmapscan = off;
BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY
"""

T = TypeVar("T")


class DatabaseView(LogView):
    """A log in one session. See `LogView` for the contract of each method."""

    def __init__(self, runner: asyncio.Runner, connection: Connection, name: str) -> None:
        self._runner = runner
        self._connection = connection
        self.name = name

    def begin(self) -> None:
        """Begin the read transaction. The view has no metadata yet."""
        self.call(lambda connection: connection.execute(_BEGIN))

    def call(self, function: Callable[..., Awaitable[T]], *arguments: Any) -> T:
        """Run a function whose first parameter is the connection. Raises OncelogErrors, never PostgreSQL errors."""

        async def invoke() -> T:
            return await function(self._connection, *arguments)

        with translate_errors(self.name):
            return self._runner.run(invoke())

    def terminate_after(self, limit_ms: int) -> None:
        """Close the socket after this time, so that no later call waits for the server."""
        self._runner.get_loop().call_later(limit_ms / 1000, self._connection.terminate)

    def run_query(self, query: SharedQuery[T], *arguments: Any) -> T:
        """See `LogView`."""
        result: T = self.call(run_query, query, *arguments)
        return result

    def iterate_rows(self, statement: str, *parameters: Any) -> Iterator[RowTuple]:
        """See `LogView`."""
        return self.iterate_pages(SQL[statement], *parameters, page_rows=PAGE_ROWS)

    def iterate_pages(self, sql: str, *parameters: Any, page_rows: int = VALUES_PAGE_ROWS) -> Iterator[RowTuple]:
        """Yield the rows of an SQL query. Each round trip fetches `page_rows` rows."""
        cursor = self.call(lambda connection: connection.cursor(sql, *parameters))
        while page := self.call(_fetch_page, cursor, page_rows):
            yield from page

    def fetch_first(self, statement: str, *parameters: Any) -> RowTuple | None:
        """See `LogView`."""
        return super().fetch_first(statement, *parameters) if statement in SQL else None

    def get_key_status(self, identity: KeyIdentity) -> KeyStatus:
        """See `LogView`."""
        return self.run_query(load_key_status, self.metadata, identity)

    def find_stored_keys(self, identities: Sequence[KeyIdentity]) -> list[KeyIdentity]:
        """See `LogView`."""
        hashes = hash_identities(self.metadata.index_secret, identities)
        stored = {row[-4:] for row in self.iterate_rows("keys", list(hashes.values()))}
        return [identity for identity in identities if identity in stored]

    def scan_records(self, keys: Sequence[bytes]) -> Iterator[tuple[int, list[KeyIdentity]]]:
        """See `LogView`. Pages are limited by rows rather than by positions, which may have long gaps."""
        for lane, head in self.run_query(load_heads).items():
            position = 0
            while position < head.position:
                [(last, count)] = self.iterate_rows("page_end", lane, position, SCAN_PAGE_RECORDS)
                if last is None:
                    break
                yield count, list(self.iterate_rows("records_of_keys", lane, position, last, list(keys)))
                position = last

    def get_clock_status(self) -> ClockStatus:
        """See `LogView`. A server's mark can be compared only on the machine of that server."""
        system = ClockMark.read(SystemClock())
        row = self.fetch_first("look_at_state", system.boot)
        database_ms, _, _, elapsed_ms, time_ms = row or (0, 0, 0, None, None)
        mark = ClockMark() if elapsed_ms is None else replace(system, elapsed_ms=elapsed_ms, time_ms=time_ms)
        blind_reason = "no process on this machine has recorded the time since the machine booted"
        [(newest_ms,)] = self.iterate_rows("newest_time")
        return ClockStatus(replace(system, time_ms=database_ms), "database's clock", mark, newest_ms, blind_reason)

    def get_sizes(self) -> dict[str, Any]:
        """See `LogView`."""
        sizes: dict[str, int] = dict(self.iterate_rows("sizes"))
        [(server,)] = self.iterate_pages("SHOW server_version")
        return {"server": server, "bytes": sum(sizes.values()), "tables": sizes}


class DatabaseInspector:
    """See `Inspector` for the contract of each method."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._name = redact_address(address)

    @contextmanager
    def open_view(self) -> Iterator[DatabaseView]:
        """See `Inspector`."""
        with open_session(self._address) as view:
            view.begin()
            view.metadata = view.call(load_metadata, self._name)
            if view.metadata.schema_version < SCHEMA_VERSION:
                raise StoreError(
                    f"{self._name} has schema {view.metadata.schema_version}, and this version reads schema "
                    f"{SCHEMA_VERSION}. Open the log once with this version to migrate the database."
                )
            if view.fetch_first("erasures") is None:
                raise CorruptError(f"{self._name} contains a log, but its table oncelog_state has no row")
            yield view

    def confirm_clock(self) -> None:
        """See `Inspector`. The confirmation applies to all servers."""
        with self.open_view() as view:  # a store would create a missing log
            view.call(check_database, self._name)
        self._call_store(PostgresStore.confirm_clock, _TIMEOUTS)

    def renew_epoch(self, above: int | None = None, operator: Operator = Operator()) -> EpochRenewal:
        """See `Inspector`.

        Running servers notice the renewal at their next commit or poll, and must then be restarted.
        """
        with open_session(self._address) as view:  # a store would create a missing log, and migrate an older one
            view.call(check_database, self._name)
            view.call(load_metadata, self._name)
        return self._call_store(lambda store: store.renew_epoch(above, operator), _RENEW_TIMEOUTS)

    def _call_store(self, method: Callable[[PostgresStore], Awaitable[T]], timeouts: Timeouts) -> T:
        async def call() -> T:
            store = PostgresStore(self._address, timeouts=timeouts)
            await store.open()
            try:
                return await method(store)
            finally:
                await store.close()

        with translate_errors(self._name):
            return asyncio.run(call())


@contextmanager
def open_session(address: str) -> Iterator[DatabaseView]:
    """Open a session outside a transaction, as a view without metadata."""
    with _open_session(address, connect_behind_barrier, _TIMEOUTS) as view:
        yield view


@contextmanager
def open_status_view(address: str, timeout_ms: int) -> Iterator[DatabaseView]:
    """Open a view without metadata, for a database that may be in any state.

    `timeout_ms` limits the wait for the answer of each host, and the duration of the block. The session does not wait
    for standbys, so a commit that it reads may still be lost.
    """
    with _open_session(address, connect, Timeouts(connect_ms=timeout_ms)) as view:
        view.terminate_after(timeout_ms)
        view.begin()
        yield view


@contextmanager
def _open_session(
    address: str, connect_session: Callable[[str, Timeouts], Awaitable[Connection]], timeouts: Timeouts
) -> Iterator[DatabaseView]:
    name = redact_address(address)
    with asyncio.Runner() as runner:
        with translate_errors(name):
            connection = runner.run(_connect(address, name, connect_session, timeouts))
        try:
            yield DatabaseView(runner, connection, name)
        finally:
            with suppress(*POSTGRES_ERRORS):
                runner.run(connection.close(timeout=timeouts.connect_ms / 1000))


@contextmanager
def translate_errors(name: str) -> Iterator[None]:
    """Raise PostgreSQL errors as OncelogErrors."""
    try:
        yield
    except OncelogError:
        raise
    except POSTGRES_ERRORS as error:
        if isinstance(error, OSError) and not str(error):
            raise StoreUnavailableError(f"{name} did not respond") from error
        store_error = translate_error(error, name)
        if isinstance(store_error, OncelogError):
            raise store_error from error
        raise CorruptError(f"the log in {name} cannot be read: {error}") from error
    except DAMAGE_ERRORS as error:
        raise CorruptError(f"{name} contains a value that Oncelog never writes: {error}") from error


async def _connect(
    address: str, name: str, connect_session: Callable[[str, Timeouts], Awaitable[Connection]], timeouts: Timeouts
) -> Connection:
    try:
        return await connect_session(address, timeouts)
    except asyncpg.TargetServerAttributeNotMatched as error:
        raise StoreUnavailableError(
            f"{name}: the server is a standby; to inspect it, add target_session_attrs=any to the address"
        ) from error
    except TimeoutError as error:
        raise StoreUnavailableError(f"{name}: {error}") from error
    except OSError as error:
        raise StoreUnavailableError(f"{name} cannot be reached: {describe_error(error)}") from error


async def _fetch_page(_connection: Connection, cursor: Any, rows: int) -> list[RowTuple]:
    return [tuple(row) for row in await cursor.fetch(rows)]
