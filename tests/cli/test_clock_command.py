"""`oncelog clock`: detection and confirmation of clock jumps."""

import json
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest

from cli import sample_log
from cli.runner import COMMAND, RUNNER
from databases import query
from oncelog.storage.clock import SystemClock

MINUTE_MS = 60_000


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "log.db"
    sample_log.make_log(path, rounds=0)
    return path


def set_mark(path: Path, boot: str, elapsed_ms: int, time_ms: int) -> None:
    connection = sqlite3.connect(path)
    mark = (boot, elapsed_ms, time_ms)
    connection.execute("UPDATE oncelog_state SET clock_boot = ?, clock_elapsed_ms = ?, clock_time_ms = ?", mark)
    connection.commit()
    connection.close()


def read_mark(path: Path) -> tuple[Any, ...]:
    connection = sqlite3.connect(path)
    row: tuple[Any, ...] = connection.execute(
        "SELECT commits, clock_boot, clock_elapsed_ms, clock_time_ms FROM oncelog_state"
    ).fetchone()
    connection.close()
    return row


def run(*arguments: str) -> tuple[int, str]:
    done = RUNNER.invoke(COMMAND, ["clock", *arguments])
    assert done.stderr == ""
    return done.exit_code, done.stdout


@pytest.mark.rule("CO-17")
def test_clock_jump_is_reported_and_can_be_confirmed(log: Path) -> None:
    clock = SystemClock()
    set_mark(log, clock.boot(), clock.elapsed_ms() - MINUTE_MS, clock.wall_ms() - 60 * MINUTE_MS)
    status, output = run(str(log))
    assert status == 1
    assert "accepts no new writes" in output
    status, output = run(str(log), "--json")
    assert status == 1
    assert json.loads(output)["jumped"] is True
    before = read_mark(log)
    status, output = run(str(log), "--confirm")
    assert status == 0
    assert "is accepted" in output
    commits, boot, elapsed_ms, time_ms = read_mark(log)
    assert commits > before[0]
    assert boot == clock.boot()
    assert elapsed_ms <= clock.elapsed_ms()
    assert time_ms <= time.time_ns() // 1_000_000
    status, output = run(str(log))
    assert status == 0
    assert output.endswith("no jump was found\n")


@pytest.mark.rule("CO-17")
def test_clock_jump_threshold_is_configurable(log: Path) -> None:
    clock = SystemClock()
    set_mark(log, clock.boot(), clock.elapsed_ms() - MINUTE_MS, clock.wall_ms() - 60 * MINUTE_MS)
    status, output = run(str(log), "--jump-ms-max", str(61 * MINUTE_MS))
    assert status == 0
    assert output.endswith("no jump was found\n")
    status, output = run(str(log), "--jump-ms-max", str(58 * MINUTE_MS))
    assert status == 1
    assert f"(at most {58 * MINUTE_MS} are accepted)" in output
    set_mark(log, clock.boot(), clock.elapsed_ms(), clock.wall_ms() - 5 * MINUTE_MS)
    assert run(str(log))[0] == 0
    status, output = run(str(log), "--jump-ms-max", str(4 * MINUTE_MS), "--json")
    assert status == 1
    assert (json.loads(output)["jumped"], json.loads(output)["jump_ms_max"]) == (True, 4 * MINUTE_MS)
    assert RUNNER.invoke(COMMAND, ["clock", str(log), "--jump-ms-max", "0"]).exit_code == 2


def test_clock_command_without_confirm_changes_nothing(log: Path) -> None:
    before = log.read_bytes()
    run(str(log))
    assert log.read_bytes() == before
    assert [one.name for one in log.parent.iterdir()] == ["log.db"]


def test_clock_behind_the_log_is_reported(log: Path) -> None:
    clock = SystemClock()
    set_mark(log, clock.boot(), clock.elapsed_ms(), clock.wall_ms() + 60 * MINUTE_MS)
    status, output = run(str(log))
    assert status == 0
    assert "behind the log" in output


def test_reboot_and_missing_commits_are_reported_without_an_error(log: Path) -> None:
    clock = SystemClock()
    set_mark(log, "another", 5, clock.wall_ms() - 60 * MINUTE_MS)
    assert "has been restarted since" in run(str(log))[1]
    set_mark(log, "", 0, 0)
    status, output = run(str(log))
    assert status == 0
    assert "no commit yet" in output


# --- databases ---------------------------------------------------------------------------------------


def store_clock(address: str, elapsed_ms: int, time_ms: int) -> None:
    """Store a clock reading, as a server on this machine would."""
    query(address, "DELETE FROM oncelog_clocks")
    query(address, "INSERT INTO oncelog_clocks VALUES ($1, $2, $3)", SystemClock().boot(), elapsed_ms, time_ms)


@pytest.mark.rule("CO-17")
def test_clock_jump_of_a_database_is_reported_and_can_be_confirmed(database: str) -> None:
    clock = SystemClock()
    sample_log.make_log(database, rounds=0)
    store_clock(database, clock.elapsed_ms() - MINUTE_MS, clock.wall_ms() - 60 * MINUTE_MS)
    status, output = run(database)
    assert status == 1
    assert "the database's clock is " in output
    assert "accepts no new writes" in output
    assert run(database, "--jump-ms-max", str(61 * MINUTE_MS))[0] == 0
    [(before,)] = query(database, "SELECT confirmations FROM oncelog_state")
    done = RUNNER.invoke(COMMAND, ["clock", database, "--confirm", "--json"])
    assert done.exit_code == 0
    said_now = json.loads(done.stdout)
    assert (said_now["jumped"], said_now["confirmed"]) == (True, True)
    assert abs(said_now["wall_ms"] - clock.wall_ms()) < MINUTE_MS
    assert query(database, "SELECT confirmations FROM oncelog_state") == [(before + 1,)]
    [(boot, elapsed_ms, _)] = query(database, "SELECT boot, elapsed_ms, time_ms FROM oncelog_clocks")
    assert (boot, elapsed_ms <= clock.elapsed_ms()) == (clock.boot(), True)
    assert run(database)[0] == 0


def test_clock_jump_is_not_visible_on_a_machine_without_a_server(database: str) -> None:
    sample_log.make_log(database, rounds=0)
    query(database, "UPDATE oncelog_lanes SET log_time_ms = 1700000000000")
    status, output = run(database)
    assert status == 0
    assert "\nthe log:          2023-11-14 22:13:20.000 UTC\n" in output
    assert "no jump was found, but no process on this machine has recorded the time" in output


def test_database_clock_behind_the_log_and_missing_commits_are_reported(database: str) -> None:
    sample_log.make_log(database, rounds=0)
    assert "the database's clock is " in run(database)[1]
    assert "behind the log" in run(database)[1]
    query(database, "UPDATE oncelog_lanes SET log_time_ms = 0")
    assert "no commit yet" in run(database)[1]
