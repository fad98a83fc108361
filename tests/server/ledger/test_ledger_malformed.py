"""Malformed Ledger API requests: bodies that are not JSON or not a write, and bytes that are not a message."""

import json
from collections.abc import Mapping
from typing import Any, Final

import grpc.aio
import pytest

from databases import BOTH_STORES
from deadlines import WAIT_S
from oncelog.ledger.v1 import ledger_pb2 as pb
from server.ledger.ledger_refusals import (
    ONLY_GRPC,
    ONLY_HTTP,
    RELATED,
    check_nothing_written,
    grpc_wire,
    http_wire,
    send_among_valid_writes,
    write_of,
)
from server.ledger.ledger_servers import SharedServer
from server.ledger.ledger_transports import GRPC, Json, expect_refusal, message_of

pytestmark = BOTH_STORES

# --- malformed JSON -----------------------------------------------------------------------------------

GOOD: Final[Mapping[str, Any]] = {"client_id": "app", "sequence": 1, "operations": [{"delete_entity": {"key": "a"}}]}


def setting(**members: Any) -> Json:
    return {**GOOD, "operations": [{"set_entity": {"key": "a", **members}}]}


BAD_JSON: Final[list[tuple[Any, str]]] = [
    ([], "body"),
    ("text", "body"),
    (None, "body"),
    ({}, "organization"),
    ({**GOOD, "sequence": None}, "sequence"),
    ({**GOOD, "sequence": "1"}, "sequence"),
    ({**GOOD, "sequence": True}, "sequence"),
    ({**GOOD, "sequence": 1.5}, "sequence"),
    ({**GOOD, "sequence": -1}, "sequence"),
    ({**GOOD, "sequence": 2**53}, "sequence"),
    ({**GOOD, "sequence": 2**64}, "sequence"),
    ({**GOOD, "sequence": 10**400}, "sequence"),
    ({**GOOD, "vault": None}, "vault"),
    ({**GOOD, "vault": 7}, "vault"),
    ({**GOOD, "client_id": ["app"]}, "client_id"),
    ({**GOOD, "idempotency_key": 7}, "idempotency_key"),
    ({**GOOD, "idempotency_key": "xyz"}, "idempotency_key"),
    ({**GOOD, "idempotency_key": "0198f3c2-7d55-7c1e-9a61-2f6f0c1b5a1"}, "idempotency_key"),
    ({**GOOD, "idempotency_key": "01 98f3c27d557c1e9a612f6f0c1b5a10"}, "idempotency_key"),
    ({**GOOD, "idempotency_key": "é" * 32}, "idempotency_key"),
    ({**GOOD, "operations": {}}, "operations"),
    ({**GOOD, "operations": [7]}, "operations[0]"),
    ({**GOOD, "operations": [None]}, "operations[0]"),
    ({**GOOD, "operations": [{"set_entity": None}]}, "operations[0].set_entity"),
    ({**GOOD, "operations": [{"set_entities": {"key": "a"}}]}, "operations[0].set_entities"),
    ({**GOOD, "operations": [{"delete_entity": {"key": "a"}, "create_relationship": RELATED}]}, "operations[0]"),
    ({**GOOD, "operations": [{"create_relationship": RELATED, "delete_relationship": RELATED}]}, "operations[0]"),
    ({**GOOD, "operations": [{"delete_entity": {}}]}, "operations[0].delete_entity.key"),
    ({**GOOD, "operations": [{"create_relationship": {"resource": "r"}}]}, "create_relationship.relation"),
    (setting(value=7), "operations[0].set_entity.value"),
    (setting(value="no base64!"), "operations[0].set_entity.value"),
    (setting(valu=""), "operations[0].set_entity.valu"),
    (setting(expires_at_ms=-1), "operations[0].set_entity.expires_at_ms"),
    (setting(expires_at_ms=1.5), "operations[0].set_entity.expires_at_ms"),
    (setting(condition=[]), "operations[0].set_entity.condition"),
    (setting(condition={"must_exists": True}), "operations[0].set_entity.condition.must_exists"),
    (setting(condition={"must_exist": 1}), "operations[0].set_entity.condition.must_exist"),
    (setting(condition={"must_exist": True, "version_is": 1}), "operations[0].set_entity.condition"),
    (setting(condition={"must_exist": True, "must_not_exist": True}), "operations[0].set_entity.condition"),
    (setting(condition={"must_exist": True, "must_not_exist": False}), "operations[0].set_entity.condition"),
    (setting(condition={"version_is": -1}), "operations[0].set_entity.condition.version_is"),
    (setting(key="\ud800"), "operations[0].set_entity.key"),
]
BAD_BYTES: Final = [
    b"",
    b"{",
    b"\xff\xfe",
    b'{"organization":"\xff"}',
    b'{"sequence":1,"sequence":1}',
    b'{"sequence":NaN}',
    b"[" * 100_000,
    b'{"a":' * 50_000,
    b"\x00",
    b"{} {}",
]


