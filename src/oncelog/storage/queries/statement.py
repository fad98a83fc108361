"""What a query asks of its database.

A query is a generator: it yields a request, receives the rows, and returns a result. A driver runs it on a connection:
without waiting on SQLite (`sqlite/query_driver.py`), with `await` on PostgreSQL (`postgres/query_driver.py`).
Statements go by name; each engine has its own SQL for them, or both share it (`sql/queries.sql`).
"""

from collections.abc import Callable, Collection, Generator, Sequence
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any, Final, NamedTuple, TypeVar

from oncelog.sql_files import parse_statements
from oncelog.storage.side_state import SideStateTable

T = TypeVar("T")

_SHARED_SQL: Final = files("oncelog.storage.queries") / "sql" / "queries.sql"
"""The SQL that both engines share. Parameters are `$1`, `$2`, … as PostgreSQL writes them."""


def load_statements(directory: Traversable, parameter_prefix: str = "$") -> dict[str, str]:
    """Return the statements of an engine by name: those in its directory, and the shared ones.

    Raises ValueError for a name that stands in both files.
    """
    shared = parse_statements(_SHARED_SQL.read_text(encoding="utf-8").replace("$", parameter_prefix))
    own = parse_statements((directory / "queries.sql").read_text(encoding="utf-8"))
    if shared.keys() & own.keys():
        raise ValueError(f"SQL statements have two definitions: {sorted(shared.keys() & own.keys())}")
    return shared | own


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


class TableRows(NamedTuple):
    """Asks for rows of a side-state table. The answer is a dictionary with the keys that have a row."""

    table: SideStateTable
    keys: Collection[Any]
    lanes: int


class TableSlice(NamedTuple):
    """Asks for the next rows of a table after a cursor. The answer is the rows, and the cursor of the next slice.

    A row has lane, key and values. The engine defines cursors; None is the start, and follows the last row.
    """

    table: SideStateTable
    lane: int | None
    after: Any
    rows_max: int


class DeleteRows(NamedTuple):
    """Deletes rows of a table by key, each with its lane. Answered with None."""

    table: SideStateTable
    keys: Sequence[tuple[Any, ...]]


QuerySteps = Generator[Statement | TableRows | TableSlice | DeleteRows, Any, T]
"""A query in progress. `T` is the type of its result."""
SharedQuery = Callable[..., QuerySteps[T]]
"""Starts a query. It can be started again, after a connection was lost."""
