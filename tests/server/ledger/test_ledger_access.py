"""Access to the Ledger API: credentials, the recorded actor, and grants."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from databases import BOTH_STORES
from oncelog.testing.clock import ManualClock
from server.auth import auth_material
from server.ledger.ledger_servers import SharedServer, key, prepare, run_server, server_pool_with, token
from server.ledger.ledger_transports import (
    GRPC,
    HTTP,
    BlockStream,
    CallError,
    Json,
    Ledger,
    code,
    expect_refusal,
    expect_success,
    put,
    relate,
)
from server.running_server import api_key

pytestmark = BOTH_STORES

SET: Final = put("a", b"1")
TX: Final = "0001000000000001"


server_pool = server_pool_with(tokens=True, api_keys=True, auth_failures_per_minute_max=0)
"""Servers that require credentials, with a stopped clock."""


async def read_first_block(ledger: Ledger) -> Json | None:
    """Open a block stream and return its first block."""
    watching: BlockStream = await ledger.watch_blocks()
    found = await watching.next()
    await watching.close()
    return found


def writes(ledger: Ledger) -> list[Any]:
    return [ledger.write(1, SET, key=key(1)), ledger.batch_write(1, [SET], key=key(1))]


def reads(ledger: Ledger) -> list[Any]:
    return [
        ledger.get_entity("a"),
        ledger.list_entities(),
        ledger.list_relationships(),
        ledger.check_relationship("r"),
        ledger.get_transaction(TX),
        ledger.get_block(1),
        ledger.get_proof(TX),
        read_first_block(ledger),
    ]


async def refusals(calls: Sequence[Any]) -> list[tuple[str, str, str | None]]:
    """Assert that all calls are refused, and return their errors."""
    return [error.summary for error in await asyncio.gather(*map(expect_refusal, calls))]


# --- credentials -----------------------------------------------------------------------------------------------


@pytest.mark.rule("CO-21", "CO-18")
async def test_invalid_credentials_are_refused_with_one_message(shared_server: SharedServer) -> None:
    server = shared_server.server
    good = token()
    assert code(await shared_server.ledger_as(good).write(1, SET, key=key(1))) == "OK"
    revoked = api_key(server.served, "gone", ["*"], ["*"])
    assert await shared_server.ledger_as(revoked.text).last_sequence() == 0
    assert server.served.api_keys is not None
    server.served.api_keys.revoke(revoked.key.id)
    server.server.reload()
    texts = set()
    for bad in (
        None,
        "nothing",
        good[:-2],
        token(exp=auth_material.NOW_S - 31),
        auth_material.token(key=auth_material.make_key("HS256", 1)),
        revoked.text,
        revoked.text[:-1],
    ):
        ledger = shared_server.ledger_as(bad)
        for call in (*writes(ledger), *reads(ledger), ledger.get_client_state()):
            error = await expect_refusal(call)
            assert (error.status, error.code, error.field) == ("UNAUTHENTICATED", "auth_failed", None), bad
            texts.add(error.message)
    assert len(texts) == 1  # the message does not reveal why the credential failed
    assert await shared_server.ledger_as(good).last_sequence() == 1


@pytest.mark.rule("CO-21")
async def test_credential_is_checked_before_the_request_is_parsed(shared_server: SharedServer) -> None:
    wire = shared_server.wire()
    error = await expect_refusal(wire.raw("Write", b"\xff") if wire.kind == GRPC else wire.post("write", b"{"))
    assert error.status == "UNAUTHENTICATED"


@pytest.mark.rule("CO-21")
async def test_repeated_authentication_failures_are_rate_limited(tmp_path: Path, wire: str) -> None:
    clock = ManualClock(auth_material.NOW_MS)
    async with run_server(tmp_path, wire, tokens=True, clock=clock, auth_failures_per_minute_max=3) as server:
        bad, good = server.ledger(credential="bad"), server.ledger(credential=token())
        for _ in range(3):
            assert (await expect_refusal(bad.last_sequence())).status == "UNAUTHENTICATED"
        error = await expect_refusal(bad.last_sequence())
        assert (error.status, error.code) == ("RESOURCE_EXHAUSTED", "rate_limited")
        retry_after_ms = error.retry_after_ms or 0
        assert 0 < retry_after_ms <= 20_000
        assert await good.last_sequence() == 0
        clock.advance(retry_after_ms)
        assert (await expect_refusal(bad.last_sequence())).status == "UNAUTHENTICATED"


# --- actors ----------------------------------------------------------------------------------------------------


@pytest.mark.rule("LG-1", "CO-20")
async def test_recorded_actor_is_the_user_of_a_token_or_the_client_of_an_api_key(shared_server: SharedServer) -> None:
    shown = api_key(shared_server.server.served, "api_key_abc", ["*"], ["*"])
    for credential, actor, client in (
        (token("789"), "user:789", "user:789"),
        (shown.text, "client:api_key_abc", "api_key_abc"),
        (token("ada", client_id="laptop"), "user:ada", "laptop"),
    ):
        ledger = shared_server.ledger_as(credential)
        if ledger.wire.kind == HTTP:
            assert (await expect_refusal(ledger.write(1, SET, key=key(1), actor="system:gc"))).field == "actor"
        answer = expect_success(await ledger.write(1, SET, key=key(1)))
        assert answer["actor"] == actor
        found = await ledger.get_transaction(answer["committed_tx_id"])
        assert (found["actor"], found["client_id"]) == (actor, client)
        assert (await ledger.get_proof(answer["committed_tx_id"]))["record"]["actor"] == actor
        # A client may send its own id or omit it.
        assert await ledger.of(client_id=client).write(1, SET, key=key(1)) == answer
        assert await ledger.of(client_id=client).last_sequence() == 1


@pytest.mark.rule("LG-1")
async def test_client_id_of_another_client_is_refused(shared_server: SharedServer) -> None:
    shown = api_key(shared_server.server.served, "shop", ["*"], ["*"])
    victim = shared_server.ledger_as(token("victim"))
    await victim.write(1, SET, key=key(1))
    for credential in (token("ada"), token("ada", client_id="laptop"), shown.text):
        ledger = shared_server.ledger_as(credential)
        message = "client_id: must be the credential's client, or be omitted"
        for other in ("user:victim", "Ada", "laptop ", "ada"):
            forged = ledger.of(client_id=other)
            expected = ("INVALID_ARGUMENT", message, "client_id")
            assert await refusals([*writes(forged), forged.get_client_state()]) == [expected] * 3
        assert await ledger.last_sequence() == 0
    assert await victim.last_sequence() == 1


# --- grants -----------------------------------------------------------------------------------------------------

MAY_NOT_READ: Final = (
    "PERMISSION_DENIED",
    "organization, vault: the credential has no read access to this scope",
    "organization",
)
MAY_NOT_WRITE: Final = (
    "PERMISSION_DENIED",
    "organization, vault: the credential has no write access to this scope",
    "organization",
)
MAY_NOTHING: Final = (
    "PERMISSION_DENIED",
    "organization, vault: the credential has no access to this scope",
    "organization",
)


async def rights(ledger: Ledger) -> str:
    """Return a credential's rights: r, w, rw or "". Check that all refusals of a kind have the same message."""
    found = ""
    refusals = [await error_or_none(call) for call in reads(ledger)]
    if MAY_NOT_READ in refusals:
        assert refusals == [MAY_NOT_READ] * 8
    else:
        found += "r"
    written, state = await error_or_none(ledger.write(1, put("b"))), await error_or_none(ledger.get_client_state())
    assert written in (None, MAY_NOT_WRITE)
    found += "w" if written is None else ""
    assert state == (None if found else MAY_NOTHING)
    return found


