"""Reasons for refusals, which both values (`core.values.Refused`) and errors (`errors.RefusedError`) carry."""

from enum import Enum
from typing import Final


class Reason(Enum):
    """Reason for a refusal. Each API maps reasons to its error codes in one table."""

    MALFORMED = "malformed"
    NOT_A_MEMBER = "not_a_member"
    NOT_AN_OWNER = "not_an_owner"
    LAST_OWNER = "last_owner"
    """The change would leave the stream with members but no owner."""
    IDENTITY_REUSED = "identity_reused"
    SEQUENCE_GAP = "sequence_gap"
    SEQUENCE_REUSED = "sequence_reused"
    IN_FLIGHT = "in_flight"
    RUN_FAILED = "run_failed"
    LEASE_LOST = "lease_lost"
    UNEXPECTED_POSITION = "unexpected_position"
    KEY_EXISTS = "key_exists"
    KEY_NOT_FOUND = "key_not_found"
    VERSION_MISMATCH = "version_mismatch"
    VALUE_MISMATCH = "value_mismatch"
    TOO_MANY_COLUMNS = "too_many_columns"
    ROW_TOO_LARGE = "row_too_large"
    CLOCK_DRIFT = "clock_drift"
    INVALID = "invalid"
    RATE_LIMITED = "rate_limited"
    QUOTA_EXCEEDED = "quota_exceeded"
    """The write exceeds a tenant's quota. A retry can succeed once the tenant has room again."""
    READ_ONLY = "read_only"
    """The engine currently accepts no new writes; retry later. `plan` never returns this reason."""
    BUSY = "busy"
    """The engine's queue is full; retry later. `plan` never returns this reason."""
    WRONG_SCOPE = "wrong_scope"
    """The id of a new event belongs in a different scope (core/rules/duplicates.py).

    The server does not know the log's current tenants. A retry in the same scope is refused again.
    """
    INVALID_ACKNOWLEDGEMENT = "invalid_acknowledgement"
    INVALID_CURSOR = "invalid_cursor"
    NOT_PROCESSED = "not_processed"
    NOT_KNOWN = "not_known"
    """The item is `known_only` and the log does not know its key. Engines replace this reason with their own."""
    UNSTORABLE = "unstorable"
    """The store cannot hold this write; a retry gets the same answer. `plan` never returns this reason."""


TEMPORARY_REASONS: Final = frozenset(
    {Reason.BUSY, Reason.IN_FLIGHT, Reason.QUOTA_EXCEEDED, Reason.RATE_LIMITED, Reason.READ_ONLY}
)
"""Reasons for refusing a valid write that the log may accept later, unchanged."""
