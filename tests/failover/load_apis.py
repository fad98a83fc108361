"""The APIs under load while primaries are lost. To add an API, add a class and an entry in `APIS`.

The writes to an API share one order: the log's order for events, and the order of one stream for the others.
"""

import asyncio
import base64
import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from typing import Any, ClassVar
from uuid import UUID, uuid4

import aiohttp

import oncelog
from core.delta_faults import id_of
from oncelog.core.identity import scope_of
from oncelog.core.transactions import parse_tx_id
from oncelog.engine.log import Log
from oncelog.idempotency.runs import Runs
from server.running_server import EventStream
from servers.checker import Seen

CAMPAIGN = 7
GATEWAY = "shop"
ORGANIZATION = "acme"
CHAT = "general"
CHAT_USERS = 10
CHAT_LOOK_S = 0.1


def content(client: int, step: int) -> str:
    """Return the content of a write. Every write has different content, so that a wrong record is detected."""
    return f"{client}/{step}"


class Endpoints:
    """The addresses of the servers, and the logs opened with the library."""

    def __init__(self, session: aiohttp.ClientSession, urls: Sequence[str], logs: Sequence[Log]) -> None:
        self.session = session
        self.urls = urls
        self.logs = logs


class Api(ABC):
    """An API. A client and a step identify a write, and always produce the same write."""

    name: ClassVar[str]
    where: ClassVar[str]
    """SQL condition that selects the records of the API (`findings`)."""
    is_by_lane: ClassVar[bool] = False
    """Whether the API returns positions of a lane instead of sequences of a stream."""

    def __init__(self, places: Endpoints) -> None:
        self.places = places

    @property
    def gateways(self) -> int:
        """Return the number of servers or logs."""
        return len(self.places.urls)

    def id(self, client: int, step: int) -> str:
        """Return the key under which the log stores a write, in hexadecimal."""
        return f"{client + 1:016x}{step + 1:016x}"

    @staticmethod
    @abstractmethod
    def content_in(body: Any) -> str:
        """Return the `content` of a write from the body of its record."""

    @abstractmethod
    async def submit(self, gateway: int, client: int, step: int) -> int:
        """Submit a write and return its position. Raise an error unless it succeeds."""

    @abstractmethod
    def follow(self, gateway: int, cursor: int) -> AsyncIterator[Seen]:
        """Yield the records after a position, then new records."""

    async def post(self, gateway: int, path: str, body: Any) -> Any:
        async with self.places.session.post(self.places.urls[gateway] + path, json=body) as response:
            assert response.status == 200, await response.text()
            return await response.json()

    async def stream(self, gateway: int, path: str) -> AsyncIterator[tuple[str, Any]]:
        """Yield server-sent events with their ids."""
        async with self.places.session.get(self.places.urls[gateway] + path) as response:
            assert response.status == 200, await response.text()
            stream = EventStream(response)
            while (message := await stream._next()) is not None:
                if message.kind == "message":
                    yield stream.last_event_id, json.loads(message.data)


class Events(Api):
    name = "events"
    where = "r.lane = 0"
    is_by_lane = True

    @staticmethod
    def content_in(body: Any) -> str:
        return str(body["content"])

    async def submit(self, gateway: int, client: int, step: int) -> int:
        id_ = str(UUID(self.id(client, step)))
        said = {"type": "said", "content": content(client, step)}
        event = {"id": id_, "partitions": ["all"], "event": said}
        (result,) = (await self.post(gateway, "/v1/events", {"events": [event]}))["results"]
        assert result["status"] == "committed", result
        return int(result["committed_id"])

    async def follow(self, gateway: int, cursor: int) -> AsyncIterator[Seen]:
        async for _, event in self.stream(gateway, f"/v1/events/stream?partition=all&since={cursor}"):
            yield Seen(event["committed_id"], UUID(event["id"]).hex)


class Ledger(Api):
    """Readers receive blocks with transaction ids; the Merkle root of the block identifies the content."""

    name = "ledger"
    where = "r.policy = 'ledger'"
    is_by_lane = True

    @staticmethod
    def content_in(body: Any) -> str:
        (operation,) = body["operations"]
        return base64.b64decode(operation["set_entity"]["value"]).decode()

    async def submit(self, gateway: int, client: int, step: int) -> int:
        value = base64.b64encode(content(client, step).encode()).decode()
        operation = {"set_entity": {"key": f"e{client}/{step % 10}", "value": value}}
        body = {
            "organization": ORGANIZATION,
            "client_id": f"c{client}",
            "sequence": step + 1,
            "idempotency_key": str(UUID(self.id(client, step))),
            "operations": [operation],
        }
        answer = await self.post(gateway, "/v1/ledger/write", body)
        answer = answer.get("error", answer)
        place = parse_tx_id(answer["committed_tx_id"])
        assert place is not None
        assert answer["assigned_sequence"] == step + 1, answer
        return place[1]

    async def follow(self, gateway: int, cursor: int) -> AsyncIterator[Seen]:
        async for _, block in self.stream(gateway, f"/v1/ledger/blocks/stream?organization={ORGANIZATION}"):
            for tx_id in block["tx_ids"]:
                place = parse_tx_id(tx_id)
                assert place is not None
                if place[1] > cursor:  # readers resume by height and may read a block twice
                    yield Seen(place[1], block["header"]["merkle_root"])


