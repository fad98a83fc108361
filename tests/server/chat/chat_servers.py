"""Servers, users and devices for the tests of the Chat API."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any, Final
from uuid import UUID

import aiohttp
from aiohttp import WSMsgType

from deadlines import WAIT_S, soon, until
from server.running_server import Answer, Serving, close_code, serving

Json = dict[str, Any]
MESSAGE: Final = {
    *("message_id", "chat_id", "sequence", "sender_id", "client_message_id", "content", "content_type", "created_at"),
}
"""The JSON members of a message (CH-10)."""


def message_uuid(number: int) -> str:
    """Return a version 4 UUID that contains the number."""
    return str(UUID(int=number << 64 | 2 << 62, version=4))


class Device:
    """A user's WebSocket connection. Frames other than answers stay in a queue until a test reads them."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, name: str) -> None:
        self.socket = socket
        self.name = name
        self.frames: list[Json] = []
        """Received frames that the test has not read yet."""
        self._requests = count(1)

    async def send_frame(self, kind: str, **members: Any) -> None:
        await self.socket.send_str(json.dumps({"type": kind, **members}))

    async def receive(self) -> Json:
        """Receive the next frame. Raises ConnectionResetError at the end of the connection."""
        message = await soon(self.socket.receive())
        if message.type is not WSMsgType.TEXT:
            raise ConnectionResetError(f"{self.name}: {message}")
        found: Json = json.loads(message.data)
        return found

    async def wait_for_frame(self, **wanted: Any) -> Json:
        """Wait for a frame that has all of these members and return it. Earlier frames remain queued."""
        for place, frame in enumerate(self.frames):
            if wanted.items() <= frame.items():
                return self.frames.pop(place)
        while True:
            frame = await self.receive()
            if wanted.items() <= frame.items():
                return frame
            self.frames.append(frame)

    async def wait_for_frames(self, number: int, kind: str) -> list[Json]:
        return [await self.wait_for_frame(type=kind) for _ in range(number)]

    async def request(self, kind: str, **members: Any) -> Json:
        """Send a request and return the answer with the same request_id."""
        request_id = f"r{next(self._requests)}"
        await self.send_frame(kind, request_id=request_id, **members)
        return await self.wait_for_frame(request_id=request_id)

    async def connect(self, **members: Any) -> Json:
        return await self.request("connect", **{"token": self.name, "device_id": "phone", **members})

    async def send(self, chat_id: str, number: int, content: str = "hello", **members: Any) -> Json:
        return await self.request(
            "send_message",
            **{"client_message_id": message_uuid(number), "chat_id": chat_id, "content": content, **members},
        )

    async def send_committed(self, chat_id: str, number: int, content: str = "hello", **members: Any) -> int:
        """Send a message, assert that it is stored or already known, and return its sequence."""
        answer = await self.send(chat_id, number, content, **members)
        assert answer["type"] == "send_message_ack", answer
        sequence: int = answer["sequence"]
        return sequence

    async def sync(self, chat_id: str, after: int = 0, **members: Any) -> Json:
        return await self.request("sync_request", chat_id=chat_id, last_acked_sequence=after, **members)

    async def sync_all(self, chat_id: str, after: int = 0, **members: Any) -> list[Json]:
        """Return all messages after a sequence, page by page."""
        messages: list[Json] = []
        has_more = True
        while has_more:
            page = await self.sync(chat_id, after, **members)
            assert page["type"] == "message_batch", page
            messages += page["messages"]
            after, has_more = page["next_sequence"], page["has_more"]
        return messages

    async def acknowledge(self, chat_id: str, sequence: int) -> None:
        """Send an acknowledgement, which has no answer."""
        await self.send_frame("ack", chat_id=chat_id, last_acked_sequence=sequence)

    async def expect_refusal(self, kind: str, **members: Any) -> str:
        """Send a request, assert that it is refused, and return the error code."""
        answer = await self.request(kind, **members)
        assert answer["type"] == "error", answer
        assert answer["message"]
        code: str = answer["code"]
        return code

    async def take_frames(self) -> list[Json]:
        """Return all frames that the server has sent so far. The server answers the ping only after these frames."""
        await self.request("ping")
        frames, self.frames = self.frames, []
        return frames

    async def wait_closed(self) -> int | None:
        """Wait until the server closes the connection and return the close code. Earlier frames remain queued."""
        while True:
            message = await soon(self.socket.receive())
            if message.type is not WSMsgType.TEXT:
                return close_code(message, self.socket)
            self.frames.append(json.loads(message.data))

    async def close(self) -> None:
        await soon(self.socket.close())


