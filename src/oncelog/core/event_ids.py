"""Ids of events that are unique within a tenant (`Tenant.own_ids`).

The identity of such an event is in the scope of its tenant, so that no other tenant can take it. Events from before the
switch are known in the scope of the whole log, and stay known there.
"""

from typing import Final

from oncelog.core.policy import EVENTS
from oncelog.core.tenants import SEPARATOR, TENANT, Tenants
from oncelog.core.values import KeyIdentity, Reason, Refused, Submission

RETRY_AFTER_MS: Final = 1000
"""A server whose settings are older than the log's tenants needs a reload, which takes seconds."""
_SCOPES: Final = f"{TENANT}{SEPARATOR}"


def former_identity(submission: Submission) -> KeyIdentity | None:
    """Return the identity that an event had before its tenant got separate ids; None for other writes."""
    if submission.policy.name != EVENTS.name or not submission.scope.startswith(_SCOPES):
        return None
    return (EVENTS.name, "", "", submission.key)


def outside_its_tenant(submission: Submission, tenants: Tenants) -> Refused | None:
    """Refuse a new event in the scope of the whole log if its id belongs into the scope of its tenant.

    A writer that does not know of the switch yet would commit an event again that others have committed.
    """
    if submission.scope or submission.policy.name != EVENTS.name:
        return None
    scope = tenants.event_scope_of(submission.partitions)
    if not scope:
        return None
    message = f"the tenant of this event has separate ids: submit it in the scope {scope!r}, or reload the server"
    return Refused(Reason.BUSY, message, field="scope", retry_after_ms=RETRY_AFTER_MS)
