"""Tenants: those whose writes are limited together, by the names that their streams and partitions begin with.

A tenant is a name, and all that lies below it: `ledger/acme` is that stream or partition, and all that begin with
`ledger/acme/`. So the rights of identities and the quotas of tenants speak of the same names.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Final

from msgspec import Struct

from oncelog.core.canonical import nfc
from oncelog.core.identity import scope_of
from oncelog.core.limits import NAME_CHARACTERS_MAX, RATE_MAX, STORED_INTEGER_MAX, TENANTS_MAX
from oncelog.errors import SettingsError

SEPARATOR: Final = "/"
_LIMITS: Final = {
    "bytes_max": STORED_INTEGER_MAX,
    "records_max": STORED_INTEGER_MAX,
    "new_writes_per_second_max": RATE_MAX,
    "new_writes_at_once_max": RATE_MAX,
}
"""The highest value of each limit of a tenant."""
TENANT_SCOPE_PREFIX: Final = "tenant"
"""First part of the scopes of tenants that have separate ids."""
_CACHE_ENTRIES_MAX: Final = 10_000
"""Writes whose tenants are cached."""
_KNOWN_PARTITIONS_MAX: Final = 2
"""Partitions of a cached write. 64 long ones take 64 kB, so that one writer could fill the cache with 640 MB."""


class Tenant(Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """Whose writes are limited together: all in the stream or partition of that name, and in those below it.

    0 is no limit. What a tenant has is counted, whatever its limits.
    """

    prefix: str
    """`ledger/acme` is that name, and all that begin with `ledger/acme/`."""
    bytes_max: int = 0
    """Of everything that its writes make the log keep (`core.stored_bytes`). Erased bodies are given back."""
    records_max: int = 0
    """Of its records, erased ones too, and of the members of its streams, past ones too."""
    new_writes_per_second_max: int = 0
    """In the long run."""
    new_writes_at_once_max: int = 0
    """After a pause; 0 is as many as a second gives."""
    own_ids: bool = False
    """Whether ids of events are unique within the tenant (`event_scope`). It cannot be switched off again."""


class Usage(Struct, frozen=True, gc=False):
    """What a tenant has, and what is left of its rate."""

    bytes: int = 0
    records: int = 0
    full_at_us: int = 0
    """As in a bucket, but by the time of batches."""


class Tenants:
    """Those of one log. Says to whom a write belongs, whatever their number, by a look for each part of a name."""

    def __init__(self, tenants: Iterable[Tenant]) -> None:
        self.by_prefix: Mapping[str, Tenant] = {tenant.prefix: tenant for tenant in tenants}
        self._find_cached = lru_cache(_CACHE_ENTRIES_MAX)(self._find)
        own_scopes = {tenant.prefix: event_scope(tenant.prefix) for tenant in self.by_prefix.values() if tenant.own_ids}
        self._own_scopes: Mapping[str, str] = own_scopes
        self._find_scopes_cached = lru_cache(_CACHE_ENTRIES_MAX)(self._find_scopes)
        self.event_scopes = frozenset(("", *own_scopes.values()) if own_scopes else ())
        """The scopes of ids of events; empty if no tenant has separate ids."""

    def list_for(self, stream: str, partitions: tuple[str, ...]) -> tuple[Tenant, ...]:
        """Return the tenants of a write by name. `stream` is empty where the order is the lane's."""
        find = self._find_cached if len(partitions) <= _KNOWN_PARTITIONS_MAX else self._find
        return find(stream, partitions)

    def get_event_scope(self, partitions: tuple[str, ...]) -> str:
        """Return the scope in which the id of a new event with these partitions is unique.

        Empty, the scope of the whole log, unless the partitions belong to exactly one tenant with separate ids.
        """
        return self.list_event_scopes(partitions)[0]

    def list_event_scopes(self, partitions: tuple[str, ...]) -> tuple[str, ...]:
        """Return the scopes in which an event with these partitions may have been committed; the first is for new ones.

        They are those of the whole log and of each of its tenants with separate ids. That holds whatever the order in
        which tenants got them: a tenant keeps its separate ids (`check_own_ids_kept`), so scopes are only added.
        """
        find = self._find_scopes_cached if len(partitions) <= _KNOWN_PARTITIONS_MAX else self._find_scopes
        return find(partitions)

    def _find(self, stream: str, partitions: tuple[str, ...]) -> tuple[Tenant, ...]:
        names = (stream, *partitions)
        prefixes = {prefix for name in names for prefix in (name, *_iterate_parents(name)) if prefix in self.by_prefix}
        return tuple(self.by_prefix[prefix] for prefix in sorted(prefixes))

    def _find_scopes(self, partitions: tuple[str, ...]) -> tuple[str, ...]:
        own = tuple(self._own_scopes[tenant.prefix] for tenant in self.list_for("", partitions) if tenant.own_ids)
        return (*own, "") if len(own) == 1 else ("", *own)


