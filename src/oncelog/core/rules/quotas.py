"""Quotas: what a tenant may keep, and how many new writes it may make, over all processes that share the log.

A write belongs to every tenant that its stream or one of its partitions is under, and must fit into each of them. What
they have is side state (`usage`), counted in the transaction that commits a record, changes side state or erases a
body: so it holds over all gateways, and over restarts. `stored_bytes` defines how many bytes each of them counts.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, TypeGuard

from msgspec.structs import replace

from oncelog.core.batch_state import Admission, BatchState
from oncelog.core.limits import QUOTA_RETRY_AFTER_MS
from oncelog.core.policy import STREAM
from oncelog.core.rules.rates import refuse_for_wait, take_token
from oncelog.core.stored_bytes import member_bytes, record_bytes, submission_bytes, utf8_bytes
from oncelog.core.tenants import Tenant, Tenants, Usage
from oncelog.core.values import (
    Claim,
    Item,
    MemberIdentity,
    OpenStream,
    Reason,
    Refused,
    Request,
    SetMember,
    Submission,
    Verdict,
    enumerate_items,
    is_audited,
)

_NO_USAGE: Final = Usage()
SYSTEM_ACTOR_PREFIX: Final = "system:"
"""Begins the actor of internal work (CO-20)."""


def is_charged(actor: str) -> bool:
    """Return whether the audit records of an actor's acts count against quotas: those of clients do."""
    return actor != "" and not actor.startswith(SYSTEM_ACTOR_PREFIX)


def can_be_known_only(item: Item) -> TypeGuard[Submission | Claim | OpenStream | SetMember]:
    """Return whether an item with `known_only` is refused, unless it is known or changes nothing.

    Requests of clients that add a member or set a role append audit records, so they are. A removal is not.
    """
    if isinstance(item, SetMember):
        return item.present and is_charged(item.actor)
    return isinstance(item, Submission | Claim) or (isinstance(item, OpenStream) and is_charged(item.member))


