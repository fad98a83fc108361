"""Write the corpus: valid inputs of every target, from which the fuzzer derives new inputs.

    PYTHONPATH=tests python -m fuzz.samples

Other files in the corpus, added by the fuzzer or an engineer, are kept.
"""

import asyncio
import gzip
import json
import zlib
from collections.abc import Iterator
from typing import Any, Final
from uuid import UUID

import oncelog
from fuzz.targets import CORPUS, ticket_verifier
from oncelog import proof
from oncelog.core.deltas import decode_push
from oncelog.ledger.v1 import ledger_pb2 as pb
from oncelog.server.auth.principal import Principal, parse_grants
from server.auth.auth_material import token

ID: Final = "0198f3c2-7d55-7c1e-9a61-2f6f0c1b5a10"
MESSAGE_ID: Final = "2d8e6b3a-52a5-4c70-9c2e-0a8b6f1d7e55"
EVENT: Final = {"type": "order.placed", "order": 17, "total": 12.5, "tags": ["a", None, True, "é"]}
ITEM: Final = {"id": ID, "partitions": ["orders", "größe"], "event": EVENT}
OPERATIONS: Final[list[Any]] = [
    {"set_entity": {"key": "invoice/17", "value": "cGFpZA==", "condition": {"must_not_exist": True}}},
    {"delete_entity": {"key": "invoice/16"}},
    {"create_relationship": {"resource": "doc:1", "relation": "owner", "subject": "user:ada"}},
]
WRITE: Final = {"organization": "acme", "vault": "main", "client_id": "billing", "sequence": 1, "idempotency_key": ID}


def samples() -> Iterator[tuple[str, str, bytes]]:
    """Yield target, name and content of each file."""
    yield from _events()
    yield from _insieme()
    yield from _chat()
    yield from _bodies()
    yield from _others()


def _native(kind: str, payload: Any) -> Any:
    return {"type": kind, "protocol_version": "1.0", "msg_id": "m1", "payload": payload}


def _events() -> Iterator[tuple[str, str, bytes]]:
    sync = {"partitions": ["orders"], "since_committed_id": 12, "limit": 100, "epoch": "e1"}
    frames = {
        "connect": _native("connect", {"token": "ada", "client_id": "ada-1"}),
        "submit": _native("submit_events", {"events": [ITEM, {**ITEM, "id": MESSAGE_ID, "expected_committed_id": 4}]}),
        "sync": _native("sync", sync),
        "heartbeat": _native("heartbeat", {}),
        "disconnect": _native("disconnect", {"reason": "bye"}),
    }
    for name, frame in frames.items():
        yield "events-frame", name, _json(frame)


def _insieme() -> Iterator[tuple[str, str, bytes]]:
    event = {"id": ID, "partition": "main", "type": "todo.added", "schemaVersion": 1, "payload": {"text": "milk"}}
    meta = {"clientId": "ada-1", "clientTs": 1_800_000_000_000}
    frames = {
        "connect": {"token": "ada", "clientId": "ada-1", "projectId": "p1"},
        "submit_events": {"events": [{**event, "meta": meta}, {**event, "id": "draft-2", "meta": meta}]},
        "sync": {"projectId": "p1", "sinceCommittedId": 3, "limit": 50},
        "heartbeat": {},
    }
    for kind, payload in frames.items():
        frame = {"type": kind, "protocolVersion": "1.0", "msgId": "m1", "timestamp": 1, "payload": payload}
        yield "insieme-frame", kind, _json(frame)


def _chat() -> Iterator[tuple[str, str, bytes]]:
    send = {
        "client_message_id": MESSAGE_ID,
        "chat_id": "general",
        "content": "Hello, Bob!",
        "content_type": "text/plain",
    }
    frames: dict[str, dict[str, Any]] = {
        "connect": {"token": "ada", "device_id": "phone"},
        "send_message": send,
        "sync_request": {"chat_id": "general", "last_acked_sequence": 4, "limit": 100, "request_id": "r1"},
        "ack": {"chat_id": "general", "last_acked_sequence": 5},
        "ping": {"request_id": "r2"},
    }
    for kind, members in frames.items():
        yield "chat-frame", kind, _json({"type": kind, **members})
    yield "chat-body", "message", _json(send)
    yield "chat-body", "ack", _json({"last_acked_sequence": 5})
    received = {**send, "type": "message", "message_id": "msg_1", "sequence": 5, "sender_id": "user:ada"}
    yield "client-frame", "message", _json({**received, "created_at": "2026-11-18T00:00:00.000Z"})
    yield "client-frame", "broadcast", _json(_native("event_broadcast", {**ITEM, "client_id": "c", "committed_id": 5}))
    pulled = {"deltas": [], "serverHlc": "0", "cursor": 5, "hasMore": False, "epoch": "e1", "isSnapshot": False}
    yield "client-frame", "pulled", _json(pulled)


