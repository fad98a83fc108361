"""`oncelog doctor` for a log in PostgreSQL: durability, versions, clock, archive and reachability."""

import asyncio
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import pytest

import oncelog
from cli.doctor import checks
from cli.doctor.checks import doctor, write_settings
from compatibility.formats import name_versions, restore_dump
from core.item_builders import event
from databases import query, run_in_thread
from deadlines import WAIT_S, wait_until
from oncelog.cli.doctor.database import judge_archive, judge_clock_difference, judge_durability
from oncelog.storage.clock import SystemClock
from oncelog.testing.postgres import DURABLE_SETTINGS, PostgresServer, postgres_server

SAFE = {
    "fsync": "on",
    "full_page_writes": "on",
    "synchronous_commit": "on",
    "synchronous_standby_names": "",
    "archive_mode": "on",
}


@pytest.fixture(autouse=True)
def _no_short_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may need longer than the default."""
    monkeypatch.setattr("oncelog.cli.doctor.database.TIMEOUT_MS", 1000 * WAIT_S)


@pytest.fixture(scope="module")
def durable_server() -> Iterator[PostgresServer]:
    """A server whose archive fails, and which waits for a standby that does not exist."""
    settings = {
        **DURABLE_SETTINGS,
        "archive_mode": "on",
        "archive_command": "false",
        "synchronous_standby_names": "standby_1",
        "max_connections": "10",
    }
    directory = Path(tempfile.mkdtemp(prefix="oncelog-doctor-"))
    try:
        with postgres_server(directory, settings, is_own=True) as server:
            yield server
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def log(database: str) -> str:
    with oncelog.open_blocking(database) as opened:
        opened.submit(event(1, "f1"))
    return database


# --- the log


def test_log_in_a_database_is_checked(log: str) -> None:
    found = doctor(log)
    assert "has a log: epoch" in found.get("ok", "store")
    assert "no jump was found" in found.get("ok", "clock")
    assert "PostgreSQL " in found.get("ok", "versions")
    assert "connections are in use" in found.get("ok", "database")
    # The shared server of the tests is not durable.
    assert "fsync is off" in found.get("problem", "durability")
    assert "full_page_writes is off" in found.get("problem", "durability")
    assert "autovacuum is off" in found.get("warning", "database")
    assert "archive_mode is off" in found.get("warning", "backup")
    assert found.problems == ["durability"] * 2


def test_database_without_a_log_is_a_problem_only_without_a_server(database: str, tmp_path: Path) -> None:
    assert "contains no log" in doctor(database).get("problem", "store")
    found = doctor("--config", write_settings(tmp_path, f'store = "{database}"'))
    assert "the server creates it" in found.get("ok", "store")


def test_checks_change_nothing_in_the_database(log: str) -> None:
    statement = (
        "SELECT (SELECT sum(n_tup_ins + n_tup_upd + n_tup_del) FROM pg_stat_xact_user_tables), "
        "(SELECT count(*) FROM oncelog_records), (SELECT max(log_time_ms) FROM oncelog_lanes)"
    )
    before = query(log, statement)
    doctor(log)
    assert query(log, statement) == before


def test_older_schema_of_a_database_is_a_warning(database: str) -> None:
    restore_dump(name_versions("log-postgres")[8], database)
    assert "has schema 8" in doctor(database).get("warning", "store")


def test_newer_schema_of_a_database_is_a_problem(log: str) -> None:
    query(log, "UPDATE oncelog_log SET schema_version = 999")
    assert "newer Oncelog (schema 999" in doctor(log).get("problem", "store")


def test_jumped_clock_of_the_database_is_a_problem(log: str) -> None:
    query(log, "UPDATE oncelog_clocks SET time_ms = time_ms - 3600000")
    assert "accepts no new writes" in doctor(log).get("problem", "clock")


def test_size_limit_applies_to_the_tables(log: str, tmp_path: Path) -> None:
    config = write_settings(tmp_path, f'store = "{log}"', "disk.store_bytes_max = 1000")
    assert "(disk.store_bytes_max)" in doctor("--config", config).get("problem", "disk")


# --- the database server


def test_missing_standby_and_failing_archive_are_problems(durable_server: PostgresServer) -> None:
    address = durable_server.address
    found = doctor(address)
    assert "commits wait for standbys (standby_1), but none of them is connected" in found.get("problem", "durability")
    query(address, "SELECT pg_switch_wal()")
    wait_until(lambda: query(address, "SELECT last_failed_time IS NOT NULL FROM pg_stat_archiver") == [(True,)])
    assert "the last attempt to archive the write-ahead log failed" in doctor(address).get("problem", "backup")


def test_few_free_connections_are_a_warning(durable_server: PostgresServer) -> None:
    # Ten connections, three of them for superusers: at most six remain while this check uses one.
    connections = doctor(durable_server.address)
    assert "of 7 connections are in use" in "\n".join(
        one["message"] for one in connections.all if one["check"] == "database"
    )


def test_unreachable_database_is_a_problem_and_its_password_is_not_printed() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        found = doctor(f"postgresql://ann:secret-word@127.0.0.1:{port}/orders")
    said = found.get("problem", "store")
    assert "Connection refused" in said
    assert "Check the address" in said
    assert "secret-word" not in found.text


def test_silent_database_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oncelog.cli.doctor.database.TIMEOUT_MS", 300)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        found = doctor(f"postgresql://127.0.0.1:{silent.getsockname()[1]}/orders")
    assert "did not respond within 300 ms" in found.get("problem", "store")


def test_frozen_database_ends_the_checks(log: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock on the log's table stops the check's query."""
    monkeypatch.setattr("oncelog.cli.doctor.database.TIMEOUT_MS", 2000)
    found: list[checks.Findings] = []

    async def hold() -> None:
        connection = await asyncpg.connect(log)
        async with connection.transaction():
            await connection.execute("LOCK TABLE oncelog_log IN ACCESS EXCLUSIVE MODE")
            found.append(await asyncio.to_thread(doctor, log))
        await connection.close()

    run_in_thread(hold())
    assert found[0].get("problem", "store")


