"""`oncelog backup` to a directory or a bucket, and `oncelog restore` from it, with a real Litestream and S3 server."""

import re
import signal
import sqlite3
import stat
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import oncelog
from cli.processes import ENVIRONMENT, Command
from cli.runner import COMMAND, RUNNER, Result
from core.item_builders import event
from deadlines import WAIT_S, wait_until
from oncelog.core.rules.leaps import LEAP_MIN
from oncelog.engine import eraser
from oncelog.storage.litestream import program, replication
from oncelog.storage.litestream.program import BackupError
from oncelog.storage.litestream.recovery import RestorePoint, TargetReader, find_last, get_marker
from oncelog.storage.litestream.target import parse_target
from oncelog.storage.sqlite.read_transaction import open_read_transaction
from oncelog.testing.programs import list_children
from s3_server import ACCESS_KEY, BUCKET, SECRET_KEY, s3_server

# --- helpers


def write(log: str | Path, first: int, count: int) -> int:
    """Commit events and return the time of the newest one. Later commits have later times."""
    with oncelog.open_blocking(log) as opened:
        submit(opened, first, count)
    newest_ms = replication.read_state(str(log)).newest_ms
    wait_until(lambda: datetime.now(UTC).timestamp() * 1000 > newest_ms + 1)
    return newest_ms


def submit(log: oncelog.BlockingLog, first: int, count: int) -> None:
    log.submit_many([event(number, f"f{number}", body=b'{"type":"tick"}') for number in range(first, first + count)])


def run(*arguments: object, env: dict[str, str] | None = None) -> Result:
    return RUNNER.invoke(COMMAND, [*map(str, arguments)], env=env)


def run_successfully(*arguments: object, env: dict[str, str] | None = None) -> str:
    done = run(*arguments, env=env)
    assert done.exit_code == 0, (done.stdout, done.stderr, done.exception)
    return done.stdout


def records_of(log: Path) -> list[tuple[Any, ...]]:
    """The records of a log that applications have written."""
    with closing(sqlite3.connect(log)) as connection:
        query = "SELECT place, body FROM oncelog_records WHERE policy = 'events' ORDER BY place"
        return connection.execute(query).fetchall()


def format_time(time_ms: int) -> str:
    return datetime.fromtimestamp(time_ms / 1000, UTC).isoformat(timespec="milliseconds")


def parse_floor(said: str) -> int:
    (number,) = re.findall(r"numbers continue above (\d+)", said)
    return int(number)


class Backup(Command):
    """A running `oncelog backup`. Use it as a context manager."""

    def __init__(self, *arguments: object, environment: dict[str, str] | None = None) -> None:
        self.said: list[str] = []
        options = ("backup", *map(str, arguments), "--status-every", "1s")
        super().__init__(*options, environment={**ENVIRONMENT, **(environment or {})})

    def __exit__(self, *error: Any) -> None:
        self.kill()
        super().__exit__(*error)

    def wait_for(self, text: str) -> None:
        """Wait for a line with this text."""
        assert self.stdout is not None
        while text not in (line := self.stdout.readline()):
            assert line, (self.said, self.stderr and self.stderr.read())
            self.said.append(line)
        self.said.append(line)

    def interrupt(self) -> tuple[int, str]:
        """Interrupt the command and wait for its end. Return the exit status and everything that it has printed."""
        self.send_signal(signal.SIGTERM)
        said, errors = self.communicate(timeout=WAIT_S)
        return self.returncode, "".join(self.said) + said + errors


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log.db"


@pytest.fixture
def target(tmp_path: Path) -> str:
    return f"file://{tmp_path}/target"


# --- S3


