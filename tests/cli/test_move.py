"""`oncelog move`: output, refusals and interrupts, and how other commands treat a moved file."""

import asyncio
import json
import signal
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from cli.processes import ENVIRONMENT, Command
from cli.runner import COMMAND, RUNNER, Result
from cli.sample_log import make_log
from cli.server_process import oncelog
from databases import address_of, query
from oncelog.storage.address import BAD_ADDRESS, redact_address
from oncelog.storage.sqlite.database_file import SCHEMA_VERSION
from oncelog.testing.postgres_proxy import PostgresProxy
from storage.sqlite.writers import make_older

INTERRUPTED = """
import sys
from storage.migrate.migration_worker import stop_at_point, use_small_slices
use_small_slices()
stop_at_point("target.save_slice.after", 3, sys.argv.pop(1))
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from oncelog.cli import main
main()
"""

HURRIED = """
import signal
import sys
from oncelog.storage.migrate import target
target.LOCKED_CALL_TIMEOUT_MS = int(sys.argv.pop(1))
target.RECORD_EXTRA_US = 0
signal.signal(signal.SIGINT, signal.default_int_handler)
{}
from oncelog.cli import main
main()
"""
IN_THE_LOOP = ""
IN_ANOTHER_THREAD = """
import threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM])
"""
"""Another thread receives the signal, so that no system call of the event loop is interrupted."""
IN_THE_DRIVER = """
import os
from asyncio.selector_events import _SelectorSocketTransport as Transport
write = Transport.write
def write_and_signal(transport, data):
    write(transport, data)
    if b"DELETE FROM oncelog_leases" in bytes(data):
        os.kill(os.getpid(), int(os.environ["NUMBER"]))
Transport.write = write_and_signal
"""
"""The signal arrives inside asyncpg, directly after the statement is sent."""

REPEATEDLY_INTERRUPTED = """
import asyncio
import os
import signal
import threading
from oncelog.storage.migrate.source import MigrationSource
signal.signal(signal.SIGINT, signal.default_int_handler)
turn, is_waiting = asyncio.wait, threading.Event()
async def wait(*arguments, **options):
    is_waiting.set()
    return await turn(*arguments, **options)
asyncio.wait = wait
read = MigrationSource._read_slice
def send_signals(source, *arguments):
    MigrationSource._read_slice = read
    for _ in range(3):
        is_waiting.clear()
        os.kill(os.getpid(), int(os.environ["NUMBER"]))
        if not is_waiting.wait(300):
            os.write(2, b"the command does not wait for the file any more\\n")
    return read(source, *arguments)
MigrationSource._read_slice = send_signals
from oncelog.cli import main
main()
"""
"""Sends three signals while a thread reads the file, each after the previous one was handled."""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "log.db"
    make_log(path, rounds=4)
    return path


def move(log: Path | str, address: Path | str) -> Result:
    return RUNNER.invoke(COMMAND, ["move", str(log), str(address)])


def test_move_prints_the_number_of_records_and_the_target(log: Path, database: str) -> None:
    with closing(sqlite3.connect(log)) as connection:
        connection.execute("CREATE TABLE accounts (name TEXT)")
        (records,) = connection.execute("SELECT count(*) FROM oncelog_records").fetchone()
        (epoch,) = connection.execute("SELECT epoch FROM oncelog_log").fetchone()
    done = move(log, database)
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines() == [
        f"{records} records in 5 lanes moved from {log} to {redact_address(database)} (epoch {epoch})",
        f"{log} can still be read, but accepts no more writes: open {redact_address(database)}",
        f"other tables remain in {log}: accounts",
    ]
    again = move(log, database)
    assert again.exit_code == 0
    assert again.stdout == (f"{log} has already been moved to {redact_address(database)} (epoch {epoch})\n")


