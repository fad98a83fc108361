"""Keys that sign and verify tokens, loaded from files.

The type of a key determines its only algorithm: an RSA key verifies RS256, never HS256. The server tries a token only
with the keys of the algorithm that the token names, so a token cannot choose a different algorithm for a key.
"""

import enum
import hmac
import warnings
from collections.abc import Mapping, Sequence
from typing import Annotated, Final

import msgspec
from joserfc.errors import JoseError, SecurityWarning
from joserfc.jwa import JWSAlgModel
from joserfc.jwk import ECKey, Key, OctKey, OKPKey, RSAKey
from joserfc.jws import CompactSignature, JWSRegistry, extract_compact, serialize_compact, validate_compact
from msgspec import Meta, Struct

from oncelog.core.canonical import JsonValue
from oncelog.errors import SettingsError
from oncelog.server.auth import secret_files
from oncelog.server.auth.secret_files import FileContents, SecretCheck
from oncelog.server.limits import (
    RSA_BITS_MIN,
    SECRET_BYTES_MIN,
    TOKEN_CHARACTERS_MAX,
    TOKEN_HEADER_CHARACTERS_MAX,
    TOKEN_KEY_FILE_BYTES_MAX,
    TOKEN_KEYS_MAX,
    TOKEN_SIGNATURE_CHARACTERS_MAX,
)

ALGORITHMS: Final = ("HS256", "RS256", "ES256", "EdDSA")
_KEY_TYPES: Final[Mapping[str, type[Key]]] = {"oct": OctKey, "RSA": RSAKey, "EC": ECKey, "OKP": OKPKey}
_ALGORITHMS_OF_TYPES: Final[Mapping[type[Key], tuple[str, str | None]]] = {
    OctKey: ("HS256", None),
    RSAKey: ("RS256", None),
    ECKey: ("ES256", "P-256"),
    OKPKey: ("EdDSA", "Ed25519"),
}
"""The algorithm for each key type, and the required curve."""
_PEM_TYPES: Final[Sequence[type[Key]]] = (RSAKey, ECKey, OKPKey)
_KEY_ERRORS: Final = (JoseError, ValueError, TypeError, KeyError, AttributeError, SecurityWarning)
"""Errors that joserfc and cryptography raise for malformed keys and signatures."""


PlainText = Annotated[str, Meta(pattern=r"^[^\0]+\Z")]
"""A non-empty string in a settings file, without U+0000."""
_DIGEST_KEY: Final = b"oncelog signing key"


class KeyKind(enum.Enum):
    """Format of a key file."""

    SECRET = "secret"  # noqa: S105 - a word of the settings
    """The bytes of a secret for HS256. A trailing newline is not part of the secret."""
    PEM = "pem"
    """One public or private key. Only the public part of a private key is used."""
    JWKS = "jwks"
    """A JSON Web Key Set (RFC 7517)."""


class KeyFile(Struct, frozen=True, forbid_unknown_fields=True):
    """Path and format of a key file. The server does not guess the format."""

    path: PlainText
    kind: KeyKind
    key_id: PlainText | None = None
    """The `kid` of the key in a secret or PEM file. A key without a `kid` is tried for every token."""


class SigningKey(Struct, frozen=True):
    """A key, its algorithm, and the id by which tokens refer to it."""

    algorithm: str
    key_id: str | None
    key: Key
    digest: bytes = b""
    """Identifies the key by algorithm, id and material, in every process. Only encrypted tickets contain it, because
    the digest of a weak secret would help an attacker to guess the secret."""

    def __post_init__(self) -> None:
        material = self.key.raw_value if isinstance(self.key, OctKey) else self.key.thumbprint().encode()
        named = f"{self.algorithm}\0{self.key_id}\0".encode()
        msgspec.structs.force_setattr(self, "digest", hmac.digest(_DIGEST_KEY, named + material, "sha256"))

    @property
    def fingerprint(self) -> str | None:
        """Return the thumbprint of a public key (RFC 7638), or None for a secret, because a hash might reveal it."""
        return None if isinstance(self.key, OctKey) else self.key.thumbprint()

    def __repr__(self) -> str:
        return f"SigningKey({self.algorithm!r}, {self.key_id!r})"

    def sign(self, payload: bytes) -> str:
        """Return a token with these claims, signed by this key. Raises SettingsError if the key is public."""
        header = {"typ": "JWT", "alg": self.algorithm}
        if self.key_id is not None:
            header["kid"] = self.key_id
        try:
            return serialize_compact(header, payload, self.key, registry=_REGISTRY)
        except _KEY_ERRORS:
            pass
        raise SettingsError("the key cannot sign: it has no private part, or is not for signatures")

    def has_signed(self, signature: CompactSignature) -> bool:
        """Return whether the signature was made with this key."""
        try:
            return validate_compact(signature, self.key, registry=_REGISTRY)
        except _KEY_ERRORS:
            return False


