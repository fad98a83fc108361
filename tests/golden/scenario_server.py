"""Scenarios of behaviour that all APIs share: health, documents, unknown paths, authentication, limits and shutdown."""

from typing import Final

from golden.scenario_chat import message
from golden.scenario_deltas import delta, push
from golden.scenario_events import PATH, connect, draft, drafts, event, join, native, submit, sync
from golden.steps import (
    TICKET,
    Drain,
    Flood,
    HangUp,
    Heartbeat,
    Http,
    Listen,
    More,
    Note,
    Open,
    Poll,
    Receive,
    Rpc,
    Send,
    Step,
    Stop,
)

SERVICE: Final[tuple[Step, ...]] = (
    Http("GET /"),
    Http("GET /", hidden="(a page)", headers={"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}),
    Http("GET /docs", hidden="(a page)"),
    Http("GET /assets/docs.mjs", hidden="(a script)"),
    Http("GET /healthz"),
    Http("HEAD /healthz"),
    Http("GET /readyz"),
    Http("GET /metrics", hidden="(metrics.txt)", headers={"Accept": "text/plain"}),
    Http("GET /v1/stats", hidden="(figures)"),
    Http("GET /v1/stats?lane=0"),
    Http("GET /openapi.json", hidden="(openapi.json)"),
    Http("GET /chat", hidden="(a page)"),
    Note("unknown paths and methods"),
    Http("GET /none"),
    Http("GET /v1/none"),
    Http("POST /healthz"),
    Http("OPTIONS /v1/events"),
    Http("FETCH /v1/events"),
    Http("PUT /v1/ledger/write"),
    Http("GET /v1/ledger/none"),
    Http("GET /v1/sync/shop/none"),
    Http("PATCH /v1/chats"),
    Note("a foreign host and a foreign origin in development mode"),
    Http("GET /v1/events?partition=a", headers={"X-Forwarded-Host": "evil.example.org"}),
    Http("OPTIONS /v1/events", headers={"Origin": "https://evil.example.org", "Access-Control-Request-Method": "GET"}),
    Note("several credentials"),
    Http("GET /v1/events?partition=a", headers={"authorization": "Bearer ann"}, by="ben"),
)

AUDIT: Final[tuple[Step, ...]] = (
    Http("GET /v1/audit", save={"cursor": r'"cursor": ?"([^"]+)"'}),
    Http("GET /v1/audit?limit=1&act=member_added"),
    Http("GET /v1/audit?after={{cursor}}"),
    Http("GET /v1/audit?actor=user:none&since=0&until=1"),
    Http("GET /v1/audit?after=none"),
    Http("GET /v1/audit?limit=x"),
    Http("GET /v1/audit?since=x"),
    Http("POST /v1/audit"),
)

# --- a server with tokens and API keys -----------------------------------------------------------------------

IDENTITY: Final[tuple[Step, ...]] = (
    Note("missing and invalid credentials"),
    Http(f"GET {PATH}?partition=orders"),
    Http(f"GET {PATH}?partition=orders", by="not-a-token"),
    Http(f"GET {PATH}?partition=orders", by="{{expired}}"),
    Http(f"GET {PATH}?partition=orders", by="{{forged}}"),
    Http(f"GET {PATH}?partition=orders", by="olk_0000000000000000_AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"),
    Http("GET /metrics"),
    Http("GET /v1/stats"),
    Http("GET /v1/audit"),
    Http("GET /v1/chats"),
    Http("GET /v1/ledger/entity?organization=acme&key=a"),
    Http("GET /v1/sync/shop/pull"),
    Http("GET /healthz"),
    Note("grants"),
    Http(f"POST {PATH}", {"events": [event(1), event(2, "secret")]}, by="{{ada}}"),
    Http(f"POST {PATH}", {"events": [event(3)]}, by="{{key}}"),
    Http(f"POST {PATH}", {"events": [event(3)], "client_id": "other"}, by="{{key}}"),
    Http(f"GET {PATH}?partition=orders", by="{{ada}}"),
    Http(f"GET {PATH}?partition=secret", by="{{ada}}"),
    Http("GET /v1/audit", by="{{ada}}"),
    Http("GET /v1/stats", by="{{ada}}"),
    Http("GET /metrics", by="{{ada}}"),
    Http("POST /v1/sync/shop/push", {"deltas": []}, by="{{ada}}"),
    Http("POST /v1/sync/shop/compact", {"keep": 1}, by="{{ada}}"),
    Http("POST /v1/chats", {"chat_id": "tea"}, by="{{ada}}"),
    Http(
        "POST /v1/ledger/write",
        {"organization": "acme", "sequence": 1, "operations": [{"delete_entity": {"key": "a"}}]},
        by="{{ada}}",
    ),
    Rpc("GetEntity", {"organization": "acme", "key": "a"}),
    Rpc("GetEntity", {"organization": "acme", "key": "a"}, by="not-a-token"),
    Rpc("GetEntity", {"organization": "acme", "key": "a"}, by="{{ada}}"),
    Rpc("GetEntity", {"organization": "acme", "key": "a"}, metadata=(("authorization", "Basic YTpi"),)),
    Note("tickets for streams"),
    Http(f"POST {PATH}/stream?partition=orders"),
    Http(f"POST {PATH}/stream?partition=secret", by="{{ada}}"),
    Http(f"POST {PATH}/stream?partition=orders", by="{{ada}}", save=TICKET),
    Http(f"GET {PATH}/stream?partition=secret&ticket={{{{ticket}}}}"),
    Http(f"GET {PATH}/stream?partition=orders&ticket=olt_forged"),
    Http(f"GET {PATH}/stream?partition=orders&ticket={{{{ticket}}}}", by="{{ada}}"),
    Http(f"GET {PATH}?partition=orders&ticket={{{{ticket}}}}"),
    Listen("ticket", f"GET {PATH}/stream?partition=orders&ticket={{{{ticket}}}}"),
    HangUp("ticket"),
    Note("WebSockets"),
    Open("none", PATH),
    Send("none", native("connect", {"client_id": "laptop"}), receive=2),
    Open("ada", PATH),
    Send("ada", connect("laptop", "{{ada}}")),
    Send("ada", submit(event(1), event(2, "secret"))),
    Send("ada", sync(0, "secret")),
    Send("ada", sync(0, "orders")),
    Open("till", PATH),
    Send("till", connect("other", "{{key}}"), receive=2),
    Open("project", PATH),
    Send("project", join("tab-1", "{{ada}}")),
    Open("chat", "/v1/chat"),
    Send("chat", {"type": "connect", "token": "not-a-token"}, receive=2),
    Note("a page of an allowed origin"),
    Http(f"OPTIONS {PATH}", headers={"Origin": "https://app.example.org", "Access-Control-Request-Method": "POST"}),
    Http(f"GET {PATH}?partition=orders", by="{{ada}}", headers={"Origin": "https://app.example.org"}),
    Http(f"GET {PATH}?partition=orders", by="{{ada}}", headers={"Origin": "https://evil.example.org"}),
)

# --- a server with small limits --------------------------------------------------------------------------------

LIMITS: Final[tuple[Step, ...]] = (
    Note("the rate of new events"),
    Http(f"POST {PATH}", {"events": [event(1), event(2)]}, by="ann"),
    Http(f"POST {PATH}", {"events": [event(1)]}, by="ann"),
    Http(f"POST {PATH}", {"events": [event(3)]}, by="ann"),
    Open("ann", PATH),
    Send("ann", connect("laptop")),
    Send("ann", submit(event(3))),
    Open("tab", PATH),
    Send("tab", join("tab-1")),
    Send("tab", drafts(draft(4)), receive=2),
    Note("the quota of a tenant"),
    Http(f"POST {PATH}", {"events": [event(10, "acme/a")]}, by="ben"),
    Http(f"POST {PATH}", {"events": [event(11, "acme/a")]}, by="ben"),
    Open("ben", PATH),
    Send("ben", connect("phone", "ben")),
    Send("ben", submit(event(11, "acme/a"))),
    Http("POST /v1/chats", {"chat_id": "full"}, by="eve"),
    Http("POST /v1/chats", {"chat_id": "full", "members": ["user:ann", "user:ben"]}, by="eve"),
    Note("rates of the ledger, deltas and chats"),
    Http(
        "POST /v1/ledger/write",
        {"organization": "o", "client_id": "c", "sequence": 1, "operations": [{"delete_entity": {"key": "a"}}]},
        by="cy",
    ),
    Http(
        "POST /v1/ledger/batch-write",
        {"organization": "o", "client_id": "c", "sequence": 2,
         "writes": [{"operations": [{"delete_entity": {"key": "a"}}]}]},
        by="cy",
    ),
    Http(
        "POST /v1/ledger/write",
        {"organization": "o", "client_id": "c", "sequence": 3, "operations": [{"delete_entity": {"key": "a"}}]},
        by="cy",
    ),
    Rpc(
        "Write",
        {"organization": "o", "clientId": "c", "sequence": 3, "operations": [{"deleteEntity": {"key": "a"}}]},
        by="cy",
    ),
    Rpc(
        "Write",
        {"organization": "acme", "clientId": "c", "sequence": 1, "operations": [{"deleteEntity": {"key": "a"}}]},
        by="di",
    ),
    Rpc(
        "Write",
        {"organization": "acme", "clientId": "c", "sequence": 2, "operations": [{"deleteEntity": {"key": "a"}}]},
        by="di",
    ),
    push(delta(1, name="Tea")),
    push(delta(2, "UPDATE", price=1)),
    Http("POST /v1/chats", {"chat_id": "tea"}, by="fay"),
    Http("POST /v1/chats/tea/messages", message(1), by="fay"),
    Http("POST /v1/chats/tea/messages", message(2), by="fay"),
    Open("fay", "/v1/chat"),
    Send("fay", {"type": "connect", "token": "fay"}),
    Send("fay", {"type": "send_message", "chat_id": "tea", **message(2)}),
    Note("too many frames"),
    Open("fast", PATH),
    Send("fast", connect("fast", "fast")),
    *(Send("fast", sync(0, "none"), receive=1) for _ in range(5)),
    Receive("fast"),
)  # fmt: skip

# --- a read-only server ---------------------------------------------------------------------------

FIRST_EVENT: Final = Http(f"POST {PATH}", {"events": [event(1)]})
READ_ONLY: Final[tuple[Step, ...]] = (
    Poll("/v1/audit", "read_only_on"),
    Http("GET /readyz"),
    Http(f"POST {PATH}", {"events": [event(1)]}),
    Http(f"POST {PATH}", {"events": [event(2)]}),
    Open("ann", PATH),
    Send("ann", connect("laptop")),
    Send("ann", submit(event(2))),
    Open("tab", PATH),
    Send("tab", join("tab-1")),
    Send("tab", drafts(draft(4)), receive=2),
    Http("POST /v1/chats", {"chat_id": "tea"}, by="ann"),
    Http(
        "POST /v1/sync/shop/push",
        '{"deltas":[{"deltaId":"2dcebce880c5d195688a22c3daeefb45b0f2115c66fbfb98f671d1cf557b0117","op":"INSERT",'
        '"table":"t","rowId":"r","clientId":"c","columns":[],"hlc":"1"}]}',
    ),
    Http(
        "POST /v1/ledger/write",
        {"organization": "o", "client_id": "c", "sequence": 1, "operations": [{"delete_entity": {"key": "a"}}]},
    ),
    Rpc("Write", {"organization": "o", "clientId": "c", "sequence": 1, "operations": [{"deleteEntity": {"key": "a"}}]}),
    Http("GET /v1/audit"),
)

# --- heartbeats, and a server that stops ---------------------------------------------------------------------------

HEARTBEATS: Final[tuple[Step, ...]] = (
    Open("events", PATH),
    Send("events", connect("laptop")),
    Open("chat", "/v1/chat"),
    Send("chat", {"type": "connect", "token": "ann"}),
    Listen("stream", f"GET {PATH}/stream?partition=orders"),
    Listen("deltas", "GET /v1/sync/shop/live", events=2),
    Heartbeat("events"),
    Heartbeat("chat"),
    More("stream"),
    More("deltas"),
)
STOPPING: Final[tuple[Step, ...]] = (
    Open("ann", PATH),
    Send("ann", connect("laptop")),
    Open("tab", PATH),
    Send("tab", join("tab-1")),
    Open("chat", "/v1/chat"),
    Send("chat", {"type": "connect", "token": "ann"}),
    Open("live", "/v1/sync/shop/live"),
    Send("live", {"type": "connect", "since": 0}),
    Listen("stream", f"GET {PATH}/stream?partition=orders"),
    Stop(),
    Receive("ann"),
    Receive("tab"),
    Receive("chat", 2),
    Receive("live"),
    More("stream", None),
)

# --- a reader that does not read --------------------------------------------------------------------------------------

SLOW_FRAMES: Final = 100
"""60 KB each. Together, they exceed the socket buffers and the server's send queue."""
LARGE: Final = "x" * 60_000
SLOW_READER: Final[tuple[Step, ...]] = (
    Open("cy", PATH, receive_buffer_bytes=4096),
    Send("cy", connect("phone", "cy")),
    Send("cy", sync(0)),
    Open("di", PATH),
    Send("di", connect("laptop", "di")),
    Flood(
        "di",
        submit({**event(1), "id": "0198f3c2-7d55-7c1e-9a61-{{number}}", "event": {"type": "x", "text": LARGE}}),
        SLOW_FRAMES,
    ),
    Drain("cy", '"type":"event_broadcast"'),
)
