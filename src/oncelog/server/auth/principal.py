"""Principals: the identities behind verified credentials, and their grants.

A grant lists the partitions that an identity may read, write and audit, by exact name or by prefix.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Final

from msgspec import Struct

from oncelog.core.canonical import JsonValue, nfc
from oncelog.core.deltas import SCOPE_PREFIX
from oncelog.core.identity import CONTROL_CHARACTER, check_length, check_object, check_text, scope_of
from oncelog.core.limits import NAME_CHARACTERS_MAX, PARTITION_CHARACTERS_MAX
from oncelog.errors import CanonicalError
from oncelog.server.errors import raise_first
from oncelog.server.limits import GRANTS_MAX

WILDCARD: Final = "*"
"""Matches any string, including the empty one, at the end of a grant. Elsewhere it is an ordinary character."""


class _PartitionSet(Struct, frozen=True):
    """A set of partitions, as exact names and as prefixes without the asterisk."""

    names: frozenset[str] = frozenset()
    prefixes: tuple[str, ...] = ()

    def contains(self, partition: str) -> bool:
        # Compare the stored form. Otherwise the letter e would be a prefix of a decomposed é.
        normal = nfc(partition)
        return normal in self.names or normal.startswith(self.prefixes)

    def select_covered(self, other: "_PartitionSet") -> "_PartitionSet":
        """Return the entries of the other set that this set covers completely."""
        prefixes = tuple(prefix for prefix in other.prefixes if prefix.startswith(self.prefixes))
        return _PartitionSet(frozenset(filter(self.contains, other.names)), prefixes)

    def intersect(self, other: "_PartitionSet") -> "_PartitionSet":
        """Return the partitions that are in both sets. If two prefixes overlap, one covers the other."""
        own_covered, other_covered = other.select_covered(self), self.select_covered(other)
        return _PartitionSet(
            own_covered.names | other_covered.names, tuple(sorted({*own_covered.prefixes, *other_covered.prefixes}))
        )

    def to_texts(self) -> list[str]:
        return sorted([*self.names, *(prefix + WILDCARD for prefix in self.prefixes)])


class Grants(Struct, frozen=True):
    """The partitions that an identity may read and may write; neither right includes the other.

    `parse_grants` and `decode_grants` create grants. Partitions are compared in NFC (EV-6).
    """

    readable: _PartitionSet = _PartitionSet()
    writable: _PartitionSet = _PartitionSet()
    auditable: _PartitionSet = _PartitionSet()
    """Streams whose administrative acts may be read (CO-43). Acts that concern the whole log need `*`."""

    def may_read(self, partition: str) -> bool:
        """Return whether the identity may read records of the partition."""
        return self.readable.contains(partition)

    def may_write(self, partition: str) -> bool:
        """Return whether the identity may write to the partition."""
        return self.writable.contains(partition)

    def may_audit(self, stream: str) -> bool:
        """Return whether the identity may read a stream's acts. An empty name stands for the whole log."""
        return self.auditable.contains(stream)

    def intersect(self, other: "Grants") -> "Grants":
        """Return the rights that both grants include."""
        return Grants(
            self.readable.intersect(other.readable),
            self.writable.intersect(other.writable),
            self.auditable.intersect(other.auditable),
        )

    def to_claim(self) -> dict[str, list[str]]:
        """Return `{"read": […], "write": […]}`, sorted and without duplicates, which `decode_grants` decodes.

        An empty `audit` is left out, because earlier versions refuse it.
        """
        audit = self.auditable.to_texts()
        return {
            "read": self.readable.to_texts(),
            "write": self.writable.to_texts(),
            **({"audit": audit} if audit else {}),
        }


def parse_grants(
    read: Sequence[str] = (), write: Sequence[str] = (), audit: Sequence[str] = (), path: str = "$"
) -> Grants:
    """Parse grants: `orders/1` is one partition, `orders/*` every name that begins with `orders/`, `*` every name.

    Raises CanonicalError with the path of a malformed entry.
    """
    return Grants(
        _parse_partitions(read, f"{path}.read"),
        _parse_partitions(write, f"{path}.write"),
        _parse_partitions(audit, f"{path}.audit"),
    )


def decode_grants(value: JsonValue, path: str = "$.grants") -> Grants:
    """Decode the grants of a token or a file: `{"read": […], "write": […], "audit": […]}`; a missing list is empty.

    Raises CanonicalError with the path of the fault. An unknown member is a fault too, because it may be misspelt.
    """
    members = check_object(value, path)
    if not members.keys() <= {"read", "write", "audit"}:
        raise CanonicalError(path, "must have only the members read, write and audit")
    for name, texts in members.items():
        if type(texts) is not list:
            raise CanonicalError(f"{path}.{name}", "must be an array")
    return parse_grants(members.get("read", ()), members.get("write", ()), members.get("audit", ()), path)


