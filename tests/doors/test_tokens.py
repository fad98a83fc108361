"""Tokens: every check of one can fail, and says why to the log alone."""

import itertools
import json
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from joserfc.jwk import ECKey, OctKey, OKPKey, RSAKey

from doors import material
from doors.material import ALGORITHMS, CLAIMS, NOW_MS, NOW_S, SetClock, encoded, key_file, key_of, signed, token
from oncelog.core.limits import NAME_CHARACTERS_MAX
from oncelog.doors.grants import Grants, granted
from oncelog.doors.limits import LEEWAY_MS_MAX, TOKEN_CHARACTERS_MAX, TOKEN_KEYS_MAX
from oncelog.doors.principal import Principal
from oncelog.doors.signing import KeyFile, KeyKind, keys_of
from oncelog.doors.tokens import Claims, Tokens, TokenSettings, issued
from oncelog.errors import AuthError, CanonicalError, SettingsError


@pytest.fixture
def known(tmp_path: Path) -> Tokens:
    """Believes HS256."""
    return material.tokens(tmp_path)


def refusal(tokens: Tokens, text: str) -> str:
    """Why it is refused. Whatever the reason, the client sees the same, and nothing of the token is anywhere."""
    with pytest.raises(AuthError) as caught:
        tokens.principal_of(text)
    assert str(caught.value) == "authentication failed"
    shown = material.all_texts(caught.value)
    for part in text.split("."):
        assert len(part) < 12 or part not in shown
    return caught.value.reason


# --- those that are good -----------------------------------------------------------------------------


