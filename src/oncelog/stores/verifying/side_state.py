"""What a log knows besides records: members, leases, consumers, rates, policies."""

from collections.abc import Iterable, Iterator, Set

import msgspec

from oncelog.core.hlc import HLC_MAX, drift_of
from oncelog.core.policy import Policy
from oncelog.core.rates import FULL_AFTER_US_MAX
from oncelog.stores.side_state import KEPT, USAGE, Table, lane_of_scope
from oncelog.stores.verifying.findings import ContradictionError, Progress
from oncelog.stores.verifying.indexes import REPORT_ROWS, in_order
from oncelog.stores.verifying.source import Rules, Source


def declared(declarations: Iterable[tuple[str, str]]) -> dict[str, Policy]:
    """The policies, by name."""
    policies = {}
    for name, declaration in declarations:
        try:
            policy = msgspec.json.decode(declaration, type=Policy)
        except (msgspec.MsgspecError, UnicodeError) as error:
            raise ContradictionError(f"the declaration of the policy {name!r} cannot be read: {error}") from error
        if policy.name != name:
            raise ContradictionError(f"the policy {name!r} is declared with the name {policy.name!r}")
        policies[name] = policy
    return policies


def check_side_state(source: Source, rules: Rules) -> Iterator[Progress]:
    """Everything else can be read, is in its lane, and is not beyond its stream or lane."""
    lanes = {lane for lane, head in source.heads().items() if head.revision}
    for table in KEPT:
        yield from _check_table(source, table, rules, lanes)
    beyond = source.first("acknowledged_beyond")
    if beyond is not None:
        lane, scope, member, sequence, newest = beyond
        raise ContradictionError(f"{member!r} has acknowledged {sequence} of {scope!r}, which ends at {newest}", lane)
    _check_members(source)
    beyond = source.first("lease_beyond")
    if beyond is not None:
        lane, policy, scope, key_hex, fence, newest = beyond
        raise ContradictionError(
            f"the lease of {policy!r} {scope!r} {key_hex!r} has fence {fence}, and the lane gave out {newest} at most",
            lane,
        )
    beyond = source.first("rate_beyond", FULL_AFTER_US_MAX)
    if beyond is not None:
        lane, scope, actor, full_at_us, log_time_ms = beyond
        where = f"in {scope!r} " if scope else ""
        raise ContradictionError(
            f"the rate of {actor!r} {where}is whole again at {full_at_us} µs, which no rate allows at {log_time_ms} ms",
            lane,
        )
    _check_horizons(source)
    below = source.first("usage_below")
    if below is not None:
        raise ContradictionError(f"the tenant {below[0]!r} has less than nothing")
    for consumer in source.consumers():
        if consumer.cursor < 0 or consumer.lag < 0:
            order = f"the stream {consumer.scope!r}" if consumer.scope else "lane 0"
            raise ContradictionError(
                f"the consumer {consumer.name!r} is at {consumer.cursor}, and {order} ends at "
                f"{consumer.cursor + consumer.lag}"
            )


def _check_horizons(source: Source) -> None:
    """A tombstone horizon is a clock reading just above a committed DELETE, which was not far ahead of log time."""
    table = next(table for table in KEPT if table.name == "horizons")
    heads = source.heads()
    for lane, scope, hlc in source.rows_of(table):
        if not 0 < int(hlc) <= HLC_MAX or drift_of(int(hlc) - 1, heads[lane].log_time_ms) is not None:
            raise ContradictionError(
                f"the tombstone horizon {hlc} of {scope!r} is not a clock reading of the log, which is at "
                f"{heads[lane].log_time_ms} ms",
                lane,
            )


def _check_members(source: Source) -> None:
    """Whoever is a member is one of a stream that has been opened, and changes of members are those of their lane."""
    found = source.first("member_without_stream")
    if found is not None:
        lane, scope, member = found
        raise ContradictionError(
            f"{member!r} is or was a member of {scope!r}, which is not in the table of streams", lane
        )
    found = source.first("stream_of_nobody")
    if found is not None:
        lane, scope = found
        raise ContradictionError(f"the stream {scope!r} has no records, and never had a member", lane)
    found = source.first("bad_roster")
    if found is not None:
        lane, scope, members, owners, counted, named = found
        raise ContradictionError(
            f"the stream {scope!r} has {members} members and {owners} owners, and its roster counts {counted} and "
            f"{named}, or the order of joining is inconsistent",
            lane,
        )
    found = source.first("member_change_beyond")
    if found is not None:
        lane, scope, member, revision, newest = found
        raise ContradictionError(
            f"{member!r} of {scope!r} has changed at revision {revision}, and the lane is at {newest}", lane
        )


def _check_table(source: Source, table: Table, rules: Rules, lanes: Set[int]) -> Iterator[Progress]:
    where = f"the table oncelog_{table.name}"
    width = 1 + len(table.keys)
    for count, row in enumerate(in_order(source.rows_of(table), width, where), 1):
        try:
            key = table.key_of(row[1:width])
            table.value_of(row[width:])
        except (msgspec.MsgspecError, ValueError) as error:
            raise ContradictionError(f"{where} cannot be read at {row[:width]!r}: {error}", row[0]) from error
        is_written = row[0] in lanes or table.name == USAGE  # a tenant's row is there before it has written anything
        if not is_written or lane_of_scope(table.scope(key), rules.settings.lanes) != row[0]:
            raise ContradictionError(f"{where} has {row[:width]!r} in a lane where it does not belong", row[0])
        if count % REPORT_ROWS == 0:
            yield Progress(table.name, count)
