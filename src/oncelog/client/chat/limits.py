"""Limits and times of a client of chats, each with its unit. All can be set."""

from typing import Final

from msgspec import Struct

from oncelog.errors import SettingsError

LIMIT_MAX: Final = 2**40
PAGE_MESSAGES_MAX: Final = 500
_MIB: Final = 2**20
_DAY_MS: Final = 86_400_000


class ChatLimits(Struct, frozen=True, kw_only=True):
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
    message_bytes_max: int = 16 * _MIB
    """Of one answer or frame of the server."""
    connect_timeout_ms: int = 10_000
    answer_timeout_ms: int = 30_000
    """A server that owes an answer for so long is given up, and connected to again."""
    heartbeat_ms: int = 20_000
    """How often a silent server is asked whether it is still there."""
    close_timeout_ms: int = 1000
    """How long `close` tries to have the last acknowledgements sent."""
    pause_ms_min: int = 200
    """Before the second attempt; each further pause is twice as long."""
    pause_ms_max: int = 30_000
    refused_pause_ms_min: int = 5000
    """The same where the server does not let us in."""
    refused_pause_ms_max: int = 300_000
    retry_after_ms_max: int = 300_000
    """A server that asks for a longer pause is asked again after this one."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= LIMIT_MAX:
                raise SettingsError(f"{name} must be a whole number from 1 to {LIMIT_MAX}, not {value!r}")
        for shorter, longer in (("pause_ms_min", "pause_ms_max"), ("refused_pause_ms_min", "refused_pause_ms_max")):
            if getattr(self, shorter) > getattr(self, longer):
                raise SettingsError(f"{shorter} must not be more than {longer}")
        if self.page_messages > PAGE_MESSAGES_MAX:
            raise SettingsError(f"page_messages must be at most {PAGE_MESSAGES_MAX}, not {self.page_messages}")