# --- judgements


@pytest.mark.parametrize(
    ("settings", "standbys", "level", "message"),
    [
        ({}, [], "ok", "no standby"),
        ({}, [("a", "streaming", "async")], "warning", "do not wait for the standbys (a)"),
        ({"synchronous_standby_names": "a"}, [("a", "streaming", "async")], "problem", "none of them is connected"),
        ({"synchronous_standby_names": "a"}, [("a", "streaming", "sync")], "ok", "connected: a"),
        ({"synchronous_standby_names": "ANY 1 (a,b)"}, [("b", "streaming", "quorum")], "ok", "connected: b"),
        ({"synchronous_standby_names": "a"}, [("", "", "")], "warning", "may not see"),
        ({"fsync": "off"}, [], "problem", "fsync is off"),
        ({"synchronous_commit": "local"}, [], "warning", "synchronous_commit is local"),
    ],
)
def test_durability(settings: dict[str, str], standbys: list[tuple[str, str, str]], level: str, message: str) -> None:
    found = list(judge_durability({**SAFE, **settings}, standbys))
    assert any(one.level == level and message in one.message for one in found), found


@pytest.mark.parametrize(
    ("mode", "archived_ago_ms", "failed_ago_ms", "level"),
    [
        ("off", None, None, "warning"),
        ("on", None, None, "warning"),
        ("on", 60_000, None, "ok"),
        ("on", 60_000, 90_000, "ok"),
        ("on", 60_000, 30_000, "problem"),
        ("on", None, 30_000, "problem"),
    ],
)
def test_archive(mode: str, archived_ago_ms: int | None, failed_ago_ms: int | None, level: str) -> None:
    now_ms = SystemClock().wall_ms()
    times = [None if ago is None else now_ms - ago for ago in (archived_ago_ms, failed_ago_ms)]
    assert judge_archive({**SAFE, "archive_mode": mode}, times).level == level


@pytest.mark.parametrize(("difference_ms", "side"), [(60_000, "ahead of"), (-60_000, "behind")])
def test_database_with_another_time_is_a_warning(difference_ms: int, side: str) -> None:
    finding = judge_clock_difference(1_000_000 + difference_ms, 1_000_000)
    assert finding is not None
    assert finding.level == "warning"
    assert f"1 min {side} the clock of this machine" in finding.message
    assert judge_clock_difference(1_000_000, 1_005_000) is None


async def test_unprivileged_user_may_run_the_checks(database: str) -> None:
    connection = await asyncpg.connect(database)
    try:
        await connection.execute("DROP ROLE IF EXISTS reader")
        await connection.execute("CREATE ROLE reader LOGIN")
        schema = await connection.fetchval("SELECT current_schema()")
        await connection.execute(f"GRANT USAGE ON SCHEMA {schema} TO reader")
        found = await asyncio.to_thread(doctor, database.replace("postgres@", "reader@", 1))
        assert "contains no log" in found.get("problem", "store")
        assert "connections are in use" in found.get("ok", "database")
        await connection.execute(f"REVOKE USAGE ON SCHEMA {schema} FROM reader")
    finally:
        await connection.execute("DROP ROLE IF EXISTS reader")
        await connection.close()
