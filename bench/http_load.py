"""Writers of a ledger over plain HTTP. Each has a connection and sends the next write after each answer."""

import asyncio
import itertools
import json
from base64 import b64encode
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Final

from bench.http_caller import Caller
from bench.wire import uuids

VALUE: Final = b64encode(b"v" * 100).decode()
"""Value of an entity: 100 bytes."""
ORGANIZATIONS: Final = 8


class Writer(Caller):
    """A client of the ledger that numbers its transactions."""

    path = "/v1/ledger/write"
    wanted = b'{"committed_tx_id"'

    def __init__(self, number: int) -> None:
        super().__init__()
        self._before = f'{{"organization":"org-{number % ORGANIZATIONS}","client_id":"writer-{number}","sequence":'
        self._keys: Iterator[str] = uuids()
        self._sequence = 0
        self._entities = itertools.cycle(range(10))
        self._number = number

    def body(self) -> bytes:
        self._sequence += 1
        return (
            f'{self._before}{self._sequence},"idempotency_key":"{next(self._keys)}","operations":[{{"set_entity":'
            f'{{"key":"entity/{self._number}/{next(self._entities)}","value":"{VALUE}"}}}}]}}'
        ).encode()


@asynccontextmanager
async def writers(host: str, port: int, count: int, first: int) -> AsyncIterator[list[Caller]]:
    """Yield this many writers, numbered from `first`. Each number is a separate client."""
    loop = asyncio.get_running_loop()
    made: list[Caller] = []
    try:
        for number in range(first, first + count):
            _, writer = await loop.create_connection(lambda number=number: Writer(number), host, port)  # type: ignore[misc]
            made.append(writer)
        yield made
    finally:
        for caller in made:
            caller.close()


def answer_of(writer: Caller) -> dict[str, object]:
    """Return the last answer of a writer."""
    found: dict[str, object] = json.loads(writer.last.partition(b"\r\n\r\n")[2])
    return found
