"""Clients of the Ledger API over gRPC and HTTP with the same interface and the same form of answers.

Requests have the members of the JSON form, except that values, keys and hashes are bytes. A field that is missing in
a gRPC answer is a missing member. A failed call raises CallError.
"""

import asyncio
import json
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any, Final, Protocol

import aiohttp
import grpc
import grpc.aio
from google.protobuf import json_format
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from deadlines import WAIT_S, soon
from oncelog.ledger.v1 import ledger_pb2 as pb
from oncelog.ledger.v1.ledger_pb2_grpc import LedgerStub
from server.running_server import EventStream

Json = dict[str, Any]

GRPC: Final = "grpc"
HTTP: Final = "http"
WIRES: Final = (GRPC, HTTP)
STATUS_OF: Final = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    409: "FAILED_PRECONDITION",
    413: "INVALID_ARGUMENT",
    415: "INVALID_ARGUMENT",
    429: "RESOURCE_EXHAUSTED",
    500: "UNAVAILABLE",
    503: "UNAVAILABLE",
    507: "RESOURCE_EXHAUSTED",
}
_CODES: Final = {
    "bad_request": "INVALID_ARGUMENT",
    "auth_failed": "UNAUTHENTICATED",
    "forbidden": "PERMISSION_DENIED",
    "not_found": "NOT_FOUND",
    "history_changed": "FAILED_PRECONDITION",
    "rate_limited": "RESOURCE_EXHAUSTED",
    "server_busy": "UNAVAILABLE",
    "server_error": "UNAVAILABLE",
}
_HEXADECIMAL: Final = frozenset(
    [
        "idempotency_key",
        "last_idempotency_key",
        "last_request_hash",
        "request_hash",
        "salt",
        "previous_hash",
        "merkle_root",
        "hash",
        "path",
        "fingerprint",
        "body_hash",
    ]
)
_BASE64: Final = frozenset(["value", "current_value", "value_equals", "body"])


class CallError(Exception):
    """Error of a failed call."""

    def __init__(self, status: str, message: str, field: str | None, code: str, retry_after_ms: int | None) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status
        self.message = message
        self.field = field
        self.code = code
        """The API's error code, or an empty string if gRPC itself failed the call."""
        self.retry_after_ms = retry_after_ms
        self.details: Mapping[str, Any] = {}
        """Other details of the error, as strings."""
        self.http_status = 0
        self.retry_after_s = ""
        """The `Retry-After` header of an HTTP answer."""

    @property
    def summary(self) -> tuple[str, str, str | None]:
        """The status, message and field."""
        return self.status, self.message, self.field


class BlockStream(Protocol):
    """An open block stream."""

    async def next(self) -> Json | None:
        """Return the next block, or None if the server closed the stream without an error. Raises CallError."""

    async def close(self) -> None:
        """Close the stream."""


class Wire(Protocol):
    """A client that sends a credential with every call."""

    kind: str

    async def call(self, name: str, members: Mapping[str, Any]) -> Json:
        """Call the operation by its gRPC method name. Raises CallError."""

    async def watch(self, members: Mapping[str, Any], last_event_id: str | None = None) -> BlockStream:
        """Start a block stream."""

    async def close(self) -> None:
        """Close the connection."""


# --- operations ------------------------------------------------------------------------------------------


def put(
    key: str, value: bytes = b"", *, expires_at_ms: int | None = None, condition: Mapping[str, Any] | None = None
) -> Json:
    members: Json = {"key": key, "value": value}
    if expires_at_ms is not None:
        members["expires_at_ms"] = expires_at_ms
    if condition is not None:
        members["condition"] = dict(condition)
    return {"set_entity": members}


def remove(key: str) -> Json:
    return {"delete_entity": {"key": key}}


def relate(resource: str, relation: str = "viewer", subject: str = "user:1") -> Json:
    return {"create_relationship": {"resource": resource, "relation": relation, "subject": subject}}


