"""Tenants in a store: their quotas are stored as one string in the log's state, their usage in a table.

Every transaction reads the row that contains the string anyway, so a log without quotas does no extra work. Every
commit and every erasure counts usage by the quotas that it finds there, so all servers apply the same quotas.
"""

from collections.abc import Iterable, Sequence
from copy import copy
from functools import lru_cache
from typing import Final, NamedTuple

import msgspec
import orjson

from oncelog.core.policy import AUDIT_POLICY
from oncelog.core.rules.quotas import is_charged
from oncelog.core.stored_bytes import members_bytes, record_bytes, state_bytes
from oncelog.core.tenants import Tenant, Tenants, Usage, check_own_ids_kept
from oncelog.core.values import Record

COUNT_PAGE_ROWS: Final = 5000
"""Records per page while the usage of a new tenant is counted."""
COUNT_ATTEMPTS_MAX: Final = 3
"""Maximum number of attempts to count usage while commits continue. An erasure invalidates an attempt. The last attempt
then counts all records again while it blocks writes."""

USAGE_VERSION: Final = 2
"""Version of the counting rules (`core.stored_bytes`). Version 1 counted only bodies. Usage that was counted by
an older version is counted again."""

SizeRow = tuple[int, int, str, str, str, str, int | None, int]
"""Sizes of a record: position, sequence, policy, actor, scope, partitions as JSON, bytes of the body (None if erased),
bytes of the names."""
ErasedBytes = tuple[str, tuple[str, ...], int]
"""Bytes returned to tenants after an erasure: stream (`get_counted_stream`), partitions, bytes."""
StateRow = tuple[str, int, int, int]
"""Sizes of the entities, relationships or rows of a scope: scope, count, bytes of other names, bytes of values."""
MemberRow = tuple[str, int, int]
"""Sizes of the members of a stream, including past members: scope, count, bytes of their names."""

_TENANTS_DECODER: Final = msgspec.json.Decoder(list[Tenant])
decode_partitions: Final = lru_cache(maxsize=1024)(msgspec.json.Decoder(tuple[str, ...]).decode)
"""Decodes the partitions of a record from their JSON array."""


@lru_cache(maxsize=1024)
def encode_partitions(partitions: tuple[str, ...]) -> str:
    """Encode partitions as a JSON array."""
    return orjson.dumps(partitions).decode()


def encode_tenants(tenants: Sequence[Tenant]) -> str | None:
    """Encode quotas as the string in the log's state. Returns None if `tenants` is empty."""
    return msgspec.json.encode(sorted(tenants, key=lambda one: one.prefix)).decode() if tenants else None


@lru_cache(maxsize=8)
def decode_tenants(text: str | None) -> Tenants | None:
    """Decode quotas. Equal strings share one object, which caches the tenants that names belong to."""
    return None if text is None else Tenants(_TENANTS_DECODER.decode(text))


def list_tenants(text: str | None) -> list[Tenant]:
    """Return the tenants in encoded quotas, ordered by prefix."""
    found = decode_tenants(text)
    return [] if found is None else list(found.by_prefix.values())


def get_counted_stream(sequence: int, policy: str, actor: str, scope: str) -> str:
    """Return the scope of a record if the record is charged to the tenants of that stream, otherwise ""."""
    return scope if sequence > 0 or (policy == AUDIT_POLICY and is_charged(actor)) else ""


def measure_body(record: Record) -> ErasedBytes:
    """Return the size of a record's body, with the stream and the partitions that determine its tenants."""
    stream = get_counted_stream(record.sequence, record.policy, record.actor, record.scope)
    return (stream, record.partitions, len(record.body))


class CountStart(NamedTuple):
    """State of the log when a count of usage begins."""

    text: str | None
    erasures: int
    positions: dict[int, int]
    """Newest position in each lane that has records."""
    version: int = USAGE_VERSION
    """Counting rules of the stored usage."""

    def is_counted(self, text: str | None) -> bool:
        """Return whether the log has these quotas, with usage counted by the current rules."""
        return self.text == text and (text is None or self.version == USAGE_VERSION)


class UsageCount:
    """Counts usage that the log has not stored yet, from all records and side state.

    Records can be counted while commits continue. Side state can change, so it is counted in the transaction that saves
    the usage.

    Raises SettingsError if a tenant would lose ids that belong to it.
    """

    def __init__(self, start: CountStart, tenants: Sequence[Tenant]) -> None:
        check_own_ids_kept(list_tenants(start.text), tenants)
        known = {tenant.prefix for tenant in list_tenants(start.text)}
        counted = known if start.version == USAGE_VERSION else set()
        self._uncounted = Tenants([tenant for tenant in tenants if tenant.prefix not in counted])
        self.usage = dict.fromkeys(self._uncounted.by_prefix, Usage())
        self.removed_prefixes = known - (counted & {tenant.prefix for tenant in tenants})
        """Tenants whose stored usage is deleted: removed tenants, and tenants to be counted again."""

    def copy(self) -> "UsageCount":
        """Return an independent copy of the count so far."""
        copied = copy(self)
        copied.usage = dict(self.usage)
        return copied

    def reset(self) -> None:
        """Discard the count."""
        self.usage = dict.fromkeys(self.usage, Usage())

    @property
    def is_needed(self) -> bool:
        """Return whether any tenant's usage has not been counted yet."""
        return bool(self.usage)

    def add(self, rows: Iterable[SizeRow]) -> None:
        """Count records. The caller passes each record once."""
        for _, sequence, policy, actor, scope, partitions, size, names in rows:
            found = decode_partitions(partitions)
            tenants = self._uncounted.list_for(get_counted_stream(sequence, policy, actor, scope), found)
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
