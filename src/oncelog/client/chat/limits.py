"""Limits and times of a client of chats, each with its unit. All can be set."""

from typing import Final

from oncelog.client.runtime.limits import MIB, ConnectionLimits, check_at_most

PAGE_MESSAGES_MAX: Final = 500
_DAY_MS: Final = 86_400_000


class ChatLimits(ConnectionLimits, frozen=True, kw_only=True):
    """What a client holds at most, and how long it waits."""

    outbox_messages_max: int = 10_000
    """Messages without an outcome. Beyond it `send` raises LimitExceededError, and nothing is taken."""
    content_bytes_max: int = 4096
    """Of one message. A server's own limit is the same unless it was told otherwise."""
    in_flight_max: int = 1
    """Messages of one chat that are under way at a time. With more than one, one's own messages may change their order
    where the server sends one of them away for a while."""
    remembered_ms: int = 7 * _DAY_MS - 3_600_000
    """A message that has been in the outbox for so long is not sent: a server forgets ids after seven days."""
    page_messages: int = 100
    """Messages that are asked for at a time."""
    syncs_max: int = 8
    """Chats that are caught up with at a time."""
    ahead_max: int = 1000
    """Messages of one chat that are kept while those before them are missing. More come again with the sync."""
    gap_wait_ms: int = 100
    """How long what is missing may be late before it is asked for."""
    ack_wait_ms: int = 50
    """How long acknowledgements gather before they are sent."""
    check_ms: int = 60_000
    """How often a live client asks whether it has heard of everything."""
    updates_max: int = 10_000
    """Updates that wait for one reader of `updates`. Beyond it the reader gets UpdatesLostError."""
    frames_max: int = 1000
    """Frames that wait to be kept. Beyond it no more are read, and the server may close the connection."""
    message_bytes_max: int = 16 * MIB
    """Of one answer or frame of the server."""
    close_timeout_ms: int = 1000
    """How long `close` tries to have the last acknowledgements sent."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_most(self, "page_messages", PAGE_MESSAGES_MAX)
