"""What a server notices about credentials: keys that were revoked, removed or have expired."""

import logging
from collections.abc import Callable
from typing import Final, Literal

from msgspec import Struct

logger: Final = logging.getLogger("oncelog.doors")

CredentialAct = Literal["api_key_revoked", "api_key_removed", "api_key_expired", "signing_key_removed"]


class CredentialEvent(Struct, frozen=True, kw_only=True):
    """The end of a key. It holds no secret. All servers of a file notice the same `act` and `id`."""

    act: CredentialAct
    id: str
    """Of an API key its id; of a signing key its algorithm and `kid`: `EdDSA/2026-11`, or `HS256/` without one."""
    path: str
    """The file that the key is or was in."""
    at_ms: int
    """When the key was revoked or expired, as the file says; of a removed key when the server noticed it."""
    changed_ns: int = 0
    """Of a removed key: when the file that it was removed from was last modified, which tells one removal from another.
    It is the same for all servers that read one file."""
    client_id: str | None = None
    """Of an API key."""
    fingerprint: str | None = None
    """Of a public signing key: its thumbprint (RFC 7638)."""
    is_initial: bool = False
    """Whether the key had ended before the server read the file for the first time."""


CredentialListener = Callable[[CredentialEvent], None]


class CredentialEvents:
    """Listeners of credential events. They are called by the thread that reloads the files, one after the other."""

    def __init__(self) -> None:
        self._listeners: list[CredentialListener] = []

    def subscribe(self, listener: CredentialListener) -> None:
        """Call the listener for every event from now on."""
        self._listeners.append(listener)

    def publish(self, event: CredentialEvent) -> None:
        """Call all listeners. The error of a listener is logged, and does not keep the key in use."""
        for listener in self._listeners:
            try:
                listener(event)
            except Exception:
                logger.exception("a listener of credential events failed", extra={"act": event.act, "key": event.id})