def event_scope(prefix: str) -> str:
    """Return the scope of the events of a tenant with separate ids: `tenant/acme`."""
    return scope_of(TENANT_SCOPE_PREFIX, prefix)


def check_own_ids_kept(before: Iterable[Tenant], after: Iterable[Tenant]) -> None:
    """Raise SettingsError if a tenant loses its own ids: retries of its events would be committed again."""
    remaining = {tenant.prefix for tenant in after if tenant.own_ids}
    for tenant in before:
        if tenant.own_ids and tenant.prefix not in remaining:
            raise SettingsError(
                f"tenants must keep own_ids of {tenant.prefix!r}: the log has events with ids of that tenant"
            )


def _iterate_parents(name: str) -> Iterable[str]:
    place = name.rfind(SEPARATOR)
    while place > 0:
        yield name[:place]
        place = name.rfind(SEPARATOR, 0, place)


def check_tenants(tenants: Sequence[Tenant]) -> None:
    """Raises SettingsError for an invalid quota and for a repeated prefix.

    Each message begins with `tenants must`, as messages of other settings do: callers put the source in front of it.
    """
    if len(tenants) > TENANTS_MAX:
        raise SettingsError(f"tenants must be at most {TENANTS_MAX}, not {len(tenants)}")
    seen: set[str] = set()
    for tenant in tenants:
        _check_tenant(tenant)
        if tenant.prefix in seen:
            raise SettingsError(f"tenants must have distinct prefixes; {tenant.prefix!r} appears twice")
        seen.add(tenant.prefix)
    owners = {tenant.prefix for tenant in tenants if tenant.own_ids}
    for prefix in owners:
        enclosing = next((parent for parent in _iterate_parents(prefix) if parent in owners), None)
        if enclosing is not None:
            raise SettingsError(f"tenants must not have own_ids within each other; {prefix!r} is below {enclosing!r}")


def _check_tenant(tenant: Tenant) -> None:
    prefix = tenant.prefix
    if (
        type(prefix) is not str
        or not 1 <= len(prefix) <= NAME_CHARACTERS_MAX
        or "\0" in prefix
        or nfc(prefix) != prefix
    ):
        raise SettingsError(
            f"tenants must have prefixes of 1 to {NAME_CHARACTERS_MAX} characters, in NFC, without U+0000"
        )
    for name, highest in _LIMITS.items():
        value = getattr(tenant, name)
        if type(value) is not int or not 0 <= value <= highest:
            raise SettingsError(
                f"tenants must have a {name} from 1 to {highest}, or 0 for no limit; {prefix!r} has {value!r}"
            )
    explanation = f"not {prefix!r}: a prefix includes all names below it"
    scope = event_scope(prefix)
    for is_valid, demand in (
        (
            not prefix.endswith(SEPARATOR),
            f"have prefixes that do not end with {SEPARATOR}, {explanation}",
        ),
        (
            not prefix.startswith(SEPARATOR) and prefix.split(SEPARATOR)[-1] != "*",
            f"have prefixes without a leading {SEPARATOR} and without a final *, {explanation}",
        ),
        (
            type(tenant.own_ids) is bool,
            f"have an own_ids of true or false; {prefix!r} has {tenant.own_ids!r}",
        ),
        (
            not tenant.own_ids or len(scope) <= NAME_CHARACTERS_MAX,
            f"have shorter prefixes for own_ids: the scope {scope!r} has more than {NAME_CHARACTERS_MAX} characters",
        ),
        (
            not tenant.new_writes_at_once_max or tenant.new_writes_per_second_max > 0,
            f"set new_writes_per_second_max where they set new_writes_at_once_max; {prefix!r} does not",
        ),
    ):
        if not is_valid:
            raise SettingsError(f"tenants must {demand}")
