"""Checks side state that records do not determine: members, leases, consumers, rates, policies."""

from collections.abc import Iterable, Iterator, Set

import msgspec

from oncelog.core.hlc import HLC_MAX, check_drift
from oncelog.core.policy import Policy
from oncelog.core.rules.rates import FULL_AFTER_US_MAX
from oncelog.storage.queries.records import list_consumers
from oncelog.storage.side_state import HORIZONS, STORED_TABLES, USAGE_TABLE, SideStateTable, lane_of_scope
from oncelog.storage.verify.findings import InconsistencyError, StepProgress
from oncelog.storage.verify.indexes import REPORT_ROWS, check_order
from oncelog.storage.verify.source import LogRules, VerificationSource


def decode_policies(declarations: Iterable[tuple[str, str]]) -> dict[str, Policy]:
    """The policies, by name."""
    policies = {}
    for name, declaration in declarations:
        try:
            policy = msgspec.json.decode(declaration, type=Policy)
        except (msgspec.MsgspecError, UnicodeError) as error:
            raise InconsistencyError(f"the declaration of the policy {name!r} cannot be read: {error}") from error
        if policy.name != name:
            raise InconsistencyError(f"the policy {name!r} is declared with the name {policy.name!r}")
        policies[name] = policy
    return policies


def check_side_state(source: VerificationSource, rules: LogRules) -> Iterator[StepProgress]:
    """Everything else can be read, is in its lane, and is not beyond its stream or lane."""
    lanes = {lane for lane, head in source.load_heads().items() if head.revision}
    for table in STORED_TABLES:
        yield from _check_table(source, table, rules, lanes)
    beyond = source.fetch_first("acknowledged_beyond")
    if beyond is not None:
        lane, scope, member, sequence, newest = beyond
        raise InconsistencyError(f"{member!r} has acknowledged {sequence} of {scope!r}, which ends at {newest}", lane)
    _check_members(source)
    beyond = source.fetch_first("lease_beyond")
    if beyond is not None:
        lane, policy, scope, key_hex, fence, newest = beyond
        raise InconsistencyError(
            f"the lease of {policy!r} {scope!r} {key_hex!r} has fence {fence}, and the lane gave out {newest} at most",
            lane,
        )
    beyond = source.fetch_first("rate_beyond", FULL_AFTER_US_MAX)
    if beyond is not None:
        lane, scope, actor, full_at_us, log_time_ms = beyond
        where = f"in {scope!r} " if scope else ""
        raise InconsistencyError(
            f"the rate of {actor!r} {where}is whole again at {full_at_us} µs, which no rate allows at {log_time_ms} ms",
            lane,
        )
    _check_horizons(source)
    below = source.fetch_first("usage_below")
    if below is not None:
        raise InconsistencyError(f"the tenant {below[0]!r} has less than nothing")
    for consumer in source.run_query(list_consumers):
        if consumer.cursor < 0 or consumer.lag < 0:
            order = f"the stream {consumer.scope!r}" if consumer.scope else "lane 0"
            raise InconsistencyError(
                f"the consumer {consumer.name!r} is at {consumer.cursor}, and {order} ends at "
                f"{consumer.cursor + consumer.lag}"
            )


def _check_horizons(source: VerificationSource) -> None:
    """A tombstone horizon is a clock reading just above a committed DELETE, which was not far ahead of log time."""
    heads = source.load_heads()
    for lane, scope, hlc in source.iterate_table(HORIZONS):
        if not 0 < int(hlc) <= HLC_MAX or check_drift(int(hlc) - 1, heads[lane].log_time_ms) is not None:
            raise InconsistencyError(
                f"the tombstone horizon {hlc} of {scope!r} is not a clock reading of the log, which is at "
                f"{heads[lane].log_time_ms} ms",
                lane,
            )


def _check_members(source: VerificationSource) -> None:
    """Whoever is a member is one of a stream that has been opened, and changes of members are those of their lane."""
    found = source.fetch_first("member_without_stream")
    if found is not None:
        lane, scope, member = found
        raise InconsistencyError(
            f"{member!r} is or was a member of {scope!r}, which is not in the table of streams", lane
        )
    found = source.fetch_first("stream_of_nobody")
    if found is not None:
        lane, scope = found
        raise InconsistencyError(f"the stream {scope!r} has no records, and never had a member", lane)
    found = source.fetch_first("bad_roster")
    if found is not None:
        lane, scope, members, owners, counted, named = found
        raise InconsistencyError(
            f"the stream {scope!r} has {members} members and {owners} owners, and its roster counts {counted} and "
            f"{named}, or the order of joining is inconsistent",
            lane,
        )
    found = source.fetch_first("member_change_beyond")
    if found is not None:
        lane, scope, member, revision, newest = found
        raise InconsistencyError(
            f"{member!r} of {scope!r} has changed at revision {revision}, and the lane is at {newest}", lane
        )


def _check_table(
    source: VerificationSource, table: SideStateTable, rules: LogRules, lanes: Set[int]
) -> Iterator[StepProgress]:
    where = f"the table oncelog_{table.name}"
    width = 1 + len(table.keys)
    for count, row in enumerate(check_order(source.iterate_table(table), width, where), 1):
        try:
            key = table.decode_key(row[1:width])
            table.decode_value(row[width:])
        except (msgspec.MsgspecError, ValueError) as error:
            raise InconsistencyError(f"{where} cannot be read at {row[:width]!r}: {error}", row[0]) from error
        is_written = (
            row[0] in lanes or table.name == USAGE_TABLE
        )  # a tenant's row is there before it has written anything
        if not is_written or lane_of_scope(table.get_scope(key), rules.settings.lanes) != row[0]:
            raise InconsistencyError(f"{where} has {row[:width]!r} in a lane where it does not belong", row[0])
        if count % REPORT_ROWS == 0:
            yield StepProgress(table.name, count)
