"""Chat client: sends and delivers each message once, in order, online or offline. See docs/guides/chat-client.md."""

from typing import TYPE_CHECKING

from oncelog.client.chat.values import (
    EXPIRED,
    MEMBER,
    OWNER,
    Arrived,
    ChatDetails,
    ChatLimits,
    ChatSummary,
    Delivery,
    HistoryChange,
    Line,
    Mark,
    Member,
    Membership,
    Message,
    Outcome,
    Progress,
    Refused,
    RefusedMessage,
    Sent,
    Status,
    Update,
)
from oncelog.client.runtime.values import ConnectionState
from oncelog.errors import UpdatesLostError
from oncelog.lazy_names import import_lazily

if TYPE_CHECKING:
    from oncelog.client.chat.blocking import BlockingChatClient, BlockingPending
    from oncelog.client.chat.client import ChatClient
    from oncelog.client.chat.outbox import Pending

__getattr__, __dir__ = import_lazily(
    __name__,
    {
        "BlockingChatClient": "oncelog.client.chat.blocking",
        "BlockingPending": "oncelog.client.chat.blocking",
        "ChatClient": "oncelog.client.chat.client",
        "Pending": "oncelog.client.chat.outbox",
    },
    renamed={"State": "ConnectionState"},
)


__all__ = [
    "EXPIRED",
    "MEMBER",
    "OWNER",
    "Arrived",
    "BlockingChatClient",
    "BlockingPending",
    "ChatClient",
    "ChatDetails",
    "ChatLimits",
    "ChatSummary",
    "ConnectionState",
    "Delivery",
    "HistoryChange",
    "Line",
    "Mark",
    "Member",
    "Membership",
    "Message",
    "Outcome",
    "Pending",
    "Progress",
    "Refused",
    "RefusedMessage",
    "Sent",
    "Status",
    "Update",
    "UpdatesLostError",
]
