"""Tenants as a store keeps them: their quotas in one text beside the log's state, their usage in a table.

The text is in the row that every transaction reads anyway, so a log without quotas pays nothing for them. Whoever
commits or erases finds in it whom to count for, and no gateway can have another opinion of that.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

import msgspec

from oncelog.core.policy import AUDIT_POLICY
from oncelog.core.quotas import give_back, is_charged
from oncelog.core.stored_bytes import members_bytes, record_bytes, state_bytes
from oncelog.core.tenants import Tenant, Tenants, Usage, check_own_ids_kept

COUNT_ROWS: Final = 5000
"""Records that are looked at in one page when what a new tenant has is counted."""
COUNT_TRIES: Final = 3
"""How often it is counted beside those who write; if something was erased every time, then while nobody can write."""

USAGE_VERSION: Final = 2
"""How usage is counted (`core.stored_bytes`). Version 1 counted bodies only; a log of that version is counted again."""

SizeRow = tuple[int, bool | int, str, str, int | None, int]
"""Of a record: place or position, whether its scope is a stream whose tenants it counts for (`counts_for_stream`),
scope, partitions in JSON, bytes of body (None once erased) and names."""
ErasedRow = tuple[int, bool | int, str, str, int | None]
"""Of an erased record: the same without names, which stay."""
StateRow = tuple[str, int, int, int]
"""Of the entities, relationships or rows of a scope: scope, count, bytes of other names, bytes of values."""
MemberRow = tuple[str, int, int]
"""Of the members of a stream, past ones too: scope, count, bytes of their names."""

_TENANTS: Final = msgspec.json.Decoder(list[Tenant])
_NAMES: Final = msgspec.json.Decoder(tuple[str, ...])


def text_of(tenants: Sequence[Tenant]) -> str | None:
    """What is kept of them; None of none."""
    return msgspec.json.encode(sorted(tenants, key=lambda one: one.prefix)).decode() if tenants else None


@lru_cache(maxsize=8)
def tenants_of(text: str | None) -> Tenants | None:
    """And back. The same for the same text, so that what it has found out about names stays."""
    return None if text is None else Tenants(_TENANTS.decode(text))


def list_of(text: str | None) -> list[Tenant]:
    """By prefix."""
    found = tenants_of(text)
    return [] if found is None else list(found.by_prefix.values())


@lru_cache(maxsize=1024)
def names_in(partitions_text: str) -> tuple[str, ...]:
    """Partitions out of their JSON array."""
    return _NAMES.decode(partitions_text)


def counts_for_stream(sequence: int, policy: str, actor: str) -> bool:
    """Return whether a record counts for the tenants of the stream that its scope names."""
    return sequence > 0 or (policy == AUDIT_POLICY and is_charged(actor))


def size_row(row: Sequence[Any]) -> SizeRow:
    """Return the size of a record from its columns: place, sequence, policy, actor, scope, partitions, bytes, names."""
    place, sequence, policy, actor, scope, partitions, size, names = row
    return (place, counts_for_stream(sequence, policy, actor), scope, partitions, size, names)


class Seen(NamedTuple):
    """How a log stood when somebody began to count."""

    text: str | None
    erasures: int
    positions: dict[int, int]
    """The newest of each lane that has been written to."""
    version: int = USAGE_VERSION
    """How the usage in the log was counted."""

    def is_counted(self, text: str | None) -> bool:
        """Return whether the log has these quotas, with usage of the current version."""
        return self.text == text and (text is None or self.version == USAGE_VERSION)


class Count:
    """What tenants have that a log has not counted for until now, from all its records and side state.

    Records can be counted while others write. Side state changes, so it is counted in the transaction that saves it.

    Raises SettingsError if a tenant would lose its own ids.
    """

    def __init__(self, begun: Seen, tenants: Sequence[Tenant]) -> None:
        check_own_ids_kept(list_of(begun.text), tenants)
        known = {tenant.prefix for tenant in list_of(begun.text)}
        counted = known if begun.version == USAGE_VERSION else set()
        self._new = Tenants([tenant for tenant in tenants if tenant.prefix not in counted])
        self.usage = dict.fromkeys(self._new.by_prefix, Usage())
        self.gone = known - (counted & {tenant.prefix for tenant in tenants})
        """Tenants whose stored usage is deleted: removed tenants, and tenants that are counted again."""

    def begin_again(self) -> None:
        """What has been counted is of no use."""
        self.usage = dict.fromkeys(self.usage, Usage())

    @property
    def is_needed(self) -> bool:
        """Whether there is anybody to count for."""
        return bool(self.usage)

    def add(self, rows: Iterable[SizeRow]) -> None:
        """Counts records, each once."""
        for _, is_of_stream, scope, partitions, size, names in rows:
            found = names_in(partitions)
            tenants = self._new.of(scope if is_of_stream else "", found)
            self._add(tenants, record_bytes(names, found, size or 0) if tenants else 0, 1)

    def add_state(self, rows: Iterable[StateRow]) -> None:
        """Count entities, relationships and rows."""
        for scope, count, names, values in rows:
            self._add(self._new.of(scope, ()), state_bytes(scope, count, names, values), 0)

    def add_members(self, rows: Iterable[MemberRow]) -> None:
        """Count members; each counts as a record."""
        for scope, count, names in rows:
            self._add(self._new.of(scope, ()), members_bytes(scope, count, names), count)

    def _add(self, tenants: Iterable[Tenant], size: int, records: int) -> None:
        for tenant in tenants:
            before = self.usage[tenant.prefix]
            self.usage[tenant.prefix] = Usage(before.bytes + size, before.records + records)


def given_back(usage: Mapping[str, Usage], tenants: Tenants, erased: Iterable[ErasedRow]) -> dict[str, Usage]:
    """The usage that changes when those bodies go."""
    bodies = (
        (scope if is_of_stream else "", names_in(partitions), size or 0)
        for _, is_of_stream, scope, partitions, size in erased
    )
    return give_back(usage, tenants, bodies)


def touched_by(tenants: Tenants, erased: Iterable[ErasedRow]) -> set[str]:
    """Whose usage that is."""
    return {
        tenant.prefix
        for _, is_of_stream, scope, partitions, _ in erased
        for tenant in tenants.of(scope if is_of_stream else "", names_in(partitions))
    }
