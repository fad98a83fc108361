"""Reading merged rows page by page, inside a transaction."""

from typing import Any, Final

from oncelog.core.values import Settings
from oncelog.stores.protocol import RowPage
from oncelog.stores.side_state import lane_of_scope, row_of
from oncelog.stores.sqlite.statements import SQL

_FETCH: Final = 100
_FETCH_MIN: Final = 4


def rows(connection: Any, bounds: tuple[str, str, tuple[str, str], int, int], settings: Settings) -> RowPage:
    """A page of a scope's rows: scope, table (or all), after which, how many, how many bytes."""
    scope, table, (after_table, after_row), limit, bytes_max = bounds
    lane = lane_of_scope(scope, settings.lanes)
    if table:
        begun = after_row if after_table == table else ""
        cursor = connection.execute(SQL["row_page_of_table"], (lane, scope, table, begun))
    else:
        cursor = connection.execute(SQL["row_page"], (lane, scope, after_table, after_row))
    found: list[tuple[str, str, bytes]] = []
    size = 0
    many = _FETCH_MIN  # as with entities: rows can be long
    while len(found) <= limit and size <= bytes_max and (more := cursor.fetchmany(min(many, limit + 1 - len(found)))):
        found.extend(more)
        size += sum(len(state) for _, _, state in more)
        many = max(1, min(_FETCH, 1 + (bytes_max - size) * len(found) // max(1, size)))
    cursor.close()
    shown = [(name, row_id, row_of(state)) for name, row_id, state in found]
    return RowPage.of(shown, limit, has_more=size > bytes_max)
