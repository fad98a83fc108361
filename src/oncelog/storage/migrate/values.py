"""Rows that a migration copies, and the counts by which source and target are compared."""

from collections.abc import Mapping
from importlib.resources import files
from typing import Any, Final, NamedTuple

from msgspec import Struct

from oncelog.core.values import LaneHead
from oncelog.sql_files import parse_statements
from oncelog.storage.clock import ClockMark
from oncelog.storage.leaps import LaneGaps, count_records
from oncelog.storage.tenants import USAGE_VERSION

_SQL: Final = files("oncelog.storage.migrate") / "sql"
SOURCE_SQL: Final = parse_statements((_SQL / "source.sql").read_text(encoding="utf-8"))
TARGET_SQL: Final = parse_statements((_SQL / "target.sql").read_text(encoding="utf-8"))

COUNT_NAMES: Final = ("records", "erased records", "blocks", "records of partitions", "records of streams", "policies")
"""What the statements `counts` give, in this order."""

RECORD_COLUMNS: Final = (
    *("lane", "position", "sequence", "log_time_ms", "height", "client_sequence", "key_hash", "sequence_hash"),
    *("policy", "scope", "client", "key", "fingerprint", "actor", "partitions", "salt", "body_hash", "body"),
)
BLOCK_COLUMNS: Final = ("lane", "height", "first_position", "count", "log_time_ms", "previous", "root")
PARTITION_RECORD_COLUMNS: Final = ("lane", "partition", "position")
POLICY_COLUMNS: Final = ("name", "declaration")

RowTuple = tuple[Any, ...]


class LaneProgress(NamedTuple):
    """How far a lane has been copied."""

    position: int = 0
    height: int = 0


class RecordSlice(NamedTuple):
    """Consecutive records of a lane with what belongs to them: copied together or not at all."""

    records: list[RowTuple]
    partition_records: list[RowTuple]
    blocks: list[RowTuple]


class SourceState(NamedTuple):
    """What changes with every commit, of one moment."""

    heads: dict[int, LaneHead]
    erasures: int
    clock: ClockMark
    tenants: str | None = None
    """The quotas (storage/tenants.py)."""
    usage_version: int = USAGE_VERSION
    """How the usage of tenants was counted."""
    leaps: str | None = None
    """The numbers above which the log continued after restores (storage/leaps.py)."""
    gaps: Mapping[int, LaneGaps] = {}
    """What these leaps have passed over in each lane."""

    @property
    def record_count(self) -> int:
        """How many there are."""
        return count_records(self.heads, self.gaps)


class PendingMove(Struct, frozen=True):
    """What a database says about itself until the log in it is whole."""

    source_epoch: str
    started_ms: int
    id: str
    """No other move has it. The mark that the file gets at the end names it."""


class MigrationOutcome(Struct, frozen=True):
    """What has been moved."""

    epoch: str
    records: int
    lanes: int
    is_new: bool
    """False if an earlier run had done all of it."""
    tables_left: list[str]
    """What the application has in the file beside the log."""
