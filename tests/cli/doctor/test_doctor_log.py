"""`oncelog doctor FILE`: the log, its clock, its permissions and its disk."""

import errno
import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

import oncelog
from cli.doctor.checks import doctor, write_settings
from cli.runner import COMMAND, RUNNER
from compatibility.formats import name_versions, unpack
from core.item_builders import event
from databases import address_of
from oncelog.cli.doctor import log_file
from oncelog.cli.doctor.findings import Finding
from oncelog.cli.doctor.log_file import FileExpectations, judge_file_system, judge_free_space
from oncelog.engine.write_gate import DiskLimits
from oncelog.storage.clock import SystemClock

HOUR_MS = 3_600_000
MIB = 2**20


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "log.db"
    with oncelog.open_blocking(path) as opened:
        opened.submit(event(1, "f1"))
    return path


def execute(log: Path, statement: str, *parameters: object) -> None:
    with closing(sqlite3.connect(log)) as connection, connection:
        connection.execute(statement, parameters)


# --- the file


def test_good_log_has_no_problems(log: Path) -> None:
    found = doctor(log)
    assert found.status == 0
    assert "is a log: epoch" in found.get("ok", "store")
    assert "write-ahead logging is on" in found.get("ok", "journal_mode")
    for check in ("clock", "permissions", "disk", "file_system"):
        found.get("ok", check)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (PermissionError(errno.EACCES, "Permission denied", "/closed/log.db"), "/closed/log.db cannot be read"),
        (OSError(errno.EIO, "Input/output error"), "the check failed: Input/output error"),
    ],
)
def test_operating_system_error_is_a_problem_and_the_other_checks_run(
    log: Path, error: OSError, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> Finding:
        raise error

    monkeypatch.setattr(log_file, "judge_file_system", fail)
    found = doctor("--config", write_settings(log.parent))
    assert found.problems == ["store"]
    assert message in found.get("problem", "store")
    found.get("warning", "backup")
    found.get("ok", "open_files")


def test_file_name_that_is_too_long_is_a_problem(tmp_path: Path) -> None:
    assert "store" in doctor(tmp_path / ("x" * 300)).problems


def test_checks_change_nothing(log: Path) -> None:
    def read() -> dict[str, tuple[bytes, int]]:
        return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in log.parent.iterdir()}

    config = write_settings(log.parent)
    before = read()
    doctor(log)
    doctor("--config", config)
    assert read() == before


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "does not exist"), (b"", "is empty"), (b"text" * 100, "is not an SQLite database")],
)
def test_file_that_is_not_a_log_is_a_problem(content: bytes | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    if content is not None:
        path.write_bytes(content)
    assert message in doctor(path).get("problem", "store")


def test_missing_directory_is_a_problem(tmp_path: Path) -> None:
    config = write_settings(tmp_path, f'store = "{tmp_path}/missing/log.db"')
    assert f"the directory {tmp_path}/missing does not exist" in doctor("--config", config).get("problem", "store")


def test_damaged_log_is_a_problem(log: Path) -> None:
    execute(log, "DROP TABLE oncelog_lanes")
    assert str(log) in doctor(log).get("problem", "store")


def test_older_schema_is_a_warning(tmp_path: Path) -> None:
    log = unpack(name_versions("log-sqlite")[8], tmp_path / "log.db")
    found = doctor(log)
    said = found.get("warning", "store")
    assert "has schema 8" in said
    assert "Upgrade all programs" in said
    assert found.status == 0


def test_newer_schema_is_a_problem(log: Path) -> None:
    execute(log, "UPDATE oncelog_log SET schema_version = 999")
    assert "was created by a newer Oncelog (schema 999" in doctor(log).get("problem", "store")


def test_moved_log_is_a_problem(log: Path) -> None:
    target = address_of(log)
    assert RUNNER.invoke(COMMAND, ["move", str(log), target]).exit_code == 0
    said = doctor(log).get("problem", "store")
    assert "has been moved to postgresql://" in said
    assert "Use the log there" in said


def test_other_journal_mode_is_a_warning(log: Path) -> None:
    execute(log, "PRAGMA journal_mode = DELETE")
    assert "has set the journal mode to delete" in doctor(log).get("warning", "journal_mode")


def test_log_that_others_may_read_is_a_warning(log: Path) -> None:
    log.chmod(0o644)
    assert f"chmod 640 {log}" in doctor(log).get("warning", "permissions")
    config = write_settings(log.parent)
    assert f"chmod 600 {log}" in doctor("--config", config).get("warning", "permissions")
    log.chmod(0o640)
    doctor(log).get("ok", "permissions")
    doctor("--config", write_settings(log.parent, 'file_mode = "0640"')).get("ok", "permissions")


# --- the clock


def test_jumped_clock_is_a_problem(log: Path) -> None:
    clock = SystemClock()
    statement = "UPDATE oncelog_state SET clock_boot = ?, clock_elapsed_ms = ?, clock_time_ms = ?"
    execute(log, statement, clock.boot(), clock.elapsed_ms(), clock.wall_ms() - HOUR_MS)
    said = doctor(log).get("problem", "clock")
    assert "accepts no new writes" in said
    assert "oncelog clock LOG --confirm" in said
    config = write_settings(log.parent, f"[limits]\nclock_jump_ms_max = {3 * HOUR_MS}")
    doctor("--config", config).get("ok", "clock")


def test_clock_behind_the_log_is_a_warning(log: Path) -> None:
    execute(log, "UPDATE oncelog_state SET clock_time_ms = ?", SystemClock().wall_ms() + HOUR_MS)
    said = doctor(log).get("warning", "clock")
    assert "behind the log" in said
    assert "Correct the clock" in said


# --- the disk


def test_disk_below_the_limit_is_a_problem(log: Path) -> None:
    config = write_settings(log.parent, f"disk.free_bytes_min = {2**50}")
    said = doctor("--config", config).get("problem", "disk")
    assert "disk.free_bytes_min (1,048,576.0 GiB), so the server refuses new writes" in said


def test_log_above_its_size_limit_is_a_problem(log: Path) -> None:
    config = write_settings(log.parent, "disk.store_bytes_max = 1000")
    assert "of 1,000 bytes (disk.store_bytes_max)" in doctor("--config", config).get("problem", "disk")
    size = log.stat().st_size
    config = write_settings(log.parent, f"disk.store_bytes_max = {size + size // 20}")
    assert "Plan for more space" in doctor("--config", config).get("warning", "disk")


@pytest.mark.parametrize(
    ("free", "is_server", "level"),
    [(99 * MIB, True, "problem"), (99 * MIB, False, "warning"), (199 * MIB, True, "warning"), (200 * MIB, True, "ok")],
)
def test_free_space_is_compared_with_the_limit(free: int, is_server: bool, level: str) -> None:
    expected = FileExpectations(DiskLimits(free_bytes_min=100 * MIB), 1, is_server=is_server)
    assert judge_free_space(free, expected).level == level


def test_large_write_ahead_log_is_a_warning(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_file, "WAL_BYTES_MAX", 1000)
    with closing(sqlite3.connect(log)) as connection:
        connection.execute("CREATE TABLE application AS SELECT 1")
        connection.commit()
        assert os.stat(f"{log}-wal").st_size > 1000  # noqa: PTH116
        assert f"the write-ahead log {log}-wal has" in doctor(log).get("warning", "disk")


MOUNTS = """\
/dev/sda1 / ext4 rw,relatime 0 0
server:/logs /mnt/shared\\040logs nfs4 rw 0 0
/dev/sdb1 /mnt/shared\\040logs/local xfs rw 0 0
"""


@pytest.mark.parametrize(
    ("path", "level", "kind"),
    [
        ("/srv/log.db", "ok", "ext4"),
        ("/mnt/shared logs/a/log.db", "problem", "nfs4"),
        ("/mnt/shared logs/local/log.db", "ok", "xfs"),
    ],
)
def test_network_file_systems_are_a_problem(path: str, level: str, kind: str) -> None:
    finding = judge_file_system(Path(path), MOUNTS)
    assert finding.level == level
    assert kind in finding.message
