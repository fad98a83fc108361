"""What is committed from a cursor on, over a WebSocket."""

import asyncio

import msgspec

from oncelog.client.deltas.codec import Fault, LiveCompacted, LiveDeltas, NoReply, decode_connected, decode_live
from oncelog.client.deltas.limits import DeltasLimits
from oncelog.client.runtime.websocket import WebSocket, translate_errors
from oncelog.errors import LostError, ProtocolError, ServerRefusedError


class WebSocketLiveStream:
    """One connection, as `Live` says."""

    def __init__(self, socket: WebSocket) -> None:
        self._socket = socket
        self.epoch = ""

    async def connect(
        self, since: int, epoch: str, token: str | None, limits: DeltasLimits
    ) -> "WebSocketLiveStream | Fault | NoReply":
        """Says from where on. Where that is refused, it is closed."""
        first = {"type": "connect", "since": since, "epoch": epoch, "token": token}
        words = msgspec.json.encode({name: value for name, value in first.items() if value not in ("", None)})
        told: str | Fault | NoReply
        try:
            with translate_errors(self._socket.url):
                async with asyncio.timeout(limits.connect_timeout_ms / 1000):
                    await self._socket.send(words)
                    told = decode_connected(await self._socket.receive())
        except (LostError, ProtocolError, ServerRefusedError) as error:
            told = NoReply(str(error))
        except BaseException:
            await self.close()
            raise
        if isinstance(told, str):
            self.epoch = told
            return self
        await self.close()
        return told

    async def receive(self) -> LiveDeltas | LiveCompacted | Fault | NoReply:
        """As `Live` says."""
        try:
            return decode_live(await self._socket.receive())
        except (LostError, ProtocolError, ServerRefusedError) as error:
            return NoReply(str(error))

    async def close(self) -> None:
        """As `Live` says."""
        await self._socket.close()
