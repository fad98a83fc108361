"""Polling of credential files: moved keys, loose permissions, hanging reads, and unexpected errors (CO-28)."""

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest

from deadlines import until
from oncelog.errors import AuthError, SettingsError
from oncelog.server import app, reloader
from oncelog.server.audit.endpoints import to_record_act
from oncelog.server.auth import credential_files, secret_files
from oncelog.server.auth.api_keys import ApiKeys, CreatedKey
from oncelog.server.auth.authenticator import Authenticator
from oncelog.server.auth.credential_files import CredentialEvent
from oncelog.server.auth.principal import parse_grants
from oncelog.server.auth.signing_keys import KeyFile, KeyKind
from oncelog.server.websocket import WebSocketSessions
from security.test_revocation import ALL, check_ended, create, failed_files, is_accepted
from server.auth import auth_material
from server.auth.auth_material import token, write_file
from server.running_server import serving

pytestmark = pytest.mark.rule("CO-28")


@pytest.fixture(autouse=True)
def fast_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reloader, "CREDENTIALS_POLL_S", 0.02)


def poll(known: Authenticator) -> tuple[bool, list[str]]:
    return known.files.apply(known.files.load_changes())


def record_events(known: Authenticator) -> list[CredentialEvent]:
    events: list[CredentialEvent] = []
    known.subscribe(events.append)
    return events


def act_keys(events: list[CredentialEvent]) -> list[bytes]:
    """Return the keys of the audit records for these events."""
    return [act.key for event in events if (act := to_record_act(event)) is not None]


def write_with_mtime(path: Path, content: bytes, at_s: int) -> None:
    """Write a file and set its mtime, because file-system timestamps may be too coarse to distinguish two writes."""
    write_file(path, content)
    os.utime(path, (at_s, at_s))


def signing_keys(count: int) -> list[dict[str, Any]]:
    """Return `count` keys as members of key sets, with ids 0, 1, …"""
    return [auth_material.public_jwk("ES256", str(number), number) for number in range(count)]


def verifies(known: Authenticator, number: int, key_id: str) -> bool:
    try:
        known.authenticate(token("ES256", auth_material.make_key("ES256", number), header={"kid": key_id}))
    except AuthError:
        return False
    return True


# --- keys that move between files -----------------------------------------------------------------------------


@pytest.mark.parametrize("is_poll", [True, False], ids=["poll", "reload"])
@pytest.mark.parametrize("order", ["ab", "ba"])
def test_key_moved_between_files_is_not_reported_as_removed(tmp_path: Path, order: str, is_poll: bool) -> None:
    one, two, three = signing_keys(3)
    auth_material.key_set(tmp_path / "a", one, two)
    auth_material.key_set(tmp_path / "b", three)
    sources = tuple(KeyFile(str(tmp_path / name), KeyKind.JWKS) for name in order)
    known = Authenticator(auth_material.tokens(tmp_path, "ES256", key_files=sources))
    known.reload()
    events = record_events(known)
    auth_material.key_set(tmp_path / "a", one)
    auth_material.key_set(tmp_path / "b", two, three)
    if is_poll:
        assert poll(known) == (True, [])
    else:
        known.reload()
    assert events == []
    assert all(verifies(known, number, str(number)) for number in range(3))


def test_files_can_exchange_keys_in_one_change(tmp_path: Path) -> None:
    one, two = signing_keys(2)
    sources = (auth_material.key_set(tmp_path / "a", one), auth_material.key_set(tmp_path / "b", two))
    known = Authenticator(auth_material.tokens(tmp_path, "ES256", key_files=sources))
    known.reload()
    events = record_events(known)
    auth_material.key_set(tmp_path / "a", {**one, "kid": "1"})
    auth_material.key_set(tmp_path / "b", {**two, "kid": "0"})
    assert poll(known) == (True, [])
    assert [verifies(known, 0, "1"), verifies(known, 1, "0"), verifies(known, 0, "0")] == [True, True, False]
    assert sorted(event.id for event in events) == ["ES256/0", "ES256/1"]


