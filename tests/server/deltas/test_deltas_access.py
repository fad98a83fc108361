"""Access to the Deltas API: credentials, grants, limits, and refusals that reveal nothing."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pytest
from aiohttp import web

from databases import BOTH_STORES
from deadlines import until
from oncelog.engine.audit import AuditFilter
from oncelog.errors import StoreUnavailableError
from oncelog.server.endpoint import read_body
from oncelog.testing.clock import ManualClock
from server.auth import auth_material
from server.deltas.delta_servers import (
    DeltasServer,
    Gateway,
    SharedServer,
    as_delivered,
    change,
    read_deltas,
    refusal,
    run_server,
    server_pool_with,
)
from server.running_server import Answer, api_key

pytestmark = BOTH_STORES

SHOP: Final = "deltas/shop"
READS: Final = ("pull", "rows/t", "rows/t?rowId=r1", "snapshot", "live")


server_pool = server_pool_with(tokens=True, api_keys=True, auth_failures_per_minute_max=0)
"""Servers that require credentials, with a stopped clock."""


def token(read: Sequence[str] = (), write: Sequence[str] = (), **claims: Any) -> str:
    return auth_material.token(grants={"read": list(read), "write": list(write)}, **claims)


ADA: Final = {"client_id": "till-1"}


def own_delta(hlc: int = 1, row: str = "r1", **columns: Any) -> Any:
    return change(hlc, row, client="till-1", **(columns or {"a": hlc}))


async def send_all_requests(gateway: Gateway) -> list[Answer]:
    """Send every kind of request to a gateway. No request starts a stream."""
    return [
        await gateway.push(own_delta(1)),
        await gateway.request("POST", "compact", json={"keep": 0}),
        *[await gateway.request("GET", path) for path in READS],
    ]


@pytest.mark.rule("CO-21", "CO-22")
async def test_all_invalid_credentials_get_the_same_answer(shared_server: SharedServer) -> None:
    await shared_server.gateway(credential=token(write=[shared_server.scope], **ADA)).push_accepted(own_delta(1))
    expired = token(read=["*"], write=["*"], exp=auth_material.NOW_S - 3600)
    for credential in (None, "nonsense", expired):
        for suffix in ("", "-other"):
            answers = await send_all_requests(shared_server.gateway(suffix, credential))
            assert {refusal(answer) for answer in answers} == {(401, "AUTH_FAILED")}
            assert len({answer.body for answer in answers}) == 1
            assert {answer.headers["WWW-Authenticate"] for answer in answers} == {"Bearer"}
    live = await shared_server.gateway().live()
    error = await live.connect(token=expired)
    assert (error["type"], error["code"]) == ("error", "AUTH_FAILED")
    assert await live.wait_closed() == 1008


@pytest.mark.rule("CO-20")
async def test_actor_sent_by_the_client_is_ignored(shared_server: SharedServer) -> None:
    scope = shared_server.scope
    gateway = shared_server.gateway(credential=token(read=[scope], write=[scope], sub="ada", **ADA))
    body = {"deltas": [{**own_delta(1), "actor": "user:eve"}], "actor": "user:eve"}
    assert (await gateway.push_body(json.dumps(body).encode())).json["committed"] == 1
    (record,) = (await shared_server.server.log.read(stream=scope)).records
    assert record.actor == "user:ada"
    assert b"eve" not in record.body
    assert "eve" not in json.dumps(await gateway.pull())


@pytest.mark.rule("CO-18", "CO-22")
async def test_unauthorized_push_does_not_reveal_known_deltas(shared_server: SharedServer) -> None:
    scope = shared_server.scope
    await shared_server.gateway(credential=token(write=[scope], **ADA)).push_accepted(own_delta(1), own_delta(2))
    stranger = shared_server.gateway(credential=token(read=[f"{scope}ping"], write=[f"{scope}ping"], **ADA))
    known, unknown = await stranger.push(own_delta(1)), await stranger.push(own_delta(99))
    assert refusal(known) == (403, "FORBIDDEN")
    assert known.body == unknown.body
    for path in READS:
        answers = [await stranger.request("GET", path), await stranger.request("GET", path)]
        assert {refusal(answer) for answer in answers} == {(403, "FORBIDDEN")}
    elsewhere = shared_server.gateway("-nowhere", token(**ADA))
    assert (await elsewhere.push(own_delta(1))).body == known.body
    # Even a client with a write grant must not learn which deltas another client has pushed.
    other = shared_server.gateway(credential=token(write=[scope], client_id="till-2"))
    known, unknown = await other.push(own_delta(1)), await other.push(own_delta(99))
    assert known.body == unknown.body
    live = await stranger.live()
    error = await live.connect()
    assert (error["type"], error["code"]) == ("error", "FORBIDDEN")


@pytest.mark.rule("DE-10", "DE-6")
async def test_delta_of_another_client_refuses_the_push(shared_server: SharedServer) -> None:
    scope = shared_server.scope
    gateway = shared_server.gateway(credential=token([scope], [scope], **ADA))
    answer = await gateway.push(own_delta(1), own_delta(2), change(3, client="till-2", a=1))
    assert refusal(answer) == (403, "FORBIDDEN")
    message = "must be the credential's client"
    assert answer.json == {
        "type": "urn:oncelog:problem:forbidden",
        "title": "Access denied",
        "status": 403,
        "detail": f"deltas[2].clientId: {message}",
        "code": "FORBIDDEN",
        "errors": [{"path": "deltas[2].clientId", "detail": message}],
        "error": f"deltas[2].clientId: {message}",
        "index": 2,
    }
    assert await gateway.pull_all() == []
    assert await gateway.push_accepted(own_delta(1)) == [(1, False)]
    # Without a client id, a credential's client id is its actor, including the prefix.
    user = shared_server.gateway(credential=token([scope], [scope]))
    assert refusal(await user.push(change(1, client="ada", a=1))) == (403, "FORBIDDEN")
    assert await user.push_accepted(change(1, client="user:ada", a=1)) == [(2, False)]


@pytest.mark.rule("CO-43")
async def test_compaction_records_the_principal_of_the_request(shared_server: SharedServer) -> None:
    scope = shared_server.scope
    gateway = shared_server.gateway(credential=token([f"{scope}*"], [f"{scope}*"], **ADA))
    await gateway.push_accepted(own_delta(1), own_delta(2, op="DELETE"))
    await gateway.compact(keep=0, tombstoneAgeMs=0)
    page = await shared_server.server.log.audit(wanted=AuditFilter(stream=scope))
    assert [(one.act, one.actor, one.details) for one in page.entries] == [
        ("compact", "user:ada", {"records": 2, "upto": 2}),
        ("compact", "user:ada", {"tombstones": 1}),
    ]


@pytest.mark.rule("CO-22", "DE-12")
async def test_reading_writing_and_compacting_require_separate_grants(shared_server: SharedServer) -> None:
    scope = shared_server.scope
    reader, writer, compacter, all_of_it = (
        shared_server.gateway(credential=token(read, write, **ADA))
        for read, write in (
            ([scope], []),
            ([], [scope]),
            ([], [f"{scope}/compact"]),
            ([f"{scope}*"], [f"{scope}*"]),
        )
    )
    assert await writer.push_accepted(own_delta(1)) == [(1, False)]
    for gateway, may_push, may_compact, may_read in (
        (reader, False, False, True),
        (writer, True, False, False),
        (compacter, False, True, False),
        (all_of_it, True, True, True),
    ):
        push, compact, *reads = [
            await gateway.push(own_delta(1)),
            await gateway.request("POST", "compact", json={"upto": 0}),
            *[await gateway.request("GET", path) for path in READS[:-1]],
        ]
        assert push.status == (200 if may_push else 403)
        assert compact.status == (200 if may_compact else 403)
        assert {answer.status for answer in reads} == {200 if may_read else 403}
    assert refusal(await writer.request("GET", "live")) == (403, "FORBIDDEN")
    stream = await reader.stream()
    await stream.connected()
    assert await read_deltas(stream, 1) == [as_delivered(own_delta(1), 1)]
    stream.close()


@pytest.mark.rule("CO-22")
async def test_push_is_refused_if_its_key_is_revoked_while_the_body_is_read(
    shared_server: SharedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = shared_server.server
    made = api_key(server.served, "till-1", read=[shared_server.scope], write=[shared_server.scope])

    async def revoke_and_read(request: web.Request) -> bytes:
        assert server.served.api_keys is not None
        server.served.api_keys.revoke(made.key.id)
        server.server.reload()
        return await read_body(request)

    monkeypatch.setattr("oncelog.server.endpoint.read_body", revoke_and_read)
    answer = await shared_server.gateway(credential=made.text).push(own_delta(1))
    assert refusal(answer) == (401, "AUTH_FAILED")
    assert await server.log.state.newest(shared_server.scope) == 0


@pytest.mark.rule("CO-23")
@pytest.mark.parametrize("kind", ["token", "key"])
async def test_live_streams_end_when_the_credential_loses_its_rights(tmp_path: Path, kind: str) -> None:
    clock = ManualClock(auth_material.NOW_MS)
    async with run_server(tmp_path, tokens=kind == "token", api_keys=kind == "key", clock=clock) as server:
        if kind == "token":
            credential = token([SHOP], exp=auth_material.NOW_S + 60)
        else:
            made = api_key(server.served, "till-1", read=[SHOP])
            credential = made.text
        gateway = server.gateway(credential=credential)
        stream, live = await gateway.stream(), await server.gateway().live()
        await stream.connected()
        assert (await live.connect(token=credential))["type"] == "connected"
        await until(lambda: len(server.server.apis) == 2)
        if kind == "token":
            clock.advance(60_000 + 31_000)
            server.server.run_checks()
        else:
            assert server.served.api_keys is not None
            server.served.api_keys.revoke(made.key.id)
            server.server.reload()
        message = await stream.next()
        assert message is not None
        assert (message.kind, message.json["code"]) == ("error", "AUTH_FAILED")
        assert await stream.next() is None
        error = await live.receive()
        assert (error["type"], error["code"]) == ("error", "AUTH_FAILED")
        await live.wait_closed()


@pytest.mark.rule("CO-30")
async def test_repeated_authentication_failures_are_rate_limited(tmp_path: Path) -> None:
    async with run_server(tmp_path, tokens=True, auth_failures_per_minute_max=3) as server:
        gateway = server.gateway(credential="nonsense")
        answers = [refusal(await gateway.request("GET", "pull")) for _ in range(4)]
        assert answers == [(401, "AUTH_FAILED")] * 3 + [(429, "RATE_LIMITED")]
        answer = await gateway.push(own_delta(1))
        assert answer.json["retryAfterMs"] > 0
        assert int(answer.headers["Retry-After"]) > 0


@pytest.mark.rule("CO-15", "DE-4")
async def test_rate_limit_applies_only_to_new_deltas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oncelog.server.deltas.service.PUSH_DELTAS_MAX", 100)
    clock = ManualClock()
    async with run_server(tmp_path, clock=clock, new_events_per_second_max=10) as server:
        gateway = server.gateway()
        many = [change(number, a=number) for number in range(1, 101)]
        assert len(await gateway.push_accepted(*many)) == 100  # a single push may exceed the rate
        answer = await gateway.push(many[0], change(0, a=0))
        assert refusal(answer) == (429, "RATE_LIMITED")
        assert 0 < answer.json["retryAfterMs"] <= 1000
        assert answer.headers["Retry-After"] == "1"
        assert len(await gateway.push_accepted(*many)) == 100
        clock.advance(1000)
        assert len(await gateway.push_accepted(*(change(0, f"r{number}", a=0) for number in range(10)))) == 10
        assert refusal(await gateway.push(change(0, a=1))) == (429, "RATE_LIMITED")


@pytest.mark.rule("CO-32")
async def test_stopping_server_refuses_new_deltas(tmp_path: Path) -> None:
    async with run_server(tmp_path) as server:
        gateway = server.gateway()
        await gateway.push_accepted(change(1, a=1))
        auth_gate = server.server.apis.deltas.service.auth_gate
        auth_gate.is_closing = True
        answer = await gateway.push(change(2, a=2))
        auth_gate.is_closing = False
        assert refusal(answer) == (503, "SERVER_BUSY")
        assert answer.json["retryAfterMs"] > 0
        assert len(await gateway.pull_all()) == 1


@pytest.mark.rule("CO-16")
async def test_requests_during_a_store_failure_are_answered_with_server_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with run_server(tmp_path) as server:
        gateway = server.gateway()
        await gateway.push_accepted(change(1, a=1))
        break_store(server, monkeypatch)
        for answer in (
            await gateway.push(change(2, a=2)),
            await gateway.request("GET", "pull"),
            await gateway.request("GET", "rows/t"),
            await gateway.request("GET", "snapshot"),
            await gateway.request("GET", "live"),
            await gateway.request("POST", "compact", json={"keep": 0}),
        ):
            assert refusal(answer) == (503, "SERVER_ERROR")
            assert answer.json["retryAfterMs"] > 0
        assert await gateway.push_accepted(change(1, a=1)) == [(1, True)]  # answered from the cache
        monkeypatch.undo()
        assert await gateway.push_accepted(change(2, a=2)) == [(2, False)]


def break_store(server: DeltasServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail_save(*_: Any, **__: Any) -> Any:
        raise StoreUnavailableError("the disk is gone")

    for name in ("commit", "read", "rows", "side_state"):
        monkeypatch.setattr(server.log._store, name, fail_save)
