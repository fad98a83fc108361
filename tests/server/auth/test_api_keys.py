"""API keys: shown once, stored as hashes, revoked permanently, and safe to change from several processes."""

import base64
import errno
import hmac
import json
import os
import re
import stat
import threading
from contextlib import ExitStack
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import pytest

from deadlines import WAIT_S
from oncelog.core.limits import NAME_CHARACTERS_MAX
from oncelog.errors import AUTHENTICATION_FAILED, AuthError, CanonicalError, LimitExceededError, SettingsError
from oncelog.server.auth import api_keys, secret_files
from oncelog.server.auth.api_keys import ApiKeys
from oncelog.server.auth.principal import Grants, Principal, parse_grants
from oncelog.server.auth.secret_files import SecretCheck
from scripts import read_line, start_script
from server.auth import auth_material
from server.auth.auth_material import NOW_MS, SetClock

SCRIPT: Final = str(Path(__file__).with_name("api_keys_worker.py"))
LEFT_OUT: Final = "left out"
GRANTS: Final = parse_grants(["orders/*"], ["orders/1"])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


@pytest.fixture
def keys(path: Path) -> ApiKeys:
    return ApiKeys(path, SetClock())


def refusal(keys: ApiKeys, text: str) -> str:
    with pytest.raises(AuthError) as caught:
        keys.authenticate(text)
    assert str(caught.value) == AUTHENTICATION_FAILED
    secret = text[-43:]
    assert len(secret) < 20 or secret not in auth_material.all_texts(caught.value)
    return caught.value.reason


@pytest.mark.rule("CO-20", "CO-21")
def test_key_yields_the_principal_of_its_client(keys: ApiKeys) -> None:
    created = keys.create("billing", "nightly bills", GRANTS)
    assert re.fullmatch(r"olk_[0-9a-f]{16}_[A-Za-z0-9_-]{43}", created.text)
    assert keys.authenticate(created.text) == Principal(
        actor="client:billing", client_id="billing", grants=GRANTS, expires_ms=None, key_id=created.key.id
    )


@pytest.mark.rule("CO-21")
def test_file_stores_only_a_hash_and_repr_hides_the_secret(path: Path, keys: ApiKeys) -> None:
    created = keys.create("billing", "größe", GRANTS)
    secret = created.text[-43:]
    text = path.read_text(encoding="utf-8")
    assert secret not in text
    raw = base64.urlsafe_b64decode(secret + "=")
    assert len(raw) == 32
    assert json.loads(text) == {
        "version": 1,
        "keys": [
            {
                "id": created.key.id,
                "secret_sha256": sha256(raw).hexdigest(),
                "client_id": "billing",
                "name": "größe",
                "grants": {"read": ["orders/*"], "write": ["orders/1"]},
                "created_ms": NOW_MS,
                "revoked_ms": None,
            }
        ],
    }
    for shown in (repr(created), str(created), repr(keys.list()), repr(vars(keys))):
        assert secret not in shown
    assert sha256(raw).hexdigest() not in repr(keys.list())


def test_another_process_sees_changes_after_a_reload(path: Path, keys: ApiKeys) -> None:
    other = ApiKeys(path, SetClock())
    created = keys.create("a", "a", GRANTS)
    assert refusal(other, created.text) == "API key: unknown"
    auth_material.reload(other)
    other.authenticate(created.text)
    keys.revoke(created.key.id)
    other.authenticate(created.text)
    auth_material.reload(other)
    assert refusal(other, created.text) == f"API key {created.key.id}: revoked"


@pytest.mark.rule("CO-21")
def test_revoked_key_is_refused_and_kept_in_the_file(path: Path) -> None:
    clock = SetClock()
    keys = ApiKeys(path, clock)
    created, other = keys.create("a", "first", GRANTS), keys.create("b", "second", Grants())
    clock.now_ms += 5000
    revoked = keys.revoke(created.key.id)
    assert revoked is not None
    assert revoked.revoked_ms == NOW_MS + 5000
    clock.now_ms += 5000
    assert keys.revoke(created.key.id) == revoked
    assert keys.list() == [revoked, other.key]
    assert "revoked" in refusal(keys, created.text)
    keys.authenticate(other.text)
    assert keys.find_principal(created.key.id, NOW_MS) is None
    assert keys.find_principal(other.key.id, NOW_MS) == keys.authenticate(other.text)


