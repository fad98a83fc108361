"""What became of an identity, and why, from inside one read transaction."""

import time
from collections.abc import Mapping
from typing import Any, Final

from msgspec import Struct

from oncelog.core.policy import Forget, Policy
from oncelog.core.proof import Block
from oncelog.core.values import KeyIdentity, LaneHead, Lease, Record
from oncelog.errors import CorruptError
from oncelog.stores.sqlite import tables
from oncelog.stores.sqlite.files import LogFile
from oncelog.stores.sqlite.index import KeyIndex, Lane, place_of
from oncelog.stores.sqlite.reading import heads, record_of
from oncelog.stores.sqlite.statements import SQL

_LEASES: Final = next(table for table in tables.TABLES if table.name == "leases")


class Shown(Struct, frozen=True):
    """The answer."""

    state: str
    """committed, forgotten, leased or unknown."""
    reason: str
    """In a sentence."""
    policy: str = ""
    record: Record | None = None
    block_hash: bytes = b""
    lease: Lease | None = None


def shown_at(connection: Any, file: LogFile, policies: Mapping[str, Policy], lane: int, position: int) -> Shown:
    """What stands at a place."""
    newest = (heads(connection).get(lane) or LaneHead()).position
    rows = []
    if 1 <= position <= newest:
        rows = connection.execute(SQL["records_at"], (f"[{place_of(lane, position)}]",)).fetchall()
    if not rows:
        return Shown("unknown", f"no record: lane {lane} ends at position {newest}")
    record = record_of(rows[0])
    policy = policies.get(record.policy)
    if policy is None:
        raise CorruptError(f"lane {lane}, position {position}: the policy {record.policy!r} is not declared")
    if record.key:
        shown = shown_under(connection, file, policy, record.scope, record.client, record.key)
        if shown.record == record:
            return shown
        reason = "a later write has committed under the same key, after this one was forgotten"
        return Shown("forgotten", reason, policy.name, record, _block_hash(connection, record))
    return _of_record(connection, policy, record)


def shown_under(connection: Any, file: LogFile, policy: Policy, scope: str, client: str, key: bytes) -> Shown:
    """What a policy knows by a key in a scope."""
    identity = (policy.name, scope, client if policy.client_sequence else "", key)
    record = _newest(connection, file, identity)
    if record is not None:
        return _of_record(connection, policy, record)
    lease: Lease | None = None
    if policy.leased:
        lease = tables.load_table(connection, _LEASES, [identity], file.settings.lanes).get(identity)
    if lease is not None:
        return _of_lease(policy, lease)
    reason = "no record: never committed here, or refused: a refused write leaves nothing behind"
    return Shown("unknown", reason, policy.name)


def _newest(connection: Any, file: LogFile, identity: KeyIdentity) -> Record | None:
    """The newest record of an identity. A hit in the index is only a hint; the record itself decides."""
    commits = connection.execute(SQL["state"]).fetchone()[0]
    lanes = {row[0]: Lane(row[1], row[8], row[9]) for row in connection.execute(SQL["lanes"]).fetchall()}
    index = KeyIndex(file.index_secret)
    index.catch_up(connection, commits, lanes)
    key_hash = index.hash_of(identity)
    places = index.find(connection, [key_hash]).get(key_hash, [])
    rows = connection.execute(SQL["records_at"], (str(sorted(places)),)).fetchall()
    matching = [record for record in map(record_of, rows) if _identity(record) == identity]
    return max(matching, key=lambda record: record.position, default=None)


def _identity(record: Record) -> KeyIdentity:
    return (record.policy, record.scope, record.client if record.client_sequence else "", record.key)


def _of_record(connection: Any, policy: Policy, record: Record) -> Shown:
    head = heads(connection).get(record.lane) or LaneHead()
    now_ms = max(head.log_time_ms, time.time_ns() // 1_000_000)
    block_hash = _block_hash(connection, record)
    if policy.retention.remembers(record.log_time_ms, now_ms, head.eviction_time_ms):
        until = "for ever" if policy.retention.forget is Forget.NEVER else "for now"
        reason = f"a retry gets this answer, and its key is remembered {until}"
        return Shown("committed", reason, policy.name, record, block_hash)
    reason = "it was committed, and its key has been forgotten since: a write under it would be a new one"
    return Shown("forgotten", reason, policy.name, record, block_hash)


def _of_lease(policy: Policy, lease: Lease) -> Shown:
    if lease.holder and lease.until_ms > time.time_ns() // 1_000_000:
        return Shown("leased", f"no record yet: {lease.holder!r} is working on it", policy.name, lease=lease)
    ended = "has ended" if lease.holder else "was given back"
    how = ", and the work failed" if lease.failed_fence else ""
    reason = f"no record: it was claimed, but the lease {ended}{how}; it can be claimed again"
    return Shown("unknown", reason, policy.name, lease=lease)


def _block_hash(connection: Any, record: Record) -> bytes:
    row = connection.execute(SQL["block"], (record.lane, record.height)).fetchone()
    return b"" if row is None else Block(*row).hash
