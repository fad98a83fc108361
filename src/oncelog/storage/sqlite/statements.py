"""SQLite statements by name, and migrations in order."""

from collections.abc import Iterable
from importlib.resources import files
from itertools import chain, islice
from typing import Any, Final

from oncelog.sql_files import list_scripts
from oncelog.storage.queries.statement import load_statements

_SQL: Final = files("oncelog.storage.sqlite") / "sql"
SQL: Final = load_statements(_SQL, parameter_prefix="?")
ROWS_MAX: Final = 64
"""Maximum rows per INSERT. A row then costs half as much as in a single-row INSERT, and slightly less than with 16
rows. Larger statements save nothing more."""


def load_migrations() -> list[tuple[int, str]]:
    """Return the number and script of each schema version, oldest first."""
    return list_scripts(_SQL / "migrations")


class BulkInsert:
    """Inserts many rows per statement, because every call into SQLite releases the GIL and has to reacquire it.

    A failed statement leaves its first rows behind (OR FAIL), and the caller rolls the transaction back. SQLite's
    default, which can undo a single statement, copies every page before its first change: a row in the middle of a
    table took three times as long.
    """

    def __init__(self, table: str, columns: tuple[str, ...], on_conflict: str = "") -> None:
        mark = f"({', '.join('?' * len(columns))})"
        single_row = f"INSERT OR FAIL INTO {table} ({', '.join(columns)}) VALUES {mark}"  # noqa: S608
        sizes = [1 << bit for bit in reversed(range(ROWS_MAX.bit_length()))]
        self._largest, *self._smaller = [(size, single_row + f", {mark}" * (size - 1) + on_conflict) for size in sizes]
        """Statements for row counts that are powers of two: few enough to stay prepared, but enough for any count."""

    def __call__(self, connection: Any, rows: Iterable[tuple[Any, ...]], count: int) -> None:
        """Insert `count` rows in order. The iterable may create the rows lazily."""
        values = iter(rows)
        size, statement = self._largest
        while count >= size:
            connection.execute(statement, tuple(chain.from_iterable(islice(values, size))))
            count -= size
        for size, statement in self._smaller if count else ():
            if count & size:
                connection.execute(statement, tuple(chain.from_iterable(islice(values, size))))