@pytest.mark.rule("CO-28")
def test_expired_key_is_refused(path: Path) -> None:
    clock = SetClock()
    keys = ApiKeys(path, clock)
    created = keys.create("a", "a", GRANTS, expires_ms=NOW_MS + 1000)
    clock.now_ms += 999
    assert keys.authenticate(created.text).expires_ms == NOW_MS + 1000
    assert keys.find_principal(created.key.id, clock.now_ms) is not None
    clock.now_ms += 1
    assert "expired" in refusal(keys, created.text)
    assert keys.find_principal(created.key.id, clock.now_ms) is None
    assert keys.list() == [created.key]


@pytest.mark.rule("CO-28")
def test_file_without_expiry_is_readable_by_older_versions(path: Path, keys: ApiKeys) -> None:
    keys.create("a", "a", GRANTS)
    before = json.loads(path.read_bytes())
    assert before["version"] == 1
    assert "expires_ms" not in before["keys"][0]
    keys.create("b", "b", GRANTS, expires_ms=NOW_MS + 1)
    after = json.loads(path.read_bytes())
    assert after["version"] == 2
    assert "expires_ms" not in after["keys"][0]
    assert after["keys"][1]["expires_ms"] == NOW_MS + 1


def test_revoking_an_unknown_key_returns_none(keys: ApiKeys) -> None:
    keys.create("a", "a", GRANTS)
    assert keys.revoke("0" * 16) is None
    assert keys.find_principal("0" * 16, NOW_MS) is None


@pytest.mark.rule("CO-21")
def test_malformed_or_unknown_key_is_refused(keys: ApiKeys) -> None:
    good = keys.create("a", "a", GRANTS)
    other = keys.create("b", "b", GRANTS)
    head, secret = good.text[:21], good.text[21:]
    assert head == f"olk_{good.key.id}_"
    assert refusal(keys, head + other.text[21:]) == f"API key {good.key.id}: wrong secret"
    assert refusal(keys, f"olk_{'0' * 16}_{secret}") == "API key: unknown"
    last = "A" if secret[0] != "A" else "B"
    assert "wrong secret" in refusal(keys, head + last + secret[1:])
    for text in (
        *(
            "",
            "olk_",
            "olk__",
            head,
            good.text[:-1],
            good.text + "A",
            good.text + "=",
            good.text + "\n",
            " " + good.text,
        ),
        *(good.text.upper(), good.text.replace("olk_", "OLK_"), head + "é" * 43, head + "*" * 43, head + "\0" * 43),
        *("olk_" + "0" * 15 + "_" + secret, "olk_" + "g" * 16 + "_" + secret, "olk_" + "x" * 10_000_000),
        *("olk_" + "\u0661" * 16 + "_" + secret, "olk_" + "A" * 16 + "_" + secret),
    ):
        assert refusal(keys, text) == "API key: malformed"


@pytest.mark.rule("CO-21")
def test_only_one_spelling_of_a_secret_is_accepted(keys: ApiKeys) -> None:
    """The last letter has unused bits. A secret with different unused bits must not be accepted for the same key."""
    good = keys.create("a", "a", GRANTS).text
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
    for letter in set(alphabet) - {good[-1]}:
        refusal(keys, good[:-1] + letter)


@pytest.mark.rule("CO-21")
def test_unknown_id_is_compared_with_a_hash_like_a_known_id(keys: ApiKeys, monkeypatch: pytest.MonkeyPatch) -> None:
    good = keys.create("a", "a", GRANTS).text
    compared: list[tuple[int, int]] = []
    compare = hmac.compare_digest

    def watching(one: bytes, other: bytes) -> bool:
        compared.append((len(one), len(other)))
        return compare(one, other)

    monkeypatch.setattr(hmac, "compare_digest", watching)
    keys.authenticate(good)
    refusal(keys, "olk_" + "0" * 16 + good[20:])
    refusal(keys, good[:21] + "A" * 43)
    assert compared == [(32, 32)] * 3


@pytest.mark.parametrize(
    ("client_id", "name", "field"),
    [
        *(("", "n", "$.client_id"), ("x" * (NAME_CHARACTERS_MAX - 6), "n", "$.client_id"), ("a\0", "n", "$.client_id")),
        *(("\ud800", "n", "$.client_id"), ("a", "", "$.name"), ("a", "\ud800", "$.name")),
        ("a", "x" * (NAME_CHARACTERS_MAX + 1), "$.name"),
    ],
)
def test_invalid_client_id_or_name_is_refused(path: Path, keys: ApiKeys, client_id: str, name: str, field: str) -> None:
    with pytest.raises(CanonicalError) as caught:
        keys.create(client_id, name, GRANTS)
    assert caught.value.path == field
    assert not path.exists()


