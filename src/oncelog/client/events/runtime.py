"""State of one client of events that its tasks share."""

import logging
from typing import Final

from oncelog.client.events.handlers import EventHandlers
from oncelog.client.events.protocol import EventsPhase, EventsProtocol
from oncelog.client.events.store import Apply, ClientStore, StoredClient
from oncelog.client.events.values import ClientLimits
from oncelog.client.runtime.client import ProtocolRuntime

logger: Final = logging.getLogger("oncelog.client")


class EventsRuntime(ProtocolRuntime[ClientStore, EventsProtocol]):
    """Store, protocol, submissions without an outcome, and how far events have been handed over."""

    def __init__(
        self, store: ClientStore, limits: ClientLimits, partitions: tuple[str, ...], apply: Apply | None
    ) -> None:
        super().__init__("events", logger, store)
        self.limits = limits
        self.partitions = partitions
        self.apply = apply
        self.handlers = EventHandlers()
        self.end_calls.append(self.handlers.close)
        self.cursor = 0
        """Everything up to this committed id has been handed over."""
        self.epoch = ""
        self.set_aside_count = 0

    @property
    def has_handlers(self) -> bool:
        """Whether anything takes events, or there are none to take."""
        return self.apply is not None or bool(self.handlers) or not self.partitions

    @property
    def has_undelivered(self) -> bool:
        """Whether events, or a cursor behind them, wait to be handed over."""
        protocol = self.protocol
        is_other_history = protocol.phase is EventsPhase.HISTORY_CHANGED
        return bool(protocol.ready_count) or (
            not is_other_history and (protocol.cursor != self.cursor or protocol.epoch != self.epoch)
        )

    def load(self, stored: StoredClient) -> None:
        """Start from what the store has."""
        self.cursor, self.epoch = stored.cursor, stored.epoch
        self.set_aside_count = stored.set_aside
        protocol = EventsProtocol(stored.client_id, self.partitions, stored.cursor, stored.epoch)
        protocol.wants_events = self.has_handlers
        protocol.enqueue(stored.outbox)
        self.loaded_protocol = protocol
