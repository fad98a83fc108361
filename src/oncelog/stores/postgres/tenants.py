"""Tenants of a log in a database: who they are, what they have, and what they get back."""

from collections.abc import Mapping, Sequence
from typing import Any

from oncelog.core.tenants import Tenant, Usage
from oncelog.stores.postgres.reading import heads
from oncelog.stores.postgres.statements import SQL
from oncelog.stores.postgres.tables import columns_of
from oncelog.stores.tenants import (
    COUNT_ROWS,
    USAGE_VERSION,
    Count,
    ErasedRow,
    Seen,
    SizeRow,
    given_back,
    list_of,
    size_row,
    tenants_of,
    touched_by,
)


async def seen(connection: Any) -> Seen:
    """How the log stands, for those who begin to count. The heads come last: what is erased before them is known."""
    text, version = tuple(await connection.fetchrow(SQL["tenants"]))
    erasures = await connection.fetchval(SQL["erasures"])
    return Seen(text, erasures, {lane: head.position for lane, head in (await heads(connection)).items()}, version)


async def usage(connection: Any) -> list[tuple[Tenant, Usage]]:
    """What each tenant has, by prefix."""
    text = await connection.fetchval(SQL["tenants"])
    known = {row[0]: Usage(*tuple(row)[1:]) for row in await connection.fetch(SQL["usage"])}
    return [(tenant, known.get(tenant.prefix, Usage())) for tenant in list_of(text)]


async def sizes(connection: Any, lane: int, after: int, upto: int) -> list[SizeRow]:
    """A page of what records have, in the order of their positions."""
    rows = await connection.fetch(SQL["record_sizes"], lane, after, upto, COUNT_ROWS)
    return [size_row(tuple(row)) for row in rows]


async def replace(connection: Any, text: str | None, count: Count, begun: Seen, *, is_last: bool) -> bool:
    """Counts what has come since, and keeps them. False if the log is not as it was when the counting began.

    All lanes must be locked: whoever commits behind them counts for the new ones.
    """
    now = await seen(connection)
    if now.is_counted(text):
        return True  # done before: nobody could tell whether that had been committed
    reached: Mapping[int, int] = begun.positions
    if (now.text, now.version, now.erasures) != (begun.text, begun.version, begun.erasures):
        if (now.text, now.version) != (begun.text, begun.version) or not is_last:
            return False
        count.begin_again()
        reached = {}
    for lane, newest in now.positions.items() if count.is_needed else ():
        after = reached.get(lane, 0)
        while rows := await sizes(connection, lane, after, newest):
            count.add(rows)
            after = rows[-1][0]
    if count.is_needed:
        count.add_state([(row[0], row[1], row[2], row[3]) for row in await connection.fetch(SQL["state_sizes"])])
        count.add_members([(row[0], row[1], row[2]) for row in await connection.fetch(SQL["member_sizes"])])
    await connection.execute(SQL["set_tenants"], text, USAGE_VERSION)
    await connection.execute(SQL["forget_usage"], list(count.gone))
    saved = [(prefix, one.bytes, one.records) for prefix, one in count.usage.items()]
    if saved:
        await connection.execute(SQL["begin_usage"], *columns_of(saved))
    return True


async def give_back(connection: Any, erased: Sequence[ErasedRow]) -> None:
    """Bodies are being erased, behind the lock of their lane: their tenants have less."""
    tenants = tenants_of(await connection.fetchval(SQL["tenants"]))
    touched = set() if tenants is None else touched_by(tenants, erased)
    if tenants is None or not touched:
        return
    rows = await connection.fetch(SQL["lock_usage"], sorted(touched))
    left = given_back({row[0]: Usage(*tuple(row)[1:]) for row in rows}, tenants, erased)
    if left:
        await connection.execute(SQL["set_bytes"], *columns_of([(prefix, one.bytes) for prefix, one in left.items()]))
