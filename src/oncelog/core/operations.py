"""Operations on the entities and relationships of a scope, and the conditions they may carry.

Operations without a condition have the same members in JSON (`transactions.OperationJson`).
"""

from enum import Enum

from msgspec import Struct


class Must(Enum):
    """What a condition demands of the entity before it is set."""

    NOT_EXIST = "not_exist"
    EXIST = "exist"
    HAVE_VERSION = "have_version"
    HAVE_VALUE = "have_value"


class Condition(Struct, frozen=True):
    """A demand on an entity, with the version or value that it names."""

    must: Must
    version: int = 0
    value: bytes = b""


class SetEntity(Struct, frozen=True):
    """Sets an entity. From `expires_at_ms` (log time) on it counts as absent."""

    key: str
    value: bytes
    expires_at_ms: int | None = None
    condition: Condition | None = None


class DeleteEntity(Struct, frozen=True, forbid_unknown_fields=True):
    """Deletes an entity, if it exists."""

    key: str


class _RelationshipOperation(Struct, frozen=True, forbid_unknown_fields=True):
    """Fields of the operations on a relationship."""

    resource: str
    relation: str
    subject: str


class Relate(_RelationshipOperation, frozen=True):
    """Creates a relationship, unless it exists."""


class Unrelate(_RelationshipOperation, frozen=True):
    """Deletes a relationship, if it exists."""


Operation = SetEntity | DeleteEntity | Relate | Unrelate


class Entity(Struct, frozen=True):
    """An entity as it stands. Its version is the stream sequence of its last change."""

    value: bytes
    version: int
    expires_at_ms: int | None = None
    erased: bool = False
    """The value was erased with the record that set it, and is empty here. The entity exists, with its version."""

    def is_live(self, log_time_ms: int) -> bool:
        """False once it has expired."""
        return self.expires_at_ms is None or log_time_ms < self.expires_at_ms
