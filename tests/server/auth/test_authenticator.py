"""Authentication by tokens and API keys, and the development mode."""

from pathlib import Path

import pytest

from oncelog.errors import AuthError, OncelogError, SettingsError
from oncelog.server.auth.authenticator import ApiKeys, Authenticator, DevelopmentAuthenticator
from oncelog.server.auth.principal import parse_grants
from server.auth import auth_material
from server.auth.auth_material import NOW_MS, SetClock, token


@pytest.fixture
def api_keys(tmp_path: Path) -> ApiKeys:
    return ApiKeys(tmp_path / "keys.json", SetClock())


@pytest.mark.rule("CO-20", "CO-21")
def test_prefix_of_a_credential_selects_token_or_api_key(tmp_path: Path, api_keys: ApiKeys) -> None:
    key = api_keys.create("billing", "bills", parse_grants(["a"]))
    both = Authenticator(auth_material.tokens(tmp_path), api_keys)
    assert not both.is_open
    assert both.authenticate(token()).actor == "user:ada"
    assert both.authenticate(key.text).actor == "client:billing"


@pytest.mark.rule("CO-21")
def test_every_invalid_credential_has_the_same_error(tmp_path: Path, api_keys: ApiKeys) -> None:
    key = api_keys.create("a", "a", parse_grants())
    both = Authenticator(auth_material.tokens(tmp_path), api_keys)
    shown, reasons = set(), set()
    for credential in (None, "", "x", "olk_", key.text[:-4] + "AAAA", token(exp=1), token("ES256"), token(sub="")):
        with pytest.raises(AuthError) as caught:
            both.authenticate(credential)
        shown.add((str(caught.value), repr(caught.value), type(caught.value)))
        reasons.add(caught.value.reason)
    assert len(shown) == 1
    assert len(reasons) == 7  # A missing credential and an empty one are refused for the same reason.
    assert issubclass(AuthError, OncelogError)


def test_unconfigured_credential_kind_is_refused(tmp_path: Path, api_keys: ApiKeys) -> None:
    key = api_keys.create("a", "a", parse_grants())
    with pytest.raises(AuthError) as caught:
        Authenticator(auth_material.tokens(tmp_path)).authenticate(key.text)
    assert "not configured" in caught.value.reason
    with pytest.raises(AuthError) as caught:
        Authenticator(api_keys=api_keys).authenticate(token())
    assert "not configured" in caught.value.reason
    with pytest.raises(SettingsError, match="no caller could authenticate"):
        Authenticator()


@pytest.mark.rule("CO-23")
def test_token_is_current_until_it_expires(tmp_path: Path) -> None:
    known = Authenticator(auth_material.tokens(tmp_path, leeway_ms=0))
    found = known.authenticate(token(exp=auth_material.NOW_S + 1))
    assert known.refresh_principal(found, NOW_MS + 999) == found
    assert known.refresh_principal(found, NOW_MS + 1000) is None


@pytest.mark.rule("CO-22")
def test_api_key_is_current_until_revoked_and_has_its_latest_grants(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    operator, served = ApiKeys(path, SetClock()), ApiKeys(path, SetClock())
    key = operator.create("a", "a", parse_grants(["old"]))
    known = Authenticator(api_keys=served)
    known.reload()
    found = known.authenticate(key.text)
    path.write_text(path.read_text().replace('"old"', '"new"'))
    assert known.refresh_principal(found, NOW_MS) == found
    known.reload()
    current = known.refresh_principal(found, NOW_MS)
    assert current is not None
    assert current.grants == parse_grants(["new"])
    path.write_text(path.read_text().replace('"client_id": "a"', '"client_id": "b"'))
    known.reload()
    assert known.refresh_principal(found, NOW_MS) is None  # the key now belongs to another client
    assert known.authenticate(key.text).actor == "client:b"
    operator.revoke(key.key.id)
    known.reload()
    assert known.refresh_principal(current, NOW_MS) is None


@pytest.mark.rule("CO-28")
@pytest.mark.parametrize("bad", ["tokens", "API keys"])
def test_reload_keeps_the_content_of_a_bad_file_and_reloads_the_other_file(tmp_path: Path, bad: str) -> None:
    path = tmp_path / "keys.json"
    operator = ApiKeys(path, SetClock())
    old = operator.create("a", "a", parse_grants())
    known = Authenticator(auth_material.tokens(tmp_path), ApiKeys(path, SetClock()))
    known.reload()
    operator.revoke(old.key.id)
    secret = tmp_path / "HS256-0.key"
    secret.write_bytes(b"another secret, which is long enough")
    broken, kept, ended = (secret, token(), old.text) if bad == "tokens" else (path, old.text, token())
    content = broken.read_bytes()
    broken.write_bytes(b"{")
    with pytest.raises(SettingsError, match=broken.name):
        known.reload()
    known.authenticate(kept)
    with pytest.raises(AuthError):
        known.authenticate(ended)
    broken.write_bytes(content)
    known.reload()
    with pytest.raises(AuthError):
        known.authenticate(kept)


@pytest.mark.rule("CO-21")
def test_development_mode_accepts_any_credential() -> None:
    open_to_all = DevelopmentAuthenticator()
    assert open_to_all.is_open
    open_to_all.reload()
    named = {None: "developer", "": "developer", "anything": "anything", token(exp=1): "developer", "a b": "developer"}
    for credential, name in named.items():
        found = open_to_all.authenticate(credential)
        assert found.actor == f"user:{name}"
        assert found.grants.may_read("anything")
        assert found.grants.may_write("größe")
        assert open_to_all.refresh_principal(found, 2**62) == found
