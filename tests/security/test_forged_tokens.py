"""Every API refuses forged tokens. tests/server/auth/test_tokens.py tests further forgeries with the verifier alone."""

import json
from pathlib import Path
from typing import Any

import pytest

from deadlines import soon
from server.auth import auth_material
from server.auth.auth_material import encode_base64, make_key, token
from server.ledger.ledger_servers import run_server
from server.ledger.ledger_transports import GRPC, HTTP, expect_refusal
from server.running_server import item

GRANTS = {"read": ["*"], "write": ["*"]}
GOOD = token(grants=GRANTS)
_head, _claims, _signature = GOOD.split(".")
_ROOT = encode_base64(json.dumps({"sub": "root", "exp": 2**40, "grants": GRANTS}).encode())


def unsigned(algorithm: Any) -> str:
    return f"{encode_base64(json.dumps({'alg': algorithm, 'typ': 'JWT'}).encode())}.{_claims}."


FORGED = {
    "none": unsigned("none"),
    "None": unsigned("None"),
    "algorithm-list": unsigned(["none"]),
    "stripped-signature": f"{_head}.{_claims}.",
    "other-secret": token(key=make_key("HS256", 1), grants=GRANTS),
    "other-algorithm": token("ES256", grants=GRANTS),
    "expired": token(exp=auth_material.NOW_S - 31, grants=GRANTS),
    "not-yet-valid": token(nbf=auth_material.NOW_S + 3600, grants=GRANTS),
    "other-claims": f"{_head}.{_ROOT}.{_signature}",
}


@pytest.mark.rule("CO-21")
@pytest.mark.parametrize("forgery", FORGED)
async def test_every_api_refuses_forged_tokens(tmp_path: Path, forgery: str) -> None:
    forged = FORGED[forgery]
    async with run_server(tmp_path, GRPC, tokens=True, auth_failures_per_minute_max=0) as server:
        served = server.served
        for method, path in (
            ("GET", "/v1/events?partition=a"),
            ("POST", "/v1/events"),
            ("GET", "/v1/events/stream?partition=a"),
            ("GET", "/v1/sync/g/pull"),
            ("GET", "/v1/chats/c/messages"),
            ("POST", "/v1/ledger/write"),
            ("GET", "/metrics"),
        ):
            assert (await served.request(method, path, credential=forged)).status == 401, path
        socket = await served.socket()
        assert (await socket.connect("laptop", forged))["code"] == "auth_failed"
        for wire in (GRPC, HTTP):
            server.kind = wire
            error = await expect_refusal(server.ledger(credential=forged).get_entity("a"))
            assert error.status == "UNAUTHENTICATED"
        chat = await soon(served.session.ws_connect(f"{served.url}/v1/chat"))
        await chat.send_json({"type": "connect", "token": forged})
        assert "auth_failed" in (await soon(chat.receive())).data.lower()
        await chat.close()
        assert (await served.submit(item(1), credential=GOOD)).status == 200
