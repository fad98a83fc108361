"""Runs shared queries (`storage/queries`) on an sqlite3 connection."""

from collections.abc import Callable
from itertools import islice
from typing import Any, TypeVar

import orjson

from oncelog.storage.queries.statement import (
    CommitBatch,
    DeleteRows,
    PagedStatement,
    QuerySteps,
    RowsStatement,
    SharedQuery,
    Statement,
    TableRows,
    TableSlice,
)
from oncelog.storage.sqlite.side_state_tables import delete_rows, load_slice, load_table
from oncelog.storage.sqlite.statements import SQL

T = TypeVar("T")
LoadTable = Callable[..., dict[Any, Any]]


def run_query(connection: Any, query: SharedQuery[T], *arguments: Any) -> T:
    """Run a query and return its result. The connection should be in a transaction."""
    return run_steps(connection, query(*arguments))


def run_steps(connection: Any, steps: QuerySteps[T], load_rows: LoadTable = load_table, commit: Any = None) -> T:
    """Answer a query's requests until the query returns.

    `load_rows` answers requests for rows of side state. `commit` commits batches, in queries of a write transaction.
    """
    try:
        request = next(steps)
        while True:
            match request:
                case Statement():
                    request = steps.send(_fetch(connection, request))
                case RowsStatement():
                    connection.executemany(SQL[request.name], request.rows)
                    request = steps.send(None)
                case CommitBatch():
                    request = steps.send(commit(connection, request.batch))
                case TableRows():
                    request = steps.send(load_rows(connection, request.table, request.keys, request.lanes))
                case TableSlice():
                    request = steps.send(load_slice(connection, request.table, request.after, request.rows_max))
                case DeleteRows():
                    delete_rows(connection, request.table, request.keys)
                    request = steps.send(None)
    except StopIteration as end:
        result: T = end.value
        return result


def _fetch(connection: Any, statement: Statement) -> list[tuple[Any, ...]]:
    parameters = [orjson.dumps(value).decode() if type(value) is list else value for value in statement.parameters]
    cursor = connection.execute(SQL[statement.name], parameters)
    if isinstance(statement, PagedStatement):
        return _fetch_page(cursor, statement)
    rows: list[tuple[Any, ...]] = cursor.fetchall()
    return rows


def _fetch_page(cursor: Any, statement: PagedStatement) -> list[tuple[Any, ...]]:
    """Fetch the rows one by one, because any value can be long."""
    rows: list[tuple[Any, ...]] = []
    size = 0
    for row in islice(cursor, statement.limit + 1):
        rows.append(row)
        size += len(row[statement.size_column])
        if size > statement.bytes_max and len(rows) > 1:
            break
    cursor.close()
    return rows
