"""Pipelined requests wait in the client's socket and not in the server's memory (CO-27)."""

import asyncio
from pathlib import Path
from typing import Any, Final

import pytest

from deadlines import until
from server.ledger.ledger_servers import token
from server.raw_http import post
from server.running_server import serving

READ_BYTES: Final = 256 * 1024
"""Maximum size of one read in uvloop."""
TURNS: Final = 20
WAITING_BYTES_MAX: Final = 4 * READ_BYTES


class GreedyTransport(asyncio.Transport):
    """The transport of a client that sends for as long as the server reads, and that reads all responses."""

    def __init__(self) -> None:
        super().__init__()
        self._protocol: Any = None
        self.has_room = True
        self.answered = 0
        self.is_ended = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("127.0.0.1", 1) if name == "peername" else default

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def get_protocol(self) -> Any:
        return self._protocol

    def is_closing(self) -> bool:
        return self.is_ended

    def pause_reading(self) -> None:
        self.has_room = False

    def resume_reading(self) -> None:
        self.has_room = True

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def write(self, data: Any) -> None:
        self.answered += bytes(data).count(b"HTTP/1.1 ")

    def writelines(self, parts: Any) -> None:
        self.write(b"".join(parts))

    def close(self) -> None:
        self.is_ended = True

    def abort(self) -> None:
        self.is_ended = True


@pytest.mark.rule("CO-27", "CO-30")
@pytest.mark.parametrize("with_token", [False, True], ids=["anonymous", "authenticated"])
@pytest.mark.parametrize("path", ["/v1/events", "/v1/ledger/write"], ids=["aiohttp", "fast-path"])
async def test_pipelined_requests_do_not_accumulate_in_memory(tmp_path: Path, path: str, *, with_token: bool) -> None:
    async with serving(tmp_path, tokens=True) as served:
        headers = [f"Authorization: Bearer {token()}"] if with_token else []
        request = post(b"[]", *headers, path=path)
        burst = request * (READ_BYTES // len(request))
        transport = GreedyTransport()
        connection = served.server._limiter.accept("127.0.0.1", transport.abort)
        assert connection is not None
        assert served.server._http._listener is not None
        protocol = served.server._http._listener._new_protocol(connection)
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        sent = 0
        for _ in range(TURNS):
            if transport.has_room and not transport.is_ended:
                transport.get_protocol().data_received(burst)
                sent += len(burst)
            await asyncio.sleep(0)
            assert sent - transport.answered * len(request) <= WAITING_BYTES_MAX
        await until(lambda: transport.answered == sent // len(request))
        transport.get_protocol().connection_lost(None)
