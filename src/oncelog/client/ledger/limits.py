"""Limits and times of a ledger's client, each with its unit. All can be set."""

from typing import Final

from msgspec import Struct

from oncelog.errors import SettingsError

LIMIT_MAX: Final = 2**40


class LedgerLimits(Struct, frozen=True, kw_only=True):
    """What a client holds at most, and how long it waits."""

    pending_writes_max: int = 10_000
    """Writes of a scope without an outcome. Beyond it `write` raises LimitExceededError."""
    pending_bytes_max: int = 256 * 1024 * 1024
    """Of all of them together; they are kept in memory too."""
    transaction_bytes_max: int = 4_000_000
    """Of one transaction on the wire. A server takes messages of 4 MiB unless it was told otherwise."""
    value_bytes_max: int = 1024 * 1024
    """Of the value of one entity. The server's own limit is the same unless it was told otherwise."""
    in_flight_max: int = 64
    """Writes of a scope that are sent before the first of them is answered."""
    message_bytes_max: int = 64 * 1024 * 1024
    """Of one message of the server."""
    answer_timeout_ms: int = 30_000
    """A call without an answer for so long is given up: a write is sent again, a read is a LostError."""
    heartbeat_ms: int = 20_000
    """How often a server that owes an answer is asked whether it is still there."""
    close_timeout_ms: int = 5000
    """How long `close` waits for the answers of what has been sent."""
    idle_ms: int = 3_600_000
    """After so long without a write, the server is asked where the client stands before the next one is sent."""
    pause_ms_min: int = 100
    """Before something is sent again; each further pause is twice as long."""
    pause_ms_max: int = 10_000
    reconnect_ms_max: int = 1000
    """Between attempts to reach a server that is away. When it is back the pause is over, however long it was to be."""
    refused_pause_ms_min: int = 5000
    """The same where the server does not let us in."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= LIMIT_MAX:
                raise SettingsError(f"{name} must be a whole number from 1 to {LIMIT_MAX}, not {value!r}")
        if self.pause_ms_min > self.pause_ms_max:
            raise SettingsError("pause_ms_min must not be more than pause_ms_max")
