"""Scenarios of the Events API: both WebSocket dialects, HTTP and server-sent events."""

from typing import Any, Final

from golden.steps import TICKET, HangUp, Http, Listen, More, Note, Open, Receive, Send, Step

PATH: Final = "/v1/events"
EPOCH: Final = {"epoch": r'"epoch": ?"(\w+)"'}


def uuid(number: int) -> str:
    return f"0198f3c2-7d55-7c1e-9a61-{number:012x}"


def event(number: int, *partitions: str, **members: Any) -> dict[str, Any]:
    body = {"type": "order.placed", "order": number, "total": 12.50, "note": "größe 𝄞"}
    return {"id": uuid(number), "partitions": [*(partitions or ("orders",))], "event": body, **members}


# --- the native dialect ------------------------------------------------------------------------------------


def native(kind: str, payload: Any, msg_id: Any = "m1", **members: Any) -> dict[str, Any]:
    return {"type": kind, "protocol_version": "1.0", "msg_id": msg_id, "payload": payload, **members}


def connect(client: str, by: str = "ann", **members: Any) -> dict[str, Any]:
    return native("connect", {"token": by, "client_id": client, **members}, "c1")


def submit(*events: Any, msg_id: Any = "s1") -> dict[str, Any]:
    return native("submit_events", {"events": [*events]}, msg_id)


def sync(since: int, *partitions: str, **members: Any) -> dict[str, Any]:
    return native("sync", {"partitions": [*(partitions or ("orders",))], "since_committed_id": since, **members}, 7)


NATIVE: Final[tuple[Step, ...]] = (
    Note("connect"),
    Open("ann", PATH),
    Send("ann", connect("laptop"), save=EPOCH),
    Send("ann", connect("laptop")),
    Open("ben", PATH),
    Send("ben", connect("phone", "ben")),
    Note("submit, retry, conflict"),
    Send("ann", submit(event(1))),
    Send("ann", submit(event(1), msg_id=2)),
    Send("ann", submit({**event(1), "event": {"type": "other"}}, msg_id=None)),
    Send("ann", submit(event(2, "b", "a", "b"), event(3, expected_committed_id=99), event(2, "a", "b"))),
    Send("ann", submit(event(2, "b", "a", "b"), event(3, expected_committed_id=99))),
    Send("ann", submit(event(3, expected_committed_id=2))),
    Note("pages, then broadcasts to another connection; the sender gets only its result"),
    Send("ben", sync(0, "orders", "a", limit=2)),
    Send("ben", sync(2, "orders", "a", limit=2, epoch="{{epoch}}")),
    Send("ann", submit(event(4, "orders"), event(5, "elsewhere"))),
    Receive("ben"),
    Send("ben", submit(event(6, "orders"))),
    Send("ann", sync(4)),
    Send("ann", submit(event(7, "orders"))),
    Receive("ben"),
    Send("ben", sync(0, "nothing")),
    Send("ben", sync(0, "orders", limit=0)),
    Note("a sync with a cursor of another history"),
    Send("ben", sync(0, epoch="0000000000000000")),
    Send("ben", sync(1000)),
    Note("malformed requests"),
    Send("ann", "no JSON"),
    Send("ann", "[1]"),
    Send("ann", {"type": "sync", "payload": {}}),
    Send("ann", native("sync", {})),
    Send("ann", native("sync", {"partitions": [], "since_committed_id": 0})),
    Send("ann", native("sync", {"partitions": ["a"], "since_committed_id": -1})),
    Send("ann", native("sync", {"partitions": "a", "since_committed_id": 0})),
    Send("ann", native("heartbeat", {})),
    Send("ann", native("disconnect", {"reason": "bye"})),
    Send("ann", native("no_such_type", {})),
    Send("ann", native("submit_events", {}, {"not": "an id"})),
    Send("ann", native("submit_events", {"events": []})),
    Send("ann", submit({"id": "no-uuid", "partitions": ["a"], "event": {"type": "x"}})),
    Send("ann", submit(event(9), event(9))),
    Send("ann", submit(event(9), event(10), event(11), event(12))),
    Send("ann", submit({"id": uuid(13), "partitions": [], "event": {"type": "x"}})),
    Send("ann", submit({"id": uuid(13), "partitions": ["x" * 257], "event": {"type": "x"}})),
    Send("ann", submit({"id": uuid(13), "partitions": ["a"], "event": {"no": "type"}})),
    Send("ann", submit({"id": uuid(13), "partitions": ["a"], "event": "text"})),
    Send("ann", '{"type":"sync","type":"sync","protocol_version":"1.0","payload":{}}'),
    Send("ann", "bytes", opcode=2),
    Note("frames of the other dialect"),
    Send("ann", {"type": "sync", "protocolVersion": "1.0", "msgId": "x", "payload": {}}),
    Note("a ping of the WebSocket protocol"),
    Send("ann", "ping", opcode=9),
    Note("a frame that is too large"),
    Send("ann", submit({**event(20), "event": {"type": "x", "text": "x" * 70_000}})),
    Note("the client closes the connection"),
    Send("ben", "\x03\u00e8", opcode=8),
)

