"""Targets of the fuzzer: all functions that decode untrusted bytes.

A target decodes an input or raises one of its documented errors. Any other exception is a fault. If a decoder has a
fast path, the target compares it with the exact path.
"""

import asyncio
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

from aiohttp import http_parser
from aiohttp.base_protocol import BaseProtocol
from aiohttp.web import HTTPRequestEntityTooLarge, Response
from google.protobuf.message import DecodeError

from fuzz.damage import read_damaged_log
from oncelog import proof
from oncelog.client.chat import codec as client_chat_words
from oncelog.client.deltas import codec as client_deltas
from oncelog.client.events import codec as client_words
from oncelog.core import deltas
from oncelog.core.canonical import canonical_text
from oncelog.cursor import Cursor
from oncelog.engine import audit
from oncelog.errors import AuthError, CanonicalError, HistoryChangedError, OncelogError, ProofError, ProtocolError
from oncelog.ledger.v1 import ledger_pb2 as pb
from oncelog.server import endpoint
from oncelog.server.api_service import decode_page_token
from oncelog.server.auth.api_keys import ApiKeys
from oncelog.server.auth.stream_tickets import StreamTickets
from oncelog.server.auth.tokens import Tokens
from oncelog.server.chat.messages import ChatMessages
from oncelog.server.deltas import service as deltas_door
from oncelog.server.errors import ApiError
from oncelog.server.events.dialect import Dialect
from oncelog.server.events.insieme_dialect import InsiemeDialect, detect_dialect
from oncelog.server.events.native_dialect import NATIVE, declare_submission, decode_fast, to_submit
from oncelog.server.events.projects import parse_project
from oncelog.server.http_fast_path import HEAD_BYTES_MAX, HttpFastPath
from oncelog.server.ledger import codec, grpc_codec
from oncelog.server.ledger import reads as ledger_reads
from oncelog.server.limits import ApiLimits
from server.auth.auth_material import NOW_MS, tokens, write_file

CORPUS: Final = Path(__file__).with_name("corpus")
ACTOR: Final = "user:ada"
CLIENT: Final = "ada-1"
EVENTS_MAX: Final = 100
CHAT_MESSAGES: Final = ChatMessages(ApiLimits(message_bytes_max=4096))
BODY_BYTES_MAX: Final = 256 * 1024
EPOCH: Final = "3f2a9c"
LANES: Final = 4
WRITE_PATH: Final = "/v1/ledger/write"
NEXT_REQUEST: Final = b"GET /next HTTP/1.1\r\nHost: localhost\r\n\r\n"


class Target(NamedTuple):
    """A decoder, its documented errors, and its share of the inputs in a run."""

    name: str
    decode: Callable[[bytes], object]
    errors: tuple[type[Exception], ...]
    share: float = 1.0

    def run(self, data: bytes) -> None:
        with suppress(*self.errors):
            self.decode(data)

    def corpus(self) -> list[bytes]:
        return [file.read_bytes() for file in sorted((CORPUS / self.name).iterdir())]


# --- WebSocket frames


def _events_frame(dialect: Dialect, data: bytes) -> None:
    detect_dialect(data, NATIVE, dialect)
    found = dialect.decode(data, ACTOR, CLIENT, EVENTS_MAX)
    if isinstance(found, tuple):
        return
    with suppress(ApiError):
        dialect.connect.decode(found.payload)
    with suppress(ApiError):
        dialect.decode_sync(found.payload)


def _native_frame(data: bytes) -> None:
    quick = decode_fast(data, ACTOR, CLIENT, EVENTS_MAX)
    if quick is not None:
        message = NATIVE.decode_message(data)
        assert quick == (message.msg_id, NATIVE.decode_submit(message.payload, ACTOR, CLIENT, EVENTS_MAX))
    _events_frame(NATIVE, data)


def _insieme_frame(data: bytes) -> None:
    _events_frame(InsiemeDialect(parse_project("p1")), data)


def _chat_frame(data: bytes) -> None:
    quick = CHAT_MESSAGES.decode_fast(data)
    exact: object = None
    try:
        exact = CHAT_MESSAGES.decode_frame(data)
    finally:
        assert quick is None or quick == exact


# --- HTTP bodies and their compression


def _events_body(data: bytes) -> None:
    _, items = declare_submission(EVENTS_MAX).decode_body(data)
    to_submit(items, ACTOR, CLIENT)


def _ledger_body(data: bytes) -> None:
    with suppress(ApiError):
        codec.decode_batch(data)
    codec.decode_write(data)


def _deltas_body(data: bytes) -> None:
    with suppress(ApiError):
        deltas_door._decode_compact(data)
    plain = deltas.decode_canonical_push(data)
    exact = deltas.decode_push(data)
    if plain is not None and deltas.has_canonical_columns(plain.deltas):
        assert plain.keys == exact.keys


def _chat_body(data: bytes) -> None:
    for message in (CHAT_MESSAGES.new_chat, CHAT_MESSAGES.new_member, CHAT_MESSAGES.acknowledgement):
        with suppress(ApiError):
            message.decode_body(data)
    CHAT_MESSAGES.decode_new_message(data)


def _compressed_body(data: bytes) -> None:
    if data:
        for encoding in ("gzip", "deflate"):
            with suppress(ApiError, HTTPRequestEntityTooLarge):
                endpoint._decompress(data, encoding, BODY_BYTES_MAX)


