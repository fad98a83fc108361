"""Is a database the log it says it is? In one read transaction: gateways may go on writing meanwhile."""

from collections.abc import Iterator
from typing import Any, Final

from oncelog.core.values import LaneHead
from oncelog.stores.about import About
from oncelog.stores.leaps import LaneGaps
from oncelog.stores.postgres import reading
from oncelog.stores.postgres.looking import Looking, looking_at
from oncelog.stores.postgres.statements import SQL
from oncelog.stores.postgres.tables import digest_of, has_digest
from oncelog.stores.postgres.verifying_keys import HashColumns
from oncelog.stores.postgres.verifying_structure import check_lanes, check_shape
from oncelog.stores.protocol import Consumer
from oncelog.stores.side_state import Table
from oncelog.stores.verifying import whole
from oncelog.stores.verifying.findings import (
    DEFAULT_OPTIONS,
    ContradictionError,
    ExportedHead,
    Finding,
    Options,
    Progress,
)
from oncelog.stores.verifying.source import Row

SHORT_BYTES: Final = 65_536
"""A body that is longer comes alone, not in a page with others."""
ROWS_PAGE_ROWS: Final = 1000
_BODY: Final = 13


class DatabaseSource:
    """See `Source` for what each method promises."""

    def __init__(self, session: Looking, about: About) -> None:
        self._session = session
        self.about = about
        self.keys = HashColumns(session, about.index_secret)

    def check_structure(self) -> Iterator[Progress]:
        """As `Source` says. Indexes are not compared with their tables: `pg_amcheck` of PostgreSQL does that."""
        check_shape(self._session)
        check_lanes(self.heads(), self.about.settings.lanes)
        return iter(())

    def heads(self) -> dict[int, LaneHead]:
        """As `Source` says."""
        return {lane: LaneHead(*head) for lane, *head in self.rows("all_lanes")}

    def leaps(self) -> tuple[int, ...]:
        """As `Source` says."""
        return self._session.call(reading.leaps)

    def gaps(self) -> dict[int, LaneGaps]:
        """As `Source` says."""
        return self._session.call(reading.gaps)

    def rows(self, statement: str) -> Iterator[Row]:
        """As `Source` says."""
        return self._session.rows(SQL[statement], page_rows=ROWS_PAGE_ROWS)

    def rows_of(self, table: Table) -> Iterator[Row]:
        """As `Source` says."""
        columns = ", ".join(("lane", *table.keys, *table.values))
        order = f"ORDER BY lane, {', '.join(table.keys)}"
        if not has_digest(table):
            return self._session.rows(f"SELECT {columns} FROM oncelog_{table.name} {order}")  # noqa: S608
        # Apart, so that the short keys come from their index and are not sorted.
        both = [
            f"(SELECT {columns}, digest FROM oncelog_{table.name} WHERE digest IS {which} {order})"  # noqa: S608
            for which in ("NULL", "NOT NULL")
        ]
        return self._without_digests(table, self._session.rows(f"{' UNION ALL '.join(both)} {order}"))

    def _without_digests(self, table: Table, rows: Iterator[Row]) -> Iterator[Row]:
        width = 1 + len(table.keys)
        for *row, digest in rows:
            if digest != digest_of(row[1:width]):
                key = tuple(row[:width])
                raise ContradictionError(f"the table oncelog_{table.name} does not find {key!r} by its digest", row[0])
            yield tuple(row)

    def evidence(self) -> Iterator[Row]:
        """As `Source` says. The columns by which a record is found are compared on the way."""
        for *columns, body_bytes, key_hash, sequence_hash in self._session.rows(SQL["all_evidence"], SHORT_BYTES):
            if body_bytes is not None and body_bytes > SHORT_BYTES:
                found = self._session.first(SQL["body_at"], *columns[:2])
                columns[_BODY] = None if found is None else found[0]
            row = tuple(columns)
            self.keys.compare(row, key_hash, sequence_hash)
            yield row

    def first(self, statement: str, *parameters: Any) -> Row | None:
        """As `Source` says. Streams are found by an index of the records: its rows cannot be others."""
        return self._session.first(SQL[statement], *parameters) if statement in SQL else None

    def consumers(self) -> list[Consumer]:
        """As `Source` says."""
        return self._session.call(reading.consumers)


def verify_database(
    address: str, head: ExportedHead | None = None, options: Options = DEFAULT_OPTIONS
) -> Iterator[Finding]:
    """Goes through a log. The last finding is a Lie, the first one found, or Passed; before it comes Progress.

    Raises NotALogError, NewerSchemaError or StoreUnavailableError for what cannot be looked at. While it runs the
    server keeps row versions that it could otherwise clear away.
    """
    yield from whole.told(_verify_database(address, head, options))


def _verify_database(address: str, head: ExportedHead | None, options: Options) -> Iterator[Finding]:
    with looking_at(address) as (session, about):
        yield from whole.verify(DatabaseSource(session, about), head, options)
