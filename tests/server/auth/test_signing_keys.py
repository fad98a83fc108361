"""Keys that verify tokens: key files, key sets, rotation, and file permissions."""

import json
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
from joserfc.jwk import ECKey, OKPKey, RSAKey

from oncelog.errors import SettingsError
from oncelog.server.auth.signing_keys import KeyFile, KeyKind
from oncelog.server.auth.tokens import Tokens, TokenSettings
from oncelog.server.limits import TOKEN_KEYS_MAX
from server.auth import auth_material
from server.auth.auth_material import ALGORITHMS, SetClock, encode_base64, key_file, load_keys, make_key, token
from server.auth.token_refusals import refusal


def test_no_token_is_accepted_before_the_first_reload(tmp_path: Path) -> None:
    tokens = Tokens(TokenSettings(algorithms=("HS256",), key_files=(key_file(tmp_path, "HS256"),)), SetClock())
    refusal(tokens, token())
    auth_material.reload(tokens)
    tokens.authenticate(token())


@pytest.mark.rule("CO-21")
def test_key_set_keys_are_chosen_by_id_and_rotate_on_reload(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    first, second, third = (auth_material.public_jwk("ES256", f"k{number}", number) for number in range(3))
    tokens = auth_material.tokens(tmp_path, "ES256", key_files=(auth_material.key_set(path, first, second),))
    texts = [token("ES256", make_key("ES256", number), {"kid": f"k{number}"}) for number in range(3)]
    tokens.authenticate(texts[0])
    tokens.authenticate(texts[1])
    assert refusal(tokens, texts[2]) == "token: no key has its kid"
    auth_material.key_set(path, second, third)
    tokens.authenticate(texts[0])  # until the next reload
    auth_material.reload(tokens)
    assert refusal(tokens, texts[0]) == "token: no key has its kid"
    tokens.authenticate(texts[1])
    tokens.authenticate(texts[2])


@pytest.mark.rule("CO-21")
def test_token_with_the_id_of_another_key_is_refused(tmp_path: Path) -> None:
    members = [auth_material.public_jwk("ES256", f"k{number}", number) for number in range(2)]
    tokens = auth_material.tokens(tmp_path, "ES256", key_files=(auth_material.key_set(tmp_path / "k", *members),))
    assert "signature" in refusal(tokens, token("ES256", make_key("ES256", 0), {"kid": "k1"}))
    assert refusal(tokens, token("ES256", make_key("ES256", 0))) == "token: no kid"


def test_keys_of_several_files_are_valid_at_the_same_time(tmp_path: Path) -> None:
    sources = (key_file(tmp_path, "RS256"), key_file(tmp_path, "RS256", 1), key_file(tmp_path, "HS256", 2, "named"))
    tokens = auth_material.tokens(tmp_path, "RS256", "HS256", key_files=sources)
    for number in (0, 1):
        tokens.authenticate(token("RS256", make_key("RS256", number)))
        tokens.authenticate(token("RS256", make_key("RS256", number), {"kid": "any"}))
    tokens.authenticate(token("HS256", make_key("HS256", 2), {"kid": "named"}))
    refusal(tokens, token("HS256", make_key("HS256", 2)))


@pytest.mark.rule("CO-21")
@pytest.mark.parametrize("bad", [b"", b"too short", b"{", b"\xff" * 10])
def test_reload_of_a_bad_file_keeps_the_previous_keys(tmp_path: Path, bad: bytes) -> None:
    tokens = auth_material.tokens(tmp_path)
    path = tmp_path / "HS256-0.key"
    path.write_bytes(bad)
    with pytest.raises(SettingsError, match=r"HS256-0\.key"):
        auth_material.reload(tokens)
    tokens.authenticate(token())
    path.unlink()
    with pytest.raises(SettingsError, match="No such file"):
        auth_material.reload(tokens)
    tokens.authenticate(token())


def test_reload_with_one_bad_file_still_replaces_the_keys_of_the_other_file(tmp_path: Path) -> None:
    sources = (key_file(tmp_path, "HS256"), key_file(tmp_path, "ES256"))
    tokens = auth_material.tokens(tmp_path, "HS256", "ES256", key_files=sources)
    Path(sources[0].path).write_bytes(b"another secret that is long enough, really")
    Path(sources[1].path).write_bytes(b"no key")
    with pytest.raises(SettingsError):
        auth_material.reload(tokens)
    refusal(tokens, token("HS256"))
    tokens.authenticate(token("ES256"))


SECRET_TEXT = "c2VjcmV0LW9mLXRoZS1rZXktZmlsZQ"  # noqa: S105 - not a real secret


def weak_rsa() -> RSAKey:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return RSAKey.generate_key(1024)


def bad_files() -> list[tuple[str, KeyKind, bytes]]:
    es256, rs256 = make_key("ES256"), make_key("RS256")
    assert isinstance(es256, ECKey)
    assert isinstance(rs256, RSAKey)
    pem = es256.as_pem()
    p384 = ECKey.generate_key("P-384")
    ed448 = OKPKey.generate_key("Ed448")
    good = auth_material.public_jwk("ES256", "k")

    def key_set_of(*members: Any) -> bytes:
        return json.dumps({"keys": members}).encode()

    return [
        ("a short secret", KeyKind.SECRET, b"x" * 31),
        ("a short secret with a line ending", KeyKind.SECRET, b"x" * 31 + b"\r\n"),
        ("a public key as a secret", KeyKind.SECRET, pem),
        ("a public key in DER as a secret", KeyKind.SECRET, rs256.as_der()),
        ("a private key as a secret", KeyKind.SECRET, es256.as_pem(private=True)),
        ("half a key as a secret", KeyKind.SECRET, pem[: len(pem) // 2]),
        ("a secret as PEM", KeyKind.PEM, SECRET_TEXT.encode() * 2),
        ("an empty PEM", KeyKind.PEM, b""),
        ("two keys in PEM", KeyKind.PEM, pem + pem),
        ("half a key in PEM", KeyKind.PEM, pem[: len(pem) // 2]),
        ("a key in DER", KeyKind.PEM, es256.as_der()),
        ("an encrypted private key", KeyKind.PEM, es256.as_pem(private=True, password=SECRET_TEXT)),
        ("an unsupported curve", KeyKind.PEM, p384.as_pem()),
        ("an unsupported Edwards curve", KeyKind.PEM, ed448.as_pem()),
        ("a weak RSA key", KeyKind.PEM, weak_rsa().as_pem()),
        ("a damaged PEM", KeyKind.PEM, b"\xff\xfe" + pem[10:]),
        ("invalid JSON", KeyKind.JWKS, b'{"keys": ' + SECRET_TEXT.encode()),
        ("invalid UTF-8", KeyKind.JWKS, SECRET_TEXT.encode() + b"\xff"),
        ("a repeated member", KeyKind.JWKS, b'{"keys":[],"keys":[]}'),
        ("an array instead of a set", KeyKind.JWKS, b"[]"),
        ("a key instead of a set", KeyKind.JWKS, json.dumps(good).encode()),
        ("keys is not a list", KeyKind.JWKS, b'{"keys":{}}'),
        ("a key is not an object", KeyKind.JWKS, key_set_of("x")),
        ("an empty set", KeyKind.JWKS, key_set_of()),
        ("a key without id", KeyKind.JWKS, key_set_of(auth_material.public_jwk("ES256", None))),
        ("a key with an empty id", KeyKind.JWKS, key_set_of({**good, "kid": ""})),
        ("a key id is not a string", KeyKind.JWKS, key_set_of({**good, "kid": 7})),
        ("a repeated id", KeyKind.JWKS, key_set_of(good, good)),
        ("a point that is not on the curve", KeyKind.JWKS, key_set_of({**good, "x": good["y"]})),
        ("a member is missing", KeyKind.JWKS, key_set_of({name: value for name, value in good.items() if name != "y"})),
        ("a member is not base64", KeyKind.JWKS, key_set_of({**good, "x": SECRET_TEXT + "*"})),
        ("a member is not a string", KeyKind.JWKS, key_set_of({**good, "x": [SECRET_TEXT]})),
        ("a weak secret", KeyKind.JWKS, key_set_of({"kty": "oct", "kid": "k", "k": encode_base64(b"x" * 31)})),
        ("a very weak secret", KeyKind.JWKS, key_set_of({"kty": "oct", "kid": "k", "k": encode_base64(b"x")})),
        ("an empty secret", KeyKind.JWKS, key_set_of({"kty": "oct", "kid": "k", "k": ""})),
        ("a weak RSA key in a set", KeyKind.JWKS, key_set_of({**weak_rsa().as_dict(), "kid": "k"})),
        ("only keys for other purposes", KeyKind.JWKS, key_set_of({**good, "use": "enc"}, {**good, "alg": "ES384"})),
        ("only keys of unknown kinds", KeyKind.JWKS, key_set_of({"kty": "AKP", "kid": "k"}, {"kid": "x"})),
        ("a key on an unsupported curve", KeyKind.JWKS, key_set_of({**p384.as_dict(private=False), "kid": "k"})),
        ("too large", KeyKind.JWKS, b" " * 300_000),
        (
            "too many",
            KeyKind.JWKS,
            key_set_of(*({**good, "kid": f"k{number}"} for number in range(TOKEN_KEYS_MAX + 1))),
        ),
    ]


BAD_FILES = bad_files()


@pytest.mark.rule("CO-21")
@pytest.mark.parametrize("number", range(len(BAD_FILES)), ids=[name for name, _, _ in BAD_FILES])
def test_bad_key_file_is_refused_without_revealing_its_content(tmp_path: Path, number: int) -> None:
    _, kind, data = BAD_FILES[number]
    path = auth_material.write_file(tmp_path / "key", data)
    with pytest.raises(SettingsError) as caught:
        load_keys([KeyFile(str(path), kind)], ALGORITHMS)
    shown = auth_material.all_texts(caught.value)
    assert SECRET_TEXT not in shown
    assert "\\xff" not in shown


def test_key_file_without_a_key_for_the_algorithms_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="no key for HS256 or ES256"):
        load_keys([key_file(tmp_path, "RS256")], ["HS256", "ES256"])


def test_key_set_may_contain_keys_for_other_purposes(tmp_path: Path) -> None:
    good = auth_material.public_jwk("ES256", "k")
    others = ({"kty": "AKP", "kid": "pq"}, {**good, "use": "enc", "kid": "e"}, auth_material.public_jwk("RS256", "r"))
    (found,) = load_keys(
        [auth_material.key_set(tmp_path / "k", *others, {**good, "use": "sig", "alg": "ES256"})], ["ES256"]
    )
    assert (found.algorithm, found.key_id) == ("ES256", "k")


def test_private_key_file_verifies_tokens(tmp_path: Path) -> None:
    key = make_key("EdDSA")
    assert isinstance(key, OKPKey)
    path = auth_material.write_file(tmp_path / "private.pem", key.as_pem(private=True))
    auth_material.tokens(tmp_path, "EdDSA", key_files=(KeyFile(str(path), KeyKind.PEM),)).authenticate(token("EdDSA"))


def test_trailing_newline_is_not_part_of_a_secret(tmp_path: Path) -> None:
    for number, end in enumerate((b"", b"\n", b"\r\n")):
        path = auth_material.write_file(tmp_path / str(number), auth_material.SECRET + b"0" + end)
        auth_material.tokens(tmp_path, key_files=(KeyFile(str(path), KeyKind.SECRET),)).authenticate(token())


def permission_cases() -> list[tuple[KeyKind, bytes, int, bool]]:
    es256 = make_key("ES256")
    assert isinstance(es256, ECKey)
    public_set = json.dumps({"keys": [auth_material.public_jwk("ES256", "k")]}).encode()
    private_set = json.dumps({"keys": [{**es256.as_dict(private=True), "kid": "k"}]}).encode()
    secret_set = json.dumps({"keys": [{"kty": "oct", "kid": "k", "k": encode_base64(b"x" * 32)}]}).encode()
    found: list[tuple[KeyKind, bytes, int, bool]] = []
    for kind, data, is_secret in (
        (KeyKind.SECRET, b"x" * 32, True),
        (KeyKind.PEM, es256.as_pem(private=True), True),
        (KeyKind.PEM, es256.as_pem(), False),
        (KeyKind.JWKS, public_set, False),
        (KeyKind.JWKS, private_set, True),
        (KeyKind.JWKS, secret_set, True),
    ):
        found += [(kind, data, mode, True) for mode in (0o600, 0o400)]
        found += [(kind, data, mode, not is_secret) for mode in (0o644, 0o604, 0o664)]
        found += [(kind, data, mode, False) for mode in (0o602, 0o666, 0o606)]
    return found


@pytest.mark.rule("CO-21")
@pytest.mark.parametrize(("kind", "data", "mode", "is_good"), permission_cases())
def test_key_file_permissions_are_checked(tmp_path: Path, kind: KeyKind, data: bytes, mode: int, is_good: bool) -> None:
    source = KeyFile(str(auth_material.write_file(tmp_path / "key", data, mode)), kind)
    if is_good:
        assert load_keys([source], ALGORITHMS)
    else:
        with pytest.raises(SettingsError, match=f"mode is {mode:04o}.*chmod 600"):
            load_keys([source], ALGORITHMS)


def test_directory_or_pipe_as_key_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(SettingsError):
            load_keys([KeyFile(str(path), KeyKind.SECRET)], ALGORITHMS)
