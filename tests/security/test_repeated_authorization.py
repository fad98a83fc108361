"""Every API refuses a request with several `Authorization` headers, regardless of which credentials are valid."""

from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from deadlines import soon
from oncelog.ledger.v1 import ledger_pb2 as pb
from oncelog.ledger.v1 import ledger_pb2_grpc
from server.ledger.ledger_servers import run_server, token
from server.ledger.ledger_transports import GRPC
from server.raw_http import post, raw_connection, write
from server.running_server import serving

GOOD = f"Authorization: Bearer {token()}"
BAD = "Authorization: Bearer forged"


def get(path: str, *headers: str) -> bytes:
    """Return the bytes of a GET request."""
    return "\r\n".join([f"GET {path} HTTP/1.1", "Host: 127.0.0.1", *headers, "", ""]).encode()


UPGRADE = (
    "Connection: Upgrade",
    "Upgrade: websocket",
    "Sec-WebSocket-Version: 13",
    "Sec-WebSocket-Key: " + "A" * 22 + "==",
)


@pytest.mark.parametrize("pair", [(GOOD, BAD), (BAD, GOOD), (GOOD, GOOD)], ids=["good-bad", "bad-good", "equal"])
async def test_repeated_header_is_refused_over_http(tmp_path: Path, pair: tuple[str, str]) -> None:
    requests = [
        post(write(1, client="user:ada"), *pair),
        post(b"{}", *pair, path="/v1/events"),
        get("/v1/events?partition=a", *pair),
        get("/v1/events/stream?partition=a", *pair),
        get("/v1/events", *pair, *UPGRADE),
        get("/v1/chat", *pair, *UPGRADE),
        get("/v1/sync/g/pull", *pair),
    ]
    async with serving(tmp_path, tokens=True) as served:
        for request in requests:
            async with raw_connection(served) as connection:
                connection.send(request)
                status, _, answer = await connection.read_answer()
            assert status == 400, request
            assert "must not be repeated" in str(answer), request
        async with raw_connection(served) as connection:
            connection.send(post(write(1, client="user:ada"), GOOD))
            assert await connection.read_committed_sequence() == 1


@pytest.mark.parametrize("credentials", [("good", "bad"), ("bad", "good")])
async def test_repeated_metadata_is_refused_over_grpc(tmp_path: Path, credentials: tuple[str, str]) -> None:
    texts = {"good": token(), "bad": "forged"}
    async with (
        run_server(tmp_path, GRPC, tokens=True) as server,
        grpc.aio.insecure_channel(f"127.0.0.1:{server.rpc_port}") as channel,
    ):
        stub: Any = ledger_pb2_grpc.LedgerStub(channel)
        request = pb.GetEntityRequest(organization="acme", key="a")
        metadata = [("authorization", f"Bearer {texts[one]}") for one in credentials]
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await soon(stub.GetEntity(request, metadata=metadata))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert refused.value.details() == "Authorization: must not be repeated"
