"""Rules of the `plan` model (`plan_model`) that need no history."""

from collections.abc import Iterable, Sequence
from typing import TypeVar

from oncelog.core.merge import Op, RowDelta
from oncelog.core.operations import Condition, DeleteEntity, Entity, Must, Operation, SetEntity
from oncelog.core.policy import Policy
from oncelog.core.values import (
    Claim,
    KeyIdentity,
    Reason,
    Release,
    Renew,
    Submission,
)

Leased = Claim | Renew | Release
T = TypeVar("T")


def newest(found: Iterable[T]) -> T | None:
    everything = list(found)
    return everything[-1] if everything else None


def identity_of(item: Submission | Leased) -> KeyIdentity:
    client = item.client if isinstance(item, Submission) and item.policy.client_sequence else ""
    return (item.policy.name, item.scope, client, item.key)


def rank(delta: RowDelta) -> tuple[int, list[int], bytes]:
    """DE-7: rank by HLC, then by client in UTF-16 order, then by id."""
    utf16 = delta.client_id.encode("utf-16-be")
    return (delta.hlc, [utf16[i] * 256 + utf16[i + 1] for i in range(0, len(utf16), 2)], delta.delta_id)


def row_of(deltas: Sequence[RowDelta]) -> dict[str, bytes] | None:
    """DE-7: apply deltas to an empty row in order of rank. Return None if the row does not exist."""
    row: dict[str, bytes] | None = None
    for delta in sorted(deltas, key=rank):
        row = None if delta.op is Op.DELETE else {**(row or {}), **dict(delta.columns)}
    return row


def key_is_malformed(policy: Policy, key: bytes) -> bool:
    if not key:
        return not policy.client_sequence
    shortest, longest = policy.key_bytes
    return not shortest <= len(key) <= longest or (not policy.zero_key and key == bytes(len(key)))


def entity_of(operations: Sequence[tuple[int, Operation]], key: str, log_time_ms: int) -> Entity | None:
    """Return the entity after all operations of its scope, or None if it is absent or expired."""
    about = [it for it in operations if isinstance(it[1], SetEntity | DeleteEntity) and it[1].key == key]
    if not about or isinstance(about[-1][1], DeleteEntity):
        return None
    version, operation = about[-1]
    assert isinstance(operation, SetEntity)
    if operation.expires_at_ms is not None and operation.expires_at_ms <= log_time_ms:
        return None
    return Entity(operation.value, version, operation.expires_at_ms)


def failure_of(condition: Condition, entity: Entity | None) -> Reason | None:
    """Return why the condition fails, or None if it holds."""
    if condition.must is Must.NOT_EXIST:
        return Reason.KEY_EXISTS if entity else None
    if entity is None:
        return Reason.KEY_NOT_FOUND
    if condition.must is Must.HAVE_VERSION and entity.version != condition.version:
        return Reason.VERSION_MISMATCH
    if condition.must is Must.HAVE_VALUE and entity.value != condition.value:
        return Reason.VALUE_MISMATCH
    return None