def unrelate(resource: str, relation: str = "viewer", subject: str = "user:1") -> Json:
    return {"delete_relationship": {"resource": resource, "relation": relation, "subject": subject}}


# --- gRPC ------------------------------------------------------------------------------------------------


class GrpcWire:
    kind = GRPC

    def __init__(self, channel: Any, credential: str | None = None) -> None:
        self.channel = channel
        self.stub: Any = LedgerStub(channel)
        self.metadata = () if credential is None else (("authorization", f"Bearer {credential}"),)

    async def call(self, name: str, members: Mapping[str, Any]) -> Json:
        request = message_of(_REQUESTS[name], members)
        method = getattr(self.stub, name)
        try:
            answer = await method(request, metadata=self.metadata, timeout=WAIT_S)
        except grpc.aio.AioRpcError as error:
            raise rpc_error(error) from None
        return normalize(members_of(answer))

    async def raw(self, name: str, data: bytes) -> bytes:
        """Send bytes that may not be a valid message."""
        method = self.channel.unary_unary(f"/oncelog.ledger.v1.Ledger/{name}")
        try:
            answer: bytes = await method(data, metadata=self.metadata, timeout=WAIT_S)
        except grpc.aio.AioRpcError as error:
            raise rpc_error(error) from None
        return answer

    async def watch(self, members: Mapping[str, Any], last_event_id: str | None = None) -> "GrpcBlockStream":
        given = dict(members) if last_event_id is None else {**members, "after_height": int(last_event_id)}
        request = message_of(pb.WatchBlocksRequest, given)
        return GrpcBlockStream(self.stub.WatchBlocks(request, metadata=self.metadata))

    async def close(self) -> None:
        await self.channel.close()


class GrpcBlockStream:
    def __init__(self, call: Any) -> None:
        self._call = call

    async def next(self) -> Json | None:
        try:
            block = await soon(self._call.read())
        except grpc.aio.AioRpcError as error:
            raise rpc_error(error) from None
        if block is grpc.aio.EOF:
            return None
        return normalize(members_of(block))

    async def close(self) -> None:
        self._call.cancel()
        await asyncio.wait([asyncio.ensure_future(self._call.code())])


_REQUESTS: Final[Mapping[str, Any]] = {
    "Write": pb.WriteRequest,
    "BatchWrite": pb.BatchWriteRequest,
    "GetClientState": pb.GetClientStateRequest,
    "GetEntity": pb.GetEntityRequest,
    "ListEntities": pb.ListEntitiesRequest,
    "ListRelationships": pb.ListRelationshipsRequest,
    "CheckRelationship": pb.CheckRelationshipRequest,
    "GetTransaction": pb.GetTransactionRequest,
    "GetBlock": pb.GetBlockRequest,
    "GetProof": pb.GetProofRequest,
}


def message_of(kind: Any, members: Mapping[str, Any]) -> Any:
    """Build a message. Members that the message type lacks are dropped."""
    known = {name: value for name, value in members.items() if name in kind.DESCRIPTOR.fields_by_name}
    return json_format.ParseDict(_encode_bytes(known, lambda _, value: b64encode(value).decode()), kind())


def members_of(message: Message) -> Json:
    """Return the fields of a message without missing optional ones."""
    found: Json = {}
    for field in message.DESCRIPTOR.fields:
        if field.has_presence and not message.HasField(field.name):
            continue
        value = getattr(message, field.name)
        if field.is_repeated:
            found[field.name] = [members_of(one) if isinstance(one, Message) else one for one in value]
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            found[field.name] = members_of(value)
        elif field.type == FieldDescriptor.TYPE_ENUM:
            assert field.enum_type is not None
            name = field.enum_type.values_by_number[value].name
            found |= {field.name: name.removeprefix("WRITE_ERROR_CODE_"), "number": value}
        else:
            found[field.name] = value
    return found


