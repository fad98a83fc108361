"""Sessions and items in the Insieme (camel-case) dialect of the Events API."""

import json
from typing import Any

from server.events.event_sessions import Json, Peer, SessionServer

PROJECT = "p1"


def draft(event_id: str, n: int = 1, **members: Any) -> Json:
    """Return an item as the npm client sends it, without `meta.clientId`, which `submit` adds."""
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


class CamelPeer(Peer):
    """A client that speaks the Insieme dialect."""

    async def send(self, kind: str, payload: Any, **more: Any) -> str:
        self._numbers += 1
        msg_id = f"{self.name}-{self._numbers}"
        message = {"type": kind, "protocolVersion": "1.0", "msgId": msg_id, "timestamp": 1, "payload": payload, **more}
        await self.send_raw(json.dumps(message).encode())  # not orjson, which refuses lone surrogates
        return msg_id

    async def reply(self, msg_id: str) -> Json:
        seen = 0
        while True:
            for message in (await self.wire.wait_for_messages(seen + 1))[seen:]:
                seen += 1
                if message.get("msgId") == msg_id:
                    return message

    @property
    def client_id(self) -> str:
        return f"client-{self.name}"

    async def connect(self, project: str = PROJECT) -> Json:
        payload = {"token": self.name, "clientId": self.client_id, "projectId": project}
        return await self.request("connect", payload)

    async def submit(self, *items: Json) -> list[Json]:
        events = [{**item, "meta": {"clientId": self.client_id, **item["meta"]}} for item in items]
        reply = await self.request("submit_events", {"events": events})
        assert reply["type"] == "submit_events_result", reply
        results: list[Json] = reply["payload"]["results"]
        return results

    async def sync(self, *partitions: str, since: int = 0, **more: Any) -> Json:
        assert not partitions
        payload = {"projectId": PROJECT, "sinceCommittedId": since, "limit": 500, **more}
        reply = await self.request("sync", payload)
        assert reply["type"] == "sync_response", reply
        found: Json = reply["payload"]
        return found

    def received(self) -> list[Any]:
        """Return the messages in the same short form as `Peer.received`."""
        found: list[Any] = []
        for message in self.messages:
            assert message["protocolVersion"] == "1.0"
            payload = message["payload"]
            match message["type"]:
                case "event_broadcast":
                    found.append(payload["committedId"])
                case "submit_events_result":
                    found.append([one.get("committedId", one["status"]) for one in payload["results"]])
                case "error":
                    found.append(payload["code"])
                case kind:
                    found.append(kind)
        return found


def accept(server: SessionServer, name: str = "ada") -> CamelPeer:
    """Open a session without sending `connect`."""
    peer = CamelPeer(server, name)
    server.peers.append(peer)
    return peer


async def connected(server: SessionServer, name: str = "ada", project: str = PROJECT) -> CamelPeer:
    """Open a session and send `connect`."""
    peer = accept(server, name)
    reply = await peer.connect(project)
    assert reply["type"] == "connected", reply
    return peer