@pytest.mark.rule("LG-22")
@pytest.mark.parametrize("kind", ["user", "client", "system"])
def test_client_id_with_a_principal_prefix_is_refused(path: Path, keys: ApiKeys, kind: str) -> None:
    with pytest.raises(CanonicalError, match=f"must not begin with `{kind}:`") as caught:
        keys.create(f"{kind}:789", "n", GRANTS)
    assert caught.value.path == "$.client_id"
    assert not path.exists()
    for client_id in ("users:789", "user", "a/user:789", "User:789"):
        assert keys.create(client_id, "n", GRANTS).key.client_id == client_id


@pytest.mark.rule("LG-22")
def test_existing_client_id_with_a_principal_prefix_is_logged_once(
    path: Path, keys: ApiKeys, caplog: pytest.LogCaptureFixture
) -> None:
    created = [keys.create(f"user-{number}", "n", GRANTS) for number in (1, 2, 3)]
    path.write_text(path.read_text().replace("user-1", "user:1").replace("user-2", "system:2"))
    auth_material.reload(keys)
    keys.revoke(created[1].key.id)
    server = ApiKeys(path, SetClock())
    caplog.clear()
    for _ in range(2):
        auth_material.reload(server)
    (warning,) = caplog.records
    assert "begins with `user:`" in warning.getMessage()
    assert warning.__dict__["key_id"] == created[0].key.id
    assert server.authenticate(created[0].text).client_id == "user:1"


@pytest.mark.rule("CO-20")
def test_names_of_the_maximum_length_are_accepted(keys: ApiKeys) -> None:
    created = keys.create("x" * (NAME_CHARACTERS_MAX - 7), "x" * NAME_CHARACTERS_MAX, GRANTS)
    auth_material.reload(keys)
    assert len(keys.authenticate(created.text).actor) == NAME_CHARACTERS_MAX


def test_creating_a_key_above_the_maximum_number_is_refused(keys: ApiKeys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_keys, "API_KEYS_MAX", 2)
    first = keys.create("a", "a", GRANTS)
    keys.create("b", "b", GRANTS)
    with pytest.raises(LimitExceededError):
        keys.create("c", "c", GRANTS)
    keys.revoke(first.key.id)
    auth_material.reload(keys)
    monkeypatch.setattr(api_keys, "API_KEYS_MAX", 1)
    with pytest.raises(SettingsError, match=r"\$\.keys: must have at most 1"):
        auth_material.reload(keys)