def rpc_error(error: grpc.aio.AioRpcError) -> CallError:
    trailing: dict[str, Any] = dict(error.trailing_metadata() or ())
    retry = trailing.get("retry-after-ms")
    found = CallError(
        error.code().name,
        error.details() or "",
        trailing.get("field"),
        trailing.get("oncelog-code", ""),
        None if retry is None else int(retry),
    )
    found.details = {name.replace("-", "_"): str(value) for name, value in trailing.items()}
    return found


# --- HTTP ------------------------------------------------------------------------------------------------

_PATHS: Final = {
    "Write": "write",
    "BatchWrite": "batch-write",
    "GetClientState": "client-state",
    "GetEntity": "entity",
    "ListEntities": "entities",
    "ListRelationships": "relationships",
    "CheckRelationship": "relationship",
    "GetTransaction": "transaction",
    "GetBlock": "block",
    "GetProof": "proof",
}
_POSTED: Final = ("Write", "BatchWrite")


class HttpWire:
    kind = HTTP

    def __init__(self, session: aiohttp.ClientSession, url: str, credential: str | None = None) -> None:
        self.session = session
        self.url = url
        self.headers = {} if credential is None else {"Authorization": f"Bearer {credential}"}

    async def call(self, name: str, members: Mapping[str, Any]) -> Json:
        if name in _POSTED:
            body = json.dumps(_encode_bytes(members, _json_bytes)).encode()
            return await self.post(_PATHS[name], body)
        query = {name: str(value) for name, value in members.items()}
        return await self.get(_PATHS[name], query)

    async def post(self, path: str, body: bytes, **headers: str) -> Json:
        """Send bytes that may not be JSON."""
        sent = {**self.headers, "Content-Type": "application/json", **headers}
        async with (
            asyncio.timeout(WAIT_S),
            self.session.post(f"{self.url}/v1/ledger/{path}", data=BytesIO(body), headers=sent) as response,
        ):
            return await _answer(response)

    async def get(self, path: str, query: Mapping[str, str] | str) -> Json:
        async with (
            asyncio.timeout(WAIT_S),
            self.session.get(f"{self.url}/v1/ledger/{path}", params=query, headers=self.headers) as response,
        ):
            return await _answer(response)

    async def watch(self, members: Mapping[str, Any], last_event_id: str | None = None) -> "HttpBlockStream":
        headers = dict(self.headers) if last_event_id is None else {**self.headers, "Last-Event-ID": last_event_id}
        query = {name: str(value) for name, value in members.items()}
        response = await soon(self.session.get(f"{self.url}/v1/ledger/blocks/stream", params=query, headers=headers))
        if response.status != 200:
            async with response:
                await _answer(response)
        return HttpBlockStream(response)

    async def close(self) -> None:
        await self.session.close()


class HttpBlockStream:
    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._stream = EventStream(response)

    async def next(self) -> Json | None:
        message = await self._stream.next()
        if message is None:
            return None
        if message.kind == "error":
            raise _error(_CODES[message.json["code"]], message.json)
        block = normalize(_decode_bytes(message.json))
        assert message.id == str(block["header"]["height"])
        return block

    async def close(self) -> None:
        self._stream.close()


async def _answer(response: aiohttp.ClientResponse) -> Json:
    body = await response.read()
    is_ok = response.status == 200
    assert response.content_type == ("application/json" if is_ok else "application/problem+json"), body
    given = json.loads(body)
    if is_ok and given.pop("already_committed", False):
        return normalize(
            _decode_bytes({"error": {"code": "ALREADY_COMMITTED", "number": 5, "message": "as a receipt", **given}})
        )
    if is_ok:
        return normalize(_decode_bytes(given))
    assert given["status"] == response.status
    if "number" in given:  # gRPC returns refused writes as data, not as an error
        assert {"code": given["code"], "message": given["detail"]}.items() <= given["error"].items()
        return normalize(_decode_bytes({"error": given["error"]}))
    error = _error(STATUS_OF[response.status], given["error"])
    error.http_status = response.status
    error.retry_after_s = response.headers.get("Retry-After", "")
    raise error


