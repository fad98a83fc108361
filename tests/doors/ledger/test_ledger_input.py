"""Bad input of the ledger door: told by field and in the same words over both wires; nothing written, nobody harmed."""

import asyncio
import json
from base64 import urlsafe_b64encode
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import grpc.aio
import pytest

from databases import BOTH_STORES
from doors.ledger.ledger_doors import House, key, opened
from doors.ledger.wires import (
    GRPC,
    HTTP,
    CallError,
    GrpcWire,
    HttpWire,
    Json,
    code,
    message_of,
    put,
    refused,
    relate,
    remove,
)
from doors.serving import WAIT_S, run, soon, until
from oncelog.ledger.v1 import ledger_pb2 as pb

pytestmark = BOTH_STORES

ONLY_GRPC: Final = pytest.mark.parametrize("wire", [GRPC], indirect=True)
ONLY_HTTP: Final = pytest.mark.parametrize("wire", [HTTP], indirect=True)
SET: Final = put("a", b"1")
ONE_OPERATION: Final = "must have exactly one of set_entity, delete_entity, create_relationship and delete_relationship"
ONE_CONDITION: Final = "must have exactly one of must_not_exist, must_exist, version_is and value_equals"
KEY_LENGTH: Final = "must have 1 to 1024 characters, not"
LONG: Final = "x" * 1025
VALUE_BYTES_MAX: Final = 2**20
BIG: Final = bytes(VALUE_BYTES_MAX + 1)
E_ACUTE: Final = "e\u0301"
"""Of two code points, where NFC has one."""


def conditioned(condition: Json, **members: Any) -> list[Json]:
    return [put("a", b"1", condition=condition, **members)]


BAD_NAMES: Final = [
    ("x" * 81, "must have at most 80 characters, not 81"),
    ("a\0b", "must not have U+0000"),
    (E_ACUTE, "must be in NFC"),
    ("𝄞" * 81, "must have at most 80 characters, not 81"),
]
BAD_WRITES: Final[list[tuple[Json, str, str]]] = [
    ({"organization": ""}, "organization", "must have 1 to 80 characters, not 0"),
    *[({"organization": name}, "organization", message) for name, message in BAD_NAMES],
    *[({"vault": name}, "vault", message) for name, message in BAD_NAMES],
    ({"client_id": "x" * 506}, "client_id", "must have at most 505 characters, not 506"),
    ({"client_id": "a\0"}, "client_id", "must not have U+0000"),
    ({"sequence": 0}, "sequence", "must be from 1 to 18446744073709551615, not 0"),
    ({"idempotency_key": b"k" * 15}, "idempotency_key", "must have 16 bytes, not 15"),
    ({"idempotency_key": b"k" * 17}, "idempotency_key", "must have 16 bytes, not 17"),
    ({"idempotency_key": bytes(16)}, "idempotency_key", "must not be all zero"),
    ({"operations": []}, "operations", "must hold at least one"),
    ({"operations": [{}]}, "operations[0]", ONE_OPERATION),
    ({"operations": [SET, SET, {}]}, "operations[2]", ONE_OPERATION),
    ({"operations": [put("")]}, "operations[0].set_entity.key", f"{KEY_LENGTH} 0"),
    ({"operations": [SET, put(LONG)]}, "operations[1].set_entity.key", f"{KEY_LENGTH} 1025"),
    ({"operations": [put("a\0")]}, "operations[0].set_entity.key", "must not have U+0000"),
    ({"operations": [remove("")]}, "operations[0].delete_entity.key", f"{KEY_LENGTH} 0"),
    ({"operations": [remove(LONG)]}, "operations[0].delete_entity.key", f"{KEY_LENGTH} 1025"),
    ({"operations": [remove("\0")]}, "operations[0].delete_entity.key", "must not have U+0000"),
    *[
        ({"operations": [{kind: {**relate("r", "v", "s")["create_relationship"], part: bad}}]}, path, message)
        for kind in ("create_relationship", "delete_relationship")
        for part in ("resource", "relation", "subject")
        for path in (f"operations[0].{kind}.{part}",)
        for bad, message in (("", f"{KEY_LENGTH} 0"), (LONG, f"{KEY_LENGTH} 1025"), ("\0", "must not have U+0000"))
    ],
    (
        {"operations": [put("a", BIG)]},
        "operations[0].set_entity.value",
        f"must have at most {VALUE_BYTES_MAX} bytes, not {VALUE_BYTES_MAX + 1}",
    ),
    (
        {"operations": conditioned({"value_equals": BIG})},
        "operations[0].set_entity.condition.value_equals",
        f"must have at most {VALUE_BYTES_MAX} bytes, not {VALUE_BYTES_MAX + 1}",
    ),
    ({"operations": conditioned({})}, "operations[0].set_entity.condition", ONE_CONDITION),
    (
        {"operations": conditioned({"must_exist": False})},
        "operations[0].set_entity.condition.must_exist",
        "must be true",
    ),
    (
        {"operations": conditioned({"must_not_exist": False})},
        "operations[0].set_entity.condition.must_not_exist",
        "must be true",
    ),
]
BAD_NUMBERS: Final[list[tuple[Json, str]]] = [
    ({"operations": [put("a", expires_at_ms=2**53)]}, "operations[0].set_entity.expires_at_ms"),
    ({"operations": [put("a", expires_at_ms=2**64 - 1)]}, "operations[0].set_entity.expires_at_ms"),
    ({"operations": conditioned({"version_is": 2**53})}, "operations[0].set_entity.condition.version_is"),
    ({"operations": conditioned({"version_is": 2**64 - 1})}, "operations[0].set_entity.condition.version_is"),
]
"""What JSON cannot hold is told in the words of JSON there."""