def _canonical(data: bytes) -> None:
    text = canonical_text(data)
    assert canonical_text(text) == text


# --- gRPC messages


def _grpc(data: bytes) -> None:
    with suppress(DecodeError, ApiError):
        grpc_codec.decode_batch(pb.BatchWriteRequest.FromString(data))
    with suppress(ApiError):
        for streamed in grpc_codec.parse_message(pb.StreamWritesRequest, data).writes:
            grpc_codec.decode_write(streamed.write)
    grpc_codec.decode_write(pb.WriteRequest.FromString(data))


# --- cursors, page tokens, credentials, proofs


def _cursor(data: bytes) -> None:
    text = data.decode("utf-8", "surrogateescape")
    with suppress(ApiError):
        decode_page_token(text, "after", deltas_door.SNAPSHOT_POSITION)
    with suppress(ApiError):
        decode_page_token(text, "after", ledger_reads.ENTITY_POSITION)
    with suppress(ApiError):
        endpoint.parse_number(text, "after")
    cursor = Cursor.parse(text)
    assert Cursor.parse(str(cursor)) == cursor


def _audit_cursor(data: bytes) -> None:
    after = audit.decode_cursor(data.decode(), EPOCH, LANES)
    assert all(lane <= LANES for lane in after)
    assert audit.decode_cursor(audit.encode_cursor(EPOCH, after), EPOCH, LANES) == after


# --- the head of an HTTP request


class NotPlainError(Exception):
    """The fast path passes the head on to aiohttp."""


@cache
def _fast_path() -> HttpFastPath:
    return HttpFastPath(
        {WRITE_PATH: lambda _: None},
        check_request=lambda _, __: None,
        respond_to_failure=lambda *_: Response(),
        body_bytes_max=BODY_BYTES_MAX,
        varies_by_origin=False,
    )


async def _fast_path_head(data: bytes) -> None:
    head_bytes = data.find(b"\r\n\r\n", 0, HEAD_BYTES_MAX) + 4
    if head_bytes < 4:
        raise NotPlainError
    data = data[:head_bytes]  # as the connection does
    head = _fast_path()._parse_head(data)
    if head is None:
        raise NotPlainError
    assert head.path == WRITE_PATH
    # aiohttp finds the next request at the same offset.
    loop = asyncio.get_running_loop()
    parser = http_parser.HttpRequestParser(BaseProtocol(loop), loop, 2**16)
    messages, _, _ = parser.feed_data(data + b" " * head.body_bytes + NEXT_REQUEST)
    assert [message.path for message, _ in messages] == [WRITE_PATH, "/next"]


@cache
def _credentials() -> tuple[Tokens, ApiKeys]:
    with tempfile.TemporaryDirectory() as directory:
        return tokens(Path(directory)), ApiKeys(Path(directory) / "keys.json", lambda: NOW_MS)


def _token(data: bytes) -> None:
    text = data.decode("utf-8", "surrogateescape")
    verifier, api_keys = _credentials()
    with suppress(AuthError):
        api_keys.authenticate(text)
    endpoint.parse_bearer(text)
    verifier.authenticate(text)


@cache
def ticket_verifier() -> StreamTickets:
    """Return a verifier with a fixed key."""
    with tempfile.TemporaryDirectory() as directory:
        key_file = write_file(Path(directory) / "tickets.key", b"k" * 32)
        tickets = StreamTickets(lambda: NOW_MS, 1, str(key_file))
        tickets.load()
    return tickets


def _ticket(data: bytes) -> None:
    ticket_verifier().verify(data.decode("utf-8", "surrogateescape"))


def _proof(data: bytes) -> None:
    document = proof.decode(data)
    proof.verify(document)
    assert proof.decode(proof.encode(document)) == document


# --- messages to clients


def _client_frame(data: bytes) -> None:
    for read in (
        client_words.decode_message,
        client_chat_words.decode_frame,
        client_deltas.decode_delta_page,
        client_deltas.decode_snapshot_page,
    ):
        with suppress(ProtocolError):
            read(data)


TARGETS: Final = {
    target.name: target
    for target in (
        Target("events-frame", _native_frame, (ApiError,), 2),
        Target("insieme-frame", _insieme_frame, (ApiError,), 2),
        Target("chat-frame", _chat_frame, (ApiError,)),
        Target("events-body", _events_body, (ApiError,)),
        Target("ledger-body", _ledger_body, (ApiError,)),
        Target("deltas-body", _deltas_body, (CanonicalError,)),
        Target("chat-body", _chat_body, (ApiError,)),
        Target("compressed-body", _compressed_body, (), 0.5),
        Target("canonical-json", _canonical, (CanonicalError,)),
        Target("grpc", _grpc, (DecodeError, ApiError)),
        Target("cursor", _cursor, (ValueError,)),
        Target("audit-cursor", _audit_cursor, (ValueError, HistoryChangedError)),
        Target("fast-path-head", lambda data: asyncio.run(_fast_path_head(data)), (NotPlainError,), 0.5),
        Target("token", _token, (AuthError,)),
        Target("stream-ticket", _ticket, (AuthError,)),
        Target("proof", _proof, (ProofError,)),
        Target("client-frame", _client_frame, ()),
        Target("damaged-file", read_damaged_log, (OncelogError,), 0.002),
    )
}