NATIVE_FIRST_FRAMES: Final[tuple[Step, ...]] = (
    Note("a first frame that is not connect"),
    Open("eve", PATH),
    Send("eve", sync(0)),
    Send("eve", {"type": "connect", "payload": {"client_id": "x"}}),
    Send("eve", native("connect", {"token": "eve", "client_id": 7})),
    Send("eve", native("connect", {"token": "eve", "client_id": ""})),
    Send("eve", native("connect", {"token": 7, "client_id": "x"})),
    Note("a connect without a client id"),
    Open("own", PATH),
    Send("own", native("connect", {"token": "eve"})),
    Note("an unsupported version"),
    Send("eve", {**connect("x"), "protocol_version": "2.0"}, receive=2),
    Note("in development mode, any other credential belongs to the developer"),
    Open("bad", PATH),
    Send("bad", connect("x", "not a good token")),
    Note("a first message that is too large"),
    Open("large", PATH),
    Send("large", connect("x", "x" * 40_000), receive=1),
    Note("requests that are not upgrades, and a foreign origin"),
    Http(f"GET {PATH}", headers={"Connection": "Upgrade", "Upgrade": "websocket"}),
    Open("page", PATH, headers={"Origin": "https://evil.example.org"}),
    Open("own", PATH, headers={"Origin": "http://localhost"}),
    HangUp("own"),
)

# --- the Insieme dialect ------------------------------------------------------------------------------------


def insieme(kind: str, payload: Any, msg_id: Any = "m1") -> dict[str, Any]:
    return {"type": kind, "protocolVersion": "1.0", "msgId": msg_id, "timestamp": 1, "payload": payload}


def draft(number: Any, **members: Any) -> dict[str, Any]:
    return {
        "id": number if isinstance(number, str) else uuid(number),
        "partition": "boards/7",
        "projectId": "p1",
        "userId": "u1",
        "type": "card.added",
        "schemaVersion": 1,
        "payload": {"text": "milk"},
        "meta": {"clientId": "tab-1", "clientTs": 5},
        **members,
    }


def page(since: int, project: str = "p1", **members: Any) -> dict[str, Any]:
    return insieme("sync", {"projectId": project, "sinceCommittedId": since, **members}, "y1")


def drafts(*events: Any) -> dict[str, Any]:
    return insieme("submit_events", {"events": [*events]}, "s1")


def join(client: str, by: str = "ann", project: str = "p1") -> dict[str, Any]:
    return insieme("connect", {"token": by, "clientId": client, "projectId": project}, "c1")


INSIEME: Final[tuple[Step, ...]] = (
    Open("ann", PATH),
    Send("ann", join("tab-1")),
    Open("ben", PATH),
    Send("ben", join("tab-2", "ben")),
    Send("ben", page(0)),
    Note("submit, retry, conflict"),
    Send("ann", drafts(draft(101))),
    Receive("ben"),
    Send("ann", drafts(draft(101))),
    Send("ann", drafts(draft(102), draft(101, payload={"text": "other"}), draft(103))),
    Receive("ben"),
    Send("ann", drafts(draft("draft-1", userId="u2", meta={"clientId": "tab-1", "clientTs": 6, "more": [1]}))),
    Receive("ben"),
    Note("rejected events"),
    Send("ann", drafts(draft(104, projectId="p2"))),
    Send("ann", drafts(draft(104, meta={"clientId": "other", "clientTs": 5}))),
    Send("ann", drafts(draft(104, partition="project/p2"))),
    Send("ann", drafts(draft(104, schemaVersion=0))),
    Send("ann", drafts(draft(104, payload="text"))),
    Send("ann", drafts(draft("x" * 256))),
    Note("pages"),
    Send("ann", page(0, limit=2)),
    Send("ann", page(8, limit=500)),
    Note("a native event that the project shows, and one that it does not show"),
    Http(
        f"POST {PATH}",
        {
            "events": [
                {
                    "id": uuid(110),
                    "partitions": ["project/p1"],
                    "event": {"type": "card.added", "schemaVersion": 1, "payload": {}, "meta": {"clientTs": 5}},
                },
                {"id": uuid(111), "partitions": ["project/p1"], "event": {"type": "other"}},
            ]
        },
    ),
    Receive("ben"),
    Note("errors"),
    Send("ann", page(0, "p2")),
    Send("ann", page(-1)),
    Send("ann", insieme("heartbeat", {})),
    Send("ann", insieme("submit_events", {"events": [draft(105), draft(105)]})),
    Send("ann", insieme("submit_events", {"events": "none"})),
    Send("ann", insieme("sync", {}, 7)),
    Send("ann", native("sync", {"partitions": ["a"], "since_committed_id": 0})),
    Send("ann", join("tab-1")),
    Open("eve", PATH),
    Send("eve", page(0)),
    Send("eve", insieme("connect", {"token": "eve", "clientId": "x"})),
    Send("eve", {**join("x"), "protocolVersion": "0.9"}, receive=2),
    Open("bad", PATH),
    Send("bad", join("x", "not a good token")),
)

