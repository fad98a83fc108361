"""Queries on side state: everything that a read set requests, and the status of a key."""

from collections.abc import Mapping

from oncelog.core.read_set import ReadSet
from oncelog.core.values import KeyIdentity, LaneHead, Member, Record, Snapshot
from oncelog.storage.queries.records import load_heads
from oncelog.storage.queries.statement import QuerySteps, Statement, TableRows
from oncelog.storage.side_state import (
    CLIENTS,
    LEASES,
    PAST_MEMBERS,
    TABLES,
    get_mappings,
    lane_of_scope,
)
from oncelog.storage.store import (
    KeyStatus,
)


def load_tables(read_set: ReadSet, snapshot: Snapshot) -> QuerySteps[None]:
    """Load the side state that the read set requests into the snapshot."""
    lanes = snapshot.settings.lanes
    for table, keys in zip(TABLES, get_mappings(read_set), strict=True):
        if keys:
            setattr(snapshot, table.name, (yield TableRows(table, keys, lanes)))
    if read_set.oldest:
        yield from _load_oldest_members(read_set.oldest, snapshot)
    if read_set.past_members:
        snapshot.past_members = yield TableRows(PAST_MEMBERS, read_set.past_members, lanes)


def _load_oldest_members(counts: Mapping[str, int], snapshot: Snapshot) -> QuerySteps[None]:
    """Load the members who joined each stream first.

    In SQLite, LIMIT cannot refer to a column. Each statement therefore loads the streams with the same count, and most
    streams in a batch lose one member.
    """
    members, acknowledged = dict(snapshot.members), dict(snapshot.acknowledged)
    scopes_by_count: dict[int, list[str]] = {}
    for scope, count in counts.items():
        scopes_by_count.setdefault(count, []).append(scope)
    for count, scopes in scopes_by_count.items():
        lanes = [lane_of_scope(scope, snapshot.settings.lanes) for scope in scopes]
        for scope, member, joined, is_owner, sequence in (yield Statement("oldest_members", lanes, scopes, count)):
            members[scope, member] = Member(joined, bool(is_owner))
            if sequence is not None:
                acknowledged[scope, member] = sequence
    snapshot.members, snapshot.acknowledged = members, acknowledged


def load_key_status(identity: KeyIdentity, records: list[Record], lanes: int) -> QuerySteps[KeyStatus]:
    """Like `Store.get_key_status`, without the time. `records` are the records under the identity, oldest first."""
    record = records[-1] if records else None
    lane = lane_of_scope(identity[1], lanes) if record is None else record.lane
    leases = yield TableRows(LEASES, [identity], lanes)
    clients = (yield TableRows(CLIENTS, [identity[:3]], lanes)) if identity[2] else {}
    heads = yield from load_heads()
    return KeyStatus(
        record,
        leases.get(identity),
        heads.get(lane) or LaneHead(),
        positions=tuple(record.position for record in records),
        client_entry=clients.get(identity[:3]),
    )
