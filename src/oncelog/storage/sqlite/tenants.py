"""Tenants of a log in a file: their quotas, their usage, and the bytes that erasures return. Inside a transaction."""

from collections.abc import Mapping, Sequence
from typing import Any

from oncelog.core.tenants import Tenant, Usage
from oncelog.storage.sqlite.key_index.index import decode_place, encode_place
from oncelog.storage.sqlite.record_queries import load_heads
from oncelog.storage.sqlite.statements import SQL
from oncelog.storage.tenants import (
    COUNT_PAGE_ROWS,
    USAGE_VERSION,
    CountStart,
    ErasedRow,
    SizeRow,
    UsageCount,
    compute_usage_after,
    decode_size_row,
    decode_tenants,
    list_tenants,
)


def load_count_start(connection: Any) -> CountStart:
    """How the log stands, for those who begin to count."""
    text, version = connection.execute(SQL["tenants"]).fetchone()
    erasures = connection.execute(SQL["state"]).fetchone()[1]
    return CountStart(text, erasures, {lane: head.position for lane, head in load_heads(connection).items()}, version)


def load_usage(connection: Any) -> list[tuple[Tenant, Usage]]:
    """What each tenant has, by prefix."""
    text = connection.execute(SQL["tenants"]).fetchone()[0]
    known = {row[0]: Usage(*row[1:]) for row in connection.execute(SQL["usage"])}
    return [(tenant, known.get(tenant.prefix, Usage())) for tenant in list_tenants(text)]


def load_sizes(connection: Any, lane: int, after: int, upto: int) -> list[SizeRow]:
    """A page of what records have, in the order of their places."""
    bounds = (encode_place(lane, after), encode_place(lane, upto), COUNT_PAGE_ROWS)
    return [decode_size_row(row) for row in connection.execute(SQL["record_sizes"], bounds)]


def replace_tenants(connection: Any, text: str | None, count: UsageCount, start: CountStart, *, is_last: bool) -> bool:
    """Counts what has come since, and keeps them. False if the log is not as it was when the counting began."""
    now = load_count_start(connection)
    reached: Mapping[int, int] = start.positions
    if (now.text, now.version, now.erasures) != (start.text, start.version, start.erasures):
        if (now.text, now.version) != (start.text, start.version) or not is_last:
            return False
        count.reset()
        reached = {}
    for lane, newest in now.positions.items() if count.is_needed else ():
        after = reached.get(lane, 0)
        while rows := load_sizes(connection, lane, after, newest):
            count.add(rows)
            after = decode_place(rows[-1][0])[1]
    if count.is_needed:
        count.add_state(connection.execute(SQL["state_sizes"]))
        count.add_members(connection.execute(SQL["member_sizes"]))
    connection.execute(SQL["set_tenants"], (text, USAGE_VERSION))
    connection.executemany(SQL["forget_usage"], [(prefix,) for prefix in count.removed_prefixes])
    saved = [(prefix, tenant_usage.bytes, tenant_usage.records) for prefix, tenant_usage in count.usage.items()]
    connection.executemany(SQL["begin_usage"], saved)
    return True


def release_usage(connection: Any, erased: Sequence[ErasedRow]) -> None:
    """Bodies are being erased: their tenants have less."""
    tenants = decode_tenants(connection.execute(SQL["tenants"]).fetchone()[0])
    if tenants is None:
        return
    known = {row[0]: Usage(*row[1:]) for row in connection.execute(SQL["usage"])}
    left = compute_usage_after(known, tenants, erased)
    connection.executemany(SQL["set_bytes"], [(tenant_usage.bytes, prefix) for prefix, tenant_usage in left.items()])
