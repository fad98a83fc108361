"""What a query asks of its database.

A query is a generator: it yields a request, receives the rows, and returns a result. A driver runs it on a connection:
without waiting on SQLite (`sqlite/query_driver.py`), with `await` on PostgreSQL (`postgres/query_driver.py`).
Statements go by name; each engine has its own SQL for them, or both share it (`sql/queries.sql`).
"""

from collections.abc import Callable, Collection, Generator, Sequence
from typing import Any, TypeVar

from oncelog.storage.side_state import SideStateTable

T = TypeVar("T")


class Statement:
    """Asks for all rows of a statement. A parameter that is a list is an array on PostgreSQL, and JSON on SQLite."""

    __slots__ = ("name", "parameters")

    def __init__(self, name: str, *parameters: Any) -> None:
        self.name = name
        self.parameters = parameters


class PagedStatement(Statement):
    """Asks for the first rows of a statement, up to the first one beyond `limit` rows or `bytes_max` bytes of a column.

    That row tells the caller that there is more. At least two rows are returned, if there are two.
    """

    __slots__ = ("bytes_max", "limit", "size_column")

    def __init__(self, name: str, *parameters: Any, size_column: int, limit: int, bytes_max: int) -> None:
        super().__init__(name, *parameters)
        self.size_column = size_column
        self.limit = limit
        self.bytes_max = bytes_max


class TableRows:
    """Asks for rows of a side-state table. The answer is a dictionary with the keys that have a row."""

    __slots__ = ("keys", "lanes", "table")

    def __init__(self, table: SideStateTable, keys: Collection[Any], lanes: int) -> None:
        self.table = table
        self.keys = keys
        self.lanes = lanes


class TableSlice:
    """Asks for the next rows of a table after a cursor. The answer is the rows, and the cursor of the next slice.

    A row has lane, key and values. The engine defines cursors; None is the start, and follows the last row.
    """

    __slots__ = ("after", "lane", "rows_max", "table")

    def __init__(self, table: SideStateTable, lane: int | None, after: Any, rows_max: int) -> None:
        self.table = table
        self.lane = lane
        self.after = after
        self.rows_max = rows_max


class DeleteRows:
    """Deletes rows of a table by key, each with its lane. Answered with None."""

    __slots__ = ("keys", "table")

    def __init__(self, table: SideStateTable, keys: Sequence[tuple[Any, ...]]) -> None:
        self.table = table
        self.keys = keys


QuerySteps = Generator[Statement | TableRows | TableSlice | DeleteRows, Any, T]
"""A query in progress. `T` is the type of its result."""
SharedQuery = Callable[..., QuerySteps[T]]
"""Starts a query. It can be started again, after a connection was lost."""
