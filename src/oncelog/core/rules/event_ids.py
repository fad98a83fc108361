"""Ids of events that are unique within a tenant (`Tenant.own_ids`).

The id of an event is unique in a scope: that of its tenant, or that of the whole log (`Tenants.list_event_scopes`). The
scope changes when a tenant gets separate ids, and a server may still use the previous one. So an event is looked
up in every scope that it may have been committed in, and is known if the content is equal. A new event is committed in
its present scope only.

Other scopes, as those of projects, are the application's: their events are looked up there and nowhere else.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from oncelog.core.policy import EVENTS
from oncelog.core.tenants import Tenants
from oncelog.core.values import KeyIdentity, Reason, Refused, Request, Submission, enumerate_items

RETRY_AFTER_MS: Final = 1000
"""A server whose settings are older than the log's tenants needs a reload, which takes seconds."""


def iterate_other_identities(submission: Submission, tenants: Tenants) -> Iterator[KeyIdentity]:
    """Yield the identities under which an event may have been committed, apart from its present one."""
    if submission.policy.name == EVENTS.name and submission.scope in tenants.event_scopes:
        for scope in tenants.list_event_scopes(submission.partitions):
            if scope != submission.scope:
                yield EVENTS.name, scope, "", submission.key


def collect_event_identities(
    batch: Sequence[Request], tenants: Tenants, faults: Mapping[int, Refused]
) -> set[KeyIdentity]:
    """Return the other identities of all events of a batch, for its read set."""
    if not tenants.event_scopes:
        return set()
    return {
        identity
        for index, item in enumerate_items(batch)
        if isinstance(item, Submission) and index not in faults
        for identity in iterate_other_identities(item, tenants)
    }


def check_event_scope(submission: Submission, tenants: Tenants) -> Refused | None:
    """Refuse a new event whose id belongs into another scope.

    Two servers that know different tenants would otherwise commit it at the same time under different identities.
    """
    if submission.policy.name != EVENTS.name or submission.scope not in tenants.event_scopes:
        return None
    scope = tenants.get_event_scope(submission.partitions)
    if scope == submission.scope:
        return None
    message = f"the id of this event belongs into the scope {scope!r}, not {submission.scope!r}: reload the server"
    return Refused(Reason.WRONG_SCOPE, message, field="scope", retry_after_ms=RETRY_AFTER_MS)
