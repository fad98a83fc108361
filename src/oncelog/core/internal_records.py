"""Internal records: records that Oncelog writes about the log itself. They do not come from submissions.

Restore records (rules/leaps.py), audit records (rules/audit.py) and fold records (rules/folds.py) are internal. They
have a position in their lane and are part of its hash chain. They have no sequence, no client and no partition, so that
readers of a stream or of a partition do not get them. A reader of a lane recognises them by their policy.
"""

from hashlib import sha256

from oncelog.core.policy import INTERNAL_POLICIES
from oncelog.core.values import Record


def is_internal(record: Record) -> bool:
    """Return whether Oncelog itself wrote the record."""
    return record.policy in INTERNAL_POLICIES


def check_internal_record(record: Record) -> str | None:
    """Describe the fault of an internal record in what all kinds of them have in common; None without a fault."""
    kind = record.policy
    if record.client or record.partitions:
        return f"a record of {kind} has a client or a partition"
    if record.sequence or record.client_sequence:
        return f"a record of {kind} has a sequence"
    if not record.erased and record.fingerprint != sha256(record.body).digest():
        return f"a record of {kind} has another fingerprint than its body"
    return None
