"""Runs shared queries (`storage/queries`) on an asyncpg connection."""

from typing import Any, TypeVar

from oncelog.storage.postgres.side_state_tables import delete_rows, load_slice, load_table, to_columns
from oncelog.storage.postgres.statements import SQL
from oncelog.storage.queries.statement import (
    CommitBatch,
    DeleteRows,
    PagedStatement,
    RowsStatement,
    SharedQuery,
    Statement,
    TableRows,
    TableSlice,
)

T = TypeVar("T")


async def run_query(connection: Any, query: SharedQuery[T], *arguments: Any, commit: Any = None) -> T:
    """Run a query and return its result. `commit` commits batches, in queries of a write transaction."""
    steps = query(*arguments)
    try:
        request = next(steps)
        while True:
            match request:
                case Statement():
                    request = steps.send(await _fetch(connection, request))
                case RowsStatement():
                    await connection.execute(SQL[request.name], *to_columns(request.rows))
                    request = steps.send(None)
                case CommitBatch():
                    request = steps.send(await commit(connection, request.batch))
                case TableRows():
                    request = steps.send(await load_table(connection, request.table, request.keys, request.lanes))
                case TableSlice():
                    request = steps.send(await load_slice(connection, request))
                case DeleteRows():
                    await delete_rows(connection, request.table, request.keys)
                    request = steps.send(None)
    except StopIteration as end:
        result: T = end.value
        return result


async def _fetch(connection: Any, statement: Statement) -> list[Any]:
    parameters = statement.parameters
    if not all(is_storable(value) for value in parameters if type(value) is str):
        return []
    if isinstance(statement, PagedStatement):
        parameters = (*parameters, statement.limit + 1, statement.bytes_max)
    rows: list[Any] = await connection.fetch(SQL[statement.name], *parameters)
    return rows


def is_storable(name: str) -> bool:
    """Return whether PostgreSQL can store a string. It rejects U+0000, so a query for such a name finds nothing."""
    return "\0" not in name