@pytest.mark.parametrize("wrong", ["a", "b", "c"])
def test_conflict_in_one_file_does_not_prevent_others_from_exchanging_keys(tmp_path: Path, wrong: str) -> None:
    """A third file, before or after the others, repeats an id."""
    members = signing_keys(4)
    paths = {name: tmp_path / name for name in "abc"}
    first, second = [name for name in "abc" if name != wrong]
    sources = tuple(auth_material.key_set(path, members["abc".index(name)]) for name, path in paths.items())
    known = Authenticator(auth_material.tokens(tmp_path, "ES256", key_files=sources))
    known.reload()
    kids = {name: str("abc".index(name)) for name in "abc"}
    auth_material.key_set(paths[first], {**members[int(kids[first])], "kid": kids[second]})
    auth_material.key_set(paths[second], {**members[int(kids[second])], "kid": kids[first]})
    auth_material.key_set(paths[wrong], {**members[3], "kid": kids[first]})
    has_changed, failures = poll(known)
    assert (has_changed, len(failures)) == (True, 1)
    assert "two ES256 keys have the id" in failures[0]
    assert verifies(known, int(kids[first]), kids[second])
    assert verifies(known, int(kids[second]), kids[first])
    assert verifies(known, int(kids[wrong]), kids[wrong])  # still the previous assignment


# --- audit records of removals ----------------------------------------------------------------------------


@pytest.mark.rule("CO-43")
def test_every_removal_of_a_secret_with_one_id_is_recorded(tmp_path: Path) -> None:
    path = write_file(tmp_path / "secret", b"a" * 40)
    source = KeyFile(str(path), KeyKind.SECRET, "2026")
    servers = [Authenticator(auth_material.tokens(tmp_path, key_files=(source,))) for _ in range(2)]
    noticed = [record_events(known) for known in servers]
    for at_s, letter in enumerate((b"b", b"c", b"d"), auth_material.NOW_S):
        write_with_mtime(path, letter * 40, at_s)
        for known in servers:
            known.reload()
    assert [len(events) for events in noticed] == [3, 3]
    first, second = (act_keys(events) for events in noticed)
    assert len(set(first)) == 3
    assert first == second  # All servers that share a file record a removal only once.