async def error_or_none(call: Any) -> tuple[str, str, str | None] | None:
    try:
        await call
    except CallError as error:
        return error.summary
    return None


@pytest.mark.rule("CO-22", "LG-7")
@pytest.mark.parametrize(
    ("read", "write", "expected"),
    [
        ([], [], ["", "", "", "", ""]),
        (["ledger/{o}"], [], ["r", "", "", "", ""]),
        ([], ["ledger/{o}"], ["w", "", "", "", ""]),
        (["ledger/{o}/main"], ["ledger/{o}/main"], ["", "rw", "", "", ""]),
        (["ledger/{o}/*"], ["ledger/{o}/*"], ["", "rw", "rw", "", ""]),
        (["ledger/{o}*"], ["ledger/{o}/main"], ["r", "rw", "r", "r", ""]),
        (["ledger/{o}", "ledger/{o}/*"], ["ledger/{o}"], ["rw", "r", "r", "", ""]),
        (["ledger/*"], ["*"], ["rw", "rw", "rw", "rw", "rw"]),
        (["{o}", "ledger/{o}/"], ["{o}/main"], ["", "", "", "", ""]),
        (["ledger/a{o}%2Fb"], ["ledger/a{o}%2Fb"], ["", "", "", "", "rw"]),
        (["ledger/a{o}/b", "ledger/a{o}/*"], ["ledger/a{o}/b"], ["", "", "", "", ""]),
    ],
)
async def test_grants_apply_to_the_scopes_they_list(
    shared_server: SharedServer, read: list[str], write: list[str], expected: list[str]
) -> None:
    """`{o}` in a grant is replaced by the test's organization."""
    name, server = shared_server.name, shared_server.server
    scopes = [(name, ""), (name, "main"), (name, "other"), (f"{name}2", ""), (f"a{name}/b", "")]
    for scope in scopes:  # with the idempotency key that the other credential will send
        assert (
            code(await server.ledger(*scope, credential=token("root")).write(1, SET, relate("r"), key=key(1))) == "OK"
        )
    shown = token("ada", [one.format(o=name) for one in read], [one.format(o=name) for one in write])
    found = [await rights(server.ledger(*scope, credential=shown)) for scope in scopes]
    assert found == expected


