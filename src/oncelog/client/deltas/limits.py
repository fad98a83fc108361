"""Limits and times of a client of rows, each with its unit. All can be set."""

from oncelog.client.runtime.values import MIB, ConnectionLimits, check_at_most
from oncelog.core.deltas import PUSH_DELTAS_MAX


class DeltasLimits(ConnectionLimits, frozen=True, kw_only=True):
    """What a client holds at most, and how long it waits."""

    outbox_deltas_max: int = 100_000
    """Deltas without an acknowledgement. Beyond it an edit raises LimitExceededError, and nothing is changed."""
    outbox_bytes_max: int = 256 * MIB
    """Of all of them together."""
    value_bytes_max: int = 256 * 1024
    """Of the value of one column in JSON. A gateway's own limit is the same unless it was told otherwise."""
    delta_bytes_max: int = 3 * MIB
    """Of one delta in JSON. A gateway takes requests of 4 MiB unless it was told otherwise."""
    push_deltas_max: int = PUSH_DELTAS_MAX
    """Deltas of one push. More than 10,000 no gateway takes."""
    push_bytes_max: int = 3_500_000
    """Of one push; a delta that is larger goes alone."""
    page_deltas: int = 500
    """Deltas that are asked for at a time."""
    page_rows: int = 500
    """Rows of a snapshot that are asked for at a time."""
    changes_max: int = 10_000
    """Changes that wait for one reader of `changes`. Beyond it the reader gets UpdatesLostError."""
    changes_bytes_max: int = 64 * MIB
    """Of the values in them."""
    answer_timeout_ms: int = 60_000
    """A request without an answer for so long is given up, and made again."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_most(self, "push_deltas_max", PUSH_DELTAS_MAX)