def _bodies() -> Iterator[tuple[str, str, bytes]]:
    yield "events-body", "submit", _json({"client_id": "ada-1", "events": [ITEM]})
    yield "ledger-body", "write", _json({**WRITE, "operations": OPERATIONS})
    batch = [{"organization": "acme", "vault": "main", "operations": [one]} for one in OPERATIONS]
    yield "ledger-body", "batch", _json({**WRITE, "writes": batch})
    yield "deltas-body", "push", _push()
    yield "deltas-body", "compact", _json({"keep": 100, "tombstoneAgeMs": 0})
    body = _json({"events": [ITEM] * 20})
    yield "compressed-body", "gzip", gzip.compress(body, mtime=0)
    yield "compressed-body", "deflate", zlib.compress(body)
    yield "compressed-body", "bomb", gzip.compress(bytes(1_000_000), mtime=0)
    yield "canonical-json", "value", _json({"b": [1, 1.5, 1e21, -0.0, 2**53], "a": {"é": "\u2028", "": None}})
    operation = pb.Operation(set_entity=pb.SetEntity(key="invoice/17", value=b"paid"))
    write = pb.WriteRequest(organization="acme", client_id="billing", sequence=1, operations=[operation])
    write.idempotency_key = UUID(ID).bytes
    yield "grpc", "write", write.SerializeToString()
    many = pb.BatchWriteRequest(organization="acme", client_id="billing", sequence=2)
    many.writes.add(organization="acme").operations.append(operation)
    yield "grpc", "batch", many.SerializeToString()
    streamed = pb.StreamedWrite(write=write, traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
    yield "grpc", "stream", pb.StreamWritesRequest(writes=[streamed] * 2).SerializeToString()


def _others() -> Iterator[tuple[str, str, bytes]]:
    yield "cursor", "lane", b"3f2a9c:17"
    yield "cursor", "stream", b"3f2a9c:stream/chat/general:5"
    yield "cursor", "page", b"WzAsbnVsbCwicHJvZHVjdHMiLCJ0ZWEiXQ=="
    yield "cursor", "token", b"WyJpbnZvaWNlLzE3Il0="
    yield "audit-cursor", "lanes", b"3f2a9c~0-17~2-281474976710656"
    yield "audit-cursor", "other-epoch", b"3f2a9d~1-5"
    plain = (
        "POST /v1/ledger/write HTTP/1.1\r\nHost: localhost:7171\r\nAuthorization: Bearer olk_0123\r\n"
        "Content-Type: application/json; charset=utf-8\r\nContent-Length: 250\r\n\r\n"
    )
    yield "fast-path-head", "plain", plain.encode()
    yield "fast-path-head", "chunked", plain.replace("Content-Length: 250", "Transfer-Encoding: chunked").encode()
    yield "fast-path-head", "lengths", plain.replace("Host:", "Content-Length: 5\r\nHost:").encode()
    yield "token", "jwt", token().encode()
    yield "token", "none", token(header={"alg": "none"}).encode()
    ticket = ticket_verifier().issue(
        Principal(actor="user:ada", client_id=None, grants=parse_grants()), "follow", ["a"]
    )
    yield "stream-ticket", "valid", ticket.text.encode()
    yield "stream-ticket", "forged", ticket.text[:-1].encode()
    yield "token", "api-key", b"olk_0123456789abcdef_" + b"A" * 43
    yield "proof", "event", asyncio.run(_proof())
    yield "damaged-file", "byte", bytes([0, 100, 0, 0, 0, 255, 0, 0])
    yield "damaged-file", "page", bytes([2, 0, 0x40, 0, 0, 0, 0, 0])
    yield "damaged-file", "copied-page", bytes([3, 0, 0x40, 0, 0, 7, 0, 0])
    yield "damaged-file", "short", bytes([5, 0, 0x90, 0, 0, 0, 0, 0])
    yield "damaged-file", "undamaged", b""


def _push() -> bytes:
    columns = [{"column": "name", "value": "Tea"}, {"column": "price", "value": 3.5}]
    delta = {"op": "INSERT", "table": "products", "rowId": "tea", "clientId": "till-1", "columns": columns}
    pushed = _json({"deltas": [{**delta, "hlc": "116000000000000000", "deltaId": "0" * 64}]})
    return b'{"deltas":[%b]}' % decode_push(pushed).bodies[0]  # with the delta id computed from the content


async def _proof() -> bytes:
    async with oncelog.open(":memory:") as log:
        verdict = await log.submit(oncelog.event(UUID(ID), EVENT, ["orders"]))
        assert isinstance(verdict, oncelog.Committed)
        return proof.encode(proof.proof_document(await log.prove(verdict.receipt)))


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()


def main() -> None:
    for target, name, content in samples():
        file = CORPUS / target / name
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(content)


if __name__ == "__main__":
    main()
