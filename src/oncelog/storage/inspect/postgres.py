"""Inspection of a log in a PostgreSQL database, for the command line."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from oncelog.core.proof import Block
from oncelog.core.tenants import Tenant, Usage
from oncelog.core.values import KeyIdentity, LaneHead, Record
from oncelog.storage.address import redact_address
from oncelog.storage.clock import ClockMark, SystemClock
from oncelog.storage.inspect.inspector import SCAN_PAGE_RECORDS, ClockStatus
from oncelog.storage.key_hash import hash_identities
from oncelog.storage.leaps import NO_OPERATOR, EpochRenewal, LaneGaps, Operator
from oncelog.storage.metadata import LogMetadata
from oncelog.storage.postgres import record_queries, tenants
from oncelog.storage.postgres.connection import Timeouts
from oncelog.storage.postgres.database import check_database, load_metadata
from oncelog.storage.postgres.database_clock import ClockSnapshot
from oncelog.storage.postgres.key_status import load_key_status
from oncelog.storage.postgres.read_session import ReadSession, open_read_transaction, open_session, translate_errors
from oncelog.storage.postgres.statements import SQL
from oncelog.storage.postgres.store import PostgresStore
from oncelog.storage.store import Consumer, KeyStatus
from oncelog.storage.verify.findings import DEFAULT_OPTIONS, ExportedHead, Finding, VerifyOptions
from oncelog.storage.verify.postgres import verify_database

_NAMES_PAGE_ROWS: Final = 5_000
_RENEW_TIMEOUTS: Final = Timeouts(lane_ms=60_000)
"""A leap writes a row for each stream, in one transaction."""


class DatabaseView:
    """See `LogView` for what each method promises."""

    def __init__(self, session: ReadSession, metadata: LogMetadata) -> None:
        self._session = session
        self.metadata = metadata

    def load_heads(self) -> dict[int, LaneHead]:
        """As `LogView` says."""
        return self._session.call(record_queries.load_heads)

    def load_gaps(self) -> dict[int, LaneGaps]:
        """As `LogView` says."""
        return self._session.call(record_queries.load_gaps)

    def list_internal_records(self, after: Mapping[int, int], limit: int) -> list[Record]:
        """As `LogView` says."""
        return self._session.call(record_queries.list_internal_records, after, limit)

    def count_audit_records(self) -> int:
        """As `LogView` says."""
        return self._session.call(record_queries.count_audit_records)

    def list_policies(self) -> list[tuple[str, str]]:
        """As `LogView` says."""
        return [(name, declaration) for name, declaration in self._session.iterate_rows(SQL["policies"])]

    def list_consumers(self) -> list[Consumer]:
        """As `LogView` says."""
        return self._session.call(record_queries.list_consumers)

    def list_usage(self) -> list[tuple[Tenant, Usage]]:
        """As `LogView` says."""
        return self._session.call(tenants.load_usage)

    def count_erasures(self) -> int:
        """As `LogView` says."""
        return int(self._fetch_named_value("erasures"))

    def get_key_status(self, identity: KeyIdentity) -> KeyStatus:
        """As `LogView` says."""
        return self._session.call(load_key_status, identity, self.metadata)

    def find_stored_keys(self, identities: Sequence[KeyIdentity]) -> list[KeyIdentity]:
        """As `LogView` says."""
        hashes = hash_identities(self.metadata.index_secret, identities)
        rows = self._session.iterate_rows(SQL["keys"], list(hashes.values()))
        stored = {
            (policy, scope, client if number else "", key) for *_, number, policy, scope, client, key, _, _ in rows
        }
        return [identity for identity in identities if identity in stored]

    def iterate_streams(self) -> Iterator[str]:
        """As `LogView` says."""
        return (scope for (scope,) in self._session.iterate_rows(SQL["scopes"], page_rows=_NAMES_PAGE_ROWS))

    def iterate_clients(self) -> Iterator[tuple[str, str, str]]:
        """As `LogView` says."""
        rows = self._session.iterate_rows(SQL["client_names"], page_rows=_NAMES_PAGE_ROWS)
        return ((policy, scope, client) for policy, scope, client in rows)

    def find_leases(self, key: bytes, limit: int) -> list[KeyIdentity]:
        """As `LogView` says."""
        rows = self._session.iterate_rows(SQL["leases_of_key"], key.hex(), limit)
        return [(policy, scope, client, key) for policy, scope, client in rows]

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
                rows = self._session.iterate_rows(SQL["records_of_keys"], lane, position, last, list(keys))
                yield count, [(policy, scope, client, key) for policy, scope, client, key in rows]
                position = last

    def find_record(self, lane: int, position: int) -> Record | None:
        """As `LogView` says."""
        row = self._session.fetch_first(SQL["records_at"], lane, [position])
        return None if row is None else record_queries.decode_record(row)

    def find_block(self, lane: int, height: int) -> Block | None:
        """As `LogView` says."""
        row = self._session.fetch_first(SQL["block"], lane, height)
        return None if row is None else Block(*row)

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
        sizes = dict(self._session.iterate_rows(SQL["sizes"]))
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
