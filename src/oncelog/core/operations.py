"""Operations on the entities and relationships of a scope, and their conditions.

Operations without a condition also define their JSON form. The JSON form of `SetEntity` is
`transactions.SetEntityJson`.
"""

from enum import Enum

from msgspec import Struct


class Must(Enum):
    """What a condition requires of the entity before the operation sets it."""

    NOT_EXIST = "not_exist"
    EXIST = "exist"
    HAVE_VERSION = "have_version"
    HAVE_VALUE = "have_value"


class Condition(Struct, frozen=True):
    """Condition on an entity, with the expected version or value."""

    must: Must
    version: int = 0
    value: bytes = b""


class SetEntity(Struct, frozen=True):
    """Sets an entity. The entity expires at `expires_at_ms` (log time)."""

    key: str
    value: bytes
    expires_at_ms: int | None = None
    condition: Condition | None = None


class DeleteEntity(Struct, frozen=True, forbid_unknown_fields=True):
    """Deletes an entity if it exists."""

    key: str


class _RelationshipOperation(Struct, frozen=True, forbid_unknown_fields=True):
    """Fields of the operations on a relationship."""

    resource: str
    relation: str
    subject: str


class Relate(_RelationshipOperation, frozen=True):
    """Creates a relationship if it does not exist."""


class Unrelate(_RelationshipOperation, frozen=True):
    """Deletes a relationship if it exists."""


Operation = SetEntity | DeleteEntity | Relate | Unrelate


class Entity(Struct, frozen=True):
    """Current state of an entity. Its version is the stream sequence of its latest change."""

    value: bytes
    version: int
    expires_at_ms: int | None = None
    erased: bool = False
    """Whether the value was erased with the record that set it. The entity still exists, with its version and an empty
    value."""

    def is_live(self, log_time_ms: int) -> bool:
        """Return whether the entity has not expired."""
        return self.expires_at_ms is None or log_time_ms < self.expires_at_ms
