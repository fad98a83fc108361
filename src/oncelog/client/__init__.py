"""Clients of an Oncelog server: a durable outbox, and every event once, in one order. See docs/client.md."""

from oncelog.client.blocking import BlockingClient, BlockingPending
from oncelog.client.client import Client
from oncelog.client.limits import ClientLimits
from oncelog.client.pending import Draft, Pending
from oncelog.client.values import (
    Committed,
    Event,
    Fault,
    HistoryChange,
    Outcome,
    Rejected,
    Rejection,
    SetAside,
    State,
    Status,
)
from oncelog.client.wire import Socket, Transport, WebSocketTransport

__all__ = [
    "BlockingClient",
    "BlockingPending",
    "Client",
    "ClientLimits",
    "Committed",
    "Draft",
    "Event",
    "Fault",
    "HistoryChange",
    "Outcome",
    "Pending",
    "Rejected",
    "Rejection",
    "SetAside",
    "Socket",
    "State",
    "Status",
    "Transport",
    "WebSocketTransport",
]
