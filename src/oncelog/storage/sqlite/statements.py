"""The statements of SQLite by name, the migrations in their order, and transactions."""

import logging
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.resources import files
from itertools import chain, islice
from typing import Any, Final

from oncelog.sql_files import list_scripts
from oncelog.storage.queries.statement import load_statements

logger: Final = logging.getLogger("oncelog.sqlite")

_SQL: Final = files("oncelog.storage.sqlite") / "sql"
SQL: Final = load_statements(_SQL, parameter_prefix="?")
ROWS_MAX: Final = 64
"""How many rows a statement inserts at most: then a row costs about half of what it does alone, and a little less than
with 16; beyond that nothing is gained."""


def load_migrations() -> list[tuple[int, str]]:
    """Each version's number and script, oldest first."""
    return list_scripts(_SQL / "migrations")


@contextmanager
def transaction(connection: Any, begin: str = "BEGIN IMMEDIATE") -> Iterator[None]:
    """Run the block in a transaction, and roll the transaction back if the block or COMMIT fails."""
    connection.execute(begin)
    try:
        yield
        connection.execute("COMMIT")
    finally:
        if connection.in_transaction:
            roll_back(connection)


def roll_back(connection: Any) -> None:
    """Roll back the open transaction. An error is only logged, because the caller raises the error that led here."""
    try:
        connection.execute("ROLLBACK")
    except sqlite3.Error:
        logger.debug("ROLLBACK failed; the connection will be closed", exc_info=True)


class BulkInsert:
    """Inserts rows, many a statement: every call into SQLite lets go of the interpreter and must wait for it again.

    One that fails leaves the rows before it (OR FAIL), and the caller rolls its transaction back. To undo the statement
    alone, as it would by default, SQLite copies every page before the first change: a row among others took three times
    as long.
    """

    def __init__(self, table: str, columns: tuple[str, ...], on_conflict: str = "") -> None:
        mark = f"({', '.join('?' * len(columns))})"
        single_row = f"INSERT OR FAIL INTO {table} ({', '.join(columns)}) VALUES {mark}"  # noqa: S608
        sizes = [1 << bit for bit in reversed(range(ROWS_MAX.bit_length()))]
        self._largest, *self._smaller = [(size, single_row + f", {mark}" * (size - 1) + on_conflict) for size in sizes]
        """Each half as large as the one before: few, so that each is prepared once, and few make any number."""

    def __call__(self, connection: Any, rows: Iterable[tuple[Any, ...]], count: int) -> None:
        """Inserts so many rows in their order. They may be made one by one as they are needed."""
        values = iter(rows)
        size, statement = self._largest
        while count >= size:
            connection.execute(statement, tuple(chain.from_iterable(islice(values, size))))
            count -= size
        for size, statement in self._smaller if count else ():
            if count & size:
                connection.execute(statement, tuple(chain.from_iterable(islice(values, size))))
