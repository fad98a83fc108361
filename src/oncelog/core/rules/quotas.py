"""Limits across all processes that share the log: rates of new writes, and tenant quotas.

A rate limits new writes per actor, stream or tenant. A token bucket is stored as one number: the log time at which it
is full again. Taking a token postpones this time by the refill time of one token. A full bucket needs no entry. The
refill time is rounded up to whole microseconds, so that all stores compute the same times and never admit more writes
than the rate allows.

A quota limits a tenant's storage and rate of new writes. A write belongs to every tenant of its stream and partitions,
and must fit into the quotas of all of them. Usage is side state (`usage`), updated in the transaction that commits a
record, changes side state or erases a body. It is therefore correct across servers and restarts. `stored_bytes` defines
how bytes are counted.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, TypeGuard

from msgspec.structs import replace

from oncelog.core.batch_state import Admission, BatchState, LaneDraft
from oncelog.core.limits import QUOTA_RETRY_AFTER_MS, RATE_MAX, WHOLE_REQUEST_ITEMS_MAX
from oncelog.core.policy import STREAM
from oncelog.core.stored_bytes import member_bytes, record_bytes, submission_bytes, utf8_bytes
from oncelog.core.tenants import Tenant, Tenants, Usage
from oncelog.core.values import (
    Bucket,
    Claim,
    Item,
    MemberIdentity,
    OpenStream,
    Rate,
    RateIdentity,
    Reason,
    Refused,
    Request,
    SetMember,
    Submission,
    Verdict,
    enumerate_items,
    is_audited,
)

# --- rates -----------------------------------------------------------------------------------------------

_OPEN_RATE_SCOPE_PREFIX: Final = "oncelog.opened/"
_SECOND_US: Final = 1_000_000
_MILLISECOND_US: Final = 1000
CLOCK_BACK_US_MAX: Final = 60 * _SECOND_US
"""Largest clock difference at which a process's clock is treated as only slightly behind."""
FULL_AFTER_US_MAX: Final = RATE_MAX * _SECOND_US
"""Longest time that a bucket needs to fill, at the slowest rate with the largest burst."""


def iterate_rates(item: Submission | OpenStream) -> Iterator[tuple[Rate, RateIdentity]]:
    """Yield the rates of an item, each with its bucket.

    An actor has one bucket in each stream, and one for all writes with Order.LANE. A stream's bucket has no actor. For
    the streams that a member opens, the scope of the bucket contains the member's name, so these buckets are spread
    over the lanes.
    """
    if isinstance(item, OpenStream):
        if item.rate is not None:
            yield item.rate, (f"{_OPEN_RATE_SCOPE_PREFIX}{item.member}", "")
        return
    if item.rate is not None:
        yield item.rate, (item.scope if item.policy.order is STREAM else "", item.actor)
    if item.stream_rate is not None:
        yield item.stream_rate, (item.scope, "")


def take_tokens(item: Submission | OpenStream, state: BatchState) -> Refused | None:
    """Take a token from each rate for a new write or stream, or refuse the item and take none.

    In a request that is admitted as a whole, a submission takes its tokens in any case, and `BatchState.admission`
    keeps the refusal.
    """
    if isinstance(item, Submission) and item.fence:
        return None  # the claim took the token
    admission = state.admission if isinstance(item, Submission) else None
    taken: list[tuple[LaneDraft, RateIdentity, Bucket]] = []
    longest_wait_us = 0
    for rate, identity in iterate_rates(item):
        lane = state.get_stream_lane(identity[0])
        bucket = state.rates.get(identity)
        full_at_us = 0 if bucket is None else bucket.full_at_us
        after_us, wait_us = take_token(identity, full_at_us, lane.log_time_ms, rate.per_second, rate.burst, admission)
        taken.append((lane, identity, Bucket(after_us)))
        longest_wait_us = max(longest_wait_us, wait_us)
    refused = refuse_for_wait(longest_wait_us, admission, "the rate limit for new writes is exceeded")
    if refused is None:
        for lane, identity, after in taken:
            state.rates.put(identity, after)
            lane.is_touched = True
    return refused