class _Registry(JWSRegistry):
    """joserfc's four algorithms, with the server's limits and without the warning about the name EdDSA."""

    max_header_length = TOKEN_HEADER_CHARACTERS_MAX
    max_payload_length = TOKEN_CHARACTERS_MAX
    max_signature_length = TOKEN_SIGNATURE_CHARACTERS_MAX

    def get_alg(self, name: str) -> JWSAlgModel:
        """See joserfc."""
        if name not in ALGORITHMS:
            raise ValueError("unsupported algorithm")
        return self.algorithms[name]


# Unknown header parameters are ignored (RFC 7515, 4). The caller refuses `crit`.
_REGISTRY: Final = _Registry(algorithms=ALGORITHMS, strict_check_header=False)


def parse_token(token: str) -> CompactSignature | None:
    """Return the unverified parts of a token, or None if it is malformed."""
    try:
        return extract_compact(token.encode("ascii"), registry=_REGISTRY)
    except (*_KEY_ERRORS, RecursionError):
        return None


def generate_key_pair() -> tuple[str, str]:
    """Return a new private key and its public key, in PEM, for tokens of the algorithm EdDSA."""
    key = OKPKey.generate_key("Ed25519")
    return key.as_pem(private=True).decode(), key.as_pem(private=False).decode()


# --- from files --------------------------------------------------------------------------------------


def parse_key_file(
    source: KeyFile, contents: FileContents, algorithms: Sequence[str], check: SecretCheck
) -> list[SigningKey]:
    """Return the keys in a file that use one of these algorithms. Raises SettingsError if the file is invalid."""
    keys = _DECODERS[source.kind](contents, source.key_id, check)
    usable = [key for key in keys if key.algorithm in algorithms]
    if not usable:
        raise SettingsError(f"{source.path} has no key for {' or '.join(algorithms)}")
    return usable


def load_signing_key(path: str, algorithm: str, key_id: str | None, check: SecretCheck) -> SigningKey:
    """Return the key in a file, for signing tokens. Raises SettingsError if the file is invalid.

    In a key set, the id selects the key. A secret or PEM file contains one key without an id, which is given this id.
    """
    source = KeyFile(path, KeyKind.SECRET if algorithm == "HS256" else KeyKind.PEM, key_id)
    contents = secret_files.read_file(path, TOKEN_KEY_FILE_BYTES_MAX)
    if key_id is not None and _is_key_set(contents):
        source = KeyFile(path, KeyKind.JWKS)
    for key in parse_key_file(source, contents, [algorithm], check):
        if key.key_id == key_id:
            return key
    raise SettingsError(f"{path} has no key with the id {key_id!r}")


def _is_key_set(contents: FileContents) -> bool:
    """Return whether a file contains a JSON object with a `keys` member."""
    try:
        value = secret_files.parse_json(contents)
    except SettingsError:
        return False
    return type(value) is dict and "keys" in value


def check_key_set(keys: Sequence[SigningKey]) -> None:
    """Raise SettingsError if there are too many keys or two of them share an id."""
    if len(keys) > TOKEN_KEYS_MAX:
        raise SettingsError(f"tokens.key_files must have at most {TOKEN_KEYS_MAX} keys, not {len(keys)}")
    seen = set()
    for key in keys:
        name = (key.algorithm, key.key_id)
        if key.key_id is not None and name in seen:
            raise SettingsError(f"two {key.algorithm} keys have the id {key.key_id!r}")
        seen.add(name)


