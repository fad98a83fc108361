"""Rehearses a restore: restores a backup into a temporary file, and verifies the result."""

from pathlib import Path
from tempfile import TemporaryDirectory

from msgspec import Struct

from oncelog.core.rules.leaps import find_last_commit_ms
from oncelog.errors import StoreError
from oncelog.storage.backups import restore
from oncelog.storage.litestream.recovery import TargetReader
from oncelog.storage.litestream.target import BackupTarget
from oncelog.storage.queries.records import load_heads
from oncelog.storage.sqlite.query_driver import run_query
from oncelog.storage.sqlite.read_transaction import open_read_transaction
from oncelog.storage.verify.findings import Inconsistency, ReportProgress, StepProgress, VerificationSummary
from oncelog.storage.verify.verification import verify_log


class BackupCheck(Struct, frozen=True):
    """Result of checking a backup."""

    records: int
    epoch: str
    newest_ms: int | None
    """Time of the newest commit, or None if the log has no records."""
    finding: VerificationSummary | Inconsistency
    """Result of verifying the restored log."""


def check_backup(source: str | BackupTarget, report: ReportProgress, temp_dir: Path | None = None) -> BackupCheck:
    """Restore a backup file or target into a temporary file, and verify the restored log.

    The temporary directory needs space for two copies of the log. The backup does not change. Raises StoreError,
    BackupError and InconsistencyError.
    """
    try:
        directory = TemporaryDirectory(prefix="oncelog-check-", dir=temp_dir)
    except OSError as error:
        raise StoreError(f"no temporary directory can be created: {error.strerror}") from error
    with directory as name:
        if isinstance(source, BackupTarget):
            path = TargetReader(source, Path(name)).recover(None, report).path
            label = source.name
        else:
            path, label = Path(source), source
        with open_read_transaction(str(path), allow_older=True) as (connection, metadata):
            heads = run_query(connection, load_heads)
        newest_ms = find_last_commit_ms(heads.values(), metadata.created_ms) if heads else None
        restored = str(Path(name, "restored.db"))
        records = restore(str(path), restored, report, name=label).records
        finding: VerificationSummary | Inconsistency = Inconsistency("the verification ended early")
        for found in verify_log(restored):
            if isinstance(found, StepProgress):
                report(found)
            else:
                finding = found
    return BackupCheck(records, metadata.epoch, newest_ms, finding)
