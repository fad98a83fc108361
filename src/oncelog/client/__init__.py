"""Clients of the Events API: submissions are durable, and `apply` handles each event once, in commit order.

See docs/guides/client.md.
"""

from typing import TYPE_CHECKING

from oncelog.client.events.values import (
    ClientLimits,
    Committed,
    Event,
    Fault,
    HistoryChange,
    Outcome,
    Refused,
    RefusedEvent,
    SetAside,
    Status,
)
from oncelog.client.runtime.values import ConnectionState
from oncelog.lazy_names import import_lazily

if TYPE_CHECKING:
    from oncelog.client.events.blocking import BlockingClient, BlockingPending
    from oncelog.client.events.client import Client
    from oncelog.client.events.outbox import Draft, Pending
    from oncelog.client.runtime.http import Socket, Transport, WebSocketTransport

__getattr__, __dir__ = import_lazily(
    __name__,
    {
        "BlockingClient": "oncelog.client.events.blocking",
        "BlockingPending": "oncelog.client.events.blocking",
        "Client": "oncelog.client.events.client",
        "Draft": "oncelog.client.events.outbox",
        "Pending": "oncelog.client.events.outbox",
        "Socket": "oncelog.client.runtime.http",
        "Transport": "oncelog.client.runtime.http",
        "WebSocketTransport": "oncelog.client.runtime.http",
    },
    renamed={"Rejected": "Refused", "Rejection": "RefusedEvent", "State": "ConnectionState"},
)


__all__ = [
    "BlockingClient",
    "BlockingPending",
    "Client",
    "ClientLimits",
    "Committed",
    "ConnectionState",
    "Draft",
    "Event",
    "Fault",
    "HistoryChange",
    "Outcome",
    "Pending",
    "Refused",
    "RefusedEvent",
    "SetAside",
    "Socket",
    "Status",
    "Transport",
    "WebSocketTransport",
]
