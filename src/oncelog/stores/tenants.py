"""Tenants as a store keeps them: their quotas in one text beside the log's state, their usage in a table.

The text is in the row that every transaction reads anyway, so a log without quotas pays nothing for them. Whoever
commits or erases finds in it whom to count for, and no gateway can have another opinion of that.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

import msgspec

from oncelog.core.policy import AUDIT_POLICY
from oncelog.core.quotas import give_back, is_charged
from oncelog.core.tenants import Tenant, Tenants, Usage, check_own_ids_kept
from oncelog.core.values import Record

COUNT_ROWS: Final = 5000
"""Records that are looked at in one page when what a new tenant has is counted."""
COUNT_TRIES: Final = 3
"""How often it is counted beside those who write; if something was erased every time, then while nobody can write."""

SizeRow = tuple[int, bool | int, str, str, int | None]
"""Of a record: place or position, whether its scope is a stream whose tenants it counts for (`counts_for_stream`),
scope, partitions in JSON, bytes of its body (None once erased)."""

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


def counts_for_stream(record: Record) -> bool:
    """Return whether a record counts for the tenants of the stream that its scope names."""
    return record.sequence > 0 or (record.policy == AUDIT_POLICY and is_charged(record.actor))


class Seen(NamedTuple):
    """How a log stood when somebody began to count."""

    text: str | None
    erasures: int
    positions: dict[int, int]
    """The newest of each lane that has been written to."""


class Count:
    """What tenants have that a log has not counted for until now, from all its records.

    Raises SettingsError if a tenant would lose its own ids.
    """

    def __init__(self, before: str | None, tenants: Sequence[Tenant]) -> None:
        check_own_ids_kept(list_of(before), tenants)
        known = {tenant.prefix for tenant in list_of(before)}
        self._new = Tenants([tenant for tenant in tenants if tenant.prefix not in known])
        self.usage = dict.fromkeys(self._new.by_prefix, Usage())
        self.gone = known - {tenant.prefix for tenant in tenants}
        """Those whose usage is to be forgotten."""

    def begin_again(self) -> None:
        """What has been counted is of no use."""
        self.usage = dict.fromkeys(self.usage, Usage())

    @property
    def is_needed(self) -> bool:
        """Whether there is anybody to count for."""
        return bool(self.usage)

    def add(self, rows: Iterable[SizeRow]) -> None:
        """Counts records, each once."""
        usage = self.usage
        for _, is_of_stream, scope, partitions, size in rows:
            for tenant in self._new.of(scope if is_of_stream else "", names_in(partitions)):
                before = usage[tenant.prefix]
                usage[tenant.prefix] = Usage(before.bytes + (size or 0), before.records + 1)


def given_back(usage: Mapping[str, Usage], tenants: Tenants, erased: Iterable[SizeRow]) -> dict[str, Usage]:
    """The usage that changes when those bodies go."""
    bodies = (
        (scope if is_of_stream else "", names_in(partitions), size or 0)
        for _, is_of_stream, scope, partitions, size in erased
    )
    return give_back(usage, tenants, bodies)


def touched_by(tenants: Tenants, erased: Iterable[SizeRow]) -> set[str]:
    """Whose usage that is."""
    return {
        tenant.prefix
        for _, is_of_stream, scope, partitions, _ in erased
        for tenant in tenants.of(scope if is_of_stream else "", names_in(partitions))
    }
