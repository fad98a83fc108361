"""Limits and times of a client, each with its unit. All can be set; the defaults suit people and services alike."""

from oncelog.client.runtime.limits import MIB, ConnectionLimits


class ClientLimits(ConnectionLimits, frozen=True, kw_only=True):
    """What a client holds at most, and how long it waits."""

    outbox_events_max: int = 100_000
    """Submissions without an outcome. Beyond it `submit` raises LimitExceededError."""
    outbox_bytes_max: int = 256 * MIB
    """Of all of them together; they are kept in memory too."""
    body_bytes_max: int = MIB
    """Of one event in its canonical form. A server takes frames of 4 MiB unless it was told otherwise."""
    hand_over_events_max: int = 1000
    """Events that are handed over in one transaction."""
    taking_timeout_ms: int = 1000
    """If nobody has room for further events for so long, what waits in the outbox is sent before they are."""
