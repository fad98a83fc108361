"""Writers of a ledger over plain HTTP: a connection each, the next write when the one before has its answer."""

import asyncio
import itertools
import json
import time
from base64 import b64encode
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Final, cast

from bench.wire import Slice, Watch, uuids

VALUE: Final = b64encode(b"v" * 100).decode()
"""Of an entity: 100 bytes."""
ORGANIZATIONS: Final = 8


class Writer(asyncio.Protocol):
    """One client of the ledger, which numbers its transactions."""

    def __init__(self, number: int) -> None:
        self._head = (
            b"POST /v1/ledger/write HTTP/1.1\r\nHost: 127.0.0.1\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        )
        self._before = f'{{"organization":"org-{number % ORGANIZATIONS}","client_id":"writer-{number}","sequence":'
        self._keys: Iterator[str] = uuids()
        self._sequence = 0
        self._entities = itertools.cycle(range(10))
        self._number = number
        self._transport: asyncio.Transport | None = None
        self._received = b""
        self._length = 0
        self.last = b""
        """The body of the last answer."""
        self.waited: list[float] = []
        self._began = 0.0
        self._until = 0.0
        self.done: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.done is not None and not self.done.done():
            self.done.set_exception(exc or ConnectionError("the server has closed the connection"))

    def write_until(self, until: float) -> "asyncio.Future[None]":
        """Begins to write, and goes on until then."""
        self.waited = []
        self._until = until
        self.done = asyncio.get_running_loop().create_future()
        self._next(time.perf_counter())
        return self.done

    def _next(self, now: float) -> None:
        self._sequence += 1
        body = (
            f'{self._before}{self._sequence},"idempotency_key":"{next(self._keys)}","operations":[{{"set_entity":'
            f'{{"key":"entity/{self._number}/{next(self._entities)}","value":"{VALUE}"}}}}]}}'
        ).encode()
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
        if b'{"committed_tx_id"' not in received:
            if self.done is not None:
                self.done.set_exception(RuntimeError(f"a write was not committed: {received!r}"))
            return
        if now < self._until:
            self._next(now)
        elif self.done is not None:
            self.done.set_result(None)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


@asynccontextmanager
async def writers(host: str, port: int, count: int, first: int) -> AsyncIterator[list[Writer]]:
    """So many, numbered from `first` on: other numbers are other clients."""
    loop = asyncio.get_running_loop()
    made = []
    try:
        for number in range(first, first + count):
            _, writer = await loop.create_connection(lambda number=number: Writer(number), host, port)  # type: ignore[misc]
            made.append(writer)
        yield made
    finally:
        for writer in made:
            writer.close()


async def keep_writing(made: list[Writer], server: int, seconds: float) -> Slice:
    """All of them at once, for so long."""
    watch = Watch(server)
    await asyncio.gather(*(writer.write_until(watch.began + seconds) for writer in made))
    waited = [one for writer in made for one in writer.waited]
    return watch.slice(len(waited), waited)


def answer_of(writer: Writer) -> dict[str, object]:
    """What it was told last."""
    found: dict[str, object] = json.loads(writer.last.partition(b"\r\n\r\n")[2])
    return found
