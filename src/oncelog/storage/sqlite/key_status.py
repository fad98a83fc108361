"""Status of one identity in a file, for `Log.lookup` and `oncelog show`."""

from collections.abc import Mapping
from typing import Any

from oncelog.core.values import KeyIdentity, LaneHead, Record
from oncelog.storage.side_state import TABLES, lane_of_scope
from oncelog.storage.sqlite import side_state_tables
from oncelog.storage.sqlite.key_index.index import KeyIndex
from oncelog.storage.sqlite.record_queries import decode_record
from oncelog.storage.sqlite.statements import SQL
from oncelog.storage.store import KeyStatus

_CLIENTS, _LEASES = (next(table for table in TABLES if table.name == name) for name in ("clients", "leases"))


def load_key_status(
    connection: Any, index: KeyIndex, identity: KeyIdentity, heads: Mapping[int, LaneHead], lanes: int
) -> KeyStatus:
    """Its newest record, its lease and client, and the head to judge them by. The index must have caught up."""
    records = _load_records(connection, index, identity)
    record = records[-1] if records else None
    leases = side_state_tables.load_table(connection, _LEASES, [identity], lanes)
    lane = lane_of_scope(identity[1], lanes) if record is None else record.lane
    positions = tuple(found_record.position for found_record in records)
    head = heads.get(lane) or LaneHead()
    clients = side_state_tables.load_table(connection, _CLIENTS, [identity[:3]], lanes) if identity[2] else {}
    client_entry = clients.get(identity[:3])
    return KeyStatus(record, leases.get(identity), head, positions=positions, client_entry=client_entry)


def _load_records(connection: Any, index: KeyIndex, identity: KeyIdentity) -> list[Record]:
    """Oldest first. A hit in the index is only a hint; the record itself decides."""
    key_hash = index.hash_identity(identity)
    places = index.find_places(connection, [key_hash]).get(key_hash, [])
    rows = connection.execute(SQL["records_at"], (str(sorted(set(places))),)).fetchall()
    return [record for record in map(decode_record, rows) if record.identity == identity]
