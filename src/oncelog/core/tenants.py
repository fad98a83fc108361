"""Tenants: groups of streams and partitions whose writes are limited together.

A tenant is a name and the names below it: `ledger/acme` covers the stream or partition of this name, and each one
whose name starts with `ledger/acme/`. Grants use the same names.
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
"""Highest allowed value of each tenant limit."""
TENANT_SCOPE_PREFIX: Final = "tenant"
"""First part of the scope of a tenant with separate ids."""
_CACHE_ENTRIES_MAX: Final = 10_000
"""Maximum number of writes whose tenants are cached."""
_KNOWN_PARTITIONS_MAX: Final = 2
"""Maximum partitions of a cached write. 64 long partitions take 64 kB, so one writer could fill the cache with 640
MB."""


class Tenant(Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """Limits on writes to the streams and partitions of one name and the names below it.

    0 means no limit. A tenant's usage is counted even without limits.
    """

    prefix: str
    """`ledger/acme` covers this name and all names that start with `ledger/acme/`."""
    bytes_max: int = 0
    """Bytes of the writes that the log stores (`core.stored_bytes`). Erasing a body frees its bytes."""
    records_max: int = 0
    """Maximum records (including erased ones) plus stream members (including past ones)."""
    new_writes_per_second_max: int = 0
    """Maximum sustained rate of new writes."""
    new_writes_at_once_max: int = 0
    """Burst of new writes after a pause. 0 means `new_writes_per_second_max`."""
    own_ids: bool = False
    """Whether event ids are unique within the tenant (`event_scope`). It cannot be switched off again."""


class Usage(Struct, frozen=True, gc=False):
    """A tenant's usage and the state of its rate."""

    bytes: int = 0
    records: int = 0
    full_at_us: int = 0
    """Time at which the bucket is full again, in batch time."""


class Tenants:
    """The tenants of a log. Finds a write's tenants with one lookup per part of a name, however many tenants there
    are."""

    def __init__(self, tenants: Iterable[Tenant]) -> None:
        self.by_prefix: Mapping[str, Tenant] = {tenant.prefix: tenant for tenant in tenants}
        self._find_cached = lru_cache(_CACHE_ENTRIES_MAX)(self._find)
        own_scopes = {tenant.prefix: event_scope(tenant.prefix) for tenant in self.by_prefix.values() if tenant.own_ids}
        self._own_scopes: Mapping[str, str] = own_scopes
        self._find_scopes_cached = lru_cache(_CACHE_ENTRIES_MAX)(self._find_scopes)
        self.event_scopes = frozenset(("", *own_scopes.values()) if own_scopes else ())
        """Scopes of event ids. Empty if no tenant has separate ids."""

    def list_for(self, stream: str, partitions: tuple[str, ...]) -> tuple[Tenant, ...]:
        """Return the tenants of a write. `stream` is empty for Order.LANE."""
        find = self._find_cached if len(partitions) <= _KNOWN_PARTITIONS_MAX else self._find
        return find(stream, partitions)

    def get_event_scope(self, partitions: tuple[str, ...]) -> str:
        """Return the scope in which the id of a new event with these partitions is unique.

        This is the empty scope of the whole log, unless the partitions belong to exactly one tenant with separate ids.
        """
        return self.list_event_scopes(partitions)[0]

    def list_event_scopes(self, partitions: tuple[str, ...]) -> tuple[str, ...]:
        """Return the scopes in which an event with these partitions may have been committed. New events use the first.

        These are the scope of the whole log and that of each of the event's tenants with separate ids. The order in
        which tenants got separate ids does not matter: tenants keep them (`check_own_ids_kept`), so scopes are only
        ever added.
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
    """Return the event scope of a tenant with separate ids: `tenant/acme`."""
    return scope_of(TENANT_SCOPE_PREFIX, prefix)


def check_own_ids_kept(before: Iterable[Tenant], after: Iterable[Tenant]) -> None:
    """Raise SettingsError if a tenant loses its separate ids: retries of its events would be committed again."""
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
    """Raise SettingsError for an invalid quota or a repeated prefix.

    The messages start with `tenants must`, as for other settings; callers prepend the source.
    """
    if len(tenants) > TENANTS_MAX:
        raise SettingsError(f"tenants must have at most {TENANTS_MAX} entries, not {len(tenants)}")
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
            raise SettingsError(
                f"tenants must not have nested prefixes with own_ids; {prefix!r} is below {enclosing!r}"
            )


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
            f"set own_ids to true or false; {prefix!r} has {tenant.own_ids!r}",
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
