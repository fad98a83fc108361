"""`oncelog doctor --backup`: backups that are old, missing, damaged, or of another log."""

from itertools import count
from pathlib import Path

import pytest

import oncelog
from cli.doctor.checks import Findings, doctor
from cli.runner import COMMAND, RUNNER
from cli.test_continuous_backup import Backup
from core.item_builders import event
from deadlines import wait_until
from oncelog.cli.doctor.backup_age import FILE_AGE_MS_MAX, TARGET_AGE_MS_MAX, LogTimes, judge_age
from oncelog.storage.clock import SystemClock
from s3_server import BUCKET, s3_server

HOUR_MS = 3_600_000


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "log.db"
    write(path, 0)
    return path


def write(log: Path, number: int) -> None:
    """Commit an event."""
    with oncelog.open_blocking(log) as opened:
        opened.submit(event(number, f"f{number}"))


def run(*arguments: object) -> None:
    done = RUNNER.invoke(COMMAND, [*map(str, arguments)])
    assert done.exit_code == 0, (done.stdout, done.stderr, done.exception)


def check(log: Path, *options: object) -> Findings:
    return doctor(log, *options)


# --- files


def test_backup_with_the_newest_commit_is_never_too_old(log: Path, tmp_path: Path) -> None:
    run("backup", log, tmp_path / "copy.db")
    said = check(log, "--backup", tmp_path / "copy.db", "--max-age", "0s").get("ok", "backup")
    assert "has the newest commit of the log" in said


