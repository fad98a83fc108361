"""Inspection of a log in a PostgreSQL database, for the command line."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from oncelog.core.values import KeyIdentity
from oncelog.storage.address import redact_address
from oncelog.storage.clock import ClockMark, SystemClock
from oncelog.storage.inspect.inspector import SCAN_PAGE_RECORDS, ClockStatus, LogView, RowTuple, select_stored_keys
from oncelog.storage.key_hash import hash_identities
from oncelog.storage.leaps import NO_OPERATOR, EpochRenewal, Operator
from oncelog.storage.metadata import LogMetadata
from oncelog.storage.postgres.connection import Timeouts
from oncelog.storage.postgres.database import check_database, load_metadata
from oncelog.storage.postgres.database_clock import ClockSnapshot
from oncelog.storage.postgres.read_session import ReadSession, open_read_transaction, open_session, translate_errors
from oncelog.storage.postgres.statements import SQL
from oncelog.storage.postgres.store import PostgresStore
from oncelog.storage.postgres.transaction import load_key_status
from oncelog.storage.queries.records import load_heads
from oncelog.storage.queries.statement import SharedQuery
from oncelog.storage.store import KeyStatus

PAGE_ROWS: Final = 1000
T = TypeVar("T")
_RENEW_TIMEOUTS: Final = Timeouts(lane_ms=60_000)
"""A leap writes a row for each stream, in one transaction."""


class DatabaseView(LogView):
    """See `LogView` for what each method promises."""

    def __init__(self, session: ReadSession, metadata: LogMetadata) -> None:
        self.session = session
        self.metadata = metadata

    def run_query(self, query: SharedQuery[T], *arguments: Any) -> T:
        """As `LogView` says."""
        return self.session.run_query(query, *arguments)

    def iterate_rows(self, statement: str, *parameters: Any) -> Iterator[RowTuple]:
        """As `LogView` says."""
        return self.session.iterate_rows(SQL[statement], *parameters, page_rows=PAGE_ROWS)

    def fetch_first(self, statement: str, *parameters: Any) -> RowTuple | None:
        """As `LogView` says."""
        return self.session.fetch_first(SQL[statement], *parameters) if statement in SQL else None

    def get_key_status(self, identity: KeyIdentity) -> KeyStatus:
        """As `LogView` says."""
        return self.session.call(load_key_status, self.metadata, identity)

    def find_stored_keys(self, identities: Sequence[KeyIdentity]) -> list[KeyIdentity]:
        """As `LogView` says."""
        hashes = hash_identities(self.metadata.index_secret, identities)
        return select_stored_keys(identities, self.iterate_rows("keys", list(hashes.values())))

    def estimate_records(self) -> int:
        """As `LogView` says. It is the estimate of PostgreSQL's planner."""
        [(estimate,)] = self.iterate_rows("record_estimate")
        return int(estimate)

    def scan_records(self, keys: Sequence[bytes]) -> Iterator[tuple[int, list[KeyIdentity]]]:
        """As `LogView` says. By rows, not by positions: there may be long gaps between positions."""
        for lane, head in self.run_query(load_heads).items():
            position = 0
            while position < head.position:
                [(last, count)] = self.iterate_rows("page_end", lane, position, SCAN_PAGE_RECORDS)
                if last is None:
                    break
                yield count, list(self.iterate_rows("records_of_keys", lane, position, last, list(keys)))
                position = last

    def get_clock_status(self) -> ClockStatus:
        """As `LogView` says. The mark of a server is comparable only on the machine of the server."""
        system = SystemClock()
        row = self.fetch_first("look_at_state", system.boot())
        database_ms, _, _, elapsed_ms, time_ms = row or (0, 0, 0, None, None)
        mark = ClockMark() if elapsed_ms is None else ClockMark(system.boot(), elapsed_ms, time_ms)
        blind_reason = "no gateway on this machine has noted the time since it was started"
        [(newest_ms,)] = self.iterate_rows("newest_time")
        return ClockStatus(ClockSnapshot(database_ms, system), "database's clock", mark, newest_ms, blind_reason)

    def get_sizes(self) -> dict[str, Any]:
        """As `LogView` says."""
        sizes: dict[str, int] = dict(self.iterate_rows("sizes"))
        [(server,)] = self.session.iterate_rows("SHOW server_version")
        return {"server": server, "bytes": sum(sizes.values()), "tables": sizes}


class DatabaseInspector:
    """See `Inspector` for what each method promises."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._name = redact_address(address)

    @contextmanager
    def open_view(self) -> Iterator[DatabaseView]:
        """As `Inspector` says."""
        with open_read_transaction(self._address) as (session, metadata):
            yield DatabaseView(session, metadata)

    def confirm_clock(self) -> None:
        """As `Inspector` says. All servers accept it."""
        with self.open_view() as view:  # a store would create a missing log
            view.session.call(check_database, self._name)
        self._call_store(PostgresStore.confirm_clock, Timeouts())

    def renew_epoch(self, above: int | None = None, operator: Operator = NO_OPERATOR) -> EpochRenewal:
        """As `Inspector` says. Open servers notice it with their next commit or poll, and must be restarted."""
        with open_session(self._address) as session:  # a store would create a missing log, and migrates an older one
            session.call(check_database, self._name)
            session.call(load_metadata, self._name)
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