def collect_usage_keys(
    batch: Sequence[Request], tenants: Tenants, faults: Mapping[int, Refused]
) -> tuple[set[str], set[MemberIdentity]]:
    """Return the tenants whose usage a batch may change, and the members that it may add, for its read set.

    A known-only item needs no usage: a look-up must not wait for rows that others have locked.
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
    """Refuse a new write that does not fit. `growth` is what its effects add to the side state of its stream.

    Work under a lease was admitted when it was claimed.
    """
    if state.tenants is None or (isinstance(item, Submission) and item.fence):
        return None
    if isinstance(item, Submission):
        size = submission_bytes(item)
    else:  # the least that the record of claimed work will count: its body is not known yet
        size = record_bytes(utf8_bytes(item.scope) + len(item.key), (), 1)
    owners = state.tenants.list_for(item.scope, ()) if growth else ()
    for tenant in _list_tenants(item, state.tenants):
        more = size + growth if tenant in owners else size
        if (refused := _check_tenant(tenant, state, more, records=1, takes_token=True)) is not None:
            return refused
    return None


def restate_refusal(verdict: Verdict, state: BatchState) -> Verdict:
    """Return the refusal of a request that was undone as a whole: its own items do not count for what a tenant has."""
    if not isinstance(verdict, Refused) or verdict.reason is not Reason.QUOTA_EXCEEDED:
        return verdict
    usage = state.usage.get(verdict.tenant) or _NO_USAGE
    has = usage.bytes if verdict.field == "bytes_max" else usage.records
    if has == verdict.current:
        return verdict
    limit, more = verdict.limit, max(0, verdict.limit - has)
    message = f"{verdict.field} of the tenant {verdict.tenant!r} is {limit}; it has {has}, and this request adds more"
    return replace(verdict, message=f"{message} than {more}", current=has)


def count_write(submission: Submission, state: BatchState, growth: int = 0) -> None:
    """Count a record that is committed, and the side state that it adds to its stream."""
    if state.tenants is None:
        return
    tenants = _list_tenants(submission, state.tenants)
    _add_usage(tenants, state, submission_bytes(submission), records=1, takes_token=not submission.fence)
    if growth:
        count_in_stream(submission.scope, state, size=growth)


def count_in_stream(
    scope: str, state: BatchState, *, size: int = 0, records: int = 0, takes_token: bool = False
) -> None:
    """Add bytes and records to the usage of a stream's tenants, and take a token of their rates.

    A claim takes a token, and the record of the claimed work takes none. An addition of a member or a new role takes a
    token, and its audit record takes none. A negative size gives back the bytes of dropped side state.
    """
    if state.tenants is not None:
        _add_usage(state.tenants.list_for(scope, ()), state, size, records=records, takes_token=takes_token)


def _add_usage(tenants: Iterable[Tenant], state: BatchState, size: int, *, records: int, takes_token: bool) -> None:
    for tenant in tenants:
        usage = state.usage.get(tenant.prefix) or _NO_USAGE
        full_at_us = usage.full_at_us
        if takes_token and tenant.new_writes_per_second_max:
            full_at_us, _ = _take_token(tenant, usage, state.now_ms)
        after = Usage(max(0, usage.bytes + size), usage.records + records, full_at_us)
        if after != usage:
            state.usage.put(tenant.prefix, after)


def check_act_limits(scope: str, state: BatchState, *, act_bytes: int, member: MemberIdentity | None) -> Refused | None:
    """Refuse an act that does not fit into the tenants of its stream, or whose record gets no token of their rates.

    `act_bytes` is the size of the act's audit record, 0 where it does not count. `member` is a member that the act
    adds. A member counts as a record, unless it was a member before.
    """
    if state.tenants is None:
        return None
    is_new = member is not None and not state.past_members.get(member)
    size = act_bytes + (member_bytes(member) if member is not None and is_new else 0)
    records = (act_bytes > 0) + is_new
    for tenant in state.tenants.list_for(scope, ()):
        if (refused := _check_tenant(tenant, state, size, records=records, takes_token=act_bytes > 0)) is not None:
            return refused
    return None


def count_member(identity: MemberIdentity, state: BatchState) -> None:
    """Count a new member of a stream, unless it was a member before: the log has kept its row."""
    if state.tenants is None or state.past_members.get(identity):
        return
    count_in_stream(identity[0], state, size=member_bytes(identity), records=1)
    state.past_members.put(identity, True)


def reclaim_erased_bytes(
    usage: Mapping[str, Usage], tenants: Tenants, erased: Iterable[tuple[str, tuple[str, ...], int]]
) -> dict[str, Usage]:
    """What tenants have left once bodies are gone: stream, partitions and bytes of each."""
    left = dict(usage)
    for stream, partitions, size in erased:
        for tenant in tenants.list_for(stream, partitions):
            before = left.get(tenant.prefix) or _NO_USAGE
            # Never below nothing, whoever wrote without counting: a quota may be wrong, but must not stop the log.
            left[tenant.prefix] = replace(before, bytes=max(0, before.bytes - size))
    return {prefix: now for prefix, now in left.items() if now != usage.get(prefix)}


def _list_counted_tenants(item: Item, tenants: Tenants) -> tuple[Tenant, ...]:
    """Return the tenants whose usage a decision about the item may read or change."""
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
    """Refuse a write beyond a quota. A tenant over its quota may still write if that frees more bytes than it takes."""
    usage = state.usage.get(tenant.prefix) or _NO_USAGE
    for name, limit, has, more in (
        ("bytes_max", tenant.bytes_max, usage.bytes, size),
        ("records_max", tenant.records_max, usage.records, records),
    ):
        if limit and more > 0 and has + more > limit:
            return Refused(
                Reason.QUOTA_EXCEEDED,
                f"{name} of the tenant {tenant.prefix!r} is {limit}; it has {has}, and this is {more} more",
                field=name,
                current=has,
                retry_after_ms=QUOTA_RETRY_AFTER_MS,
                tenant=tenant.prefix,
                limit=limit,
            )
    per_second = tenant.new_writes_per_second_max
    wait_us = _take_token(tenant, usage, state.now_ms, state.admission)[1] if takes_token and per_second else 0
    if wait_us <= 0:
        return None
    used_up = f"new_writes_per_second_max of the tenant {tenant.prefix!r} is {per_second}"
    return refuse_for_wait(
        wait_us, state.admission, used_up, "new_writes_per_second_max", tenant=tenant.prefix, limit=per_second
    )


def _take_token(tenant: Tenant, usage: Usage, now_ms: int, admission: Admission | None = None) -> tuple[int, int]:
    """As `rates.take_token`, by the time of the batch: the lanes of a tenant each have a separate time.

    That of another process may be behind by a little, and then there is less in the bucket. Where it is far behind, as
    on a machine whose clock was set back before it came, the bucket seems much further from full than it can be, and
    counts as full: the tenant does not wait until that clock has caught up.
    """
    per_second = tenant.new_writes_per_second_max
    burst = tenant.new_writes_at_once_max or per_second
    return take_token(tenant.prefix, usage.full_at_us, now_ms, per_second, burst, admission, is_bounded=True)