def _error(status: str, error: Mapping[str, Any]) -> CallError:
    details = error["details"]
    found = CallError(status, error["message"], details.get("field"), error["code"], details.get("retry_after_ms"))
    found.details = {name: str(value) for name, value in details.items()}
    return found


def _json_bytes(name: str, value: bytes) -> str:
    return value.hex() if name in _HEXADECIMAL else b64encode(value).decode()


def _encode_bytes(value: Any, spell: Any, name: str = "") -> Any:
    """Return the value with its bytes encoded as text."""
    if isinstance(value, bytes):
        return spell(name, value)
    if isinstance(value, Mapping):
        return {member: _encode_bytes(one, spell, member) for member, one in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_encode_bytes(one, spell, name) for one in value]
    return value


def _decode_bytes(value: Any, name: str = "") -> Any:
    """Return the value with its encoded texts decoded to bytes."""
    if isinstance(value, dict):
        found = {member: _decode_bytes(one, member) for member, one in value.items()}
        if name == "record":  # in a proof, `key` is an idempotency key, not an entity key
            found["key"] = bytes.fromhex(found["key"])
        return found
    if isinstance(value, list):
        return [_decode_bytes(one, name) for one in value]
    if isinstance(value, str) and name in _HEXADECIMAL:
        return bytes.fromhex(value)
    if isinstance(value, str) and name in _BASE64:
        return b64decode(value, validate=True)
    return value


def normalize(answer: Json) -> Json:
    """Convert equivalent answers over HTTP and gRPC to the same form."""
    if "success" in answer:
        return dict(answer["success"])
    error = answer.get("error")
    if isinstance(error, dict):
        if not error.get("key"):
            error.pop("key", None)
        if not error.get("erased"):
            error.pop("erased", None)
    for entity in (answer.get("entity"), *answer.get("entities", ())):
        if isinstance(entity, dict) and not entity.get("erased"):
            entity.pop("erased", None)
    for name in ("has_more", "next_after"):  # the name that HTTP uses for all lists
        answer.pop(name, None)
    # JSON has null where gRPC omits the field.
    return {name: value for name, value in answer.items() if value is not None}


# --- the calls -------------------------------------------------------------------------------------------


