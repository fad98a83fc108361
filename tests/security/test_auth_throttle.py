"""Only failed authentication is throttled (CO-25)."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from deadlines import soon
from oncelog.ledger.v1 import ledger_pb2 as pb
from oncelog.ledger.v1 import ledger_pb2_grpc
from server.ledger.ledger_servers import token
from server.raw_http import post, raw_connection, write
from server.running_server import Serving, api_key, serving

BURST = 150
"""Requests in a burst. The default limit is 60 failures per minute."""
OK, FAILED, LIMITED = "ok", "auth_failed", "rate_limited"

Attempt = Callable[[Serving, str | None], Awaitable[str]]
"""Authenticates with a credential and returns the outcome."""


async def http(served: Serving, credential: str | None) -> str:
    answer = await served.page("a", credential=credential)
    return OK if answer.status == 200 else str(answer.error["code"])


async def http_fast_path(served: Serving, credential: str | None) -> str:
    headers = [] if credential is None else [f"Authorization: Bearer {credential}"]
    async with raw_connection(served) as connection:
        connection.send(post(write(1, client="ci"), *headers))
        status, _, answer = await connection.read_answer()
    return OK if status == 200 else str(answer["error"]["code"])


async def sse(served: Serving, credential: str | None) -> str:
    stream = await served.stream("a", credential=credential)
    try:
        return OK if stream.response.status == 200 else str((await stream.response.json())["error"]["code"])
    finally:
        stream.close()


def websocket_attempt(path: str, connect: Callable[[str | None], Any]) -> Attempt:
    async def attempt(served: Serving, credential: str | None) -> str:
        async with served.session.ws_connect(served.url + path) as socket:
            await socket.send_str(json.dumps(connect(credential)))
            answer = (await soon(socket.receive())).json()
        if answer["type"] == "connected":
            return OK
        return str((answer.get("payload") or answer)["code"]).lower()

    return attempt


async def rpc(served: Serving, credential: str | None) -> str:
    async with grpc.aio.insecure_channel(served.server.grpc_address) as channel:
        stub: Any = ledger_pb2_grpc.LedgerStub(channel)
        metadata = [] if credential is None else [("authorization", f"Bearer {credential}")]
        try:
            await soon(
                stub.GetClientState(pb.GetClientStateRequest(organization="a", client_id="ci"), metadata=metadata)
            )
        except grpc.aio.AioRpcError as error:
            return str(dict(error.trailing_metadata() or ())["oncelog-code"])
    return OK


ATTEMPTS: dict[str, Attempt] = {
    "http": http,
    "http-fast-path": http_fast_path,
    "sse": sse,
    "grpc": rpc,
    "ws-events": websocket_attempt(
        "/v1/events",
        lambda one: {"type": "connect", "protocol_version": "1.0", "payload": {"client_id": "ci", "token": one}},
    ),
    "ws-insieme": websocket_attempt(
        "/v1/events",
        lambda one: {
            "type": "connect",
            "protocolVersion": "1.0",
            "payload": {"clientId": "ci", "projectId": "a", "token": one},
        },
    ),
    "ws-chat": websocket_attempt("/v1/chat", lambda one: {"type": "connect", "token": one, "device_id": "ci"}),
    "ws-deltas": websocket_attempt("/v1/sync/a/live", lambda one: {"type": "connect", "token": one}),
}


@asynccontextmanager
async def server_with_key(tmp_path: Path) -> AsyncIterator[tuple[Serving, str, str]]:
    """Run a server with the default limits; also yield a valid API key and a valid token."""
    async with serving(tmp_path, tokens=True, api_keys=True) as served:
        key = api_key(served, "ci", ["*"], ["*"])
        yield served, key.text, token(client_id="ci")


async def burst(attempt: Attempt, served: Serving, credential: str | None) -> list[str]:
    """Make `BURST` attempts, ten at a time."""
    found: list[str] = []
    for _ in range(BURST // 10):
        found += await asyncio.gather(*(attempt(served, credential) for _ in range(10)))
    return found


@pytest.mark.rule("CO-25")
@pytest.mark.parametrize("name", ATTEMPTS)
async def test_requests_without_a_credential_do_not_delay_valid_ones(tmp_path: Path, name: str) -> None:
    attempt = ATTEMPTS[name]
    async with server_with_key(tmp_path) as (served, key, jwt):
        assert set(await burst(attempt, served, None)) == {FAILED}
        assert [await attempt(served, one) for one in (key, jwt)] == [OK, OK]
        # The attempts did not count against the limit, because a wrong credential still gets the normal refusal.
        assert await attempt(served, "wrong") == FAILED
        assert (served.server.counts.auth_failures, served.server.counts.unauthenticated_requests) == (1, BURST)


def _change_secret(key: str) -> str:
    """Change one character of a key's secret."""
    return key[:-2] + ("B" if key[-2] == "A" else "A") + key[-1]


@pytest.mark.rule("CO-25", "CO-21")
@pytest.mark.parametrize("name", ATTEMPTS)
async def test_wrong_credentials_are_limited_and_do_not_delay_valid_ones(tmp_path: Path, name: str) -> None:
    attempt = ATTEMPTS[name]
    async with server_with_key(tmp_path) as (served, key, jwt):
        outcomes = await burst(attempt, served, _change_secret(key))
        assert sorted(outcomes) == [FAILED] * 60 + [LIMITED] * (BURST - 60)
        assert [await attempt(served, one) for one in (key, jwt)] == [OK, OK]
        counts = served.server.counts
        assert (counts.auth_failures, counts.auth_failures_limited) == (BURST, BURST - 60)


@pytest.mark.rule("CO-25")
async def test_anonymous_requests_on_one_protocol_do_not_delay_another(tmp_path: Path) -> None:
    async with server_with_key(tmp_path) as (served, key, _):
        await burst(http, served, None)
        await burst(http, served, "wrong")
        assert {name: await attempt(served, key) for name, attempt in ATTEMPTS.items()} == dict.fromkeys(ATTEMPTS, OK)


async def test_failed_attempts_write_a_few_lines_with_the_address(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with server_with_key(tmp_path) as (served, _, _):
        await burst(http, served, "wrong")
        lines = [one for one in caplog.records if "authenticate" in one.message or "authentication" in one.message]
        assert 0 < len(lines) <= 10
        assert {getattr(one, "address", None) for one in lines} == {"127.0.0.1"}
