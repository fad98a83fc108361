"""Who has come, once a credential has been checked."""

from typing import Final

from msgspec import Struct

from oncelog.core.identity import check_length, check_text, scope_of
from oncelog.core.limits import NAME_CHARACTERS_MAX
from oncelog.errors import CanonicalError
from oncelog.server.auth.grants import Grants

PRINCIPAL_KINDS: Final = ("user", "client", "system")
"""Kinds of principals, which their actors begin with."""


class Principal(Struct, frozen=True, kw_only=True):
    """Who acts: what the server puts into every record (CO-20), and what they may. It holds no secret."""

    actor: str
    """`user:{sub}` of a token, `client:{id}` of an API key."""
    client_id: str | None
    """The only client that this one may connect as; None leaves the choice."""
    grants: Grants
    expires_ms: int | None = None
    """From when on the credential is not accepted any more: the end of a token, leeway included, or of an API key."""
    key_id: str | None = None
    """Of an API key."""
    signing_key: bytes | None = None
    """Of a token: the digest of the key that verified its signature."""

    def has_expired(self, now_ms: int) -> bool:
        """Whether a connection of theirs must end (CO-23)."""
        return self.expires_ms is not None and now_ms >= self.expires_ms

    def get_event_client(self, requested: str | None) -> str | None:
        """Return the client id under which the events of this principal are stored; None if it may not use `requested`.

        A credential with a client id has that one. Any other chooses names within its own actor: `user:ada` that asks
        for `laptop` is stored as `user:ada/laptop`, so that no choice reads as another principal's client. A slash in
        the actor is escaped (`scope_of`): the text before the first slash names the actor.

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
    """`{kind}:{name}`, as long as every store can hold it. Raises CanonicalError with the path if not."""
    text = check_text(name, path)
    check_length(text, path, NAME_CHARACTERS_MAX - len(kind) - 1)
    return f"{kind}:{text}"


def find_principal_kind(client_id: str) -> str | None:
    """The kind of principal that a client id claims to be: `user` for `user:789`. None for an ordinary id."""
    kind, colon, _ = client_id.partition(":")
    return kind if colon and kind in PRINCIPAL_KINDS else None


def parse_client_id(name: object, path: str) -> str:
    """A client's id, one that can be an actor too. Raises CanonicalError with the path if it is none."""
    return to_actor("client", name, path).removeprefix("client:")


def parse_new_client_id(name: object, path: str) -> str:
    """Return a client id that no other principal writes under. Raises CanonicalError with the path."""
    client_id = parse_client_id(name, path)
    kind = find_principal_kind(client_id)
    if kind is not None:
        raise CanonicalError(path, f"must not begin with `{kind}:`, which names another principal")
    return client_id
