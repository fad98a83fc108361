"""A real server for tests, with its own port, log and sockets, and clients that wait with a deadline."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final
from unittest import mock
from uuid import UUID

import aiohttp
from aiohttp import WSMsgType

from databases import log_at
from deadlines import WAIT_S, soon
from engine.observable_store import Gate
from oncelog.engine.limits import Limits
from oncelog.server import app as server_module
from oncelog.server.app import Server
from oncelog.server.auth.api_keys import ApiKeys, CreatedKey
from oncelog.server.auth.principal import parse_grants
from oncelog.server.auth.tokens import TokenSettings
from oncelog.server.limits import ApiLimits
from oncelog.server.settings import ApiKeySettings, ServerSettings
from oncelog.storage.clock import Clock, SystemClock
from oncelog.testing.clock import ManualClock
from server.auth import auth_material

_API_LIMITS: Final = frozenset(ApiLimits.__struct_fields__)
_ENGINE_LIMITS: Final = frozenset(Limits.__struct_fields__)


class ShiftedClock:
    """The machine's clocks, with the wall clock `ahead_ms` ahead."""

    def __init__(self, ahead_ms: int = 0) -> None:
        self._clock = SystemClock()
        self.ahead_ms = ahead_ms

    def wall_ms(self) -> int:
        return self._clock.wall_ms() + self.ahead_ms

    def elapsed_ms(self) -> int:
        return self._clock.elapsed_ms()

    def boot(self) -> str:
        return self._clock.boot()


# --- events --------------------------------------------------------------------------------------------


def event_id(number: int) -> str:
    return str(UUID(int=number))


def item(number: int, *partitions: str, **members: Any) -> dict[str, Any]:
    """Return an event to submit, by default in partition `a`."""
    event = {"type": "counted", "number": number}
    return {"id": event_id(number), "partitions": list(partitions or ("a",)), "event": event, **members}


