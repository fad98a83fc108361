"""Scenarios of the deltas API: push, pull, rows, snapshot, live delivery, compaction and errors."""

import json
from hashlib import sha256
from typing import Any, Final

from golden.fixed_sources import NOW_MS
from golden.steps import TICKET, HangUp, Http, Listen, More, Note, Open, Receive, Send, Step

PATH: Final = "/v1/sync/shop"
EPOCH: Final = {"epoch": r'"epoch": ?"(\w+)"'}


def delta(counter: int, op: str = "INSERT", row: str = "p1", ms: int = NOW_MS, **columns: Any) -> dict[str, Any]:
    """Return a delta with its id. For these values Python's JSON encoder produces canonical JSON."""
    content = {
        "clientId": "till-1",
        "columns": [{"column": name, "value": value} for name, value in columns.items()],
        "hlc": str((ms << 16) + counter),
        "rowId": row,
        "table": "products",
    }
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return {"deltaId": sha256(canonical.encode()).hexdigest(), "op": op, **content}


def push(*deltas: Any) -> Http:
    return Http(f"POST {PATH}/push", {"deltas": [*deltas]})


TEA: Final = delta(1, name="Tea", price=3.5, tags=["hot", None])
DELTAS: Final[tuple[Step, ...]] = (
    Note("push, retry, retry with a different operation, and a repeated delta in one push"),
    push(TEA),
    push(TEA, delta(2, "UPDATE", price=4), delta(2, "UPDATE", price=4)),
    push({**TEA, "op": "DELETE"}),
    push(delta(3, row="p2", name="Milk"), delta(4, "DELETE", "p2"), delta(0, "UPDATE", price=1)),
    push(),
    Note("pull"),
    Http(f"GET {PATH}/pull", save=EPOCH),
    Http(f"GET {PATH}/pull?since=1&limit=1&epoch={{{{epoch}}}}"),
    Http(f"GET {PATH}/pull?since=5"),
    Note("rows and snapshot"),
    Http(f"GET {PATH}/rows/products"),
    Http(f"GET {PATH}/rows/products?rowId=p1"),
    Http(f"GET {PATH}/rows/products?rowId=p2"),
    Http(f"GET {PATH}/rows/products?limit=1&after=p0"),
    Http(f"GET {PATH}/rows/none"),
    Http(f"GET {PATH}/deltas/{TEA['deltaId']}"),
    Http(f"GET {PATH}/deltas/{'0' * 64}"),
    Http(f"GET {PATH}/nothing"),
    Http(f"PATCH {PATH}/push"),
    Http(f"GET {PATH}/snapshot?limit=1", save={"page": r'"next": ?"([^"]+)"'}),
    Http(f"GET {PATH}/snapshot?limit=1&page={{{{page}}}}"),
    Http("GET /v1/sync/empty/snapshot"),
    Note("live delivery by server-sent events and over a WebSocket"),
    Listen("reader", f"GET {PATH}/live?since=3", events=3),
    Open("socket", f"{PATH}/live"),
    Send("socket", {"type": "connect", "since": 4, "epoch": "{{epoch}}"}, receive=2),
    push(delta(5, "UPDATE", price=5)),
    More("reader"),
    Receive("socket"),
    HangUp("reader"),
    HangUp("socket"),
    Note("compaction"),
    Http(f"POST {PATH}/compact", {"keep": 1}),
    Http(f"POST {PATH}/compact", {"upto": 4, "tombstoneAgeMs": 0}),
    Http(f"GET {PATH}/pull?since=0"),
    Http(f"GET {PATH}/pull?since=1"),
    Http(f"POST {PATH}/live", save=TICKET),
    Listen("ticket", f"GET {PATH}/live?since=3&ticket={{{{ticket}}}}", events=2),
    HangUp("ticket"),
    Listen("compacted", f"GET {PATH}/live?since=0", events=2),
    More("compacted", None),
    Open("behind", f"{PATH}/live"),
    Send("behind", {"type": "connect", "since": 0}, receive=3),
    Http(f"GET {PATH}/snapshot"),
    push(delta(3, row="p2", name="Milk")),
    push(delta(0, row="p2", name="late")),
    Note("a gateway with another name"),
    Http("POST /v1/sync/caf%C3%A9%2F1/push", {"deltas": [TEA]}),
    Http("GET /v1/sync/caf%C3%A9%2F1/pull"),
    Note("errors"),
    push({**TEA, "deltaId": "0" * 64}),
    push({**TEA, "hlc": 7}),
    push({**TEA, "op": "UPSERT"}),
    push({name: value for name, value in TEA.items() if name != "rowId"}),
    push(delta(6, name=2**53 + 1)),
    push(delta(1, ms=NOW_MS + 5001, name="early")),
    Http(f"POST {PATH}/push", "no JSON"),
    Http(f"POST {PATH}/push", {}),
    Http(f"POST {PATH}/push", "x" * 70_001),
    Http(f"POST {PATH}/push", {"deltas": []}, headers={"Content-Type": "text/plain"}),
    Http(f"POST {PATH}/push", {"deltas": []}, by="not a good token"),
    Http(f"GET {PATH}/pull?since=x"),
    Http(f"GET {PATH}/pull?since=900"),
    Http(f"GET {PATH}/pull?epoch=0000000000000000"),
    Http(f"GET {PATH}/snapshot?page=none"),
    Http(f"GET {PATH}/rows/no-name"),
    Http(f"POST {PATH}/compact", {}),
    Http(f"POST {PATH}/compact", {"keep": -1}),
    Http("GET /v1/sync/../pull"),
    Http(f"GET /v1/sync/{'x' * 81}/pull"),
    Http(f"DELETE {PATH}/push"),
    Listen("ahead", f"GET {PATH}/live?since=900"),
    Open("first", f"{PATH}/live"),
    Send("first", {"type": "none"}, receive=2),
    Open("ahead", f"{PATH}/live"),
    Send("ahead", {"type": "connect", "since": 900}, receive=2),
)

SCHEMAS: Final = {"shop": {"products": {"name": "text", "price": "number?", "tags": "json"}}}
"""Schemas of the server for the `DELTA_SCHEMAS` scenario."""
DELTA_SCHEMAS: Final[tuple[Step, ...]] = (
    push(TEA),
    push(delta(2, "UPDATE", price=None)),
    push(delta(3, "UPDATE", name=7)),
    push(delta(3, "UPDATE", other=7)),
    push({**delta(3), "table": "none"}),
)
