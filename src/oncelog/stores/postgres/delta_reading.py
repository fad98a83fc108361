"""Reading merged rows page by page."""

from typing import Any, Final

from oncelog.core.merge import Row
from oncelog.core.values import Settings
from oncelog.stores.postgres import reading
from oncelog.stores.postgres.statements import SQL
from oncelog.stores.protocol import RowPage
from oncelog.stores.side_state import lane_of_scope, row_of

_FETCH_MIN: Final = 8


async def rows(connection: Any, bounds: tuple[str, str, tuple[str, str], int, int], settings: Settings) -> RowPage:
    """A page of a scope's rows: scope, table (or all), after which, how many, how many bytes."""
    scope, table, after, limit, bytes_max = bounds
    if not all(map(reading.can_be_stored, (scope, table, *after))):
        return RowPage([], has_more=False)
    lane = lane_of_scope(scope, settings.lanes)
    if table and after[0] != table:
        after = (table, "")
    found: list[tuple[str, str, Row]] = []
    size = 0
    asked = min(limit + 1, _FETCH_MIN)  # as with entities: rows can be long
    while len(found) <= limit and size <= bytes_max:
        statement = SQL["row_page_of_table" if table else "row_page"]
        more = await connection.fetch(statement, lane, scope, *after, asked)
        found.extend((row[0], row[1], row_of(row[2])) for row in more)
        size += sum(len(row[2]) for row in more)
        if len(more) < asked:
            return RowPage.of(found, limit)
        after = (more[-1][0], more[-1][1])
        asked = max(1, min(limit + 1 - len(found), 1 + (bytes_max - size) * len(found) // max(1, size)))
    return RowPage.of(found, limit, has_more=True)
