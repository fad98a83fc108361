"""Tickets for streams: short-lived credentials that a browser's `EventSource` sends in the address of one stream.

`EventSource` cannot send headers, so it cannot send the caller's credential. A caller that authenticates with its
credential gets a ticket, which names the caller and the stream and expires soon. A ticket is valid only as long as the
credential that it was issued for.

The server encrypts tickets (JWE with `dir` and A256GCM), so they do not reveal the caller. It stores none, so callers
cannot make its memory grow.
"""

import hmac
import secrets
from collections.abc import Callable, Collection
from hashlib import sha256
from typing import Final

import msgspec
from joserfc import jwe
from joserfc.errors import JoseError
from joserfc.jwk import OctKey
from msgspec import Struct

from oncelog.core.canonical import nfc
from oncelog.errors import AuthError, SettingsError
from oncelog.server.auth import secret_files
from oncelog.server.auth.principal import Grants, Principal, new_read_grants
from oncelog.server.auth.secret_files import SecretCheck
from oncelog.server.limits import SECRET_BYTES_MIN, TICKET_CHARACTERS_MAX, TICKET_KEY_FILE_BYTES_MAX

TICKET_PREFIX: Final = "olt_"
"""Distinguishes tickets from other credentials, and helps scanners find leaked ones."""
_HEADER: Final = {"alg": "dir", "enc": "A256GCM"}
_ALGORITHMS: Final = list(_HEADER.values())
_HEADER_PART: Final = "eyJhbGciOiJkaXIiLCJlbmMiOiJBMjU2R0NNIn0.."
"""`_HEADER` and the empty encrypted key, encoded. Tickets omit this part, so that callers cannot choose a header."""
_CONTEXT: Final = b"oncelog stream ticket 1\0"
"""Separates the encryption key from other uses of the same secret, and from other versions of the content."""
_PROCESS_SECRET: Final = secrets.token_bytes(32)
"""Secret of this process, for servers without a key file."""
_ERRORS: Final = (JoseError, msgspec.MsgspecError, ValueError)


class Ticket(Struct, frozen=True, array_like=True, kw_only=True):
    """The content of a ticket: the stream that it opens, its expiry, and the principal without its grants."""

    stream: bytes
    """Digest of the operation and of the names that the stream reads (`digest_stream`)."""
    expires_ms: int
    actor: str
    client_id: str | None
    key_id: str | None
    signing_key: bytes | None
    principal_expires_ms: int | None

    def to_principal(self) -> Principal:
        """Return the principal, without grants."""
        return Principal(
            actor=self.actor,
            client_id=self.client_id,
            grants=Grants(),
            expires_ms=self.principal_expires_ms,
            key_id=self.key_id,
            signing_key=self.signing_key,
        )


class IssuedTicket(Struct, frozen=True):
    """A new ticket. Its text is not part of the repr."""

    text: str
    expires_ms: int

    def __repr__(self) -> str:
        return f"IssuedTicket(expires_ms={self.expires_ms})"


class StreamTickets:
    """Issues and verifies the tickets of one server.

    The key is random, or comes from a file that several servers share. `load` reads the file.
    """

    def __init__(
        self,
        now_ms: Callable[[], int],
        lifetime_ms: int,
        key_file: str | None = None,
        check: SecretCheck = SecretCheck.SERVER,
    ) -> None:
        self._now_ms = now_ms
        self._lifetime_ms = lifetime_ms
        self._key_file = key_file
        self._check = check
        self._key = _derive_key(_PROCESS_SECRET)

    def load(self) -> None:
        """Read the key file, if any. Raises SettingsError on failure, and keeps the previous key."""
        if self._key_file is None:
            return
        contents = secret_files.read_file(self._key_file, TICKET_KEY_FILE_BYTES_MAX)
        contents.check_secret("the key of stream tickets", self._check)
        secret = contents.data.removesuffix(b"\n").removesuffix(b"\r")
        if len(secret) < SECRET_BYTES_MIN:
            raise SettingsError(
                f"tickets.key_file: {contents.path} must have at least {SECRET_BYTES_MIN} bytes, not {len(secret)}; "
                "create it with `openssl rand -hex 32`"
            )
        self._key = _derive_key(secret)

    def issue(self, principal: Principal, operation: str, names: Collection[str]) -> IssuedTicket:
        """Return a ticket for a stream that the principal may read. It expires no later than the credential."""
        expires_ms = self._now_ms() + self._lifetime_ms
        if principal.expires_ms is not None:
            expires_ms = min(expires_ms, principal.expires_ms)
        ticket = Ticket(
            stream=digest_stream(operation, names),
            expires_ms=expires_ms,
            actor=principal.actor,
            client_id=principal.client_id,
            key_id=principal.key_id,
            signing_key=principal.signing_key,
            principal_expires_ms=principal.expires_ms,
        )
        encrypted = jwe.encrypt_compact(_HEADER, msgspec.msgpack.encode(ticket), self._key, algorithms=_ALGORITHMS)
        return IssuedTicket(TICKET_PREFIX + encrypted.removeprefix(_HEADER_PART), expires_ms)

    def verify(self, text: str) -> Ticket:
        """Return the content of a ticket. Raises AuthError if it is forged or has expired."""
        if len(text) > TICKET_CHARACTERS_MAX or not text.startswith(TICKET_PREFIX):
            raise AuthError("stream ticket: malformed")
        encrypted = _HEADER_PART + text.removeprefix(TICKET_PREFIX)
        try:
            plain = jwe.decrypt_compact(encrypted, self._key, algorithms=_ALGORITHMS).plaintext or b""
            ticket = msgspec.msgpack.decode(plain, type=Ticket)
        except _ERRORS:
            raise AuthError("stream ticket: forged, or issued under another key") from None
        if self._now_ms() >= ticket.expires_ms:
            raise AuthError("stream ticket: expired")
        return ticket


def _derive_key(secret: bytes) -> OctKey:
    return OctKey.import_key(hmac.digest(secret, _CONTEXT, "sha256"))


def digest_stream(operation: str, names: Collection[str]) -> bytes:
    """Return the digest of a stream: its operation and the set of names that it reads, in NFC."""
    return sha256(msgspec.msgpack.encode([operation, *sorted({nfc(name) for name in names})])).digest()


def restrict_to_ticket(
    principal: Principal, ticket: Ticket, operation: str, names: Collection[str]
) -> Principal | None:
    """Return the principal with rights to read only these names, or None if the ticket is for another stream.

    An API key has its current rights. The rights of a token cannot change, and they covered these names when the server
    issued the ticket.
    """
    if not hmac.compare_digest(ticket.stream, digest_stream(operation, names)):
        return None
    covered = new_read_grants(names)
    grants = covered if principal.key_id is None else principal.grants.intersect(covered)
    return msgspec.structs.replace(principal, grants=grants)
