"""Rates: limits of new writes per actor or stream, over all processes that share the log.

A bucket of tokens is stored as one number: the log time at which it is full again. Taking a token moves this time by
the time that one token needs to refill. A full bucket needs no entry. The refill time is rounded up to whole
microseconds, so that all stores compute the same times and never admit more writes.
"""

from collections.abc import Iterator
from typing import Final

from oncelog.core.batch_state import Admission, BatchState, LaneDraft
from oncelog.core.limits import RATE_MAX, WHOLE_REQUEST_ITEMS_MAX
from oncelog.core.policy import STREAM
from oncelog.core.values import (
    Bucket,
    OpenStream,
    Rate,
    RateIdentity,
    Reason,
    Refused,
    Submission,
)

_OPEN_RATE_SCOPE_PREFIX: Final = "oncelog.opened/"
_SECOND_US: Final = 1_000_000
_MILLISECOND_US: Final = 1000
CLOCK_BACK_US_MAX: Final = 60 * _SECOND_US
"""Difference of clocks up to which a process counts as slightly slower."""
FULL_AFTER_US_MAX: Final = RATE_MAX * _SECOND_US
"""Longest time until a bucket is full: the slowest rate with the largest burst."""


def iterate_rates(item: Submission | OpenStream) -> Iterator[tuple[Rate, RateIdentity]]:
    """Yield the rates of an item, each with its bucket.

    An actor has one bucket in each stream, and one for all writes whose order is the lane. The bucket of a stream has
    no actor. The bucket of the streams that a member opens has a scope per member, which spreads buckets over lanes.
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
    """Take a token of each rate for a new write or a new stream, or refuse the item and take nothing.

    In a request that is admitted as a whole, a submission takes its tokens; `BatchState.admission` keeps the refusal.
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
    refused = refuse_for_wait(longest_wait_us, admission, "the limit of new writes is used up")
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
    """Return when a bucket is full after one more token, and how long the write must wait for that token.

    The wait is 0 or less if the token is available, or if a request that is admitted as a whole may overdraw the
    bucket. `is_bounded` is for times that may go back: a bucket then counts as full if it would need longer to refill
    than its burst or the debt of one request allows.
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
    """Refuse a new write that must wait for a token; None without a wait.

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
    """Return whether a bucket counts as absent."""
    return bucket.full_at_us <= log_time_ms * _MILLISECOND_US
