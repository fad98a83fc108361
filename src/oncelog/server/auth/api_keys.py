"""API keys: credentials for programs, valid until they are revoked or expire. The key file contains only their hashes.

A secret has 32 random bytes. It cannot be guessed, so a slow hash is unnecessary: the file contains its SHA-256, which
the server compares on every request.
"""

import base64
import hmac
import math
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Final, Generic, TypeVar

import msgspec
import orjson
from msgspec import Struct

from oncelog.core.identity import check_text
from oncelog.core.limits import NAME_CHARACTERS_MAX
from oncelog.errors import AuthError, CanonicalError, LimitExceededError, SettingsError
from oncelog.server import logger
from oncelog.server.auth import secret_files
from oncelog.server.auth.credential_files import (
    CredentialAct,
    CredentialEvent,
    CredentialFile,
    CredentialUser,
    LoadedKeys,
)
from oncelog.server.auth.principal import (
    Grants,
    Principal,
    decode_grants,
    find_principal_kind,
    parse_client_id,
    parse_new_client_id,
    to_actor,
)
from oncelog.server.auth.secret_files import FileContents, SecretCheck
from oncelog.server.limits import API_KEY_ID_BYTES, API_KEY_SECRET_BYTES, API_KEYS_FILE_BYTES_MAX, API_KEYS_MAX

GrantsType = TypeVar("GrantsType")
"""Grants, either decoded or as stored in the file."""
KEY_PREFIX: Final = "olk_"
"""Distinguishes keys from tokens, and helps scanners find leaked keys."""
FILE_VERSION: Final = 1
FILE_VERSION_WITH_EXPIRY: Final = 2
"""Version of a key file that contains a key with an expiry time. Versions of Oncelog that do not support expiry read
only version 1."""
# The last character carries only four bits. The pattern allows only canonical last characters, so that each secret has
# exactly one spelling.
_ID_PATTERN: Final = re.compile(r"[0-9a-f]{16}")
_KEY_PATTERN: Final = re.compile(r"olk_([0-9a-f]{16})_([A-Za-z0-9_-]{42}[AEIMQUYcgkosw048])", re.ASCII)


class _KeyFields(Struct, Generic[GrantsType], frozen=True, kw_only=True):
    id: str
    client_id: str
    name: str
    grants: GrantsType
    created_ms: int
    revoked_ms: int | None = None
    expires_ms: int | None = None
    """Time at which the key expires, or None if it does not expire."""


class ApiKey(_KeyFields[Grants], frozen=True, kw_only=True):
    """A key without its secret and hash."""

    def find_end(self, now_ms: int) -> "_KeyEnd | None":
        """Return how and when the key became invalid, or None for a valid key."""
        if self.revoked_ms is not None:
            return "api_key_revoked", self.revoked_ms
        if self.expires_ms is not None and now_ms >= self.expires_ms:
            return "api_key_expired", self.expires_ms
        return None


class CreatedKey(Struct, frozen=True):
    """A new key and its text. The text is neither stored nor part of the repr."""

    key: ApiKey
    text: str

    def __repr__(self) -> str:
        return f"Created({self.key!r})"


class _StoredKey(Struct, frozen=True):
    """A key with the hash of its secret."""

    key: ApiKey
    hash: bytes


