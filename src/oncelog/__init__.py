"""Oncelog: submit a write any number of times; it commits once, in an order that never changes.

- `open` and `open_blocking` open a log: an SQLite file or a PostgreSQL database. `Log.append` adds an event,
  `Log.submit` any other write, `Log.read` and `Log.follow` return the records.
- `once` makes a function run once per key. `Runs` does the same for the tools of an agent, and `IdempotencyMiddleware`
  for the requests of an ASGI application.
- `oncelog.client` has the clients of a server.

This module exports the public names. To read the code, start with docs/architecture.md, then `oncelog.core.plan`.
"""

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
    EventVerdict,
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
    RecordTrace,
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
from oncelog.deprecation import install
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
    RefusedError,
    ResultErasedError,
    ResultError,
    RetryLaterError,
    RunFailedError,
    SettingsError,
    SlowReaderError,
    StoreError,
    StoreUnavailableError,
    TransactionError,
    WorkError,
)
from oncelog.lazy_names import import_lazily

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
    from oncelog.idempotency.blocking_runs import BlockingRuns
    from oncelog.idempotency.http_request import HttpRequest
    from oncelog.idempotency.once import once, work_of
    from oncelog.idempotency.runs import Run, RunCounters, RunEvent, Runs, Shadow
    from oncelog.idempotency.share import SharedLog, share
    from oncelog.server.event_validator import NewEvent
    from oncelog.storage.clock import Clock
    from oncelog.storage.store import Consumer
    from oncelog.testing.memory_log import MemoryLog
    from oncelog.version import __version__ as __version__

    open = open_log  # noqa: A001 - `oncelog.open`, as one opens a file

_LAZY_NAMES: Final = {
    "BlockingLog": "oncelog.engine.blocking",
    "BlockingRuns": "oncelog.idempotency.blocking_runs",
    "Clock": "oncelog.storage.clock",
    "Consumer": "oncelog.storage.store",
    "Cursor": "oncelog.engine.read_results",
    "Follower": "oncelog.engine.read_results",
    "HttpRequest": "oncelog.idempotency.http_request",
    "STORED_STATUSES": "oncelog.idempotency.asgi",
    "IdempotencyMiddleware": "oncelog.idempotency.asgi",
    "Limits": "oncelog.engine.limits",
    "DiskLimits": "oncelog.engine.write_gate",
    "Log": "oncelog.engine.log",
    "MemoryLog": "oncelog.testing.memory_log",
    "NewEvent": "oncelog.server.event_validator",
    "Outcome": "oncelog.engine.outcome",
    "Proven": "oncelog.engine.read_results",
    "Reading": "oncelog.engine.read_results",
    "Run": "oncelog.idempotency.runs",
    "RunCounters": "oncelog.idempotency.runs",
    "RunEvent": "oncelog.idempotency.runs",
    "Runs": "oncelog.idempotency.runs",
    "Shadow": "oncelog.idempotency.runs",
    "Status": "oncelog.engine.outcome",
    "SharedLog": "oncelog.idempotency.share",
    "share": "oncelog.idempotency.share",
    "Subscription": "oncelog.engine.subscription",
    "Work": "oncelog.engine.held_lease",
    "__version__": "oncelog.version",
    "once": "oncelog.idempotency.once",
    "open": "oncelog.engine.log:open_log",
    "open_blocking": "oncelog.engine.blocking",
    "work_of": "oncelog.idempotency.once",
}
"""Names whose modules import asyncio, threads, SQLite or package metadata. A program that only computes keys does not
load them."""
_RENAMED: Final = {"Room": "DiskLimits"}
"""Deprecated names."""

install()
__getattr__, __dir__ = import_lazily(__name__, _LAZY_NAMES, renamed=_RENAMED)

# `open` is public but not listed: a star import must not shadow the builtin.
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
    "EventVerdict",
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
    "RecordTrace",
    "Refused",
    "RefusedError",
    "Relate",
    "Release",
    "Renew",
    "Replayed",
    "Request",
    "ResultErasedError",
    "ResultError",
    "Retention",
    "RetryLaterError",
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
    "__version__",
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
