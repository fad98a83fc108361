"""What is committed from a cursor on, over a WebSocket."""

import asyncio
from typing import TYPE_CHECKING

import msgspec

from oncelog.client.deltas.limits import DeltasLimits
from oncelog.client.deltas.messages import Fault, LiveCompacted, LiveDeltas, Unanswered, read_connected, read_live
from oncelog.client.wire import as_lost
from oncelog.errors import LostError, ProtocolError, ServerRefusedError

if TYPE_CHECKING:
    import aiohttp


class WebSocketLive:
    """One connection, as `Live` says."""

    def __init__(self, url: str, socket: "aiohttp.ClientWebSocketResponse") -> None:
        self._url = url
        self._socket = socket
        self.epoch = ""

    async def connect(
        self, since: int, epoch: str, token: str | None, limits: DeltasLimits
    ) -> "WebSocketLive | Fault | Unanswered":
        """Says from where on. Where that is refused, it is closed."""
        first = {"type": "connect", "since": since, "epoch": epoch, "token": token}
        words = msgspec.json.encode({name: value for name, value in first.items() if value not in ("", None)})
        told: str | Fault | Unanswered
        try:
            with as_lost(self._url):
                async with asyncio.timeout(limits.connect_timeout_ms / 1000):
                    await self._socket.send_str(words.decode())
                    told = read_connected(await self._text())
        except (LostError, ProtocolError, ServerRefusedError) as error:
            told = Unanswered(str(error))
        except BaseException:
            await self.close()
            raise
        if isinstance(told, str):
            self.epoch = told
            return self
        await self.close()
        return told

    async def receive(self) -> LiveDeltas | LiveCompacted | Fault | Unanswered:
        """As `Live` says."""
        try:
            with as_lost(self._url):
                text = await self._text()
            return read_live(text)
        except (LostError, ProtocolError, ServerRefusedError) as error:
            return Unanswered(str(error))

    async def close(self) -> None:
        """As `Live` says."""
        try:
            with as_lost(self._url):
                await self._socket.close()
        except (LostError, ServerRefusedError):
            pass

    async def _text(self) -> str:
        message = await self._socket.receive()
        if isinstance(message.data, str):
            return message.data
        code = self._socket.close_code
        raise LostError(f"the connection to {self._url} was lost" + (f" (closed with {code})" if code else ""))
