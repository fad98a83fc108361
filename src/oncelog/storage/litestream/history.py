"""Comparison of a backup with a log: their epochs, and the newest blocks of all lanes."""

from typing import Any, Literal

from msgspec import Struct

from oncelog.core.values import LaneHead
from oncelog.storage.backups import LEAPS_SCHEMA_VERSION
from oncelog.storage.metadata import LogMetadata
from oncelog.storage.queries.records import find_block, load_heads, load_previous_epochs
from oncelog.storage.sqlite.query_driver import run_query
from oncelog.storage.sqlite.read_transaction import open_read_transaction


class HistoryMatch(Struct, frozen=True):
    """How the history of a backup relates to that of a log."""

    relation: Literal["same", "ended", "diverged", "foreign"]
    """`same`: the log has every commit of the backup. `ended`: the log has ended the epoch of the backup. `diverged`:
    the backup has commits of the log's epoch that the log does not have. `foreign`: the log never had the epoch."""
    backup_epoch: str
    log_epoch: str
    missing_since_ms: int | None = None
    """With `same`: time of the oldest commit that the backup lacks, or None if it lacks none."""

    def describe_difference(self, backup: str, log: str) -> str | None:
        """Return what a backup contains that its log does not have, or None if the log has every commit."""
        match self.relation:
            case "same":
                return None
            case "ended":
                return (
                    f"{backup} contains epoch {self.backup_epoch}, an earlier history of {log}, which has epoch "
                    f"{self.log_epoch}"
                )
            case "diverged":
                return (
                    f"{backup} contains commits of epoch {self.log_epoch} that {log} does not have: a different copy "
                    "of the log was backed up there"
                )
            case "foreign":
                return (
                    f"{backup} contains the backup of another log or of another history (epoch {self.backup_epoch}, "
                    f"and {log} has {self.log_epoch})"
                )


def list_previous_epochs(connection: Any, metadata: LogMetadata) -> tuple[str, ...]:
    """Return the epochs that a log has ended. The log may have an older schema."""
    return run_query(connection, load_previous_epochs) if metadata.schema_version >= LEAPS_SCHEMA_VERSION else ()


def compare_histories(backup: str, log: str) -> HistoryMatch:
    """Compare a file with the content of a backup with a log. Raises StoreError.

    A block hash covers all earlier blocks of its lane, so the newest block of each lane is enough.
    """
    with open_read_transaction(backup, allow_older=True) as (connection, metadata):
        epoch, heads = metadata.epoch, run_query(connection, load_heads)
    # The log is read after the backup, which may still grow.
    with open_read_transaction(log, allow_older=True) as (connection, metadata):
        if epoch != metadata.epoch:
            previous = list_previous_epochs(connection, metadata)
            return HistoryMatch("ended" if epoch in previous else "foreign", epoch, metadata.epoch)
        log_heads = run_query(connection, load_heads)
        for lane, head in heads.items():
            block = run_query(connection, find_block, lane, head.height)
            has_block = head.height == 0 or (block is not None and block.hash == head.block_hash)
            if not has_block or log_heads.get(lane, LaneHead()).revision < head.revision:
                return HistoryMatch("diverged", epoch, epoch)
        missing_ms = []
        for lane, head in log_heads.items():
            copied_height = heads.get(lane, LaneHead()).height
            if head.height > copied_height:
                block = run_query(connection, find_block, lane, copied_height + 1)
                missing_ms.append(head.log_time_ms if block is None else block.log_time_ms)
    return HistoryMatch("same", epoch, epoch, min(missing_ms, default=None))
