"""Events in wire format, and figures for a slice of load."""

import asyncio
import itertools
import json
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from bench.processes import client_cpu_s, server_cpu_s
from bench.sample_event import EVENT, TASK

PARTITIONS: Final = [f"building-{number}" for number in range(100)]
EVENTS: Final[list[dict[str, Any]]] = [EVENT | {"payload": TASK | {"priority": number}} for number in range(10)]
"""About 300 bytes in canonical form. The `core` benchmark checks the size."""
BODIES: Final = [json.dumps(event, separators=(",", ":")).encode() for event in EVENTS]

_IDS_AT_ONCE: Final = 512


class WireEvent(NamedTuple):
    """An event, equal for all contenders."""

    id: str
    partition: str
    body: bytes


def uuids() -> Iterator[str]:
    """Yield random UUIDs of version 4. Generating them in blocks costs the measured client less time."""
    while True:
        digits = os.urandom(16 * _IDS_AT_ONCE).hex()
        for at in range(0, len(digits), 32):
            one = digits[at : at + 32]
            yield f"{one[:8]}-{one[8:12]}-4{one[13:16]}-a{one[17:20]}-{one[20:]}"


def wire_events(partitions: Sequence[str] = PARTITIONS) -> Iterator[WireEvent]:
    """Yield endless events, spread over the partitions."""
    return map(WireEvent, uuids(), itertools.cycle(partitions), itertools.cycle(BODIES))


@dataclass(frozen=True)
class Slice:
    """Figures for a period in which a server was kept busy."""

    events: int
    """Number of acknowledged events."""
    seconds: float
    """Seconds from the first submission to the last acknowledgement."""
    waited: Sequence[float]
    """Latency of each request in seconds."""
    client_cpu: float
    """Average number of processors that the client used."""
    server_cpu: float

    @property
    def per_s(self) -> float:
        return self.events / self.seconds


class Watch:
    """Measures a period that starts when the object is created. Without a server, it measures this process."""

    def __init__(self, server: int | None) -> None:
        self._server = server
        self._client_cpu_s, self._server_cpu_s = self._cpu_s()
        self.began = time.perf_counter()

    def slice(self, events: int, waited: Sequence[float]) -> Slice:
        """Return the figures since the object was created."""
        seconds = time.perf_counter() - self.began
        client_s, server_s = self._cpu_s()
        client_cpu, server_cpu = (client_s - self._client_cpu_s) / seconds, (server_s - self._server_cpu_s) / seconds
        return Slice(events, seconds, waited, client_cpu, server_cpu)

    def _cpu_s(self) -> tuple[float, float]:
        return (0, client_cpu_s()) if self._server is None else (client_cpu_s(), server_cpu_s(self._server))


async def keep_busy(callers: Sequence[Callable[[WireEvent], Awaitable[None]]], server: int, seconds: float) -> Slice:
    """Run one task per caller, for clients that are libraries. A task submits the next event after each answer."""
    waiting = wire_events()
    waited: list[float] = []
    watch = Watch(server)
    until = watch.began + seconds

    async def caller(submit: Callable[[WireEvent], Awaitable[None]]) -> None:
        now = time.perf_counter()
        while now < until:
            began = now
            await submit(next(waiting))
            now = time.perf_counter()
            waited.append(now - began)

    async with asyncio.TaskGroup() as tasks:
        for submit in callers:
            tasks.create_task(caller(submit))
    return watch.slice(len(waited), waited)
