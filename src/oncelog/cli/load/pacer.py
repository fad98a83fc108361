"""When the connections of a load test send their requests.

In a closed loop, a connection sends its next request after an answer. A slow server therefore receives fewer requests,
and hides its delays: a stall of one second delays only the requests in flight.

In an open loop, requests are due at fixed times, as they are for independent clients. A latency counts from the time at
which the request was due, so a stall of one second delays all requests of this second.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Final

from msgspec import Struct

Send = Callable[[int, float], None]
"""Sends the next request of the connection with this number. The latency counts from the given time in seconds."""
PAUSE_S_MIN: Final = 0.001
"""Timers of the event loop are not more precise. At high rates, all requests of a millisecond are sent together."""
EXTRA_TIME_SHARE: Final = 0.05
"""Requests that are due but cannot be sent yet may be sent for this share of the duration after its end. A pause at the
end thus does not fail a test, but a server that is 5 % too slow does."""


class Schedule(Struct, frozen=True):
    """Due times of requests: the first one at the start, and the others at equal intervals.

    Random (Poisson) intervals would need a list of the requests that are due but unsent. With equal intervals, their
    number is enough, so an overload needs no memory, and two runs are comparable. Random intervals would hardly change
    the latencies, because a group commit takes all requests that are waiting.
    """

    start_s: float
    requests_per_s: float
    duration_s: float

    @property
    def requests(self) -> int:
        """Number of requests within the duration."""
        return round(self.requests_per_s * self.duration_s)

    @property
    def last_send_s(self) -> float:
        """Time after which requests that could not be sent remain unsent."""
        return self.start_s + self.duration_s * (1 + EXTRA_TIME_SHARE)

    def compute_due_s(self, request: int) -> float:
        """Return the time at which a request is due."""
        return self.start_s + request / self.requests_per_s


class Pacer(ABC):
    """Decides when the connections send their requests, and limits the requests in flight of each connection."""

    def __init__(
        self, send: Send, connections: int, in_flight: int, now_s: Callable[[], float] = time.perf_counter
    ) -> None:
        """`send` must not call `finish` itself."""
        self._send = send
        self._connections = connections
        self._in_flight_max = in_flight
        self._now_s = now_s
        self._unfinished = 0
        """Requests in flight on all connections."""
        self._last_finished = asyncio.Event()
        """Set when no request is in flight and none will be sent."""
        self.late = 0
        """Requests that had to wait because their connection had too many requests in flight. 0 in a closed loop."""

    @property
    def unsent(self) -> int:
        """Requests that are due but unsent. 0 in a closed loop."""
        return 0

    @property
    @abstractmethod
    def last_send_s(self) -> float:
        """Time after which no request is sent."""

    @abstractmethod
    async def run(self) -> None:
        """Send requests until the end, and wait until all of them are finished."""

    @abstractmethod
    def finish(self, connection: int) -> None:
        """Note that a request of this connection is no longer in flight."""


class ClosedLoopPacer(Pacer):
    """Keeps a fixed number of requests in flight on each connection."""

    def __init__(
        self,
        send: Send,
        connections: int,
        in_flight: int,
        until_s: float,
        now_s: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(send, connections, in_flight, now_s)
        self._until_s = until_s

    @property
    def last_send_s(self) -> float:
        """See `Pacer`."""
        return self._until_s

    async def run(self) -> None:
        """See `Pacer`."""
        for connection in range(self._connections):
            for _ in range(self._in_flight_max):
                if (now_s := self._now_s()) < self._until_s:
                    self._unfinished += 1
                    self._send(connection, now_s)
        if self._unfinished:
            await self._last_finished.wait()

    def finish(self, connection: int) -> None:
        """See `Pacer`."""
        if (now_s := self._now_s()) < self._until_s:
            self._send(connection, now_s)
            return
        self._unfinished -= 1
        if not self._unfinished:
            self._last_finished.set()


class OpenLoopPacer(Pacer):
    """Sends requests when they are due, in turn on all connections.

    A request whose connection has the maximum number of requests in flight is late: it is sent as soon as one of them
    is finished. After `Schedule.last_send_s`, late requests remain unsent. A late request needs no memory.
    """

    def __init__(
        self,
        send: Send,
        connections: int,
        in_flight: int,
        schedule: Schedule,
        now_s: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        super().__init__(send, connections, in_flight, now_s)
        self._schedule = schedule
        self._sleep = sleep
        self._in_flight = [0] * connections
        self._sent = [0] * connections
        """Requests sent on each connection. Connection n has the requests n, n + connections, and so on."""
        self._waiting = [0] * connections
        """Requests of each connection that are due but unsent."""
        self._is_everything_due = False
        self.due = 0
        """Requests that were due so far."""

    @property
    def last_send_s(self) -> float:
        """See `Pacer`."""
        return self._schedule.last_send_s

    @property
    def unsent(self) -> int:
        """See `Pacer`."""
        return sum(self._waiting)

    async def run(self) -> None:
        """See `Pacer`."""
        schedule = self._schedule
        while self.due < schedule.requests:
            now_s = self._now_s()
            while self.due < schedule.requests and (due_s := schedule.compute_due_s(self.due)) <= now_s:
                self._send_or_wait(self.due % self._connections)
                self.due += 1
            if self.due < schedule.requests:
                await self._sleep(max(PAUSE_S_MIN, due_s - now_s))
        self._is_everything_due = True
        if self._unfinished:
            await self._last_finished.wait()

    def finish(self, connection: int) -> None:
        """See `Pacer`."""
        self._in_flight[connection] -= 1
        self._unfinished -= 1
        if self._waiting[connection] and self._now_s() <= self.last_send_s:
            self._waiting[connection] -= 1
            self._send_next(connection)
        elif self._is_everything_due and not self._unfinished:
            self._last_finished.set()

    def _send_or_wait(self, connection: int) -> None:
        if self._in_flight[connection] < self._in_flight_max:
            self._send_next(connection)
        else:
            self._waiting[connection] += 1
            self.late += 1

    def _send_next(self, connection: int) -> None:
        due_s = self._schedule.compute_due_s(connection + self._sent[connection] * self._connections)
        self._sent[connection] += 1
        self._in_flight[connection] += 1
        self._unfinished += 1
        self._send(connection, due_s)