def test_file_above_the_size_limit_is_neither_written_nor_read(
    path: Path, keys: ApiKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys.create("a", "a", GRANTS)
    before = path.read_bytes()
    monkeypatch.setattr(api_keys, "API_KEYS_FILE_BYTES_MAX", len(before) + 10)
    with pytest.raises(LimitExceededError):
        keys.create("b", "b", GRANTS)
    assert path.read_bytes() == before
    auth_material.reload(keys)
    monkeypatch.setattr(api_keys, "API_KEYS_FILE_BYTES_MAX", len(before) - 1)
    with pytest.raises(SettingsError, match="larger than"):
        auth_material.reload(keys)


def test_grants_edited_in_the_file_apply_after_a_reload(path: Path, keys: ApiKeys) -> None:
    created = keys.create("a", "a", parse_grants(["old"]))
    path.write_text(path.read_text().replace('"old"', '"cafe\u0301/*"'), encoding="utf-8")
    auth_material.reload(keys)
    current = keys.find_principal(created.key.id, NOW_MS)
    assert current is not None
    assert current.grants == parse_grants(["caf\u00e9/*"])


# --- the file ----------------------------------------------------------------------------------------


@pytest.mark.rule("CO-21")
def test_only_the_owner_can_read_key_and_lock_files(path: Path, keys: ApiKeys) -> None:
    old = os.umask(0)
    try:
        keys.create("a", "a", GRANTS)
        keys.create("b", "b", GRANTS)
    finally:
        os.umask(old)
    assert {one.name: stat.S_IMODE(one.stat().st_mode) for one in path.parent.iterdir()} == {
        "keys.json": 0o600,
        "keys.json.lock": 0o600,
    }


@pytest.mark.rule("CO-21")
@pytest.mark.parametrize("mode", [0o620, 0o610, 0o604, 0o602, 0o601, 0o644, 0o666, 0o777])
def test_file_accessible_to_others_is_refused(path: Path, keys: ApiKeys, mode: int) -> None:
    created = keys.create("a", "a", GRANTS)
    before = path.read_bytes()
    path.chmod(mode)
    for use in (
        lambda: auth_material.reload(keys),
        keys.list,
        lambda: keys.revoke(created.key.id),
        lambda: keys.create("b", "b", GRANTS),
    ):
        with pytest.raises(SettingsError, match=rf"keys\.json contains API keys.*{mode:04o}.*chmod 600"):
            use()
    assert path.read_bytes() == before
    keys.authenticate(created.text)  # the loaded keys remain valid
    path.chmod(0o400)
    auth_material.reload(keys)


def entry(**changed: Any) -> dict[str, Any]:
    good = {
        "id": "0123456789abcdef",
        "secret_sha256": "0" * 64,
        "client_id": "a",
        "name": "a",
        "grants": {"read": [], "write": []},
        "created_ms": 1,
        "revoked_ms": None,
    }
    return {name: value for name, value in {**good, **changed}.items() if value != LEFT_OUT}


@pytest.mark.parametrize(
    ("keys_in_it", "field"),
    [
        *(([7], "$.keys[0]"), ({}, "$.keys"), ([entry(), entry()], "$.keys[1].id"), ([entry(id="x")], "$.keys[0].id")),
        *(([entry(id=7)], "$.keys[0].id"), ([entry(secret_sha256="0" * 63)], "$.keys[0].secret_sha256")),
        *(([entry(secret_sha256=LEFT_OUT)], "secret_sha256"), ([entry(x=1)], "$.keys[0]")),
        *(([entry(client_id="")], "$.keys[0].client_id"), ([entry(name=None)], "$.keys[0].name")),
        *(([entry(name="")], "$.keys[0].name"), ([entry(grants=["*"])], "$.keys[0].grants")),
        *(([entry(grants={"read": [""]})], "$.keys[0].grants.read[0]"), ([entry(created_ms="1")], "created_ms")),
        *(([entry(revoked_ms=LEFT_OUT)], "revoked_ms"), ([entry(revoked_ms=True)], "revoked_ms")),
        *(([entry(grants={"red": []})], "$.keys[0].grants"), ([entry(created_ms=1.5)], "created_ms")),
        ([entry(expires_ms="1")], "expires_ms"),
    ],
)
def test_invalid_entry_is_refused_with_its_field(path: Path, keys_in_it: Any, field: str) -> None:
    keys = ApiKeys(path, SetClock())
    auth_material.write_file(path, json.dumps({"version": 1, "keys": [entry()]}).encode())
    auth_material.reload(keys)
    auth_material.write_file(path, json.dumps({"version": 1, "keys": keys_in_it}).encode())
    with pytest.raises(SettingsError, match=re.escape(field)) as caught:
        auth_material.reload(keys)
    assert str(path) in str(caught.value)
    assert keys.find_principal("0123456789abcdef", NOW_MS) is not None


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"\xff",
        b'{"version":3,"keys":[]}',
        b'{"version":1,"version":1,"keys":[]}',
        b'{"keys":[]}',
        b"[" * 9999,
    ],
    ids=lambda data: data[:20].decode("latin-1"),
)
def test_malformed_file_is_refused_and_left_unchanged(path: Path, keys: ApiKeys, data: bytes) -> None:
    auth_material.write_file(path, data)
    for use in (
        lambda: auth_material.reload(keys),
        keys.list,
        lambda: keys.revoke("0" * 16),
        lambda: keys.create("b", "b", GRANTS),
    ):
        with pytest.raises(SettingsError, match=r"keys\.json"):
            use()
    assert path.read_bytes() == data


def test_missing_file_is_reported(path: Path, keys: ApiKeys) -> None:
    for use in (partial(auth_material.reload, keys), keys.list, lambda: keys.revoke("0" * 16)):
        with pytest.raises(SettingsError, match="No such file"):
            use()
    assert not path.exists()
    nowhere = ApiKeys(path / "no" / "keys.json", SetClock())
    with pytest.raises(SettingsError, match="does not exist; create it first"):
        nowhere.create("a", "a", GRANTS)


def test_symbolic_link_to_the_file_is_preserved(tmp_path: Path, path: Path) -> None:
    (tmp_path / "real").mkdir()
    real = tmp_path / "real" / "keys.json"
    path.symlink_to(real)
    ApiKeys(path, SetClock()).create("a", "a", GRANTS)
    ApiKeys(real, SetClock()).create("b", "b", GRANTS)
    assert path.is_symlink()
    linked = ApiKeys(path, SetClock())
    assert len(linked.list()) == 2
    assert not Path(f"{path}.lock").exists()
    # Container runtimes replace secrets by changing the link.
    auth_material.write_file(tmp_path / "other.json", b'{"version":1,"keys":[]}')
    path.unlink()
    path.symlink_to(tmp_path / "other.json")
    assert linked.list() == []


