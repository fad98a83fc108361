"""Verification of tokens: every check can fail, and only the server's log shows the reason."""

import itertools
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from joserfc.jwk import ECKey, OctKey
from msgspec.structs import replace

from oncelog.core.limits import NAME_CHARACTERS_MAX
from oncelog.errors import CanonicalError, SettingsError
from oncelog.server.auth.principal import Grants, Principal, parse_grants
from oncelog.server.auth.signing_keys import KeyFile, KeyKind, SigningKey
from oncelog.server.auth.tokens import Tokens, TokenSettings, issue_token
from oncelog.server.limits import LEEWAY_MS_MAX, TOKEN_CHARACTERS_MAX
from server.auth import auth_material
from server.auth.auth_material import (
    ALGORITHMS,
    CLAIMS,
    NOW_MS,
    NOW_S,
    SetClock,
    encode_base64,
    key_file,
    load_keys,
    make_key,
    sign,
    token,
)
from server.auth.token_refusals import refusal


@pytest.fixture
def verifier(tmp_path: Path) -> Tokens:
    """Verifier that accepts HS256."""
    return auth_material.tokens(tmp_path)


# --- valid tokens ------------------------------------------------------------------------------------


@pytest.mark.rule("CO-20", "CO-21")
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_valid_token_yields_its_principal(tmp_path: Path, algorithm: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tokens = auth_material.tokens(tmp_path, algorithm)
        found = tokens.authenticate(token(algorithm, client_id="laptop"))
    assert replace(found, signing_key=None) == Principal(
        actor="user:ada",
        client_id="laptop",
        grants=parse_grants(["orders/*"], ["orders/1"]),
        expires_ms=NOW_MS + 3_600_000 + 30_000,
        key_id=None,
    )
    assert found.get_event_client("laptop") == found.get_event_client(None) == "laptop"
    assert found.get_event_client("phone") is None


def test_client_and_grants_are_optional(verifier: Tokens) -> None:
    found = verifier.authenticate(token(grants=None))
    assert found.client_id is None
    assert found.grants == Grants()
    assert found.get_event_client("anyone") == "user:ada/anyone"


def test_name_of_the_grants_claim_is_configurable(tmp_path: Path) -> None:
    tokens = auth_material.tokens(tmp_path, grants_claim="https://example.org/rights")

    def token_with_claims(right: Any) -> str:
        rights: dict[str, Any] = {"https://example.org/rights": {"read": [right]}}
        return token(**rights)

    assert tokens.authenticate(token_with_claims("mine")).grants == parse_grants(["mine"])
    assert "rights.read[0]" in refusal(tokens, token_with_claims(1))


@pytest.mark.rule("CO-20")
def test_subject_is_always_a_user_actor(verifier: Tokens) -> None:
    assert verifier.authenticate(token(sub="system:retention")).actor == "user:system:retention"
    assert verifier.authenticate(token(actor="client:other", act="x")).actor == "user:ada"


def test_unknown_header_parameters_are_ignored(verifier: Tokens) -> None:
    others = {"x5t": "abc", "jku": "https://example.org/keys", "nonce": "1", "jwk": {"kty": "oct", "k": "AAAA"}}
    assert verifier.authenticate(token(header=others)).actor == "user:ada"


# --- algorithms --------------------------------------------------------------------------------------


@pytest.mark.rule("CO-21")
@pytest.mark.parametrize("name", ["none", "None", "NONE", "nOnE", ""])
def test_algorithm_none_is_always_refused(tmp_path: Path, name: str) -> None:
    tokens = auth_material.tokens(tmp_path, *ALGORITHMS)
    payload = encode_base64(json.dumps(dict(CLAIMS)).encode())
    for signature in ("", encode_base64(b"x" * 32)):
        header = encode_base64(json.dumps({"alg": name}).encode())
        assert "algorithm" in refusal(tokens, f"{header}.{payload}.{signature}")
    with pytest.raises(SettingsError, match="algorithms"):
        TokenSettings(algorithms=(name,), key_files=(KeyFile("x", KeyKind.SECRET),))


@pytest.mark.rule("CO-21")
@pytest.mark.parametrize(("pinned", "used"), list(itertools.permutations(ALGORITHMS, 2)))
def test_unconfigured_algorithm_is_refused(tmp_path: Path, pinned: str, used: str) -> None:
    assert "algorithm" in refusal(auth_material.tokens(tmp_path, pinned), token(used))


@pytest.mark.rule("CO-21")
@pytest.mark.parametrize("algorithm", ["RS256", "ES256", "EdDSA"])
@pytest.mark.parametrize("encoding", ["PEM", "DER"])
def test_public_key_used_as_hmac_secret_is_refused(tmp_path: Path, algorithm: str, encoding: Any) -> None:
    """An attacker signs with HS256 and uses the public key as the secret. The server accepts both algorithms."""
    tokens = auth_material.tokens(tmp_path, algorithm, "HS256")
    key = make_key(algorithm)
    assert not isinstance(key, OctKey)
    public = key.as_bytes(encoding=encoding, private=False)
    for secret in (public, public.strip()):
        forged = OctKey(secret, secret)  # `import_key` refuses such a secret
        assert "signature" in refusal(tokens, token("HS256", forged))
        assert "signature" in refusal(tokens, token("HS256", forged, {"kid": algorithm}))


@pytest.mark.rule("CO-21")
@pytest.mark.parametrize("algorithm", ["RS256", "ES256", "EdDSA"])
def test_key_is_used_only_for_its_own_algorithm(tmp_path: Path, algorithm: str) -> None:
    """All algorithms are configured and all keys have the same id, so only the key type tells them apart."""
    members = [auth_material.public_jwk(one, "same") for one in ALGORITHMS]
    tokens = auth_material.tokens(tmp_path, *ALGORITHMS, key_files=(auth_material.key_set(tmp_path / "set", *members),))
    for one in ALGORITHMS:
        assert tokens.authenticate(token(one, header={"kid": "same"})).actor == "user:ada"
    payload = json.dumps(dict(CLAIMS)).encode()
    for other in set(ALGORITHMS) - {algorithm}:
        header = json.dumps({"alg": other, "kid": "same"}).encode()
        assert "signature" in refusal(tokens, sign(algorithm, make_key(algorithm), header, payload))


@pytest.mark.rule("CO-21")
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_signature_by_another_key_is_refused(tmp_path: Path, algorithm: str) -> None:
    assert "signature" in refusal(auth_material.tokens(tmp_path, algorithm), token(algorithm, make_key(algorithm, 1)))


def test_key_embedded_in_the_token_is_not_used(tmp_path: Path) -> None:
    tokens = auth_material.tokens(tmp_path, "ES256")
    own = ECKey.generate_key("P-256")
    assert "signature" in refusal(tokens, token("ES256", own, {"jwk": own.as_dict(private=False)}))


# --- format ------------------------------------------------------------------------------------------


@pytest.mark.rule("CO-21")
@pytest.mark.parametrize("part", [0, 1, 2])
def test_token_with_a_changed_character_is_refused(verifier: Tokens, part: int) -> None:
    good = token()
    verifier.authenticate(good)
    parts = good.split(".")
    for index, letter in enumerate(parts[part]):
        other = "A" if letter != "A" else "B"
        parts[part] = good.split(".")[part][:index] + other + good.split(".")[part][index + 1 :]
        refusal(verifier, ".".join(parts))


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
def test_malformed_token_is_refused(verifier: Tokens, number: int) -> None:
    refusal(verifier, malformed()[number])


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
def test_malformed_header_is_refused(verifier: Tokens, header: bytes) -> None:
    refusal(verifier, sign("HS256", make_key("HS256"), header, json.dumps(dict(CLAIMS)).encode()))


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
def test_malformed_claims_are_refused(verifier: Tokens, payload: bytes) -> None:
    assert "claims" in refusal(verifier, sign("HS256", make_key("HS256"), b'{"alg":"HS256"}', payload))


def test_oversized_token_is_refused_before_parsing(verifier: Tokens, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oncelog.server.auth.signing_keys.parse_token", None)
    for text in ("a" * 10_000_000, "." * (TOKEN_CHARACTERS_MAX + 1), token(x="y" * TOKEN_CHARACTERS_MAX)):
        assert "longer than" in refusal(verifier, text)


def test_maximum_token_length_is_configurable(tmp_path: Path) -> None:
    good = token()
    auth_material.tokens(tmp_path, token_characters_max=len(good)).authenticate(good)
    assert "longer" in refusal(auth_material.tokens(tmp_path, token_characters_max=len(good) - 1), good)


def test_long_token_within_the_limit_is_accepted(verifier: Tokens) -> None:
    long = token(x="y" * 11_000)
    assert len(long) > TOKEN_CHARACTERS_MAX * 0.9
    verifier.authenticate(long)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.one_of(st.text(max_size=80), st.text(alphabet=".eyJA0-_", max_size=80)))
def test_arbitrary_text_is_refused(verifier: Tokens, text: str) -> None:
    refusal(verifier, text)


# --- claims ------------------------------------------------------------------------------------------


@pytest.mark.rule("CO-21")
def test_expired_token_is_refused(tmp_path: Path) -> None:
    clock = SetClock()
    tokens = auth_material.tokens(tmp_path, clock=clock, leeway_ms=0)
    good = token(exp=NOW_S + 60)
    clock.now_ms = NOW_MS + 59_999
    assert not tokens.authenticate(good).has_expired(clock.now_ms)
    clock.now_ms += 1
    assert refusal(tokens, good) == "token: expired"


@pytest.mark.rule("CO-21", "CO-23")
def test_leeway_extends_the_expiry(tmp_path: Path) -> None:
    clock = SetClock()
    tokens = auth_material.tokens(tmp_path, clock=clock, leeway_ms=5000)
    good = token(exp=NOW_S + 60)
    clock.now_ms = NOW_MS + 64_999
    found = tokens.authenticate(good)
    assert not found.has_expired(clock.now_ms)
    clock.now_ms += 1
    assert found.has_expired(clock.now_ms)
    refusal(tokens, good)


@pytest.mark.rule("CO-21")
@pytest.mark.parametrize("exp", [None, "1800003600", True, [], {}, -1, NOW_MS + 3_600_000, 10**30, "soon"])
def test_exp_must_be_a_number_of_seconds(verifier: Tokens, exp: Any) -> None:
    assert "$.exp" in refusal(verifier, token(exp=exp))


def test_infinite_exp_is_refused(verifier: Tokens) -> None:
    payload = b'{"sub":"ada","exp":1e999}'
    assert "$.exp" in refusal(verifier, sign("HS256", make_key("HS256"), b'{"alg":"HS256"}', payload))


def test_exp_may_have_a_fraction(tmp_path: Path) -> None:
    assert auth_material.tokens(tmp_path, leeway_ms=0).authenticate(token(exp=NOW_S + 0.5)).expires_ms == NOW_MS + 500


@pytest.mark.rule("CO-21")
@pytest.mark.parametrize("name", ["nbf", "iat"])
def test_token_not_yet_valid_is_refused(tmp_path: Path, name: str) -> None:
    tokens = auth_material.tokens(tmp_path, leeway_ms=5000)

    def token_valid_from(when: Any) -> str:
        claim: dict[str, Any] = {name: when}
        return token(**claim)

    tokens.authenticate(token_valid_from(NOW_S + 5))
    assert refusal(tokens, token_valid_from(NOW_S + 6)) == f"token: its {name} is in the future"
    assert f"$.{name}" in refusal(tokens, token_valid_from("now"))
    assert f"$.{name}" in refusal(tokens, token_valid_from(NOW_MS))


@pytest.mark.rule("CO-21")
@pytest.mark.parametrize("iss", [None, "", "other", "https://issuer.example/", ["https://issuer.example"], 7])
def test_token_of_another_issuer_is_refused(tmp_path: Path, iss: Any) -> None:
    tokens = auth_material.tokens(tmp_path, issuer="https://issuer.example")
    tokens.authenticate(token(iss="https://issuer.example"))
    assert refusal(tokens, token(iss=iss)) == "token: wrong issuer"


@pytest.mark.rule("CO-21")
@pytest.mark.parametrize("aud", [None, "", "other", [], ["other"], [["oncelog"]], {"oncelog": 1}, 7, [None]])
def test_token_for_another_audience_is_refused(tmp_path: Path, aud: Any) -> None:
    tokens = auth_material.tokens(tmp_path, audiences=("oncelog", "logs"))
    for good in ("oncelog", "logs", ["other", "logs"]):
        tokens.authenticate(token(aud=good))
    assert refusal(tokens, token(aud=aud)) == "token: wrong audience"


def test_issuer_and_audience_are_ignored_unless_configured(verifier: Tokens) -> None:
    verifier.authenticate(token(iss="anyone", aud=["anything"]))


@pytest.mark.rule("CO-20")
@pytest.mark.parametrize("sub", [None, "", 7, ["ada"], "x" * (NAME_CHARACTERS_MAX - 4), "a\0b", "\ud800"])
def test_subject_must_be_a_valid_name(verifier: Tokens, sub: Any) -> None:
    assert "$.sub" in refusal(verifier, token(sub=sub))


@pytest.mark.rule("CO-20")
def test_longest_subject_gives_an_actor_of_maximum_length(verifier: Tokens) -> None:
    found = verifier.authenticate(token(sub="é" * (NAME_CHARACTERS_MAX - 5)))
    assert len(found.actor) == NAME_CHARACTERS_MAX


@pytest.mark.parametrize("client_id", ["", 7, ["x"], "x" * NAME_CHARACTERS_MAX, "\0"])
def test_client_id_must_be_a_valid_name(verifier: Tokens, client_id: Any) -> None:
    assert "$.client_id" in refusal(verifier, token(client_id=client_id))


@pytest.mark.rule("CO-20")
@pytest.mark.parametrize("client_id", ["user:ada/laptop", "user:eve", "client:ci", "system:server"])
def test_client_id_with_a_principal_prefix_in_a_token_is_refused(verifier: Tokens, client_id: str) -> None:
    reason = refusal(verifier, token(sub="eve", client_id=client_id))
    assert reason.startswith("token: claim $.client_id: must not begin with")
    key = SigningKey("HS256", None, make_key("HS256"))
    claims: dict[str, Any] = {"subject": "eve", "grants": Grants(), "issued_ms": NOW_MS, "expires_ms": NOW_MS + 1000}
    with pytest.raises(CanonicalError, match="client_id"):
        issue_token(key, **claims, client_id=client_id)


def test_null_client_id_is_refused(verifier: Tokens) -> None:
    payload = json.dumps({**CLAIMS, "client_id": None}).encode()
    assert "$.client_id" in refusal(verifier, sign("HS256", make_key("HS256"), b'{"alg":"HS256"}', payload))


@pytest.mark.parametrize("grants", [[], "*", {"read": "*"}, {"write": [7]}, {"admin": ["*"]}])
def test_malformed_grants_are_refused(verifier: Tokens, grants: Any) -> None:
    assert "$.grants" in refusal(verifier, token(grants=grants))


@pytest.mark.rule("EV-6")
def test_grants_are_normalized_to_nfc(verifier: Tokens) -> None:
    found = verifier.authenticate(token(grants={"read": ["cafe\u0301/*"], "write": ["caf\u00e9"]}))
    assert found.grants.may_read("caf\u00e9/1")
    assert found.grants.may_write("cafe\u0301")


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
def test_token_settings_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    good: dict[str, Any] = {"algorithms": ("HS256",), "key_files": (KeyFile("x", KeyKind.SECRET),)}
    TokenSettings(**good, leeway_ms=LEEWAY_MS_MAX)
    with pytest.raises(SettingsError, match=next(iter(wrong))):
        TokenSettings(**{**good, **wrong})


# --- issued tokens -----------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_issued_token_is_accepted(tmp_path: Path, algorithm: str) -> None:
    key = make_key(algorithm)
    path = tmp_path / "key"
    if isinstance(key, OctKey):
        source = KeyFile(str(auth_material.write_file(path, key.raw_value)), KeyKind.SECRET)
    else:
        source = KeyFile(str(auth_material.write_file(path, key.as_pem(private=True))), KeyKind.PEM)
    (signing_key,) = load_keys([source], [algorithm])
    grants = parse_grants(["größe/*"], ["*"])
    claims: dict[str, Any] = {"subject": "zoë", "grants": grants, "issued_ms": NOW_MS, "expires_ms": NOW_MS + 1000}
    tokens = auth_material.tokens(tmp_path, algorithm, leeway_ms=0, audiences=("logs",))
    found = tokens.authenticate(issue_token(signing_key, **claims, aud="logs"))
    assert replace(found, signing_key=None) == Principal(
        actor="user:zoë", client_id=None, grants=grants, expires_ms=NOW_MS + 1000
    )


def test_unacceptable_token_is_not_issued(tmp_path: Path) -> None:
    (key,) = load_keys([key_file(tmp_path, "HS256")], ["HS256"])
    good: dict[str, Any] = {"subject": "a", "grants": Grants(), "issued_ms": NOW_MS, "expires_ms": NOW_MS + 1}
    many = parse_grants([f"{number:0200}" for number in range(100)])
    for wrong in ({"subject": ""}, {"client_id": ""}, {"expires_ms": 10**18}, {"grants": many}):
        with pytest.raises(CanonicalError):
            issue_token(key, **{**good, **wrong})
    (public,) = load_keys([key_file(tmp_path, "ES256")], ["ES256"])
    with pytest.raises(SettingsError, match="no private part"):
        issue_token(public, **good)


def test_repr_does_not_show_a_key(tmp_path: Path) -> None:
    source = key_file(tmp_path, "HS256", key_id="k")
    tokens = auth_material.tokens(tmp_path, key_files=(source,))
    (key,) = load_keys([source], ["HS256"])
    assert repr(key) == "SigningKey('HS256', 'k')"
    for shown in (repr(tokens), repr(key), str(key), repr(key.key), repr(vars(tokens))):
        assert auth_material.SECRET.decode() not in shown
        assert encode_base64(auth_material.SECRET + b"0") not in shown
