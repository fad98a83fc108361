"""Limits and times of a ledger's client, each with its unit. All can be set."""

from oncelog.client.runtime.values import MIB, BaseLimits


class LedgerLimits(BaseLimits, frozen=True, kw_only=True):
    """What a client holds at most, and how long it waits."""

    pending_writes_max: int = 10_000
    """Writes of a scope without an outcome. Beyond it `write` raises LimitExceededError."""
    pending_bytes_max: int = 256 * MIB
    """Of all of them together; they are kept in memory too."""
    transaction_bytes_max: int = 4_000_000
    """Of one transaction on the wire. A server takes messages of 4 MiB unless it was told otherwise."""
    value_bytes_max: int = MIB
    """Of the value of one entity. The server's own limit is the same unless it was told otherwise."""
    in_flight_max: int = 64
    """Writes of a scope that are sent before the first of them is answered."""
    close_timeout_ms: int = 5000
    """How long `close` waits for the answers of what has been sent."""
    idle_ms: int = 3_600_000
    """After so long without a write, the server is asked where the client stands before the next one is sent."""
    pause_ms_min: int = 100
    """Before something is sent again; each further pause is twice as long."""
    pause_ms_max: int = 10_000
    reconnect_ms_max: int = 1000
    """Between attempts to reach a server that is away. When it is back the pause is over, however long it was to be."""