def test_reading_commands_work_on_a_moved_file(log: Path, database: str, tmp_path: Path) -> None:
    before = RUNNER.invoke(COMMAND, ["head", str(log)]).stdout
    move(log, database)
    assert RUNNER.invoke(COMMAND, ["head", str(log)]).stdout == before
    (tmp_path / "head.json").write_text(before)
    copy = str(tmp_path / "copy.db")
    for command in (
        ["verify", str(log), "--head", str(tmp_path / "head.json")],
        ["show", str(log), "0:1"],
        ["stats", str(log)],
        ["clock", str(log)],
        ["backup", str(log), copy],
        ["verify", copy],
        ["verify", database, "--head", str(tmp_path / "head.json")],
    ):
        done = RUNNER.invoke(COMMAND, command)
        assert done.exit_code == 0, (command, done.output)
    done = RUNNER.invoke(COMMAND, ["clock", str(log), "--confirm"])
    assert done.exit_code == 2
    assert f"has been moved to {redact_address(database)}: open the log there" in done.stderr


def test_restored_copy_of_a_moved_file_can_be_opened(log: Path, database: str, tmp_path: Path) -> None:
    move(log, database)
    restored = str(tmp_path / "restored.db")
    assert RUNNER.invoke(COMMAND, ["restore", str(log), restored]).exit_code == 0
    assert RUNNER.invoke(COMMAND, ["clock", restored, "--confirm"]).exit_code == 0
    assert move(restored, address_of(tmp_path / "another")).exit_code == 0


@pytest.mark.parametrize("how", ["term", "int"])
def test_interrupted_move_prints_how_to_resume(log: Path, database: str, how: str) -> None:
    done = oncelog(how, "move", str(log), database, program=INTERRUPTED)
    assert done.returncode == 128 + signal.SIGINT, done.stderr
    assert done.stderr == "oncelog: interrupted. Run the same command again to continue.\n"
    assert done.stdout == ""
    assert 0 < query(database, "SELECT count(*) FROM oncelog_records")[0][0] < 40
    assert move(log, database).exit_code == 0


async def run_stalled_move(
    log: Path, database: str, limit_ms: int, number: int = 0, where: str = IN_THE_LOOP
) -> tuple[int | None, str]:
    """Run a move that gets no more answers after it has locked the file, and return its exit status and standard error.

    Unless `number` is 0, the move is also sent this signal.
    """
    environment = {**ENVIRONMENT, "NUMBER": str(int(number))}
    async with PostgresProxy(database) as proxy:
        held = proxy.hold("DELETE FROM oncelog_leases")
        arguments = [str(limit_ms), "move", str(log), proxy.address]
        with Command(*arguments, program=HURRIED.format(where), environment=environment) as moving:
            ending = asyncio.ensure_future(asyncio.to_thread(moving.communicate))
            reaching = asyncio.ensure_future(held.wait_reached())
            try:
                # On a slow machine, the limit may stop the command at an earlier statement.
                await asyncio.wait({reaching, ending}, return_when=asyncio.FIRST_COMPLETED)
                if number and where is not IN_THE_DRIVER:
                    moving.send_signal(number)
                _, output = await ending
            finally:
                reaching.cancel()
                moving.kill()
        return moving.returncode, output.replace(redact_address(proxy.address), "DATABASE")


