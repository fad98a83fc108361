"""Clients of several servers: python storm_worker.py DIRECTORY NAME SEED CLIENTS EVENTS ADDRESS URL...

Each client submits its events, some of them with ids that other clients use too, and tries another server when one does
not answer in time. In the end it submits its last event to every server. One reader stays at each server, two change
servers, and one follows through the library, which also reads the newest position from time to time. The history is
written into the directory in the format of `checker`. The process prints `done` when all clients are done, reads the
newest position from its input, and ends when its readers have reached it.
"""

import asyncio
import json
import os
import sys
import time
from contextlib import suppress
from itertools import count
from pathlib import Path
from random import Random
from typing import Any, Final, TextIO
from uuid import UUID

import aiohttp

from oncelog.engine.log import Log, open_log
from scripts import print_line
from server.running_server import EventStream, SocketClient
from servers.checker import COMMITTED, REFUSED, UNKNOWN, Call, Look, Seen, line_of

CALL_S: Final = 10.0
"""Then another server is tried."""
PAUSE_S: Final = 0.01
SHARED_RATE: Final = 0.3
SHARED_IDS: Final = 4
"""Shared ids of each step."""
OTHER_RATE: Final = 0.1
"""Rate of events with a shared id and another content."""
WANDERERS: Final = 2
LOOK_S: Final = 0.05
LOOKS_MIN: Final = 10
"""Minimum number of looks of a worker in total. It looks on if its clients are done sooner."""
LOST: Final = (aiohttp.ClientError, OSError, AssertionError, TimeoutError, KeyError, ValueError)
"""Errors of a client whose server is killed or unavailable: no answer, or an error."""


def planned(seed: int, name: str, client: int, step: int) -> tuple[str, str]:
    """Return the id and the content of an event."""
    chance = Random(f"{seed}/{name}/{client}/{step}")
    if chance.random() < SHARED_RATE:
        number = 1 << 100 | step << 8 | chance.randrange(SHARED_IDS)
        return str(UUID(int=number)), "other" if chance.random() < OTHER_RATE else "first"
    return str(UUID(int=int.from_bytes(name.encode(), "big") << 64 | client << 32 | step)), "first"


def event_of(id: str, content: str) -> dict[str, Any]:  # noqa: A002 - its name on the wire
    return {"id": id, "partitions": ["all"], "event": {"type": "said", "content": content}}


class Work:
    """State that all clients and readers share."""

    def __init__(self, directory: Path, name: str, seed: int, urls: list[str], session: aiohttp.ClientSession) -> None:
        self.directory = directory
        self.name = name
        self.seed = seed
        self.urls = urls
        self.session = session
        self.calls = self.file("calls")
        self.looks = self.file("looks")
        self.is_done = False
        self.followed = 0
        """Position of the reader that uses the library."""

    def file(self, kind: str, of: str = "") -> TextIO:
        return (self.directory / f"{kind}-{self.name}{of}.jsonl").open("w", buffering=1)


async def connected(work: Work, gateway: int, client_id: str) -> SocketClient:
    socket = await work.session.ws_connect(work.urls[gateway] + "/v1/events", autoping=True)
    client = SocketClient(socket)
    await client.connect(client_id)
    return client


class Client:
    """Retries without end: an event without an answer is sent again, with its id, to another server."""

    def __init__(self, work: Work, number: int) -> None:
        self._work = work
        self._number = number
        self._name = f"{work.name}/{number}"
        self._chance = Random(f"{work.seed}/{self._name}")
        self._gateway = number % len(work.urls)
        self._socket: SocketClient | None = None
        self._submit = self._by_http if number % 2 else self._by_socket

    async def run(self, events: int) -> None:
        for step in range(events):
            id_, content = planned(self._work.seed, self._work.name, self._number, step)
            if self._socket is None:  # a client with a connection keeps it, the others change servers
                self._gateway = self._chance.randrange(len(self._work.urls))
            while await self._call(id_, content) == UNKNOWN:
                await self._disconnect()
                self._gateway = self._chance.randrange(len(self._work.urls))
        for gateway in range(len(self._work.urls)):
            await self._disconnect()
            self._gateway = gateway
            while await self._call(id_, content) == UNKNOWN:
                await self._disconnect()
        await self._disconnect()

    async def _disconnect(self) -> None:
        if self._socket is not None:
            await self._socket.socket.close()
            self._socket = None
        await asyncio.sleep(PAUSE_S)

    async def _call(self, id_: str, content: str) -> str:
        began = time.monotonic_ns()
        answer, position = UNKNOWN, 0
        with suppress(*LOST):
            async with asyncio.timeout(CALL_S):
                result = await self._submit(event_of(id_, content))
            if result["status"] == "committed":
                answer, position = COMMITTED, result["committed_id"]
            elif result["status"] == "rejected":
                answer = REFUSED
        call = Call(self._name, self._gateway, id_, content, began, time.monotonic_ns(), answer, position)
        self._work.calls.write(line_of(call))
        return answer

    async def _by_http(self, event: dict[str, Any]) -> Any:
        url = self._work.urls[self._gateway] + "/v1/events"
        async with self._work.session.post(url, json={"events": [event], "client_id": self._name}) as response:
            return (await response.json())["results"][0]

    async def _by_socket(self, event: dict[str, Any]) -> Any:
        if self._socket is None:
            self._socket = await connected(self._work, self._gateway, self._name)
        (result,) = await self._socket.submit(event)
        return result


