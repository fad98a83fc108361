"""Status of one identity in a database, for `Log.lookup` and `oncelog show`."""

from typing import Any

from oncelog.core.values import KeyIdentity, LaneHead
from oncelog.storage.key_hash import hash_identity
from oncelog.storage.metadata import LogMetadata
from oncelog.storage.postgres import record_queries, side_state_tables
from oncelog.storage.postgres.statements import SQL
from oncelog.storage.side_state import TABLES, lane_of_scope
from oncelog.storage.store import KeyStatus

_CLIENTS, _LEASES = (next(table for table in TABLES if table.name == name) for name in ("clients", "leases"))


async def load_key_status(connection: Any, identity: KeyIdentity, metadata: LogMetadata) -> KeyStatus:
    """Its newest record, its lease and client, and the head to judge them by.

    A hash is only a hint; the record decides.
    """
    lanes = metadata.settings.lanes
    if not all(map(record_queries.is_storable, identity[:3])):
        return KeyStatus(None, None, LaneHead())
    rows = await connection.fetch(SQL["standing"], hash_identity(metadata.index_secret, identity))
    records = [record for record in map(record_queries.decode_record, rows) if record.identity == identity]
    record = records[-1] if records else None
    lane = lane_of_scope(identity[1], lanes) if record is None else record.lane
    leases = await side_state_tables.load_table(connection, _LEASES, [identity], lanes)
    head = (await record_queries.load_heads(connection)).get(lane) or LaneHead()
    clients = await side_state_tables.load_table(connection, _CLIENTS, [identity[:3]], lanes) if identity[2] else {}
    positions, client_entry = tuple(found_record.position for found_record in records), clients.get(identity[:3])
    return KeyStatus(record, leases.get(identity), head, positions=positions, client_entry=client_entry)
