"""Find writes by key when their policy, scope or client is unknown.

The key index stores hashes of full identities, so it cannot be searched by key alone. A full scan always finds the
writes, but can take a second per million records. In a large log, the search therefore looks up the keys in the index
under every scope in the log's tables first, and scans the records only if that finds nothing.
"""

from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Final

from msgspec import Struct

from oncelog.core.policy import EVENTS, Order, Policy
from oncelog.core.tenants import event_scope
from oncelog.core.values import KeyIdentity
from oncelog.storage.inspect.inspector import LogView
from oncelog.storage.queries.tenants import load_usage
from oncelog.storage.verify.findings import ReportProgress, StepProgress

SCAN_RECORDS_MAX: Final = 5_000_000
"""Logs with up to this many records are scanned right away. Scanning one million records took 0.2 to 0.8 seconds."""
INDEX_IDENTITIES_MAX: Final = 20_000
"""Maximum number of index lookups. 15,000 lookups took as long as scanning about three million records."""
MATCHES_MAX: Final = 100
"""The search stops once it has found more writes than this."""
_BATCH_IDENTITIES: Final = 1_000
_PROGRESS_STEP: Final = "records"


class KeyQuery(Struct, frozen=True):
    """Keys to search for, and the known properties of their writes. None matches any value.

    There are several keys if the text that the user entered can be read as more than one key.
    """

    keys: tuple[bytes, ...]
    policies: tuple[Policy, ...]
    scope: str | None = None
    client: str | None = None

    @property
    def is_exact(self) -> bool:
        """Return whether the query determines exactly one identity for each policy and key."""
        return self.scope is not None and (
            self.client is not None or not any(policy.client_sequence for policy in self.policies)
        )

    def list_identities(self, policy: Policy, scope: str, client: str = "") -> list[KeyIdentity]:
        """Return an identity for each key whose length the policy accepts."""
        shortest, longest = policy.key_bytes
        fitting = [key for key in self.keys if shortest <= len(key) <= longest]
        return [(policy.name, scope, client if policy.client_sequence else "", key) for key in fitting]

    def is_match(self, identity: KeyIdentity) -> bool:
        """Return whether an identity matches the query."""
        name, scope, client, _ = identity
        policy = next((policy_entry for policy_entry in self.policies if policy_entry.name == name), None)
        if policy is None or (self.scope is not None and scope != self.scope):
            return False
        return self.client is None or not policy.client_sequence or client == self.client


class KeyMatches(Struct, frozen=True):
    """Search result: the identities found, and the number of records scanned."""

    identities: tuple[KeyIdentity, ...]
    """Contains `MATCHES_MAX` + 1 identities if there may be more."""
    records_read: int | None = None
    """None if the search did not scan records."""


def search_keys(view: LogView, query: KeyQuery, report: ReportProgress, *, read_all: bool = False) -> KeyMatches:
    """Find the identities under which the keys have a record or a lease.

    With `read_all`, the search scans all records even if the index has matches. For an exact query,
    the function returns all its identities without a search.
    """
    if query.is_exact:
        scope, client = query.scope or "", query.client or ""
        return KeyMatches(tuple(chain(*(query.list_identities(policy, scope, client) for policy in query.policies))))
    leased = [
        (*identity, key)
        for key in query.keys
        for identity in view.iterate_rows("leases_of_key", key.hex(), MATCHES_MAX + 1)
    ]
    total = view.estimate_records()
    if total > SCAN_RECORDS_MAX and not read_all:
        known = _search_index(view, query)
        if known:
            return _build_matches(query, [*known, *leased])
    found, records_read = _scan_records(view, query, report, total)
    return _build_matches(query, [*found, *leased], records_read)


def _build_matches(query: KeyQuery, found: Sequence[KeyIdentity], records_read: int | None = None) -> KeyMatches:
    return KeyMatches(
        tuple(sorted({identity for identity in found if query.is_match(identity)})[: MATCHES_MAX + 1]), records_read
    )


def _search_index(view: LogView, query: KeyQuery) -> list[KeyIdentity]:
    """Look up the keys in the index under every scope in the log's tables, unless there are too many scopes."""
    candidates = list(islice(filter(query.is_match, _list_candidates(view, query)), INDEX_IDENTITIES_MAX + 1))
    found: list[KeyIdentity] = []
    if len(candidates) <= INDEX_IDENTITIES_MAX:
        for start in range(0, len(candidates), _BATCH_IDENTITIES):
            found += view.find_stored_keys(candidates[start : start + _BATCH_IDENTITIES])
    return found


def _list_candidates(view: LogView, query: KeyQuery) -> Iterator[KeyIdentity]:
    for policy in query.policies:
        if not policy.client_sequence:
            yield from query.list_identities(policy, query.scope or "")
    if query.scope is None and EVENTS in query.policies:
        for tenant, _ in view.run_query(load_usage):
            if tenant.own_ids:
                yield from query.list_identities(EVENTS, event_scope(tenant.prefix))
    streams = [
        stream_policy
        for stream_policy in query.policies
        if stream_policy.order is Order.STREAM and not stream_policy.client_sequence
    ]
    for (scope,) in view.iterate_rows("scopes") if streams and query.scope is None else ():
        for policy in streams:
            yield from query.list_identities(policy, scope)
    numbered = {stream_policy.name: stream_policy for stream_policy in query.policies if stream_policy.client_sequence}
    for name, scope, client in view.iterate_rows("client_names") if numbered else ():
        if name in numbered:
            yield from query.list_identities(numbered[name], scope, client)


def _scan_records(view: LogView, query: KeyQuery, report: ReportProgress, total: int) -> tuple[set[KeyIdentity], int]:
    found: set[KeyIdentity] = set()
    records_read = 0
    report(StepProgress(_PROGRESS_STEP, 0, total))
    for count, identities in view.scan_records(query.keys):
        records_read += count
        found.update(filter(query.is_match, identities))
        report(StepProgress(_PROGRESS_STEP, min(records_read, total), total))
        if len(found) > MATCHES_MAX:
            break
    return found, records_read
