"""Queries on side state: what a read set names, and listings of entities, relationships, rows and members."""

from collections.abc import Callable, Mapping
from typing import Any

from oncelog.core.merge import decode_row
from oncelog.core.read_set import ReadSet
from oncelog.core.values import KeyIdentity, LaneHead, Record, Settings, Snapshot
from oncelog.storage.queries.records import load_heads
from oncelog.storage.queries.statement import PagedStatement, QuerySteps, Statement, TableRows
from oncelog.storage.side_state import (
    CLIENTS,
    LEASES,
    PAST_MEMBERS,
    TABLES,
    add_oldest_members,
    compute_prefix_end,
    decode_entity,
    get_mappings,
    lane_of_scope,
)
from oncelog.storage.store import (
    EntityPage,
    KeyStatus,
    MemberChange,
    MemberCursor,
    MemberPage,
    Membership,
    MembershipPage,
    RelationshipPage,
    RelationshipQuery,
    RowPage,
    SideState,
    StreamMember,
)

ProposeTime = Callable[[], QuerySteps[int]]
"""Returns the time at which a write would be decided now; 0 while the clock is in doubt."""


def load_tables(read_set: ReadSet, snapshot: Snapshot) -> QuerySteps[None]:
    """Fill the snapshot with the side state that the read set names."""
    lanes = snapshot.settings.lanes
    for table, keys in zip(TABLES, get_mappings(read_set), strict=True):
        if keys:
            setattr(snapshot, table.name, (yield TableRows(table, keys, lanes)))
    if read_set.oldest:
        yield from _load_oldest_members(read_set.oldest, snapshot)
    if read_set.past_members:
        snapshot.past_members = yield TableRows(PAST_MEMBERS, read_set.past_members, lanes)


def _load_oldest_members(counts: Mapping[str, int], snapshot: Snapshot) -> QuerySteps[None]:
    """Add the members of some streams that joined first.

    One statement for all streams with the same count, because LIMIT cannot refer to a column on SQLite. Most streams of
    a batch lose one member.
    """
    scopes_by_count: dict[int, list[str]] = {}
    for scope, count in counts.items():
        scopes_by_count.setdefault(count, []).append(scope)
    for count, scopes in scopes_by_count.items():
        lanes = [lane_of_scope(scope, snapshot.settings.lanes) for scope in scopes]
        add_oldest_members(snapshot, (yield Statement("oldest_members", lanes, scopes, count)))


def load_side_state(read_set: ReadSet, settings: Settings, propose_time_ms: ProposeTime) -> QuerySteps[SideState]:
    """As `Store.side_state`. The heads come first: a row that is seen after them is judged no later than they say."""
    time_ms = yield from propose_time_ms()
    heads = yield from load_heads()
    snapshot = Snapshot(settings=settings, heads={lane: heads.get(lane) or LaneHead() for lane in read_set.lanes})
    yield from load_tables(read_set, snapshot)
    return SideState(snapshot, time_ms)


def load_key_status(identity: KeyIdentity, records: list[Record], lanes: int) -> QuerySteps[KeyStatus]:
    """As `Store.get_key_status`, but for the time. `records` are those under the identity, oldest first."""
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


# --- listings


def list_entities(
    scope: str, prefix: str, after: str, limit: int, bytes_max: int, settings: Settings, propose_time_ms: ProposeTime
) -> QuerySteps[EntityPage]:
    """As `Store.entities`."""
    lane = lane_of_scope(scope, settings.lanes)
    state = yield from load_side_state(ReadSet(lanes={lane}), settings, propose_time_ms)
    bounds = (lane, scope, after, prefix, compute_prefix_end(prefix), state.get_time_ms(lane))
    rows = yield PagedStatement("entity_page", *bounds, size_column=1, limit=limit, bytes_max=bytes_max)
    return EntityPage.from_entities([(key, decode_entity(entity)) for key, *entity in rows], limit, bytes_max)


def list_rows(
    scope: str, table: str, after: tuple[str, str], limit: int, bytes_max: int, settings: Settings
) -> QuerySteps[RowPage]:
    """As `Store.rows`."""
    if table and after[0] != table:
        after = (table, "")
    statement = "row_page_of_table" if table else "row_page"
    bounds = (lane_of_scope(scope, settings.lanes), scope, *after)
    rows = yield PagedStatement(statement, *bounds, size_column=2, limit=limit, bytes_max=bytes_max)
    sizes = [len(state) for _, _, state in rows]
    return RowPage.from_rows(
        [(name, row_id, decode_row(state)) for name, row_id, state in rows], sizes, limit, bytes_max
    )


def list_relationships(query: RelationshipQuery, settings: Settings) -> QuerySteps[RelationshipPage]:
    """As `Store.relationships`."""
    field = query.search_field
    named: tuple[Any, ...] = {"resource": (query.resource,), "": ()}.get(field, (query.resource, query.relation))
    after = (*query.after[:2], query.subject or query.after[2])
    lane = lane_of_scope(query.scope, settings.lanes)
    statement = f"relationship_page_of_{field}" if field else "relationship_page"
    rows = yield Statement(statement, lane, query.scope, *after, query.limit + 1, *named)
    return RelationshipPage([tuple(row) for row in rows[: query.limit]], len(rows) > query.limit)


def list_members(scope: str, after: str, limit: int, settings: Settings) -> QuerySteps[MemberPage]:
    """As `Store.members`."""
    rows = yield Statement("member_page", lane_of_scope(scope, settings.lanes), scope, after, limit + 1)
    return MemberPage.from_members([StreamMember.from_row(*row) for row in rows], limit)


def list_memberships(member: str, prefix: str, after: str, limit: int) -> QuerySteps[MembershipPage]:
    """As `Store.memberships`."""
    rows = yield Statement("membership_page", member, after, prefix, compute_prefix_end(prefix), limit + 1)
    return MembershipPage.from_memberships([Membership.from_row(*row) for row in rows], limit)


def list_member_changes(lane: int, after: MemberCursor, limit: int) -> QuerySteps[list[MemberChange]]:
    """As `Store.member_changes`."""
    rows = yield Statement("member_changes", lane, *after, limit)
    return [MemberChange.from_row(*row) for row in rows]
