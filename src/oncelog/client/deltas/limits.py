"""Limits and times of a client of rows, each with its unit. All can be set."""

from typing import Final

from msgspec import Struct

from oncelog.core.deltas import PUSH_DELTAS_MAX
from oncelog.errors import SettingsError

LIMIT_MAX: Final = 2**40
_MIB: Final = 2**20


class DeltasLimits(Struct, frozen=True, kw_only=True):
    """What a client holds at most, and how long it waits."""

    outbox_deltas_max: int = 100_000
    """Deltas without an acknowledgement. Beyond it an edit raises LimitExceededError, and nothing is changed."""
    outbox_bytes_max: int = 256 * _MIB
    """Of all of them together."""
    value_bytes_max: int = 256 * 1024
    """Of the value of one column in JSON. A gateway's own limit is the same unless it was told otherwise."""
    delta_bytes_max: int = 3 * _MIB
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
    """Changes that wait for one reader of `changes`. Beyond it the reader gets ChangesLostError."""
    changes_bytes_max: int = 64 * _MIB
    """Of the values in them."""
    message_bytes_max: int = 64 * _MIB
    """Of one answer or message of the server."""
    connect_timeout_ms: int = 10_000
    answer_timeout_ms: int = 60_000
    """A request without an answer for so long is given up, and made again."""
    heartbeat_ms: int = 20_000
    """How often a silent server is asked whether it is still there."""
    pause_ms_min: int = 200
    """Before the second attempt; each further pause is twice as long."""
    pause_ms_max: int = 30_000
    refused_pause_ms_min: int = 5000
    """The same where the gateway refuses a delta, or does not let us in."""
    refused_pause_ms_max: int = 300_000
    retry_after_ms_max: int = 300_000
    """A gateway that asks for a longer pause is asked again after this one."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= LIMIT_MAX:
                raise SettingsError(f"{name} must be a whole number from 1 to {LIMIT_MAX}, not {value!r}")
        for shorter, longer in (("pause_ms_min", "pause_ms_max"), ("refused_pause_ms_min", "refused_pause_ms_max")):
            if getattr(self, shorter) > getattr(self, longer):
                raise SettingsError(f"{shorter} must not be more than {longer}")
        if self.push_deltas_max > PUSH_DELTAS_MAX:
            raise SettingsError(f"push_deltas_max must be at most {PUSH_DELTAS_MAX}, not {self.push_deltas_max}")
