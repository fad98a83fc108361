"""Scenarios of the ledger: every operation over HTTP and over gRPC, with errors of every code."""

from typing import Any, Final

from golden.steps import TICKET, HangUp, Http, Listen, More, Note, Rpc, Step

PATH: Final = "/v1/ledger"
TX_ID: Final = {"tx": r'committed_tx_id"?: ?"(\w+)"'}


def uuid(number: int) -> str:
    return f"0198f3c2-7d55-7c1e-9a61-{number:012x}"


def write(sequence: int, *operations: Any, number: int = 0, **members: Any) -> dict[str, Any]:
    return {
        "organization": "acme",
        "client_id": "till",
        "sequence": sequence,
        "idempotency_key": uuid(number or sequence),
        "operations": [*operations],
        **members,
    }


def set_entity(key: str, value: str = "cGFpZA==", **members: Any) -> dict[str, Any]:
    return {"set_entity": {"key": key, "value": value, **members}}


OWNER: Final = {"resource": "invoice/17", "relation": "owner", "subject": "ann"}
READ: Final = "organization=acme"
FIRST: Final = write(1, set_entity("invoice/17", condition={"must_not_exist": True}), {"create_relationship": OWNER})
HTTP: Final[tuple[Step, ...]] = (
    Note("a write, and its retry answered from memory"),
    Http(f"POST {PATH}/write", FIRST, save=TX_ID),
    Http(f"POST {PATH}/write", FIRST),
    Note("every error of a write"),
    Http(f"POST {PATH}/write", write(2, set_entity("invoice/17", condition={"must_not_exist": True}))),
    Http(f"POST {PATH}/write", write(2, set_entity("invoice/18", condition={"must_exist": True}))),
    Http(f"POST {PATH}/write", write(2, set_entity("invoice/17", condition={"version_is": 9}))),
    Http(f"POST {PATH}/write", write(2, set_entity("invoice/17", condition={"value_equals": "eA=="}))),
    Http(f"POST {PATH}/write", write(2, set_entity("other"), number=1)),
    Http(f"POST {PATH}/write", write(4, set_entity("other"))),
    Http(f"POST {PATH}/write", write(1, set_entity("other"), number=9)),
    Note("a batch, and its retry"),
    Http(
        f"POST {PATH}/batch-write",
        {
            **{name: value for name, value in write(2).items() if name != "operations"},
            "writes": [
                {"operations": [set_entity("stock/apples", "NDE="), set_entity("stock/old", "MQ==", expires_at_ms=5)]},
                {"organization": "acme", "operations": [{"delete_entity": {"key": "none"}}]},
            ],
        },
    ),
    Http(
        f"POST {PATH}/batch-write",
        {
            **{name: value for name, value in write(2).items() if name != "operations"},
            "writes": [
                {"operations": [set_entity("stock/apples", "NDE="), set_entity("stock/old", "MQ==", expires_at_ms=5)]},
                {"organization": "acme", "operations": [{"delete_entity": {"key": "none"}}]},
            ],
        },
    ),
    Http(f"POST {PATH}/write", write(3, {"delete_relationship": OWNER}, {"create_relationship": OWNER})),
    Http(f"POST {PATH}/write", write(1, set_entity("key"), number=20, vault="main")),
    Note("reads"),
    Http(f"GET {PATH}/client-state?{READ}&client_id=till"),
    Http(f"GET {PATH}/client-state?{READ}&client_id=none"),
    Http(f"GET {PATH}/entity?{READ}&key=invoice/17"),
    Http(f"GET {PATH}/entity?{READ}&key=stock/old"),
    Http(f"GET {PATH}/entity?{READ}&vault=main&key=key"),
    Http(f"GET {PATH}/entities?{READ}&page_size=1", save={"page": r'"next_page_token": ?"([^"]+)"'}),
    Http(f"GET {PATH}/entities?{READ}&page_size=1&page_token={{{{page}}}}"),
    Http(f"GET {PATH}/entities?{READ}&limit=1&after={{{{page}}}}"),
    Http(f"GET {PATH}/entities?{READ}&prefix=stock/"),
    Http(f"GET {PATH}/relationships?{READ}"),
    Http(f"GET {PATH}/relationships?{READ}&resource=none"),
    Http(f"GET {PATH}/relationship?{READ}&resource=invoice/17&relation=owner&subject=ann"),
    Http(f"GET {PATH}/relationship?{READ}&resource=invoice/17&relation=owner&subject=ben"),
    Http(f"GET {PATH}/transaction?{READ}&tx_id={{{{tx}}}}"),
    Http(f"GET {PATH}/outcome?{READ}&tx_id={{{{tx}}}}"),
    Http(f"GET {PATH}/outcome?{READ}&idempotency_key={99:032x}&client_id=till"),
    Http(f"GET {PATH}/block?{READ}&height=1"),
    Http(f"GET {PATH}/proof?{READ}&tx_id={{{{tx}}}}"),
    Note("new blocks"),
    Listen("blocks", f"GET {PATH}/blocks/stream?{READ}", events=2),
    Http(f"POST {PATH}/write", write(4, set_entity("new"))),
    More("blocks", 3),
    HangUp("blocks"),
    Listen("resumed", f"GET {PATH}/blocks/stream?{READ}&after_height=2", events=2),
    HangUp("resumed"),
    Http(f"POST {PATH}/blocks/stream?{READ}", save=TICKET),
    Listen("ticket", f"GET {PATH}/blocks/stream?{READ}&after=2&ticket={{{{ticket}}}}", events=2),
    HangUp("ticket"),
    Listen("ahead", f"GET {PATH}/blocks/stream?{READ}&after_height=900"),
    Listen("other", f"GET {PATH}/blocks/stream?{READ}&after_height=1&epoch=0000000000000000"),
    Note("errors"),
    Http(f"POST {PATH}/write", "no JSON"),
    Http(f"POST {PATH}/write", {**FIRST, "valt": "main"}),
    Http(f"POST {PATH}/write", write(0, set_entity("a"))),
    Http(f"POST {PATH}/write", write(5)),
    Http(f"POST {PATH}/write", write(5, {"set_entity": {"key": "a"}})),
    Http(f"POST {PATH}/write", write(5, {"no_operation": {}})),
    Http(f"POST {PATH}/write", write(5, set_entity(""))),
    Http(f"POST {PATH}/write", write(5, set_entity("a"), organization="")),
    Http(f"POST {PATH}/write", write(5, set_entity("a"), idempotency_key="none")),
    Http(f"POST {PATH}/write", write(5, set_entity("a", condition={"must_exist": False}))),
    Http(f"POST {PATH}/write", "x" * 70_001),
    Http(f"POST {PATH}/batch-write", {"organization": "acme", "writes": []}),
    Http(f"GET {PATH}/entity?key=a"),
    Http(f"GET {PATH}/entities?{READ}&page_token=none"),
    Http(f"GET {PATH}/entities?{READ}&page_size=x"),
    Http(f"GET {PATH}/relationships?{READ}&relation=owner"),
    Http(f"GET {PATH}/transaction?{READ}&tx_id=0000000000000009"),
    Http(f"GET {PATH}/transaction?{READ}&tx_id=none"),
    Http(f"GET {PATH}/block?{READ}&height=900"),
    Http(f"GET {PATH}/block?{READ}&height=0"),
    Http(f"GET {PATH}/proof?{READ}&tx_id=0000000000000009"),
    Http(f"DELETE {PATH}/write"),
)


