"""Backup and restore. A copy gets its final name only when it is complete and synced.

The newest commits of a log may still be in the write-ahead log rather than in the file. Copies are therefore made with
SQLite's backup API, in one read transaction, while other connections continue to write.
"""

import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Final

from msgspec import Struct

from oncelog.core.rules.leaps import find_highest_number
from oncelog.errors import NotALogError, StoreError, StoreUnavailableError
from oncelog.file_modes import OWNER_ONLY, create_file, sync_path
from oncelog.sqlite_files import logger
from oncelog.storage.inspect.sqlite import checkpoint_and_close, renew_epoch
from oncelog.storage.metadata import EpochRenewal, LogMetadata, Operator, ReplacedLog, count_records
from oncelog.storage.queries.records import load_gaps, load_heads
from oncelog.storage.sqlite.database_file import SCHEMA_VERSION, is_foreign_database, load_metadata, migrate_schema
from oncelog.storage.sqlite.moved_marker import save_marker
from oncelog.storage.sqlite.partial_copy import SIDE_FILE_SUFFIXES, open_partial_copy
from oncelog.storage.sqlite.query_driver import run_query
from oncelog.storage.sqlite.read_transaction import open_existing, open_read_transaction, translate_read_errors
from oncelog.storage.verify.findings import Inconsistency, InconsistencyError, ReportProgress, StepProgress
from oncelog.storage.verify.sqlite import verify_quickly
from oncelog.storage.verify.verification import verify_log

SLICE_PAGES: Final = 1024
"""Pages per step of the copy, 4 MiB. The copy can be interrupted between steps."""

LEAPS_SCHEMA_VERSION: Final = 10
"""First schema version with leaps."""


class BackupResult(Struct, frozen=True):
    """Result of a backup."""

    epoch: str
    records: int
    bytes: int


class RestoreResult(EpochRenewal, frozen=True):
    """Result of a restore: the new history, and the restored file."""

    records: int
    bytes: int
    kept: str | None
    """Path to which the replaced log was moved, or None if no log was replaced."""


def backup(
    source: str, destination: str, report: ReportProgress, *, force: bool = False, file_mode: int = OWNER_ONLY
) -> BackupResult:
    """Copy the current state of a log. Other processes may keep writing; the copy does not contain their later commits.

    The copy gets `file_mode`, regardless of the mode of the log file. Raises StoreError if the destination exists
    (unless `force`) or is an open log.
    """
    target = Path(destination)
    _check_target(target, source, force=force)
    with (
        open_read_transaction(source) as (connection, file),
        translate_read_errors(destination),
        open_partial_copy(target) as unfinished,
    ):
        copied = _copy(connection, file, unfinished, report, file_mode)
        _check_target(target, source, force=force)  # check again, because copying can take a long time
        _publish_copy(unfinished, target)
    return copied


def restore(  # noqa: PLR0913 - the options of the command
    source: str,
    destination: str,
    report: ReportProgress,
    *,
    force: bool = False,
    full: bool = False,
    above: int | None = None,
    file_mode: int = OWNER_ONLY,
    operator: Operator = Operator(),
    name: str = "",
    lost: ReplacedLog = ReplacedLog(),
) -> RestoreResult:
    """Restore a log from a backup, under a new epoch so that readers of lost records notice the restore.

    All numbers continue above every number that the lost history may have assigned (`Store.renew_epoch`).

    The backup is verified first. With `force`, an existing log, damaged or not, is kept under a different name; it must
    not be open. A database of another application is never replaced: the call raises NotALogError. The new log gets
    `file_mode`. The restore records identify the `operator`. `name` is what messages call the backup. `lost` describes
    the known part of the history after the backup.
    """
    target, name = Path(destination), name or source
    check_destination_free(target, source, force=force)
    with open_read_transaction(source, allow_older=True) as (_, file):
        is_older = file.schema_version < SCHEMA_VERSION
    if not is_older:
        _verify_backup(name, source, report, full=full)
    with (
        open_read_transaction(source, allow_older=True) as (connection, file),
        translate_read_errors(destination),
        open_partial_copy(target) as unfinished,
    ):
        copied = _copy(connection, file, unfinished, report, file_mode)
        if is_older:
            # Only the current schema can be verified, and the backup itself must not change.
            _migrate_copy(unfinished)
            _verify_backup(name, str(unfinished), report, full=full)
        replaced = _combine(_read_replaced_log(target), lost, file.epoch)
        renewed = _start_new_history(unfinished, above, replaced, operator)
        moved_to = _move_aside(target) if force else None
        check_destination_free(target, source, force=False, moved_to=moved_to)
        _publish_copy(unfinished, target)
    return RestoreResult(file.epoch, renewed.new_epoch, renewed.above, copied.records, copied.bytes, moved_to)


def _verify_backup(name: str, path: str, report: ReportProgress, *, full: bool) -> None:
    """Verify the backup, or a copy that has been migrated to the current schema. Raises InconsistencyError."""
    if not full:
        report(StepProgress("structure"))
        with open_read_transaction(path) as (connection, _):
            verify_quickly(connection)
        return
    for finding in verify_log(path):
        if isinstance(finding, StepProgress):
            report(finding)
        elif isinstance(finding, Inconsistency):
            raise InconsistencyError(f"{name} is not a valid backup: {finding.message}")


def _migrate_copy(partial: Path) -> None:
    with open_existing(str(partial), query_only=False) as connection:
        migrate_schema(connection, load_metadata(connection, str(partial)).schema_version)


