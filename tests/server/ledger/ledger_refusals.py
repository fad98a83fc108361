"""Helpers for tests of refused calls of the Ledger API."""

import asyncio
from typing import Any, Final

import pytest

from server.ledger.ledger_servers import SharedServer, key
from server.ledger.ledger_transports import GRPC, HTTP, CallError, GrpcWire, HttpWire, Json, code, expect_refusal, put

ONLY_GRPC: Final = pytest.mark.parametrize("wire", [GRPC], indirect=True)
ONLY_HTTP: Final = pytest.mark.parametrize("wire", [HTTP], indirect=True)
SET: Final = put("a", b"1")
RELATED: Final = {"resource": "r", "relation": "v", "subject": "s"}


def write_of(name: str, **changed: Any) -> Json:
    asked = {"organization": name, "client_id": "app", "sequence": 1, "idempotency_key": key(1), "operations": [SET]}
    return {**asked, **changed}


async def check_nothing_written(shared_server: SharedServer) -> None:
    """Check that the client of the refused call has written nothing, and that its first write succeeds."""
    ledger = shared_server.ledger()
    assert await ledger.last_sequence() == 0
    assert await ledger.get_entity("a") is None
    assert code(await ledger.wire.call("Write", write_of(shared_server.name))) == "OK"
    assert await ledger.value("a") == b"1"


async def send_among_valid_writes(shared_server: SharedServer, bad: Any) -> CallError:
    """Send a call together with valid writes of other clients, assert that it is refused, and return its error."""
    others = [shared_server.ledger(f"client-{number}") for number in range(4)]
    good = [ledger.write(1, put(ledger.client_id), key=key(1)) for ledger in others]
    one, two, error, three, four = await asyncio.gather(good[0], good[1], expect_refusal(bad), good[2], good[3])
    assert [code(answer) for answer in (one, two, three, four)] == ["OK"] * 4
    assert isinstance(error, CallError)
    return error


def http_wire(shared_server: SharedServer) -> HttpWire:
    found: HttpWire = shared_server.server.wire(HTTP)
    return found


def grpc_wire(shared_server: SharedServer) -> GrpcWire:
    found: GrpcWire = shared_server.server.wire(GRPC)
    return found
