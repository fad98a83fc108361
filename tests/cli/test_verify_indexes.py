"""`oncelog verify` compares the indexes of a file with their tables, because a missing index entry hides a row."""

import re
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

import oncelog
from cli import sample_log
from cli.runner import COMMAND, RUNNER
from oncelog.core.operations import Relate
from oncelog.core.rules.audit import ERASE
from oncelog.core.values import OpenStream, RecordAct
from oncelog.testing.contract.assertions import assert_committed
from oncelog.testing.contract.writes import transaction

pytestmark = pytest.mark.rule("CO-44")

INDEXES = (
    "oncelog_member_changes_revision",
    "oncelog_members_joined",
    "oncelog_members_member",
    "oncelog_records_internal",
    "oncelog_relationships_subject",
)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("verify") / "log.db"
    sample_log.make_log(path)
    with oncelog.open_blocking(path) as log:
        log.submit(OpenStream("chat/verified", "user:ann"))
        assert_committed(log.submit(transaction(1, 1, Relate("doc", "owner", "ann"), scope="ledger/verified")))
        log.submit(RecordAct(act=ERASE, actor="user:root"))
    return path


@pytest.fixture
def copy(template: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(template, tmp_path / "log.db"))


def define_index(path: Path, name: str, definition: str) -> None:
    """Replace the definition of an index without changing its entries."""
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("PRAGMA writable_schema = ON")
        connection.execute("UPDATE sqlite_schema SET sql = ? WHERE name = ?", (definition, name))


def rebuild_index(path: Path, name: str, changed: str) -> None:
    """Build the entries of an index from a changed definition, and then restore its definition."""
    with closing(sqlite3.connect(path)) as connection:
        ((definition,),) = connection.execute("SELECT sql FROM sqlite_schema WHERE name = ?", (name,)).fetchall()
    head, columns = re.fullmatch(r"(.+?)(\(.+)", definition, re.DOTALL).groups()  # type: ignore[union-attr]
    define_index(path, name, head + changed if changed.startswith("(") else head + columns.partition(")")[0] + changed)
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute(f"REINDEX {name}")
    define_index(path, name, definition)


def verify(path: Path) -> str:
    done = RUNNER.invoke(COMMAND, ["verify", str(path)])
    assert done.exit_code == (0 if done.output.startswith("ok") else 1)
    return done.output


def test_every_index_is_covered_by_these_tests(template: Path) -> None:
    with closing(sqlite3.connect(template)) as connection:
        names = connection.execute("SELECT name FROM sqlite_schema WHERE type = 'index' AND sql IS NOT NULL ORDER BY 1")
        assert tuple(name for (name,) in names) == INDEXES
    assert verify(template).startswith("ok")


@pytest.mark.parametrize("name", INDEXES)
def test_missing_entries_of_an_index_are_found(copy: Path, name: str) -> None:
    rebuild_index(copy, name, ") WHERE lane < 0" if name != "oncelog_records_internal" else ") WHERE policy > 'z'")
    assert re.search(rf"missing from index {name}|entries in index {name}", verify(copy))


@pytest.mark.parametrize("name", INDEXES)
def test_changed_entries_of_an_index_are_found(copy: Path, name: str) -> None:
    columns = 6 if name == "oncelog_member_changes_revision" else 5
    rebuild_index(copy, name, f"({', '.join(['lane + 1'] * columns)})" if name != INDEXES[3] else "(place + 1)")
    assert name in verify(copy)


def test_application_index_on_unregistered_functions_is_accepted(copy: Path) -> None:
    with closing(sqlite3.connect(copy, isolation_level=None)) as connection:
        connection.create_function("shop_rank", 1, lambda value: value, deterministic=True)
        connection.execute("CREATE TABLE orders (x)")
        connection.execute("INSERT INTO orders VALUES (1)")
        connection.execute("CREATE INDEX orders_rank ON orders (shop_rank(x))")
    assert verify(copy).startswith("ok")