@pytest.mark.rule("CO-12", "CO-40")
def test_continuous_backup_to_s3_restores_to_a_time(log: Path, tmp_path: Path) -> None:
    url = f"s3://{BUCKET}/logs/orders"
    (tmp_path / "s3").mkdir()
    with s3_server(tmp_path / "s3") as server:
        options = (url, "--endpoint", server.endpoint)
        before_ms = write(log, 0, 10)
        with Backup(log, *options, environment=server.environment) as running:
            running.wait_for("all 10 records are in")
            write(log, 10, 20)
            running.wait_for("all 30 records are in")
            commands = [Path(f"/proc/{pid}/cmdline").read_text() for pid in (running.pid, *list_children(running.pid))]
            write(log, 30, 5)
            status, said = running.interrupt()
        assert status == 0, said
        assert "all 35 records are in" in said
        assert any("litestream" in command for command in commands)

        env = server.environment
        checked = run_successfully("backup", "--check", *options, "--max-age", "1h", env=env)
        assert checked.startswith("ok: 35 records (epoch ")
        restored, earlier = tmp_path / "restored.db", tmp_path / "earlier.db"
        run_successfully("restore", url, restored, "--endpoint", server.endpoint, env=env)
        done = run_successfully(
            "restore", url, earlier, "--endpoint", server.endpoint, "--at", format_time(before_ms), env=env
        )
        refused = run("backup", "--check", *options, env={**env, "AWS_SECRET_ACCESS_KEY": f"{SECRET_KEY}-2"})
        no_bucket = run("backup", log, "s3://elsewhere/logs", "--endpoint", server.endpoint, env=env)
        empty = run("restore", f"s3://{BUCKET}/none", tmp_path / "none.db", "--endpoint", server.endpoint, env=env)
    assert records_of(restored) == records_of(log)
    assert records_of(earlier) == records_of(log)[:10]
    assert parse_floor(done) > 35 + LEAP_MIN
    run_successfully("verify", earlier)
    assert (refused.exit_code, no_bucket.exit_code, empty.exit_code) == (2, 2, 2)
    assert "Check AWS_SECRET_ACCESS_KEY" in refused.stderr
    assert "Create the bucket first" in no_bucket.stderr
    assert "contains no backup" in empty.stderr
    printed = "".join([*commands, said, checked, done, refused.stderr, no_bucket.stderr])
    assert SECRET_KEY not in printed
    assert ACCESS_KEY not in printed


# --- restores


@pytest.mark.rule("CO-12")
def test_restore_to_a_time_leaps_over_numbers_of_later_restores(log: Path, target: str, tmp_path: Path) -> None:
    before_ms = write(log, 0, 5)
    run_successfully("backup", log, target, "--once")
    run_successfully("epoch", log, "--renew", "--above", 2**40)
    write(log, 5, 5)
    refused = run("backup", log, target, "--once")
    assert refused.exit_code == 2
    assert "If a restore or `oncelog epoch --renew` has started the history of this log" in refused.stderr
    run_successfully("backup", log, target, "--once", "--take-over")
    said = run_successfully("restore", target, tmp_path / "restored.db", "--at", format_time(before_ms))
    assert parse_floor(said) > 2**40 + LEAP_MIN
    assert records_of(tmp_path / "restored.db") == records_of(log)[:5]
    refused = run("restore", target, tmp_path / "other.db", "--at", format_time(before_ms), "--above", 2**39)
    assert refused.exit_code == 2
    assert "above must be at least" in refused.stderr
    too_old = run("restore", target, tmp_path / "other.db", "--at", "2020-01-01T00:00")
    assert too_old.exit_code == 2
    assert "contains no state that is old enough" in too_old.stderr
    assert not (tmp_path / "other.db").exists()


def test_restored_log_continues_its_backup(log: Path, target: str, tmp_path: Path) -> None:
    write(log, 0, 5)
    run_successfully("backup", log, target, "--once")
    write(log, 5, 5)
    run_successfully("restore", target, log, "--force")
    assert len(records_of(log)) == 5
    write(log, 20, 2)
    refused = run("backup", log, target, "--once")
    assert refused.exit_code == 2
    assert f"an earlier history of {log}, which has epoch " in refused.stderr
    assert "add --take-over once" in refused.stderr
    run_successfully("backup", log, target, "--once", "--take-over")
    run_successfully("backup", log, target, "--once")
    run_successfully("restore", target, tmp_path / "restored.db")
    assert records_of(tmp_path / "restored.db") == records_of(log)


def test_commits_between_two_backups_are_not_lost(log: Path, target: str, tmp_path: Path) -> None:
    """Litestream alone would lose them, because the write-ahead log was restarted and is now shorter than before."""
    with oncelog.open_blocking(log) as opened, closing(sqlite3.connect(log, isolation_level=None)) as connection:
        submit(opened, 0, 100)
        run_successfully("backup", log, target, "--once")
        submit(opened, 100, 100)
        busy, frames, moved = connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        assert (busy, frames) == (0, moved)
        submit(opened, 200, 1)
        run_successfully("backup", log, target, "--once")
    run_successfully("restore", "--full", target, tmp_path / "restored.db")
    assert records_of(tmp_path / "restored.db") == records_of(log)
    assert len(records_of(log)) == 201


