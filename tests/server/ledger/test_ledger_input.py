"""Invalid fields in Ledger API calls: both wires report the same field and message, and no data is written."""

import asyncio
import json
from base64 import urlsafe_b64encode
from pathlib import Path
from typing import Any, Final

import pytest

from databases import BOTH_STORES
from deadlines import soon, until
from server.ledger.ledger_refusals import (
    ONLY_HTTP,
    RELATED,
    SET,
    check_nothing_written,
    http_wire,
    send_among_valid_writes,
    write_of,
)
from server.ledger.ledger_servers import SharedServer, key, run_server
from server.ledger.ledger_transports import GRPC, Json, code, expect_refusal, put, relate, remove

pytestmark = BOTH_STORES

ONE_OPERATION: Final = "must have exactly one of set_entity, delete_entity, create_relationship and delete_relationship"
ONE_CONDITION: Final = "must have exactly one of must_not_exist, must_exist, version_is and value_equals"
KEY_LENGTH: Final = "must have 1 to 1024 characters, not"
LONG: Final = "x" * 1025
VALUE_BYTES_MAX: Final = 2**20
BIG: Final = bytes(VALUE_BYTES_MAX + 1)
E_ACUTE: Final = "e\u0301"
"""Two code points that NFC combines into one."""


def conditioned(condition: Json, **members: Any) -> list[Json]:
    return [put("a", b"1", condition=condition, **members)]


