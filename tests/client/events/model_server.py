"""Small model of the Events API, as specified in docs/reference/events.md, for client protocols without I/O.

The model keeps a log. It does not broadcast an event to the connection that submitted it. A connection receives an
answer after all broadcasts with committed ids below the highest one in the answer. As on a real server, requests of a
lost connection may be committed after the next connection has synced. Frames wait in queues until the test moves them.
"""

import json
from collections import deque
from random import Random
from typing import Any, NamedTuple
from uuid import UUID

from msgspec import structs

from oncelog.client.events.outbox import Draft, prepare
from oncelog.client.events.values import OutboxEntry

POISON = "poison"
"""The model answers `bad_request` to a request that contains an event of this type."""
REJECTED = "rejected"
"""The model rejects events of this type."""


def entry_of(number: int, *partitions: str, kind: str = "counted", **members: Any) -> OutboxEntry:
    """Return an outbox entry (default partition: `a`)."""
    draft = Draft({"type": kind, "number": number, **members}, partitions or ("a",), UUID(int=number))
    return structs.replace(prepare(draft, (), 10**6), number=number)


def frame(kind: str, payload: Any, msg_id: str | int | None = None) -> str:
    """Return a message from the server."""
    named = {} if msg_id is None else {"msg_id": msg_id}
    return json.dumps({"type": kind, "protocol_version": "1.0", "timestamp": 1, "payload": payload, **named})


class Committed(NamedTuple):
    """An event in the log."""

    number: int
    id: str
    client_id: str
    partitions: tuple[str, ...]
    event: dict[str, Any]

    @property
    def message(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "client_id": self.client_id,
            "partitions": self.partitions,
            "committed_id": self.number,
            "event": self.event,
            "status_updated_at": 1000 + self.number,
        }

    @property
    def result(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "status": "committed",
            "committed_id": self.number,
            "status_updated_at": 1000 + self.number,
        }


class Request:
    """A request that the server has accepted but not processed yet."""

    def __init__(self, connection: "Connection", msg_id: Any, items: list[dict[str, Any]], is_busy: bool) -> None:
        self.connection = connection
        self.msg_id = msg_id
        self.items = items
        self.is_busy = is_busy
        """Whether the server answers `server_busy` and commits none of its new events."""
        self.place = 0
        """Highest committed id among its events. Later broadcasts wait for the answer."""

    def contains(self, event_id: str) -> bool:
        return any(one["id"] == event_id for one in self.items)


class Connection:
    """Server side of a connection."""

    def __init__(self, client_id: str) -> None:
        self.client_id = client_id
        self.to_server: deque[bytes] = deque()
        self.to_client: deque[str] = deque()
        self.is_cut = False
        self.is_connected = False
        self.scope: frozenset[str] = frozenset()
        self.is_paging = False
        self.following = 0
        self.upto = 0
        self.delivered = 0
        self.own: set[int] = set()
        self.held: list[tuple[int, str]] = []
        """Answers that wait for earlier broadcasts."""

    def send(self, kind: str, payload: Any, msg_id: Any = None) -> None:
        self.to_client.append(frame(kind, payload, msg_id))