WRITER = """
import sys
import oncelog
from core.item_builders import event
from oncelog.storage.sqlite import store

store.CHECKPOINT_RECORDS = 32
with oncelog.open_blocking(sys.argv[1]) as log:
    for number in range(int(sys.argv[2]), int(sys.argv[2]) + 200):
        log.submit(event(number, f"f{number}", body=b'{"type":"tick"}'))
"""


def test_backup_has_all_commits_of_several_processes(log: Path, target: str, tmp_path: Path) -> None:
    write(log, 0, 1)
    with Backup(log, target) as running:
        running.wait_for("all 1 records are in")
        writers = [Command(str(log), str(first), program=WRITER) for first in (1000, 2000)]
        for writer in writers:
            with writer:
                assert writer.communicate(timeout=WAIT_S)[1] == ""
        status, said = running.interrupt()
    assert status == 0, said
    assert "all 401 records are in" in said
    run_successfully("restore", "--full", target, tmp_path / "restored.db")
    assert records_of(tmp_path / "restored.db") == records_of(log)


def test_running_backup_prevents_restarts_of_the_write_ahead_log(log: Path, target: str) -> None:
    """Litestream ends its read transaction after some requests. A restart could then overwrite unread frames."""
    write(log, 0, 1)
    with Backup(log, target) as running:
        running.wait_for("all 1 records are in")
        checkpointer = sqlite3.connect(log, isolation_level=None, timeout=0)
        with oncelog.open_blocking(log) as opened, closing(checkpointer) as connection:
            submit(opened, 1, 1)
            running.wait_for("all 2 records are in")
            submit(opened, 2, 1)
            running.wait_for("all 3 records are in")
            (is_busy, _, _) = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    assert is_busy


def test_erasure_succeeds_when_the_backup_has_stopped(log: Path, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eraser, "SCRUB_ATTEMPTS", 1)
    write(log, 0, 1)
    with oncelog.open_blocking(log) as opened:
        opened.submit(event(1, "f1", partitions=("p",), body=b'{"type":"erasable"}'))
        with Backup(log, target) as running:
            running.wait_for("all 2 records are in")
            submit(opened, 2, 1)
            with pytest.raises(oncelog.StoreUnavailableError, match="its bytes are still on the disk"):
                opened.erase(partition="p")
            running.interrupt()
        opened.erase(partition="p")
        assert b"erasable" not in log.read_bytes() + Path(f"{log}-wal").read_bytes()


def test_killed_backup_leaves_no_program_behind(log: Path, target: str) -> None:
    write(log, 0, 1)
    with Backup(log, target) as running:
        running.wait_for("all 1 records are in")
        (child,) = list_children(running.pid)
        running.kill()
        running.wait(WAIT_S)
        wait_until(lambda: not Path(f"/proc/{child}/exe").exists())
    assert run("backup", log, target, "--once").exit_code == 0


# --- refusals


def test_target_of_another_log_is_refused(log: Path, target: str, tmp_path: Path) -> None:
    write(log, 0, 1)
    run_successfully("backup", log, target, "--once")
    other = tmp_path / "other.db"
    write(other, 0, 1)
    done = run("backup", other, target, "--once")
    assert done.exit_code == 2
    assert "contains the backup of another log" in done.stderr