class _KeyEntry(_KeyFields[dict[str, list[str]]], frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A key as stored in the file. Its entry must state whether the key is revoked."""

    secret_sha256: str
    revoked_ms: int | None


class _KeyFileContent(Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    keys: list[_KeyEntry]


KeysById = Mapping[str, _StoredKey]
"""Keys by id."""


_UNKNOWN_KEY_HASH: Final = secrets.token_bytes(32)
"""Compared with the secret sent for an unknown id, so that refusing it takes as long as refusing a wrong secret."""
_KeyEnd = tuple[CredentialAct, int]
"""The act that made a key invalid, and its time."""


class ApiKeys(CredentialUser):
    """The keys of one file. Until the file is loaded, every key is unknown."""

    def __init__(self, path: str | Path, now_ms: Callable[[], int], check: SecretCheck = SecretCheck.SERVER) -> None:
        super().__init__(now_ms, check)
        self._path = Path(path)
        self._keys: KeysById = {}
        self._warned_ids: set[str] = set()
        """Ids of keys for which a warning was logged."""
        self._ends: dict[str, _KeyEnd] | None = None
        """The reported revocations and expiries, by key id. None until the file is first read."""
        self._next_expiry_ms: float = math.inf
        """The earliest time at which a key expires."""

    # --- authentication --------------------------------------------------------------------------------

    def authenticate(self, text: str) -> Principal:
        """Return the principal of a key. Raises AuthError if the key is unknown, revoked or expired."""
        parts = _KEY_PATTERN.fullmatch(text)
        if parts is None:
            raise AuthError("API key: malformed")
        stored = self._keys.get(parts[1])
        hashed = sha256(base64.urlsafe_b64decode(parts[2] + "=")).digest()
        is_right = hmac.compare_digest(hashed, _UNKNOWN_KEY_HASH if stored is None else stored.hash)
        if stored is None or not is_right:
            raise AuthError("API key: unknown" if stored is None else f"API key {parts[1]}: wrong secret")
        end = stored.key.find_end(self._now_ms())
        if end is not None:
            raise AuthError(f"API key {stored.key.id}: {end[0].removeprefix('api_key_')}")
        return _to_principal(stored.key)

    def find_principal(self, key_id: str, now_ms: int) -> Principal | None:
        """Return a key's principal with its current grants, or None if the key is revoked, removed or expired."""
        stored = self._keys.get(key_id)
        if stored is None or stored.key.find_end(now_ms) is not None:
            return None
        return _to_principal(stored.key)

    # --- the file ------------------------------------------------------------------------------------

    def list_files(self) -> Sequence[CredentialFile]:
        """See `CredentialUser`."""
        path = self._path
        return [CredentialFile("api_keys", str(path), API_KEYS_FILE_BYTES_MAX, self._parse, self, path)]

    def load_keys(self) -> KeysById:
        """Read the keys in the file without using them. Raises SettingsError if the file is malformed or unreadable."""
        keys: KeysById = self._parse(secret_files.read_file(str(self._path), API_KEYS_FILE_BYTES_MAX)).keys
        return keys

    def _parse(self, contents: FileContents) -> LoadedKeys:
        # The permissions of a file without keys do not matter, so this error comes first.
        keys = _decode_file(contents)
        contents.check_secret("API keys", self._secret_check)
        return LoadedKeys(keys, contents.modified_ns)

    def restrict(self, source: Path, content: LoadedKeys) -> LoadedKeys | None:  # noqa: ARG002 - there is one file
        """See `CredentialUser`."""
        common = ((id_, stored, content.keys.get(id_)) for id_, stored in self._keys.items())
        keys = {
            id_: _intersect_keys(stored, new)
            for id_, stored, new in common
            if new is not None and (new.hash, new.key.client_id) == (stored.hash, stored.key.client_id)
        }
        return None if keys == self._keys else LoadedKeys(keys, content.modified_ns)

    def use(self, contents: Mapping[Path, LoadedKeys]) -> None:
        """Start using the keys of the file, and report keys that are no longer valid.

        Logs a warning, once per key, if the key's client id looks like the name of a different principal.
        """
        for content in contents.values():
            self.report_expired()
            before, self._keys = self._keys, content.keys
            self._report_ended()
            for id_ in before.keys() - self._keys.keys():
                if before[id_].key.revoked_ms is None:
                    self._publish_end(before[id_].key, ("api_key_removed", self._now_ms()), content.modified_ns)
            for id_, stored in self._keys.items():
                kind = find_principal_kind(stored.key.client_id)
                if kind is not None and stored.key.revoked_ms is None and id_ not in self._warned_ids:
                    self._warned_ids.add(id_)
                    logger.warning(
                        "the client id of an API key begins with `%s:`, so the key may share ledger streams with "
                        "another principal; replace the key",
                        kind,
                        extra={"key_id": id_, "client_id": stored.key.client_id},
                    )

    def report_expired(self) -> None:
        """See `CredentialUser`."""
        if self._now_ms() >= self._next_expiry_ms:
            self._report_ended()

    def _report_ended(self) -> None:
        """Report keys that were revoked or have expired since the last call, and determine the next expiry."""
        now_ms, reported = self._now_ms(), self._ends
        self._ends, self._next_expiry_ms = {}, math.inf
        for id_, stored in self._keys.items():
            end, expires_ms = stored.key.find_end(now_ms), stored.key.expires_ms
            if end is not None:
                self._ends[id_] = end
                if reported is None or reported.get(id_) != end:
                    self._publish_end(stored.key, end, is_initial=reported is None)
            elif expires_ms is not None:
                self._next_expiry_ms = min(self._next_expiry_ms, expires_ms)

    def _publish_end(self, key: ApiKey, end: _KeyEnd, changed_ns: int = 0, *, is_initial: bool = False) -> None:
        act, at_ms = end
        self._publish(
            CredentialEvent(
                act=act,
                id=key.id,
                path=str(self._path),
                at_ms=at_ms,
                changed_ns=changed_ns,
                client_id=key.client_id,
                is_initial=is_initial,
            )
        )

    def list(self) -> Sequence[ApiKey]:
        """Return the keys in the file, including revoked ones, oldest first."""
        return [stored.key for stored in self.load_keys().values()]

    def create(self, client_id: str, name: str, grants: Grants, expires_ms: int | None = None) -> CreatedKey:
        """Create a key, and the file if it is missing. The key is on disk when this method returns.

        Raises CanonicalError for a malformed name, LimitExceededError if the file is full, and SettingsError if the
        file is malformed or cannot be written.
        """
        client_id = parse_new_client_id(client_id, "$.client_id")
        name = _check_name(name, "$.name")
        secret = secrets.token_bytes(API_KEY_SECRET_BYTES)
        with secret_files.lock_file(self._path) as path:
            keys = dict(self.load_keys()) if path.exists() else {}
            if len(keys) >= API_KEYS_MAX:
                raise LimitExceededError("API_KEYS_MAX", API_KEYS_MAX)
            id_ = _new_id(keys)
            key = ApiKey(
                id=id_, client_id=client_id, name=name, grants=grants, created_ms=self._now_ms(), expires_ms=expires_ms
            )
            self._write(path, {**keys, id_: _StoredKey(key, sha256(secret).digest())})
        return CreatedKey(key, f"{KEY_PREFIX}{id_}_{base64.urlsafe_b64encode(secret).decode().rstrip('=')}")

    def revoke(self, key_id: str) -> ApiKey | None:
        """Revoke a key, but keep its entry. Returns None for an unknown id. Does not change a revoked key."""
        with secret_files.lock_file(self._path) as path:
            keys = self.load_keys()
            stored = keys.get(key_id)
            if stored is None or stored.key.revoked_ms is not None:
                return None if stored is None else stored.key
            revoked = msgspec.structs.replace(stored.key, revoked_ms=self._now_ms())
            self._write(path, {**keys, key_id: _StoredKey(revoked, stored.hash)})
        return revoked

    def _write(self, path: Path, keys: KeysById) -> None:
        text = _encode_file(keys)
        if len(text) > API_KEYS_FILE_BYTES_MAX:
            raise LimitExceededError("API_KEYS_FILE_BYTES_MAX", API_KEYS_FILE_BYTES_MAX)
        secret_files.replace_file(path, text)
        self._keys = keys


def _to_principal(key: ApiKey) -> Principal:
    actor = to_actor("client", key.client_id, "$.client_id")
    return Principal(actor=actor, client_id=key.client_id, grants=key.grants, expires_ms=key.expires_ms, key_id=key.id)


def _intersect_keys(stored: _StoredKey, new: _StoredKey) -> _StoredKey:
    """Return a key with the rights that both entries grant.

    It is revoked if either entry is revoked, and expires at the earlier of the two times.
    """
    key = msgspec.structs.replace(
        stored.key,
        grants=stored.key.grants.intersect(new.key.grants),
        revoked_ms=new.key.revoked_ms if stored.key.revoked_ms is None else stored.key.revoked_ms,
        expires_ms=min(
            (expires_ms for expires_ms in (stored.key.expires_ms, new.key.expires_ms) if expires_ms is not None),
            default=None,
        ),
    )
    return _StoredKey(key, stored.hash)


def find_key_id(text: str) -> str | None:
    """Return the id in the text of a key, or the text if it is an id. Return None for any other text."""
    parts = _KEY_PATTERN.fullmatch(text)
    if parts is not None:
        return parts[1]
    return text if _ID_PATTERN.fullmatch(text) else None


def _new_id(keys: KeysById) -> str:
    while (found := secrets.token_hex(API_KEY_ID_BYTES)) in keys:
        pass
    return found


# --- the file format -----------------------------------------------------------------------------------


def _encode_file(keys: KeysById) -> bytes:
    entries = [
        {
            "id": stored.key.id,
            "secret_sha256": stored.hash.hex(),
            "client_id": stored.key.client_id,
            "name": stored.key.name,
            "grants": stored.key.grants.to_claim(),
            "created_ms": stored.key.created_ms,
            "revoked_ms": stored.key.revoked_ms,
            **({} if stored.key.expires_ms is None else {"expires_ms": stored.key.expires_ms}),
        }
        for stored in keys.values()
    ]
    version = (
        FILE_VERSION if all(stored.key.expires_ms is None for stored in keys.values()) else FILE_VERSION_WITH_EXPIRY
    )
    return orjson.dumps({"version": version, "keys": entries}, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def _decode_file(contents: FileContents) -> KeysById:
    """Return the keys in a file. Raises SettingsError if it is not a key file."""
    try:
        return _to_keys(msgspec.convert(secret_files.parse_json(contents), _KeyFileContent))
    except SettingsError as error:
        problem = str(error).removeprefix(f"{contents.path}: ")
    except (msgspec.ValidationError, CanonicalError) as error:
        problem = str(error)
    raise SettingsError(
        f"{contents.path} is not an API key file: {problem}; name a file that `oncelog apikey create` has written"
    )


def _to_keys(content: _KeyFileContent) -> KeysById:
    if content.version not in (FILE_VERSION, FILE_VERSION_WITH_EXPIRY):
        raise CanonicalError(
            "$.version", f"must be {FILE_VERSION} or {FILE_VERSION_WITH_EXPIRY}; a newer Oncelog wrote the file"
        )
    if len(content.keys) > API_KEYS_MAX:
        raise CanonicalError("$.keys", f"must have at most {API_KEYS_MAX} entries")
    keys: dict[str, _StoredKey] = {}
    for index, entry in enumerate(content.keys):
        stored = _to_stored_key(entry, f"$.keys[{index}]")
        if keys.setdefault(entry.id, stored) is not stored:
            raise CanonicalError(f"$.keys[{index}].id", "must not be repeated")
    return keys


def _to_stored_key(entry: _KeyEntry, path: str) -> _StoredKey:
    if _ID_PATTERN.fullmatch(entry.id) is None:
        raise CanonicalError(f"{path}.id", "must be 16 hexadecimal digits")
    if re.fullmatch(r"[0-9a-f]{64}", entry.secret_sha256) is None:
        raise CanonicalError(f"{path}.secret_sha256", "must be 64 hexadecimal digits")
    key = ApiKey(
        id=entry.id,
        client_id=parse_client_id(entry.client_id, f"{path}.client_id"),
        name=_check_name(entry.name, f"{path}.name"),
        grants=decode_grants(entry.grants, f"{path}.grants"),
        created_ms=entry.created_ms,
        revoked_ms=entry.revoked_ms,
        expires_ms=entry.expires_ms,
    )
    return _StoredKey(key, bytes.fromhex(entry.secret_sha256))


def _check_name(value: str, path: str) -> str:
    if not 1 <= len(check_text(value, path)) <= NAME_CHARACTERS_MAX:
        raise CanonicalError(path, f"must have 1 to {NAME_CHARACTERS_MAX} characters, not {len(value)}")
    return value
