"""Effects of a write on entities, relationships and rows. They are computed first, and applied once all checks pass."""

from msgspec import Struct, field

from oncelog.core.batch_state import BatchState
from oncelog.core.deltas import encode_delta
from oncelog.core.limits import ROW_BYTES_MAX, ROW_COLUMNS_MAX
from oncelog.core.merge import Row, RowDelta, merge
from oncelog.core.operations import Condition, DeleteEntity, Entity, Must, Relate, SetEntity, Unrelate
from oncelog.core.rules.compaction import build_row_without_state, find_winning_horizon_delete
from oncelog.core.stored_bytes import entity_bytes, relationship_bytes, row_bytes
from oncelog.core.values import EntityIdentity, Reason, Refused, RelationshipIdentity, RowIdentity, Submission


class Effects(Struct, gc=False):
    """Computed effects of a write."""

    entities: dict[EntityIdentity, Entity | None] = field(default_factory=dict)
    relationships: dict[RelationshipIdentity, int | None] = field(default_factory=dict)
    rows: dict[RowIdentity, Row] = field(default_factory=dict)
    body: bytes | None = None
    """Body of the record if the delta lost to a tombstone horizon. None means the body of the submission."""

    def compute_growth(self, state: BatchState) -> int:
        """Return how many bytes the effects add to the stream's side state. Negative if they free bytes.

        Replacing an entity that has an expiry time frees nothing. Stores delete expired entities at different times,
        and a decision must not depend on that.
        """
        return (
            sum(
                entity_bytes(identity, entity) - entity_bytes(identity, _exclude_expiring(state.entities.get(identity)))
                for identity, entity in self.entities.items()
            )
            + sum(
                relationship_bytes(identity, version) - relationship_bytes(identity, state.relationships.get(identity))
                for identity, version in self.relationships.items()
            )
            + sum(
                row_bytes(identity, row) - row_bytes(identity, state.rows.get(identity))
                for identity, row in self.rows.items()
            )
        )

    def apply(self, state: BatchState) -> None:
        """Write the effects to the batch state."""
        for entity, value in self.entities.items():
            state.entities.put(entity, value)
        for relationship, version in self.relationships.items():
            state.relationships.put(relationship, version)
        for row, merged in self.rows.items():
            state.rows.put(row, merged)


def _exclude_expiring(entity: Entity | None) -> Entity | None:
    return entity if entity is None or entity.expires_at_ms is None else None


def compute_effects(submission: Submission, version: int, log_time_ms: int, state: BatchState) -> Effects | Refused:
    """Return the effects of a write, or the refusal. Its policy must have entities or rows."""
    if submission.delta is not None:
        return _merge_delta(submission.scope, submission.delta, state)
    return _apply_operations(submission, version, log_time_ms, state)


def _merge_delta(scope: str, delta: RowDelta, state: BatchState) -> Effects | Refused:
    identity = (scope, delta.table, delta.row_id)
    before = state.rows.get(identity)
    if before is None:
        before = build_row_without_state(state.horizons.get(scope), delta.table, delta.row_id)
    deleted = find_winning_horizon_delete(before, delta)
    after = merge(before, delta)
    if len(after.columns) > ROW_COLUMNS_MAX:
        # A merge copies all columns of the row, so a row with unlimited columns would slow down its lane.
        return Refused(
            Reason.TOO_MANY_COLUMNS, f"the row would have more than {ROW_COLUMNS_MAX} columns", field="columns"
        )
    if after is not before and sum([len(value) for value, _ in after.columns.values()]) > ROW_BYTES_MAX:
        message = f"the row's values would have more than {ROW_BYTES_MAX} bytes"
        return Refused(Reason.ROW_TOO_LARGE, message, field="columns")
    body = None if deleted is None else encode_delta(deleted)
    return Effects(rows={} if after is before else {identity: after}, body=body)


def _apply_operations(submission: Submission, version: int, log_time_ms: int, state: BatchState) -> Effects | Refused:
    """Return the effects of the operations, or the refusal of the first one that fails. Each operation sees the effects
    of the previous ones."""
    effects = Effects()
    for index, operation in enumerate(submission.operations):
        match operation:
            case SetEntity():
                identity = (submission.scope, operation.key)
                if operation.condition is not None:
                    current = _find_live_entity(effects, identity, log_time_ms, state)
                    if (refused := _check_condition(operation.key, operation.condition, current, index)) is not None:
                        return refused
                effects.entities[identity] = Entity(operation.value, version, operation.expires_at_ms)
            case DeleteEntity(key):
                effects.entities[(submission.scope, key)] = None
            case Relate(resource, relation, subject):
                relationship = (submission.scope, resource, relation, subject)
                known = effects.relationships.get(relationship, state.relationships.get(relationship))
                effects.relationships[relationship] = version if known is None else known
            case Unrelate(resource, relation, subject):
                effects.relationships[submission.scope, resource, relation, subject] = None
    return effects


def _find_live_entity(effects: Effects, identity: EntityIdentity, log_time_ms: int, state: BatchState) -> Entity | None:
    changed = identity in effects.entities
    entity = effects.entities[identity] if changed else state.entities.get(identity)
    return entity if entity is not None and entity.is_live(log_time_ms) else None


def _check_condition(key: str, condition: Condition, current: Entity | None, index: int) -> Refused | None:
    failure: tuple[Reason, str] | None = None
    match condition.must:
        case Must.NOT_EXIST:
            if current is not None:
                failure = (Reason.KEY_EXISTS, "already exists")
        case _ if current is None:
            failure = (Reason.KEY_NOT_FOUND, "does not exist")
        case Must.HAVE_VERSION:
            if current.version != condition.version:
                failure = (
                    Reason.VERSION_MISMATCH,
                    f"has version {current.version}, not {condition.version}",
                )
        case Must.HAVE_VALUE:
            if current.erased:
                failure = (Reason.VALUE_MISMATCH, "has no value to compare: it has been erased")
            elif current.value != condition.value:
                failure = (Reason.VALUE_MISMATCH, "does not have the value that the condition requires")
    if failure is None:
        return None
    reason, message = failure
    return Refused(
        reason,
        f"entity {key!r} {message}",
        field=key,
        current=current.version if current else 0,
        value=current.value if current else None,
        index=index,
    )