class ModelServer:
    """A log and its connections."""

    def __init__(self, chance: Random, *, page_events: int = 3, busy_rate: float = 0.0) -> None:
        self.chance = chance
        self.page_events = page_events
        self.busy_rate = busy_rate
        self.epoch = "e1"
        self.log: list[Committed] = []
        self.by_id: dict[str, Committed] = {}
        self.requests: list[Request] = []
        self.connections: list[Connection] = []

    def connect(self, client_id: str) -> Connection:
        self.connections.append(Connection(client_id))
        return self.connections[-1]

    @staticmethod
    def cut(connection: Connection) -> None:
        """Close a connection. The server still processes its accepted requests."""
        connection.is_cut = True
        connection.to_client.clear()
        connection.to_server.clear()

    # --- frames in

    def receive(self, connection: Connection) -> None:
        """Process the next frame of a connection."""
        message = json.loads(connection.to_server.popleft())
        getattr(self, "_" + message["type"])(connection, message["payload"], message.get("msg_id"))

    def _connect(self, connection: Connection, payload: Any, msg_id: Any) -> None:
        if connection.is_connected:
            connection.send("error", {"code": "bad_request", "message": "already connected", "details": {}}, msg_id)
            return
        connection.is_connected = True
        answer = {"client_id": payload["client_id"], "server_last_committed_id": len(self.log), "epoch": self.epoch}
        connection.send("connected", answer, msg_id)

    def _sync(self, connection: Connection, payload: Any, msg_id: Any) -> None:
        since = payload["since_committed_id"]
        assert since <= len(self.log)
        is_same_sync = connection.is_paging and connection.following == since
        upto = connection.upto if is_same_sync else len(self.log)
        connection.scope = frozenset(payload["partitions"])
        found = [one for one in self.log[since:upto] if connection.scope & set(one.partitions)]
        page = found[: self.page_events]
        has_more = len(found) > len(page)
        following = page[-1].number if has_more else upto
        connection.is_paging, connection.following, connection.upto = has_more, following, upto
        connection.delivered = following
        answer = {
            "partitions": payload["partitions"],
            "events": [one.message for one in page],
            "next_since_committed_id": following,
            "has_more": has_more,
            "sync_to_committed_id": upto,
            "epoch": self.epoch,
        }
        self._release(connection, following)
        connection.send("sync_response", answer, msg_id)
        if not has_more:
            self._deliver(connection)

    def _submit_events(self, connection: Connection, payload: Any, msg_id: Any) -> None:
        items = payload["events"]
        if len({one["id"] for one in items}) < len(items) or any(one["event"]["type"] == POISON for one in items):
            connection.send("error", {"code": "bad_request", "message": "no", "details": {"field": "$"}}, msg_id)
            return
        self.requests.append(Request(connection, msg_id, items, self.chance.random() < self.busy_rate))

    # --- commits

    def commit(self) -> None:
        """Process a random request. Requests of one connection are processed in order."""
        first: dict[int, Request] = {}
        for one in self.requests:
            first.setdefault(id(one.connection), one)
        request = self.chance.choice(list(first.values()))
        self.requests.remove(request)
        is_unknown = any(one["id"] not in self.by_id for one in request.items)
        results = [self._decide(request, one) for one in request.items]
        if request.is_busy and is_unknown:
            details = {"code": "server_busy", "message": "later", "details": {"retry_after_ms": 5}}
            answer, highest = frame("error", details, request.msg_id), 0
        else:
            highest = max(one.get("committed_id", 0) for one in results)
            answer = frame("submit_events_result", {"results": results}, request.msg_id)
        self._hold_or_send(request.connection, max(highest, request.place), answer)
        for connection in self.connections:
            self._deliver(connection)

    def _decide(self, request: Request, item: dict[str, Any]) -> dict[str, Any]:
        known = self.by_id.get(item["id"])
        if known is None and item["event"]["type"] == REJECTED:
            errors = [{"field": "event", "message": "not so"}]
            return {"id": item["id"], "status": "rejected", "reason": "validation_failed", "errors": errors}
        if known is None and not request.is_busy:
            known = Committed(
                len(self.log) + 1, item["id"], request.connection.client_id, tuple(item["partitions"]), item["event"]
            )
            self.log.append(known)
            self.by_id[known.id] = known
            for one in (request, *self.requests):  # requests that also contain the event get its id
                if one.contains(known.id):
                    one.connection.own.add(known.number)
                    one.place = known.number
        return {} if known is None else known.result

    def _hold_or_send(self, connection: Connection, number: int, answer: str) -> None:
        """Send the answer after broadcasts with lower ids and before those with higher ids."""
        if connection.is_cut:
            return
        if connection.scope and number > connection.delivered:
            connection.held.append((number, answer))
        else:
            connection.to_client.append(answer)

    def _deliver(self, connection: Connection) -> None:
        if connection.is_cut or not connection.scope or connection.is_paging:
            return
        places = [one.place for one in self.requests if one.connection is connection and one.place]
        for one in self.log[connection.delivered : min(places, default=len(self.log))]:
            self._release(connection, one.number - 1)
            if connection.scope & set(one.partitions) and one.number not in connection.own:
                connection.send("event_broadcast", one.message)
            connection.delivered = one.number
        self._release(connection, connection.delivered)

    @staticmethod
    def _release(connection: Connection, upto: int) -> None:
        for held in sorted(connection.held, key=_committed_id_of):
            if held[0] <= upto:
                connection.held.remove(held)
                connection.to_client.append(held[1])


def _committed_id_of(held: tuple[int, str]) -> int:
    return held[0]