def take_token(
    bucket: object,
    full_at_us: int,
    now_ms: int,
    per_second: int,
    burst: int,
    admission: Admission | None = None,
    *,
    is_bounded: bool = False,
) -> tuple[int, int]:
    """Return when a bucket is full again if one more token is taken, and how long the write must wait for that token.

    The wait is 0 or less if the token is available, or if a request that is admitted as a whole may overdraw the
    bucket. Set `is_bounded` if `now_ms` may go back. A bucket that needs longer to refill than the burst or the largest
    overdraft allows is then treated as full.
    """
    token_us = -(-_SECOND_US // per_second)
    now_us = now_ms * _MILLISECOND_US
    before_us = max(full_at_us, now_us)
    if is_bounded and before_us - now_us > max(burst, WHOLE_REQUEST_ITEMS_MAX) * token_us + CLOCK_BACK_US_MAX:
        before_us = now_us
    after_us = before_us + token_us
    wait_us = after_us - now_us - burst * token_us
    if admission is not None:
        wait_us = admission.compute_wait_us(bucket, before_us, wait_us, now_us)
    return after_us, wait_us


def refuse_for_wait(
    wait_us: int, admission: Admission | None, used_up: str, field: str = "", *, tenant: str = "", limit: int = 0
) -> Refused | None:
    """Refuse a new write that must wait for a token. Return None if it need not wait.

    In a request that is admitted as a whole, `admission` keeps the refusal until all items have taken their tokens.
    """
    if wait_us <= 0:
        return None
    retry_after_ms = -(-wait_us // _MILLISECOND_US)
    refused = Refused(
        Reason.RATE_LIMITED,
        f"{used_up}; try again in {retry_after_ms} ms",
        field=field,
        retry_after_ms=retry_after_ms,
        tenant=tenant,
        limit=limit,
    )
    if admission is None:
        return refused
    admission.refuse(refused, wait_us)
    return None


def is_full(bucket: Bucket, log_time_ms: int) -> bool:
    """Return whether a bucket is full and so needs no entry."""
    return bucket.full_at_us <= log_time_ms * _MILLISECOND_US


# --- quotas ----------------------------------------------------------------------------------------------

_NO_USAGE: Final = Usage()
SYSTEM_ACTOR_PREFIX: Final = "system:"
"""Prefix of the actors of internal work (CO-20)."""


def is_charged(actor: str) -> bool:
    """Return whether quotas count an actor's audit records. They count those of clients only."""
    return actor != "" and not actor.startswith(SYSTEM_ACTOR_PREFIX)


def can_be_known_only(item: Item) -> TypeGuard[Submission | Claim | OpenStream | SetMember]:
    """Return whether `known_only` applies to an item. With it, an item that would change something is refused.

    This includes client requests that add a member or set a role, because they append audit records. It does not
    include removals.
    """
    if isinstance(item, SetMember):
        return item.present and is_charged(item.actor)
    return isinstance(item, Submission | Claim) or (isinstance(item, OpenStream) and is_charged(item.member))


def collect_usage_keys(
    batch: Sequence[Request], tenants: Tenants, faults: Mapping[int, Refused]
) -> tuple[set[str], set[MemberIdentity]]:
    """Return the tenants whose usage a batch may change and the members that it may add, for its read set.

    A known-only item needs no usage, because a lookup must not wait for locked rows.
    """
    usage: set[str] = set()
    members: set[MemberIdentity] = set()
    for index, item in enumerate_items(batch):
        if index in faults:
            continue
        found = _list_counted_tenants(item, tenants)
        usage.update(tenant.prefix for tenant in found)
        if found and isinstance(item, OpenStream | SetMember):
            members.add((item.scope, item.member))
    return usage, members


def check_quota(item: Submission | Claim, state: BatchState, growth: int = 0) -> Refused | None:
    """Refuse a new write that exceeds a quota. `growth` is how many bytes its effects add to its stream.

    Work under a lease was already checked when it was claimed.
    """
    if state.tenants is None or (isinstance(item, Submission) and item.fence):
        return None
    if isinstance(item, Submission):
        size = submission_bytes(item)
    else:  # a claim: the minimum, because its body is not known yet
        size = record_bytes(utf8_bytes(item.scope) + len(item.key), (), 1)
    owners = state.tenants.list_for(item.scope, ()) if growth else ()
    for tenant in _list_tenants(item, state.tenants):
        more = size + growth if tenant in owners else size
        if (refused := _check_tenant(tenant, state, more, records=1, takes_token=True)) is not None:
            return refused
    return None


def restate_refusal(verdict: Verdict, state: BatchState) -> Verdict:
    """Return the refusal of an undone request. A quota refusal gets the usage without the items of the request."""
    if not isinstance(verdict, Refused) or verdict.reason is not Reason.QUOTA_EXCEEDED:
        return verdict
    usage = state.usage.get(verdict.tenant) or _NO_USAGE
    has = usage.bytes if verdict.field == "bytes_max" else usage.records
    if has == verdict.current:
        return verdict
    limit, more = verdict.limit, max(0, verdict.limit - has)
    message = f"{verdict.field} of the tenant {verdict.tenant!r} is {limit}; it uses {has}, and this request adds more"
    return replace(verdict, message=f"{message} than {more}", current=has)


def count_write(submission: Submission, tenants: Tenants, state: BatchState, growth: int = 0) -> None:
    """Count a committed record and the side state that it adds to its stream."""
    counted = _list_tenants(submission, tenants)
    _add_usage(counted, state, submission_bytes(submission), records=1, takes_token=not submission.fence)
    if growth:
        count_in_stream(submission.scope, state, size=growth)


def count_in_stream(
    scope: str, state: BatchState, *, size: int = 0, records: int = 0, takes_token: bool = False
) -> None:
    """Add bytes and records to the usage of a stream's tenants, and take a token from their rates.

    A claim takes a token, so the record of the claimed work takes none. An added member or a new role takes a token, so
    its audit record takes none. A negative size frees the bytes of dropped side state.
    """
    if state.tenants is not None:
        _add_usage(state.tenants.list_for(scope, ()), state, size, records=records, takes_token=takes_token)


def _add_usage(tenants: Iterable[Tenant], state: BatchState, size: int, *, records: int, takes_token: bool) -> None:
    for tenant in tenants:
        usage = state.usage.get(tenant.prefix) or _NO_USAGE
        full_at_us = usage.full_at_us
        if takes_token and tenant.new_writes_per_second_max:
            full_at_us, _ = _take_tenant_token(tenant, usage, state.now_ms)
        after = Usage(max(0, usage.bytes + size), usage.records + records, full_at_us)
        if after != usage:
            state.usage.put(tenant.prefix, after)


def check_act_limits(
    scope: str, tenants: Tenants, state: BatchState, *, act_bytes: int, member: MemberIdentity | None
) -> Refused | None:
    """Refuse an act if it exceeds a quota of one of its stream's tenants, or if no token is available for its record.

    `act_bytes` is the size of the audit record, or 0 if it does not count. `member` is the member that the act adds.
    The member counts as a record unless it was a member before.
    """
    is_new = member is not None and not state.past_members.get(member)
    size = act_bytes + (member_bytes(member) if member is not None and is_new else 0)
    records = (act_bytes > 0) + is_new
    for tenant in tenants.list_for(scope, ()):
        if (refused := _check_tenant(tenant, state, size, records=records, takes_token=act_bytes > 0)) is not None:
            return refused
    return None


def count_member(identity: MemberIdentity, state: BatchState) -> None:
    """Count a new member of a stream. A past member is already counted, because the log keeps its row."""
    if state.tenants is None or state.past_members.get(identity):
        return
    count_in_stream(identity[0], state, size=member_bytes(identity), records=1)
    state.past_members.put(identity, True)


def reclaim_erased_bytes(
    usage: Mapping[str, Usage], tenants: Tenants, erased: Iterable[tuple[str, tuple[str, ...], int]]
) -> dict[str, Usage]:
    """Return the usage of the affected tenants after bodies are erased.

    Each entry of `erased` has the stream, the partitions and the size of a body.
    """
    left = dict(usage)
    for stream, partitions, size in erased:
        for tenant in tenants.list_for(stream, partitions):
            before = left.get(tenant.prefix) or _NO_USAGE
            # Usage never goes below 0: a wrong figure, left by writes without quotas, must not stop the log.
            left[tenant.prefix] = replace(before, bytes=max(0, before.bytes - size))
    return {prefix: now for prefix, now in left.items() if now != usage.get(prefix)}


def _list_counted_tenants(item: Item, tenants: Tenants) -> tuple[Tenant, ...]:
    """Return the tenants whose usage the decision about an item may read or change."""
    if isinstance(item, Submission | Claim):
        has_lease = isinstance(item, Submission) and item.fence > 0
        return () if item.known_only and not has_lease else _list_tenants(item, tenants)
    if not is_audited(item) or (can_be_known_only(item) and item.known_only):
        return ()
    return tenants.list_for(item.scope, ())


def _list_tenants(item: Submission | Claim, tenants: Tenants) -> tuple[Tenant, ...]:
    stream = item.scope if item.policy.order is STREAM else ""
    return tenants.list_for(stream, item.partitions if isinstance(item, Submission) else ())


def _check_tenant(tenant: Tenant, state: BatchState, size: int, *, records: int, takes_token: bool) -> Refused | None:
    """Refuse a write that exceeds a quota. A tenant over its quota may still submit a write that frees bytes."""
    usage = state.usage.get(tenant.prefix) or _NO_USAGE
    for name, limit, has, more in (
        ("bytes_max", tenant.bytes_max, usage.bytes, size),
        ("records_max", tenant.records_max, usage.records, records),
    ):
        if limit and more > 0 and has + more > limit:
            return Refused(
                Reason.QUOTA_EXCEEDED,
                f"{name} of the tenant {tenant.prefix!r} is {limit}; it uses {has}, and this request adds {more}",
                field=name,
                current=has,
                retry_after_ms=QUOTA_RETRY_AFTER_MS,
                tenant=tenant.prefix,
                limit=limit,
            )
    per_second = tenant.new_writes_per_second_max
    wait_us = _take_tenant_token(tenant, usage, state.now_ms, state.admission)[1] if takes_token and per_second else 0
    if wait_us <= 0:
        return None
    used_up = f"the tenant {tenant.prefix!r} exceeds its new_writes_per_second_max of {per_second}"
    return refuse_for_wait(
        wait_us, state.admission, used_up, "new_writes_per_second_max", tenant=tenant.prefix, limit=per_second
    )


def _take_tenant_token(
    tenant: Tenant, usage: Usage, now_ms: int, admission: Admission | None = None
) -> tuple[int, int]:
    """Take a token from a tenant's rate. The rate uses batch time, because log time differs between lanes.

    If this clock is slightly behind another process's clock, the bucket seems a little emptier. If it is far behind,
    for example because the machine's clock was set back, the bucket would seem to need longer to refill than its size
    allows. Such a bucket is treated as full, so that the tenant need not wait until this clock catches up.
    """
    per_second = tenant.new_writes_per_second_max
    burst = tenant.new_writes_at_once_max or per_second
    return take_token(tenant.prefix, usage.full_at_us, now_ms, per_second, burst, admission, is_bounded=True)