@pytest.mark.rule("CO-43")
def test_restored_key_that_is_removed_again_is_recorded_twice(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    operator = ApiKeys(path, auth_material.SetClock())
    removed, _ = (operator.create(name, name, ALL) for name in "ab")
    before, after = path.read_bytes(), remove_key(path, removed)
    known = Authenticator(api_keys=ApiKeys(path, auth_material.SetClock()))
    known.reload()
    events = record_events(known)
    for at_s, content in enumerate((after, before, after), auth_material.NOW_S):
        write_with_mtime(path, content, at_s)
        known.reload()
    assert [(event.act, event.id) for event in events] == [("api_key_removed", removed.key.id)] * 2
    assert len(set(act_keys(events))) == 2


@pytest.mark.rule("CO-43")
def test_key_revoked_at_a_different_time_is_recorded_again(tmp_path: Path) -> None:
    path, clock = tmp_path / "keys.json", auth_material.SetClock()
    operator = ApiKeys(path, clock)
    key = operator.create("a", "a", ALL)
    known = Authenticator(api_keys=ApiKeys(path, clock))
    known.reload()
    events, before = record_events(known), path.read_bytes()
    for _ in range(2):
        clock.now_ms += 1
        operator.revoke(key.key.id)
        known.reload()
        write_file(path, before)
        known.reload()
    assert [event.act for event in events] == ["api_key_revoked"] * 2
    assert len(set(act_keys(events))) == 2


# --- files that other users may read or change ------------------------------------------------------------------


def remove_key(path: Path, removed: CreatedKey) -> bytes:
    """Return the content of an API-key file without one key."""
    content = json.loads(path.read_bytes())
    return json.dumps({**content, "keys": [one for one in content["keys"] if one["id"] != removed.key.id]}).encode()


@pytest.mark.rule("CO-26")
async def test_loose_file_revokes_and_removes_keys_and_adds_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys.json"
    async with serving(tmp_path, api_keys=True) as served:
        assert served.api_keys is not None
        kept, revoked, removed = [await create(served, name) for name in ("kept", "revoked", "removed")]
        clients = [await served.connected(name, key.text) for name, key in (("revoked", revoked), ("removed", removed))]
        path.chmod(0o644)
        await until(lambda: failed_files(served, "api_keys"))
        assert "no keys are added" in caplog.text
        assert "chmod 600" in caplog.text
        assert all(is_accepted(served, key.text) for key in (kept, revoked, removed))
        # A text editor or an older version of the command rewrites the file and keeps its mode.
        operator = ApiKeys(tmp_path / "other.json", auth_material.SetClock())
        added = operator.create("added", "added", ALL)
        content = json.loads(remove_key(path, removed))
        for one in content["keys"]:
            one["revoked_ms"] = 1 if one["id"] == revoked.key.id else None
        content["keys"] += json.loads((tmp_path / "other.json").read_bytes())["keys"]
        path.write_text(json.dumps(content))
        for client in clients:
            await check_ended(client)
        assert [is_accepted(served, key.text) for key in (kept, revoked, removed, added)] == [True, False, False, False]
        assert failed_files(served, "api_keys")
        path.chmod(0o600)
        await until(lambda: not failed_files(served, "api_keys"))
        assert is_accepted(served, added.text)


@pytest.mark.parametrize("mode", [0o644, 0o666])
def test_loose_file_reduces_grants_and_lifetimes_and_extends_none(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "keys.json"
    operator = ApiKeys(path, auth_material.SetClock())
    key = operator.create("a", "a", parse_grants(["orders/*", "a"], ["x"]), expires_ms=auth_material.NOW_MS + 10)
    other = operator.create("b", "b", ALL)
    operator.revoke(other.key.id)
    known = Authenticator(api_keys=ApiKeys(path, auth_material.SetClock()))
    known.reload()
    content = json.loads(path.read_bytes())
    changed, again = content["keys"]
    changed["grants"] = {"read": ["orders/1/*", "b", "a*"], "write": ["*"], "audit": ["*"]}
    changed["expires_ms"] = None
    again["revoked_ms"] = None
    write_file(path, json.dumps(content).encode(), mode)
    assert poll(known)[0]
    found = known.authenticate(key.text)
    assert found.grants == parse_grants(["orders/1/*", "a"], ["x"])
    assert found.expires_ms == auth_material.NOW_MS + 10
    with pytest.raises(AuthError):
        known.authenticate(other.text)
    assert poll(known)[0] is False  # The key has no further rights that could be removed.
    changed["expires_ms"] = auth_material.NOW_MS + 5
    write_file(path, json.dumps(content).encode(), mode)
    assert poll(known)[0]
    assert known.authenticate(key.text).expires_ms == auth_material.NOW_MS + 5


@pytest.mark.parametrize("field", ["secret_sha256", "client_id"])
def test_loose_file_that_changes_a_key_removes_it(tmp_path: Path, field: str) -> None:
    path = tmp_path / "keys.json"
    key = ApiKeys(path, auth_material.SetClock()).create("a", "a", ALL)
    known = Authenticator(api_keys=ApiKeys(path, auth_material.SetClock()))
    known.reload()
    content = json.loads(path.read_bytes())
    content["keys"][0][field] = "0" * 64
    write_file(path, json.dumps(content).encode(), 0o666)
    poll(known)
    with pytest.raises(AuthError):
        known.authenticate(key.text)


def test_loose_key_set_removes_keys_and_adds_none(tmp_path: Path) -> None:
    one, two, three = signing_keys(3)
    source = auth_material.key_set(tmp_path / "set", one, two)
    known = Authenticator(auth_material.tokens(tmp_path, "ES256", key_files=(source,)))
    known.reload()
    events = record_events(known)
    auth_material.key_set(tmp_path / "set", two, three)
    (tmp_path / "set").chmod(0o666)
    has_changed, (failure,) = poll(known)
    assert has_changed
    assert "other users may change it" in failure
    assert [verifies(known, number, str(number)) for number in range(3)] == [False, True, False]
    assert [event.id for event in events] == ["ES256/0"]


def test_loose_file_is_refused_at_start(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    key = ApiKeys(path, auth_material.SetClock()).create("a", "a", ALL)
    path.chmod(0o644)
    known = Authenticator(api_keys=ApiKeys(path, auth_material.SetClock()))
    with pytest.raises(SettingsError, match="chmod 600"):
        known.reload()
    with pytest.raises(AuthError):
        known.authenticate(key.text)


# --- files that hang, and unexpected errors ---------------------------------------------------------------------


@contextmanager
def hang_reads(path: Path) -> Iterator[None]:
    """Make every read of the file block, as on a network file system whose server does not respond."""
    released, read = threading.Event(), secret_files.read_file

    def read_or_hang(name: str, bytes_max: int) -> secret_files.FileContents:
        if name == str(path):
            released.wait()
        return read(name, bytes_max)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(secret_files, "read_file", read_or_hang)
        patched.setattr(credential_files, "POLL_TIMEOUT_S", 0.1)
        patched.setattr(credential_files, "RELOAD_TIMEOUT_S", 0.1)
        try:
            yield
        finally:
            released.set()


async def test_hanging_file_does_not_delay_a_revocation_in_another(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "HS256-0.key"
    async with serving(tmp_path, tokens=True, api_keys=True) as served:
        key = await create(served, "a")
        client = await served.connected("a", key.text)
        threads = threading.active_count()
        with hang_reads(path):
            write_file(path, auth_material.SECRET + b"1")
            await until(lambda: failed_files(served, "signing_keys"))
            assert served.api_keys is not None
            served.api_keys.revoke(key.key.id)
            await check_ended(client)
            served.server.reload()
            polls = served.server._authenticator.files._polls
            await until(lambda: served.server._authenticator.files._polls > polls + 5)
            assert threading.active_count() <= threads + 3  # one hanging poll and one hanging reload
            assert caplog.text.count("the file system does not respond") <= 2
            assert is_accepted(served, token())
        await until(lambda: not failed_files(served, "signing_keys"))
        assert is_accepted(served, token(key=auth_material.make_key("HS256", 1)))


def raise_error(*_: object) -> NoReturn:
    raise RuntimeError("unexpected")


@pytest.mark.parametrize(
    ("place", "name", "logged"),
    [
        (credential_files, "_get_version", "cannot be read: RuntimeError"),
        (credential_files.CredentialFiles, "load_changes", "the credential files could not be polled"),
        (credential_files.CredentialFiles, "apply", "the credential files could not be polled"),
        (Authenticator, "report_expired", "the credential files could not be polled"),
        (WebSocketSessions, "renew", "a periodic check failed"),
    ],
)
async def test_polling_continues_after_an_unexpected_error(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    place: object,
    name: str,
    logged: str,
) -> None:
    monkeypatch.setattr(app, "RENEW_S", 0.02)
    async with serving(tmp_path, api_keys=True) as served:
        with monkeypatch.context() as patched:
            patched.setattr(place, name, raise_error)
            await until(lambda: logged in caplog.text)
        key = await create(served, "a")
        client = await served.connected("a", key.text)
        assert served.api_keys is not None
        served.api_keys.revoke(key.key.id)
        await check_ended(client)


@pytest.mark.parametrize("mode", [0o600, 0o644])
@pytest.mark.parametrize("name", ["use", "check", "restrict"])
def test_change_is_retried_after_an_unexpected_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, mode: int
) -> None:
    monkeypatch.setattr(credential_files, "SETTLE_NS", -1)  # a new file is read only once
    path = tmp_path / "keys.json"
    operator = ApiKeys(path, auth_material.SetClock())
    key = operator.create("a", "a", ALL)
    known = Authenticator(api_keys=ApiKeys(path, auth_material.SetClock()))
    known.reload()
    operator.revoke(key.key.id)
    path.chmod(mode)
    with monkeypatch.context() as patched:
        patched.setattr(ApiKeys, name, raise_error)
        poll(known)
    for _ in range(credential_files.RETRY_POLLS):
        poll(known)
    with pytest.raises(AuthError):
        known.authenticate(key.text)
    assert known.files.count_failed() == {"api_keys": 1 if mode == 0o644 else 0}


async def test_session_that_cannot_be_renewed_is_closed_and_others_are_renewed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(tmp_path, api_keys=True) as served:
        keys = [await create(served, name) for name in "ab"]
        broken, ending = [await served.connected(key.key.client_id, key.text) for key in keys]
        found = {
            one.principal.client_id: one
            for one in served.server.apis.event_sessions.connections
            if one.principal is not None
        }
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(found["a"], "renew", raise_error)
            assert served.api_keys is not None
            for key in keys:
                served.api_keys.revoke(key.key.id)
            await check_ended(ending)
            assert (await broken.receive())["type"] == "error"
            await broken.wait_closed()
        assert "a connection's rights could not be refreshed" in caplog.text
