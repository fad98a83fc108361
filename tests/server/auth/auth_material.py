"""Keys, claims and tokens for tests. Tokens are assembled here, so that tests can make any part of them invalid."""

import base64
import json
import os
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

from joserfc.jwk import ECKey, Key, OctKey, OKPKey, RSAKey
from joserfc.jws import JWSRegistry

from oncelog.server.auth.credential_files import CredentialFiles, CredentialUser
from oncelog.server.auth.secret_files import SecretCheck, read_file
from oncelog.server.auth.signing_keys import KeyFile, KeyKind, SigningKey, check_key_set, parse_key_file
from oncelog.server.auth.tokens import Tokens, TokenSettings
from oncelog.server.limits import TOKEN_KEY_FILE_BYTES_MAX

NOW_MS: Final = 1_800_000_000_000
NOW_S: Final = NOW_MS // 1000
SECRET: Final = b"a secret of thirty-two bytes or so"
GRANTS: Final = {"read": ["orders/*"], "write": ["orders/1"]}
CLAIMS: Final[Mapping[str, Any]] = {"sub": "ada", "exp": NOW_S + 3600, "grants": GRANTS}
ALGORITHMS: Final = ("HS256", "RS256", "ES256", "EdDSA")


def make_key(algorithm: str, number: int = 0) -> Key:
    """Return a key for the algorithm. Each number has a separate key."""
    return _make_key(algorithm, number)


@cache
def _make_key(algorithm: str, number: int) -> Key:
    match algorithm:
        case "HS256":
            return OctKey.import_key(SECRET + b"%d" % number)
        case "RS256":
            return RSAKey.generate_key(2048)
        case "ES256":
            return ECKey.generate_key("P-256")
        case _:
            return OKPKey.generate_key("Ed25519")


class SetClock:
    """Clock whose time a test sets."""

    def __init__(self, now_ms: int = NOW_MS) -> None:
        self.now_ms = now_ms

    def __call__(self) -> int:
        return self.now_ms


def encode_base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def sign(algorithm: str, key: Key, header: bytes, payload: bytes) -> str:
    """Return a correctly signed token with exactly these header and payload bytes."""
    signed_part = f"{encode_base64(header)}.{encode_base64(payload)}"
    return f"{signed_part}.{encode_base64(JWSRegistry.algorithms[algorithm].sign(signed_part.encode(), key))}"


def token(
    algorithm: str = "HS256", key: Key | None = None, header: Mapping[str, Any] | None = None, **claims: Any
) -> str:
    """Return a valid token. The given claims replace the defaults; None omits a claim."""
    said = {name: value for name, value in {**CLAIMS, **claims}.items() if value is not None}
    head = {"alg": algorithm, "typ": "JWT", **(header or {})}
    return sign(algorithm, key or make_key(algorithm), json.dumps(head).encode(), json.dumps(said).encode())


def write_file(path: Path, data: bytes, mode: int = 0o600) -> Path:
    path.write_bytes(data)
    path.chmod(mode)
    return path


def key_file(directory: Path, algorithm: str, number: int = 0, key_id: str | None = None) -> KeyFile:
    """Write the key that verifies tokens of the algorithm to a file."""
    key = make_key(algorithm, number)
    path = directory / f"{algorithm}-{number}.key"
    if isinstance(key, OctKey):
        return KeyFile(str(write_file(path, key.raw_value + b"\n")), KeyKind.SECRET, key_id)
    return KeyFile(str(write_file(path, key.as_pem(private=False), 0o644)), KeyKind.PEM, key_id)


def key_set(path: Path, *members: Mapping[str, Any]) -> KeyFile:
    """Replace the file atomically with a key set."""
    unfinished = write_file(path.with_suffix(".new"), json.dumps({"keys": list(members)}).encode())
    os.replace(unfinished, path)  # noqa: PTH105
    return KeyFile(str(path), KeyKind.JWKS)


def public_jwk(algorithm: str, key_id: str | None, number: int = 0, **others: Any) -> dict[str, Any]:
    """Return a key in the form in which a key set contains it."""
    named = {} if key_id is None else {"kid": key_id}
    return {**make_key(algorithm, number).as_dict(private=False), **named, **others}


def reload(user: CredentialUser) -> None:
    """Load the files of tokens or API keys. Raises SettingsError."""
    CredentialFiles(user.list_files()).reload()


def tokens(directory: Path, *algorithms: str, clock: SetClock | None = None, **settings: Any) -> Tokens:
    """Return a verifier with one key per algorithm."""
    chosen = algorithms or ("HS256",)
    sources = settings.pop("key_files", None) or tuple(key_file(directory, one) for one in chosen)
    made = Tokens(TokenSettings(algorithms=chosen, key_files=sources, **settings), clock or SetClock())
    reload(made)
    return made


def load_keys(
    sources: Sequence[KeyFile], algorithms: Sequence[str] = ALGORITHMS, check: SecretCheck = SecretCheck.SERVER
) -> list[SigningKey]:
    """Return the keys in the files that can be used with the given algorithms."""
    found = [
        key
        for source in sources
        for key in parse_key_file(source, read_file(source.path, TOKEN_KEY_FILE_BYTES_MAX), algorithms, check)
    ]
    check_key_set(found)
    return found


def all_texts(error: BaseException | None) -> str:
    """Return all texts that could leak from an error and its causes: messages, reprs and attributes."""
    found = []
    while error is not None:
        found += [str(error), repr(error), repr(error.args), repr(vars(error))]
        error = error.__cause__ or error.__context__
    return "\n".join(found)
