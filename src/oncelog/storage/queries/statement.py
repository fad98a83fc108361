"""Requests that a shared query makes to its database.

A query is a generator: it yields a request, receives the rows, and returns a result. A driver runs it on a connection,
synchronously on SQLite (`sqlite/query_driver.py`) and with `await` on PostgreSQL (`postgres/query_driver.py`). Requests
refer to statements by name. The engines share most statements (`sql/queries.sql`), and each has additional ones.
"""

from collections.abc import Callable, Collection, Generator, Sequence
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any, Final, NamedTuple, TypeVar

from oncelog.core.values import Request
from oncelog.sql_files import parse_statements
from oncelog.storage.side_state import SideStateTable

T = TypeVar("T")

_SHARED_SQL: Final = files("oncelog.storage.queries") / "sql" / "queries.sql"
"""SQL that both engines use. Parameters are `$1`, `$2`, … as in PostgreSQL."""


def load_statements(directory: Traversable, parameter_prefix: str = "$") -> dict[str, str]:
    """Return an engine's statements by name: those in its directory, and the shared ones.

    Raises ValueError if both files define the same name.
    """
    shared = parse_statements(_SHARED_SQL.read_text(encoding="utf-8").replace("$", parameter_prefix))
    own = parse_statements((directory / "queries.sql").read_text(encoding="utf-8"))
    if shared.keys() & own.keys():
        raise ValueError(f"SQL statements have two definitions: {sorted(shared.keys() & own.keys())}")
    return shared | own


class Statement:
    """Requests all rows of a statement. A list parameter is passed as an array to PostgreSQL and as JSON to SQLite."""

    __slots__ = ("name", "parameters")

    def __init__(self, name: str, *parameters: Any) -> None:
        self.name = name
        self.parameters = parameters


class PagedStatement(Statement):
    """Requests rows up to and including the first one that exceeds `limit` rows, or `bytes_max` bytes in one column.

    That row shows that there are more. The answer has at least two rows if the statement produces two.
    """

    __slots__ = ("bytes_max", "limit", "size_column")

    def __init__(self, name: str, *parameters: Any, size_column: int, limit: int, bytes_max: int) -> None:
        super().__init__(name, *parameters)
        self.size_column = size_column
        self.limit = limit
        self.bytes_max = bytes_max


class TableRows(NamedTuple):
    """Requests rows of a side-state table. The answer is a dictionary of the keys that have a row."""

    table: SideStateTable
    keys: Collection[Any]
    lanes: int


class TableSlice(NamedTuple):
    """Requests the next rows of a table after a cursor. The answer is the rows, and the cursor of the next slice.

    A row has lane, key and values. The engine defines the cursor; None means the start, and is also returned after the
    last row.
    """

    table: SideStateTable
    lane: int | None
    after: Any
    rows_max: int


class RowsStatement(NamedTuple):
    """Runs a statement for each row.

    PostgreSQL receives the columns of all rows as arrays. The request produces no answer.
    """

    name: str
    rows: Sequence[tuple[Any, ...]]


class CommitBatch(NamedTuple):
    """Plans a batch in the query's transaction and stores the changes. The answer is a `BatchResult`."""

    batch: Sequence[Request]


class DeleteRows(NamedTuple):
    """Deletes rows of a table by key, each with its lane. The request produces no answer."""

    table: SideStateTable
    keys: Sequence[tuple[Any, ...]]


QuerySteps = Generator[Statement | RowsStatement | TableRows | TableSlice | DeleteRows | CommitBatch, Any, T]
"""A running query. `T` is the type of its result."""
SharedQuery = Callable[..., QuerySteps[T]]
"""Starts a query. The driver can start it again after a connection is lost."""
