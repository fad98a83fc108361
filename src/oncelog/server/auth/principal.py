"""Principals: the identities behind verified credentials."""

from typing import Final

from msgspec import Struct

from oncelog.core.identity import check_length, check_text, scope_of
from oncelog.core.limits import NAME_CHARACTERS_MAX
from oncelog.errors import CanonicalError
from oncelog.server.auth.grants import Grants

PRINCIPAL_KINDS: Final = ("user", "client", "system")
"""Kinds of principals. An actor begins with its kind."""


class Principal(Struct, frozen=True, kw_only=True):
    """The actor of every record of a caller (CO-20), and the caller's grants. It holds no secret."""

    actor: str
    """`user:{sub}` of a token, `client:{id}` of an API key."""
    client_id: str | None
    """The only client id that the principal may use. None: the principal may choose one."""
    grants: Grants
    expires_ms: int | None = None
    """Time at which the credential ends: that of a token, with leeway, or of an API key."""
    key_id: str | None = None
    """Id of the API key."""
    signing_key: bytes | None = None
    """Digest of the key that verified the signature of the token."""

    def has_expired(self, now_ms: int) -> bool:
        """Return whether the connections of the principal must end (CO-23)."""
        return self.expires_ms is not None and now_ms >= self.expires_ms

    def get_event_client(self, requested: str | None) -> str | None:
        """Return the client id under which this principal's events are stored, or None if it may not use `requested`.

        A credential with a client id uses only that id. Other credentials choose names below their actor: `laptop`
        requested by `user:ada` is stored as `user:ada/laptop`, so that no choice names a client of another principal.
        A slash in the actor is escaped (`scope_of`): the text before the first slash names the actor.

        Raises CanonicalError if the result is too long to be stored.
        """
        if self.client_id is not None:
            return self.client_id if requested in (None, self.client_id) else None
        own = scope_of(self.actor)
        if requested is None or requested in (own, self.actor):
            client_id = own
        elif requested.startswith(f"{own}/"):
            client_id = requested
        else:
            client_id = f"{own}/{requested}"
        if len(client_id) > NAME_CHARACTERS_MAX:
            raise CanonicalError(
                "client_id", f"must have at most {NAME_CHARACTERS_MAX} characters together with the actor before it"
            )
        return client_id


def to_actor(kind: str, name: object, path: str) -> str:
    """Return `{kind}:{name}`. Raises CanonicalError with the path if the name is malformed, or too long for a store."""
    text = check_text(name, path)
    check_length(text, path, NAME_CHARACTERS_MAX - len(kind) - 1)
    return f"{kind}:{text}"


def find_principal_kind(client_id: str) -> str | None:
    """Return the kind of principal that a client id claims: `user` for `user:789`. None for an ordinary id."""
    kind, colon, _ = client_id.partition(":")
    return kind if colon and kind in PRINCIPAL_KINDS else None


def parse_client_id(name: object, path: str) -> str:
    """Return a client id, which can be an actor too. Raises CanonicalError with the path if it is malformed."""
    return to_actor("client", name, path).removeprefix("client:")


def parse_new_client_id(name: object, path: str) -> str:
    """Return a client id that no other principal writes under. Raises CanonicalError with the path."""
    client_id = parse_client_id(name, path)
    kind = find_principal_kind(client_id)
    if kind is not None:
        raise CanonicalError(path, f"must not begin with `{kind}:`, which names another principal")
    return client_id
