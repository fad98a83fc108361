"""A caller over plain HTTP with one connection. It sends the next request after each answer."""

import asyncio
import time
from typing import cast

from bench.wire import Slice, Watch


class Caller(asyncio.Protocol):
    """Subclasses define the requests and the expected answers."""

    path = ""
    wanted = b""
    """Bytes that every answer must contain."""

    def __init__(self) -> None:
        self._head = (
            b"POST %b HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: %%d\r\n\r\n"
            % self.path.encode()
        )
        self._transport: asyncio.Transport | None = None
        self._received = b""
        self._length = 0
        self.last = b""
        """The last answer."""
        self.waited: list[float] = []
        self._began = 0.0
        self._until = 0.0
        self.done: asyncio.Future[None] | None = None

    def body(self) -> bytes | None:
        """Return the body of the next request, or None if there are no more."""
        raise NotImplementedError

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.done is not None and not self.done.done():
            self.done.set_exception(exc or ConnectionError("the server has closed the connection"))

    def call_until(self, until: float) -> "asyncio.Future[None]":
        """Send requests until this time. The returned future completes with the last answer."""
        self.waited = []
        self._until = until
        self.done = asyncio.get_running_loop().create_future()
        self._next(time.perf_counter())
        return self.done

    def _next(self, now: float) -> None:
        body = self.body() if now < self._until else None
        if body is None:
            if self.done is not None:
                self.done.set_result(None)
            return
        self._began = now
        assert self._transport is not None
        self._transport.write(self._head % len(body) + body)

    def data_received(self, data: bytes) -> None:
        received = self._received + data if self._received else data
        if not self._length:
            end = received.find(b"\r\n\r\n")
            if end < 0:
                self._received = received
                return
            at = received.index(b"Content-Length: ") + 16
            self._length = end + 4 + int(received[at : received.index(b"\r\n", at)])
        if len(received) < self._length:
            self._received = received
            return
        self.last, self._received, self._length = received, b"", 0
        now = time.perf_counter()
        self.waited.append(now - self._began)
        if self.wanted in received:
            self._next(now)
        elif self.done is not None:
            self.done.set_exception(RuntimeError(f"unexpected answer: {received[:1000]!r}"))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


async def keep_calling(callers: "list[Caller]", server: int, seconds: float, events: int = 1) -> Slice:
    """Run all callers concurrently for this long. Each request contains `events` events."""
    watch = Watch(server)
    await asyncio.gather(*(caller.call_until(watch.began + seconds) for caller in callers))
    waited = [one for caller in callers for one in caller.waited]
    return watch.slice(len(waited) * events, waited)
