"""Credentials that expire or are revoked at runtime: polled files, open connections, token lifetimes (CO-28)."""

import json
import logging
import os
from pathlib import Path
from typing import Any, NoReturn

import pytest

from deadlines import until
from oncelog.errors import AuthError, SettingsError
from oncelog.server import reloader
from oncelog.server.auth import credential_files
from oncelog.server.auth.api_keys import ApiKeys, CreatedKey
from oncelog.server.auth.authenticator import Authenticator
from oncelog.server.auth.credential_files import CredentialEvent
from oncelog.server.auth.principal import parse_grants
from oncelog.testing.clock import ManualClock
from server.auth import auth_material
from server.auth.auth_material import NOW_S, token, write_file
from server.ledger.ledger_servers import run_server
from server.ledger.ledger_transports import GRPC
from server.running_server import Serving, SocketClient, item, numbers, serving

pytestmark = pytest.mark.rule("CO-28")

ALL = parse_grants(["*"], ["*"])
SECOND_SECRET = auth_material.SECRET + b"1"
"""The key `material.make_key("HS256", 1)`."""


@pytest.fixture(autouse=True)
def fast_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reloader, "CREDENTIALS_POLL_S", 0.02)


def is_accepted(served: Serving, credential: str) -> bool:
    try:
        served.server._authenticator.authenticate(credential)
    except AuthError:
        return False
    return True


async def create(served: Serving, client_id: str) -> CreatedKey:
    """Create a key with all grants and wait until the server has loaded it."""
    assert served.api_keys is not None
    key = served.api_keys.create(client_id, client_id, ALL)
    await until(lambda: is_accepted(served, key.text))
    return key


async def check_ended(client: SocketClient) -> None:
    """Assert that the server closes the connection because its credential is no longer valid."""
    assert (await client.receive())["payload"]["code"] == "auth_failed"
    assert await client.wait_closed() == 1008


def failed_files(served: Serving, kind: str) -> bool:
    return f'oncelog_credential_files_failed{{kind="{kind}"}} 1.0' in served.server.metrics.render().decode()


# --- revocation -------------------------------------------------------------------------------------------


async def test_revoked_key_closes_its_websocket_and_stream_without_a_signal(tmp_path: Path) -> None:
    async with serving(tmp_path, api_keys=True) as served:
        gone, kept = await create(served, "gone"), await create(served, "kept")
        socket, staying = await served.connected("gone", gone.text), await served.connected("kept", kept.text)
        stream = await served.stream("a", credential=gone.text)
        await stream.connected()
        assert served.api_keys is not None
        served.api_keys.revoke(gone.key.id)
        await check_ended(socket)
        message = await stream.next()
        assert message is not None
        assert (message.kind, message.json["code"]) == ("error", "auth_failed")
        # The audit record of the key also takes a committed id.
        assert len(numbers(await staying.submit(item(1)))) == 1
        assert (await served.page("a", credential=gone.text)).status == 401


async def test_revoked_key_closes_its_grpc_stream_without_a_signal(tmp_path: Path) -> None:
    async with run_server(tmp_path, GRPC, api_keys=True) as server:
        key = await create(server.served, "gone")
        watching = await server.ledger(credential=key.text).watch_blocks()
        await until(lambda: server.server._reader_count == 1)
        assert server.served.api_keys is not None
        server.served.api_keys.revoke(key.key.id)
        await until(lambda: server.server._reader_count == 0)
        await watching.close()


@pytest.mark.parametrize("how", ["written in place", "replaced by a rename"])
async def test_replaced_signing_key_closes_connections_of_its_tokens(tmp_path: Path, how: str) -> None:
    path = tmp_path / "HS256-0.key"
    async with serving(tmp_path, tokens=True) as served:
        text = token(grants=ALL.to_claim())
        client = await served.connected("laptop", text)
        assert numbers(await client.submit(item(1))) == [1]
        if how == "replaced by a rename":
            write_file(tmp_path / "new", SECOND_SECRET).replace(path)
        else:
            write_file(path, SECOND_SECRET)
        await check_ended(client)
        assert not is_accepted(served, text)
        assert is_accepted(served, token(key=auth_material.make_key("HS256", 1)))


