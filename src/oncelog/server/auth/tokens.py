"""Tokens: JWTs that identify a user and list the user's grants (CO-21).

joserfc verifies the signature, and this module verifies the claims. It reads only signed data, limits all sizes, and
reports the reason for a refusal only in the server's log output.
"""

import base64
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

import orjson
from msgspec import Struct

from oncelog.core.canonical import JsonValue, parse
from oncelog.core.identity import check_object, get_required
from oncelog.core.limits import SETTING_NUMBER_MAX, check_whole_numbers
from oncelog.errors import AuthError, CanonicalError, SettingsError
from oncelog.server.auth import signing_keys
from oncelog.server.auth.credential_files import CredentialEvent, CredentialFile, CredentialUser, LoadedKeys
from oncelog.server.auth.principal import Grants, Principal, decode_grants, parse_new_client_id, to_actor
from oncelog.server.auth.secret_files import FileContents, SecretCheck
from oncelog.server.auth.signing_keys import ALGORITHMS, KeyFile, SigningKey
from oncelog.server.errors import raise_first
from oncelog.server.limits import (
    LEEWAY_MS_DEFAULT,
    LEEWAY_MS_MAX,
    TOKEN_CHARACTERS_MAX,
    TOKEN_KEY_FILE_BYTES_MAX,
    TOKEN_LIFETIME_MS_DEFAULT,
    TOKEN_TIME_S_MAX,
)

_REGISTERED_CLAIMS: Final = frozenset({"iss", "sub", "aud", "exp", "nbf", "iat", "jti", "client_id"})


class TokenSettings(Struct, frozen=True, kw_only=True):
    """Which tokens the server accepts."""

    algorithms: tuple[str, ...]
    """One or more of HS256, RS256, ES256 and EdDSA. Tokens of other algorithms are refused."""
    key_files: tuple[KeyFile, ...]
    """Key files: `kind:path` or `kind#key_id:path`, where the kind is `secret`, `pem` or `jwks`. A TOML file may use
    tables instead, for a path with a comma or an id with a colon: `{ kind = "pem", path = "keys/login.pem", key_id =
    "1" }`."""
    issuer: str | None = None
    """Required value of `iss`. If this is not set, any value is accepted."""
    audiences: tuple[str, ...] = ()
    """Accepted values of `aud`. With an empty list, any value is accepted."""
    leeway_ms: int = LEEWAY_MS_DEFAULT
    """Tolerated difference between the clocks of the issuer and the server, at most 300,000."""
    lifetime_max_ms: int = TOKEN_LIFETIME_MS_DEFAULT
    """Longest time from `iat` (or from now, if it is missing) to `exp`. The server refuses tokens that live longer. 0
    switches the limit off."""
    grants_claim: str = "grants"
    """Name of the claim that contains the grants."""
    token_characters_max: int = TOKEN_CHARACTERS_MAX
    """The server refuses longer tokens. The default is also the maximum."""

    def __post_init__(self) -> None:
        are_known = bool(self.algorithms) and set(self.algorithms) <= set(ALGORITHMS)
        is_registered = self.grants_claim in ("", *_REGISTERED_CLAIMS)
        raise_first(
            SettingsError,
            (not are_known, f"algorithms must be one or more of {', '.join(ALGORITHMS)}"),
            (not self.key_files, "key_files must name at least one file"),
            (is_registered, f"grants_claim must not be a registered claim name: {self.grants_claim!r}"),
        )
        highest = {
            "leeway_ms": LEEWAY_MS_MAX,
            "lifetime_max_ms": SETTING_NUMBER_MAX,
            "token_characters_max": TOKEN_CHARACTERS_MAX,
        }
        for name, number_max in highest.items():
            check_whole_numbers(self, [name], highest=number_max, may_be_zero=("leeway_ms", "lifetime_max_ms"))


