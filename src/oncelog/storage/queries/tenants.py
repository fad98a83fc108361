"""Queries that load and save the quotas and usage of tenants, and that count usage."""

from collections.abc import Mapping, Sequence

from oncelog.core.rules.quotas import reclaim_erased_bytes
from oncelog.core.tenants import Tenant, Usage
from oncelog.core.values import Request
from oncelog.storage.queries.records import count_erasures, load_heads
from oncelog.storage.queries.statement import CommitBatch, QuerySteps, Statement
from oncelog.storage.tenants import (
    COUNT_PAGE_ROWS,
    USAGE_VERSION,
    CountStart,
    ErasedBytes,
    SizeRow,
    UsageCount,
    decode_tenants,
    list_tenants,
)


def load_count_start() -> QuerySteps[CountStart]:
    """Return the state of the log before usage is counted.

    The erasure count is loaded before the heads, so that the count of usage notices every later erasure.
    """
    [(text, version)] = yield Statement("tenants")
    erasures = yield from count_erasures()
    heads = yield from load_heads()
    return CountStart(text, erasures, {lane: head.position for lane, head in heads.items()}, version)


def load_usage() -> QuerySteps[list[tuple[Tenant, Usage]]]:
    """See `Store.usage`."""
    [(text, _)] = yield Statement("tenants")
    rows = yield Statement("usage")
    usage = {tenant: Usage(*numbers) for tenant, *numbers in rows}
    return [(tenant, usage.get(tenant.prefix, Usage())) for tenant in list_tenants(text)]


def load_sizes(lane: int, after: int, upto: int) -> QuerySteps[list[SizeRow]]:
    """Return a page of record sizes, ordered by position."""
    rows: list[SizeRow] = yield Statement("record_sizes", lane, after, upto, COUNT_PAGE_ROWS)
    return rows


def replace_tenants(
    text: str | None, counted: UsageCount, start: CountStart, act: Request | None, *, is_last: bool
) -> QuerySteps[bool]:
    """Count the records after `start`, and save tenants and usage. The transaction must hold the locks of all lanes.

    `act` records new quotas. Returns False if the log has changed since `start` in a way that invalidates the count.
    """
    count = counted.copy()  # the query may run again
    now = yield from load_count_start()
    if now.is_counted(text):
        return True  # an earlier attempt was committed, but its answer was lost
    reached: Mapping[int, int] = start.positions
    if (now.text, now.version, now.erasures) != (start.text, start.version, start.erasures):
        if (now.text, now.version) != (start.text, start.version) or not is_last:
            return False
        count.reset()
        reached = {}
    if count.is_needed:
        for lane, newest in now.positions.items():
            after = reached.get(lane, 0)
            while rows := (yield from load_sizes(lane, after, newest)):
                count.add(rows)
                after = rows[-1][0]
        count.add_state((yield Statement("state_sizes")))
        count.add_members((yield Statement("member_sizes")))
    yield Statement("set_tenants", text, USAGE_VERSION)
    yield Statement("forget_usage", list(count.removed_prefixes))
    usages = count.usage.values()
    sizes, records = [usage.bytes for usage in usages], [usage.records for usage in usages]
    yield Statement("begin_usage", list(count.usage), sizes, records)
    if now.text != text and act is not None:
        yield CommitBatch([act])
    return True


def release_usage(erased: Sequence[ErasedBytes]) -> QuerySteps[None]:
    """Subtract erased bytes from the usage of their tenants, in the erasure's transaction."""
    [(text, _)] = yield Statement("tenants")
    tenants = decode_tenants(text)
    if tenants is None:
        return
    affected = {tenant.prefix for stream, partitions, _ in erased for tenant in tenants.list_for(stream, partitions)}
    if affected:
        rows = yield Statement("lock_usage", sorted(affected))
        usages = reclaim_erased_bytes({tenant: Usage(*numbers) for tenant, *numbers in rows}, tenants, erased)
        yield Statement("set_bytes", list(usages), [usage.bytes for usage in usages.values()])