async def test_rewriting_an_unchanged_signing_key_keeps_connections_open(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "HS256-0.key"
    async with serving(tmp_path, tokens=True) as served:
        client = await served.connected("laptop", token(grants=ALL.to_claim()))
        files = served.server._authenticator.files
        write_file(tmp_path / "new", path.read_bytes()).replace(path)
        with caplog.at_level(logging.INFO, "oncelog.doors"):
            await until(lambda: files._files[0].version == credential_files._get_version(str(path)))
        served.server.reload()
        assert numbers(await client.submit(item(1))) == [1]
        assert "HS256-0.key was reloaded" not in caplog.text


async def test_changed_grants_apply_without_a_signal(tmp_path: Path) -> None:
    async with serving(tmp_path, api_keys=True) as served:
        key = await create(served, "a")
        client = await served.connected("a", key.text)
        path = tmp_path / "keys.json"
        write_file(tmp_path / "new", path.read_bytes().replace(b'"*"', b'"b"')).replace(path)
        await until(lambda: not served.server._authenticator.authenticate(key.text).grants.may_write("a"))
        (refused, taken) = await client.submit(item(1, "a"), item(2, "b"))
        assert (refused["reason"], taken["status"]) == ("forbidden", "committed")


# --- bad files --------------------------------------------------------------------------------------------


async def test_bad_file_keeps_the_loaded_content_and_is_counted_and_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(tmp_path, api_keys=True) as served:
        key = await create(served, "a")
        client = await served.connected("a", key.text)
        path = tmp_path / "keys.json"
        content = path.read_bytes()
        assert not failed_files(served, "api_keys")
        # Replace the file atomically, because a poll may read it at any time.
        write_file(tmp_path / "bad.json", b"{").replace(path)
        await until(lambda: failed_files(served, "api_keys"))
        files = served.server._authenticator.files
        polls = files._polls
        await until(lambda: files._polls > polls + 2 * credential_files.RETRY_POLLS)
        assert caplog.text.count("not reloaded; its previous content is still used: ") == 1
        assert numbers(await client.submit(item(1))) == [1]
        path.unlink()
        await until(lambda: "No such file" in caplog.text)
        assert is_accepted(served, key.text)
        write_file(path, content)
        await until(lambda: not failed_files(served, "api_keys"))
        assert caplog.text.count("not reloaded; its previous content is still used: ") == 2


def test_poll_does_not_report_a_failed_reload_again(tmp_path: Path) -> None:
    path = tmp_path / "HS256-0.key"
    known = Authenticator(auth_material.tokens(tmp_path))
    path.write_bytes(b"short")
    with pytest.raises(SettingsError, match="at least 32 bytes"):
        known.reload()
    for _ in range(2 * credential_files.RETRY_POLLS):
        assert known.files.apply(known.files.load_changes()) == (False, [])
    path.write_bytes(b"shorter")
    (failure,) = known.files.apply(known.files.load_changes())[1]
    assert "at least 32 bytes" in failure


async def test_bad_file_does_not_delay_the_reload_of_others(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(tmp_path, tokens=True, api_keys=True) as served:
        key = await create(served, "a")
        client = await served.connected("a", key.text)
        (tmp_path / "HS256-0.key").write_bytes(b"short")
        await until(lambda: failed_files(served, "signing_keys"))
        assert served.api_keys is not None
        served.api_keys.revoke(key.key.id)
        await check_ended(client)
        assert is_accepted(served, token())
        assert not failed_files(served, "api_keys")


# --- expiry and lifetime ----------------------------------------------------------------------------------


async def test_expired_api_key_closes_its_connection(tmp_path: Path) -> None:
    clock = ManualClock(auth_material.NOW_MS)
    async with serving(tmp_path, api_keys=True, clock=clock) as served:
        assert served.api_keys is not None
        key = served.api_keys.create("a", "a", ALL, expires_ms=auth_material.NOW_MS + 60_000)
        await until(lambda: is_accepted(served, key.text))
        client = await served.connected("a", key.text)
        clock.advance(59_999)
        served.server.run_checks()
        assert numbers(await client.submit(item(1))) == [1]
        clock.advance(1)
        await check_ended(client)
        assert not is_accepted(served, key.text)


@pytest.mark.parametrize(
    ("claims", "is_good"),
    [
        ({"iat": NOW_S, "exp": NOW_S + 3600}, True),
        ({"iat": NOW_S, "exp": NOW_S + 3601}, False),
        ({"iat": NOW_S - 3000, "exp": NOW_S + 600}, True),
        ({"iat": NOW_S - 3000, "exp": NOW_S + 601}, False),
        ({"exp": NOW_S + 3600}, True),
        ({"exp": NOW_S + 3601}, False),
    ],
)
def test_token_above_the_maximum_lifetime_is_refused(tmp_path: Path, claims: dict[str, Any], is_good: bool) -> None:
    tokens = auth_material.tokens(tmp_path, lifetime_max_ms=3_600_000)
    if is_good:
        tokens.authenticate(token(**claims))
        return
    with pytest.raises(AuthError) as caught:
        tokens.authenticate(token(**claims))
    assert caught.value.reason == "token: valid for longer than tokens.lifetime_max_ms"


def test_maximum_lifetime_defaults_to_30_days_and_0_disables_it(tmp_path: Path) -> None:
    month_s = 30 * 86_400
    auth_material.tokens(tmp_path).authenticate(token(exp=NOW_S + month_s))
    with pytest.raises(AuthError):
        auth_material.tokens(tmp_path).authenticate(token(exp=NOW_S + month_s + 1))
    auth_material.tokens(tmp_path, lifetime_max_ms=0).authenticate(token(exp=NOW_S + 100 * month_s))
    with pytest.raises(SettingsError, match="lifetime_max_ms"):
        auth_material.tokens(tmp_path, lifetime_max_ms=-1)


def fail(_: CredentialEvent) -> NoReturn:
    raise RuntimeError("the listener is broken")


# --- listeners -----------------------------------------------------------------------------------------------


async def test_listeners_are_notified_of_keys_that_have_ended(tmp_path: Path) -> None:
    clock = ManualClock(auth_material.NOW_MS)
    keys = ApiKeys(tmp_path / "keys.json", clock.wall_ms)
    early, revoked, expiring, removed = (keys.create(name, name, ALL) for name in ("early", "a", "b", "c"))
    keys.revoke(early.key.id)
    expiring = keys.create("b", "b", ALL, expires_ms=auth_material.NOW_MS + 1000)
    events: list[CredentialEvent] = []
    async with serving(tmp_path, tokens=True, api_keys=True, clock=clock) as served:
        served.server.subscribe_credentials(events.append)
        served.server.subscribe_credentials(fail)  # A failing listener does not prevent reports to the others.
        keys.revoke(revoked.key.id)
        await until(lambda: len(events) == 1)
        clock.advance(1000)
        await until(lambda: len(events) == 2)
        left = [one for one in json.loads((tmp_path / "keys.json").read_bytes())["keys"] if one["client_id"] != "c"]
        write_file(tmp_path / "new", json.dumps({"version": 2, "keys": left}).encode()).replace(tmp_path / "keys.json")
        await until(lambda: len(events) == 3)
        write_file(tmp_path / "HS256-0.key", SECOND_SECRET)
        await until(lambda: len(events) == 4)
    assert [(one.act, one.id, one.client_id, one.at_ms - auth_material.NOW_MS) for one in events] == [
        ("api_key_revoked", revoked.key.id, "a", 0),
        ("api_key_expired", expiring.key.id, "b", 1000),
        ("api_key_removed", removed.key.id, "c", 1000),
        ("signing_key_removed", "HS256/", None, 1000),
    ]
    assert {one.path for one in events} == {str(tmp_path / "keys.json"), str(tmp_path / "HS256-0.key")}
    assert not any(one.is_initial for one in events)


def test_keys_that_ended_before_the_first_load_are_reported_as_initial(tmp_path: Path) -> None:
    clock = auth_material.SetClock()
    keys = ApiKeys(tmp_path / "keys.json", clock)
    revoked, expired = keys.create("a", "a", ALL), keys.create("b", "b", ALL, expires_ms=auth_material.NOW_MS - 1)
    keys.revoke(revoked.key.id)
    served, events = ApiKeys(tmp_path / "keys.json", clock), list[CredentialEvent]()
    served.subscribe(events.append)
    for _ in range(2):
        auth_material.reload(served)
        served.report_expired()
    assert [(one.act, one.id, one.is_initial) for one in events] == [
        ("api_key_revoked", revoked.key.id, True),
        ("api_key_expired", expired.key.id, True),
    ]


def test_removed_public_key_is_reported_with_its_fingerprint(tmp_path: Path) -> None:
    one, two = (auth_material.public_jwk("ES256", name, number) for number, name in enumerate(("one", "two")))
    source = auth_material.key_set(tmp_path / "set.json", one, two)
    tokens = auth_material.tokens(tmp_path, "ES256", key_files=(source,))
    known = Authenticator(tokens)
    events: list[CredentialEvent] = []
    known.subscribe(events.append)
    found = known.authenticate(token("ES256", header={"kid": "one"}))
    auth_material.key_set(tmp_path / "set.json", two)
    known.reload()
    assert known.refresh_principal(found, auth_material.NOW_MS) is None
    (event,) = events
    fingerprint = auth_material.make_key("ES256", 0).thumbprint()
    assert (event.act, event.id, event.fingerprint) == ("signing_key_removed", "ES256/one", fingerprint)


# --- the files --------------------------------------------------------------------------------------------


def test_key_may_move_from_one_file_to_another(tmp_path: Path) -> None:
    one, two, three = (auth_material.public_jwk("ES256", name, number) for number, name in enumerate("123"))
    sources = (auth_material.key_set(tmp_path / "a", one), auth_material.key_set(tmp_path / "b", two, three))
    known = Authenticator(auth_material.tokens(tmp_path, "ES256", key_files=sources))
    known.reload()
    auth_material.key_set(tmp_path / "a", one, two)
    known.files.apply(known.files.load_changes())
    assert known.files.count_failed() == {"signing_keys": 1}  # the other file still contains the key
    auth_material.key_set(tmp_path / "b", three)
    assert known.files.apply(known.files.load_changes()) == (True, [])
    assert known.files.count_failed() == {"signing_keys": 0}
    for number, name in enumerate("123"):
        known.authenticate(token("ES256", auth_material.make_key("ES256", number), header={"kid": name}))


def test_poll_that_began_before_a_complete_reload_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    operator, served = (ApiKeys(path, auth_material.SetClock()) for _ in range(2))
    key = operator.create("a", "a", ALL)
    known = Authenticator(api_keys=served)
    known.reload()
    os.utime(path)
    before = known.files.load_changes()
    operator.revoke(key.key.id)
    known.reload()
    assert known.files.apply(before) == (False, [])
    with pytest.raises(AuthError):
        known.authenticate(key.text)


def test_second_change_within_the_clock_resolution_is_detected(tmp_path: Path) -> None:
    path = tmp_path / "HS256-0.key"
    known = Authenticator(auth_material.tokens(tmp_path))
    known.reload()
    version = credential_files._get_version(str(path))
    assert version is not None
    path.write_bytes(SECOND_SECRET + b"\n")  # The file keeps its size and inode.
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(credential_files, "_get_version", lambda _: version)
        assert known.files.apply(known.files.load_changes()) == (True, [])
    known.authenticate(token(key=auth_material.make_key("HS256", 1)))