def test_target_is_read_again_only_after_other_writes(
    log: Path, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    branch = tmp_path / "branch.db"
    write(log, 0, 1)
    run_successfully("backup", log, target, "--once")
    with monkeypatch.context() as patched:
        patched.delattr(TargetReader, "recover")
        run_successfully("backup", log, target, "--once")
    run_successfully("restore", target, branch)
    run_successfully("backup", branch, target, "--once", "--take-over")
    for options in ((), ("--take-over",)):
        done = run("backup", log, target, "--once", *options)
        assert done.exit_code == 2
        assert "another history" in done.stderr


def test_marker_is_written_once_and_an_error_does_not_end_the_backup(log: Path, target: str) -> None:
    write(log, 0, 1)
    parsed = parse_target(target, None)
    marker = get_marker(replication.get_target_state(str(log), parsed))
    with replication.replicate(str(log), parsed, 3_600_000, lambda _: None) as running:
        running.sync()
        first = marker.stat()
        running.sync()
        assert (marker.stat().st_ino, marker.stat().st_mtime_ns) == (first.st_ino, first.st_mtime_ns)
        marker.unlink()
        marker.mkdir()
        with pytest.raises(BackupError, match=r"\.epoch cannot be written: Is a directory\.$"):
            running.sync()
        marker.rmdir()
        running.sync()
        assert stat.S_IMODE(marker.stat().st_mode) == 0o600
    with oncelog.open_blocking(log) as opened:
        assert marker.read_text() == opened.epoch


def test_restored_copy_does_not_write_to_the_target_of_a_running_backup(log: Path, target: str, tmp_path: Path) -> None:
    copy = tmp_path / "copy.db"
    write(log, 0, 5)
    with Backup(log, target) as running:
        running.wait_for("all 5 records are in")
        run_successfully("restore", target, copy)
        done = run("backup", copy, target, "--once")
        write(log, 5, 5)
        status, said = running.interrupt()
    assert done.exit_code == 2
    assert f"an earlier history of {copy}, which has epoch " in done.stderr
    assert status == 0, said
    run_successfully("backup", log, target, "--once")
    run_successfully("restore", "--full", target, tmp_path / "restored.db")
    assert records_of(tmp_path / "restored.db") == records_of(log)


@pytest.mark.parametrize("own_commits", [0, 1, 5])
def test_target_with_commits_of_a_copy_is_refused(own_commits: int, log: Path, target: str, tmp_path: Path) -> None:
    """Copies of a file have the same epoch. The target has a longer or a different history than the log."""
    copy = tmp_path / "copy.db"
    write(log, 0, 5)
    run_successfully("backup", log, copy)
    write(copy, 5, 2)
    run_successfully("backup", copy, target, "--once")
    if own_commits:
        write(log, 20, own_commits)
    for options in ((), ("--take-over",)):
        done = run("backup", log, target, "--once", *options)
        assert done.exit_code == 2
        assert "a different copy of the log was backed up there" in done.stderr
    run_successfully("restore", target, tmp_path / "restored.db")
    assert records_of(tmp_path / "restored.db") == records_of(copy)


def test_target_that_only_lacks_commits_is_accepted_from_another_directory(
    log: Path, target: str, tmp_path: Path
) -> None:
    write(log, 0, 5)
    run_successfully("backup", log, target, "--once")
    moved = log.rename(tmp_path / "moved.db")
    write(moved, 5, 5)
    run_successfully("backup", moved, target, "--once")
    run_successfully("restore", target, tmp_path / "restored.db")
    assert records_of(tmp_path / "restored.db") == records_of(moved)


def test_log_has_at_most_one_backup(log: Path, target: str) -> None:
    write(log, 0, 1)
    with replication._lock_state_directory(log):
        done = run("backup", log, target, "--once")
    assert done.exit_code == 2
    assert "Only one may run for each log" in done.stderr


def test_reader_that_blocks_the_start_is_reported(log: Path, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replication, "RESET_TIMEOUT_S", 0)
    write(log, 0, 1)
    with oncelog.open_blocking(log) as opened, open_read_transaction(str(log)) as (connection, _):
        connection.execute("SELECT count(*) FROM oncelog_records").fetchone()
        submit(opened, 1, 1)
        done = run("backup", log, target, "--once")
    assert done.exit_code == 2
    assert "a reader has kept the write-ahead log in use" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("backup {log}", "DESTINATION is missing"),
        ("backup {log} copy.db --once", "--once is for a URL"),
        ("backup {log} copy.db --take-over", "--take-over is for a URL"),
        ("backup {log} file://target --force", "--force is for a file"),
        ("backup {log} file://{log}", "is a file, and a continuous backup is a directory"),
        ("backup {log} file://", "file:// needs a directory"),
        ("backup {log} file://target --endpoint http://127.0.0.1:1", "--endpoint is for s3://"),
        ("backup {log} gs://bucket/name", "but the URL begins with gs://"),
        ("backup {log} s3://bucket", "s3://bucket has no prefix"),
        ("backup {log} s3://b/name", "'b' is not a bucket name"),
        ("backup {log} s3://key:secret@bucket/name", "must not contain credentials"),
        ("backup {log} s3://bucket/name?region=x", "must not have parameters"),
        ("backup {log} s3://bucket/name --endpoint bucket.example.org", "the endpoint must be a URL"),
        ("backup {log} s3://bucket/name --endpoint https://key:secret@s3.example.org", "must not contain credentials"),
        ("backup {log} s3://bucket/name --endpoint http://127.0.0.1:1", "127.0.0.1:1 cannot be reached"),
        ("backup {log} file://target --keep soon", "'soon' is not a duration"),
        ("backup postgresql://app@db.example.org/orders s3://bucket/name", "pg_dump"),
        ("backup --check postgresql://app@db.example.org/orders", "pg_basebackup"),
        ("backup --check {log} other.db", "--check takes one argument"),
        ("backup --check missing.db", "missing.db does not exist"),
        ("backup --check file://missing", "contains no backup"),
        ("restore file://target postgresql://app@db.example.org/orders", "oncelog epoch ADDRESS"),
        ("restore copy.db new.db --at 2026-11-18T12:00", "a backup file has only one state"),
        ("restore file://target new.db --at 2999-01-01T00:00", "is in the future"),
        ("restore file://target new.db --at noon", "--at must be a time"),
        ("restore file://missing new.db", "contains no backup"),
        ("restore file://missing {log}", "exists. Choose another name"),
    ],
)
def test_invalid_command_is_explained(
    arguments: str, expected: str, log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(log, 0, 1)
    done = run(*arguments.format(log=log).split())
    assert done.exit_code == 2
    assert expected in done.stderr
    assert "secret" not in done.stderr
    assert {path.name for path in tmp_path.iterdir()} <= {"log.db", ".log.db-backup"}


def test_backup_of_a_missing_file_creates_nothing(target: str, tmp_path: Path) -> None:
    before = {path.name for path in tmp_path.iterdir()}
    done = run("backup", str(tmp_path / "missing.db"), target, "--once")
    assert done.exit_code == 2
    assert "missing.db does not exist" in done.stderr
    assert {path.name for path in tmp_path.iterdir()} == before


def test_missing_litestream_is_explained(log: Path, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write(log, 0, 1)
    monkeypatch.setattr(program, "DISTRIBUTION", "no-such-package")
    monkeypatch.setenv("PATH", "")
    program.find_program.cache_clear()
    try:
        done = run("backup", log, target)
    finally:
        program.find_program.cache_clear()
    assert done.exit_code == 2
    assert "pip install 'oncelog[backup]'" in done.stderr


def test_old_litestream_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = tmp_path / "litestream"
    old.write_text("#!/bin/sh\necho v0.3.13\n")
    old.chmod(0o700)
    with pytest.raises(oncelog.OncelogError, match=r"v0\.3\.13, and 0\.5\.17 is needed"):
        program._check_version(str(old))


def test_environment_of_litestream_contains_only_our_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITESTREAM_CONFIG", "/elsewhere.yml")
    monkeypatch.setenv("AWS_CA_BUNDLE", "/etc/ca.pem")
    environment = program.build_environment()
    assert "LITESTREAM_CONFIG" not in environment
    assert "AWS_CA_BUNDLE" not in environment
    assert environment["SSL_CERT_FILE"] == "/etc/ca.pem"


# --- check


def test_check_accepts_a_valid_and_refuses_an_old_or_damaged_backup_file(log: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.db"
    write(log, 0, 5)
    run_successfully("backup", log, copy)
    before = copy.read_bytes()
    assert run_successfully("backup", "--check", copy).startswith("ok: 5 records (epoch ")
    assert copy.read_bytes() == before
    old = run("backup", "--check", copy, "--max-age", "0s")
    assert old.exit_code == 1
    assert "and --max-age is 0 s" in old.stderr
    with closing(sqlite3.connect(copy)) as connection:
        connection.execute("UPDATE oncelog_records SET body = CAST('{}' AS BLOB) WHERE place % 2")
        connection.commit()
    damaged = run("backup", "--check", copy)
    assert damaged.exit_code == 1
    assert "is not a valid backup" in damaged.stderr


def test_check_accepts_a_backup_of_an_empty_log(log: Path, tmp_path: Path) -> None:
    with oncelog.open_blocking(log):
        pass
    run_successfully("backup", log, tmp_path / "copy.db")
    assert run_successfully("backup", "--check", tmp_path / "copy.db").startswith("ok: no records")


# --- search


@pytest.mark.parametrize("count", [0, 1, 2, 7, 64])
@pytest.mark.parametrize("guess_ms", [-1, 10, 300, 10_000])
def test_search_finds_the_last_point_that_is_early_enough(count: int, guess_ms: int) -> None:
    points = [RestorePoint(number, 10 * number, 0) for number in range(count)]
    for last in range(-1, count):
        probes: list[int] = []

        def is_early_enough(point: RestorePoint, last: int = last, probes: list[int] = probes) -> bool:
            probes.append(point.txid)
            return point.txid <= last

        found = find_last(points, guess_ms, is_early_enough)
        assert (-1 if found is None else found.txid) == last
        assert len(probes) == len(set(probes))
        assert len(probes) <= 2 * count.bit_length() + 2