def write_of(name: str, **changed: Any) -> Json:
    asked = {"organization": name, "client_id": "app", "sequence": 1, "idempotency_key": key(1), "operations": [SET]}
    return {**asked, **changed}


async def demand_unharmed(house: House) -> None:
    """Nothing has been written under the name of the one with bad input, and its first write goes."""
    ledger = house.ledger()
    assert await ledger.last_sequence() == 0
    assert await ledger.get_entity("a") is None
    assert code(await ledger.wire.call("Write", write_of(house.name))) == "OK"
    assert await ledger.value("a") == b"1"


async def among_others(house: House, bad: Any) -> CallError:
    """The error of the bad call, which others wrote beside, at the same time."""
    others = [house.ledger(f"client-{number}") for number in range(4)]
    good = [ledger.write(1, put(ledger.client_id), key=key(1)) for ledger in others]
    one, two, error, three, four = await asyncio.gather(good[0], good[1], refused(bad), good[2], good[3])
    assert [code(answer) for answer in (one, two, three, four)] == ["OK"] * 4
    assert isinstance(error, CallError)
    return error


# --- writes -----------------------------------------------------------------------------------------------------


@pytest.mark.rule("CO-33", "CO-30", "LG-2", "LG-14")
@pytest.mark.parametrize(("changed", "field", "message"), BAD_WRITES, ids=[f"{n}" for n in range(len(BAD_WRITES))])
def test_a_bad_write_is_told_by_its_field(house: House, changed: Json, field: str, message: str) -> None:
    async def main() -> None:
        error = await among_others(house, house.wire().call("Write", write_of(house.name, **changed)))
        assert error.told == ("INVALID_ARGUMENT", f"{field}: {message}", field)
        assert error.code == "bad_request"
        assert error.http_status in (0, 400)
        await demand_unharmed(house)

    house.run(main())


@pytest.mark.rule("CO-33", "LG-2")
@pytest.mark.parametrize(("changed", "field"), BAD_NUMBERS, ids=[f"{n}" for n in range(len(BAD_NUMBERS))])
def test_a_number_out_of_range_is_told_by_its_field(house: House, changed: Json, field: str) -> None:
    async def main() -> None:
        error = await among_others(house, house.wire().call("Write", write_of(house.name, **changed)))
        assert (error.status, error.field) == ("INVALID_ARGUMENT", field)
        assert error.message.startswith(f"{field}: ")
        await demand_unharmed(house)

    house.run(main())


