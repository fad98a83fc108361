"""NATS JetStream as an event log: a stream in files, every write synced, and duplicates found by `Nats-Msg-Id`."""

import asyncio
import itertools
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from bench.processes import process
from bench.wire import Slice, WireEvent, keep_busy, wire_events

STREAM: Final = "events"
ACK_S: Final = 30
CONFIGURATION: Final = """\
listen: "127.0.0.1:-1"
http: "127.0.0.1:-1"
jetstream {{ store_dir: "{place}/jetstream", sync_interval: always }}
"""
CLIENT: Final = r"Listening for client connections on ([0-9.]+:[0-9]+)"
MONITOR: Final = r"Starting http monitor on ([0-9.]+):([0-9]+)"


class Nats:
    """A server and connections to it, each with several publishes in flight."""

    name: Final = "NATS JetStream"

    def __init__(self, pid: int, streams: list[Any], in_flight: int) -> None:
        self.pid = pid
        self._streams = streams
        self._callers: list[Callable[[WireEvent], Awaitable[None]]] = [
            partial(_publish, stream) for stream in streams for _ in range(in_flight)
        ]
        self._acknowledged = 0

    async def load(self, seconds: float) -> Slice:
        result = await keep_busy(self._callers, self.pid, seconds)
        self._acknowledged += result.events
        return result

    async def check_once(self) -> None:
        """Raise ValueError unless a duplicate gets the number of the first write, even with different content."""
        event, other = itertools.islice(wire_events(), 2)
        first, second = [await _ack(self._streams[0], one) for one in (event, event._replace(body=other.body))]
        if first.duplicate or not second.duplicate or first.seq != second.seq:
            raise ValueError(f"NATS answered a duplicate with {second}, after {first}")
        self._acknowledged += 1

    async def check_all(self) -> None:
        """Raise ValueError unless every acknowledged event exists once."""
        state = (await self._streams[0].stream_info(STREAM)).state
        if state.messages != self._acknowledged or state.last_seq != self._acknowledged:
            raise ValueError(f"NATS acknowledged {self._acknowledged} events, and has {state}")


@asynccontextmanager
async def nats_server(place: Path, connections: int, in_flight: int) -> AsyncIterator[Nats]:
    """Run NATS in this directory until the block ends."""
    nats, api = import_module("nats"), import_module("nats.js.api")
    configuration, log = place / "nats.conf", place / "nats.log"
    configuration.write_text(CONFIGURATION.format(place=place))
    command = [str(Path(sys.executable).parent / "nats-server"), "-c", str(configuration)]
    async with AsyncExitStack() as stack:
        pid, said = stack.enter_context(process(command, log, rf"(?s){MONITOR}.*{CLIENT}.*Server is ready"))
        await _check_synced(said[1], int(said[2]))
        clients = []
        for _ in range(connections):
            client = await nats.connect(f"nats://{said[3]}", allow_reconnect=False)
            stack.push_async_callback(client.close)
            clients.append(client.jetstream(timeout=ACK_S))
        # One replica, and the default duplicate window of two minutes.
        await clients[0].add_stream(name=STREAM, subjects=["events.>"], storage=api.StorageType.FILE)
        yield Nats(pid, clients, in_flight)


async def _check_synced(host: str, port: int) -> None:
    """Raise ValueError unless the effective settings sync every write. (NATS may ignore unknown settings.)"""
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(f"GET /varz HTTP/1.0\r\nHost: {host}\r\n\r\n".encode())
    said = await reader.read()
    writer.close()
    if b'"sync_always": true' not in said:
        raise ValueError(f"NATS does not sync every write: {said.decode()}")


async def _publish(stream: Any, event: WireEvent) -> None:
    ack = await _ack(stream, event)
    if ack.duplicate:
        raise ValueError(f"NATS took a new event for a duplicate: {ack}")


async def _ack(stream: Any, event: WireEvent) -> Any:
    return await stream.publish(f"events.{event.partition}", event.body, headers={"Nats-Msg-Id": event.id})
