"""Queries for merged rows, page by page, inside a transaction."""

from typing import Any

from oncelog.core.merge import Row
from oncelog.core.row_codec import decode_row
from oncelog.core.values import Settings
from oncelog.storage.side_state import lane_of_scope
from oncelog.storage.sqlite.statements import SQL
from oncelog.storage.store import RowPage


def list_rows(connection: Any, bounds: tuple[str, str, tuple[str, str], int, int], settings: Settings) -> RowPage:
    """A page of a scope's rows: scope, table (or all), after which, how many, how many bytes."""
    scope, table, (after_table, after_row), limit, bytes_max = bounds
    lane = lane_of_scope(scope, settings.lanes)
    if table:
        start_row = after_row if after_table == table else ""
        cursor = connection.execute(SQL["row_page_of_table"], (lane, scope, table, start_row))
    else:
        cursor = connection.execute(SQL["row_page"], (lane, scope, after_table, after_row))
    found: list[tuple[str, str, Row]] = []
    lengths: list[int] = []
    size = 0
    for name, row_id, state in cursor:  # one by one, as with entities: the next can be longer than all before
        found.append((name, row_id, decode_row(state)))
        lengths.append(len(state))
        size += len(state)
        if len(found) > limit or (size > bytes_max and len(found) > 1):  # a first one is given, however long
            break
    cursor.close()
    return RowPage.from_rows(found, lengths, limit, bytes_max)