class Ledger:
    """A client of one scope, over the given wire."""

    def __init__(self, wire: Wire, organization: str, vault: str = "", client_id: str = "") -> None:
        self.wire = wire
        self.organization = organization
        self.vault = vault
        self.client_id = client_id

    def of(self, **changed: str) -> "Ledger":
        """Return a client with another organization, vault or client id."""
        here = {"organization": self.organization, "vault": self.vault, "client_id": self.client_id}
        return Ledger(self.wire, **{**here, **changed})

    def through(self, wire: Wire) -> "Ledger":
        """Return the same client over another wire."""
        return Ledger(wire, self.organization, self.vault, self.client_id)

    def _scoped(self, **members: Any) -> Json:
        scope = {"organization": self.organization, "vault": self.vault}
        return {name: value for name, value in {**scope, **members}.items() if value != ""}

    async def write(self, sequence: int, *operations: Json, key: bytes = b"", **members: Any) -> Json:
        """Send a write and return the answer: a success, or an object with an `error`."""
        named = {"client_id": self.client_id, "idempotency_key": key}
        asked = self._scoped(**{**named, "sequence": sequence, "operations": list(operations), **members})
        return await self.wire.call("Write", {name: value for name, value in asked.items() if value != b""})

    async def batch_write(self, sequence: int, *writes: Any, key: bytes = b"", **members: Any) -> Json:
        """Send a batch. Each write is a list of operations, or an object with all members."""
        listed = [one if isinstance(one, Mapping) else {"operations": one} for one in writes]
        named = {"client_id": self.client_id, "idempotency_key": key}
        asked = self._scoped(**{**named, "sequence": sequence, "writes": listed, **members})
        return await self.wire.call("BatchWrite", {name: value for name, value in asked.items() if value != b""})

    async def get_client_state(self, **members: Any) -> Json:
        return await self.wire.call("GetClientState", self._scoped(client_id=self.client_id, **members))

    async def last_sequence(self) -> int:
        last: int = (await self.get_client_state())["last_committed_sequence"]
        return last

    async def get_entity(self, key: str) -> Json | None:
        return (await self.wire.call("GetEntity", self._scoped(key=key))).get("entity")

    async def value(self, key: str) -> bytes | None:
        found = await self.get_entity(key)
        return None if found is None else found["value"]

    async def list_entities(self, **members: Any) -> Json:
        return await self.wire.call("ListEntities", self._scoped(**members))

    async def list_relationships(self, **members: Any) -> Json:
        return await self.wire.call("ListRelationships", self._scoped(**members))

    async def check_relationship(self, resource: str, relation: str = "viewer", subject: str = "user:1") -> Json:
        named = {"resource": resource, "relation": relation, "subject": subject}
        return await self.wire.call("CheckRelationship", self._scoped(**named))

    async def get_transaction(self, tx_id: str) -> Json:
        return await self.wire.call("GetTransaction", self._scoped(tx_id=tx_id))

    async def get_block(self, height: int) -> Json:
        return await self.wire.call("GetBlock", self._scoped(height=height))

    async def get_proof(self, tx_id: str) -> Json:
        return await self.wire.call("GetProof", self._scoped(tx_id=tx_id))

    async def watch_blocks(self, after_height: int = 0, last_event_id: str | None = None) -> BlockStream:
        return await self.wire.watch(self._scoped(after_height=after_height), last_event_id)

    async def transaction_ids(self) -> list[str]:
        """Return the ids of all transactions of the scope in block order."""
        found: list[str] = []
        watching = await self.watch_blocks()
        newest = await self._newest()
        height = 0
        while height < newest:
            block = await watching.next()
            assert block is not None
            height = block["header"]["height"]
            found += block["tx_ids"]
        await watching.close()
        return found

    async def _newest(self) -> int:
        """Return the newest height of the lane, taken from the error for a height that is too high."""

        async def open_stream() -> Json | None:
            watching = await self.watch_blocks(after_height=2**52)
            return await watching.next()

        error = await expect_refusal(open_stream())
        assert error.field == "after_height"
        return int(error.message.partition(" to ")[2].partition(",")[0])


def expect_success(answer: Json) -> Json:
    """Check that the answer is a success and return it."""
    assert "error" not in answer, answer
    assert answer.keys() == {
        "committed_tx_id",
        "block_height",
        "block_header",
        "transaction_proof",
        "assigned_sequence",
        "version",
        "timestamp_ms",
        "actor",
    }
    return answer


def expect_failure(answer: Json) -> Json:
    """Check that the answer has an error and return the error."""
    assert answer.keys() == {"error"}, answer
    error: Json = answer["error"]
    assert error["message"]
    return error


def code(answer: Json) -> str:
    """Return the error code of an answer, or OK."""
    return "OK" if "error" not in answer else str(expect_failure(answer)["code"])


async def expect_refusal(call: Any) -> CallError:
    """Await a call, assert that it fails, and return its error."""
    try:
        answer = await call
    except CallError as error:
        return error
    raise AssertionError(f"the call was not refused but answered with {answer}")


async def read_blocks(watching: BlockStream, count: int) -> list[Json]:
    """Return the next `count` blocks."""
    found = []
    for _ in range(count):
        block = await watching.next()
        assert block is not None
        found.append(block)
    return found
