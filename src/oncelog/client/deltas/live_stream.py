"""What is committed from a cursor on, over a WebSocket."""

import asyncio

import msgspec

from oncelog.client.deltas.codec import LiveCompacted, LiveDeltas, NoReply, ServerError, decode_connected, decode_live
from oncelog.client.deltas.limits import DeltasLimits
from oncelog.client.runtime.websocket import WebSocket, translate_errors
from oncelog.errors import LostError, ProtocolError, ServerRefusedError


class WebSocketLiveStream:
    """One connection, as `LiveStream` says."""

    def __init__(self, socket: WebSocket) -> None:
        self._socket = socket
        self.epoch = ""

    async def connect(
        self, since: int, epoch: str, token: str | None, limits: DeltasLimits
    ) -> "WebSocketLiveStream | ServerError | NoReply":
        """Says from where on. Where that is refused, it is closed."""
        first = {"type": "connect", "since": since, "epoch": epoch, "token": token}
        message = msgspec.json.encode({name: value for name, value in first.items() if value not in ("", None)})
        answer: str | ServerError | NoReply
        try:
            with translate_errors(self._socket.url):
                async with asyncio.timeout(limits.connect_timeout_ms / 1000):
                    await self._socket.send(message)
                    answer = decode_connected(await self._socket.receive())
        except (LostError, ProtocolError, ServerRefusedError) as error:
            answer = NoReply(str(error))
        except BaseException:
            await self.close()
            raise
        if isinstance(answer, str):
            self.epoch = answer
            return self
        await self.close()
        return answer

    async def receive(self) -> LiveDeltas | LiveCompacted | ServerError | NoReply:
        """As `LiveStream` says."""
        try:
            return decode_live(await self._socket.receive())
        except (LostError, ProtocolError, ServerRefusedError) as error:
            return NoReply(str(error))

    async def close(self) -> None:
        """As `LiveStream` says."""
        await self._socket.close()