def call(sequence: int, *operations: Any, number: int = 0, **members: Any) -> dict[str, Any]:
    """Return a write in protobuf's JSON form. The key is a 16-byte number in base64."""
    return {
        "organization": "globex",
        "clientId": "till",
        "sequence": sequence,
        "idempotencyKey": f"AAAAAAAAAAAAAAAAAAAA{'ABCDEFGHIJ'[number or sequence]}A==",
        "operations": [*operations],
        **members,
    }


def put(key: str, value: str = "cGFpZA==", **members: Any) -> dict[str, Any]:
    return {"setEntity": {"key": key, "value": value, **members}}


SCOPE: Final = {"organization": "globex"}
BATCH: Final = {
    **{name: value for name, value in call(2).items() if name != "operations"},
    "writes": [
        {"operations": [put("stock/apples", "NDE="), put("stock/old", "MQ==", expiresAtMs=5)]},
        {"organization": "globex", "operations": [{"deleteEntity": {"key": "none"}}]},
    ],
}
CALLED: Final = call(1, put("invoice/17", condition={"mustNotExist": True}), {"createRelationship": OWNER})
GRPC: Final[tuple[Step, ...]] = (
    Note("a write, and its retry answered from memory"),
    Rpc("Write", CALLED, save=TX_ID),
    Rpc("Write", CALLED),
    Note("every error of a write"),
    Rpc("Write", call(2, put("invoice/17", condition={"mustNotExist": True}))),
    Rpc("Write", call(2, put("invoice/18", condition={"mustExist": True}))),
    Rpc("Write", call(2, put("invoice/17", condition={"versionIs": 9}))),
    Rpc("Write", call(2, put("invoice/17", condition={"valueEquals": "eA=="}))),
    Rpc("Write", call(2, put("other"), number=1)),
    Rpc("Write", call(4, put("other"))),
    Rpc("Write", call(1, put("other"), number=9)),
    Note("a batch, and its retry"),
    Rpc("BatchWrite", BATCH),
    Rpc("BatchWrite", BATCH),
    Rpc("Write", call(3, {"deleteRelationship": OWNER}, {"createRelationship": OWNER})),
    Note("reads"),
    Rpc("GetClientState", {**SCOPE, "clientId": "till"}),
    Rpc("GetClientState", {**SCOPE, "clientId": "none"}),
    Rpc("GetEntity", {**SCOPE, "key": "invoice/17"}),
    Rpc("GetEntity", {**SCOPE, "key": "stock/old"}),
    Rpc("ListEntities", {**SCOPE, "pageSize": 1}, save={"page": r'next_page_token: "([^"]+)"'}),
    Rpc("ListEntities", {**SCOPE, "pageSize": 1, "pageToken": "{{page}}"}),
    Rpc("ListEntities", {**SCOPE, "prefix": "none"}),
    Rpc("ListRelationships", SCOPE),
    Rpc("CheckRelationship", {**SCOPE, **OWNER}),
    Rpc("CheckRelationship", {**SCOPE, **OWNER, "subject": "ben"}),
    Rpc("GetTransaction", {**SCOPE, "txId": "{{tx}}"}),
    Rpc("GetBlock", {**SCOPE, "height": 1}),
    Rpc("GetProof", {**SCOPE, "txId": "{{tx}}"}),
    Rpc("WatchBlocks", SCOPE, messages=2),
    Note("errors"),
    Rpc("Write", call(0, put("a"))),
    Rpc("Write", call(5)),
    Rpc("Write", call(5, {})),
    Rpc("Write", call(5, put(""))),
    Rpc("Write", call(5, put("a"), organization="")),
    Rpc("Write", call(5, put("a"), idempotencyKey="AAAA")),
    Rpc("Write", call(5, put("a", "eHh4" * 30_000))),
    Rpc("BatchWrite", {**BATCH, "writes": []}),
    Rpc("BatchWrite", {**BATCH, "sequence": 4, "writes": [{"organization": "other", "operations": [put("a")]}]}),
    Rpc("ListEntities", {**SCOPE, "pageToken": "none"}),
    Rpc("ListRelationships", {**SCOPE, "relation": "owner"}),
    Rpc("GetTransaction", {**SCOPE, "txId": "0000000000000009"}),
    Rpc("GetTransaction", {**SCOPE, "txId": "none"}),
    Rpc("GetBlock", {**SCOPE, "height": 900}),
    Rpc("GetBlock", SCOPE),
    Rpc("GetProof", {**SCOPE, "txId": "0000000000000009"}),
    Rpc("WatchBlocks", {**SCOPE, "afterHeight": 900}),
    Rpc("WatchBlocks", {**SCOPE, "epoch": "0000000000000000"}),
    Rpc("GetEntity", {**SCOPE, "key": "a"}, by="not a good token"),
    Note("a stream of writes"),
    Rpc(
        "StreamWrites", {"writes": [{"write": one} for one in (call(4, put("b")), CALLED, call(9, put("b")), call(0))]}
    ),
    Rpc("StreamWrites", {"writes": []}),
)