def test_change_preserves_the_owner_of_the_file(path: Path, keys: ApiKeys) -> None:
    """Only root can test this with a different owner. Other users test it with their own files."""
    owner = (1234, 4321) if os.geteuid() == 0 else (os.geteuid(), os.getegid())
    keys.create("a", "a", GRANTS)
    os.chown(path, *owner)
    ApiKeys(path, SetClock(), SecretCheck.COMMAND).create("b", "b", GRANTS)
    found = path.stat()
    assert ((found.st_uid, found.st_gid), stat.S_IMODE(found.st_mode)) == (owner, 0o600)


def test_file_is_flushed_before_it_is_renamed(path: Path, keys: ApiKeys, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def recording_fsync(descriptor: int) -> None:
        found = os.fstat(descriptor)
        steps.append("directory" if stat.S_ISDIR(found.st_mode) else f"file of {found.st_size}")
        fsync(descriptor)

    def recording_replace(self: Path, target: Path) -> Path:
        steps.append(f"name {target.name}")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", recording_fsync)
    monkeypatch.setattr(Path, "replace", recording_replace)
    keys.create("a", "a", GRANTS)
    assert steps == [f"file of {path.stat().st_size}", "name keys.json", "directory"]


@pytest.mark.parametrize("failing", ["fsync", "write", "replace"])
def test_failed_write_changes_nothing(path: Path, keys: ApiKeys, monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    first = keys.create("a", "a", GRANTS)
    before = path.read_bytes()

    def fail_with_full_disk(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if failing == "fsync":
        monkeypatch.setattr(os, "fsync", fail_with_full_disk)
    elif failing == "write":
        monkeypatch.setattr(os, "fchmod", fail_with_full_disk)
    else:
        monkeypatch.setattr(Path, "replace", fail_with_full_disk)
    for change in (lambda: keys.create("b", "b", GRANTS), lambda: keys.revoke(first.key.id)):
        with pytest.raises(SettingsError, match="No space left") as caught:
            change()
        assert isinstance(caught.value.__cause__, OSError)
    assert path.read_bytes() == before
    assert sorted(one.name for one in path.parent.iterdir()) == ["keys.json", "keys.json.lock"]
    keys.authenticate(first.text)


def test_partial_file_of_a_killed_process_is_replaced(path: Path, keys: ApiKeys) -> None:
    Path(f"{path}.unfinished").write_bytes(b"half of")
    created = keys.create("a", "a", GRANTS)
    assert keys.list() == [created.key]
    assert not Path(f"{path}.unfinished").exists()


# --- concurrent changes ---------------------------------------------------------------------------------


@pytest.mark.rule("CO-21")
def test_concurrent_processes_lose_no_change(path: Path) -> None:
    names, count = ("a", "b", "c"), 12
    with ExitStack() as stack:
        workers = [stack.enter_context(start_script(SCRIPT, path, name, count)) for name in names]
        for worker in workers:
            assert read_line(worker) == "ready"
        made = [worker.communicate("\n", timeout=WAIT_S)[0].split() for worker in workers]
        assert [worker.returncode for worker in workers] == [0] * len(names)
    keys = ApiKeys(path, SetClock())
    auth_material.reload(keys)
    assert len(keys.list()) == len(names) * count
    for name, texts in zip(names, made, strict=True):
        assert len(texts) == count
        for number, text in enumerate(texts):
            if number % 2:
                assert "revoked" in refusal(keys, text)
            else:
                assert keys.authenticate(text).actor == f"client:{name}"


def test_concurrent_threads_lose_no_change(path: Path) -> None:
    keys = ApiKeys(path, SetClock())
    threads = [threading.Thread(target=keys.create, args=(f"c{number}", "n", GRANTS)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {key.client_id for key in keys.list()} == {f"c{number}" for number in range(8)}


def test_change_waits_for_the_lock(path: Path, keys: ApiKeys) -> None:
    done = threading.Event()

    def create() -> None:
        keys.create("a", "a", GRANTS)
        done.set()

    thread = threading.Thread(target=create)
    with secret_files.lock_file(path):
        thread.start()
        assert not done.wait(0.1)
        assert not path.exists()
    thread.join(60)
    assert done.is_set()
