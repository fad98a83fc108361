"""Limits and times of a client, each with its unit. All can be set; the defaults suit people and services alike."""

from typing import Final

from msgspec import Struct

from oncelog.errors import SettingsError

LIMIT_MAX: Final = 2**40


class ClientLimits(Struct, frozen=True, kw_only=True):
    """What a client holds at most, and how long it waits."""

    outbox_events_max: int = 100_000
    """Submissions without an outcome. Beyond it `submit` raises LimitExceededError."""
    outbox_bytes_max: int = 256 * 1024 * 1024
    """Of all of them together; they are kept in memory too."""
    body_bytes_max: int = 1024 * 1024
    """Of one event in its canonical form. A server takes frames of 4 MiB unless it was told otherwise."""
    hand_over_events_max: int = 1000
    """Events that are handed over in one transaction."""
    message_bytes_max: int = 64 * 1024 * 1024
    """Of one message of the server."""
    connect_timeout_ms: int = 10_000
    answer_timeout_ms: int = 30_000
    """A server that owes an answer for so long is given up, and connected to again."""
    taking_timeout_ms: int = 1000
    """If nobody has room for further events for so long, what waits in the outbox is sent before they are."""
    heartbeat_ms: int = 20_000
    """How often a silent server is asked whether it is still there."""
    pause_ms_min: int = 200
    """Before the second attempt to connect; each further pause is twice as long."""
    pause_ms_max: int = 30_000
    refused_pause_ms_min: int = 5000
    """Before the next attempt where the server does not let us in."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= LIMIT_MAX:
                raise SettingsError(f"{name} must be a whole number from 1 to {LIMIT_MAX}, not {value!r}")
        if self.pause_ms_min > self.pause_ms_max:
            raise SettingsError("pause_ms_min must not be more than pause_ms_max")
