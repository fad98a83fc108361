"""Queries for side state, and for blocks by height, inside a transaction."""

from collections.abc import Callable
from typing import Any

from oncelog.core.operations import Entity
from oncelog.core.proof import Block
from oncelog.core.read_set import ReadSet
from oncelog.core.values import LaneHead, Settings, Snapshot
from oncelog.storage.clock import ClockMark
from oncelog.storage.ledger_pages import group_positions
from oncelog.storage.side_state import compute_prefix_end, decode_entity, lane_of_scope
from oncelog.storage.sqlite import side_state_tables
from oncelog.storage.sqlite.key_index.index import encode_place
from oncelog.storage.sqlite.record_queries import load_heads
from oncelog.storage.sqlite.statements import SQL
from oncelog.storage.store import EntityPage, RelationshipPage, RelationshipQuery, ScopedBlock, SideState

GetTime = Callable[[ClockMark], int]
"""The time at which a write would be decided, from the clock of the newest commit."""


def list_blocks(connection: Any, lane: int, after: int, limit: int, scope: str) -> list[ScopedBlock]:
    """Blocks above a height, with the positions of a scope's records in each."""
    found = [Block(*row) for row in connection.execute(SQL["blocks"], (lane, after, limit)).fetchall()]
    if not found:
        return []
    last = found[-1]
    bounds = (
        encode_place(lane, found[0].first_position - 1),
        encode_place(lane, last.first_position + last.count - 1),
        scope,
    )
    positions = [row[0] for row in connection.execute(SQL["scoped_positions"], bounds).fetchall()]
    return group_positions(found, positions)


def load_side_state(connection: Any, read_set: ReadSet, settings: Settings, get_time: GetTime) -> SideState:
    """Load the entries of a read set."""
    _, _, *clock = connection.execute(SQL["state"]).fetchone()
    known = load_heads(connection)
    snapshot = Snapshot(settings=settings, heads={lane: known.get(lane) or LaneHead() for lane in read_set.lanes})
    side_state_tables.load_tables(connection, read_set, snapshot)
    return SideState(snapshot, get_time(ClockMark(*clock)))


def list_entities(
    connection: Any, bounds: tuple[str, str, str, int, int], settings: Settings, get_time: GetTime
) -> EntityPage:
    """A page of a scope's entities: scope, prefix, after which key, how many, how many bytes."""
    scope, prefix, after, limit, bytes_max = bounds
    lane = lane_of_scope(scope, settings.lanes)
    time_ms = load_side_state(connection, ReadSet(lanes={lane}), settings, get_time).get_time_ms(lane)
    behind = compute_prefix_end(prefix)
    if behind:
        cursor = connection.execute(SQL["entity_page"], (lane, scope, after, prefix, behind, time_ms))
    else:
        cursor = connection.execute(SQL["entity_page_to_the_end"], (lane, scope, after, prefix, time_ms))
    found: list[tuple[str, Entity]] = []
    size = 0
    for key, *columns in cursor:  # one by one: values can be long, and the next be longer than all before
        found.append((key, decode_entity(columns)))
        size += len(columns[0])
        if len(found) > limit or (size > bytes_max and len(found) > 1):  # a first one is given, however long
            break
    cursor.close()
    return EntityPage.from_entities(found, limit, bytes_max)


def list_relationships(connection: Any, query: RelationshipQuery, settings: Settings) -> RelationshipPage:
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
        SQL[f"relationship_page{'_of_' * bool(query.search_field)}{query.search_field}"], parameters
    ).fetchall()
    return RelationshipPage(rows[: query.limit], len(rows) > query.limit)
