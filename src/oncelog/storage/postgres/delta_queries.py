"""Queries for merged rows, page by page."""

from typing import Any

from oncelog.core.row_codec import decode_row
from oncelog.core.values import Settings
from oncelog.storage.postgres import record_queries
from oncelog.storage.postgres.statements import SQL
from oncelog.storage.side_state import lane_of_scope
from oncelog.storage.store import RowPage


async def list_rows(connection: Any, bounds: tuple[str, str, tuple[str, str], int, int], settings: Settings) -> RowPage:
    """A page of a scope's rows: scope, table (or all), after which, how many, how many bytes."""
    scope, table, after, limit, bytes_max = bounds
    if not all(map(record_queries.is_storable, (scope, table, *after))):
        return RowPage([], has_more=False)
    lane = lane_of_scope(scope, settings.lanes)
    if table and after[0] != table:
        after = (table, "")
    statement = SQL["row_page_of_table" if table else "row_page"]
    found = await connection.fetch(statement, lane, scope, *after, limit + 1, bytes_max)
    lengths = [len(row[2]) for row in found]
    return RowPage.from_rows([(row[0], row[1], decode_row(row[2])) for row in found], lengths, limit, bytes_max)
