"""Shared queries behave the same on both databases."""

import sqlite3
from collections.abc import Callable, Generator
from contextlib import closing
from typing import Any

import asyncpg
import pytest

from oncelog.storage.postgres import query_driver as postgres_driver
from oncelog.storage.postgres.statements import SQL as POSTGRES_SQL
from oncelog.storage.queries.statement import PagedStatement, QuerySteps, Statement, load_statements
from oncelog.storage.sqlite import query_driver as sqlite_driver
from oncelog.storage.sqlite.statements import SQL as SQLITE_SQL

Run = Callable[..., Any]
SUM = {"sqlite": "SELECT sum(value) FROM json_each(?1)", "postgres": "SELECT sum(n) FROM unnest($1::bigint[]) AS n (n)"}
ECHO = {"sqlite": "SELECT ?1", "postgres": "SELECT $1::text"}


def add(numbers: list[int], text: str) -> QuerySteps[tuple[int, list[str]]]:
    rows = yield Statement("test_sum", numbers)
    texts = yield Statement("test_echo", text)
    return int(rows[0][0]), [value for (value,) in texts]


def fail() -> QuerySteps[None]:
    yield Statement("test_echo", "a")
    raise LookupError("nothing")


@pytest.fixture
def statements(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, texts in (("test_sum", SUM), ("test_echo", ECHO)):
        monkeypatch.setitem(SQLITE_SQL, name, texts["sqlite"])
        monkeypatch.setitem(POSTGRES_SQL, name, texts["postgres"])


@pytest.fixture
def on_sqlite() -> Generator[Run, None, None]:
    with closing(sqlite3.connect(":memory:")) as connection:
        yield lambda query, *arguments: sqlite_driver.run_query(connection, query, *arguments)


@pytest.mark.usefixtures("statements")
def test_statement_returns_typed_rows_on_sqlite(on_sqlite: Run) -> None:
    assert on_sqlite(add, [1, 2, 3], "a\0") == (6, ["a\0"])
    with pytest.raises(LookupError, match="nothing"):
        on_sqlite(fail)


@pytest.mark.usefixtures("statements")
async def test_statement_returns_typed_rows_on_postgres(database: str) -> None:
    connection = await asyncpg.connect(database)
    try:
        assert await postgres_driver.run_query(connection, add, [1, 2, 3], "a") == (6, ["a"])
        assert await postgres_driver.run_query(connection, add, [1], "a\0") == (1, [])  # no name contains U+0000
        with pytest.raises(LookupError, match="nothing"):
            await postgres_driver.run_query(connection, fail)
    finally:
        await connection.close()


def test_page_on_sqlite_ends_with_the_first_row_beyond_its_bounds(
    on_sqlite: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SQLITE_SQL, "test_page", "SELECT value FROM json_each(?1)")

    def page(limit: int, bytes_max: int) -> QuerySteps[list[str]]:
        texts = ["aaa", "b", "", "c", "dddd"]
        rows = yield PagedStatement("test_page", texts, size_column=0, limit=limit, bytes_max=bytes_max)
        return [text for (text,) in rows]

    assert on_sqlite(page, 9, 99) == ["aaa", "b", "", "c", "dddd"]
    assert on_sqlite(page, 2, 99) == ["aaa", "b", ""]
    assert on_sqlite(page, 9, 4) == ["aaa", "b", "", "c"]
    assert on_sqlite(page, 9, 1) == ["aaa", "b"]  # the first row is in every page


def test_statement_with_two_definitions_is_refused(tmp_path: Any) -> None:
    (tmp_path / "queries.sql").write_text("-- name: lane_head\nSELECT 1;\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"two definitions: \['lane_head'\]"):
        load_statements(tmp_path)