@pytest.mark.rule("CO-33", "LG-17")
def test_a_bad_operation_of_a_batch_is_told_like_one_of_a_write(house: House) -> None:
    async def main() -> None:
        ledger = house.ledger()
        error = await among_others(house, ledger.batch_write(1, [SET], [put("a", BIG)], key=key(1)))
        assert error.told == (
            "INVALID_ARGUMENT",
            f"operations[1].set_entity.value: must have at most {VALUE_BYTES_MAX} bytes, not {VALUE_BYTES_MAX + 1}",
            "operations[1].set_entity.value",
        )
        error = await refused(ledger.batch_write(1, [SET], key=b"k" * 15))
        assert (error.status, error.field) == ("INVALID_ARGUMENT", "idempotency_key")
        await demand_unharmed(house)

    house.run(main())


@pytest.mark.rule("CO-30")
def test_values_names_and_keys_up_to_their_limits_are_taken(house: House) -> None:
    async def main() -> None:
        long = "é" * 80
        ledger = house.ledger(client_id="c" * 505).of(organization=house.name + "o" * 60, vault=long)
        operations = [put("k" * 1024, bytes(VALUE_BYTES_MAX)), relate("𝄞" * 1024, "v" * 1024, "s" * 1024)]
        assert code(await ledger.write(1, *operations, key=key(1))) == "OK"
        assert await ledger.value("k" * 1024) == bytes(VALUE_BYTES_MAX)
        assert (await ledger.check_relationship("𝄞" * 1024, "v" * 1024, "s" * 1024))["exists"]
        full = ledger.of(organization="%/" * 40, vault=house.name + "%" * 60)  # as long as it can be when escaped
        assert code(await full.write(1, SET, key=key(1))) == "OK"
        assert await full.value("a") == b"1"

    house.run(main())


@pytest.mark.rule("CO-30")
def test_the_limit_of_values_can_be_set(tmp_path: Path, wire: str) -> None:
    async def main() -> None:
        async with opened(tmp_path, wire, entity_value_bytes_max=3) as door:
            ledger = door.ledger(client_id="app")
            error = await refused(ledger.write(1, put("a", b"1234"), key=key(1)))
            field = "operations[0].set_entity.value"
            assert error.told == ("INVALID_ARGUMENT", f"{field}: must have at most 3 bytes, not 4", field)
            assert code(await ledger.write(1, put("a", b"123"), key=key(1))) == "OK"

    run(main())


@pytest.mark.rule("CO-30", "CO-33")
def test_a_request_that_is_too_large_is_refused_and_the_next_is_not(tmp_path: Path, wire: str) -> None:
    async def main() -> None:
        async with opened(tmp_path, wire, frame_bytes_max=10_000) as door:
            ledger = door.ledger(client_id="app")
            error = await refused(ledger.write(1, put("a", bytes(20_000)), key=key(1)))
            if wire == GRPC:  # gRPC's own, before the door sees anything
                assert error.status == "RESOURCE_EXHAUSTED"
                assert "10000" in error.message
            else:
                assert (error.http_status, error.field) == (413, "body")
            assert await ledger.last_sequence() == 0
            assert code(await ledger.write(1, put("a", bytes(5_000)), key=key(1))) == "OK"

    run(main())


def test_a_log_that_takes_less_than_the_door_says_so(tmp_path: Path, wire: str) -> None:
    async def main() -> None:
        async with opened(tmp_path, wire, body_bytes_max=100) as door:
            ledger = door.ledger(client_id="app")
            error = await refused(ledger.write(1, put("a", bytes(200)), key=key(1)))
            assert (error.status, error.field) == ("INVALID_ARGUMENT", "operations")
            assert code(await ledger.write(1, put("a", bytes(9)), key=key(1))) == "OK"

    run(main())


