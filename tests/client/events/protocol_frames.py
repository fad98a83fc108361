"""Server frames and protocol steps for tests of the client's protocol."""

import json
from typing import Any

from client.events.model_server import entry_of, frame
from oncelog.client.events.protocol import EventsPhase, EventsProtocol
from oncelog.client.events.values import Committed, Event, OutboxEntry, Refused


def take_sent(protocol: EventsProtocol) -> list[Any]:
    """Take the frames that the protocol has sent."""
    frames = [json.loads(one) for one in protocol.outgoing]
    protocol.outgoing.clear()
    return frames


def take_one_sent(protocol: EventsProtocol, kind: str) -> Any:
    """Take the single frame that the protocol has sent, and check its type."""
    (message,) = take_sent(protocol)
    assert message["type"] == kind
    return message


def event(number: int, **members: Any) -> dict[str, Any]:
    """Return an event from a different client, in the form in which the server sends it."""
    return {
        "id": entry_of(1000 + number).id,
        "client_id": "other",
        "partitions": ["a"],
        "committed_id": number,
        "event": {"type": "noted", "number": number},
        "status_updated_at": 5000 + number,
        **members,
    }


def page(numbers: list[int], following: int, *, has_more: bool = False, upto: int | None = None) -> dict[str, Any]:
    return {
        "partitions": ["a"],
        "events": [event(number) for number in numbers],
        "next_since_committed_id": following,
        "has_more": has_more,
        "sync_to_committed_id": following if upto is None else upto,
        "epoch": "e1",
    }


def result(entry: OutboxEntry, number: int, **members: Any) -> dict[str, Any]:
    return {
        "id": entry.id,
        "status": "committed",
        "committed_id": number,
        "status_updated_at": 5000 + number,
        **members,
    }


def error(code: str, msg_id: Any = None, **details: Any) -> str:
    return frame("error", {"code": code, "message": f"it is {code}", "details": details}, msg_id)


def broadcast(protocol: EventsProtocol, *numbers: int) -> None:
    for number in numbers:
        protocol.receive(frame("event_broadcast", event(number)))


def answer(protocol: EventsProtocol, request: Any, *results: dict[str, Any]) -> None:
    protocol.receive(frame("submit_events_result", {"results": results}, request["msg_id"]))


def connected_protocol(
    partitions: tuple[str, ...] = ("a",), cursor: int = 0, epoch: str = "", entries: tuple[OutboxEntry, ...] = ()
) -> EventsProtocol:
    """Return a connected protocol that has requested its first page."""
    protocol = EventsProtocol("laptop", partitions, cursor, epoch)
    protocol.enqueue(entries)
    begin(protocol)
    return protocol


def begin(protocol: EventsProtocol, last: int = 0, epoch: str = "e1") -> None:
    protocol.connect("secret")
    request = take_one_sent(protocol, "connect")
    payload = {"client_id": "laptop", "server_last_committed_id": last, "epoch": epoch}
    protocol.receive(frame("connected", payload, request["msg_id"]))


def live_protocol(cursor: int = 0, *entries: OutboxEntry) -> EventsProtocol:
    """Return a protocol that has caught up and is live."""
    protocol = connected_protocol(cursor=cursor, entries=entries)
    catch_up(protocol, cursor)
    return protocol


def catch_up(protocol: EventsProtocol, following: int, numbers: list[int] | None = None) -> None:
    request = take_one_sent(protocol, "sync")
    protocol.receive(frame("sync_response", page(numbers or [], following), request["msg_id"]))
    assert protocol.phase is EventsPhase.LIVE


def take_ids(protocol: EventsProtocol) -> list[int]:
    return [one.committed_id for one in protocol.take_events(1000)[0]]


def take_outcomes(protocol: EventsProtocol) -> dict[int, Committed | Refused]:
    return {one.entry.number: one.outcome for one in protocol.take_settled()}


def received_event(number: int) -> Event:
    """Return an event from a different client, in the form in which the application receives it."""
    payload = event(number)
    return Event(**{**payload, "partitions": ("a",)})


def own_events(entry: OutboxEntry, number: int) -> list[Event]:
    """Return a list with one of the client's own events, in the form in which the application receives it."""
    return [Event(entry.id, "laptop", entry.partitions, number, json.loads(entry.body), 5000 + number)]
