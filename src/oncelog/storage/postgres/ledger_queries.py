"""Queries for side state, and for blocks by height."""

from typing import Any

from oncelog.core.proof import Block
from oncelog.core.read_set import ReadSet
from oncelog.core.values import LaneHead, Settings, Snapshot
from oncelog.storage.ledger_pages import group_positions
from oncelog.storage.postgres import record_queries, side_state_tables
from oncelog.storage.postgres.database_clock import DatabaseClock
from oncelog.storage.postgres.statements import SQL
from oncelog.storage.side_state import compute_prefix_end, decode_entity, lane_of_scope
from oncelog.storage.store import EntityPage, RelationshipPage, RelationshipQuery, ScopedBlock, SideState


async def list_blocks(connection: Any, lane: int, after: int, limit: int, scope: str) -> list[ScopedBlock]:
    """Blocks above a height, with the positions of a scope's records in each."""
    found = [Block(*row) for row in await connection.fetch(SQL["blocks"], lane, after, limit)]
    if not found or not record_queries.is_storable(scope):
        return group_positions(found, [])
    bounds = (found[0].first_position - 1, found[-1].first_position + found[-1].count - 1)
    rows = await connection.fetch(SQL["scoped_positions"], lane, *bounds, scope)
    return group_positions(found, [row[0] for row in rows])


async def load_side_state(connection: Any, read_set: ReadSet, settings: Settings, clock: DatabaseClock) -> SideState:
    """Load the entries of a read set. The heads are read first, so that no entry is newer than they are."""
    database_ms, _, confirmations, *stored_clock = await connection.fetchrow(SQL["look_at_state"], clock.boot)
    mark, jumped = clock.propose(database_ms, confirmations, (stored_clock[0], stored_clock[1]))
    known = await record_queries.load_heads(connection)
    snapshot = Snapshot(settings=settings, heads={lane: known.get(lane) or LaneHead() for lane in read_set.lanes})
    await side_state_tables.load_tables(connection, read_set, snapshot)
    return SideState(snapshot, mark.time_ms if jumped is None else 0)


async def list_entities(
    connection: Any, bounds: tuple[str, str, str, int, int], settings: Settings, clock: DatabaseClock
) -> EntityPage:
    """A page of a scope's entities: scope, prefix, after which key, how many, how many bytes."""
    scope, prefix, after, limit, bytes_max = bounds
    if not all(map(record_queries.is_storable, (scope, prefix, after))):
        return EntityPage([], has_more=False)
    lane = lane_of_scope(scope, settings.lanes)
    time_ms = (await load_side_state(connection, ReadSet(lanes={lane}), settings, clock)).get_time_ms(lane)
    places = (after, prefix, compute_prefix_end(prefix))
    rows = await connection.fetch(SQL["entity_page"], lane, scope, *places, time_ms, limit + 1, bytes_max)
    found = [(row[0], decode_entity(tuple(row)[1:])) for row in rows]
    return EntityPage.from_entities(found, limit, bytes_max)


async def list_relationships(connection: Any, query: RelationshipQuery, settings: Settings) -> RelationshipPage:
    """A page of a scope's relationships."""
    named = (query.resource, query.relation, query.subject)
    if not all(map(record_queries.is_storable, (query.scope, *named, *query.after))):
        return RelationshipPage([], has_more=False)
    lane = lane_of_scope(query.scope, settings.lanes)
    more = {"resource": named[:1], "relation": named[:2], "subject": named[:2]}.get(query.search_field, ())
    after = (*query.after[:2], query.subject or query.after[2])
    statement = SQL[f"relationship_page{'_of_' * bool(query.search_field)}{query.search_field}"]
    rows = await connection.fetch(statement, lane, query.scope, *after, query.limit + 1, *more)
    return RelationshipPage([tuple(row) for row in rows[: query.limit]], len(rows) > query.limit)
