"""Sessions of the Events API without sockets, on a log whose commits and reads tests can hold."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import orjson

from deadlines import WAIT_S
from engine.observable_store import WatchedLog
from oncelog.core.builders import event
from oncelog.core.values import Submission
from oncelog.errors import AuthError
from oncelog.server.auth.authenticator import Authenticator, DevelopmentAuthenticator
from oncelog.server.auth.principal import EVERYTHING, Grants, Principal
from oncelog.server.auth_gate import AuthGate
from oncelog.server.connection_limiter import Caller
from oncelog.server.events.hub import EventsHub
from oncelog.server.events.service import EventsService
from oncelog.server.events.session import EventsSession
from oncelog.server.limits import ApiLimits

Json = dict[str, Any]


def uuid(number: int) -> str:
    return f"00000000-0000-4000-8000-{number:012d}"


def item(number: int, *partitions: str, **more: Any) -> Json:
    return {"id": uuid(number), "partitions": list(partitions or ("a",)), "event": {"type": "t", "n": number}, **more}


def submissions(*items: Json) -> list[Submission]:
    """Return the submissions that another process would create for these items."""
    return [event(one["id"], one["event"], one["partitions"]) for one in items]


def numbers(page: Json) -> list[int]:
    """Return the committed ids of a page."""
    return [one["committed_id"] for one in page["events"]]


def code_of(reply: Json) -> str:
    """Assert that the reply is an error, and return its code."""
    assert reply["type"] == "error", reply
    code: str = reply["payload"]["code"]
    return code


class Tokens(DevelopmentAuthenticator):
    """Authenticates the names that a test adds."""

    is_open: ClassVar = False

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[str, Principal] = {}

    def add(self, name: str, grants: Grants = EVERYTHING, **fields: Any) -> None:
        self.known[name] = Principal(
            actor=f"user:{name}", client_id=fields.pop("client_id", None), grants=grants, **fields
        )

    def authenticate(self, credential: str | None) -> Principal:
        if credential not in self.known:
            raise AuthError("unknown")
        return self.known[credential]

    def refresh_principal(self, principal: Principal, now_ms: int) -> Principal | None:
        found = self.known.get(principal.actor.removeprefix("user:"))
        return None if found is None or found.has_expired(now_ms) else found


class MemoryWire:
    """Stores the written messages. A test can make it stop accepting writes."""

    def __init__(self) -> None:
        self.messages: list[Json] = []
        self.is_stuck = False
        self.closed_with: tuple[int, str] | None = None
        self.is_aborted = False
        self.writes = 0
        self._room = asyncio.Event()
        self._arrived = asyncio.Event()

    def write(self, data: bytes) -> None:
        assert self.closed_with is None, "write after close"
        self.writes += 1
        self.messages.extend(map(json.loads, texts_of(data)))
        self._arrived.set()

    def count_buffered_bytes(self) -> int:
        return 10**9 if self.is_stuck else 0

    async def drain(self) -> None:
        while self.is_stuck:
            self._room.clear()
            await self._room.wait()

    def unstick(self) -> None:
        self.is_stuck = False
        self._room.set()

    def close(self, code: int, reason: str) -> None:
        self.closed_with = (code, reason)
        self._arrived.set()

    def abort(self) -> None:
        self.is_aborted = True

    async def wait_for_messages(self, count: int) -> list[Json]:
        """Wait until `count` messages have arrived and return them."""
        async with asyncio.timeout(WAIT_S):
            while len(self.messages) < count:
                self._arrived.clear()
                await self._arrived.wait()
        return self.messages[:count]


def texts_of(data: bytes) -> list[bytes]:
    """Return the texts of complete unmasked WebSocket frames (RFC 6455, 5.2)."""
    texts = []
    while data:
        assert data[0] == 0x81
        length, begin = data[1], 2
        if length >= 126:
            begin = 4 if length == 126 else 10
            length = int.from_bytes(data[2:begin], "big")
        text, data = data[begin : begin + length], data[begin + length :]
        assert len(text) == length
        texts.append(text)
    return texts


class Peer:
    """A client with its session and its wire."""

    def __init__(self, server: "SessionServer", name: str) -> None:
        self.wire = MemoryWire()
        self.name = name
        self.session = EventsSession(server.service, self.wire, Caller("192.0.2.1"))
        self._numbers = 0

    @property
    def messages(self) -> list[Json]:
        return self.wire.messages

    async def send(self, kind: str, payload: Any, **more: Any) -> str:
        """Send a message, wait until the session has read it, and return the message id."""
        self._numbers += 1
        msg_id = f"{self.name}-{self._numbers}"
        message = {"type": kind, "protocol_version": "1.0", "msg_id": msg_id, "payload": payload, **more}
        await self.send_raw(orjson.dumps(message))
        return msg_id

    async def send_raw(self, data: bytes) -> None:
        waiting = self.session.receive(data)
        if waiting is not None:
            await waiting

    async def request(self, kind: str, payload: Any, **more: Any) -> Json:
        """Send a message and return the reply to it, even if other messages arrive first."""
        msg_id = await self.send(kind, payload, **more)
        return await self.reply(msg_id)

    async def reply(self, msg_id: str) -> Json:
        seen = 0
        while True:
            for message in (await self.wire.wait_for_messages(seen + 1))[seen:]:
                seen += 1
                if message.get("msg_id") == msg_id:
                    return message

    async def connect(self) -> Json:
        return await self.request("connect", {"token": self.name, "client_id": f"client-{self.name}"})

    async def submit(self, *items: Json) -> list[Json]:
        reply = await self.request("submit_events", {"events": list(items)})
        assert reply["type"] == "submit_events_result", reply
        results: list[Json] = reply["payload"]["results"]
        return results

    async def sync(self, *partitions: str, since: int = 0, **more: Any) -> Json:
        payload = {"partitions": list(partitions or ("a",)), "since_committed_id": since, **more}
        reply = await self.request("sync", payload)
        assert reply["type"] == "sync_response", reply
        found: Json = reply["payload"]
        return found

    def received(self) -> list[Any]:
        """Return all received messages in short form.

        A broadcast becomes its committed id, a result the list of its committed ids, an error its code, and any other
        message its type.
        """
        found: list[Any] = []
        for message in self.messages:
            payload = message["payload"]
            match message["type"]:
                case "event_broadcast":
                    found.append(payload["committed_id"])
                case "submit_events_result":
                    found.append([one.get("committed_id", one["status"]) for one in payload["results"]])
                case "error":
                    found.append(payload["code"])
                case kind:
                    found.append(kind)
        return found


class SessionServer:
    """The Events API and its log, with the sessions that a test opens."""

    def __init__(self, log: WatchedLog, authenticator: Authenticator, **limits: int) -> None:
        self.log = log
        rates = {"auth_failures_per_minute_max": 3, "requests_per_second_max": 0}
        entrance = AuthGate(authenticator, log.clock, ApiLimits(**{**rates, **limits}))
        self.counts = entrance.counts
        self.hub = EventsHub(entrance, self.fail)
        self.service = EventsService(log, self.hub, entrance)
        self.peers: list[Peer] = []

    def fail(self, error: Exception) -> None:
        """Close all sessions, as the server does when it cannot read its log."""
        for peer in self.peers:
            peer.session.fail(error)

    async def connect(self, name: str = "ada") -> Peer:
        """Open a session and send `connect`."""
        peer = self.accept(name)
        assert (await peer.connect())["type"] == "connected"
        return peer

    def accept(self, name: str = "ada") -> Peer:
        """Open a session without sending `connect`."""
        peer = Peer(self, name)
        self.peers.append(peer)
        return peer


@asynccontextmanager
async def session_server(
    *, tokens: Tokens | None = None, engine: dict[str, Any] | None = None, **limits: int
) -> AsyncIterator[SessionServer]:
    """Run the Events API. Without `tokens`, ada, bob and cyd have grants for everything."""
    if tokens is None:
        tokens = Tokens()
        for name in ("ada", "bob", "cyd"):
            tokens.add(name)
    async with WatchedLog(**(engine or {})) as log:
        server = SessionServer(log, tokens, **limits)
        server.hub.position = await log.listen(server.hub)
        try:
            yield server
        finally:
            for peer in server.peers:
                peer.session.on_disconnect()
