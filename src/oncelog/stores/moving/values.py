"""What goes from a file into a database, and what the two are compared by."""

from collections.abc import Mapping
from importlib.resources import files
from typing import Any, Final, NamedTuple

from msgspec import Struct

from oncelog.core.values import LaneHead
from oncelog.statements import named_statements
from oncelog.stores.clock import ClockMark
from oncelog.stores.leaps import LaneGaps, count_records
from oncelog.stores.tenants import USAGE_VERSION

_SQL: Final = files("oncelog.stores.moving") / "sql"
SOURCE_SQL: Final = named_statements((_SQL / "source.sql").read_text(encoding="utf-8"))
TARGET_SQL: Final = named_statements((_SQL / "target.sql").read_text(encoding="utf-8"))

COUNTED: Final = ("records", "erased records", "blocks", "records of partitions", "records of streams", "policies")
"""What the statements `counts` give, in this order."""

RECORD: Final = (
    *("lane", "position", "sequence", "log_time_ms", "height", "client_sequence", "key_hash", "sequence_hash"),
    *("policy", "scope", "client", "key", "fingerprint", "actor", "partitions", "salt", "body_hash", "body"),
)
BLOCK: Final = ("lane", "height", "first_position", "count", "log_time_ms", "previous", "root")
PARTITION_RECORD: Final = ("lane", "partition", "position")
POLICY: Final = ("name", "declaration")

Row = tuple[Any, ...]


class Reached(NamedTuple):
    """How far a lane has been copied."""

    position: int = 0
    height: int = 0


class Slice(NamedTuple):
    """Consecutive records of a lane with what belongs to them: copied together or not at all."""

    records: list[Row]
    partition_records: list[Row]
    blocks: list[Row]


class State(NamedTuple):
    """What changes with every commit, of one moment."""

    heads: dict[int, LaneHead]
    erasures: int
    clock: ClockMark
    tenants: str | None = None
    """The quotas (stores/tenants.py)."""
    usage_version: int = USAGE_VERSION
    """How the usage of tenants was counted."""
    leaps: str | None = None
    """The numbers above which the log continued after restores (stores/leaps.py)."""
    gaps: Mapping[int, LaneGaps] = {}
    """What these leaps have passed over in each lane."""

    @property
    def records(self) -> int:
        """How many there are."""
        return count_records(self.heads, self.gaps)


class Move(Struct, frozen=True):
    """What a database says about itself until the log in it is whole."""

    source_epoch: str
    started_ms: int
    id: str
    """No other move has it. The mark that the file gets at the end names it."""


class Outcome(Struct, frozen=True):
    """What has been moved."""

    epoch: str
    records: int
    lanes: int
    is_new: bool
    """False if an earlier run had done all of it."""
    tables_left: list[str]
    """What the application has in the file beside the log."""
