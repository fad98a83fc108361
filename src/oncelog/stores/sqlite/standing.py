"""What a file knows about one identity, for `Log.lookup` and `oncelog show`."""

from collections.abc import Mapping
from typing import Any

from oncelog.core.values import KeyIdentity, LaneHead, Record
from oncelog.stores.protocol import Standing
from oncelog.stores.side_state import TABLES, lane_of_scope
from oncelog.stores.sqlite import tables
from oncelog.stores.sqlite.index import KeyIndex
from oncelog.stores.sqlite.reading import record_of
from oncelog.stores.sqlite.statements import SQL

_CLIENTS, _LEASES = (next(table for table in TABLES if table.name == name) for name in ("clients", "leases"))


def standing_of(
    connection: Any, index: KeyIndex, identity: KeyIdentity, heads: Mapping[int, LaneHead], lanes: int
) -> Standing:
    """Its newest record, its lease and client, and the head to judge them by. The index must have caught up."""
    records = _records(connection, index, identity)
    record = records[-1] if records else None
    leases = tables.load_table(connection, _LEASES, [identity], lanes)
    lane = lane_of_scope(identity[1], lanes) if record is None else record.lane
    positions = tuple(one.position for one in records)
    head = heads.get(lane) or LaneHead()
    clients = tables.load_table(connection, _CLIENTS, [identity[:3]], lanes) if identity[2] else {}
    client_entry = clients.get(identity[:3])
    return Standing(record, leases.get(identity), head, positions=positions, client_entry=client_entry)


def _records(connection: Any, index: KeyIndex, identity: KeyIdentity) -> list[Record]:
    """Oldest first. A hit in the index is only a hint; the record itself decides."""
    key_hash = index.hash_of(identity)
    places = index.find(connection, [key_hash]).get(key_hash, [])
    rows = connection.execute(SQL["records_at"], (str(sorted(set(places))),)).fetchall()
    return [record for record in map(record_of, rows) if record.identity == identity]
