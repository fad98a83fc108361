"""The second dialect of the events door, for tests: sessions that speak it, and items of it."""

from typing import Any

import orjson

from doors.talking import House, Json, Talk

PROJECT = "p1"


def draft(event_id: str, n: int = 1, **members: Any) -> Json:
    """An item as the package sends it, but for `meta.clientId`, which is filled in by who sends it."""
    return {
        "id": event_id,
        "partition": "board",
        "projectId": PROJECT,
        "type": "card.added",
        "schemaVersion": 1,
        "payload": {"n": n},
        "meta": {"clientTs": 1_700_000_000_000 + n},
        **members,
    }


class CamelTalk(Talk):
    """A session of the second dialect."""

    async def send(self, kind: str, payload: Any, **more: Any) -> str:
        self._numbers += 1
        msg_id = f"{self.name}-{self._numbers}"
        message = {"type": kind, "protocolVersion": "1.0", "msgId": msg_id, "timestamp": 1, "payload": payload, **more}
        await self.raw(orjson.dumps(message))
        return msg_id

    async def reply(self, msg_id: str) -> Json:
        seen = 0
        while True:
            for message in (await self.wire.arrived(seen + 1))[seen:]:
                seen += 1
                if message.get("msgId") == msg_id:
                    return message

    @property
    def client_id(self) -> str:
        return f"client-{self.name}"

    async def connect(self, project: str = PROJECT) -> Json:
        payload = {"token": self.name, "clientId": self.client_id, "projectId": project}
        return await self.ask("connect", payload)

    async def submit(self, *items: Json) -> list[Json]:
        events = [{**item, "meta": {"clientId": self.client_id, **item["meta"]}} for item in items]
        reply = await self.ask("submit_events", {"events": events})
        assert reply["type"] == "submit_events_result", reply
        results: list[Json] = reply["payload"]["results"]
        return results

    async def sync(self, *partitions: str, since: int = 0, **more: Any) -> Json:
        assert not partitions
        payload = {"projectId": PROJECT, "sinceCommittedId": since, "limit": 500, **more}
        reply = await self.ask("sync", payload)
        assert reply["type"] == "sync_response", reply
        found: Json = reply["payload"]
        return found

    def story(self) -> list[Any]:
        """As that of the first dialect."""
        told: list[Any] = []
        for message in self.messages:
            assert message["protocolVersion"] == "1.0"
            payload = message["payload"]
            match message["type"]:
                case "event_broadcast":
                    told.append(payload["committedId"])
                case "submit_events_result":
                    told.append([one.get("committedId", one["status"]) for one in payload["results"]])
                case "error":
                    told.append(payload["code"])
                case kind:
                    told.append(kind)
        return told


def come(house: House, name: str = "ada") -> CamelTalk:
    """A session that has not said anything."""
    talk = CamelTalk(house, name)
    house.talks.append(talk)
    return talk


async def talk(house: House, name: str = "ada", project: str = PROJECT) -> CamelTalk:
    """A session that is connected."""
    made = come(house, name)
    reply = await made.connect(project)
    assert reply["type"] == "connected", reply
    return made
