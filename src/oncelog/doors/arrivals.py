"""Connections as they come, before they have asked for anything: counted, and given so much time.

aiohttp waits for ever for the first request of a connection. Whoever opens many and says nothing would take all that
there are from others, without a credential.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final, cast

logger: Final = logging.getLogger("oncelog.doors")

RESERVE: Final = 100
"""So many more than `connections_max` may come, so that they can be told that there are too many; and for operators."""

Transport = Any
"""uvloop's is an asyncio.Transport without saying so."""


class Arrivals:
    """All connections of a server, whatever they do. `protocol` makes the one that serves them."""

    def __init__(self, connections_max: int, silent_ms: int, now_ms: Callable[[], int]) -> None:
        self._most = connections_max + RESERVE
        self._silent_ms = silent_ms
        self._now_ms = now_ms
        self._silent_since_ms: dict[Transport, int | None] = {}
        """None once it has sent a request."""
        self._turned_away = 0

    def __len__(self) -> int:
        return len(self._silent_since_ms)

    def are_all_gone(self) -> bool:
        """Whether nobody is connected any more."""
        self.sweep()
        return not self._silent_since_ms

    def protocol(self, serve: Callable[[], asyncio.Protocol]) -> asyncio.Protocol:
        """For `loop.create_server`."""
        return _Arrival(self, serve)

    def admit(self, transport: Transport) -> bool:
        """Takes note of a connection. False if there are too many."""
        if len(self._silent_since_ms) >= self._most:
            self.sweep()
        if len(self._silent_since_ms) >= self._most:
            self._turned_away += 1
            return False
        self._silent_since_ms[transport] = self._now_ms()
        return True

    def spoke(self, transport: Transport | None) -> None:
        """It has sent a request."""
        if transport in self._silent_since_ms:
            self._silent_since_ms[transport] = None

    def sweep(self) -> None:
        """Forgets those that are gone, and ends those that have said nothing for too long. Called now and then."""
        now_ms = self._now_ms()
        for transport, since_ms in list(self._silent_since_ms.items()):
            is_silent = since_ms is not None and now_ms - since_ms > self._silent_ms
            if is_silent:
                transport.abort()
            if is_silent or transport.is_closing():
                del self._silent_since_ms[transport]
        if self._turned_away:
            logger.warning("connections were turned away: there are too many", extra={"count": self._turned_away})
            self._turned_away = 0


class _Arrival(asyncio.Protocol):
    """Stands in for the real protocol until the connection is there, and then has no part in it."""

    def __init__(self, arrivals: Arrivals, serve: Callable[[], asyncio.Protocol]) -> None:
        self._arrivals = arrivals
        self._serve = serve

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if not self._arrivals.admit(transport):
            cast("asyncio.Transport", transport).abort()
            return
        served = self._serve()
        transport.set_protocol(served)
        served.connection_made(transport)
