"""Values that a ledger set: they are erased with the record that set them, in the same transaction."""

from collections.abc import Iterable
from typing import NamedTuple

from oncelog.core.policy import LEDGER
from oncelog.core.replay import keys_set_by
from oncelog.core.values import Record
from oncelog.stores.tenants import ErasedRow


class Content(NamedTuple):
    """What determines the values that a record set."""

    sequence: int
    scope: str
    fingerprint: bytes
    body: bytes


class ErasedValues(NamedTuple):
    """Entities whose values are erased: those of a scope with one of the versions."""

    scope: str
    versions: list[int]
    keys: list[str] | None
    """None if the bodies do not say which: then all entities of the scope are searched."""


def row_of_values(scope: str, size: int) -> ErasedRow:
    """Return what the tenants of a scope get back when values of its entities are erased."""
    return (0, True, scope, "[]", size)


def values_of(contents: Iterable[Content]) -> list[ErasedValues]:
    """Return the entities that lose their values when records are erased."""
    named, others = [], dict[str, list[int]]()
    for one in contents:
        if not one.sequence:
            continue
        keys = _keys_of(one)
        if keys is None:
            others.setdefault(one.scope, []).append(one.sequence)
        elif keys:
            named.append(ErasedValues(one.scope, [one.sequence], keys))
    return named + [ErasedValues(scope, versions, None) for scope, versions in others.items()]


def _keys_of(content: Content) -> list[str] | None:
    """Return the keys that a record set; None if its body is not that of a ledger transaction."""
    record = Record(
        lane=0,
        position=0,
        sequence=content.sequence,
        log_time_ms=0,
        height=0,
        policy=LEDGER.name,
        scope=content.scope,
        key=b"",
        fingerprint=content.fingerprint,
        actor="",
        client="",
        client_sequence=0,
        partitions=(),
        body=content.body,
    )
    return keys_set_by(record, LEDGER)