def check_unlocked(log: Path) -> None:
    with closing(sqlite3.connect(log, timeout=0, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")


async def continue_move(log: Path, database: str) -> None:
    done = await asyncio.to_thread(oncelog, "move", str(log), database)
    assert done.returncode == 0, done.stderr


async def test_silent_database_does_not_keep_the_file_locked(log: Path, database: str) -> None:
    status, output = await run_stalled_move(log, database, limit_ms=1_000)
    assert status == 2
    assert output == "oncelog: DATABASE: no response within 1 seconds. Run the same command again to continue.\n"
    check_unlocked(log)
    await continue_move(log, database)


@pytest.mark.parametrize("where", [IN_THE_LOOP, IN_ANOTHER_THREAD, IN_THE_DRIVER], ids=["loop", "thread", "driver"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_interrupted_move_does_not_wait_for_the_database(
    log: Path, database: str, number: int, where: str
) -> None:
    status, output = await run_stalled_move(log, database, limit_ms=3_600_000, number=number, where=where)
    assert status == 128 + signal.SIGINT
    assert output == "oncelog: interrupted. Run the same command again to continue.\n"
    check_unlocked(log)
    await continue_move(log, database)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_repeated_interrupts_end_a_move_only_once(log: Path, database: str, number: int) -> None:
    """The command must not close the file while a thread reads it."""
    done = oncelog("move", str(log), database, program=REPEATEDLY_INTERRUPTED, NUMBER=str(int(number)))
    assert done.stderr == "oncelog: interrupted. Run the same command again to continue.\n"
    assert done.returncode == 128 + signal.SIGINT
    assert done.stdout == ""
    check_unlocked(log)
    assert move(log, database).exit_code == 0


def expect_refusal(log: Path | str, address: Path | str) -> str:
    done = move(log, address)
    assert done.exit_code == 2, done.output
    assert done.stdout == ""
    assert done.stderr.startswith("oncelog: ")
    return done.stderr


def test_move_from_or_to_an_unsupported_place_is_refused(log: Path, database: str, tmp_path: Path) -> None:
    for one, other in ((log, tmp_path / "other.db"), (database, log), (database, database)):
        assert "a log moves from a file to a database" in expect_refusal(one, other)
    assert not (tmp_path / "other.db").exists()


def test_unusable_source_file_is_refused(log: Path, database: str, tmp_path: Path) -> None:
    assert "does not exist" in expect_refusal(tmp_path / "missing.db", database)
    (tmp_path / "text.db").write_text("Dear diary\n" * 100)
    assert "not an SQLite database" in expect_refusal(tmp_path / "text.db", database)
    with closing(sqlite3.connect(log, isolation_level=None)) as connection:
        connection.execute("UPDATE oncelog_log SET schema_version = 99")
    assert "newer Oncelog" in expect_refusal(log, database)
    with closing(sqlite3.connect(log, isolation_level=None)) as connection:
        connection.execute("UPDATE oncelog_log SET schema_version = ?", (SCHEMA_VERSION,))
    make_older(log)
    assert "Open the log once with this version to migrate the file" in expect_refusal(log, database)
    log.write_bytes(log.read_bytes()[:-8192])
    assert "oncelog: " in expect_refusal(log, database)
    assert query(database, "SELECT to_regclass('oncelog_log')") == [(None,)]


def test_unusable_target_database_is_refused(log: Path, database: str) -> None:
    before = log.read_bytes()
    nobody = "postgresql://postgres:secret@127.0.0.1:1/postgres"
    output = expect_refusal(log, nobody)
    assert "postgresql://postgres@127.0.0.1:1/postgres" in output
    assert "secret" not in output
    assert "does not exist" in expect_refusal(log, database.replace("/postgres?", "/nowhere?"))
    assert "no schema in the connection's search_path exists" in expect_refusal(log, database + "x")
    assert "oncelog: " in expect_refusal(log, database + "&default_transaction_read_only=on")  # like a standby
    other = address_of(log / "other")
    another = log.with_name("another.db")
    make_log(another, rounds=1)
    assert move(another, other).exit_code == 0
    assert "contains another log" in expect_refusal(log, other)
    assert log.read_bytes() == before


@pytest.mark.parametrize(
    "address",
    [
        "postgresql://u:pa/ss@h/app",  # password is not percent-encoded
        "postgresql://u:pa#ss@h/app",
        "postgresql://u:pa?ss@h/app",
        "postgresql://u:pa[ss@h/app",
        "postgresql://u:pa\u2100ss@h/app",
        "postgresql://u:pass@h:port/app",
        "postgresql://u:pass@127.0.0.1:1,127.0.0.1:port/app",
        "postgresql://127.0.0.1:1/ss@h/app",  # user 127.0.0.1 with the password 1/ss
    ],
)
def test_error_for_a_malformed_address_does_not_reveal_the_password(log: Path, address: str) -> None:
    assert expect_refusal(log, address) == f"oncelog: {BAD_ADDRESS}\n"


def test_moved_file_records_its_target(log: Path, database: str) -> None:
    move(log, database)
    with closing(sqlite3.connect(log)) as connection:
        (text,) = connection.execute("SELECT moved FROM oncelog_state").fetchone()
    assert json.loads(text)["target"] == redact_address(database)
