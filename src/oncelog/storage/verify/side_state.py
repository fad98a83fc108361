"""Checks the side state that cannot be rebuilt from records: members, leases, consumers, rates, policies."""

from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

from oncelog.core.hlc import HLC_MAX, check_drift
from oncelog.core.policy import Policy
from oncelog.core.rules.quotas import FULL_AFTER_US_MAX
from oncelog.storage.inspect.inspector import RowTuple
from oncelog.storage.queries.records import list_consumers
from oncelog.storage.side_state import HORIZONS, STORED_TABLES, USAGE_TABLE, SideStateTable, lane_of_scope
from oncelog.storage.verify.findings import InconsistencyError, StepProgress, require
from oncelog.storage.verify.indexes import REPORT_ROWS
from oncelog.storage.verify.source import LogState, VerificationSource


def decode_policies(declarations: Iterable[RowTuple]) -> dict[str, Policy]:
    """Return policies by name. Raises InconsistencyError for a declaration that cannot be decoded."""
    policies = {}
    for name, declaration in declarations:
        try:
            policy = msgspec.json.decode(declaration, type=Policy)
        except (msgspec.MsgspecError, UnicodeError) as error:
            raise InconsistencyError(f"the declaration of the policy {name!r} cannot be read: {error}") from error
        require(policy.name == name, f"the declaration of the policy {name!r} has the name {policy.name!r}")
        policies[name] = policy
    return policies


_CONTRADICTIONS: Final = (
    ("acknowledged_beyond", "{2!r} has acknowledged {3} of {1!r}, which ends at {4}"),
    ("member_without_stream", "{2!r} is or was a member of {1!r}, which is not in the table of streams"),
    ("stream_of_nobody", "the stream {1!r} has no records and never had a member"),
    (
        "bad_roster",
        (
            "the stream {1!r} has {2} members and {3} owners, but its roster counts {4} and {5}, "
            "or the order of joining is inconsistent"
        ),
    ),
    ("member_change_beyond", "{2!r} of {1!r} changed at revision {3}, but the lane is at revision {4}"),
    ("lease_beyond", "the lease of {1!r} {2!r} {3!r} has fence {4}, but the lane's highest fence is {5}"),
    ("usage_below", "the usage of the tenant {1!r} is negative"),
)
"""Statements that find an impossible row, each with the message for its columns. The first column is the lane."""


def check_side_state(source: VerificationSource, state: LogState) -> Iterator[StepProgress]:
    """Check that the remaining side state can be read, is in the right lane, and is not ahead of its stream or lane."""
    for table in STORED_TABLES:
        yield from _check_table(source, table, state)
    for statement, message in _CONTRADICTIONS:
        found = source.view.fetch_first(statement)
        if found is not None:
            raise InconsistencyError(message.format(*found), found[0])
    _check_rates(source)
    _check_horizons(source, state)
    for consumer in source.view.run_query(list_consumers):
        if consumer.cursor < 0 or consumer.lag < 0:
            order = f"the stream {consumer.scope!r}" if consumer.scope else "lane 0"
            raise InconsistencyError(
                f"the consumer {consumer.name!r} is at {consumer.cursor}, but {order} ends at "
                f"{consumer.cursor + consumer.lag}"
            )


def _check_rates(source: VerificationSource) -> None:
    found = source.view.fetch_first("rate_beyond", FULL_AFTER_US_MAX)
    if found is not None:
        lane, scope, actor, full_at_us, log_time_ms = found
        where = f"in {scope!r} " if scope else ""
        raise InconsistencyError(
            f"the rate of {actor!r} {where}refills at {full_at_us} µs, too late for log time {log_time_ms} ms",
            lane,
        )


def _check_horizons(source: VerificationSource, state: LogState) -> None:
    """Check tombstone horizons: each must be just above the clock of a DELETE, which was not far ahead of log time."""
    for lane, scope, hlc in source.iterate_table(HORIZONS):
        log_time_ms = state.heads[lane].log_time_ms
        require(
            0 < int(hlc) <= HLC_MAX and check_drift(int(hlc) - 1, log_time_ms) is None,
            f"the tombstone horizon {hlc} of {scope!r} is not a clock reading of the log, which is at {log_time_ms} ms",
            lane,
        )


def _check_table(source: VerificationSource, table: SideStateTable, state: LogState) -> Iterator[StepProgress]:
    where = f"the table oncelog_{table.name}"
    width = 1 + len(table.keys)
    for count, row in enumerate(source.iterate_sorted(table), 1):
        try:
            key = table.decode_key(row[1:width])
            table.decode_value(row[width:])
        except (msgspec.MsgspecError, ValueError) as error:
            raise InconsistencyError(f"{where} cannot be read at {row[:width]!r}: {error}", row[0]) from error
        head = state.heads.get(row[0])
        # A tenant's row exists before its first write.
        is_written = table.name == USAGE_TABLE or (head is not None and head.revision > 0)
        if not is_written or lane_of_scope(table.get_scope(key), state.settings.lanes) != row[0]:
            raise InconsistencyError(f"{where} has {row[:width]!r} in the wrong lane", row[0])
        if count % REPORT_ROWS == 0:
            yield StepProgress(table.name, count)
