"""Oncelog: submit a write any number of times; it commits once, in an order that never changes.

The names below are the public ones. Where to start reading: docs/ARCHITECTURE.md, then `oncelog.core.plan`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Final

from oncelog.core.canonical import canonical, canonical_args, canonical_text
from oncelog.core.identity import (
    delta_id,
    fingerprint,
    normal_partitions,
    request_hash,
    run_key,
    run_key_v1,
    scope_of,
)
from oncelog.core.merge import Op, Row, RowDelta, extract, merge
from oncelog.core.operations import Condition, DeleteEntity, Entity, Must, Operation, Relate, SetEntity, Unrelate
from oncelog.core.plan import Plan, Validate, plan
from oncelog.core.policy import (
    CHAT,
    DELTAS,
    EVENTS,
    FOREVER,
    LEDGER,
    RUNS,
    Identity,
    OnReuse,
    Order,
    Policy,
    Retention,
    evicted_after,
    kept_for,
)
from oncelog.core.proof import Block, Proof, verify, verify_header
from oncelog.core.values import (
    Acknowledge,
    Applied,
    Claim,
    Committed,
    Granted,
    Item,
    LaneHead,
    Lease,
    Mode,
    Reason,
    Receipt,
    Record,
    Refused,
    Release,
    Renew,
    Replayed,
    Request,
    SetCursor,
    SetMember,
    Settings,
    Submission,
    Verdict,
)
from oncelog.core.writing import event, write
from oncelog.errors import (
    CanonicalError,
    ClockJumpedError,
    ClosedError,
    CorruptError,
    HistoryChangedError,
    LimitExceededError,
    NewerSchemaError,
    NotALogError,
    OncelogError,
    PolicyError,
    SettingsError,
    SlowReaderError,
    StoreError,
    StoreUnavailableError,
)
from oncelog.stores.memory import MemoryLog

if TYPE_CHECKING:
    from oncelog.engine.blocking import BlockingLog, open_blocking
    from oncelog.engine.cursors import Cursor, Proven, Reading
    from oncelog.engine.follower import Follower
    from oncelog.engine.limits import Limits
    from oncelog.engine.log import Log
    from oncelog.engine.log import open_log as open  # noqa: A004 - `oncelog.open`, as one opens a file
    from oncelog.engine.outcome import Outcome, Status
    from oncelog.engine.tailer import Subscription
    from oncelog.stores.clock import Clock
    from oncelog.stores.protocol import Consumer

_LATER: Final = {
    "BlockingLog": ("oncelog.engine.blocking", "BlockingLog"),
    "Clock": ("oncelog.stores.clock", "Clock"),
    "Consumer": ("oncelog.stores.protocol", "Consumer"),
    "Cursor": ("oncelog.engine.cursors", "Cursor"),
    "Follower": ("oncelog.engine.follower", "Follower"),
    "Limits": ("oncelog.engine.limits", "Limits"),
    "Log": ("oncelog.engine.log", "Log"),
    "Outcome": ("oncelog.engine.outcome", "Outcome"),
    "Proven": ("oncelog.engine.cursors", "Proven"),
    "Reading": ("oncelog.engine.cursors", "Reading"),
    "Status": ("oncelog.engine.outcome", "Status"),
    "Subscription": ("oncelog.engine.tailer", "Subscription"),
    "open": ("oncelog.engine.log", "open_log"),
    "open_blocking": ("oncelog.engine.blocking", "open_blocking"),
}
"""Names that bring asyncio, threads and SQLite with them: whoever computes a key need not wait for that."""


def __getattr__(name: str) -> object:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _LATER[name]
    value = getattr(import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


__all__ = [
    "CHAT",
    "DELTAS",
    "EVENTS",
    "FOREVER",
    "LEDGER",
    "RUNS",
    "Acknowledge",
    "Applied",
    "Block",
    "BlockingLog",
    "CanonicalError",
    "Claim",
    "Clock",
    "ClockJumpedError",
    "ClosedError",
    "Committed",
    "Condition",
    "Consumer",
    "CorruptError",
    "Cursor",
    "DeleteEntity",
    "Entity",
    "Follower",
    "Granted",
    "HistoryChangedError",
    "Identity",
    "Item",
    "LaneHead",
    "Lease",
    "LimitExceededError",
    "Limits",
    "Log",
    "MemoryLog",
    "Mode",
    "Must",
    "NewerSchemaError",
    "NotALogError",
    "OnReuse",
    "OncelogError",
    "Op",
    "Operation",
    "Order",
    "Outcome",
    "Plan",
    "Policy",
    "PolicyError",
    "Proof",
    "Proven",
    "Reading",
    "Reason",
    "Receipt",
    "Record",
    "Refused",
    "Relate",
    "Release",
    "Renew",
    "Replayed",
    "Request",
    "Retention",
    "Row",
    "RowDelta",
    "SetCursor",
    "SetEntity",
    "SetMember",
    "Settings",
    "SettingsError",
    "SlowReaderError",
    "Status",
    "StoreError",
    "StoreUnavailableError",
    "Submission",
    "Subscription",
    "Unrelate",
    "Validate",
    "Verdict",
    "canonical",
    "canonical_args",
    "canonical_text",
    "delta_id",
    "event",
    "evicted_after",
    "extract",
    "fingerprint",
    "kept_for",
    "merge",
    "normal_partitions",
    "open",
    "open_blocking",
    "plan",
    "request_hash",
    "run_key",
    "run_key_v1",
    "scope_of",
    "verify",
    "verify_header",
    "write",
]
