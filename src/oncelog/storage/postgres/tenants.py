"""Tenants of a log in a database: their quotas, their usage, and the bytes that erasures return."""

from collections.abc import Mapping, Sequence
from typing import Any

from oncelog.core.tenants import Tenant, Usage
from oncelog.storage.postgres.record_queries import load_heads
from oncelog.storage.postgres.side_state_tables import to_columns
from oncelog.storage.postgres.statements import SQL
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
    find_affected_tenants,
    list_tenants,
)


async def load_count_start(connection: Any) -> CountStart:
    """How the log stands, for those who begin to count. The heads come last: what is erased before them is known."""
    text, version = tuple(await connection.fetchrow(SQL["tenants"]))
    erasures = await connection.fetchval(SQL["erasures"])
    return CountStart(
        text, erasures, {lane: head.position for lane, head in (await load_heads(connection)).items()}, version
    )


async def load_usage(connection: Any) -> list[tuple[Tenant, Usage]]:
    """What each tenant has, by prefix."""
    text = await connection.fetchval(SQL["tenants"])
    known = {row[0]: Usage(*tuple(row)[1:]) for row in await connection.fetch(SQL["usage"])}
    return [(tenant, known.get(tenant.prefix, Usage())) for tenant in list_tenants(text)]


async def load_sizes(connection: Any, lane: int, after: int, upto: int) -> list[SizeRow]:
    """A page of what records have, in the order of their positions."""
    rows = await connection.fetch(SQL["record_sizes"], lane, after, upto, COUNT_PAGE_ROWS)
    return [decode_size_row(tuple(row)) for row in rows]


async def replace_tenants(
    connection: Any, text: str | None, count: UsageCount, start: CountStart, *, is_last: bool
) -> bool:
    """Counts what has come since, and keeps them. False if the log is not as it was when the counting began.

    All lanes must be locked: whoever commits behind them counts for the new ones.
    """
    now = await load_count_start(connection)
    if now.is_counted(text):
        return True  # done before: nobody could tell whether that had been committed
    reached: Mapping[int, int] = start.positions
    if (now.text, now.version, now.erasures) != (start.text, start.version, start.erasures):
        if (now.text, now.version) != (start.text, start.version) or not is_last:
            return False
        count.reset()
        reached = {}
    for lane, newest in now.positions.items() if count.is_needed else ():
        after = reached.get(lane, 0)
        while rows := await load_sizes(connection, lane, after, newest):
            count.add(rows)
            after = rows[-1][0]
    if count.is_needed:
        count.add_state([(row[0], row[1], row[2], row[3]) for row in await connection.fetch(SQL["state_sizes"])])
        count.add_members([(row[0], row[1], row[2]) for row in await connection.fetch(SQL["member_sizes"])])
    await connection.execute(SQL["set_tenants"], text, USAGE_VERSION)
    await connection.execute(SQL["forget_usage"], list(count.removed_prefixes))
    saved = [(prefix, tenant_usage.bytes, tenant_usage.records) for prefix, tenant_usage in count.usage.items()]
    if saved:
        await connection.execute(SQL["begin_usage"], *to_columns(saved))
    return True


async def release_usage(connection: Any, erased: Sequence[ErasedRow]) -> None:
    """Bodies are being erased, behind the lock of their lane: their tenants have less."""
    tenants = decode_tenants(await connection.fetchval(SQL["tenants"]))
    touched = set() if tenants is None else find_affected_tenants(tenants, erased)
    if tenants is None or not touched:
        return
    rows = await connection.fetch(SQL["lock_usage"], sorted(touched))
    left = compute_usage_after({row[0]: Usage(*tuple(row)[1:]) for row in rows}, tenants, erased)
    if left:
        await connection.execute(
            SQL["set_bytes"], *to_columns([(prefix, tenant_usage.bytes) for prefix, tenant_usage in left.items()])
        )
