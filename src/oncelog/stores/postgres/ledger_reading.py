"""Reading side state, and blocks by height: what a ledger's readers ask for."""

from typing import Any

from oncelog.core.footprint import Footprint
from oncelog.core.proof import Block
from oncelog.core.values import LaneHead, Settings, Snapshot
from oncelog.stores.ledger_paging import scoped
from oncelog.stores.postgres import reading, tables
from oncelog.stores.postgres.statements import SQL
from oncelog.stores.postgres.timing import DatabaseTime
from oncelog.stores.protocol import EntityPage, RelationshipPage, RelationshipQuery, ScopedBlock, SideState
from oncelog.stores.side_state import behind_prefix, entity_of, lane_of_scope


async def blocks(connection: Any, lane: int, after: int, limit: int, scope: str) -> list[ScopedBlock]:
    """Blocks above a height, with the positions of a scope's records in each."""
    found = [Block(*row) for row in await connection.fetch(SQL["blocks"], lane, after, limit)]
    if not found or not reading.can_be_stored(scope):
        return scoped(found, [])
    bounds = (found[0].first_position - 1, found[-1].first_position + found[-1].count - 1)
    rows = await connection.fetch(SQL["scoped_positions"], lane, *bounds, scope)
    return scoped(found, [row[0] for row in rows])


async def side_state(connection: Any, needs: Footprint, settings: Settings, time: DatabaseTime) -> SideState:
    """What a footprint names. The heads come first: whoever is seen after them is judged no later than they say."""
    database_ms, _, confirmations, *kept = await connection.fetchrow(SQL["look_at_state"], time.boot)
    mark, jumped = time.proposed(database_ms, confirmations, (kept[0], kept[1]))
    known = await reading.heads(connection)
    snapshot = Snapshot(settings=settings, heads={lane: known.get(lane) or LaneHead() for lane in needs.lanes})
    await tables.load(connection, needs, snapshot)
    return SideState(snapshot, mark.time_ms if jumped is None else 0)


async def entities(
    connection: Any, bounds: tuple[str, str, str, int, int], settings: Settings, time: DatabaseTime
) -> EntityPage:
    """A page of a scope's entities: scope, prefix, after which key, how many, how many bytes."""
    scope, prefix, after, limit, bytes_max = bounds
    if not all(map(reading.can_be_stored, (scope, prefix, after))):
        return EntityPage([], has_more=False)
    lane = lane_of_scope(scope, settings.lanes)
    time_ms = (await side_state(connection, Footprint(lanes={lane}), settings, time)).time_of(lane)
    places = (after, prefix, behind_prefix(prefix))
    rows = await connection.fetch(SQL["entity_page"], lane, scope, *places, time_ms, limit + 1, bytes_max)
    found = [(row[0], entity_of(tuple(row)[1:])) for row in rows]
    return EntityPage.of(found, limit, bytes_max)


async def relationships(connection: Any, query: RelationshipQuery, settings: Settings) -> RelationshipPage:
    """A page of a scope's relationships."""
    named = (query.resource, query.relation, query.subject)
    if not all(map(reading.can_be_stored, (query.scope, *named, *query.after))):
        return RelationshipPage([], has_more=False)
    lane = lane_of_scope(query.scope, settings.lanes)
    more = {"resource": named[:1], "relation": named[:2], "subject": named[:2]}.get(query.found_by, ())
    after = (*query.after[:2], query.subject or query.after[2])
    statement = SQL[f"relationship_page{'_of_' * bool(query.found_by)}{query.found_by}"]
    rows = await connection.fetch(statement, lane, query.scope, *after, query.limit + 1, *more)
    return RelationshipPage([tuple(row) for row in rows[: query.limit]], len(rows) > query.limit)
