"""Trace contexts of recent records, in a table that only logs with tracing have.

The table `_oncelog_traces` is not part of the schema and has no migration: `create_traces` creates it when a log is
first opened with tracing. Its name lacks Oncelog's prefix, so versions without tracing treat it as a table of the
application. Nothing is derived from it; losing it loses only the links between traces (docs/decisions/0064).
"""

from collections.abc import Sequence
from itertools import chain
from typing import Final

from msgspec.structs import replace

from oncelog.core.values import Committed, Record, RecordTrace
from oncelog.storage.queries.statement import QuerySteps, RowsStatement, Statement
from oncelog.storage.store import BatchResult, BatchTraces

TRACED_POSITIONS_MAX: Final = 100_000
"""How far back the contexts of a lane reach, in positions. Traces are short-lived, and the table must not grow with
the log: it has about 150 bytes for each traced record."""
POSITIONS_MAX: Final = 500
"""Positions per statement of `attach_traces`."""


def create_traces() -> QuerySteps[None]:
    """Create the table unless it exists. Only creating it needs the right to create tables."""
    if not (yield Statement("find_traces")):
        yield Statement("create_traces")


def add_traces(result: BatchResult, traces: BatchTraces) -> list[Record]:
    """Return a batch's records with the contexts of their items."""
    places = {
        (verdict.receipt.lane, verdict.receipt.position): RecordTrace(traceparent, traces.commit)
        for verdict, traceparent in zip(chain.from_iterable(result.verdicts), traces.items, strict=True)
        if traceparent and type(verdict) is Committed
    }
    return [replace(record, trace=places.get((record.lane, record.position))) for record in result.changes.records]


def save_traces(result: BatchResult, traces: BatchTraces) -> QuerySteps[None]:
    """Save the contexts of a batch's new records, attach them to the records, and delete old contexts.

    Without the table, `result.lacks_trace_table` is set. On PostgreSQL, a statement on a missing table would abort the
    transaction.
    """
    result.changes.records = records = add_traces(result, traces)
    rows = [
        (record.lane, record.position, record.trace.traceparent, record.trace.commit)
        for record in records
        if record.trace is not None
    ]
    if not rows:
        return
    if not (yield Statement("find_traces")):
        result.lacks_trace_table = True
        return
    yield RowsStatement("save_traces", rows)
    newest = {lane: position for lane, position, *_ in rows}
    expired = [
        (lane, position - TRACED_POSITIONS_MAX) for lane, position in newest.items() if position > TRACED_POSITIONS_MAX
    ]
    if expired:
        yield RowsStatement("expire_traces", expired)


def attach_traces(records: Sequence[Record]) -> QuerySteps[list[Record] | None]:
    """Return records of one lane with their stored contexts, or None if the table does not exist."""
    positions = [record.position for record in records]
    found: dict[int, RecordTrace] = {}
    if not records:
        return []
    if not (yield Statement("find_traces")):
        return None
    for start in range(0, len(positions), POSITIONS_MAX):
        rows = yield Statement("traces", records[0].lane, positions[start : start + POSITIONS_MAX])
        found |= {position: RecordTrace(traceparent, commit) for position, traceparent, commit in rows}
    return [replace(record, trace=found[record.position]) if record.position in found else record for record in records]