def _parse_partitions(texts: Sequence[str], path: str) -> _PartitionSet:
    if isinstance(texts, str):
        raise CanonicalError(path, "must be an array, not a string")
    names: set[str] = set()
    prefixes: set[str] = set()
    for index, text in enumerate(texts):
        normal = nfc(check_text(text, f"{path}[{index}]"))
        is_prefix = normal.endswith(WILDCARD)
        name = normal.removesuffix(WILDCARD) if is_prefix else normal
        has_wrong_gateway = name.startswith(f"{SCOPE_PREFIX}/") and CONTROL_CHARACTER.search(name) is not None
        raise_first(
            partial(CanonicalError, f"{path}[{index}]"),
            ("\0" in text, "must not contain U+0000"),
            (
                len(name) > PARTITION_CHARACTERS_MAX or not normal,
                f"must have 1 to {PARTITION_CHARACTERS_MAX} characters",
            ),
            (has_wrong_gateway, "names a gateway and must not contain control characters"),
        )
        (prefixes if is_prefix else names).add(name)
    if len(names) + len(prefixes) > GRANTS_MAX:
        raise CanonicalError(
            path, f"must have at most {GRANTS_MAX} different entries, not {len(names) + len(prefixes)}"
        )
    return _PartitionSet(frozenset(names), tuple(sorted(prefixes)))


def new_read_grants(names: Iterable[str]) -> Grants:
    """Return the right to read exactly these partitions. An asterisk in a name is an ordinary character."""
    return Grants(readable=_PartitionSet(frozenset(map(nfc, names))))


EVERYTHING: Final = parse_grants([WILDCARD], [WILDCARD], [WILDCARD])


PRINCIPAL_KINDS: Final = ("user", "client", "system")
"""Kinds of principals. An actor's name begins with its kind."""


class Principal(Struct, frozen=True, kw_only=True):
    """The actor of all records that a caller writes (CO-20), with the caller's grants. Contains no secret."""

    actor: str
    """`user:{sub}` for a token, `client:{id}` for an API key."""
    client_id: str | None
    """The only client id that the principal may use. If None, the principal may choose one."""
    grants: Grants
    expires_ms: int | None = None
    """Time at which the token (including the leeway) or the API key expires."""
    key_id: str | None = None
    """Id of the API key."""
    signing_key: bytes | None = None
    """Digest of the key that verified the signature of the token."""

    def has_expired(self, now_ms: int) -> bool:
        """Return whether the principal's connections must be closed (CO-23)."""
        return self.expires_ms is not None and now_ms >= self.expires_ms

    def get_event_client(self, requested: str | None) -> str | None:
        """Return the client id under which this principal's events are stored, or None if it may not use `requested`.

        A credential with a client id can use only that id. Other credentials choose names below their actor: `laptop`,
        requested by `user:ada`, is stored as `user:ada/laptop`, so that no choice can collide with a client of a
        different principal. A slash in the actor is escaped (`scope_of`), so the text before the first slash is always
        the actor.

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
                "client_id", f"must have at most {NAME_CHARACTERS_MAX} characters including the actor that precedes it"
            )
        return client_id


def to_actor(kind: str, name: object, path: str) -> str:
    """Return `{kind}:{name}`. Raises CanonicalError with the path if the name is malformed or too long for a store."""
    text = check_text(name, path)
    check_length(text, path, NAME_CHARACTERS_MAX - len(kind) - 1)
    return f"{kind}:{text}"


def find_principal_kind(client_id: str) -> str | None:
    """Return the kind of principal that a client id claims (`user` for `user:789`), or None for an ordinary id."""
    kind, colon, _ = client_id.partition(":")
    return kind if colon and kind in PRINCIPAL_KINDS else None


def parse_client_id(name: object, path: str) -> str:
    """Parse a client id, which may also be an actor. Raises CanonicalError with the path if it is malformed."""
    return to_actor("client", name, path).removeprefix("client:")


def parse_new_client_id(name: object, path: str) -> str:
    """Parse a client id that no other principal can write under. Raises CanonicalError with the path."""
    client_id = parse_client_id(name, path)
    kind = find_principal_kind(client_id)
    if kind is not None:
        raise CanonicalError(path, f"must not begin with `{kind}:`, which is reserved for other principals")
    return client_id