class ChatServer:
    """A server and the devices connected to it."""

    def __init__(self, served: Serving) -> None:
        self.served = served
        self._devices: list[Device] = []

    async def http(self, method: str, path: str, name: str, body: Any = None, **options: Any) -> Answer:
        if body is not None:
            options["json"] = body
        return await self.served.request(method, path, credential=name, **options)

    async def create(self, chat_id: str, name: str, *members: str) -> Json:
        """Create a chat as the user `name`, with the given other members."""
        body = {"chat_id": chat_id, "members": [f"user:{one}" for one in members]}
        answer = await self.http("POST", "/v1/chats", name, body)
        assert answer.status in (200, 201), answer.body
        found: Json = answer.json
        return found

    async def set_member(self, chat_id: str, name: str, member: str, *, present: bool = True) -> Answer:
        method = "PUT" if present else "DELETE"
        return await self.http(method, f"/v1/chats/{chat_id}/members/user:{member}", name)

    async def watermarks(self, chat_id: str, name: str) -> dict[str, int]:
        answer = await self.http("GET", f"/v1/chats/{chat_id}/delivery", name)
        assert answer.status == 200, answer.body
        return {one["user_id"]: one["last_acked_sequence"] for one in answer.json["members"]}

    async def wait_for_watermark(self, chat_id: str, name: str, sequence: int) -> None:
        """Wait until the user's watermark has reached the sequence. An ack has no answer to wait for."""
        async with asyncio.timeout(WAIT_S):
            while (await self.watermarks(chat_id, name))[f"user:{name}"] != sequence:
                pass

    async def socket(self, name: str) -> Device:
        """Open a connection but send no connect frame."""
        device = await open_device(self.served.session, self.served.url, name)
        self._devices.append(device)
        return device

    async def connect(self, name: str, **members: Any) -> Device:
        """Open a connection and connect as the user."""
        device = await self.socket(name)
        answer = await device.connect(**members)
        assert answer["type"] == "connected", answer
        return device

    async def close(self) -> None:
        for device in self._devices:
            await device.close()
        self._devices.clear()


async def open_device(session: aiohttp.ClientSession, url: str, name: str) -> Device:
    return Device(await soon(session.ws_connect(f"{url}/v1/chat", max_msg_size=0)), name)


@asynccontextmanager
async def run_server(directory: Path, **settings: Any) -> AsyncIterator[ChatServer]:
    """Run a server on the log in the directory."""
    connector = aiohttp.TCPConnector(limit=0)
    async with serving(directory, connector=connector, **{"grpc": False, **settings}) as served:
        chat_server = ChatServer(served)
        try:
            yield chat_server
        finally:
            await chat_server.close()


class SharedServer:
    """A running server that many tests share. Each test uses separate chats."""

    def __init__(self, chat_server: ChatServer, name: str) -> None:
        self.server = chat_server
        self.name = name

    async def wait_until_idle(self) -> None:
        """Disconnect the test's devices and wait until their acknowledgements are delivered."""
        await self.server.close()
        server = self.server.served.server
        await until(lambda: not server.log.queue_length and server.apis.chat_hub._delivery_timer is None)

    def chat(self, suffix: object = "") -> str:
        """Return a chat id that no other test uses."""
        return f"{self.name}{suffix}"


def sequences(messages: list[Json]) -> list[int]:
    return [one["sequence"] for one in messages]


def user_names(number: int) -> Iterator[str]:
    return (f"p{index:03d}" for index in range(number))