BAD_NAMES: Final = [
    ("x" * 81, "must have at most 80 characters, not 81"),
    ("a\0b", "must not contain U+0000"),
    (E_ACUTE, "must be in NFC"),
    ("𝄞" * 81, "must have at most 80 characters, not 81"),
]
BAD_WRITES: Final[list[tuple[Json, str, str]]] = [
    ({"organization": ""}, "organization", "must have 1 to 80 characters, not 0"),
    *[({"organization": name}, "organization", message) for name, message in BAD_NAMES],
    *[({"vault": name}, "vault", message) for name, message in BAD_NAMES],
    ({"client_id": "x" * 506}, "client_id", "must have at most 505 characters, not 506"),
    ({"client_id": "a\0"}, "client_id", "must not contain U+0000"),
    ({"sequence": 0}, "sequence", "must be from 1 to 18446744073709551615, not 0"),
    ({"idempotency_key": b"k" * 15}, "idempotency_key", "must have 16 bytes, not 15"),
    ({"idempotency_key": b"k" * 17}, "idempotency_key", "must have 16 bytes, not 17"),
    ({"idempotency_key": bytes(16)}, "idempotency_key", "must not be all zero"),
    ({"operations": []}, "operations", "must not be empty"),
    ({"operations": [{}]}, "operations[0]", ONE_OPERATION),
    ({"operations": [SET, SET, {}]}, "operations[2]", ONE_OPERATION),
    ({"operations": [put("")]}, "operations[0].set_entity.key", f"{KEY_LENGTH} 0"),
    ({"operations": [SET, put(LONG)]}, "operations[1].set_entity.key", f"{KEY_LENGTH} 1025"),
    ({"operations": [put("a\0")]}, "operations[0].set_entity.key", "must not contain U+0000"),
    ({"operations": [remove("")]}, "operations[0].delete_entity.key", f"{KEY_LENGTH} 0"),
    ({"operations": [remove(LONG)]}, "operations[0].delete_entity.key", f"{KEY_LENGTH} 1025"),
    ({"operations": [remove("\0")]}, "operations[0].delete_entity.key", "must not contain U+0000"),
    *[
        ({"operations": [{kind: {**relate("r", "v", "s")["create_relationship"], part: bad}}]}, path, message)
        for kind in ("create_relationship", "delete_relationship")
        for part in ("resource", "relation", "subject")
        for path in (f"operations[0].{kind}.{part}",)
        for bad, message in (("", f"{KEY_LENGTH} 0"), (LONG, f"{KEY_LENGTH} 1025"), ("\0", "must not contain U+0000"))
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
"""Numbers that JSON cannot represent. Over HTTP, the message comes from the JSON decoder."""


# --- writes -----------------------------------------------------------------------------------------------------


@pytest.mark.rule("CO-33", "CO-30", "LG-2", "LG-14")
@pytest.mark.parametrize(("changed", "field", "message"), BAD_WRITES, ids=[f"{n}" for n in range(len(BAD_WRITES))])
async def test_write_with_an_invalid_field_is_refused_with_its_path(
    shared_server: SharedServer, changed: Json, field: str, message: str
) -> None:
    error = await send_among_valid_writes(
        shared_server, shared_server.wire().call("Write", write_of(shared_server.name, **changed))
    )
    assert error.summary == ("INVALID_ARGUMENT", f"{field}: {message}", field)
    assert error.code == "bad_request"
    assert error.http_status in (0, 400)
    await check_nothing_written(shared_server)


@pytest.mark.rule("CO-33", "LG-2")
@pytest.mark.parametrize(("changed", "field"), BAD_NUMBERS, ids=[f"{n}" for n in range(len(BAD_NUMBERS))])
async def test_number_out_of_range_is_refused_with_its_path(
    shared_server: SharedServer, changed: Json, field: str
) -> None:
    error = await send_among_valid_writes(
        shared_server, shared_server.wire().call("Write", write_of(shared_server.name, **changed))
    )
    assert (error.status, error.field) == ("INVALID_ARGUMENT", field)
    assert error.message.startswith(f"{field}: ")
    await check_nothing_written(shared_server)


@pytest.mark.rule("CO-33", "LG-17")
async def test_invalid_operation_in_a_batch_is_refused_with_its_path(shared_server: SharedServer) -> None:
    ledger = shared_server.ledger()
    error = await send_among_valid_writes(shared_server, ledger.batch_write(1, [SET], [put("a", BIG)], key=key(1)))
    assert error.summary == (
        "INVALID_ARGUMENT",
        f"operations[1].set_entity.value: must have at most {VALUE_BYTES_MAX} bytes, not {VALUE_BYTES_MAX + 1}",
        "operations[1].set_entity.value",
    )
    error = await expect_refusal(ledger.batch_write(1, [SET], key=b"k" * 15))
    assert (error.status, error.field) == ("INVALID_ARGUMENT", "idempotency_key")
    await check_nothing_written(shared_server)


@pytest.mark.rule("CO-30")
async def test_values_names_and_keys_up_to_their_limits_are_accepted(shared_server: SharedServer) -> None:
    long = "é" * 80
    ledger = shared_server.ledger(client_id="c" * 505).of(organization=shared_server.name + "o" * 60, vault=long)
    operations = [put("k" * 1024, bytes(VALUE_BYTES_MAX)), relate("𝄞" * 1024, "v" * 1024, "s" * 1024)]
    assert code(await ledger.write(1, *operations, key=key(1))) == "OK"
    assert await ledger.value("k" * 1024) == bytes(VALUE_BYTES_MAX)
    assert (await ledger.check_relationship("𝄞" * 1024, "v" * 1024, "s" * 1024))["exists"]
    # Names of the maximum length after escaping.
    full = ledger.of(organization="%/" * 40, vault=shared_server.name + "%" * 60)
    assert code(await full.write(1, SET, key=key(1))) == "OK"
    assert await full.value("a") == b"1"


@pytest.mark.rule("CO-30")
async def test_maximum_value_length_is_configurable(tmp_path: Path, wire: str) -> None:
    async with run_server(tmp_path, wire, entity_value_bytes_max=3) as server:
        ledger = server.ledger(client_id="app")
        error = await expect_refusal(ledger.write(1, put("a", b"1234"), key=key(1)))
        field = "operations[0].set_entity.value"
        assert error.summary == ("INVALID_ARGUMENT", f"{field}: must have at most 3 bytes, not 4", field)
        assert code(await ledger.write(1, put("a", b"123"), key=key(1))) == "OK"


@pytest.mark.rule("CO-30", "CO-33")
async def test_request_that_is_too_large_is_refused_and_the_next_accepted(tmp_path: Path, wire: str) -> None:
    async with run_server(tmp_path, wire, frame_bytes_max=10_000) as server:
        ledger = server.ledger(client_id="app")
        error = await expect_refusal(ledger.write(1, put("a", bytes(20_000)), key=key(1)))
        if wire == GRPC:  # refused by gRPC itself
            assert error.status == "RESOURCE_EXHAUSTED"
            assert "10000" in error.message
        else:
            assert (error.http_status, error.field) == (413, "body")
        assert await ledger.last_sequence() == 0
        assert code(await ledger.write(1, put("a", bytes(5_000)), key=key(1))) == "OK"


async def test_log_limit_below_the_api_limit_is_reported(tmp_path: Path, wire: str) -> None:
    async with run_server(tmp_path, wire, body_bytes_max=100) as server:
        ledger = server.ledger(client_id="app")
        error = await expect_refusal(ledger.write(1, put("a", bytes(200)), key=key(1)))
        assert (error.status, error.field) == ("INVALID_ARGUMENT", "operations")
        assert code(await ledger.write(1, put("a", bytes(9)), key=key(1))) == "OK"


@pytest.mark.rule("CO-33", "LG-3", "LG-5", "LG-12", "LG-13")
async def test_refused_write_does_not_affect_others_in_its_group_commit(
    tmp_path: Path, wire: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with run_server(tmp_path, wire) as server:
        ledgers = [server.ledger(client_id=f"client-{number}") for number in range(9)]
        for ledger in ledgers:
            assert code(await ledger.write(1, put(ledger.client_id, b"1"), key=key(1))) == "OK"
        gate = server.served.hold_commits(monkeypatch)
        plug = asyncio.ensure_future(server.ledger("plug", client_id="plug").write(1, SET))
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
        await until(lambda: server.log.queue_length == len(calls) + 1)
        gate.open()
        answers = await gathered
        assert code(await plug) == "OK"
        assert [code(one) for one in answers] == ["OK", *[expected for _, expected in refusals], *["OK"] * 4]
        header = answers[0]["block_header"]
        assert (header["count"], [one["block_header"] for one in answers[5:]]) == (5, [header] * 4)
        assert [await one.last_sequence() for one in ledgers] == [2, 1, 1, 1, 1, 2, 2, 2, 2]


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
async def test_read_of_an_invalid_scope_is_refused_with_its_path(shared_server: SharedServer, method: str) -> None:
    for field in ("organization", "vault"):
        for name, message in BAD_NAMES:
            asked = {"organization": shared_server.name, **READS[method], field: name}
            error = await expect_refusal(shared_server.wire().call(method, asked))
            assert error.summary == ("INVALID_ARGUMENT", f"{field}: {message}", field)
    error = await expect_refusal(shared_server.wire().call(method, READS[method]))
    message = "organization: must have 1 to 80 characters, not 0"
    assert error.summary == ("INVALID_ARGUMENT", message, "organization")


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
        b'["a"] '  # trailing bytes
        b"x"
    ),
]
TEXT_TOKENS: Final = [b'["%s"]', b'["%s","b","c"]', b'["a","%s","c"]', b'["a","b","%s"]']
"""Well-formed tokens with texts that no store can hold."""


@pytest.mark.rule("CO-33")
@pytest.mark.parametrize("method", ["ListEntities", "ListRelationships"])
async def test_unknown_page_token_is_refused(shared_server: SharedServer, method: str) -> None:
    await shared_server.ledger().write(1, SET, relate("r"))
    for one in BAD_TOKENS:
        error = await expect_refusal(
            shared_server.wire().call(method, {"organization": shared_server.name, "page_token": one})
        )
        message = "page_token: must be a token from a previous page"
        assert error.summary == ("INVALID_ARGUMENT", message, "page_token"), one


@pytest.mark.rule("CO-33")
@pytest.mark.parametrize("method", ["ListEntities", "ListRelationships"])
@pytest.mark.parametrize("text", [b"\\u0000", b"\\ud800"], ids=["zero", "surrogate"])
async def test_page_token_with_an_unstorable_text_is_refused(
    shared_server: SharedServer, method: str, text: bytes
) -> None:
    await shared_server.ledger().write(1, SET, relate("r"))
    for shape in TEXT_TOKENS[:1] if method == "ListEntities" else TEXT_TOKENS[1:]:
        asked = {"organization": shared_server.name, "page_token": token(shape % text)}
        error = await expect_refusal(shared_server.wire().call(method, asked))
        message = "page_token: must be a token from a previous page"
        assert error.summary == ("INVALID_ARGUMENT", message, "page_token"), shape


BAD_READS: Final[list[tuple[str, Json, str, str]]] = [
    ("GetClientState", {"client_id": "x" * 506}, "client_id", "must have at most 505 characters, not 506"),
    ("GetClientState", {"client_id": "\0"}, "client_id", "must not contain U+0000"),
    ("GetEntity", {"key": ""}, "key", "must have 1 to 1024 characters, not 0"),
    ("GetEntity", {"key": LONG}, "key", "must have at most 1024 characters, not 1025"),
    ("GetEntity", {"key": "\0"}, "key", "must not contain U+0000"),
    ("ListEntities", {"prefix": LONG}, "prefix", "must have at most 1024 characters, not 1025"),
    ("ListEntities", {"prefix": "a\0"}, "prefix", "must not contain U+0000"),
    ("ListRelationships", {"resource": LONG}, "resource", "must have at most 1024 characters, not 1025"),
    ("ListRelationships", {"subject": "\0"}, "subject", "must not contain U+0000"),
    ("ListRelationships", {"relation": "viewer"}, "relation", "requires a resource or a subject"),
    ("CheckRelationship", {**RELATED, "relation": ""}, "relation", "must have 1 to 1024 characters, not 0"),
    ("CheckRelationship", {**RELATED, "subject": LONG}, "subject", "must have at most 1024 characters, not 1025"),
    ("CheckRelationship", {**RELATED, "resource": "\0"}, "resource", "must not contain U+0000"),
    ("GetBlock", {"height": 0}, "height", "must be at least 1, not 0"),
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
async def test_read_with_an_invalid_field_is_refused_with_its_path(
    shared_server: SharedServer, method: str, members: Json, field: str, message: str
) -> None:
    error = await expect_refusal(shared_server.wire().call(method, {"organization": shared_server.name, **members}))
    assert error.summary == ("INVALID_ARGUMENT", f"{field}: {message}", field)
    assert await shared_server.ledger().last_sequence() == 0


@pytest.mark.rule("CO-33")
async def test_block_stream_from_a_height_beyond_the_newest_is_refused(shared_server: SharedServer) -> None:
    ledger = shared_server.ledger()
    answer = await ledger.write(1, SET)
    newest = answer["block_height"]
    for height in (newest + 1, 2**53 - 1, *([2**64 - 1] if shared_server.server.kind == GRPC else [])):

        async def open_stream(after: int = height) -> Any:
            watching = await ledger.watch_blocks(after)
            return await watching.next()

        error = await expect_refusal(open_stream())
        message = (
            f"after_height: must be from 0 to {newest}, the newest height of the scope's lane, and belong to the log's "
            "epoch; read again from a known height"
        )
        assert error.summary == ("FAILED_PRECONDITION", message, "after_height")


@ONLY_HTTP
@pytest.mark.rule("CO-33")
async def test_query_with_invalid_parameters_is_refused(shared_server: SharedServer) -> None:
    wire, scope = http_wire(shared_server), f"organization={shared_server.name}"
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
        error = await expect_refusal(wire.get(path, query))
        assert (error.http_status, error.field) == (400, field)
    async with wire.session.get(f"{wire.url}/v1/ledger/entity?{scope}&key=%FF") as response:
        assert response.status == 400
