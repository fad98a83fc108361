"""Wire of a client to the model of a gateway, without sockets; a test can hold, lose or change requests and answers."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from client.deltas.model_gateway import ModelGateway, Refusal
from oncelog.client.deltas.codec import (
    DeltaPage,
    LiveCompacted,
    LiveDeltas,
    NoReply,
    OutboxEntry,
    PushReply,
    ServerError,
    SnapshotPage,
    decode_delta_page,
    decode_error,
    decode_live,
    decode_push_reply,
    decode_snapshot_page,
)
from oncelog.client.deltas.transport import LiveStream
from oncelog.core.deltas import encode_push

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

    async def push(self, entries: Sequence[OutboxEntry]) -> PushReply | ServerError | NoReply:
        body = encode_push([one.body for one in entries])
        answer = await self._told(
            "push", lambda: self.gateway.push(body), lambda said: decode_push_reply(said, entries)
        )
        self.move()
        return answer  # type: ignore[no-any-return]

    async def pull(self, since: int, epoch: str, limit: int) -> DeltaPage | ServerError | NoReply:
        return await self._told("pull", lambda: self.gateway.pull(since, epoch, limit), decode_delta_page)  # type: ignore[no-any-return]

    async def snapshot(self, page: str, limit: int) -> SnapshotPage | ServerError | NoReply:
        return await self._told("snapshot", lambda: self.gateway.snapshot(page, limit), decode_snapshot_page)  # type: ignore[no-any-return]

    async def follow(self, since: int, epoch: str) -> LiveStream | ServerError | NoReply:
        first = await self._told(
            "follow", lambda: self.gateway.live(since, epoch, 3), lambda said: decode_live(said.decode())
        )
        return first if isinstance(first, ServerError | NoReply) else ModelLive(self, since, epoch)

    async def close(self) -> None:
        self.asked.append("close")

    async def _told(self, name: str, call: Callable[[], bytes], read: Callable[[bytes], Any]) -> Any:
        self.asked.append(name)
        answer = await self.before(name)
        if answer is None:
            try:
                answer = read(call())
            except Refusal as refusal:
                answer = decode_error(refusal.status, refusal.body, 0)
            other = await self.after(name)
            answer = answer if other is None else other
        return answer


class ModelLive:
    def __init__(self, wire: ModelWire, since: int, epoch: str) -> None:
        self.epoch = wire.gateway.epoch
        self._wire = wire
        self._since = since
        self._epoch = epoch

    async def receive(self) -> LiveDeltas | LiveCompacted | ServerError | NoReply:
        while True:
            moved = self._wire.moved
            message = decode_live(self._wire.gateway.live(self._since, self._epoch, 3).decode())
            if not isinstance(message, LiveDeltas):
                return message
            if message.deltas:
                self._since = message.cursor
                return message
            await moved.wait()

    async def close(self) -> None:
        self._wire.asked.append("hang up")