@pytest.mark.rule("CO-22", "LG-2")
async def test_failed_condition_hides_the_value_from_a_client_without_read_grant(shared_server: SharedServer) -> None:
    await shared_server.ledger_as(token()).write(1, put("a"))
    ledger = shared_server.ledger_as(token("bob", [], ["*"]))
    answer = await ledger.write(1, put("a", condition={"must_not_exist": True}))
    assert answer["error"]["code"] == "KEY_EXISTS"
    assert answer["error"]["key"] == "a"
    assert not answer["error"].keys() & {"current_value", "current_version"}
    assert "1" not in answer["error"]["message"]


@pytest.mark.rule("CO-22", "CO-18")
async def test_unauthorized_write_does_not_reveal_keys_or_sequences(shared_server: SharedServer) -> None:
    owner = shared_server.ledger_as(token())
    await owner.write(1, SET, key=key(1))
    for readable in (["*"], []):
        ledger = shared_server.ledger_as(token("ada", readable, []))  # the same client
        calls = [
            ledger.write(1, SET, key=key(1)),
            ledger.write(1, put("x"), key=key(1)),
            ledger.write(1, SET),
            ledger.write(2, SET, key=key(2)),
            ledger.write(1, SET, key=key(2)),
            ledger.write(9, SET, key=key(2)),
            ledger.write(2, put("a", condition={"must_not_exist": True}), key=key(2)),
            ledger.batch_write(1, [SET], key=key(1)),
            ledger.batch_write(2, [SET], key=key(2)),
        ]
        assert await refusals(calls) == [MAY_NOT_WRITE] * len(calls)
    # A malformed field is reported before a missing grant, which reveals nothing about stored data.
    error = await expect_refusal(ledger.write(0, SET, key=key(1)))
    assert error.field == "sequence"
    assert await owner.last_sequence() == 1


@pytest.mark.rule("CO-22")
async def test_retry_after_the_write_grant_was_removed_is_refused(shared_server: SharedServer) -> None:
    shown = api_key(shared_server.server.served, "app", [shared_server.scope], [shared_server.scope])
    ledger = shared_server.ledger_as(shown.text)
    answer = expect_success(await ledger.write(1, SET, key=key(1)))
    assert await ledger.write(1, SET, key=key(1)) == answer
    with replace_grants(shared_server):
        assert await refusals(writes(ledger)) == [MAY_NOT_WRITE] * 2
        assert (await expect_refusal(ledger.get_client_state())).summary == MAY_NOTHING
    assert await ledger.write(1, SET, key=key(1)) == answer


@contextmanager
def replace_grants(shared_server: SharedServer) -> Iterator[None]:
    """Make the test's API keys grant a different scope until the end of the block."""
    server = shared_server.server
    assert server.served.api_keys is not None
    path = Path(server.served.api_keys._path)
    before = path.read_text()
    try:
        path.write_text(before.replace(f'"{shared_server.scope}"', '"ledger/other"'))
        server.server.reload()
        yield
    finally:
        path.write_text(before)
        server.server.reload()


@pytest.mark.rule("CO-22")
async def test_transaction_of_another_scope_is_not_found(tmp_path: Path, wire: str) -> None:
    clock = ManualClock(auth_material.NOW_MS)
    await prepare(tmp_path, clock)  # one lane, so that the ids of both scopes have the same form
    async with run_server(tmp_path, wire, tokens=True, clock=clock) as server:
        owner = server.ledger(vault="secret", credential=token("owner"))
        answer = expect_success(await owner.write(1, SET, key=key(1)))
        tx_id = answer["committed_tx_id"]
        ledger = server.ledger(vault="mine", credential=token("ada", ["ledger/acme/mine"], ["ledger/acme/mine"]))
        await ledger.write(1, SET)
        missing = ("NOT_FOUND", "tx_id: the scope has no such transaction", "tx_id")
        for scope in ({"vault": "mine"}, {"vault": "", "organization": "acme2"}):
            one = server.ledger(credential=token()).of(**scope)
            for other in (tx_id, "0" * 16, "f" * 16, f"{int(tx_id, 16) + 7:016x}", "0000000000000001"):
                assert await refusals([one.get_transaction(other), one.get_proof(other)]) == [missing] * 2
        assert (await expect_refusal(ledger.get_transaction(tx_id))).summary == missing
        assert (await owner.get_transaction(tx_id))["tx_id"] == tx_id
        assert await refusals(reads(ledger.of(vault="secret"))) == [MAY_NOT_READ] * 8
