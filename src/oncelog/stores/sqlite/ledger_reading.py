"""Reading side state, and blocks by height: what a ledger's readers ask for. All of it inside a transaction."""

from collections.abc import Callable
from typing import Any

from oncelog.core.footprint import Footprint
from oncelog.core.operations import Entity
from oncelog.core.proof import Block
from oncelog.core.values import LaneHead, Settings, Snapshot
from oncelog.stores.clock import ClockMark
from oncelog.stores.ledger_paging import scoped
from oncelog.stores.protocol import EntityPage, RelationshipPage, RelationshipQuery, ScopedBlock, SideState
from oncelog.stores.side_state import behind_prefix, entity_of, lane_of_scope
from oncelog.stores.sqlite import tables
from oncelog.stores.sqlite.index import place_of
from oncelog.stores.sqlite.reading import heads
from oncelog.stores.sqlite.statements import SQL

TimeOf = Callable[[ClockMark], int]
"""The time at which a write would be decided, from the clock of the newest commit."""


def blocks(connection: Any, lane: int, after: int, limit: int, scope: str) -> list[ScopedBlock]:
    """Blocks above a height, with the positions of a scope's records in each."""
    found = [Block(*row) for row in connection.execute(SQL["blocks"], (lane, after, limit)).fetchall()]
    if not found:
        return []
    last = found[-1]
    bounds = (
        place_of(lane, found[0].first_position - 1),
        place_of(lane, last.first_position + last.count - 1),
        scope,
    )
    positions = [row[0] for row in connection.execute(SQL["scoped_positions"], bounds).fetchall()]
    return scoped(found, positions)


def side_state(connection: Any, needs: Footprint, settings: Settings, time_of: TimeOf) -> SideState:
    """What a footprint names."""
    _, _, *clock = connection.execute(SQL["state"]).fetchone()
    known = heads(connection)
    snapshot = Snapshot(settings=settings, heads={lane: known.get(lane) or LaneHead() for lane in needs.lanes})
    tables.load(connection, needs, snapshot)
    return SideState(snapshot, time_of(ClockMark(*clock)))


def entities(
    connection: Any, bounds: tuple[str, str, str, int, int], settings: Settings, time_of: TimeOf
) -> EntityPage:
    """A page of a scope's entities: scope, prefix, after which key, how many, how many bytes."""
    scope, prefix, after, limit, bytes_max = bounds
    lane = lane_of_scope(scope, settings.lanes)
    time_ms = side_state(connection, Footprint(lanes={lane}), settings, time_of).time_of(lane)
    behind = behind_prefix(prefix)
    if behind:
        cursor = connection.execute(SQL["entity_page"], (lane, scope, after, prefix, behind, time_ms))
    else:
        cursor = connection.execute(SQL["entity_page_to_the_end"], (lane, scope, after, prefix, time_ms))
    found: list[tuple[str, Entity]] = []
    size = 0
    for key, *columns in cursor:  # one by one: values can be long, and the next be longer than all before
        found.append((key, entity_of(columns)))
        size += len(columns[0])
        if len(found) > limit or (size > bytes_max and len(found) > 1):  # a first one is given, however long
            break
    cursor.close()
    return EntityPage.of(found, limit, bytes_max)


def relationships(connection: Any, query: RelationshipQuery, settings: Settings) -> RelationshipPage:
    """A page of a scope's relationships."""
    after_resource, after_relation, after_subject = query.after
    parameters = {
        "lane": lane_of_scope(query.scope, settings.lanes),
        "scope": query.scope,
        "resource": query.resource,
        "relation": query.relation,
        "subject": query.subject,
        "after_resource": after_resource,
        "after_relation": after_relation,
        "after_subject": after_subject,
        "limit": query.limit + 1,
    }
    rows = connection.execute(
        SQL[f"relationship_page{'_of_' * bool(query.found_by)}{query.found_by}"], parameters
    ).fetchall()
    return RelationshipPage(rows[: query.limit], len(rows) > query.limit)