# --- HTTP ----------------------------------------------------------------------------------------------------

HTTP: Final[tuple[Step, ...]] = (
    Note("submit, retry, conflict"),
    Http(f"POST {PATH}", {"events": [event(201, "http")], "client_id": "shop"}, by="ann"),
    Http(f"POST {PATH}", {"events": [event(201, "http")]}, by="ben"),
    Http(f"POST {PATH}", {"events": [{**event(201, "http"), "event": {"type": "other"}}, event(202, "http")]}),
    Http(f"POST {PATH}", {"events": [event(203, "http", expected_committed_id=1)]}),
    Note("pages"),
    Http(f"GET {PATH}?partition=http&limit=1", save=EPOCH),
    Http(f"GET {PATH}?partition=http&since=1&to=500000&epoch={{{{epoch}}}}"),
    Http(f"GET {PATH}?partition=http&since=0&limit=0"),
    Http(f"HEAD {PATH}?partition=http"),
    Http(f"GET {PATH}?partition=none&partition=http&limit=5000"),
    Note("lookups"),
    Http(f"GET {PATH}/{uuid(201)}?partition=http"),
    Http(f"GET {PATH}/{uuid(201)}?partition=none"),
    Http(f"GET {PATH}/{uuid(299)}?partition=http"),
    Note("a stream, resumed after an event, and ended by an error"),
    Listen("reader", f"GET {PATH}/stream?partition=http", events=3, by="ann"),
    Http(f"POST {PATH}", {"events": [event(204, "http")]}),
    More("reader"),
    HangUp("reader"),
    Listen("resumed", f"GET {PATH}/stream?partition=http", events=2, headers={"Last-Event-ID": "13"}),
    HangUp("resumed"),
    Listen("ahead", f"GET {PATH}/stream?partition=http&since=99999"),
    Listen("other", f"GET {PATH}/stream?partition=http&epoch=0000000000000000"),
    Listen("none", f"GET {PATH}/stream"),
    Note("a ticket for a stream"),
    Http(f"POST {PATH}/stream?partition=http", by="ann", save=TICKET),
    Listen("ticket", f"GET {PATH}/stream?partition=http&ticket={{{{ticket}}}}", headers={"Last-Event-ID": "13"}),
    HangUp("ticket"),
    Http(f"POST {PATH}/stream?partition=http&since=1", by="ann"),
    Note("errors"),
    Http(f"POST {PATH}", "no JSON"),
    Http(f"POST {PATH}", "[]"),
    Http(f"POST {PATH}", {"events": []}),
    Http(f"POST {PATH}", {"events": [event(n, "http") for n in range(205, 209)]}),
    Http(f"POST {PATH}", {"events": [event(205, "http"), event(205, "http")]}),
    Http(f"POST {PATH}", {"events": [event(205, "http")]}, headers={"Content-Type": "text/plain"}),
    Http(f"POST {PATH}", {"events": [event(205, "http")]}, headers={"Content-Encoding": "br"}),
    Http(f"POST {PATH}", "x" * 70_001),
    Http(f"GET {PATH}"),
    Http(f"GET {PATH}?partition=a&since=x"),
    Http(f"GET {PATH}?partition=a&limit=x"),
    Http(f"GET {PATH}?partition=a&since=9000000"),
    Http(f"GET {PATH}?partition=a&epoch=0000000000000000"),
    Http(f"GET {PATH}?partition=a", by="not a good token"),
    Http(f"GET {PATH}?partition=a", headers={"Authorization": "Basic YTpi"}),
    Http(f"GET {PATH}?partition=a", headers={"Origin": "https://evil.example.org"}),
    Http(f"DELETE {PATH}"),
    Http(f"GET {PATH}/none"),
)
