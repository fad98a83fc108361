"""Checks of a backup: whether it can be read, belongs to the log, and has the log's newest commits."""

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from msgspec import Struct

from oncelog.cli.doctor.findings import Check, Finding, ok, problem, warning
from oncelog.cli.output import format_duration, format_utc
from oncelog.core.rules.leaps import find_last_commit_ms
from oncelog.errors import OncelogError, StoreError
from oncelog.storage.clock import SystemClock
from oncelog.storage.litestream.history import HistoryMatch, compare_histories, list_previous_epochs
from oncelog.storage.litestream.program import BackupError
from oncelog.storage.litestream.recovery import TargetReader, is_last_written
from oncelog.storage.litestream.replication import find_configured_target, get_target_state, is_replicating
from oncelog.storage.litestream.target import BackupTarget
from oncelog.storage.queries.records import load_heads
from oncelog.storage.sqlite.query_driver import run_query
from oncelog.storage.sqlite.read_transaction import open_read_transaction
from oncelog.storage.verify.findings import StepProgress

FILE_AGE_MS_MAX: Final = 26 * 3_600_000
"""24 hours plus two hours to make the backup."""
TARGET_AGE_MS_MAX: Final = 3_600_000
"""A continuous backup is seconds old. An hour leaves time for a restart."""
TIMEOUT_S: Final = 20
_REMEDIES: Final = {
    "ended": "Back up the log to another target. If no other log is backed up to this one, run `oncelog backup FILE "
    "{name} --take-over` once.",
    "diverged": "Back up each copy to its own target, and renew the epoch of one of them (oncelog epoch FILE --renew).",
    "foreign": "Back up the log to another target.",
}
"""What to do about a target that contains a different history, by `HistoryMatch.relation`."""


class LogTimes(Struct, frozen=True):
    """Time of the newest commit of a log or a backup, and the epochs of its history."""

    newest_ms: int
    """Time of the newest commit, or of the creation."""
    epoch: str
    previous_epochs: tuple[str, ...]


def check_backup_file(path: str, log: str | None, age_ms_max: int | None) -> Check:
    """Check a backup in a file. `log` is the file of the log, if it is known."""
    backup = _read_times(path)
    times = None if log is None else _read_log_times(log)
    if times is not None and backup.epoch not in (times.epoch, *times.previous_epochs):
        yield problem("backup", f"{path} is a backup of another log", f"Back up {log} to a new file.")
        return
    yield judge_age(path, backup.newest_ms, times, FILE_AGE_MS_MAX if age_ms_max is None else age_ms_max)


def check_backup_target(target: BackupTarget, log: str | None, age_ms_max: int | None) -> Check:
    """Check a continuous backup.

    Unless this machine's last backup of the log wrote the newest state, restore that state and compare it with the log.
    """
    times = None if log is None else _read_log_times(log)
    match = None
    with _temporary_directory() as directory:
        reader = TargetReader(target, directory, TIMEOUT_S)
        points = reader.list_points()
        if not points:
            remedy = f"Start one: oncelog backup FILE {target.name}"
            yield problem("backup", f"{target.name} contains no backup", remedy)
            return
        is_known = times is None or log is None or is_last_written(points, get_target_state(log, target), times.epoch)
        if log is not None and not is_known:
            match = compare_histories(str(reader.recover(None, _ignore_progress).path), log)
    age_ms_max = TARGET_AGE_MS_MAX if age_ms_max is None else age_ms_max
    if match is not None:
        yield _judge_match(target.name, match, age_ms_max)
        return
    # The time at which the newest change was copied, which is later than its commits. It may lack the milliseconds.
    copied_ms = points[-1].time_ms // 1000 * 1000 + 999
    yield judge_age(target.name, copied_ms, times, age_ms_max)


def check_configured_backup(log: str, age_ms_max: int | None) -> Check:
    """Check the continuous backup that ran last for a log in a file, if there is one."""
    target = find_configured_target(log)
    if target is None:
        yield warning(
            "backup",
            "no backup was checked",
            f"Pass the backup with --backup, or create a backup: oncelog backup {shlex.quote(log)} "
            "s3://BUCKET/PREFIX (or a file).",
        )
        return
    if is_replicating(log):
        yield ok("backup", f"`oncelog backup` is running for {target.name}")
    else:
        yield warning(
            "backup",
            f"`oncelog backup` has copied this log to {target.name}, but is not running",
            "Run it as a service (deploy/systemd/oncelog-backup.service).",
        )
    try:
        yield from check_backup_target(target, log, age_ms_max)
    except BackupError as error:
        yield warning("backup", str(error), "To check the backup, set its credentials in the environment.")


def judge_age(name: str, backup_ms: int, log: LogTimes | None, age_ms_max: int) -> Finding:
    """Return the finding for a backup with the commits until `backup_ms`. A log without new commits needs no new
    backup.
    """
    if log is not None and log.newest_ms <= backup_ms:
        return ok("backup", f"{name} has the newest commit of the log ({format_utc(log.newest_ms)})")
    age_ms = max(0, SystemClock().wall_ms() - backup_ms)
    text = f"{name} has the commits until {format_utc(backup_ms)}, {format_duration(age_ms)} ago"
    if age_ms > age_ms_max:
        message = f"{text}, and --max-age is {format_duration(age_ms_max)}"
        return problem("backup", message, "Make a backup, and find out why none was made.")
    return ok("backup", text)


def _judge_match(name: str, match: HistoryMatch, age_ms_max: int) -> Finding:
    """Return the finding for a continuous backup that was compared with the log."""
    difference = match.describe_difference(name, "the log")
    if difference is not None:
        return problem("backup", difference, _REMEDIES[match.relation].format(name=name))
    if match.missing_since_ms is None:
        return ok("backup", f"{name} has the newest commit of the log")
    age_ms = max(0, SystemClock().wall_ms() - match.missing_since_ms)
    text = f"{name} lacks the commits since {format_utc(match.missing_since_ms)}, {format_duration(age_ms)} ago"
    if age_ms > age_ms_max:
        message = f"{text}, and --max-age is {format_duration(age_ms_max)}"
        return problem("backup", message, "Make a backup, and find out why none was made.")
    return ok("backup", text)


def _ignore_progress(_: StepProgress) -> None:
    pass


def _read_log_times(log: str) -> LogTimes | None:
    try:
        return _read_times(log)
    except StoreError:  # another check reports it
        return None


def _read_times(path: str) -> LogTimes:
    with open_read_transaction(path, allow_older=True) as (connection, metadata):
        heads = run_query(connection, load_heads)
        newest_ms = find_last_commit_ms(heads.values(), metadata.created_ms)
        return LogTimes(newest_ms, metadata.epoch, list_previous_epochs(connection, metadata))


@contextmanager
def _temporary_directory() -> Iterator[Path]:
    try:
        directory = TemporaryDirectory(prefix="oncelog-doctor-")
    except OSError as error:
        raise OncelogError(f"no temporary directory can be created: {error.strerror}") from error
    with directory as name:
        yield Path(name)