def test_backup_that_lacks_commits_is_a_problem_when_it_is_old(log: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.db"
    run("backup", log, copy)
    numbers = count(1)
    wait_until(lambda: write_later(log, copy, next(numbers)))
    assert "has the commits until" in check(log, "--backup", copy).get("ok", "backup")
    said = check(log, "--backup", copy, "--max-age", "0s").get("problem", "backup")
    assert "and --max-age is 0 s" in said
    assert "Make a backup" in said


def is_too_old(log: Path, *options: object) -> bool:
    """Whether the backup is a problem because of its age."""
    found = check(log, *options, "--max-age", "0s")
    return "backup" in found.problems and "has the commits until" in found.get("problem", "backup")


def write_later(log: Path, copy: object, number: int) -> bool:
    """Commit an event. Returns whether its time is later than that of the newest one in the copy."""
    write(log, number)
    return "has the newest commit" not in check(log, "--backup", copy).get("ok", "backup")


@pytest.mark.parametrize("age_ms_max", [FILE_AGE_MS_MAX, TARGET_AGE_MS_MAX])
def test_age_limits(age_ms_max: int) -> None:
    now_ms = SystemClock().wall_ms()
    log = LogTimes(now_ms, "e", ())
    assert judge_age("copy.db", now_ms - age_ms_max + HOUR_MS // 2, log, age_ms_max).level == "ok"
    assert judge_age("copy.db", now_ms - age_ms_max - 1, log, age_ms_max).level == "problem"
    assert judge_age("copy.db", now_ms - age_ms_max - 1, None, age_ms_max).level == "problem"


def test_backup_of_another_log_is_a_problem(log: Path, tmp_path: Path) -> None:
    write(tmp_path / "other.db", 0)
    run("backup", tmp_path / "other.db", tmp_path / "copy.db")
    assert "is a backup of another log" in check(log, "--backup", tmp_path / "copy.db").get("problem", "backup")


def test_backup_from_before_a_restore_belongs_to_the_log(log: Path, tmp_path: Path) -> None:
    run("backup", log, tmp_path / "copy.db")
    run("restore", tmp_path / "copy.db", log, "--force")
    assert "has the commits until" in check(log, "--backup", tmp_path / "copy.db").get("ok", "backup")


def test_restored_copy_is_not_a_backup_of_the_original(log: Path, tmp_path: Path) -> None:
    run("backup", log, tmp_path / "copy.db")
    run("restore", tmp_path / "copy.db", tmp_path / "restored.db")
    assert "another log" in check(log, "--backup", tmp_path / "restored.db").get("problem", "backup")


@pytest.mark.parametrize(("content", "message"), [(None, "does not exist"), (b"x" * 200, "is not an SQLite database")])
def test_unusable_backup_is_a_problem(content: bytes | None, message: str, log: Path, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "copy.db").write_bytes(content)
    assert message in check(log, "--backup", tmp_path / "copy.db").get("problem", "backup")


def test_no_backup_is_a_warning(log: Path) -> None:
    said = check(log).get("warning", "backup")
    assert "no backup was checked" in said
    assert f"oncelog backup {log} s3://BUCKET/PREFIX" in said


# --- continuous backups


def test_continuous_backup_is_found_and_checked(log: Path, tmp_path: Path) -> None:
    target = f"file://{tmp_path}/target"
    with Backup(log, target) as running:
        running.wait_for("all 1 records are in")
        said = check(log).get("ok", "backup")
        assert f"`oncelog backup` is running for {target}" in said
        assert f"{target} has the newest commit of the log" in said
        running.interrupt()
    found = check(log)
    assert "but is not running" in found.get("warning", "backup")
    assert "has the newest commit" in found.get("ok", "backup")
    numbers = count(1)
    wait_until(lambda: write_later(log, target, next(numbers)))  # the target's time has a precision of a second
    wait_until(lambda: is_too_old(log))
    wait_until(lambda: is_too_old(log, "--backup", target))


def test_target_of_an_earlier_epoch_is_a_problem(log: Path, tmp_path: Path) -> None:
    target = f"file://{tmp_path}/target"
    run("backup", log, target, "--once")
    run("epoch", log, "--renew")
    for options in ((), ("--backup", target)):
        said = check(log, *options).get("problem", "backup")
        assert "an earlier history of the log" in said
        assert f"oncelog backup FILE {target} --take-over" in said
    run("backup", log, target, "--once", "--take-over")
    assert "has the newest commit" in check(log, "--backup", target).get("ok", "backup")


def test_target_with_a_later_history_is_a_problem(log: Path, tmp_path: Path) -> None:
    target, copy = f"file://{tmp_path}/target", tmp_path / "copy.db"
    run("backup", log, target, "--once")
    run("restore", target, copy)
    run("backup", copy, target, "--once", "--take-over")
    assert "another history" in check(log, "--backup", target).get("problem", "backup")


def test_target_of_a_copy_is_compared_by_commits(log: Path, tmp_path: Path) -> None:
    """The copy has the log's epoch, and its backup is newer than all commits of the log."""
    target, copy = f"file://{tmp_path}/target", tmp_path / "copy.db"
    run("backup", log, copy)
    for number in range(1, 21):
        write(log, number)
    run("backup", copy, target, "--once")
    assert "lacks the commits since" in check(log, "--backup", target).get("ok", "backup")
    wait_until(lambda: "backup" in check(log, "--backup", target, "--max-age", "0s").problems)
    said = check(log, "--backup", target, "--max-age", "0s").get("problem", "backup")
    assert "lacks the commits since" in said
    assert "Make a backup" in said
    write(copy, 30)
    run("backup", copy, target, "--once")
    assert "a different copy of the log" in check(log, "--backup", target).get("problem", "backup")


def test_backup_in_a_bucket_is_checked_with_the_credentials_of_the_environment(log: Path, tmp_path: Path) -> None:
    url = f"s3://{BUCKET}/orders"
    (tmp_path / "s3").mkdir()
    with s3_server(tmp_path / "s3") as server:
        options = (url, "--endpoint", server.endpoint)
        made = RUNNER.invoke(COMMAND, ["backup", str(log), *options, "--once"], env=server.environment)
        assert made.exit_code == 0, made.stderr
        found = doctor(log, "--backup", *options, env=server.environment)
        assert f"{url} has the newest commit" in found.get("ok", "backup")
        wrong = {**server.environment, "AWS_SECRET_ACCESS_KEY": "another-secret"}
        found = doctor(log, "--backup", *options, env=wrong)
    assert "Check AWS_SECRET_ACCESS_KEY" in found.get("problem", "backup")
    assert "another-secret" not in found.text


def test_target_without_a_backup_is_a_problem(log: Path, tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    said = check(log, "--backup", f"file://{tmp_path}/target").get("problem", "backup")
    assert "contains no backup" in said


def test_unreachable_store_is_a_problem(log: Path) -> None:
    options = ("--backup", "s3://backups/orders", "--endpoint", "http://127.0.0.1:1")
    said = check(log, *options).get("problem", "backup")
    assert "127.0.0.1:1 cannot be reached" in said
