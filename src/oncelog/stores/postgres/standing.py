"""What a database knows about one identity, for `Log.lookup` and `oncelog show`."""

from typing import Any

from oncelog.core.values import KeyIdentity, LaneHead
from oncelog.stores.about import About
from oncelog.stores.key_hash import hash_of
from oncelog.stores.postgres import reading, tables
from oncelog.stores.postgres.statements import SQL
from oncelog.stores.protocol import Standing
from oncelog.stores.side_state import TABLES, lane_of_scope

_CLIENTS, _LEASES = (next(table for table in TABLES if table.name == name) for name in ("clients", "leases"))


async def standing_of(connection: Any, identity: KeyIdentity, about: About) -> Standing:
    """Its newest record, its lease and client, and the head to judge them by.

    A hash is only a hint; the record decides.
    """
    lanes = about.settings.lanes
    if not all(map(reading.can_be_stored, identity[:3])):
        return Standing(None, None, LaneHead())
    rows = await connection.fetch(SQL["standing"], hash_of(about.index_secret, identity))
    records = [record for record in map(reading.record_of, rows) if record.identity == identity]
    record = records[-1] if records else None
    lane = lane_of_scope(identity[1], lanes) if record is None else record.lane
    leases = await tables.load_table(connection, _LEASES, [identity], lanes)
    head = (await reading.heads(connection)).get(lane) or LaneHead()
    clients = await tables.load_table(connection, _CLIENTS, [identity[:3]], lanes) if identity[2] else {}
    positions, client_entry = tuple(one.position for one in records), clients.get(identity[:3])
    return Standing(record, leases.get(identity), head, positions=positions, client_entry=client_entry)
