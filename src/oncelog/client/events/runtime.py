"""State of one client of events that its tasks share."""

import logging
from typing import Final

from oncelog.client.events.handlers import EventHandlers
from oncelog.client.events.limits import ClientLimits
from oncelog.client.events.protocol import EventsPhase, EventsProtocol
from oncelog.client.events.store import Apply, ClientStore, StoredClient
from oncelog.client.runtime.client import ClientRuntime
from oncelog.errors import ClosedError

logger: Final = logging.getLogger("oncelog.client")


class EventsRuntime(ClientRuntime):
    """Store, protocol, submissions without an outcome, and how far events have been handed over."""

    def __init__(
        self, store: ClientStore, limits: ClientLimits, partitions: tuple[str, ...], apply: Apply | None
    ) -> None:
        super().__init__("events", logger)
        self.store = store
        self.limits = limits
        self.partitions = partitions
        self.apply = apply
        self.handlers = EventHandlers()
        self.end_calls.append(self.handlers.close)
        self.cursor = 0
        """Everything up to this committed id has been handed over."""
        self.epoch = ""
        self.set_aside_count = 0
        self._open_protocol: EventsProtocol | None = None

    @property
    def protocol(self) -> EventsProtocol:
        """Raises ClosedError where the client has not been opened."""
        if self._open_protocol is None:
            raise ClosedError(f"the {self.name} client is not open: use `async with`")
        return self._open_protocol

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
        self._open_protocol = EventsProtocol(stored.client_id, self.partitions, stored.cursor, stored.epoch)
        self._open_protocol.wants_events = self.has_handlers
        self._open_protocol.enqueue(stored.outbox)
