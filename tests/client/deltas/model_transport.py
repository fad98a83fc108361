"""In-process transport between a client and the model of a gateway. Tests can hold, lose and change requests."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from client.deltas.model_gateway import ModelGateway, Refusal
from oncelog.client.deltas.codec import (
    DeltaPage,
    GatewayRefusedError,
    OutboxEntry,
    PushReply,
    RowPage,
    decode_delta_page,
    decode_deltas,
    decode_error,
    decode_live,
    decode_push_reply,
    decode_snapshot_page,
)
from oncelog.client.deltas.transport import DeltasTransport, LiveStream
from oncelog.core.deltas import encode_push
from oncelog.core.merge import RowDelta

Hook = Callable[[str], Awaitable[Any]]
"""Called with the name of a request. A result other than None replaces the answer. An exception makes the request fail.
"""


async def no_effect(_name: str) -> None:
    pass


class ModelWire(DeltasTransport):
    def __init__(self, gateway: ModelGateway) -> None:
        self.gateway = gateway
        self.requests: list[str] = []
        self.before: Hook = no_effect
        self.after: Hook = no_effect
        """Called after the request is processed; can replace the answer."""
        self.changed = asyncio.Event()

    def wake_live(self) -> None:
        """Wake the live connections."""
        self.changed.set()
        self.changed = asyncio.Event()

    async def push(self, entries: Sequence[OutboxEntry]) -> PushReply:
        body = encode_push([one.body for one in entries])
        answer = await self._exchange(
            "push", lambda: self.gateway.push(body), lambda data: decode_push_reply(data, entries)
        )
        self.wake_live()
        return answer  # type: ignore[no-any-return]

    async def pull(self, since: int, epoch: str, limit: int) -> DeltaPage[RowDelta]:
        return await self._exchange("pull", lambda: self.gateway.pull(since, epoch, limit), decode_delta_page)  # type: ignore[no-any-return]

    async def snapshot(self, page: str, limit: int) -> RowPage:
        return await self._exchange("snapshot", lambda: self.gateway.snapshot(page, limit), decode_snapshot_page)  # type: ignore[no-any-return]

    async def follow(self, since: int, epoch: str) -> LiveStream:
        await self._exchange(
            "follow", lambda: self.gateway.live(since, epoch, 3), lambda data: decode_live(data.decode(), epoch)
        )
        return ModelLive(self, since, epoch)

    async def close(self) -> None:
        self.requests.append("close")

    async def _exchange(self, name: str, call: Callable[[], bytes], read: Callable[[bytes], Any]) -> Any:
        self.requests.append(name)
        answer = await self.before(name)
        if answer is None:
            try:
                answer = read(call())
            except Refusal as refusal:
                answer = decode_error(refusal.status, refusal.body, 0)
            except GatewayRefusedError as error:
                answer = error
            other = await self.after(name)
            answer = answer if other is None else other
        if isinstance(answer, Exception):
            raise answer
        return answer


class ModelLive(LiveStream):
    def __init__(self, wire: ModelWire, since: int, epoch: str) -> None:
        self.epoch = wire.gateway.epoch
        self._wire = wire
        self._since = since
        self._epoch = epoch

    async def receive(self) -> DeltaPage[RowDelta]:
        while True:
            changed = self._wire.changed
            message = self._wire.gateway.live(self._since, self._epoch, 3)
            page = decode_deltas(decode_live(message.decode(), self.epoch))
            if page.is_compacted:
                return page
            if page.deltas:
                self._since = page.cursor
                return page
            await changed.wait()

    async def close(self) -> None:
        self._wire.requests.append("hang up")
