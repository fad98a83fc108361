"""Targets of the fuzzer: every function that decodes bytes from outside.

A target decodes an input or raises one of its documented errors. Any other exception is a fault. Where a decoder has a
fast path, the target also compares it with the exact path.
"""

import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
from aiohttp.web import HTTPRequestEntityTooLarge
from google.protobuf.message import DecodeError

from doors.material import NOW_MS, tokens
from fuzz.damage import read_damaged_log
from oncelog import proof
from oncelog.client import words as client_words
from oncelog.client.chat import words as client_chat_words
from oncelog.client.deltas import messages as client_deltas
from oncelog.core import deltas
from oncelog.core.canonical import canonical_text
from oncelog.cursor import Cursor
from oncelog.doors import requests
from oncelog.doors.apikeys import ApiKeys
from oncelog.doors.chat import reading as chat_reading
from oncelog.doors.deltas import door as deltas_door
from oncelog.doors.events import reading
from oncelog.doors.events.camel import Camel, spoken
from oncelog.doors.events.dialect import FIRST, Dialect
from oncelog.doors.events.projects import project_of
from oncelog.doors.faults import DoorError
from oncelog.doors.fields import members_of, parsed
from oncelog.doors.ledger import door as ledger_door
from oncelog.doors.ledger import messages, words
from oncelog.doors.tokens import Tokens
from oncelog.errors import AuthError, CanonicalError, OncelogError, ProofError, ProtocolError
from oncelog.ledger.v1 import ledger_pb2 as pb

CORPUS: Final = Path(__file__).with_name("corpus")
ACTOR: Final = "user:ada"
CLIENT: Final = "ada-1"
EVENTS_MAX: Final = 100
MESSAGE_BYTES_MAX: Final = 4096
BODY_BYTES_MAX: Final = 256 * 1024


class Target(NamedTuple):
    """A decoder, the errors that it documents, and its share of the inputs of a run."""

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
    spoken(data, FIRST, dialect)
    found = dialect.read(data, ACTOR, CLIENT, EVENTS_MAX)
    if isinstance(found, tuple):
        return
    for read in (dialect.read_connect, dialect.read_sync):
        with suppress(DoorError):
            read(found.payload)


def _native_frame(data: bytes) -> None:
    quick = reading.read_quickly(data, ACTOR, CLIENT, EVENTS_MAX)
    if quick is not None:
        message = reading.read_message(data)
        assert quick == (message.msg_id, reading.read_submit(message.payload, ACTOR, CLIENT, EVENTS_MAX))
    _events_frame(FIRST, data)


def _insieme_frame(data: bytes) -> None:
    _events_frame(Camel(project_of("p1")), data)


def _chat_frame(data: bytes) -> None:
    quick = chat_reading.read_quickly(data, MESSAGE_BYTES_MAX)
    exact: object = None
    try:
        exact = chat_reading.read_frame(data, MESSAGE_BYTES_MAX)
    finally:
        assert quick is None or quick == exact


# --- HTTP bodies and their compression


def _events_body(data: bytes) -> None:
    payload = reading.read_body(data)
    with suppress(DoorError):
        reading.read_client_id(payload)
    reading.read_submit(payload, ACTOR, CLIENT, EVENTS_MAX, "$")


def _ledger_body(data: bytes) -> None:
    with suppress(DoorError):
        words.read_batch(data)
    words.read_write(data)


def _deltas_body(data: bytes) -> None:
    with suppress(DoorError):
        deltas_door._read_compact(data)
    plain = deltas.read_plain_push(data)
    exact = deltas.read_push(data)
    if plain is not None and deltas.are_canonical(plain.deltas):
        assert plain.keys == exact.keys


def _chat_body(data: bytes) -> None:
    members = members_of(parsed(data), "$")
    with suppress(DoorError):
        chat_reading.read_acked(members)
    chat_reading.read_send(members, "general", MESSAGE_BYTES_MAX, None)


def _compressed_body(data: bytes) -> None:
    if data:
        for encoding in ("gzip", "deflate"):
            with suppress(DoorError, HTTPRequestEntityTooLarge):
                requests._unpacked(data, encoding, BODY_BYTES_MAX)


def _canonical(data: bytes) -> None:
    text = canonical_text(data)
    assert canonical_text(text) == text


# --- gRPC messages


def _grpc(data: bytes) -> None:
    with suppress(DecodeError, DoorError):
        messages.read_batch(pb.BatchWriteRequest.FromString(data))
    messages.read_write(pb.WriteRequest.FromString(data))


# --- cursors, page tokens, credentials, proofs


def _cursor(data: bytes) -> None:
    text = data.decode("utf-8", "surrogateescape")
    for read in (deltas_door._place_of, lambda token: ledger_door._tokens(token, 1)):
        with suppress(DoorError):
            read(text)
    with suppress(DoorError):
        requests.number_of(text, "after")
    cursor = Cursor.parse(text)
    assert Cursor.parse(str(cursor)) == cursor


@cache
def _credentials() -> tuple[Tokens, ApiKeys]:
    with tempfile.TemporaryDirectory() as directory:
        return tokens(Path(directory)), ApiKeys(Path(directory) / "keys.json", lambda: NOW_MS)


def _token(data: bytes) -> None:
    text = data.decode("utf-8", "surrogateescape")
    verifier, api_keys = _credentials()
    with suppress(AuthError):
        api_keys.principal_of(text)
    requests.bearer_of(text)
    verifier.principal_of(text)


def _proof(data: bytes) -> None:
    document = proof.decode(data)
    proof.verify(document)
    assert proof.decode(proof.encode(document)) == document


# --- what clients receive


def _client_frame(data: bytes) -> None:
    with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):  # as the protocol does
        client_words.read_event(client_words.read_message(data).payload)
    for read in (client_chat_words.read, client_deltas.read_pulled, client_deltas.read_snapshot):
        with suppress(ProtocolError):
            read(data)


TARGETS: Final = {
    target.name: target
    for target in (
        Target("events-frame", _native_frame, (DoorError,), 2),
        Target("insieme-frame", _insieme_frame, (DoorError,), 2),
        Target("chat-frame", _chat_frame, (DoorError,)),
        Target("events-body", _events_body, (DoorError,)),
        Target("ledger-body", _ledger_body, (DoorError,)),
        Target("deltas-body", _deltas_body, (CanonicalError,)),
        Target("chat-body", _chat_body, (DoorError,)),
        Target("compressed-body", _compressed_body, (), 0.5),
        Target("canonical-json", _canonical, (CanonicalError,)),
        Target("grpc", _grpc, (DecodeError, DoorError)),
        Target("cursor", _cursor, (ValueError,)),
        Target("token", _token, (AuthError,)),
        Target("proof", _proof, (ProofError,)),
        Target("client-frame", _client_frame, ()),
        Target("damaged-file", read_damaged_log, (OncelogError,), 0.002),
    )
}
