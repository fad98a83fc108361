"""Tenants as a store keeps them: their quotas in one text beside the log's state, their usage in a table.

The text is in the row that every transaction reads anyway, so a log without quotas pays nothing for them. Whoever
commits or erases finds in it whom to count for, and no gateway can have another opinion of that.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

import msgspec

from oncelog.core.policy import AUDIT_POLICY
from oncelog.core.rules.quotas import is_charged, reclaim_erased_bytes
from oncelog.core.stored_bytes import members_bytes, record_bytes, state_bytes
from oncelog.core.tenants import Tenant, Tenants, Usage, check_own_ids_kept

COUNT_PAGE_ROWS: Final = 5000
"""Records that are looked at in one page when what a new tenant has is counted."""
COUNT_ATTEMPTS_MAX: Final = 3
"""How often it is counted beside those who write; if something was erased every time, then while nobody can write."""

USAGE_VERSION: Final = 2
"""How usage is counted (`core.stored_bytes`). Version 1 counted bodies only; a log of that version is counted again."""

SizeRow = tuple[int, bool | int, str, str, int | None, int]
"""Of a record: place or position, whether its scope is a stream whose tenants it counts for (`is_counted_for_stream`),
scope, partitions in JSON, bytes of body (None once erased) and names."""
ErasedRow = tuple[int, bool | int, str, str, int | None]
"""Of an erased record: the same without names, which stay."""
StateRow = tuple[str, int, int, int]
"""Of the entities, relationships or rows of a scope: scope, count, bytes of other names, bytes of values."""
MemberRow = tuple[str, int, int]
"""Of the members of a stream, past ones too: scope, count, bytes of their names."""

_TENANTS_DECODER: Final = msgspec.json.Decoder(list[Tenant])
decode_partitions: Final = lru_cache(maxsize=1024)(msgspec.json.Decoder(tuple[str, ...]).decode)
"""Decodes the partitions of a record from their JSON array."""


def encode_tenants(tenants: Sequence[Tenant]) -> str | None:
    """What is kept of them; None of none."""
    return msgspec.json.encode(sorted(tenants, key=lambda one: one.prefix)).decode() if tenants else None


@lru_cache(maxsize=8)
def decode_tenants(text: str | None) -> Tenants | None:
    """And back. The same for the same text, so that what it has found out about names stays."""
    return None if text is None else Tenants(_TENANTS_DECODER.decode(text))


def list_tenants(text: str | None) -> list[Tenant]:
    """By prefix."""
    found = decode_tenants(text)
    return [] if found is None else list(found.by_prefix.values())


def is_counted_for_stream(sequence: int, policy: str, actor: str) -> bool:
    """Return whether a record counts for the tenants of the stream that its scope names."""
    return sequence > 0 or (policy == AUDIT_POLICY and is_charged(actor))


def decode_size_row(row: Sequence[Any]) -> SizeRow:
    """Return the size of a record from its columns: place, sequence, policy, actor, scope, partitions, bytes, names."""
    place, sequence, policy, actor, scope, partitions, size, names = row
    return (place, is_counted_for_stream(sequence, policy, actor), scope, partitions, size, names)


def build_erased_row(scope: str, size: int) -> ErasedRow:
    """Return what the tenants of a scope get back when values of its entities are erased."""
    return (0, True, scope, "[]", size)


class CountStart(NamedTuple):
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


class UsageCount:
    """What tenants have that a log has not counted for until now, from all its records and side state.

    Records can be counted while others write. Side state changes, so it is counted in the transaction that saves it.

    Raises SettingsError if a tenant would lose its own ids.
    """

    def __init__(self, start: CountStart, tenants: Sequence[Tenant]) -> None:
        check_own_ids_kept(list_tenants(start.text), tenants)
        known = {tenant.prefix for tenant in list_tenants(start.text)}
        counted = known if start.version == USAGE_VERSION else set()
        self._uncounted = Tenants([tenant for tenant in tenants if tenant.prefix not in counted])
        self.usage = dict.fromkeys(self._uncounted.by_prefix, Usage())
        self.removed_prefixes = known - (counted & {tenant.prefix for tenant in tenants})
        """Tenants whose stored usage is deleted: removed tenants, and tenants that are counted again."""

    def reset(self) -> None:
        """What has been counted is of no use."""
        self.usage = dict.fromkeys(self.usage, Usage())

    @property
    def is_needed(self) -> bool:
        """Whether there is anybody to count for."""
        return bool(self.usage)

    def add(self, rows: Iterable[SizeRow]) -> None:
        """Counts records, each once."""
        for _, is_of_stream, scope, partitions, size, names in rows:
            found = decode_partitions(partitions)
            tenants = self._uncounted.list_for(scope if is_of_stream else "", found)
            self._add(tenants, record_bytes(names, found, size or 0) if tenants else 0, 1)

    def add_state(self, rows: Iterable[StateRow]) -> None:
        """Count entities, relationships and rows."""
        for scope, count, names, values in rows:
            self._add(self._uncounted.list_for(scope, ()), state_bytes(scope, count, names, values), 0)

    def add_members(self, rows: Iterable[MemberRow]) -> None:
        """Count members; each counts as a record."""
        for scope, count, names in rows:
            self._add(self._uncounted.list_for(scope, ()), members_bytes(scope, count, names), count)

    def _add(self, tenants: Iterable[Tenant], size: int, records: int) -> None:
        for tenant in tenants:
            before = self.usage[tenant.prefix]
            self.usage[tenant.prefix] = Usage(before.bytes + size, before.records + records)


def compute_usage_after(usage: Mapping[str, Usage], tenants: Tenants, erased: Iterable[ErasedRow]) -> dict[str, Usage]:
    """The usage that changes when those bodies go."""
    bodies = (
        (scope if is_of_stream else "", decode_partitions(partitions), size or 0)
        for _, is_of_stream, scope, partitions, size in erased
    )
    return reclaim_erased_bytes(usage, tenants, bodies)


def find_affected_tenants(tenants: Tenants, erased: Iterable[ErasedRow]) -> set[str]:
    """Whose usage that is."""
    return {
        tenant.prefix
        for _, is_of_stream, scope, partitions, _ in erased
        for tenant in tenants.list_for(scope if is_of_stream else "", decode_partitions(partitions))
    }
