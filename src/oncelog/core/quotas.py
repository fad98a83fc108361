"""Quotas: what a tenant may keep, and how many new writes it may make, over all processes that share the log.

A write belongs to every tenant that its stream or one of its partitions is under, and must fit into each of them. What
they have is side state (`usage`), counted in the transaction that commits a record or erases a body: so it holds over
all gateways, and over restarts.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from msgspec.structs import replace

from oncelog.core.desk import Desk
from oncelog.core.limits import QUOTA_RETRY_AFTER_MS
from oncelog.core.policy import Order
from oncelog.core.rates import after_one
from oncelog.core.tenants import Tenant, Tenants, Usage
from oncelog.core.values import Claim, Item, OpenStream, Reason, Refused, Request, Submission, is_audited

_STREAM: Final = Order.STREAM  # as in `desk`: asked for every item
_MILLISECOND_US: Final = 1000
_NO_USAGE: Final = Usage()
SYSTEM: Final = "system:"
"""Begins the actor of internal work (CO-20)."""


def is_charged(actor: str) -> bool:
    """Return whether the audit records of an actor's acts count against quotas: those of clients do."""
    return actor != "" and not actor.startswith(SYSTEM)


def needed_usage(batch: Sequence[Request], tenants: Tenants, faults: Mapping[int, Refused]) -> set[str]:
    """Whose usage a batch may look at: of all that may be committed or claimed.

    What is held back anyway asks for none: who only looks must not keep others waiting for what it would lock.
    """
    return {
        tenant.prefix
        for request in batch
        for item in request.items
        if id(item) not in faults and not (isinstance(item, Submission | Claim) and _is_held_back(item))
        for tenant in _tenants(item, tenants)
    }


def beyond_quota(item: Submission | Claim, desk: Desk) -> Refused | None:
    """What a new write is told that does not fit. Work under a lease was let in when it was claimed."""
    if desk.tenants is None or (isinstance(item, Submission) and item.fence):
        return None
    for tenant in _tenants(item, desk.tenants):
        usage = desk.usage.get(tenant.prefix) or _NO_USAGE
        refused = _beyond_storage(item, tenant, usage) or _beyond_rate(tenant, usage, desk)
        if refused is not None:
            return refused
    return None


def count_write(submission: Submission, desk: Desk) -> None:
    """A record is committed: it takes of what its tenants may have."""
    if desk.tenants is None:
        return
    for tenant in _tenants(submission, desk.tenants):
        usage = desk.usage.get(tenant.prefix) or _NO_USAGE
        full_at_us = usage.full_at_us if submission.fence else _full_at_us(tenant, usage, desk.now_ms)
        counted = Usage(usage.bytes + len(submission.body), usage.records + 1, full_at_us)
        desk.usage.put(tenant.prefix, counted)


def count_act(stream: str, size: int, desk: Desk) -> None:
    """Count the audit record of a client's act. Rates do not count it: the act is admitted before its record."""
    if desk.tenants is None:
        return
    for tenant in desk.tenants.of(stream, ()):
        usage = desk.usage.get(tenant.prefix) or _NO_USAGE
        desk.usage.put(tenant.prefix, replace(usage, bytes=usage.bytes + size, records=usage.records + 1))


def count_claim(item: Claim, desk: Desk) -> None:
    """New work is let in: it takes of the rate, and the record that it comes to does not."""
    if desk.tenants is None:
        return
    for tenant in _tenants(item, desk.tenants):
        usage = desk.usage.get(tenant.prefix) or _NO_USAGE
        if tenant.new_writes_per_second_max:
            desk.usage.put(tenant.prefix, replace(usage, full_at_us=_full_at_us(tenant, usage, desk.now_ms)))


def give_back(
    usage: Mapping[str, Usage], tenants: Tenants, erased: Iterable[tuple[str, tuple[str, ...], int]]
) -> dict[str, Usage]:
    """What tenants have left once bodies are gone: stream, partitions and bytes of each."""
    left = dict(usage)
    for stream, partitions, size in erased:
        for tenant in tenants.of(stream, partitions):
            before = left.get(tenant.prefix) or _NO_USAGE
            # Never below nothing, whoever wrote without counting: a quota may be wrong, but must not stop the log.
            left[tenant.prefix] = replace(before, bytes=max(0, before.bytes - size))
    return {prefix: now for prefix, now in left.items() if now != usage.get(prefix)}


def _tenants(item: Item, tenants: Tenants) -> tuple[Tenant, ...]:
    if isinstance(item, Submission | Claim):
        stream = item.scope if item.policy.order is _STREAM else ""
        return tenants.of(stream, item.partitions if isinstance(item, Submission) else ())
    if is_audited(item) and is_charged(item.member if isinstance(item, OpenStream) else item.actor):
        return tenants.of(item.scope, ())
    return ()


def _is_held_back(item: Submission | Claim) -> bool:
    return item.retry_after_ms > 0 and not (isinstance(item, Submission) and item.fence)


def _beyond_storage(item: Submission | Claim, tenant: Tenant, usage: Usage) -> Refused | None:
    # What work under a lease will come to nobody knows when it is claimed: there must be room for something.
    size = len(item.body) if isinstance(item, Submission) else 1
    for name, limit, has, more in (
        ("bytes_max", tenant.bytes_max, usage.bytes, size),
        ("records_max", tenant.records_max, usage.records, 1),
    ):
        if limit and has + more > limit:
            return Refused(
                Reason.QUOTA_EXCEEDED,
                f"{name} of the tenant {tenant.prefix!r} is {limit}; it has {has}, and this is {more} more",
                field=name,
                current=has,
                retry_after_ms=QUOTA_RETRY_AFTER_MS,
                tenant=tenant.prefix,
                limit=limit,
            )
    return None


def _beyond_rate(tenant: Tenant, usage: Usage, desk: Desk) -> Refused | None:
    per_second = tenant.new_writes_per_second_max
    if not per_second:
        return None
    before_us, _, missing_us = _after_one(tenant, usage, desk.now_ms)
    admission = desk.admission
    if admission is not None:
        missing_us = admission.missing_us(tenant.prefix, before_us, missing_us, desk.now_ms * _MILLISECOND_US)
    if missing_us <= 0:
        return None
    retry_after_ms = -(-missing_us // _MILLISECOND_US)
    refused = Refused(
        Reason.RATE_LIMITED,
        f"new_writes_per_second_max of the tenant {tenant.prefix!r} is {per_second}; try again in {retry_after_ms} ms",
        field="new_writes_per_second_max",
        retry_after_ms=retry_after_ms,
        tenant=tenant.prefix,
        limit=per_second,
    )
    if admission is None:
        return refused
    admission.refuse(refused, missing_us)
    return None


def _full_at_us(tenant: Tenant, usage: Usage, now_ms: int) -> int:
    return _after_one(tenant, usage, now_ms)[1] if tenant.new_writes_per_second_max else usage.full_at_us


def _after_one(tenant: Tenant, usage: Usage, now_ms: int) -> tuple[int, int, int]:
    """As `rates.after_one`, by the time of the batch: a tenant has streams in several lanes, each with its own time.

    That of another process may be behind by a little, and then there is less in the bucket. Where it is far behind, as
    on a machine whose clock was set back before it came, the bucket seems much further from full than it can be, and
    counts as full: the tenant does not wait until that clock has caught up.
    """
    per_second = tenant.new_writes_per_second_max
    burst = tenant.new_writes_at_once_max or per_second
    now_us = now_ms * _MILLISECOND_US
    return after_one(usage.full_at_us, now_us, per_second, burst, is_bounded=True)
