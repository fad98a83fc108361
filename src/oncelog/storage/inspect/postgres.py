"""Inspection of a log in a PostgreSQL database, for the command line."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from oncelog.core.values import KeyIdentity
from oncelog.storage.address import redact_address
from oncelog.storage.clock import ClockMark, SystemClock
from oncelog.storage.inspect.inspector import SCAN_PAGE_RECORDS, ClockStatus, LogView, select_stored_keys
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
from oncelog.storage.queries.statement import SharedQuery
from oncelog.storage.store import KeyStatus
from oncelog.storage.verify.findings import DEFAULT_OPTIONS, ExportedHead, Finding, VerifyOptions
from oncelog.storage.verify.postgres import verify_database

_PAGE_ROWS: Final = 5_000
"""The rows are names and keys, so many of them are small."""
T = TypeVar("T")
_RENEW_TIMEOUTS: Final = Timeouts(lane_ms=60_000)
"""A leap writes a row for each stream, in one transaction."""


class DatabaseView(LogView):
    """See `LogView` for what each method promises."""

    def __init__(self, session: ReadSession, metadata: LogMetadata) -> None:
        self._session = session
        self.metadata = metadata

    def run_query(self, query: SharedQuery[T], *arguments: Any) -> T:
        """As `LogView` says."""
        return self._session.run_query(query, *arguments)

    def iterate_rows(self, statement: str, *parameters: Any) -> Iterator[tuple[Any, ...]]:
        """As `LogView` says."""
        return self._session.iterate_rows(SQL[statement], *parameters, page_rows=_PAGE_ROWS)

    def get_key_status(self, identity: KeyIdentity) -> KeyStatus:
        """As `LogView` says."""
        return self._session.call(load_key_status, self.metadata, identity)

    def find_stored_keys(self, identities: Sequence[KeyIdentity]) -> list[KeyIdentity]:
        """As `LogView` says."""
        hashes = hash_identities(self.metadata.index_secret, identities)
        return select_stored_keys(identities, self.iterate_rows("keys", list(hashes.values())))

    def estimate_records(self) -> int:
        """As `LogView` says. It is the estimate of PostgreSQL's planner."""
        return int(self._fetch_named_value("record_estimate"))

    def scan_records(self, keys: Sequence[bytes]) -> Iterator[tuple[int, list[KeyIdentity]]]:
        """As `LogView` says. By rows, not by positions: there may be long gaps between those."""
        for lane, head in self.load_heads().items():
            position = 0
            while position < head.position:
                row = self._session.fetch_first(SQL["page_end"], lane, position, SCAN_PAGE_RECORDS)
                last, count = row or (None, 0)
                if last is None:
                    break
                rows = self.iterate_rows("records_of_keys", lane, position, last, list(keys))
                yield count, [(policy, scope, client, key) for policy, scope, client, key in rows]
                position = last

    def get_clock_status(self) -> ClockStatus:
        """As `LogView` says. A gateway's mark says something only on the machine that it runs on."""
        system = SystemClock()
        row = self._session.fetch_first(SQL["look_at_state"], system.boot())
        database_ms, _, _, elapsed_ms, time_ms = row or (0, 0, 0, None, None)
        mark = ClockMark() if elapsed_ms is None else ClockMark(system.boot(), elapsed_ms, time_ms)
        blindness = "no gateway on this machine has noted the time since it was started"
        newest_ms = self._fetch_named_value("newest_time")
        return ClockStatus(ClockSnapshot(database_ms, system), "database's clock", mark, newest_ms, blindness)

    def get_sizes(self) -> dict[str, Any]:
        """As `LogView` says."""
        sizes = dict(self.iterate_rows("sizes"))
        return {"server": self._fetch_value("SHOW server_version"), "bytes": sum(sizes.values()), "tables": sizes}

    def _fetch_named_value(self, statement: str) -> Any:
        return self._fetch_value(SQL[statement])

    def _fetch_value(self, statement: str) -> Any:
        row = self._session.fetch_first(statement)
        return None if row is None else row[0]


class DatabaseInspector:
    """See `Inspector` for what each method promises."""

    def __init__(self, address: str) -> None:
        self._address = address

    @contextmanager
    def open_view(self) -> Iterator[DatabaseView]:
        """As `Inspector` says."""
        with open_read_transaction(self._address) as (session, metadata):
            yield DatabaseView(session, metadata)

    def verify(self, head: ExportedHead | None = None, options: VerifyOptions = DEFAULT_OPTIONS) -> Iterator[Finding]:
        """As `Inspector` says."""
        return verify_database(self._address, head, options)

    def confirm_clock(self) -> None:
        """As `Inspector` says. All gateways believe it."""
        with open_read_transaction(self._address) as (session, _):  # a store would make a log where there is none
            session.call(check_database, redact_address(self._address))

        async def confirm() -> None:
            store = PostgresStore(self._address)
            await store.open()
            try:
                await store.confirm_clock()
            finally:
                await store.close()

        with translate_errors(redact_address(self._address)):
            asyncio.run(confirm())

    def renew_epoch(self, above: int | None = None, operator: Operator = NO_OPERATOR) -> EpochRenewal:
        """As `Inspector` says. Open servers notice it with their next commit or look, and must be started again."""
        with open_session(self._address) as session:  # a store would create a missing log, and migrates an older one
            session.call(check_database, redact_address(self._address))
            session.call(load_metadata, redact_address(self._address))

        async def renew() -> EpochRenewal:
            store = PostgresStore(self._address, timeouts=_RENEW_TIMEOUTS)
            await store.open()
            try:
                return await store.renew_epoch(above, operator)
            finally:
                await store.close()

        with translate_errors(redact_address(self._address)):
            return asyncio.run(renew())


def create_inspector(address: str) -> DatabaseInspector:
    """For a database. Raises SettingsError for an address that cannot be read."""
    redact_address(address)
    return DatabaseInspector(address)