class Reader:
    """Resumes at its cursor, at the same server or, if it changes servers, at another one."""

    def __init__(self, work: Work, gateway: int | None, name: str) -> None:
        self._work = work
        self._gateway = gateway
        self._name = name
        self._chance = Random(f"{work.seed}/{name}")
        self._file = work.file("readings", f"-{name}")
        self.cursor = 0

    async def run(self) -> None:
        """Read until cancelled."""
        while True:
            gateway = self._chance.randrange(len(self._work.urls)) if self._gateway is None else self._gateway
            with suppress(*LOST):
                await (self._by_stream(gateway) if self._gateway is None else self._by_socket(gateway))
            await asyncio.sleep(PAUSE_S)

    def _take(self, event: dict[str, Any]) -> None:
        self._file.write(line_of(Seen(event["committed_id"], event["id"])))
        self.cursor = event["committed_id"]

    async def _by_socket(self, gateway: int) -> None:
        client = await connected(self._work, gateway, self._name)
        try:
            has_more = True
            while has_more:
                page = await client.sync("all", since=self.cursor, limit=100)
                for event in page["events"]:
                    self._take(event)
                self.cursor, has_more = page["next_since_committed_id"], page["has_more"]
            while True:
                message = await client.receive()
                assert message["type"] == "event_broadcast", message
                self._take(message["payload"])
        finally:
            await client.socket.close()

    async def _by_stream(self, gateway: int) -> None:
        url = f"{self._work.urls[gateway]}/v1/events/stream?partition=all&since={self.cursor}"
        async with self._work.session.get(url) as response:
            assert response.status == 200
            stream = EventStream(response)
            await stream.connected()
            turns = self._chance.randint(50, 500)
            for _ in range(turns):
                (event,) = await stream.events(1)
                self._take(event)


async def follow(work: Work, log: Log) -> None:
    """Follow through the library."""
    file = work.file("readings", "-library")
    async with log.follow() as records:
        async for record in records:
            file.write(line_of(Seen(record.position, str(UUID(bytes=record.key)))))
            work.followed = record.position


async def look(work: Work, log: Log) -> None:
    """Read the newest position through the library."""
    for looks in count():
        if work.is_done and looks >= LOOKS_MIN:
            break
        began = time.monotonic_ns()
        newest = (await log.read(limit=1)).newest
        work.looks.write(line_of(Look(len(work.urls), began, newest)))
        await asyncio.sleep(LOOK_S)


async def live(work: Work, log: Log, clients: int, events: int) -> None:
    """Until all is submitted, and then until all is read."""
    readers = [Reader(work, gateway, f"at-{gateway}") for gateway in range(len(work.urls))]
    readers += [Reader(work, None, f"wanderer-{number}") for number in range(WANDERERS)]
    async with asyncio.TaskGroup() as tasks:
        reading = [tasks.create_task(reader.run()) for reader in readers]
        reading.append(tasks.create_task(follow(work, log)))
        tasks.create_task(look(work, log))
        submitting = [tasks.create_task(Client(work, number).run(events)) for number in range(clients)]
        await asyncio.gather(*submitting)
        work.is_done = True
        print_line("done")
        head = json.loads(await asyncio.to_thread(sys.stdin.readline))
        while min(work.followed, *(reader.cursor for reader in readers)) < head:  # noqa: ASYNC110 - the condition has no event
            await asyncio.sleep(0.01)
        for task in reading:
            task.cancel()


async def main(directory: str, name: str, *numbers: str) -> None:
    seed, clients, events = map(int, numbers[:3])
    address, *urls = numbers[3:]
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session, open_log(address) as log:
        await live(Work(Path(directory), name, seed, urls, session), log, clients, events)
    print_line("end")


if __name__ == "__main__":
    os.nice(10)  # starting servers have priority
    asyncio.run(main(*sys.argv[1:]))
