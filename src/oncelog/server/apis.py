"""All APIs of a server: their services, hubs, sessions and endpoints."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from oncelog.engine.log import Log
from oncelog.server.audit import endpoints as audit
from oncelog.server.auth_gate import AuthGate
from oncelog.server.chat.ack_queue import AckQueue
from oncelog.server.chat.endpoints import ChatEndpoints
from oncelog.server.chat.hub import ChatHub
from oncelog.server.chat.service import ChatService
from oncelog.server.chat.session import ChatSession
from oncelog.server.deltas.endpoints import DeltasEndpoints
from oncelog.server.deltas.service import DeltasService
from oncelog.server.deltas.session import DeltasSession
from oncelog.server.endpoint import Endpoint
from oncelog.server.events.endpoints import EventsEndpoints
from oncelog.server.events.hub import EventsHub
from oncelog.server.events.insieme_dialect import InsiemeDialect
from oncelog.server.events.native_dialect import NativeDialect
from oncelog.server.events.service import EventsService
from oncelog.server.events.session import EventsSession
from oncelog.server.ledger.endpoints import LedgerEndpoints
from oncelog.server.ledger.service import LedgerService
from oncelog.server.live_streams import LiveStreams
from oncelog.server.settings import ServerSettings
from oncelog.server.websocket import WebSocketSessions


class Apis:
    """The APIs of one log."""

    def __init__(
        self,
        log: Log,
        settings: ServerSettings,
        auth_gate: AuthGate,
        *,
        on_events_failure: Callable[[Exception], None],
        on_chat_failure: Callable[[Exception], None],
    ) -> None:
        self.log = log
        native = NativeDialect(shows_actor=settings.show_actors)
        self.hub = EventsHub(auth_gate, on_events_failure, native)
        self.events_service = EventsService(
            log,
            self.hub,
            auth_gate,
            native=native,
            insieme=InsiemeDialect(None, shows_actor=settings.show_actors),
        )
        self.events_service.set_tenants(settings.tenants)
        self.event_sessions = WebSocketSessions(auth_gate, partial(EventsSession, self.events_service))
        self.events = EventsEndpoints(self.events_service, self.event_sessions.serve)
        self.ledger_service = LedgerService(log, auth_gate)
        self.ledger = LedgerEndpoints(self.ledger_service)
        deltas_service = DeltasService(log, auth_gate)
        deltas_sessions = WebSocketSessions(auth_gate, partial(DeltasSession, deltas_service))
        self.deltas = DeltasEndpoints(deltas_service, deltas_sessions)
        self.chat_service = ChatService(log, auth_gate)
        self.chat_hub = ChatHub(self.chat_service, on_chat_failure)
        new_chat_session = partial(ChatSession, self.chat_service, self.chat_hub, AckQueue(log))
        self.chat_sessions = WebSocketSessions(auth_gate, new_chat_session)
        self.chat = ChatEndpoints(self.chat_service, self.chat_sessions.serve)
        self._sessions: tuple[WebSocketSessions[Any], ...] = (self.event_sessions, self.chat_sessions, deltas_sessions)
        self._streams = (self.events.streams, self.ledger.streams, self.deltas.streams)
        self.readers: tuple[WebSocketSessions[Any] | LiveStreams, ...] = (*self._sessions, *self._streams)

    def __len__(self) -> int:
        """Return how many WebSockets and streams are open."""
        return sum(self.count_connections().values())

    def count_connections(self) -> dict[str, int]:
        """Return how many WebSockets (`ws`) and streams (`sse`) are open."""
        return {"ws": sum(map(len, self._sessions)), "sse": sum(map(len, self._streams))}

    def list_endpoints(self) -> list[Endpoint]:
        """Return the HTTP operations of all APIs."""
        return [
            *self.events.list_endpoints(),
            *audit.list_endpoints(self.log),
            *self.ledger.list_endpoints(),
            *self.deltas.list_endpoints(),
            *self.chat.list_endpoints(),
        ]

    async def wait_for_replies(self) -> None:
        """Wait until the replies to all accepted requests have been handed to the WebSockets."""
        await asyncio.gather(*(sessions.wait_for_replies() for sessions in self._sessions))

    def close_all(self) -> None:
        """Close all WebSockets and streams, giving the shutdown as the reason."""
        for readers in self.readers:
            readers.close_all()
