"""Verifies a log in a database, in one read transaction; servers may go on writing meanwhile."""

from collections.abc import Iterator
from typing import Any, Final, TypeVar

from oncelog.core.values import LaneHead
from oncelog.storage.metadata import LogMetadata
from oncelog.storage.postgres.read_session import ReadSession, open_read_transaction
from oncelog.storage.postgres.side_state_tables import compute_digest
from oncelog.storage.postgres.statements import SQL
from oncelog.storage.queries.statement import SharedQuery
from oncelog.storage.side_state import SideStateTable
from oncelog.storage.verify import verification
from oncelog.storage.verify.findings import (
    DEFAULT_OPTIONS,
    ExportedHead,
    Finding,
    InconsistencyError,
    StepProgress,
    VerifyOptions,
)
from oncelog.storage.verify.postgres_key_columns import HashColumnVerifier
from oncelog.storage.verify.postgres_schema import check_lanes, check_schema
from oncelog.storage.verify.source import RowTuple

SHORT_BODY_BYTES_MAX: Final = 65_536
"""A body that is longer comes alone, not in a page with others."""
ROWS_PAGE_ROWS: Final = 1000
_BODY_COLUMN: Final = 13
T = TypeVar("T")


class DatabaseSource:
    """See `Source` for what each method promises."""

    def __init__(self, session: ReadSession, metadata: LogMetadata) -> None:
        self._session = session
        self.metadata = metadata
        self.keys = HashColumnVerifier(session, metadata.index_secret)

    def check_structure(self) -> Iterator[StepProgress]:
        """As `Source` says. Indexes are not compared with their tables: `pg_amcheck` of PostgreSQL does that."""
        check_schema(self._session)
        check_lanes(self.load_heads(), self.metadata.settings.lanes)
        return iter(())

    def load_heads(self) -> dict[int, LaneHead]:
        """As `Source` says."""
        return {lane: LaneHead(*head) for lane, *head in self.iterate_rows("all_lanes")}

    def run_query(self, query: SharedQuery[T], *arguments: Any) -> T:
        """As `Source` says."""
        return self._session.run_query(query, *arguments)

    def iterate_rows(self, statement: str) -> Iterator[RowTuple]:
        """As `Source` says."""
        return self._session.iterate_rows(SQL[statement], page_rows=ROWS_PAGE_ROWS)

    def iterate_table(self, table: SideStateTable) -> Iterator[RowTuple]:
        """As `Source` says."""
        columns = ", ".join(table.columns)
        order = f"ORDER BY lane, {', '.join(table.keys)}"
        if not table.has_long_keys:
            return self._session.iterate_rows(f"SELECT {columns} FROM oncelog_{table.name} {order}")  # noqa: S608
        # Apart, so that the short keys come from their index and are not sorted.
        both = [
            f"(SELECT {columns}, digest FROM oncelog_{table.name} WHERE digest IS {nullness} {order})"  # noqa: S608
            for nullness in ("NULL", "NOT NULL")
        ]
        return self._strip_digests(table, self._session.iterate_rows(f"{' UNION ALL '.join(both)} {order}"))

    def _strip_digests(self, table: SideStateTable, rows: Iterator[RowTuple]) -> Iterator[RowTuple]:
        width = 1 + len(table.keys)
        for *row, digest in rows:
            if digest != compute_digest(row[1:width]):
                key = tuple(row[:width])
                raise InconsistencyError(f"the table oncelog_{table.name} does not find {key!r} by its digest", row[0])
            yield tuple(row)

    def iterate_evidence(self) -> Iterator[RowTuple]:
        """As `Source` says. The columns by which a record is found are compared on the way."""
        for *columns, body_bytes, key_hash, sequence_hash in self._session.iterate_rows(
            SQL["all_evidence"], SHORT_BODY_BYTES_MAX
        ):
            if body_bytes is not None and body_bytes > SHORT_BODY_BYTES_MAX:
                found = self._session.fetch_first(SQL["body_at"], *columns[:2])
                columns[_BODY_COLUMN] = None if found is None else found[0]
            row = tuple(columns)
            self.keys.compare(row, key_hash, sequence_hash)
            yield row

    def fetch_first(self, statement: str, *parameters: Any) -> RowTuple | None:
        """As `Source` says. Streams are found by an index of the records: its rows cannot be others."""
        return self._session.fetch_first(SQL[statement], *parameters) if statement in SQL else None


def verify_database(
    address: str, head: ExportedHead | None = None, options: VerifyOptions = DEFAULT_OPTIONS
) -> Iterator[Finding]:
    """Goes through a log. The last finding is a Lie, the first one found, or Passed; before it comes Progress.

    Raises NotALogError, NewerSchemaError or StoreUnavailableError for what cannot be looked at. While it runs the
    server keeps row versions that it could otherwise clear away.
    """
    yield from verification.report_inconsistency(_verify_database(address, head, options))


def _verify_database(address: str, head: ExportedHead | None, options: VerifyOptions) -> Iterator[Finding]:
    with open_read_transaction(address) as (session, metadata):
        yield from verification.verify(DatabaseSource(session, metadata), head, options)