class Deltas(Api):
    name = "deltas"
    where = "r.scope = 'deltas/shop'"

    def delta(self, client: int, step: int) -> dict[str, Any]:
        """Return a delta. Its clock is a counter, because a retry must be identical."""
        columns = [{"column": "said", "value": content(client, step)}]
        said = {"clientId": f"c{client}", "columns": columns, "hlc": str(step + 1), "rowId": f"r{step % 20}"}
        said |= {"table": "t", "op": "UPDATE"}
        return {"deltaId": id_of(said), **said}

    def id(self, client: int, step: int) -> str:
        return str(self.delta(client, step)["deltaId"])

    @staticmethod
    def content_in(body: Any) -> str:
        (column,) = body["columns"]
        return str(column["value"])

    async def submit(self, gateway: int, client: int, step: int) -> int:
        answer = await self.post(gateway, f"/v1/sync/{GATEWAY}/push", {"deltas": [self.delta(client, step)]})
        return int(answer["results"][0]["sequence"])

    async def follow(self, gateway: int, cursor: int) -> AsyncIterator[Seen]:
        async for _, delta in self.stream(gateway, f"/v1/sync/{GATEWAY}/live?since={cursor}"):
            yield Seen(delta["sequence"], delta["deltaId"])


class RunsByLibrary(Api):
    """Runs of a tool with a random result, so that a run executed twice is detected."""

    name = "runs"
    where = "r.policy = 'runs'"

    def __init__(self, places: Endpoints) -> None:
        super().__init__(places)
        self._runs = [Runs(log) for log in places.logs]
        self.outputs: dict[str, str] = {}

    @property
    def gateways(self) -> int:
        return len(self.places.logs)

    def fields(self, client: int, step: int) -> dict[str, Any]:
        return {
            "plan_id": f"c{client}",
            "campaign_id": CAMPAIGN,
            "event_type": "tool.execute",
            "tool_name": "draw",
            "ruleset_version": "v1",
            "args": {"said": content(client, step)},
        }

    def id(self, client: int, step: int) -> str:
        fields = self.fields(client, step)
        names = ("plan_id", "campaign_id", "event_type", "tool_name", "ruleset_version", "args")
        return oncelog.run_key(*(fields[name] for name in names)).hex()

    @staticmethod
    def content_in(body: Any) -> str:
        return str(body["args"]["said"])

    async def submit(self, gateway: int, client: int, step: int) -> int:
        async def draw(said: str) -> str:
            return uuid4().hex

        run: oncelog.Run[str] = await self._runs[gateway].execute(**self.fields(client, step), tool=draw, lease_s=2)
        if self.outputs.setdefault(run.event.key, run.event.output) != run.event.output:
            raise SystemExit(f"run {run.event.key} had two results")
        return run.event.ordinal

    async def follow(self, gateway: int, cursor: int) -> AsyncIterator[Seen]:
        log = self.places.logs[gateway]
        async with log.follow(stream=scope_of("runs", CAMPAIGN), after=cursor) as records:
            async for record in records:
                yield Seen(record.sequence, record.key.hex())


class Chat(Api):
    """Messages to a chat; each client is a different user."""

    name = "chat"
    where = "r.policy = 'chat' AND r.sequence > 0"

    def __init__(self, places: Endpoints) -> None:
        super().__init__(places)
        self._is_made = False

    def id(self, client: int, step: int) -> str:
        """Return a UUID of version 4, as the API requires."""
        return UUID(super().id(client, step), version=4).hex

    @staticmethod
    def content_in(body: Any) -> str:
        return str(body["content"])

    async def submit(self, gateway: int, client: int, step: int) -> int:
        if not self._is_made:  # a repeated creation returns the existing chat
            members = [f"user:c{number}" for number in range(CHAT_USERS)]
            await self._asked(gateway, 0, "/v1/chats", {"chat_id": CHAT, "members": members})
            self._is_made = True
        message = {"client_message_id": str(UUID(self.id(client, step))), "content": content(client, step)}
        answer = await self._asked(gateway, client, f"/v1/chats/{CHAT}/messages", message)
        return int(answer["sequence"])

    async def follow(self, gateway: int, cursor: int) -> AsyncIterator[Seen]:
        """Read pages instead of using a WebSocket."""
        while True:
            page = await self._asked(gateway, 0, f"/v1/chats/{CHAT}/messages?after={cursor}&limit=100")
            for message in page["messages"]:
                cursor = message["sequence"]
                yield Seen(cursor, UUID(message["client_message_id"]).hex)
            if not page["has_more"]:
                await asyncio.sleep(CHAT_LOOK_S)

    async def _asked(self, gateway: int, client: int, path: str, body: Any = None) -> Any:
        method, headers = "GET" if body is None else "POST", {"Authorization": f"Bearer c{client}"}
        url = self.places.urls[gateway] + path
        async with self.places.session.request(method, url, json=body, headers=headers) as response:
            assert response.status in (200, 201), await response.text()
            return await response.json()


APIS: tuple[type[Api], ...] = (Events, Ledger, Deltas, RunsByLibrary, Chat)