@ONLY_HTTP
@pytest.mark.rule("CO-33")
@pytest.mark.parametrize("path", ["write", "batch-write"])
@pytest.mark.parametrize(("body", "field"), BAD_JSON, ids=[f"{n}" for n in range(len(BAD_JSON))])
async def test_json_with_an_invalid_field_is_refused_with_its_path(
    shared_server: SharedServer, path: str, body: Any, field: str
) -> None:
    given, expected = body, field
    if isinstance(given, dict) and given:
        given = {"organization": shared_server.name, **given}
        if path == "batch-write":
            writes = [{"operations": given["operations"]}]
            given = {name: value for name, value in {**given, "writes": writes}.items() if name != "operations"}
    error = await send_among_valid_writes(
        shared_server, http_wire(shared_server).post(path, json.dumps(given).encode())
    )
    assert (error.http_status, error.code) == (400, "bad_request")
    assert error.field is not None
    assert error.field.endswith(expected)
    assert error.message.startswith(f"{error.field}: ")
    assert "as a string" not in error.message  # as a string it would be refused too
    await check_nothing_written(shared_server)


@ONLY_HTTP
@pytest.mark.rule("LG-22", "CO-20")
@pytest.mark.parametrize("path", ["write", "batch-write"])
async def test_unknown_member_is_refused_by_name(shared_server: SharedServer, path: str) -> None:
    """A request with a misspelt `vault` must not write to the organization, and a misspelt key must not be ignored."""
    for name in ("vault_id", "idempotencyKey", "Vault", "x\ny", "actor"):
        given: Json = {"organization": shared_server.name, **GOOD, name: "main"}
        if path == "batch-write":
            given["writes"] = [{"operations": given.pop("operations")}]
        error = await expect_refusal(http_wire(shared_server).post(path, json.dumps(given).encode()))
        assert (error.http_status, error.code, error.field) == (400, "bad_request", name)
        wanted = "is assigned by the server" if name == "actor" else "is not a member of this object"
        assert error.message.startswith(f"{name}: {wanted}")
    await check_nothing_written(shared_server)


@ONLY_HTTP
@pytest.mark.rule("LG-22", "LG-17")
async def test_unknown_member_of_a_write_in_a_batch_is_refused_with_its_path(shared_server: SharedServer) -> None:
    write = {"operations": GOOD["operations"], "vault_id": "main"}
    given = {"organization": shared_server.name, "client_id": "app", "sequence": 1, "writes": [write]}
    error = await expect_refusal(http_wire(shared_server).post("batch-write", json.dumps(given).encode()))
    assert (error.http_status, error.field) == (400, "writes[0].vault_id")
    await check_nothing_written(shared_server)


@ONLY_HTTP
@pytest.mark.rule("CO-33", "CO-3")
@pytest.mark.parametrize("path", ["write", "batch-write"])
async def test_body_that_is_not_json_is_refused(shared_server: SharedServer, path: str) -> None:
    members = json.dumps({"organization": shared_server.name, **GOOD})
    twice = members.replace('"sequence": 1', '"sequence": 1, "sequence": 1')
    within = members.replace('"key": "a"', '"key": "a", "key": "b"')
    assert twice != members != within
    for body in (*BAD_BYTES, twice.encode(), within.encode(), members.encode("utf-16")):
        error = await expect_refusal(http_wire(shared_server).post(path, body))
        assert (error.http_status, error.code) == (400, "bad_request"), body[:50]
    error = await expect_refusal(
        http_wire(shared_server).post(path, members.encode(), **{"Content-Type": "text/plain"})
    )
    assert (error.http_status, error.field) == (415, "Content-Type")
    await check_nothing_written(shared_server)


