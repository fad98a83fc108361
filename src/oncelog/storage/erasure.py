"""Values that a ledger set: they are erased with the record that set them, in the same transaction."""

from collections.abc import Iterable
from typing import NamedTuple

from oncelog.core.policy import LEDGER
from oncelog.core.replay import list_set_keys
from oncelog.core.values import Record
from oncelog.storage.tenants import ErasedRow


class RecordContent(NamedTuple):
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


def build_erased_row(scope: str, size: int) -> ErasedRow:
    """Return what the tenants of a scope get back when values of its entities are erased."""
    return (0, True, scope, "[]", size)


def find_erased_values(contents: Iterable[RecordContent]) -> list[ErasedValues]:
    """Return the entities that lose their values when records are erased."""
    named, others = [], dict[str, list[int]]()
    for content in contents:
        if not content.sequence:
            continue
        keys = _find_entity_keys(content)
        if keys is None:
            others.setdefault(content.scope, []).append(content.sequence)
        elif keys:
            named.append(ErasedValues(content.scope, [content.sequence], keys))
    return named + [ErasedValues(scope, versions, None) for scope, versions in others.items()]


def _find_entity_keys(content: RecordContent) -> list[str] | None:
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
    return list_set_keys(record, LEDGER)
