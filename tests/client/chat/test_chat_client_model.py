"""The model of the chat server that the simulations use answers like a real server.

Both get the same requests. The comparison ignores ids, times and epochs, because they differ between servers.
"""

import asyncio
import json
from pathlib import Path
from typing import Any, Final

import aiohttp

from client.chat.model_chats import ModelConnection, ModelServer
from deadlines import soon
from server.running_server import serving

IDS: Final = [f"0d6d3b8e-3c43-4d3c-9d3c-6a5c1a2b3c4{digit}" for digit in range(10)]
SERVER_SPECIFIC: Final = ("message_id", "created_at", "epoch", "heartbeat_ms", "message", "retry_after_ms")
Frame = dict[str, Any]


def comparable(frame: Frame) -> Frame:
    """Return the members that do not depend on the server. For an error, only the code matters."""
    if frame["type"] == "error":
        return {name: frame[name] for name in ("type", "code", "request_id") if name in frame}
    shared = {name: value for name, value in frame.items() if name not in SERVER_SPECIFIC}
    if "messages" in shared:
        shared["messages"] = [comparable({"type": "message", **one}) for one in shared["messages"]]
    return shared


class Model:
    """The model, with the interface of `Real`."""

    def __init__(self) -> None:
        self.server = ModelServer()
        self.connections: dict[str, ModelConnection] = {}

    async def create(self, user: str, chat_id: str, *members: str) -> None:
        self.server.create(f"user:{user}", chat_id, [f"user:{one}" for one in members])

    async def set_member(self, _by: str, chat_id: str, user: str, *, present: bool) -> None:
        self.server.set_member(chat_id, f"user:{user}", present=present)

    async def list_chats(self, user: str) -> Any:
        return self.server.list_chats(f"user:{user}")

    async def send(self, device: str, frame: Frame) -> None:
        connection = self.connections.get(device) or ModelConnection(self.server)
        self.connections[device] = connection
        connection.receive(json.dumps(frame).encode())

    async def receive(self, device: str) -> Frame:
        return comparable(json.loads(self.connections[device].out.popleft()))


class Real:
    """A real server, reached over HTTP and WebSockets."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url = url
        self.session = session
        self.sockets: dict[str, aiohttp.ClientWebSocketResponse] = {}

    async def _request(self, method: str, path: str, user: str, **options: Any) -> Any:
        headers = {"Authorization": f"Bearer {user}"}
        async with self.session.request(method, f"{self.url}/v1/chats{path}", headers=headers, **options) as response:
            assert response.status in (200, 201), await response.text()
            return await response.json()

    async def create(self, user: str, chat_id: str, *members: str) -> None:
        body = {"chat_id": chat_id, "members": [f"user:{one}" for one in members]}
        await self._request("POST", "", user, json=body)

    async def set_member(self, by: str, chat_id: str, user: str, *, present: bool) -> None:
        await self._request("PUT" if present else "DELETE", f"/{chat_id}/members/user:{user}", by)

    async def list_chats(self, user: str) -> Any:
        return (await self._request("GET", "", user))["chats"]

    async def send(self, device: str, frame: Frame) -> None:
        if device not in self.sockets:
            self.sockets[device] = await self.session.ws_connect(f"{self.url}/v1/chat")
        await self.sockets[device].send_str(json.dumps(frame))

    async def receive(self, device: str) -> Frame:
        return comparable(json.loads((await soon(self.sockets[device].receive())).data))


async def play(server: Model | Real) -> list[Any]:
    """Send a fixed series of requests, and return all answers."""
    received: list[Any] = []

    async def request(device: str, kind: str, answers: int = 1, **members: Any) -> None:
        await server.send(device, {"type": kind, **members})
        received.extend([(device, await server.receive(device)) for _ in range(answers)])

    async def receive(*devices: str) -> None:
        received.extend([(device, await server.receive(device)) for device in devices])

    for device in ("ann-phone", "ann-desk", "bob-phone"):
        await request(device, "connect", token=device.partition("-")[0], device_id=device)
    await server.create("ann", "tea")
    await receive("ann-phone", "ann-desk")
    await server.set_member("ann", "tea", "bob", present=True)
    await receive("ann-phone", "ann-desk", "bob-phone")
    first: Frame = {"client_message_id": IDS[0], "chat_id": "tea", "content": "hello"}
    await request("ann-phone", "send_message", request_id="1", **first)
    await receive("ann-desk", "bob-phone")
    await request("ann-phone", "send_message", request_id="2", **first)
    await request("ann-desk", "send_message", request_id="3", **{**first, "content": "other"})
    await request("bob-phone", "send_message", request_id="4", **first)
    for number in (1, 2):
        another: Frame = {
            "client_message_id": IDS[number],
            "chat_id": "tea",
            "content": "x",
            "content_type": "text/html",
        }
        await request("bob-phone", "send_message", request_id="5", **another)
        await receive("ann-phone", "ann-desk")
    for after, limit in ((0, 2), (2, 2), (3, 2), (9, 2), (0, 3)):
        await request(
            "bob-phone", "sync_request", request_id="6", chat_id="tea", last_acked_sequence=after, limit=limit
        )
    await request("bob-phone", "sync_request", request_id="7", chat_id="tea", last_acked_sequence=0, epoch="another")
    await request("bob-phone", "sync_request", request_id="8", chat_id="nowhere", last_acked_sequence=0)
    await request("bob-phone", "ack", request_id="9", chat_id="tea", last_acked_sequence=4)
    await request("bob-phone", "ack", chat_id="tea", last_acked_sequence=2)
    await receive("ann-phone", "ann-desk")
    await request("bob-phone", "ack", answers=0, chat_id="tea", last_acked_sequence=1)
    received += [await server.list_chats("ann"), await server.list_chats("bob")]
    await server.set_member("bob", "tea", "bob", present=False)
    await receive("ann-phone", "ann-desk", "bob-phone")
    await request("bob-phone", "send_message", request_id="10", **first)
    await request("bob-phone", "ack", request_id="11", chat_id="tea", last_acked_sequence=3)
    received.append(await server.list_chats("bob"))
    return received


async def test_model_answers_like_a_real_server(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, aiohttp.ClientSession() as session:
        real = Real(served.url, session)
        try:
            expected = await play(real)
        finally:
            await asyncio.gather(*(one.close() for one in real.sockets.values()))
    assert await play(Model()) == expected
