"""Authenticates callers by their credentials.

An API calls `authenticate` once for each connection or request, and checks the principal's grants for every partition
before it reads the log (CO-22). The client receives the text of an `AuthError`; the server logs its `reason`.
"""

import re
from typing import ClassVar, Final

from oncelog.errors import AuthError, SettingsError
from oncelog.server.auth.api_keys import KEY_PREFIX, ApiKey, ApiKeys, CreatedKey
from oncelog.server.auth.credential_files import CredentialEvent, CredentialFiles, CredentialListener, CredentialUser
from oncelog.server.auth.principal import EVERYTHING, Grants, Principal, decode_grants, parse_grants
from oncelog.server.auth.signing_keys import KeyFile, KeyKind
from oncelog.server.auth.tokens import Tokens, TokenSettings

__all__ = [
    "EVERYTHING",
    "ApiKey",
    "ApiKeys",
    "Authenticator",
    "CreatedKey",
    "CredentialEvent",
    "CredentialListener",
    "DevelopmentAuthenticator",
    "Grants",
    "KeyFile",
    "KeyKind",
    "Principal",
    "TokenSettings",
    "Tokens",
    "decode_grants",
    "parse_grants",
]


class Authenticator:
    """Verifies tokens, API keys or both. Call `reload` before the first use and after the files have changed."""

    is_open: ClassVar[bool] = False
    """Whether every caller is accepted. Such a server binds to loopback addresses only and logs a warning (CO-21)."""

    def __init__(self, tokens: Tokens | None = None, api_keys: ApiKeys | None = None) -> None:
        if tokens is None and api_keys is None:
            raise SettingsError("neither tokens nor API keys are configured, so no caller could authenticate")
        self._tokens = tokens
        self._api_keys = api_keys
        self._users: list[CredentialUser] = [user for user in (tokens, api_keys) if user is not None]
        self.files = CredentialFiles(file for user in self._users for file in user.list_files())

    def authenticate(self, credential: str | None) -> Principal:
        """Return the principal of a credential. Raises AuthError if the credential is invalid.

        The prefix of API keys distinguishes them from tokens.
        """
        if not credential:
            raise AuthError("no credential")
        known = self._api_keys if credential.startswith(KEY_PREFIX) else self._tokens
        if known is None:
            raise AuthError("credentials of this kind are not configured")
        return known.authenticate(credential)

    def refresh_principal(self, principal: Principal, now_ms: int) -> Principal | None:
        """Return the principal with its current rights, or None if its connections must be closed.

        Connections are closed once the credential expires or is revoked or removed.
        """
        if principal.key_id is None:
            has_key = self._tokens is not None and self._tokens.has_key(principal.signing_key)
            return principal if has_key and not principal.has_expired(now_ms) else None
        current = None if self._api_keys is None else self._api_keys.find_principal(principal.key_id, now_ms)
        return current if current is not None and current.actor == principal.actor else None

    def reload(self) -> None:
        """Load every credential file.

        Raises SettingsError at the end if any file is invalid. The previous content of an invalid file remains in use.
        """
        self.files.reload()

    def report_expired(self) -> None:
        """Notify the listeners of API keys that have expired since the last call."""
        for user in self._users:
            user.report_expired()

    def subscribe(self, listener: CredentialListener) -> None:
        """Call the listener whenever a key has been revoked or removed, or has expired."""
        for user in self._users:
            user.subscribe(listener)


DEVELOPER: Final = Principal(actor="user:developer", client_id=None, grants=EVERYTHING)


_USER_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)


class DevelopmentAuthenticator(Authenticator):
    """Grants every right to every caller, for a server that is reachable only from its own machine."""

    is_open: ClassVar = True

    def __init__(self) -> None:
        self._users = []
        self.files = CredentialFiles()

    def authenticate(self, credential: str | None) -> Principal:
        """Return the user with that name if the credential is a plain name, and `DEVELOPER` otherwise."""
        if credential is None or _USER_NAME.fullmatch(credential) is None:
            return DEVELOPER
        return Principal(actor=f"user:{credential}", client_id=None, grants=EVERYTHING)

    def refresh_principal(self, principal: Principal, now_ms: int) -> Principal | None:  # noqa: ARG002
        """Return the same principal."""
        return principal