class Tokens(CredentialUser):
    """Verifies tokens. Until the key files are loaded, it refuses every token."""

    def __init__(
        self, settings: TokenSettings, now_ms: Callable[[], int], check: SecretCheck = SecretCheck.SERVER
    ) -> None:
        super().__init__(now_ms, check)
        self._settings = settings
        self._by_file: Mapping[KeyFile, LoadedKeys] = {}
        self._keys: Sequence[SigningKey] = ()
        self._digests: frozenset[bytes] = frozenset()

    def list_files(self) -> list[CredentialFile]:
        """See `CredentialUser`."""
        return [
            CredentialFile(
                "signing_keys", source.path, TOKEN_KEY_FILE_BYTES_MAX, partial(self._parse, source), self, source
            )
            for source in self._settings.key_files
        ]

    def has_key(self, digest: bytes | None) -> bool:
        """Return whether the key that verified a token is still in use."""
        return digest in self._digests

    def _parse(self, source: KeyFile, contents: FileContents) -> LoadedKeys:
        keys = signing_keys.parse_key_file(source, contents, self._settings.algorithms, self._secret_check)
        return LoadedKeys(keys, contents.modified_ns)

    def check(self, contents: Mapping[KeyFile, LoadedKeys]) -> None:
        """See `CredentialUser`."""
        signing_keys.check_key_set(self._merge_keys(contents))

    def restrict(self, source: KeyFile, content: LoadedKeys) -> LoadedKeys | None:
        """See `CredentialUser`."""
        current = self._by_file.get(source)
        if current is None:
            return None
        digests = {key.digest for key in content.keys}
        remaining = [key for key in current.keys if key.digest in digests]
        return None if len(remaining) == len(current.keys) else LoadedKeys(remaining, content.modified_ns)

    def use(self, contents: Mapping[KeyFile, LoadedKeys]) -> None:
        """Start verifying tokens with these keys, and report removed keys."""
        self._keys = self._merge_keys(contents)
        before, self._by_file = self._by_file, {**self._by_file, **contents}
        self._digests = frozenset(key.digest for key in self._keys)
        removed = {
            key.digest: (source, key)
            for source, old in before.items()
            for key in old.keys
            if not self.has_key(key.digest)
        }
        for source, key in removed.values():
            self._publish(
                CredentialEvent(
                    act="signing_key_removed",
                    id=f"{key.algorithm}/{key.key_id or ''}",
                    path=source.path,
                    at_ms=self._now_ms(),
                    changed_ns=self._by_file[source].modified_ns,
                    fingerprint=key.fingerprint,
                )
            )

    def _merge_keys(self, contents: Mapping[KeyFile, LoadedKeys]) -> list[SigningKey]:
        """Return the keys that all files contain after these contents have replaced the current ones."""
        of_file = {**self._by_file, **contents}
        return [key for source in self._settings.key_files if source in of_file for key in of_file[source].keys]

    def authenticate(self, token: str) -> Principal:
        """Return the principal of a token. Raises AuthError if the token is invalid or has expired."""
        payload, key = self._verify(token)
        claims = _parse_strict(payload)
        if type(claims) is not dict:
            raise AuthError("token: its claims are not a JSON object, or a claim is repeated")
        try:
            return self._to_principal(claims, key)
        except CanonicalError as error:
            reason = f"token: claim {error}"
        raise AuthError(reason)

    # --- the signature -------------------------------------------------------------------------------

    def _verify(self, token: str) -> tuple[bytes, SigningKey]:
        """Return the payload of a token and the key that signed it. Raises AuthError if no key verifies the token."""
        if len(token) > self._settings.token_characters_max:
            raise AuthError(f"token: longer than {self._settings.token_characters_max} characters")
        signature = signing_keys.parse_token(token)
        if signature is None:
            raise AuthError("token: malformed")
        # joserfc uses the last value of a repeated parameter, while other programs may use the first.
        header = _parse_strict(_decode_base64(signature.segments["header"]))
        if type(header) is not dict:
            raise AuthError("token: its header is not a JSON object, or a parameter is repeated")
        if "crit" in header or "b64" in header:
            raise AuthError("token: its header requires an unsupported extension")
        for key in self._find_candidates(header.get("alg"), header.get("kid")):
            if key.has_signed(signature):
                # Return the payload as it was signed, not as joserfc decoded it.
                return _decode_base64(signature.segments["payload"]), key
        raise AuthError("token: no key with its algorithm and kid verifies its signature")

    def _find_candidates(self, algorithm: JsonValue, key_id: JsonValue) -> list[SigningKey]:
        if type(algorithm) is not str or algorithm not in self._settings.algorithms:
            raise AuthError("token: its algorithm is not configured")
        found = [key for key in self._keys if key.algorithm == algorithm and key.key_id in (None, key_id)]
        if not found:
            raise AuthError("token: no key has its kid" if key_id is not None else "token: no kid")
        return found

    # --- the claims ----------------------------------------------------------------------------------

    def _to_principal(self, claims: Mapping[str, JsonValue], key: SigningKey) -> Principal:
        expires_ms = self._check_times(claims)
        self._check_issuer_and_audience(claims)
        client_id = parse_new_client_id(claims["client_id"], "$.client_id") if "client_id" in claims else None
        name = self._settings.grants_claim
        return Principal(
            actor=to_actor("user", get_required(claims, "sub"), "$.sub"),
            client_id=client_id,
            grants=decode_grants(claims[name], f"$.{name}") if name in claims else Grants(),
            expires_ms=expires_ms,
            signing_key=key.digest,
        )

    def _check_times(self, claims: Mapping[str, JsonValue]) -> int:
        """Return when the token expires. Raises AuthError if it is not valid now, or is valid for too long."""
        now_ms, leeway_ms, lifetime_max_ms = self._now_ms(), self._settings.leeway_ms, self._settings.lifetime_max_ms
        end_ms = _parse_time_ms(get_required(claims, "exp"), "$.exp")
        if now_ms >= end_ms + leeway_ms:
            raise AuthError("token: expired")
        times = {name: _parse_time_ms(claims[name], f"$.{name}") for name in ("nbf", "iat") if name in claims}
        for name, starts_ms in times.items():
            if now_ms < starts_ms - leeway_ms:
                raise AuthError(f"token: its {name} is in the future")
        if lifetime_max_ms and end_ms - times.get("iat", now_ms) > lifetime_max_ms:
            raise AuthError("token: valid for longer than tokens.lifetime_max_ms")
        return end_ms + leeway_ms

    def _check_issuer_and_audience(self, claims: Mapping[str, JsonValue]) -> None:
        issuer, accepted = self._settings.issuer, self._settings.audiences
        claim = claims.get("aud")
        audiences = claim if type(claim) is list else [claim]
        is_accepted = any(type(audience) is str and audience in accepted for audience in audiences)
        raise_first(
            AuthError,
            (issuer is not None and claims.get("iss") != issuer, "token: wrong issuer"),
            (bool(accepted) and not is_accepted, "token: wrong audience"),
        )