@pytest.mark.rule("CO-33", "LG-3", "LG-5", "LG-12", "LG-13")
def test_what_is_refused_in_a_group_commit_harms_none_of_the_others(
    tmp_path: Path, wire: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with opened(tmp_path, wire) as door:
            ledgers = [door.ledger(client_id=f"client-{number}") for number in range(9)]
            for ledger in ledgers:
                assert code(await ledger.write(1, put(ledger.client_id, b"1"), key=key(1))) == "OK"
            gate = door.served.hold_commits(monkeypatch)
            plug = asyncio.ensure_future(door.ledger("plug", client_id="plug").write(1, SET))
            await soon(gate.reached.wait())
            refusals: list[tuple[Any, str]] = [
                (ledgers[1].write(3, SET, key=key(3)), "SEQUENCE_GAP"),
                (ledgers[2].write(1, SET, key=key(2)), "SEQUENCE_REUSED"),
                (ledgers[3].write(2, put("x", condition={"must_exist": True}), key=key(2)), "KEY_NOT_FOUND"),
                (ledgers[4].write(2, put("client-4", condition={"version_is": 99}), key=key(2)), "VERSION_MISMATCH"),
            ]
            good = [ledgers[n].write(2, put(f"client-{n}", b"2"), key=key(2)) for n in (0, 5, 6, 7, 8)]
            calls = [good[0], *[call for call, _ in refusals], *good[1:]]
            gathered = asyncio.gather(*calls)
            await until(lambda: door.log.queued == len(calls) + 1)
            gate.open()
            answers = await gathered
            assert code(await plug) == "OK"
            assert [code(one) for one in answers] == ["OK", *[expected for _, expected in refusals], *["OK"] * 4]
            header = answers[0]["block_header"]
            assert (header["count"], [one["block_header"] for one in answers[5:]]) == (5, [header] * 4)
            assert [await one.last_sequence() for one in ledgers] == [2, 1, 1, 1, 1, 2, 2, 2, 2]

    run(main())


# --- what only JSON can get wrong -----------------------------------------------------------------------------------

GOOD: Final[Mapping[str, Any]] = {"client_id": "app", "sequence": 1, "operations": [{"delete_entity": {"key": "a"}}]}


def setting(**members: Any) -> Json:
    return {**GOOD, "operations": [{"set_entity": {"key": "a", **members}}]}


RELATED: Final = {"resource": "r", "relation": "v", "subject": "s"}
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
    ({**GOOD, "operations": [{"set_entities": {"key": "a"}}]}, "operations[0]"),
    ({**GOOD, "operations": [{"delete_entity": {"key": "a"}, "create_relationship": RELATED}]}, "operations[0]"),
    ({**GOOD, "operations": [{"create_relationship": RELATED, "delete_relationship": RELATED}]}, "operations[0]"),
    ({**GOOD, "operations": [{"delete_entity": {}}]}, "operations[0].delete_entity.key"),
    ({**GOOD, "operations": [{"create_relationship": {"resource": "r"}}]}, "create_relationship.relation"),
    (setting(value=7), "operations[0].set_entity.value"),
    (setting(value="no base64!"), "operations[0].set_entity.value"),
    (setting(valu=""), "operations[0].set_entity"),
    (setting(expires_at_ms=-1), "operations[0].set_entity.expires_at_ms"),
    (setting(expires_at_ms=1.5), "operations[0].set_entity.expires_at_ms"),
    (setting(condition=[]), "operations[0].set_entity.condition"),
    (setting(condition={"must_exists": True}), "operations[0].set_entity.condition"),
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


def http(house: House) -> HttpWire:
    found: HttpWire = house.door.wire("http")
    return found


@ONLY_HTTP
@pytest.mark.rule("CO-33")
@pytest.mark.parametrize("path", ["write", "batch-write"])
@pytest.mark.parametrize(("body", "field"), BAD_JSON, ids=[f"{n}" for n in range(len(BAD_JSON))])
def test_json_that_is_no_write_is_told_by_its_field(house: House, path: str, body: Any, field: str) -> None:
    async def main() -> None:
        given, expected = body, field
        if isinstance(given, dict) and given:
            given = {"organization": house.name, **given}
            if path == "batch-write":
                writes = [{"operations": given["operations"]}]
                given = {name: value for name, value in {**given, "writes": writes}.items() if name != "operations"}
        error = await among_others(house, http(house).post(path, json.dumps(given).encode()))
        assert (error.http_status, error.code) == (400, "bad_request")
        assert error.field is not None
        assert error.field.endswith(expected)
        assert error.message.startswith(f"{error.field}: ")
        assert "as a string" not in error.message  # it would not be taken
        await demand_unharmed(house)

    house.run(main())


@ONLY_HTTP
@pytest.mark.rule("CO-33", "CO-3")
@pytest.mark.parametrize("path", ["write", "batch-write"])
def test_bytes_that_are_no_json_are_refused(house: House, path: str) -> None:
    async def main() -> None:
        members = json.dumps({"organization": house.name, **GOOD})
        twice = members.replace('"sequence": 1', '"sequence": 1, "sequence": 1')
        within = members.replace('"key": "a"', '"key": "a", "key": "b"')
        assert twice != members != within
        for body in (*BAD_BYTES, twice.encode(), within.encode(), members.encode("utf-16")):
            error = await refused(http(house).post(path, body))
            assert (error.http_status, error.code) == (400, "bad_request"), body[:50]
        error = await refused(http(house).post(path, members.encode(), **{"Content-Type": "text/plain"}))
        assert (error.http_status, error.field) == (415, "Content-Type")
        await demand_unharmed(house)

    house.run(main())


@ONLY_HTTP
@pytest.mark.rule("CO-1", "LG-14")
def test_json_says_a_key_as_a_uuid_or_in_digits_and_one_as_1_0(house: House) -> None:
    async def main() -> None:
        uuid = "0198f3c2-7d55-7c1e-9a61-2f6f0c1b5a10"
        wire = http(house)

        def body(text: str, sequence: str = "1") -> bytes:
            members = json.dumps({"organization": house.name, **GOOD, "idempotency_key": text, "unknown": {"x": [1]}})
            return members.replace('"sequence": 1', f'"sequence": {sequence}').encode()

        first = await wire.post("write", body(uuid))
        assert first["assigned_sequence"] == 1
        for text, sequence in ((uuid.upper(), "1.0"), (uuid.replace("-", ""), "1e0"), (uuid, "1")):
            assert await wire.post("write", body(text, sequence)) == first
        found = await house.ledger().get_transaction(first["committed_tx_id"])
        assert found["idempotency_key"] == bytes.fromhex(uuid.replace("-", ""))

    house.run(main())


# --- what only gRPC can get wrong -------------------------------------------------------------------------------------

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


def grpc_wire(house: House) -> GrpcWire:
    found: GrpcWire = house.door.wire("grpc")
    return found


@ONLY_GRPC
@pytest.mark.rule("CO-33")
@pytest.mark.parametrize("method", METHODS)
def test_bytes_that_are_no_message_are_an_invalid_argument(house: House, method: str) -> None:
    async def main() -> None:
        whole = message_of(pb.WriteRequest, write_of(house.name)).SerializeToString()
        for data in (b"\xff" * 20, b"\x0a\x05abc", b"\x0a\x02\xff\xfe", b"\x0a", whole[:-1], b"\x0b" * 500, b"\x00"):
            error = await refused(grpc_wire(house).raw(method, data))
            message = f"the request must be a oncelog.ledger.v1.{METHODS[method]}"
            assert (error.status, error.message, error.code) == ("INVALID_ARGUMENT", message, "bad_request"), data
        await demand_unharmed(house)

    house.run(main())


@pytest.mark.rule("CO-33")
def test_an_unknown_method_is_not_there(house: House) -> None:
    async def main() -> None:
        if house.door.kind == GRPC:
            for path in ("/oncelog.ledger.v1.Ledger/Erase", "/oncelog.ledger.v2.Ledger/Write", "/x/y"):
                with pytest.raises(grpc.aio.AioRpcError) as raised:
                    await grpc_wire(house).channel.unary_unary(path)(b"", timeout=WAIT_S)
                assert raised.value.code().name == "UNIMPLEMENTED"
        else:
            wire = http(house)
            for path in ("erase", "", "write/1"):
                assert (await refused(wire.post(path, b"{}"))).http_status == 404
            async with wire.session.get(f"{wire.url}/v1/ledger/write") as response:
                assert (response.status, response.headers["Allow"]) == (405, "POST")
            async with wire.session.post(f"{wire.url}/v1/ledger/entity", json={}) as response:
                assert response.status == 405
        await demand_unharmed(house)

    house.run(main())


@ONLY_GRPC
@pytest.mark.rule("CO-33")
def test_bytes_that_are_no_message_do_not_begin_a_stream(house: House) -> None:
    async def main() -> None:
        call = grpc_wire(house).channel.unary_stream("/oncelog.ledger.v1.Ledger/WatchBlocks")(b"\xff", timeout=WAIT_S)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call.read()
        assert raised.value.code().name == "INVALID_ARGUMENT"
        await demand_unharmed(house)

    house.run(main())


# --- reads ---------------------------------------------------------------------------------------------------------

READS: Final[dict[str, Json]] = {
    "GetClientState": {"client_id": "app"},
    "GetEntity": {"key": "a"},
    "ListEntities": {},
    "ListRelationships": {},
    "CheckRelationship": RELATED,
    "GetTransaction": {"tx_id": "0" * 16},
    "GetBlock": {"height": 1},
    "GetProof": {"tx_id": "0" * 16},
}


@pytest.mark.rule("CO-33", "CO-30")
@pytest.mark.parametrize("method", READS)
def test_a_read_of_a_bad_scope_is_told_by_its_field(house: House, method: str) -> None:
    async def main() -> None:
        for field in ("organization", "vault"):
            for name, message in BAD_NAMES:
                asked = {"organization": house.name, **READS[method], field: name}
                error = await refused(house.wire().call(method, asked))
                assert error.told == ("INVALID_ARGUMENT", f"{field}: {message}", field)
        error = await refused(house.wire().call(method, READS[method]))
        message = "organization: must have 1 to 80 characters, not 0"
        assert error.told == ("INVALID_ARGUMENT", message, "organization")

    house.run(main())


def token(value: Any) -> str:
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    return urlsafe_b64encode(data).decode()


BAD_TOKENS: Final = [
    "x",
    "!!!!",
    "é",
    "e30",
    token(b"\xff\xfe"),
    token(b"["),
    token({}),
    token("a"),
    token([]),
    token([1]),
    token([None]),
    token(["a", "b"]),
    token(["a", "b", "c", "d"]),
    token(["a", "b", 3]),
    token(
        b'["a"] '  # behind it there is more
        b"x"
    ),
]
TEXT_TOKENS: Final = [b'["%s"]', b'["%s","b","c"]', b'["a","%s","c"]', b'["a","b","%s"]']
"""Well-formed, but with a text in them that no store holds."""


@pytest.mark.rule("CO-33")
@pytest.mark.parametrize("method", ["ListEntities", "ListRelationships"])
def test_a_page_token_that_no_page_has_given_is_refused(house: House, method: str) -> None:
    async def main() -> None:
        await house.ledger().write(1, SET, relate("r"))
        for one in BAD_TOKENS:
            error = await refused(house.wire().call(method, {"organization": house.name, "page_token": one}))
            message = "page_token: must be one that a page has given"
            assert error.told == ("INVALID_ARGUMENT", message, "page_token"), one

    house.run(main())


@pytest.mark.rule("CO-33")
@pytest.mark.parametrize("method", ["ListEntities", "ListRelationships"])
@pytest.mark.parametrize("text", [b"\\u0000", b"\\ud800"], ids=["zero", "surrogate"])
def test_a_page_token_with_a_text_that_no_page_can_have_is_refused(house: House, method: str, text: bytes) -> None:
    async def main() -> None:
        await house.ledger().write(1, SET, relate("r"))
        for shape in TEXT_TOKENS[:1] if method == "ListEntities" else TEXT_TOKENS[1:]:
            asked = {"organization": house.name, "page_token": token(shape % text)}
            error = await refused(house.wire().call(method, asked))
            message = "page_token: must be one that a page has given"
            assert error.told == ("INVALID_ARGUMENT", message, "page_token"), shape

    house.run(main())


BAD_READS: Final[list[tuple[str, Json, str, str]]] = [
    ("GetClientState", {"client_id": "x" * 506}, "client_id", "must have at most 505 characters, not 506"),
    ("GetClientState", {"client_id": "\0"}, "client_id", "must not have U+0000"),
    ("GetEntity", {"key": ""}, "key", "must have 1 to 1024 characters, not 0"),
    ("GetEntity", {"key": LONG}, "key", "must have at most 1024 characters, not 1025"),
    ("GetEntity", {"key": "\0"}, "key", "must not have U+0000"),
    ("ListEntities", {"prefix": LONG}, "prefix", "must have at most 1024 characters, not 1025"),
    ("ListEntities", {"prefix": "a\0"}, "prefix", "must not have U+0000"),
    ("ListRelationships", {"resource": LONG}, "resource", "must have at most 1024 characters, not 1025"),
    ("ListRelationships", {"subject": "\0"}, "subject", "must not have U+0000"),
    ("ListRelationships", {"relation": "viewer"}, "relation", "needs a resource or a subject beside it"),
    ("CheckRelationship", {**RELATED, "relation": ""}, "relation", "must have 1 to 1024 characters, not 0"),
    ("CheckRelationship", {**RELATED, "subject": LONG}, "subject", "must have at most 1024 characters, not 1025"),
    ("CheckRelationship", {**RELATED, "resource": "\0"}, "resource", "must not have U+0000"),
    ("GetBlock", {"height": 0}, "height", "must be from 1 on, not 0"),
    *[
        (method, {"tx_id": tx_id}, "tx_id", "must have 16 hexadecimal digits, in lower case")
        for method in ("GetTransaction", "GetProof")
        for tx_id in ("", "0", "0" * 15, "0" * 17, "A" * 16, "g" * 16, "é" * 16, "-000000000000001")
    ],
]


@pytest.mark.rule("CO-33")
@pytest.mark.parametrize(
    ("method", "members", "field", "message"), BAD_READS, ids=[f"{n}" for n in range(len(BAD_READS))]
)
def test_a_bad_read_is_told_by_its_field(house: House, method: str, members: Json, field: str, message: str) -> None:
    async def main() -> None:
        error = await refused(house.wire().call(method, {"organization": house.name, **members}))
        assert error.told == ("INVALID_ARGUMENT", f"{field}: {message}", field)
        assert await house.ledger().last_sequence() == 0

    house.run(main())


@pytest.mark.rule("CO-33")
def test_a_height_that_the_lane_has_not_cannot_be_followed_from(house: House) -> None:
    async def main() -> None:
        ledger = house.ledger()
        answer = await ledger.write(1, SET)
        newest = answer["block_height"]
        for height in (newest + 1, 2**53 - 1, *([2**64 - 1] if house.door.kind == GRPC else [])):

            async def begun(after: int = height) -> Any:
                watching = await ledger.watch_blocks(after)
                return await watching.next()

            error = await refused(begun())
            message = (
                f"after_height: must be from 0 to {newest}, the newest of the scope's lane, and of this history; "
                "read again from a height that you know"
            )
            assert error.told == ("FAILED_PRECONDITION", message, "after_height")

    house.run(main())


@ONLY_HTTP
@pytest.mark.rule("CO-33")
def test_a_query_with_what_has_no_meaning_is_refused(house: House) -> None:
    async def main() -> None:
        wire, scope = http(house), f"organization={house.name}"
        for path, query, field in (
            ("entity", f"{scope}&key=a&actor=x", "actor"),
            ("entity", f"{scope}&key=a&key=b", "key"),
            ("entity", f"{scope}&{scope}&key=a", "organization"),
            ("entities", f"{scope}&page_size=-1", "page_size"),
            ("entities", f"{scope}&page_size=x", "page_size"),
            ("entities", f"{scope}&page_size=99999999999999999999", "page_size"),
            ("block", f"{scope}&height=1.0", "height"),
            ("block", f"{scope}&height=", "height"),
            ("blocks/stream", f"{scope}&after_height=-1", "after_height"),
            ("blocks/stream", f"{scope}&after_height=٣", "after_height"),
            ("blocks/stream", f"{scope}&client_id=x", "client_id"),
        ):
            error = await refused(wire.get(path, query))
            assert (error.http_status, error.field) == (400, field)
        async with wire.session.get(f"{wire.url}/v1/ledger/entity?{scope}&key=%FF") as response:
            assert response.status == 400

    house.run(main())