@pytest.mark.rule("CO-20", "CO-21")
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_good_token(tmp_path: Path, algorithm: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tokens = material.tokens(tmp_path, algorithm)
        found = tokens.principal_of(token(algorithm, client_id="laptop"))
    assert found == Principal(
        actor="user:ada",
        client_id="laptop",
        grants=granted(["orders/*"], ["orders/1"]),
        expires_ms=NOW_MS + 3_600_000 + 30_000,
        key_id=None,
    )
    assert found.may_connect_as("laptop")
    assert not found.may_connect_as("phone")


def test_client_and_grants_may_be_left_out(known: Tokens) -> None:
    found = known.principal_of(token(grants=None))
    assert found.client_id is None
    assert found.grants == Grants()
    assert found.may_connect_as("anyone")


def test_the_claim_of_the_grants_has_the_name_that_is_configured(tmp_path: Path) -> None:
    tokens = material.tokens(tmp_path, grants_claim="https://example.org/rights")

    def text(right: Any) -> str:
        rights: dict[str, Any] = {"https://example.org/rights": {"read": [right]}}
        return token(**rights)

    assert tokens.principal_of(text("mine")).grants == granted(["mine"])
    assert "rights.read[0]" in refusal(tokens, text(1))


@pytest.mark.rule("CO-20")
def test_nobody_becomes_the_system_or_a_client_by_their_name(known: Tokens) -> None:
    assert known.principal_of(token(sub="system:retention")).actor == "user:system:retention"
    assert known.principal_of(token(actor="client:other", act="x")).actor == "user:ada"


def test_parameters_of_the_header_that_nobody_knows_do_not_matter(known: Tokens) -> None:
    others = {"x5t": "abc", "jku": "https://example.org/keys", "nonce": "1", "jwk": {"kty": "oct", "k": "AAAA"}}
    assert known.principal_of(token(header=others)).actor == "user:ada"


# --- algorithms --------------------------------------------------------------------------------------


@pytest.mark.rule("CO-21")
@pytest.mark.parametrize("name", ["none", "None", "NONE", "nOnE", ""])
def test_none_is_never_an_algorithm(tmp_path: Path, name: str) -> None:
    tokens = material.tokens(tmp_path, *ALGORITHMS)
    payload = encoded(json.dumps(dict(CLAIMS)).encode())
    for signature in ("", encoded(b"x" * 32)):
        header = encoded(json.dumps({"alg": name}).encode())
        assert "algorithm" in refusal(tokens, f"{header}.{payload}.{signature}")
    with pytest.raises(SettingsError, match="algorithms"):
        TokenSettings(algorithms=(name,), key_files=(KeyFile("x", KeyKind.SECRET),))


@pytest.mark.rule("CO-21")
@pytest.mark.parametrize(("pinned", "used"), list(itertools.permutations(ALGORITHMS, 2)))
def test_an_algorithm_that_is_not_pinned_is_refused(tmp_path: Path, pinned: str, used: str) -> None:
    assert "algorithm" in refusal(material.tokens(tmp_path, pinned), token(used))


@pytest.mark.rule("CO-21")
@pytest.mark.parametrize("algorithm", ["RS256", "ES256", "EdDSA"])
@pytest.mark.parametrize("encoding", ["PEM", "DER"])
def test_a_public_key_is_no_secret(tmp_path: Path, algorithm: str, encoding: Any) -> None:
    """Who knows the public key signs with it by HS256, and the server verifies both."""
    tokens = material.tokens(tmp_path, algorithm, "HS256")
    key = key_of(algorithm)
    assert not isinstance(key, OctKey)
    public = key.as_bytes(encoding=encoding, private=False)
    for secret in (public, public.strip()):
        forged = OctKey(secret, secret)  # which `import_key` refuses
        assert "signature" in refusal(tokens, token("HS256", forged))
        assert "signature" in refusal(tokens, token("HS256", forged, {"kid": algorithm}))


@pytest.mark.rule("CO-21")
@pytest.mark.parametrize("algorithm", ["RS256", "ES256", "EdDSA"])
def test_a_key_is_never_used_for_another_algorithm(tmp_path: Path, algorithm: str) -> None:
    """All are pinned and the ids say the same: the kind of the key decides."""
    members = [material.public(one, "same") for one in ALGORITHMS]
    tokens = material.tokens(tmp_path, *ALGORITHMS, key_files=(material.key_set(tmp_path / "set", *members),))
    for one in ALGORITHMS:
        assert tokens.principal_of(token(one, header={"kid": "same"})).actor == "user:ada"
    payload = json.dumps(dict(CLAIMS)).encode()
    for told in set(ALGORITHMS) - {algorithm}:
        header = json.dumps({"alg": told, "kid": "same"}).encode()
        assert "signature" in refusal(tokens, signed(algorithm, key_of(algorithm), header, payload))


@pytest.mark.rule("CO-21")
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_another_key_of_the_same_kind_is_refused(tmp_path: Path, algorithm: str) -> None:
    assert "signature" in refusal(material.tokens(tmp_path, algorithm), token(algorithm, key_of(algorithm, 1)))


def test_a_key_inside_of_the_token_is_not_used(tmp_path: Path) -> None:
    tokens = material.tokens(tmp_path, "ES256")
    own = ECKey.generate_key("P-256")
    assert "signature" in refusal(tokens, token("ES256", own, {"jwk": own.as_dict(private=False)}))


# --- the form ----------------------------------------------------------------------------------------


@pytest.mark.rule("CO-21")
@pytest.mark.parametrize("part", [0, 1, 2])
def test_no_part_can_be_changed(known: Tokens, part: int) -> None:
    good = token()
    known.principal_of(good)
    parts = good.split(".")
    for index, letter in enumerate(parts[part]):
        other = "A" if letter != "A" else "B"
        parts[part] = good.split(".")[part][:index] + other + good.split(".")[part][index + 1 :]
        refusal(known, ".".join(parts))


def malformed() -> list[str]:
    header, payload, signature = token().split(".")
    good = f"{header}.{payload}.{signature}"
    return [
        *("", ".", "..", "...", "x", f"{header}.{payload}", f"{good}.", f".{good}", f"{good}.{signature}"),
        *(f" {good}", f"{good} ", f"{good}\n", f"{header}\n.{payload}.{signature}", f"Bearer {good}"),
        *(f"{header}=.{payload}.{signature}", f"{header}.{payload}=.{signature}", f"{good}=", f"{good}A"),
        *(f"{header}.{payload}.{signature[:-1]}", f"{header}.{payload}.", f"{header}..{signature}", f".{payload}."),
        *(f"{header}+.{payload}.{signature}", f"{header}.{payload}/.{signature}", f"é{good}", f"{good}\ud800"),
        *(f"{header}.{payload}*.{signature}", f"{header}.{payload}.{signature[:20]}\0{signature[20:]}"),
    ]


@pytest.mark.rule("CO-21")
@pytest.mark.parametrize("number", range(len(malformed())))
def test_a_malformed_token_is_refused(known: Tokens, number: int) -> None:
    refusal(known, malformed()[number])


@pytest.mark.parametrize(
    "header",
    [
        *(
            b"",
            b"{",
            b"[]",
            b"null",
            b'"alg"',
            b'"algb64"',
            b"7",
            b"{}",
            b"\xff",
            b'{"alg":null}',
            b'{"alg":["HS256"]}',
        ),
        *(b'{"alg":{"a":1}}', b'{"typ":"JWT"}', b"[" * 1500, b'{"alg":' * 400, b'{"alg":"HS256","kid":7}'),
        *(b'{"alg":"HS256","x":' + b"[" * 1000 + b"]" * 1000 + b"}", b'{"alg":"HS256","alg":"HS256"}'),
        *(
            b'{"alg":"none","alg":"HS256"}',
            b'{"alg":"HS256","b64":false,"crit":["b64"]}',
            b'{"alg":"HS256","b64":true}',
        ),
        *(b'{"alg":"HS256","crit":["exp"],"exp":1}', b'{"alg":"HS256","crit":[]}', b'{"alg":"HS256","crit":7}'),
        *(b'{"alg":"HS256","jku":"file:"}', b'{"alg":"HS256","typ":7}', b'{"alg":"HS256","x":NaN}'),
    ],
    ids=lambda header: header[:40].decode("latin-1"),
)
def test_a_header_that_is_none_is_refused(known: Tokens, header: bytes) -> None:
    refusal(known, signed("HS256", key_of("HS256"), header, json.dumps(dict(CLAIMS)).encode()))


@pytest.mark.parametrize(
    "payload",
    [
        *(b"", b"{", b"[]", b"null", b'"sub"', b"7", b"\xff{}", b"[" * 5000, b'{"sub":"ada"'),
        b'{"sub":"ada","sub":"eve","exp":%d}' % (NOW_S + 60),
        b'{"sub":"ada","exp":%d,"exp":%d}' % (NOW_S - 9999, NOW_S + 60),
        b'{"sub":"ada","exp":%d,"grants":{"read":[],"read":["*"]}}' % (NOW_S + 60),
        b'{"sub":"ada","exp":%d,"x":1%b}' % (NOW_S + 60, b"0" * 5000),
        b'{"sub":"ada","exp":NaN}',
        b'{"sub":"ada","exp":Infinity}',
    ],
    ids=lambda payload: payload[:60].decode("latin-1"),
)
def test_claims_that_are_none_are_refused(known: Tokens, payload: bytes) -> None:
    assert "claims" in refusal(known, signed("HS256", key_of("HS256"), b'{"alg":"HS256"}', payload))


def test_a_huge_token_is_refused_before_it_is_looked_at(known: Tokens, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oncelog.doors.signing.opened", None)
    for text in ("a" * 10_000_000, "." * (TOKEN_CHARACTERS_MAX + 1), token(x="y" * TOKEN_CHARACTERS_MAX)):
        assert "longer than" in refusal(known, text)


def test_the_limit_of_the_length_can_be_set(tmp_path: Path) -> None:
    good = token()
    material.tokens(tmp_path, token_characters_max=len(good)).principal_of(good)
    assert "longer" in refusal(material.tokens(tmp_path, token_characters_max=len(good) - 1), good)


def test_a_long_token_within_the_limit_is_good(known: Tokens) -> None:
    long = token(x="y" * 11_000)
    assert len(long) > TOKEN_CHARACTERS_MAX * 0.9
    known.principal_of(long)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.one_of(st.text(max_size=80), st.text(alphabet=".eyJA0-_", max_size=80)))
def test_any_text_is_answered(known: Tokens, text: str) -> None:
    refusal(known, text)


# --- claims ------------------------------------------------------------------------------------------


@pytest.mark.rule("CO-21")
def test_a_token_expires(tmp_path: Path) -> None:
    clock = SetClock()
    tokens = material.tokens(tmp_path, clock=clock, leeway_ms=0)
    good = token(exp=NOW_S + 60)
    clock.now_ms = NOW_MS + 59_999
    assert not tokens.principal_of(good).has_expired(clock.now_ms)
    clock.now_ms += 1
    assert refusal(tokens, good) == "token: expired"


@pytest.mark.rule("CO-21", "CO-23")
def test_the_leeway_belongs_to_the_life_of_a_token(tmp_path: Path) -> None:
    clock = SetClock()
    tokens = material.tokens(tmp_path, clock=clock, leeway_ms=5000)
    good = token(exp=NOW_S + 60)
    clock.now_ms = NOW_MS + 64_999
    found = tokens.principal_of(good)
    assert not found.has_expired(clock.now_ms)
    clock.now_ms += 1
    assert found.has_expired(clock.now_ms)
    refusal(tokens, good)


@pytest.mark.rule("CO-21")
@pytest.mark.parametrize("exp", [None, "1800003600", True, [], {}, -1, NOW_MS + 3_600_000, 10**30, "soon"])
def test_exp_is_needed_and_a_number_of_seconds(known: Tokens, exp: Any) -> None:
    assert "$.exp" in refusal(known, token(exp=exp))


def test_exp_beyond_all_numbers(known: Tokens) -> None:
    payload = b'{"sub":"ada","exp":1e999}'
    assert "$.exp" in refusal(known, signed("HS256", key_of("HS256"), b'{"alg":"HS256"}', payload))


def test_exp_may_have_a_fraction(tmp_path: Path) -> None:
    assert material.tokens(tmp_path, leeway_ms=0).principal_of(token(exp=NOW_S + 0.5)).expires_ms == NOW_MS + 500


@pytest.mark.rule("CO-21")
@pytest.mark.parametrize("name", ["nbf", "iat"])
def test_a_token_that_is_not_valid_yet(tmp_path: Path, name: str) -> None:
    tokens = material.tokens(tmp_path, leeway_ms=5000)

    def text(when: Any) -> str:
        claim: dict[str, Any] = {name: when}
        return token(**claim)

    tokens.principal_of(text(NOW_S + 5))
    assert refusal(tokens, text(NOW_S + 6)) == f"token: its {name} is yet to come"
    assert f"$.{name}" in refusal(tokens, text("now"))
    assert f"$.{name}" in refusal(tokens, text(NOW_MS))


@pytest.mark.rule("CO-21")
@pytest.mark.parametrize("iss", [None, "", "other", "https://issuer.example/", ["https://issuer.example"], 7])
def test_the_issuer(tmp_path: Path, iss: Any) -> None:
    tokens = material.tokens(tmp_path, issuer="https://issuer.example")
    tokens.principal_of(token(iss="https://issuer.example"))
    assert refusal(tokens, token(iss=iss)) == "token: of another issuer"


@pytest.mark.rule("CO-21")
@pytest.mark.parametrize("aud", [None, "", "other", [], ["other"], [["oncelog"]], {"oncelog": 1}, 7, [None]])
def test_the_audience(tmp_path: Path, aud: Any) -> None:
    tokens = material.tokens(tmp_path, audiences=("oncelog", "logs"))
    for good in ("oncelog", "logs", ["other", "logs"]):
        tokens.principal_of(token(aud=good))
    assert refusal(tokens, token(aud=aud)) == "token: for another audience"


def test_issuer_and_audience_are_free_where_none_is_configured(known: Tokens) -> None:
    known.principal_of(token(iss="anyone", aud=["anything"]))


@pytest.mark.rule("CO-20")
@pytest.mark.parametrize("sub", [None, "", 7, ["ada"], "x" * (NAME_CHARACTERS_MAX - 4), "a\0b", "\ud800"])
def test_the_subject_is_needed_and_a_name(known: Tokens, sub: Any) -> None:
    assert "$.sub" in refusal(known, token(sub=sub))


@pytest.mark.rule("CO-20")
def test_the_longest_actor_is_as_long_as_a_name_may_be(known: Tokens) -> None:
    found = known.principal_of(token(sub="é" * (NAME_CHARACTERS_MAX - 5)))
    assert len(found.actor) == NAME_CHARACTERS_MAX


@pytest.mark.parametrize("client_id", ["", 7, ["x"], "x" * NAME_CHARACTERS_MAX, "\0"])
def test_a_client_is_a_name(known: Tokens, client_id: Any) -> None:
    assert "$.client_id" in refusal(known, token(client_id=client_id))


def test_a_client_that_is_null_is_not_any_client(known: Tokens) -> None:
    payload = json.dumps({**CLAIMS, "client_id": None}).encode()
    assert "$.client_id" in refusal(known, signed("HS256", key_of("HS256"), b'{"alg":"HS256"}', payload))


@pytest.mark.parametrize("grants", [[], "*", {"read": "*"}, {"write": [7]}, {"admin": ["*"]}])
def test_grants_that_are_none_are_refused(known: Tokens, grants: Any) -> None:
    assert "$.grants" in refusal(known, token(grants=grants))


@pytest.mark.rule("EV-6")
def test_grants_in_either_form(known: Tokens) -> None:
    found = known.principal_of(token(grants={"read": ["cafe\u0301/*"], "write": ["caf\u00e9"]}))
    assert found.grants.may_read("caf\u00e9/1")
    assert found.grants.may_write("cafe\u0301")


# --- keys --------------------------------------------------------------------------------------------


def test_before_the_first_reload_no_key_is_known(tmp_path: Path) -> None:
    tokens = Tokens(TokenSettings(algorithms=("HS256",), key_files=(key_file(tmp_path, "HS256"),)), SetClock())
    refusal(tokens, token())
    tokens.reload()
    tokens.principal_of(token())


@pytest.mark.rule("CO-21")
def test_keys_of_a_set_are_chosen_by_their_id_and_rotate(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    first, second, third = (material.public("ES256", f"k{number}", number) for number in range(3))
    tokens = material.tokens(tmp_path, "ES256", key_files=(material.key_set(path, first, second),))
    texts = [token("ES256", key_of("ES256", number), {"kid": f"k{number}"}) for number in range(3)]
    tokens.principal_of(texts[0])
    tokens.principal_of(texts[1])
    assert refusal(tokens, texts[2]) == "token: no key has its kid"
    material.key_set(path, second, third)
    tokens.principal_of(texts[0])  # nobody has said that there are others
    tokens.reload()
    assert refusal(tokens, texts[0]) == "token: no key has its kid"
    tokens.principal_of(texts[1])
    tokens.principal_of(texts[2])


@pytest.mark.rule("CO-21")
def test_the_id_of_another_key_does_not_help(tmp_path: Path) -> None:
    members = [material.public("ES256", f"k{number}", number) for number in range(2)]
    tokens = material.tokens(tmp_path, "ES256", key_files=(material.key_set(tmp_path / "k", *members),))
    assert "signature" in refusal(tokens, token("ES256", key_of("ES256", 0), {"kid": "k1"}))
    assert refusal(tokens, token("ES256", key_of("ES256", 0))) == "token: no kid"


def test_files_of_one_key_rotate_side_by_side(tmp_path: Path) -> None:
    sources = (key_file(tmp_path, "RS256"), key_file(tmp_path, "RS256", 1), key_file(tmp_path, "HS256", 2, "named"))
    tokens = material.tokens(tmp_path, "RS256", "HS256", key_files=sources)
    for number in (0, 1):
        tokens.principal_of(token("RS256", key_of("RS256", number)))
        tokens.principal_of(token("RS256", key_of("RS256", number), {"kid": "any"}))
    tokens.principal_of(token("HS256", key_of("HS256", 2), {"kid": "named"}))
    refusal(tokens, token("HS256", key_of("HS256", 2)))


@pytest.mark.rule("CO-21")
@pytest.mark.parametrize("bad", [b"", b"too short", b"{", b"\xff" * 10])
def test_a_bad_file_leaves_the_keys_that_were(tmp_path: Path, bad: bytes) -> None:
    tokens = material.tokens(tmp_path)
    path = tmp_path / "HS256-0.key"
    path.write_bytes(bad)
    with pytest.raises(SettingsError, match=r"HS256-0\.key"):
        tokens.reload()
    tokens.principal_of(token())
    path.unlink()
    with pytest.raises(SettingsError, match="No such file"):
        tokens.reload()
    tokens.principal_of(token())


def test_one_bad_file_of_two_changes_nothing(tmp_path: Path) -> None:
    sources = (key_file(tmp_path, "HS256"), key_file(tmp_path, "ES256"))
    tokens = material.tokens(tmp_path, "HS256", "ES256", key_files=sources)
    Path(sources[0].path).write_bytes(b"another secret that is long enough, really")
    Path(sources[1].path).write_bytes(b"no key")
    with pytest.raises(SettingsError):
        tokens.reload()
    tokens.principal_of(token("HS256"))


SECRET_TEXT = "c2VjcmV0LW9mLXRoZS1rZXktZmlsZQ"  # noqa: S105 - stands for one


def weak_rsa() -> RSAKey:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return RSAKey.generate_key(1024)


def bad_files() -> list[tuple[str, KeyKind, bytes]]:
    es256, rs256 = key_of("ES256"), key_of("RS256")
    assert isinstance(es256, ECKey)
    assert isinstance(rs256, RSAKey)
    pem = es256.as_pem()
    p384 = ECKey.generate_key("P-384")
    ed448 = OKPKey.generate_key("Ed448")
    good = material.public("ES256", "k")

    def of(*members: Any) -> bytes:
        return json.dumps({"keys": members}).encode()

    return [
        ("a short secret", KeyKind.SECRET, b"x" * 31),
        ("a short secret and its end of line", KeyKind.SECRET, b"x" * 31 + b"\r\n"),
        ("a public key as a secret", KeyKind.SECRET, pem),
        ("a public key in DER as a secret", KeyKind.SECRET, rs256.as_der()),
        ("a private key as a secret", KeyKind.SECRET, es256.as_pem(private=True)),
        ("half a key as a secret", KeyKind.SECRET, pem[: len(pem) // 2]),
        ("a secret as PEM", KeyKind.PEM, SECRET_TEXT.encode() * 2),
        ("an empty PEM", KeyKind.PEM, b""),
        ("two keys in PEM", KeyKind.PEM, pem + pem),
        ("half a key in PEM", KeyKind.PEM, pem[: len(pem) // 2]),
        ("a key in DER", KeyKind.PEM, es256.as_der()),
        ("a private key that is encrypted", KeyKind.PEM, es256.as_pem(private=True, password=SECRET_TEXT)),
        ("another curve", KeyKind.PEM, p384.as_pem()),
        ("another Edwards curve", KeyKind.PEM, ed448.as_pem()),
        ("a weak RSA key", KeyKind.PEM, weak_rsa().as_pem()),
        ("bytes around", KeyKind.PEM, b"\xff\xfe" + pem[10:]),
        ("no JSON", KeyKind.JWKS, b'{"keys": ' + SECRET_TEXT.encode()),
        ("no UTF-8", KeyKind.JWKS, SECRET_TEXT.encode() + b"\xff"),
        ("a member twice", KeyKind.JWKS, b'{"keys":[],"keys":[]}'),
        ("no set", KeyKind.JWKS, b"[]"),
        ("a lone key", KeyKind.JWKS, json.dumps(good).encode()),
        ("keys that are no list", KeyKind.JWKS, b'{"keys":{}}'),
        ("keys that are no objects", KeyKind.JWKS, of("x")),
        ("an empty set", KeyKind.JWKS, of()),
        ("a key without id", KeyKind.JWKS, of(material.public("ES256", None))),
        ("a key with an empty id", KeyKind.JWKS, of({**good, "kid": ""})),
        ("a key whose id is no text", KeyKind.JWKS, of({**good, "kid": 7})),
        ("an id twice", KeyKind.JWKS, of(good, good)),
        ("a point that is not on the curve", KeyKind.JWKS, of({**good, "x": good["y"]})),
        ("a part is missing", KeyKind.JWKS, of({name: value for name, value in good.items() if name != "y"})),
        ("a part is no base64", KeyKind.JWKS, of({**good, "x": SECRET_TEXT + "*"})),
        ("a part is no text", KeyKind.JWKS, of({**good, "x": [SECRET_TEXT]})),
        ("a weak secret", KeyKind.JWKS, of({"kty": "oct", "kid": "k", "k": encoded(b"x" * 31)})),
        ("a very weak secret", KeyKind.JWKS, of({"kty": "oct", "kid": "k", "k": encoded(b"x")})),
        ("a secret of nothing", KeyKind.JWKS, of({"kty": "oct", "kid": "k", "k": ""})),
        ("a weak RSA key in a set", KeyKind.JWKS, of({**weak_rsa().as_dict(), "kid": "k"})),
        ("only keys for other purposes", KeyKind.JWKS, of({**good, "use": "enc"}, {**good, "alg": "ES384"})),
        ("only keys of unknown kinds", KeyKind.JWKS, of({"kty": "AKP", "kid": "k"}, {"kid": "x"})),
        ("a key on another curve", KeyKind.JWKS, of({**p384.as_dict(private=False), "kid": "k"})),
        ("too large", KeyKind.JWKS, b" " * 300_000),
        ("too many", KeyKind.JWKS, of(*({**good, "kid": f"k{number}"} for number in range(TOKEN_KEYS_MAX + 1)))),
    ]


BAD_FILES = bad_files()


@pytest.mark.rule("CO-21")
@pytest.mark.parametrize("number", range(len(BAD_FILES)), ids=[name for name, _, _ in BAD_FILES])
def test_a_bad_file_of_keys_is_refused_and_not_told(tmp_path: Path, number: int) -> None:
    _, kind, data = BAD_FILES[number]
    path = material.written(tmp_path / "key", data)
    with pytest.raises(SettingsError) as caught:
        keys_of([KeyFile(str(path), kind)], ALGORITHMS)
    shown = material.all_texts(caught.value)
    assert SECRET_TEXT not in shown
    assert "\\xff" not in shown


def test_a_key_for_other_algorithms_is_none(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="no key for HS256 or ES256"):
        keys_of([key_file(tmp_path, "RS256")], ["HS256", "ES256"])


def test_a_set_may_have_keys_for_others(tmp_path: Path) -> None:
    good = material.public("ES256", "k")
    others = ({"kty": "AKP", "kid": "pq"}, {**good, "use": "enc", "kid": "e"}, material.public("RS256", "r"))
    (found,) = keys_of([material.key_set(tmp_path / "k", *others, {**good, "use": "sig", "alg": "ES256"})], ["ES256"])
    assert (found.algorithm, found.key_id) == ("ES256", "k")


def test_a_private_key_verifies_too(tmp_path: Path) -> None:
    key = key_of("EdDSA")
    assert isinstance(key, OKPKey)
    path = material.written(tmp_path / "private.pem", key.as_pem(private=True))
    material.tokens(tmp_path, "EdDSA", key_files=(KeyFile(str(path), KeyKind.PEM),)).principal_of(token("EdDSA"))


def test_the_end_of_the_line_is_no_part_of_a_secret(tmp_path: Path) -> None:
    for number, end in enumerate((b"", b"\n", b"\r\n")):
        path = material.written(tmp_path / str(number), material.SECRET + b"0" + end)
        material.tokens(tmp_path, key_files=(KeyFile(str(path), KeyKind.SECRET),)).principal_of(token())


def of_permissions() -> list[tuple[KeyKind, bytes, int, bool]]:
    es256 = key_of("ES256")
    assert isinstance(es256, ECKey)
    public_set = json.dumps({"keys": [material.public("ES256", "k")]}).encode()
    private_set = json.dumps({"keys": [{**es256.as_dict(private=True), "kid": "k"}]}).encode()
    secret_set = json.dumps({"keys": [{"kty": "oct", "kid": "k", "k": encoded(b"x" * 32)}]}).encode()
    found: list[tuple[KeyKind, bytes, int, bool]] = []
    for kind, data, is_secret in (
        (KeyKind.SECRET, b"x" * 32, True),
        (KeyKind.PEM, es256.as_pem(private=True), True),
        (KeyKind.PEM, es256.as_pem(), False),
        (KeyKind.JWKS, public_set, False),
        (KeyKind.JWKS, private_set, True),
        (KeyKind.JWKS, secret_set, True),
    ):
        found += [(kind, data, mode, True) for mode in (0o600, 0o400, 0o640, 0o440)]
        found += [(kind, data, mode, not is_secret) for mode in (0o644, 0o604, 0o664)]
        found += [(kind, data, mode, False) for mode in (0o602, 0o666, 0o606)]
    return found


@pytest.mark.rule("CO-21")
@pytest.mark.parametrize(("kind", "data", "mode", "is_good"), of_permissions())
def test_who_may_read_and_change_a_file(tmp_path: Path, kind: KeyKind, data: bytes, mode: int, is_good: bool) -> None:
    source = KeyFile(str(material.written(tmp_path / "key", data, mode)), kind)
    if is_good:
        assert keys_of([source], ALGORITHMS)
    else:
        with pytest.raises(SettingsError, match=f"mode is {mode:04o}.*chmod 600"):
            keys_of([source], ALGORITHMS)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(SettingsError):
            keys_of([KeyFile(str(path), KeyKind.SECRET)], ALGORITHMS)


@pytest.mark.parametrize(
    "wrong",
    [
        {"algorithms": ()},
        {"algorithms": ("HS256", "HS512")},
        {"key_files": ()},
        {"leeway_ms": -1},
        {"leeway_ms": LEEWAY_MS_MAX + 1},
        {"grants_claim": ""},
        {"grants_claim": "sub"},
        {"token_characters_max": 0},
        {"token_characters_max": TOKEN_CHARACTERS_MAX + 1},
    ],
)
def test_settings_out_of_range(wrong: dict[str, Any]) -> None:
    good: dict[str, Any] = {"algorithms": ("HS256",), "key_files": (KeyFile("x", KeyKind.SECRET),)}
    TokenSettings(**good, leeway_ms=LEEWAY_MS_MAX)
    with pytest.raises(SettingsError, match=next(iter(wrong))):
        TokenSettings(**{**good, **wrong})


# --- made by ourselves -------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_what_is_issued_is_believed(tmp_path: Path, algorithm: str) -> None:
    key = key_of(algorithm)
    path = tmp_path / "key"
    if isinstance(key, OctKey):
        source = KeyFile(str(material.written(path, key.raw_value)), KeyKind.SECRET)
    else:
        source = KeyFile(str(material.written(path, key.as_pem(private=True))), KeyKind.PEM)
    (signing_key,) = keys_of([source], [algorithm])
    grants = granted(["größe/*"], ["*"])
    claims = Claims(subject="zoë", grants=grants, issued_ms=NOW_MS, expires_ms=NOW_MS + 1000, audience="logs")
    tokens = material.tokens(tmp_path, algorithm, leeway_ms=0, audiences=("logs",))
    found = tokens.principal_of(issued(claims, signing_key))
    assert found == Principal(actor="user:zoë", client_id=None, grants=grants, expires_ms=NOW_MS + 1000)


def test_what_would_not_be_believed_is_not_issued(tmp_path: Path) -> None:
    (key,) = keys_of([key_file(tmp_path, "HS256")], ["HS256"])
    good: dict[str, Any] = {"subject": "a", "grants": Grants(), "issued_ms": NOW_MS, "expires_ms": NOW_MS + 1}
    many = granted([f"{number:0200}" for number in range(100)])
    for wrong in ({"subject": ""}, {"client_id": ""}, {"expires_ms": 10**18}, {"grants": many}):
        with pytest.raises(CanonicalError):
            issued(Claims(**{**good, **wrong}), key)
    (public,) = keys_of([key_file(tmp_path, "ES256")], ["ES256"])
    with pytest.raises(SettingsError, match="no private part"):
        issued(Claims(**good), public)


def test_no_repr_shows_a_key(tmp_path: Path) -> None:
    source = key_file(tmp_path, "HS256", key_id="k")
    tokens = material.tokens(tmp_path, key_files=(source,))
    (key,) = keys_of([source], ["HS256"])
    assert repr(key) == "SigningKey('HS256', 'k')"
    for shown in (repr(tokens), repr(key), str(key), repr(key.key), repr(vars(tokens))):
        assert material.SECRET.decode() not in shown
        assert encoded(material.SECRET + b"0") not in shown