def _check_target(target: Path, source: str, *, force: bool) -> None:
    _check_other_file(target, source, "is the log itself. Choose another name.")
    if target.exists() and not force:
        raise StoreError(f"{target} exists. Choose another name, or overwrite it with --force.")
    side_files = _list_side_files(target)
    if side_files:
        # SQLite would apply this side file to the copy and destroy both.
        raise StoreError(f"{side_files[0]} exists: the log {target} is open or was not closed. Choose another name.")


def check_destination_free(target: Path, source: str, *, force: bool, moved_to: str | None = None) -> None:
    """Raise StoreError or NotALogError if a restore may not create the target."""
    _check_other_file(target, source, "is the backup itself; restore it under another name.")
    _check_not_foreign(target)
    existing = _list_side_files(target) + ([target] if target.exists() and moved_to is None else [])
    if existing and not force:
        raise StoreError(
            f"{existing[0]} exists. Choose another name; --force keeps the existing files under other names."
        )


def _check_other_file(target: Path, source: str, refusal: str) -> None:
    """Raise StoreError if the target is a directory, or the source itself."""
    if target.is_dir():
        raise StoreError(f"{target} is a directory; give the path of a file in it.")
    if target.exists() and Path(source).exists() and target.samefile(source):
        raise StoreError(f"{target} {refusal}")


def _check_not_foreign(target: Path) -> None:
    if is_foreign_database(str(target)):
        raise NotALogError(
            f"{target} is an SQLite database of another application and is not replaced, even with --force. "
            "Choose another name, or move that database. Nothing was changed."
        )


def _list_side_files(target: Path) -> list[Path]:
    return [side_file for suffix in SIDE_FILE_SUFFIXES if (side_file := Path(f"{target}{suffix}")).exists()]


def _copy(
    connection: sqlite3.Connection, metadata: LogMetadata, partial: Path, report: ReportProgress, file_mode: int
) -> BackupResult:
    """Copy the log inside one read transaction, so that other processes' commits never restart the copy."""
    positions = {lane: head.position for lane, head in run_query(connection, load_heads).items()}

    def report_pages(_status: int, remaining: int, total: int) -> None:
        report(StepProgress("copying", total - remaining, total))

    if not create_file(str(partial), file_mode):
        raise StoreUnavailableError(f"{partial} exists already")
    with closing(sqlite3.connect(partial, isolation_level=None)) as copy:
        # The copy is worthless until it has its final name, so it is synced only at the end.
        copy.execute("PRAGMA journal_mode = OFF")
        copy.execute("PRAGMA synchronous = OFF")
        connection.backup(copy, pages=SLICE_PAGES, progress=report_pages)
    with open_read_transaction(str(partial), allow_older=True) as (copied, found):
        heads = run_query(copied, load_heads)
        if found != metadata or positions != {lane: head.position for lane, head in heads.items()}:
            raise InconsistencyError("the copy differs from the original log; check the disk")
        has_leaps = found.schema_version >= LEAPS_SCHEMA_VERSION
        records = count_records(heads, run_query(copied, load_gaps) if has_leaps else {})
    return BackupResult(metadata.epoch, records, partial.stat().st_size)


def _read_replaced_log(target: Path) -> ReplacedLog:
    """Return the epoch and the highest number of the log to be replaced, or empty values if it is unreadable."""
    if not target.exists():
        return ReplacedLog()
    try:
        with open_read_transaction(str(target), allow_older=True) as (connection, metadata):
            return ReplacedLog(metadata.epoch, find_highest_number(run_query(connection, load_heads).values()))
    except StoreError as error:
        logger.warning("the replaced log cannot be read, so its highest number is unknown: %s", error)
        return ReplacedLog()


def _combine(replaced: ReplacedLog, lost: ReplacedLog, epoch: str) -> ReplacedLog:
    """Combine the log to be replaced with the lost part of the history. `epoch` is the backup's epoch."""
    return ReplacedLog(
        replaced.epoch or ("" if lost.epoch == epoch else lost.epoch),
        max(replaced.highest_number, lost.highest_number),
        max(replaced.lowest_above, lost.lowest_above),
    )


def _start_new_history(partial: Path, above: int | None, replaced: ReplacedLog, operator: Operator) -> EpochRenewal:
    """Start a separate history, even if the backed-up log has been moved into a database."""
    with open_existing(str(partial), query_only=False) as connection:
        save_marker(connection, None)
    return renew_epoch(str(partial), above, replaced, operator)


def _publish_copy(partial: Path, target: Path) -> None:
    """Sync a copy, then move it to its final path. A process that opens this path always sees a complete file."""
    if _list_side_files(partial):
        raise StoreUnavailableError(f"{partial} could not be closed")
    sync_path(partial)
    partial.replace(target)
    sync_path(target.parent)


def _move_aside(target: Path) -> str | None:
    """Rename the existing log and its side files. Returns the new name, or None if the log does not exist."""
    _check_not_foreign(target)  # check again, because copying can take a long time
    if target.exists():
        checkpoint_and_close(target)
    side_files = _list_side_files(target)
    if not target.exists() and not side_files:
        return None
    number = 1
    while any(Path(f"{target}.before-restore-{number}{suffix}").exists() for suffix in ("", *SIDE_FILE_SUFFIXES)):
        number += 1
    moved_to = Path(f"{target}.before-restore-{number}")
    for left in side_files:
        left.rename(f"{moved_to}{left.name.removeprefix(target.name)}")
    if target.exists():
        try:
            os.link(target, moved_to)  # the old log keeps its name until the new one replaces it
        except OSError:
            target.rename(moved_to)
    return str(moved_to)
