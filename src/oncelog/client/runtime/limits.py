"""Limits that all clients have: sizes of messages, timeouts, and pauses between attempts."""

from typing import Final

from msgspec import Struct

from oncelog.core.limits import check_whole_numbers
from oncelog.errors import SettingsError

LIMIT_MAX: Final = 2**40
MIB: Final = 2**20


class BaseLimits(Struct, frozen=True, kw_only=True):
    """How long a client waits, and how large a message of the server is at most."""

    message_bytes_max: int = 64 * MIB
    """Of one answer or message of the server."""
    answer_timeout_ms: int = 30_000
    """A server that owes an answer for so long is given up, and asked again."""
    heartbeat_ms: int = 20_000
    """How often a silent server is asked whether it is still there."""
    pause_ms_min: int = 200
    """Before the second attempt; each further pause is twice as long."""
    pause_ms_max: int = 30_000
    refused_pause_ms_min: int = 5000
    """The same where the server does not let us in, or refuses for another reason that a person has to remove."""
    refused_pause_ms_max: int = 300_000
    retry_after_ms_max: int = 300_000
    """A server that asks for a longer pause is asked again after this one."""

    def __post_init__(self) -> None:
        check_whole_numbers(self, self.__struct_fields__, highest=LIMIT_MAX)
        for shorter, longer in (("pause_ms_min", "pause_ms_max"), ("refused_pause_ms_min", "refused_pause_ms_max")):
            if getattr(self, shorter) > getattr(self, longer):
                raise SettingsError(f"{shorter} must not be more than {longer}")


class ConnectionLimits(BaseLimits, frozen=True, kw_only=True):
    """The same for clients that connect over HTTP and WebSockets."""

    connect_timeout_ms: int = 10_000


def check_at_most(limits: BaseLimits, name: str, maximum: int) -> None:
    """Raises SettingsError for a value that no server allows."""
    value = getattr(limits, name)
    if value > maximum:
        raise SettingsError(f"{name} must be at most {maximum}, not {value}")
