"""Oncelog: submit a write any number of times; it commits once, in an order that never changes.

The names below are the public ones. Where to start reading: docs/ARCHITECTURE.md, then `oncelog.core.plan`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Final

from oncelog.core.builders import event, write
from oncelog.core.canonical import canonical, canonical_args, canonical_text
from oncelog.core.deltas import delta, deltas_scope
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
from oncelog.core.tenants import Tenant, Usage, event_scope
from oncelog.core.transactions import ledger_scope, transaction
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
    OpenStream,
    Rate,
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
from oncelog.deprecation import find_renamed, install
from oncelog.errors import (
    BusyError,
    CanonicalError,
    ClockJumpedError,
    ClosedError,
    ConflictError,
    CorruptError,
    DiskFullError,
    HistoryChangedError,
    InFlightError,
    LeaseLostError,
    LimitExceededError,
    MovedError,
    NewerSchemaError,
    NotALogError,
    OncelogError,
    PolicyError,
    ResultErasedError,
    ResultError,
    RunFailedError,
    SettingsError,
    SlowReaderError,
    StoreError,
    StoreUnavailableError,
    TransactionError,
    WorkError,
)
from oncelog.storage.memory import MemoryLog

if TYPE_CHECKING:
    from oncelog.engine.blocking import BlockingLog, open_blocking
    from oncelog.engine.held_lease import Work
    from oncelog.engine.limits import Limits
    from oncelog.engine.log import Log, open_log
    from oncelog.engine.outcome import Outcome, Status
    from oncelog.engine.read_results import Cursor, Follower, Proven, Reading
    from oncelog.engine.subscription import Subscription
    from oncelog.engine.write_gate import DiskLimits
    from oncelog.idempotency.asgi import STORED_STATUSES, IdempotencyMiddleware
    from oncelog.idempotency.http_request import HttpRequest
    from oncelog.idempotency.once import once, work_of
    from oncelog.idempotency.runs import BlockingRuns, Run, RunCounters, RunEvent, Runs, Shadow
    from oncelog.idempotency.share import SharedLog, share
    from oncelog.server.event_validator import NewEvent
    from oncelog.storage.clock import Clock
    from oncelog.storage.store import Consumer

    open = open_log  # noqa: A001 - `oncelog.open`, as one opens a file

_LAZY_NAMES: Final = {
    "BlockingLog": ("oncelog.engine.blocking", "BlockingLog"),
    "BlockingRuns": ("oncelog.idempotency.runs", "BlockingRuns"),
    "Clock": ("oncelog.storage.clock", "Clock"),
    "Consumer": ("oncelog.storage.store", "Consumer"),
    "Cursor": ("oncelog.engine.read_results", "Cursor"),
    "Follower": ("oncelog.engine.read_results", "Follower"),
    "HttpRequest": ("oncelog.idempotency.http_request", "HttpRequest"),
    "STORED_STATUSES": ("oncelog.idempotency.asgi", "STORED_STATUSES"),
    "IdempotencyMiddleware": ("oncelog.idempotency.asgi", "IdempotencyMiddleware"),
    "Limits": ("oncelog.engine.limits", "Limits"),
    "DiskLimits": ("oncelog.engine.write_gate", "DiskLimits"),
    "Log": ("oncelog.engine.log", "Log"),
    "NewEvent": ("oncelog.server.event_validator", "NewEvent"),
    "Outcome": ("oncelog.engine.outcome", "Outcome"),
    "Proven": ("oncelog.engine.read_results", "Proven"),
    "Reading": ("oncelog.engine.read_results", "Reading"),
    "Run": ("oncelog.idempotency.runs", "Run"),
    "RunCounters": ("oncelog.idempotency.runs", "RunCounters"),
    "RunEvent": ("oncelog.idempotency.runs", "RunEvent"),
    "Runs": ("oncelog.idempotency.runs", "Runs"),
    "Shadow": ("oncelog.idempotency.runs", "Shadow"),
    "Status": ("oncelog.engine.outcome", "Status"),
    "SharedLog": ("oncelog.idempotency.share", "SharedLog"),
    "share": ("oncelog.idempotency.share", "share"),
    "Subscription": ("oncelog.engine.subscription", "Subscription"),
    "Work": ("oncelog.engine.held_lease", "Work"),
    "once": ("oncelog.idempotency.once", "once"),
    "open": ("oncelog.engine.log", "open_log"),
    "open_blocking": ("oncelog.engine.blocking", "open_blocking"),
    "work_of": ("oncelog.idempotency.once", "work_of"),
}
"""Names that bring asyncio, threads and SQLite with them: whoever computes a key need not wait for that."""


_RENAMED: Final = {"Room": "DiskLimits"}
"""Deprecated names."""
install()


def __getattr__(name: str) -> object:
    if name not in _LAZY_NAMES:
        name = find_renamed(__name__, _RENAMED, name)
    module, attribute = _LAZY_NAMES[name]
    value = getattr(import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "open"])


# Without `open`: a star import must not take the builtin of that name away. It is public all the same.
__all__ = [
    "CHAT",
    "DELTAS",
    "EVENTS",
    "FOREVER",
    "LEDGER",
    "RUNS",
    "STORED_STATUSES",
    "Acknowledge",
    "Applied",
    "Block",
    "BlockingLog",
    "BlockingRuns",
    "BusyError",
    "CanonicalError",
    "Claim",
    "Clock",
    "ClockJumpedError",
    "ClosedError",
    "Committed",
    "Condition",
    "ConflictError",
    "Consumer",
    "CorruptError",
    "Cursor",
    "DeleteEntity",
    "DiskFullError",
    "DiskLimits",
    "Entity",
    "Follower",
    "Granted",
    "HistoryChangedError",
    "HttpRequest",
    "IdempotencyMiddleware",
    "Identity",
    "InFlightError",
    "Item",
    "LaneHead",
    "Lease",
    "LeaseLostError",
    "LimitExceededError",
    "Limits",
    "Log",
    "MemoryLog",
    "Mode",
    "MovedError",
    "Must",
    "NewEvent",
    "NewerSchemaError",
    "NotALogError",
    "OnReuse",
    "OncelogError",
    "Op",
    "OpenStream",
    "Operation",
    "Order",
    "Outcome",
    "Plan",
    "Policy",
    "PolicyError",
    "Proof",
    "Proven",
    "Rate",
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
    "ResultErasedError",
    "ResultError",
    "Retention",
    "Row",
    "RowDelta",
    "Run",
    "RunCounters",
    "RunEvent",
    "RunFailedError",
    "Runs",
    "SetCursor",
    "SetEntity",
    "SetMember",
    "Settings",
    "SettingsError",
    "Shadow",
    "SharedLog",
    "SlowReaderError",
    "Status",
    "StoreError",
    "StoreUnavailableError",
    "Submission",
    "Subscription",
    "Tenant",
    "TransactionError",
    "Unrelate",
    "Usage",
    "Validate",
    "Verdict",
    "Work",
    "WorkError",
    "canonical",
    "canonical_args",
    "canonical_text",
    "delta",
    "delta_id",
    "deltas_scope",
    "event",
    "event_scope",
    "evicted_after",
    "extract",
    "fingerprint",
    "kept_for",
    "ledger_scope",
    "merge",
    "normal_partitions",
    "once",
    "open_blocking",
    "plan",
    "request_hash",
    "run_key",
    "run_key_v1",
    "scope_of",
    "share",
    "transaction",
    "verify",
    "verify_header",
    "work_of",
    "write",
]
