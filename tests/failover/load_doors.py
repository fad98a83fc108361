"""The doors that are kept busy while primaries are lost. A new door is a class and a line in `DOORS`.

Of each door one order is written to and read: that of the log for events, else that of one stream.
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
from doors.serving import EventStream
from gateways.checker import Seen
from oncelog.core.identity import scope_of
from oncelog.core.transactions import place_of
from oncelog.engine.log import Log
from oncelog.idempotency.runs import Runs

CAMPAIGN = 7
GATEWAY = "shop"
ORGANIZATION = "acme"
CHAT = "general"
CHAT_USERS = 10
CHAT_LOOK_S = 0.1


def content(client: int, step: int) -> str:
    """Of a write, at whatever door: each has its own, so that one that is stored in another's place is seen."""
    return f"{client}/{step}"


class Places:
    """Where doors are found: servers by their addresses, and the library's logs."""

    def __init__(self, session: aiohttp.ClientSession, urls: Sequence[str], logs: Sequence[Log]) -> None:
        self.session = session
        self.urls = urls
        self.logs = logs


class Door(ABC):
    """Writes are named by a client and a step, and are the same write whenever they are named again."""

    name: ClassVar[str]
    where: ClassVar[str]
    """Which records of the database are those of the order (`judging`)."""
    is_by_lane: ClassVar[bool] = False
    """Whether it tells positions in a lane; else sequences of the stream."""

    def __init__(self, places: Places) -> None:
        self.places = places

    @property
    def gateways(self) -> int:
        """How many places it has."""
        return len(self.places.urls)

    def id(self, client: int, step: int) -> str:
        """As 32 hexadecimal digits: the key that the write has in the log, where it is the caller's to choose."""
        return f"{client + 1:016x}{step + 1:016x}"

    @staticmethod
    @abstractmethod
    def content_in(body: Any) -> str:
        """The `content` of a write, taken out of the record that was made of it."""

    @abstractmethod
    async def submit(self, gateway: int, client: int, step: int) -> int:
        """The position that was told. Raises for everything that is no success."""

    @abstractmethod
    def follow(self, gateway: int, cursor: int) -> AsyncIterator[Seen]:
        """What is committed after a position, and then what comes."""

    async def post(self, gateway: int, path: str, body: Any) -> Any:
        async with self.places.session.post(self.places.urls[gateway] + path, json=body) as response:
            assert response.status == 200, await response.text()
            return await response.json()

    async def stream(self, gateway: int, path: str) -> AsyncIterator[tuple[str, Any]]:
        """Server-sent events, with their ids."""
        async with self.places.session.get(self.places.urls[gateway] + path) as response:
            assert response.status == 200, await response.text()
            stream = EventStream(response)
            while (message := await stream._next()) is not None:
                if message.kind == "message":
                    yield stream.last_event_id, json.loads(message.data)


class Events(Door):
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


class Ledger(Door):
    """Readers are given blocks, and ids of transactions in them; by the block's root it is known what these are."""

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
        place = place_of(answer["committed_tx_id"])
        assert place is not None
        assert answer["assigned_sequence"] == step + 1, answer
        return place[1]

    async def follow(self, gateway: int, cursor: int) -> AsyncIterator[Seen]:
        async for _, block in self.stream(gateway, f"/v1/ledger/blocks/stream?organization={ORGANIZATION}"):
            for tx_id in block["tx_ids"]:
                place = place_of(tx_id)
                assert place is not None
                if place[1] > cursor:  # heights are what one goes on from; to read them again does no harm
                    yield Seen(place[1], block["header"]["merkle_root"])


class Deltas(Door):
    name = "deltas"
    where = "r.scope = 'deltas/shop'"

    def delta(self, client: int, step: int) -> dict[str, Any]:
        """Its clock is a count: a retry must be the same to the last bit, whoever sends it."""
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


class RunsByLibrary(Door):
    """The tool's result is drawn by chance: who gets an event twice is told the same result."""

    name = "runs"
    where = "r.policy = 'runs'"

    def __init__(self, places: Places) -> None:
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

        run = await self._runs[gateway].execute(**self.fields(client, step), tool=draw, lease_s=2)
        if self.outputs.setdefault(run.event.key, run.event.output) != run.event.output:
            raise SystemExit(f"run {run.event.key} had two results")
        return run.event.ordinal

    async def follow(self, gateway: int, cursor: int) -> AsyncIterator[Seen]:
        log = self.places.logs[gateway]
        async with log.follow(stream=scope_of("runs", CAMPAIGN), after=cursor) as records:
            async for record in records:
                yield Seen(record.sequence, record.key.hex())


class Chat(Door):
    """Each client is a user of its own."""

    name = "chat"
    where = "r.policy = 'chat' AND r.sequence > 0"

    def __init__(self, places: Places) -> None:
        super().__init__(places)
        self._is_made = False

    def id(self, client: int, step: int) -> str:
        """A UUID of version 4, as the door wants them."""
        return UUID(super().id(client, step), version=4).hex

    @staticmethod
    def content_in(body: Any) -> str:
        return str(body["content"])

    async def submit(self, gateway: int, client: int, step: int) -> int:
        if not self._is_made:  # made again by a member it is the one that is there
            members = [f"user:c{number}" for number in range(CHAT_USERS)]
            await self._asked(gateway, 0, "/v1/chats", {"chat_id": CHAT, "members": members})
            self._is_made = True
        message = {"client_message_id": str(UUID(self.id(client, step))), "content": content(client, step)}
        answer = await self._asked(gateway, client, f"/v1/chats/{CHAT}/messages", message)
        return int(answer["sequence"])

    async def follow(self, gateway: int, cursor: int) -> AsyncIterator[Seen]:
        """Page by page, as who has no WebSocket."""
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


DOORS: tuple[type[Door], ...] = (Events, Ledger, Deltas, RunsByLibrary, Chat)