def numbers(events: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the committed ids of events or results."""
    return [event["committed_id"] for event in events]


# --- an HTTP client --------------------------------------------------------------------------------------


class Answer:
    """A complete response."""

    def __init__(self, response: aiohttp.ClientResponse, body: bytes) -> None:
        self.status = response.status
        self.headers = response.headers
        self.content_type = response.content_type
        self.body = body

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> Any:
        """Check the problem document and its error object, and return the error object."""
        assert self.content_type == "application/problem+json"
        problem = self.json
        error = problem["error"]
        assert set(error) == {"code", "message", "details"}
        assert (problem["code"], problem["detail"]) == (error["code"], error["message"])
        assert (problem["status"], problem["type"]) == (self.status, f"urn:oncelog:problem:{error['code']}")
        assert problem["title"]
        return error

    @property
    def refusal(self) -> tuple[int, str]:
        return self.status, self.error["code"]


# --- a client of server-sent events ----------------------------------------------------------------------


class Message:
    """An event of a stream, as a browser dispatches it."""

    def __init__(self, kind: str, data: str, last_event_id: str) -> None:
        self.kind = kind
        self.data = data
        self.id = last_event_id

    @property
    def json(self) -> Any:
        return json.loads(self.data)


class EventStream:
    """Reads a stream by the rules of the HTML standard (9.2.6), line by line."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.response = response
        self.last_event_id = ""
        self.retry_ms: int | None = None
        self.comments = 0

    async def next(self) -> Message | None:
        """Return the next event that a page would see, or None at the end of the stream. Count comments."""
        return await soon(self._next())

    async def _next(self) -> Message | None:
        kind, data = "message", list[str]()
        while line := await self.response.content.readline():
            text = line.decode().removesuffix("\n").removesuffix("\r")
            name, _, value = text.partition(":")
            value = value.removeprefix(" ")
            if not text:
                if data:
                    return Message(kind, "\n".join(data), self.last_event_id)
                kind = "message"
            elif not name:
                self.comments += 1
            elif name == "event":
                kind = value
            elif name == "data":
                data.append(value)
            elif name == "id" and "\0" not in value:
                self.last_event_id = value
            elif name == "retry" and value.isascii() and value.isdecimal():
                self.retry_ms = int(value)
        return None

    async def connected(self) -> Any:
        """Return the data of the first event, `connected`."""
        message = await self.next()
        assert message is not None
        assert message.kind == "connected"
        return message.json

    async def events(self, count: int) -> list[Any]:
        """Return the next `count` events of the log, and check that each has its committed id as event id."""
        found = []
        for _ in range(count):
            message = await self.next()
            assert message is not None
            assert (message.kind, message.id) == ("message", str(message.json["committed_id"]))
            found.append(message.json)
        return found

    async def comment(self) -> None:
        """Wait until the stream has received another comment."""
        line = b""
        while not line.startswith(b":"):
            line = await soon(self.response.content.readline())
            assert line

    def close(self) -> None:
        self.response.close()


# --- a client of the WebSocket -----------------------------------------------------------------------------


def close_code(message: aiohttp.WSMessage, socket: aiohttp.ClientWebSocketResponse) -> int | None:
    """Return the close code that the server sent.

    The socket's own close code is 1006 if the connection ends before aiohttp has answered the close frame.
    """
    return message.data if message.type is WSMsgType.CLOSE else socket.close_code


class SocketClient:
    """Sends messages and receives them with a deadline."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.socket = socket

    async def send(self, kind: str, payload: Any, msg_id: str | int | None = None, **members: Any) -> None:
        named = {} if msg_id is None else {"msg_id": msg_id}
        await self.socket.send_str(
            json.dumps({"type": kind, "protocol_version": "1.0", "payload": payload, **named, **members})
        )

    async def receive(self) -> Any:
        """Return the next message. Fail if the connection is closed."""
        message = await soon(self.socket.receive())
        assert message.type is WSMsgType.TEXT, message
        return json.loads(message.data)

    async def request(self, kind: str, payload: Any, msg_id: str | int | None = None) -> Any:
        """Send a message and return the payload of the next one received."""
        await self.send(kind, payload, msg_id)
        answer = await self.receive()
        assert answer.get("msg_id") == msg_id
        return answer["payload"]

    async def connect(self, client_id: str = "laptop", token: str | None = None) -> Any:
        return await self.request("connect", {"client_id": client_id, "token": token})

    async def submit(self, *items: Mapping[str, Any]) -> Any:
        """Submit events and return their results."""
        return (await self.request("submit_events", {"events": items}))["results"]

    async def sync(self, *partitions: str, since: int = 0, **members: Any) -> Any:
        return await self.request("sync", {"partitions": partitions, "since_committed_id": since, **members})

    async def wait_closed(self) -> int | None:
        """Return the close code of the server. Fail if the server sends another message first."""
        message = await soon(self.socket.receive())
        assert message.type in (WSMsgType.CLOSE, WSMsgType.CLOSED, WSMsgType.CLOSING), message
        return close_code(message, self.socket)

    async def close(self) -> None:
        await soon(self.socket.close())


# --- the server ------------------------------------------------------------------------------------------


class Serving:
    """A running server and its clients. Every request sends `credential`."""

    def __init__(self, server: Server, session: aiohttp.ClientSession, clock: Clock, keys: ApiKeys | None) -> None:
        self.server = server
        self.session = session
        self.clock = clock
        self.api_keys = keys
        """The key file, as an operator edits it. The server reads it at `server.reload()`."""
        self.credential: str | None = None
        self._sockets: list[SocketClient] = []
        self._streams: list[EventStream] = []

    @property
    def url(self) -> str:
        return self.server.urls[0]

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    async def request(
        self, method: str, path: str, *, credential: str | None = None, headers: Any = None, **options: Any
    ) -> Answer:
        options.setdefault("allow_redirects", False)
        async with asyncio.timeout(WAIT_S):
            async with self.session.request(
                method, self.url + path, headers=self._headers(credential, headers), **options
            ) as response:
                return Answer(response, await response.read())

    async def get(self, path: str, **options: Any) -> Answer:
        return await self.request("GET", path, **options)

    async def submit(self, *items: Mapping[str, Any], client_id: str | None = None, **options: Any) -> Answer:
        named = {} if client_id is None else {"client_id": client_id}
        return await self.request("POST", "/v1/events", json={"events": items, **named}, **options)

    async def commit(self, *items: Mapping[str, Any]) -> list[int]:
        """Submit events, assert that all are committed, and return their committed ids."""
        answer = await self.submit(*items)
        assert answer.status == 200, answer.body
        return numbers(answer.json["results"])

    async def page(self, *partitions: str, **query: Any) -> Answer:
        options = {name: query.pop(name) for name in ("credential", "headers") if name in query}
        return await self.get("/v1/events", params=_query(partitions, query), **options)

    async def stream(
        self, *partitions: str, credential: str | None = None, headers: Any = None, **query: Any
    ) -> EventStream:
        """Open a stream. If the server refuses it, `response` has an error status."""
        response = await soon(
            self.session.get(
                self.url + "/v1/events/stream",
                params=_query(partitions, query),
                headers=self._headers(credential, headers),
            )
        )
        self._streams.append(EventStream(response))
        return self._streams[-1]

    async def socket(self, headers: Any = None) -> SocketClient:
        """Open a WebSocket without sending `connect`."""
        socket = SocketClient(await soon(self.session.ws_connect(self.url + "/v1/events", headers=headers)))
        self._sockets.append(socket)
        return socket

    async def connected(self, client_id: str = "laptop", token: str | None = None) -> SocketClient:
        """Open a WebSocket and send `connect`."""
        socket = await self.socket()
        await socket.connect(client_id, token if token is not None else self.credential)
        return socket

    async def close(self) -> None:
        """Close all streams and sockets. `serving` calls this at its end."""
        for stream in self._streams:
            stream.close()
        try:
            for socket in self._sockets:
                await socket.close()
        finally:
            await self.session.close()

    def hold_commits(self, monkeypatch: Any) -> Gate:
        """Make commits wait at a closed gate."""
        return self._hold_calls("commit", monkeypatch)

    def hold_pages(self, monkeypatch: Any) -> Gate:
        """Make page reads wait at a closed gate."""
        return self._hold_calls("read_views", monkeypatch)

    def _hold_calls(self, name: str, monkeypatch: Any) -> Gate:
        gate = Gate()
        gate.shut()
        store: Any = self.server.log._store
        call = getattr(store, name)

        async def held(*arguments: Any, **named: Any) -> Any:
            await gate()
            return await call(*arguments, **named)

        monkeypatch.setattr(store, name, held)
        return gate

    def _headers(self, credential: str | None, headers: Any) -> dict[str, str]:
        shown = credential or self.credential
        return {**({} if shown is None else {"Authorization": f"Bearer {shown}"}), **(headers or {})}


@asynccontextmanager
async def serving(
    directory: Path,
    *,
    tokens: bool = False,
    api_keys: bool = False,
    clock: ManualClock | ShiftedClock | None = None,
    connector: aiohttp.BaseConnector | None = None,
    token_settings: Mapping[str, Any] | None = None,
    **settings: Any,
) -> AsyncIterator[Serving]:
    """Run a server with a log in the directory.

    The server runs in development mode unless `tokens` or `api_keys` is set. `tokens` enables the HS256 tokens of
    `auth_material` and a manual clock set to their time. `api_keys` enables the keys in `keys.json`, which initially
    contains no usable key. `settings` may contain fields of `ServerSettings` and limits by name.
    """
    made, keys, chosen = _settings(directory, tokens, api_keys, clock, token_settings or {}, settings)
    async with Server(made, clock=chosen) as server:
        session = aiohttp.ClientSession(connector=connector)
        served = Serving(server, session, chosen, keys)
        try:
            yield served
        finally:
            await served.close()
            # A stopping server accepts connections for a moment longer. Skip that, because no client connects any more.
            with mock.patch.object(server_module, "ACCEPT_GRACE_S", 0):
                await server.stop()


def _settings(
    directory: Path,
    tokens: bool,
    api_keys: bool,
    clock: ManualClock | ShiftedClock | None,
    token_settings: Mapping[str, Any],
    settings: dict[str, Any],
) -> tuple[ServerSettings, ApiKeys | None, Clock]:
    api = {name: settings.pop(name) for name in _API_LIMITS & settings.keys()}
    engine = {name: settings.pop(name) for name in _ENGINE_LIMITS & settings.keys()}
    chosen: Clock = clock or (ManualClock(auth_material.NOW_MS) if tokens else SystemClock())
    keys = None
    if tokens:
        source = auth_material.key_file(directory, "HS256")
        settings["tokens"] = TokenSettings(algorithms=("HS256",), key_files=(source,), **token_settings)
    if api_keys:
        keys = ApiKeys(directory / "keys.json", chosen.wall_ms)
        if not (directory / "keys.json").exists():
            keys.create("nobody", "nobody", parse_grants())
        auth_material.reload(keys)
        settings["api_keys"] = ApiKeySettings(file=str(directory / "keys.json"))
    settings.setdefault("development", not tokens and not api_keys)
    settings.setdefault("store", log_at(directory / "events.db"))
    settings.setdefault("port", 0)
    settings.setdefault("grpc_port", 0)  # the default port, 100 above `port`, may be in use
    made = ServerSettings(api_limits=ApiLimits(**api), engine_limits=Limits(**engine), **settings)
    return made, keys, chosen


def api_key(served: Serving, client_id: str, read: Sequence[str] = (), write: Sequence[str] = ()) -> CreatedKey:
    """Create an API key and reload the server."""
    assert served.api_keys is not None
    key = served.api_keys.create(client_id, client_id, parse_grants(read, write))
    served.server.reload()
    return key


def _query(partitions: Sequence[str], query: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [*(("partition", one) for one in partitions), *((name, str(value)) for name, value in query.items())]