def _decode_secret(contents: FileContents, key_id: str | None, check: SecretCheck) -> list[SigningKey]:
    contents.check_secret("a secret", check)
    secret = contents.data.removesuffix(b"\n").removesuffix(b"\r")
    if len(secret) < SECRET_BYTES_MIN:
        raise SettingsError(f"{contents.path}: a secret must have at least {SECRET_BYTES_MIN} bytes")
    key = _import_key(OctKey, secret)
    if key is None:
        raise SettingsError(f"{contents.path} contains another kind of key, such as a public key, which is not secret")
    return [SigningKey("HS256", key_id, key)]


def _decode_pem(contents: FileContents, key_id: str | None, check: SecretCheck) -> list[SigningKey]:
    contents.check_write_protected("keys")
    if b"PRIVATE KEY-----" in contents.data:
        contents.check_secret("a private key", check)
    if contents.data.count(b"-----BEGIN ") != 1:
        raise SettingsError(f"{contents.path} must contain exactly one PEM key; use one file per key")
    for key_type in _PEM_TYPES:
        key = _import_key(key_type, contents.data)
        algorithm = None if key is None else _find_algorithm(key)
        if key is not None and algorithm is not None:
            return [SigningKey(algorithm, key_id, key)]
    raise SettingsError(
        f"{contents.path} is not a PEM key that can verify tokens: it must be an unencrypted RSA key of at least "
        f"{RSA_BITS_MIN} bits, EC key on P-256, or Ed25519 key"
    )


def _decode_key_set(contents: FileContents, _: str | None, check: SecretCheck) -> list[SigningKey]:
    contents.check_write_protected("keys")
    value = secret_files.parse_json(contents)
    members = value.get("keys") if type(value) is dict else None
    if type(members) is not list or not all(type(member) is dict for member in members):
        raise SettingsError(f'{contents.path} is not a key set: it must be {{"keys": [{{…}}, …]}}')
    if any("d" in member or "k" in member for member in members):
        contents.check_secret("a secret or a private key", check)
    found = [_decode_member(contents.path, index, member) for index, member in enumerate(members)]
    return [key for key in found if key is not None]


def _decode_member(path: str, index: int, member: Mapping[str, JsonValue]) -> SigningKey | None:
    """Return the key in a member, or None for a key with a different purpose, which a set may contain."""
    key_type = _KEY_TYPES.get(str(member.get("kty")))
    if key_type is None or member.get("use", "sig") != "sig":
        return None
    location = f"{path}: keys[{index}]"
    key = _import_key(key_type, dict(member))
    if key is None:
        raise SettingsError(f"{location} is not a valid {key_type.key_type} key")
    if isinstance(key, OctKey) and len(key.raw_value) < SECRET_BYTES_MIN:
        raise SettingsError(f"{location}: a secret must have at least {SECRET_BYTES_MIN} bytes")
    algorithm = _find_algorithm(key)
    if algorithm is None or key.alg not in (None, algorithm):
        return None
    if not key.kid:
        raise SettingsError(f"{location} has no kid; tokens select a key by its kid")
    return SigningKey(algorithm, key.kid, key)


def _import_key(key_type: type[Key], value: bytes | dict[str, JsonValue]) -> Key | None:
    """Return the key, or None if it is malformed or joserfc warns about it, for example because it is too short."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", SecurityWarning)
        try:
            return key_type.import_key(value)
        except _KEY_ERRORS:
            return None


def _find_algorithm(key: Key) -> str | None:
    """Return the algorithm of a key, or None if its curve is not supported."""
    algorithm, curve = _ALGORITHMS_OF_TYPES[type(key)]
    return algorithm if getattr(key, "curve_name", None) == curve else None


_DECODERS: Final = {KeyKind.SECRET: _decode_secret, KeyKind.PEM: _decode_pem, KeyKind.JWKS: _decode_key_set}
