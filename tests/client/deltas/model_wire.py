"""Wire of a client to the model of a gateway, without sockets; a test can hold, lose or change requests and answers."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from client.deltas.model_gateway import ModelGateway, Refusal
from oncelog.client.deltas.messages import (
    Acknowledged,
    Entry,
    Fault,
    LiveCompacted,
    LiveDeltas,
    PulledPage,
    SnapshotPage,
    Unanswered,
    read_fault,
    read_live,
    read_pulled,
    read_pushed,
    read_snapshot,
)
from oncelog.client.deltas.wire import Live
from oncelog.core.deltas import deltas_body

Hook = Callable[[str], Awaitable[Any]]
"""Called with the name of a request. Its result replaces the answer, except None."""


async def nothing(_name: str) -> None:
    pass


class ModelWire:
    def __init__(self, gateway: ModelGateway) -> None:
        self.gateway = gateway
        self.asked: list[str] = []
        self.before: Hook = nothing
        self.after: Hook = nothing
        """Called after the request was processed; can replace the answer."""
        self.moved = asyncio.Event()

    def move(self) -> None:
        """Wake the live connections."""
        self.moved.set()
        self.moved = asyncio.Event()

    async def push(self, entries: Sequence[Entry]) -> Acknowledged | Fault | Unanswered:
        body = deltas_body([one.body for one in entries])
        answer = await self._told("push", lambda: self.gateway.push(body), lambda said: read_pushed(said, entries))
        self.move()
        return answer  # type: ignore[no-any-return]

    async def pull(self, since: int, epoch: str, limit: int) -> PulledPage | Fault | Unanswered:
        return await self._told("pull", lambda: self.gateway.pull(since, epoch, limit), read_pulled)  # type: ignore[no-any-return]

    async def snapshot(self, page: str, limit: int) -> SnapshotPage | Fault | Unanswered:
        return await self._told("snapshot", lambda: self.gateway.snapshot(page, limit), read_snapshot)  # type: ignore[no-any-return]

    async def follow(self, since: int, epoch: str) -> Live | Fault | Unanswered:
        first = await self._told(
            "follow", lambda: self.gateway.live(since, epoch, 3), lambda said: read_live(said.decode())
        )
        return first if isinstance(first, Fault | Unanswered) else ModelLive(self, since, epoch)

    async def close(self) -> None:
        self.asked.append("close")

    async def _told(self, name: str, call: Callable[[], bytes], read: Callable[[bytes], Any]) -> Any:
        self.asked.append(name)
        answer = await self.before(name)
        if answer is None:
            try:
                answer = read(call())
            except Refusal as refusal:
                answer = read_fault(refusal.status, refusal.body, 0)
            other = await self.after(name)
            answer = answer if other is None else other
        return answer


class ModelLive:
    def __init__(self, wire: ModelWire, since: int, epoch: str) -> None:
        self.epoch = wire.gateway.epoch
        self._wire = wire
        self._since = since
        self._epoch = epoch

    async def receive(self) -> LiveDeltas | LiveCompacted | Fault | Unanswered:
        while True:
            moved = self._wire.moved
            message = read_live(self._wire.gateway.live(self._since, self._epoch, 3).decode())
            if not isinstance(message, LiveDeltas):
                return message
            if message.deltas:
                self._since = message.cursor
                return message
            await moved.wait()

    async def close(self) -> None:
        self._wire.asked.append("hang up")