@ONLY_HTTP
@pytest.mark.rule("CO-1", "LG-14")
async def test_json_accepts_equivalent_forms_of_keys_and_integers(shared_server: SharedServer) -> None:
    uuid = "0198f3c2-7d55-7c1e-9a61-2f6f0c1b5a10"
    wire = http_wire(shared_server)

    def body(text: str, sequence: str = "1") -> bytes:
        members = json.dumps({"organization": shared_server.name, **GOOD, "idempotency_key": text})
        return members.replace('"sequence": 1', f'"sequence": {sequence}').encode()

    first = await wire.post("write", body(uuid))
    assert first["assigned_sequence"] == 1
    for text, sequence in ((uuid.upper(), "1.0"), (uuid.replace("-", ""), "1e0"), (uuid, "1")):
        assert await wire.post("write", body(text, sequence)) == first
    found = await shared_server.ledger().get_transaction(first["committed_tx_id"])
    assert found["idempotency_key"] == bytes.fromhex(uuid.replace("-", ""))


# --- malformed messages -------------------------------------------------------------------------------------

METHODS: Final = {
    "Write": "WriteRequest",
    "BatchWrite": "BatchWriteRequest",
    "GetClientState": "GetClientStateRequest",
    "GetEntity": "GetEntityRequest",
    "ListEntities": "ListEntitiesRequest",
    "ListRelationships": "ListRelationshipsRequest",
    "CheckRelationship": "CheckRelationshipRequest",
    "GetTransaction": "GetTransactionRequest",
    "GetBlock": "GetBlockRequest",
    "GetProof": "GetProofRequest",
}


@ONLY_GRPC
@pytest.mark.rule("CO-33")
@pytest.mark.parametrize("method", METHODS)
async def test_bytes_that_are_not_a_message_are_refused(shared_server: SharedServer, method: str) -> None:
    whole = message_of(pb.WriteRequest, write_of(shared_server.name)).SerializeToString()
    for data in (b"\xff" * 20, b"\x0a\x05abc", b"\x0a\x02\xff\xfe", b"\x0a", whole[:-1], b"\x0b" * 500, b"\x00"):
        error = await expect_refusal(grpc_wire(shared_server).raw(method, data))
        message = f"the request must be a message of type oncelog.ledger.v1.{METHODS[method]}"
        assert (error.status, error.message, error.code) == ("INVALID_ARGUMENT", message, "bad_request"), data
    await check_nothing_written(shared_server)


@pytest.mark.rule("CO-33")
async def test_unknown_method_is_not_found(shared_server: SharedServer) -> None:
    if shared_server.server.kind == GRPC:
        for path in ("/oncelog.ledger.v1.Ledger/Erase", "/oncelog.ledger.v2.Ledger/Write", "/x/y"):
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await grpc_wire(shared_server).channel.unary_unary(path)(b"", timeout=WAIT_S)
            assert raised.value.code().name == "UNIMPLEMENTED"
    else:
        wire = http_wire(shared_server)
        for path in ("erase", "", "write/1"):
            assert (await expect_refusal(wire.post(path, b"{}"))).http_status == 404
        async with wire.session.get(f"{wire.url}/v1/ledger/write") as response:
            assert (response.status, response.headers["Allow"]) == (405, "POST")
        async with wire.session.post(f"{wire.url}/v1/ledger/entity", json={}) as response:
            assert response.status == 405
    await check_nothing_written(shared_server)


@ONLY_GRPC
@pytest.mark.rule("CO-33")
async def test_bytes_that_are_not_a_message_do_not_start_a_stream(shared_server: SharedServer) -> None:
    call = grpc_wire(shared_server).channel.unary_stream("/oncelog.ledger.v1.Ledger/WatchBlocks")(
        b"\xff", timeout=WAIT_S
    )
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call.read()
    assert raised.value.code().name == "INVALID_ARGUMENT"
    await check_nothing_written(shared_server)
