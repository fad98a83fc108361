"""The operations of a transaction: worked out one after the other, applied all or not at all."""

from msgspec import Struct, field

from oncelog.core.desk import Desk
from oncelog.core.operations import DeleteEntity, Entity, Must, Relate, SetEntity
from oncelog.core.values import EntityIdentity, Reason, Refused, RelationshipIdentity, Submission


class Effects(Struct):
    """What a transaction's operations come to, not yet applied."""

    entities: dict[EntityIdentity, Entity | None] = field(default_factory=dict)
    relationships: dict[RelationshipIdentity, int | None] = field(default_factory=dict)

    def apply(self, desk: Desk) -> None:
        """Lays them over what was there."""
        for entity, value in self.entities.items():
            desk.entities.put(entity, value)
        for relationship, version in self.relationships.items():
            desk.relationships.put(relationship, version)


def effects_of(submission: Submission, version: int, log_time_ms: int, desk: Desk) -> Effects | Refused:
    """What the operations come to, each seeing what the ones before it did, or the first that fails."""
    effects = Effects()
    for index, operation in enumerate(submission.operations):
        match operation:
            case SetEntity():
                identity = (submission.scope, operation.key)
                if operation.condition is not None:
                    current = _live(effects, identity, log_time_ms, desk)
                    refused = _unmet(operation, current, index)
                    if refused is not None:
                        return refused
                effects.entities[identity] = Entity(operation.value, version, operation.expires_at_ms)
            case DeleteEntity(key):
                effects.entities[(submission.scope, key)] = None
            case Relate(resource, relation, subject):
                relationship = (submission.scope, resource, relation, subject)
                known = effects.relationships.get(relationship, desk.relationships.get(relationship))
                effects.relationships[relationship] = version if known is None else known
            case _:
                relationship = (submission.scope, operation.resource, operation.relation, operation.subject)
                effects.relationships[relationship] = None
    return effects


def _live(effects: Effects, identity: EntityIdentity, log_time_ms: int, desk: Desk) -> Entity | None:
    changed = identity in effects.entities
    entity = effects.entities[identity] if changed else desk.entities.get(identity)
    return entity if entity is not None and entity.is_live(log_time_ms) else None


def _unmet(operation: SetEntity, current: Entity | None, index: int) -> Refused | None:
    condition = operation.condition
    assert condition is not None  # noqa: S101 - the caller looked
    failure: tuple[Reason, str] | None = None
    match condition.must:
        case Must.NOT_EXIST:
            if current is not None:
                failure = (Reason.KEY_EXISTS, "exists already")
        case _ if current is None:
            failure = (Reason.KEY_NOT_FOUND, "does not exist")
        case Must.HAVE_VERSION:
            if current.version != condition.version:
                failure = (
                    Reason.VERSION_MISMATCH,
                    f"has version {current.version}, not {condition.version}",
                )
        case Must.HAVE_VALUE:
            if current.value != condition.value:
                failure = (Reason.VALUE_MISMATCH, "has another value than the condition names")
    if failure is None:
        return None
    reason, message = failure
    return Refused(
        reason,
        f"entity {operation.key!r} {message}",
        field=operation.key,
        current=current.version if current else 0,
        value=current.value if current else None,
        index=index,
    )
