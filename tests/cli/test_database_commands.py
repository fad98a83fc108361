"""Commands report an unreadable database in one line, without the password."""

import builtins
import importlib
import socket
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from cli import sample_log
from cli.password_server import PasswordServer
from cli.runner import COMMAND, RUNNER
from cli.server_process import oncelog
from databases import query, server_address

COMMANDS = (
    ["verify"],
    ["head"],
    ["stats"],
    ["clock"],
    ["clock", "--confirm"],
    ["show", "0:1"],
    ["epoch"],
    ["epoch", "--renew"],
)


def expect_refusal(address: str, words: str, status: int = 2) -> None:
    for name, *arguments in COMMANDS:
        done = RUNNER.invoke(COMMAND, [name, address, *arguments])
        assert done.exit_code == status, (name, done.output)
        assert words in done.stderr, (name, done.stderr)
        assert done.stderr.count("\n") == 1
        assert done.stderr.startswith("oncelog: ")
        assert "secret" not in done.output


def test_commands_create_no_log_in_an_empty_database(database: str) -> None:
    expect_refusal(database, "contains no log")
    schema = database.rpartition("=")[2]
    assert query(database, "SELECT count(*) FROM pg_class WHERE relnamespace = $1::text::regnamespace", schema) == [
        (0,)
    ]


def test_foreign_table_with_the_name_of_the_log_is_refused(database: str) -> None:
    query(database, "CREATE TABLE oncelog_log (x integer)")
    expect_refusal(database, "a table oncelog_log that belongs to another program")


def test_newer_schema_is_refused(database: str) -> None:
    sample_log.make_log(database, rounds=0)
    query(database, "UPDATE oncelog_log SET schema_version = 99")
    expect_refusal(database, "newer Oncelog (schema 99")


def test_log_of_an_unfinished_move_is_refused(database: str) -> None:
    sample_log.make_log(database, rounds=0)
    query(database, "UPDATE oncelog_state SET move = 'x'")
    expect_refusal(database, "has not finished: run `oncelog move` again")


def test_older_schema_is_refused(database: str) -> None:
    sample_log.make_log(database, rounds=0)
    query(database, "UPDATE oncelog_log SET schema_version = 0")
    for command in ("verify", "stats"):
        done = RUNNER.invoke(COMMAND, [command, database])
        assert done.exit_code == 2
        assert "has schema 0, and this version reads schema" in done.stderr


def test_missing_state_row_is_reported_as_damage(database: str) -> None:
    sample_log.make_log(database, rounds=0)
    query(database, "DELETE FROM oncelog_state")
    for command in ("stats", "clock", "verify", "head"):
        done = RUNNER.invoke(COMMAND, [command, database])
        assert done.exit_code == (1 if command == "verify" else 2)
        assert "has no row" in done.output


def test_missing_table_is_reported_as_damage(database: str) -> None:
    sample_log.make_log(database, rounds=0)
    query(database, "DROP TABLE oncelog_lanes")
    for command in ("stats", "verify", "head"):
        done = RUNNER.invoke(COMMAND, [command, database])
        assert done.exit_code == (1 if command == "verify" else 2)
        assert "oncelog_lanes" in done.output


def test_unreachable_database_server_is_reported() -> None:
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))  # bound, but not listening
        port = taken.getsockname()[1]
        expect_refusal(f"postgresql://ann:secret@127.0.0.1:{port}/orders", "cannot be reached: ")


def test_missing_database_is_reported() -> None:
    expect_refusal(urlsplit(server_address())._replace(path="/nowhere").geturl(), 'database "nowhere" does not exist')


@pytest.mark.parametrize(
    "address",
    ["postgresql://ann:secret/orders", "postgresql://ann:se[secret@host/orders", "postgresql://h:secret@h:x/o"],
)
def test_malformed_address_is_refused(address: str) -> None:
    expect_refusal(address, "the address cannot be parsed")


def test_invalid_address_parameter_is_refused() -> None:
    expect_refusal("postgresql://ann:secret@127.0.0.1/orders?sslmode=nonsense", "`sslmode` parameter must be one of")


@pytest.fixture
def password_server() -> Iterator[PasswordServer]:
    with closing(PasswordServer()) as found:
        yield found


def test_wrong_password_is_reported(password_server: PasswordServer) -> None:
    expect_refusal(password_server.address, 'password authentication failed for user "ann"')


def test_interrupt_during_a_query_exits_with_130(database: str) -> None:
    sample_log.make_log(database, rounds=0)
    slow = (
        "import asyncio, os, signal, oncelog.storage.inspect.postgres as inspect\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "async def interrupted(*_):\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    await asyncio.Event().wait()\n"
        "inspect._fetch_page = interrupted\n"
        "from oncelog.cli import main\n"
        "main()\n"
    )
    done = oncelog("verify", database, program=slow)
    assert (done.returncode, done.stderr) == (130, "")


def test_missing_driver_is_reported_with_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def fail_import(name: str, *arguments: Any, **named: Any) -> Any:
        if name == "asyncpg":
            raise ModuleNotFoundError("No module named 'asyncpg'", name="asyncpg")
        return real(name, *arguments, **named)

    for name in [one for one in sys.modules if one.startswith("oncelog.storage.") and "postgres" in one]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", fail_import)
    importlib.invalidate_caches()
    expect_refusal("postgresql://ann:secret@127.0.0.1/orders", "pip install 'oncelog[postgres]'")


@pytest.mark.parametrize("address", ["postgresql://ann:secret@host/orders", "postgresql://ann:se[secret@host/orders"])
def test_backup_and_restore_of_a_database_refer_to_the_postgresql_tools(address: str, tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    for command in (["backup", address, str(path)], ["restore", str(path), address], ["restore", address, str(path)]):
        done = RUNNER.invoke(COMMAND, command)
        assert done.exit_code == 2
        assert "secret" not in done.output
        for words in ("pg_dump", "pg_basebackup", "oncelog epoch ADDRESS --renew"):
            assert words in done.stderr
    assert list(tmp_path.iterdir()) == []