def _parse_time_ms(value: JsonValue, path: str) -> int:
    """Parse a NumericDate: seconds since 1970, with or without a fraction."""
    if type(value) not in (int, float):
        raise CanonicalError(path, "must be a number")
    if not 0 <= value <= TOKEN_TIME_S_MAX:  # also refuses infinity
        raise CanonicalError(path, "must be seconds since 1970, before the year 10000")
    milliseconds: int = math.floor(value * 1000)
    return milliseconds


def _decode_base64(segment: bytes) -> bytes:
    """Decode base64url, whose canonical form joserfc has checked."""
    return base64.urlsafe_b64decode(segment + b"=" * (-len(segment) % 4))


def _parse_strict(text: bytes) -> JsonValue:
    """Parse JSON. Returns None if it is malformed or repeats a member, because an exception would contain the text."""
    try:
        return parse(text)
    except CanonicalError:
        return None


# --- issuing ---------------------------------------------------------------------------------------


def issue_token(
    key: SigningKey,
    *,
    subject: str,
    grants: Grants,
    issued_ms: int,
    expires_ms: int,
    client_id: str | None = None,
    **further_claims: str | None,
) -> str:
    """Create a token that `Tokens` accepts, for development and tests. Raises CanonicalError for invalid claims.

    `further_claims` accepts `iss` and `aud`. Claims with the value None are omitted.
    """
    to_actor("user", subject, "$.sub")
    if client_id is not None:
        parse_new_client_id(client_id, "$.client_id")
    payload = {
        "sub": subject,
        "iat": issued_ms // 1000,
        "exp": expires_ms // 1000,
        "grants": grants.to_claim(),
        "client_id": client_id,
        **further_claims,
    }
    _parse_time_ms(payload["exp"], "$.exp")
    token = key.sign(
        orjson.dumps(check_object({name: value for name, value in payload.items() if value is not None}, "$"))
    )
    if len(token) > TOKEN_CHARACTERS_MAX:
        raise CanonicalError("$", f"the token must have at most {TOKEN_CHARACTERS_MAX} characters, not {len(token)}")
    return token
