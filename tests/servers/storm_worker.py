"""Clients of several servers: python storm_worker.py DIRECTORY NAME SEED CLIENTS EVENTS ADDRESS URL...

Each client submits its events, some with ids that other clients also use, and switches servers when its server does
not answer in time. Finally it submits its last event to every server. Each server has one permanent reader, two readers
switch servers, and one reader uses the library and also queries the newest position at intervals. The worker writes the
history into DIRECTORY in the format of `checker`. It prints `done` when all clients are done, reads the newest position
from its input, and exits when its readers have reached that position.
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
from servers.checker import COMMITTED, REFUSED, UNKNOWN, Call, HeadQuery, Seen, line_of

CALL_S: Final = 10.0
"""A client that waits longer tries another server."""
PAUSE_S: Final = 0.01
SHARED_RATE: Final = 0.3
SHARED_IDS: Final = 4
"""Number of shared ids per step."""
OTHER_RATE: Final = 0.1
"""Proportion of shared ids that are submitted with different content."""
ROAMING_READERS: Final = 2
HEAD_QUERY_S: Final = 0.05
HEAD_QUERIES_MIN: Final = 10
"""Minimum number of head queries per worker, even if its clients finish sooner."""
LOST: Final = (aiohttp.ClientError, OSError, AssertionError, TimeoutError, KeyError, ValueError)
"""Errors of a call whose server is killed or unavailable."""


def plan_event(seed: int, name: str, client: int, step: int) -> tuple[str, str]:
    """Return the id and content of an event."""
    chance = Random(f"{seed}/{name}/{client}/{step}")
    if chance.random() < SHARED_RATE:
        number = 1 << 100 | step << 8 | chance.randrange(SHARED_IDS)
        return str(UUID(int=number)), "other" if chance.random() < OTHER_RATE else "first"
    return str(UUID(int=int.from_bytes(name.encode(), "big") << 64 | client << 32 | step)), "first"


def event_of(id: str, content: str) -> dict[str, Any]:  # noqa: A002 - the name in the API
    return {"id": id, "partitions": ["all"], "event": {"type": "said", "content": content}}


class Run:
    """State that all clients and readers share."""

    def __init__(self, directory: Path, name: str, seed: int, urls: list[str], session: aiohttp.ClientSession) -> None:
        self.directory = directory
        self.name = name
        self.seed = seed
        self.urls = urls
        self.session = session
        self.calls = self.file("calls")
        self.head_queries = self.file("head-queries")
        self.is_done = False
        self.followed = 0
        """Position of the library reader."""

    def file(self, kind: str, of: str = "") -> TextIO:
        return (self.directory / f"{kind}-{self.name}{of}.jsonl").open("w", buffering=1)


async def open_socket(run_state: Run, server: int, client_id: str) -> SocketClient:
    socket = await run_state.session.ws_connect(run_state.urls[server] + "/v1/events", autoping=True)
    client = SocketClient(socket)
    await client.connect(client_id)
    return client


class Client:
    """Submits each event until it is answered. Retries go to a random server, under the same id."""

    def __init__(self, run_state: Run, number: int) -> None:
        self._run = run_state
        self._number = number
        self._name = f"{run_state.name}/{number}"
        self._chance = Random(f"{run_state.seed}/{self._name}")
        self._server = number % len(run_state.urls)
        self._socket: SocketClient | None = None
        self._submit = self._by_http if number % 2 else self._by_socket

    async def run(self, events: int) -> None:
        for step in range(events):
            id_, content = plan_event(self._run.seed, self._run.name, self._number, step)
            if self._socket is None:  # A client keeps its connection. When it has none, it changes servers.
                self._server = self._chance.randrange(len(self._run.urls))
            while await self._call(id_, content) == UNKNOWN:
                await self._disconnect()
                self._server = self._chance.randrange(len(self._run.urls))
        for server in range(len(self._run.urls)):
            await self._disconnect()
            self._server = server
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
        call = Call(self._name, self._server, id_, content, began, time.monotonic_ns(), answer, position)
        self._run.calls.write(line_of(call))
        return answer

    async def _by_http(self, event: dict[str, Any]) -> Any:
        url = self._run.urls[self._server] + "/v1/events"
        async with self._run.session.post(url, json={"events": [event], "client_id": self._name}) as response:
            return (await response.json())["results"][0]

    async def _by_socket(self, event: dict[str, Any]) -> Any:
        if self._socket is None:
            self._socket = await open_socket(self._run, self._server, self._name)
        (result,) = await self._socket.submit(event)
        return result


class Reader:
    """Reads and resumes from its cursor, either always on one server or on random servers."""

    def __init__(self, run_state: Run, server: int | None, name: str) -> None:
        self._run = run_state
        self._server = server
        self._name = name
        self._chance = Random(f"{run_state.seed}/{name}")
        self._file = run_state.file("readings", f"-{name}")
        self.cursor = 0

    async def run(self) -> None:
        """Read until cancelled."""
        while True:
            server = self._chance.randrange(len(self._run.urls)) if self._server is None else self._server
            with suppress(*LOST):
                await (self._by_stream(server) if self._server is None else self._by_socket(server))
            await asyncio.sleep(PAUSE_S)

    def _take(self, event: dict[str, Any]) -> None:
        self._file.write(line_of(Seen(event["committed_id"], event["id"])))
        self.cursor = event["committed_id"]

    async def _by_socket(self, server: int) -> None:
        client = await open_socket(self._run, server, self._name)
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

    async def _by_stream(self, server: int) -> None:
        url = f"{self._run.urls[server]}/v1/events/stream?partition=all&since={self.cursor}"
        async with self._run.session.get(url) as response:
            assert response.status == 200
            stream = EventStream(response)
            await stream.connected()
            turns = self._chance.randint(50, 500)
            for _ in range(turns):
                (event,) = await stream.events(1)
                self._take(event)


async def follow(run_state: Run, log: Log) -> None:
    """Follow through the library."""
    file = run_state.file("readings", "-library")
    async with log.follow() as records:
        async for record in records:
            file.write(line_of(Seen(record.position, str(UUID(bytes=record.key)))))
            run_state.followed = record.position


async def query(run_state: Run, log: Log) -> None:
    """Query the newest position through the library repeatedly."""
    for head_queries in count():
        if run_state.is_done and head_queries >= HEAD_QUERIES_MIN:
            break
        began = time.monotonic_ns()
        newest = (await log.read(limit=1)).newest
        run_state.head_queries.write(line_of(HeadQuery(len(run_state.urls), began, newest)))
        await asyncio.sleep(HEAD_QUERY_S)


async def run_all(run_state: Run, log: Log, clients: int, events: int) -> None:
    """Run until all events are submitted, and then until all readers have caught up."""
    readers = [Reader(run_state, server, f"at-{server}") for server in range(len(run_state.urls))]
    readers += [Reader(run_state, None, f"wanderer-{number}") for number in range(ROAMING_READERS)]
    async with asyncio.TaskGroup() as tasks:
        reading = [tasks.create_task(reader.run()) for reader in readers]
        reading.append(tasks.create_task(follow(run_state, log)))
        tasks.create_task(query(run_state, log))
        submitting = [tasks.create_task(Client(run_state, number).run(events)) for number in range(clients)]
        await asyncio.gather(*submitting)
        run_state.is_done = True
        print_line("done")
        head = json.loads(await asyncio.to_thread(sys.stdin.readline))
        while min(run_state.followed, *(reader.cursor for reader in readers)) < head:  # noqa: ASYNC110 - the condition has no event
            await asyncio.sleep(0.01)
        for task in reading:
            task.cancel()


async def main(directory: str, name: str, *numbers: str) -> None:
    seed, clients, events = map(int, numbers[:3])
    address, *urls = numbers[3:]
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session, open_log(address) as log:
        await run_all(Run(Path(directory), name, seed, urls, session), log, clients, events)
    print_line("end")


if __name__ == "__main__":
    os.nice(10)  # Starting the servers takes priority.
    asyncio.run(main(*sys.argv[1:]))
