"""The limits of new writes: how many an actor may make, over all processes that share the log.

A bucket of tokens, kept as one number: the moment of log time at which it will be full again. Every token that is taken
puts that moment off by the time that one token needs to come back. So whoever has waited long enough needs no entry at
all. That time is rounded up to whole microseconds: every store computes the same, and never more are let through.
"""

from collections.abc import Iterable, Iterator
from typing import Final

from oncelog.core.batch_state import Admission, BatchState, LaneDraft
from oncelog.core.limits import RATE_MAX, WHOLE_REQUEST_ITEMS_MAX
from oncelog.core.values import (
    Bucket,
    OpenStream,
    Rate,
    RateIdentity,
    Reason,
    Refused,
    Submission,
    open_rate_identity,
    rate_identity,
    stream_rate_identity,
)

_SECOND_US: Final = 1_000_000
_MILLISECOND_US: Final = 1000
CLOCK_BACK_US_MAX: Final = 60 * _SECOND_US
"""A time that is behind another by less is that of a process that was slower, or whose clock is not quite the same."""
FULL_AFTER_US_MAX: Final = RATE_MAX * _SECOND_US
"""How far a bucket can be from being full: by the slowest rate with the largest burst."""


def take_tokens(submission: Submission, lane: LaneDraft, state: BatchState) -> Refused | None:
    """Takes a token for a new write that will be committed, of each rate that it has.

    Refused where one has none, and then takes nothing. Where the request is admitted as a whole, the token is taken and
    `BatchState.admission` records it.
    """
    if submission.fence:
        return None  # the claim took the token
    return _take_each(_iterate_rates(submission), lane, state, state.admission)


def take_stream_token(item: OpenStream, state: BatchState) -> Refused | None:
    """Take a token for a new stream from its first member, or refuse the stream and take nothing."""
    if item.rate is None:
        return None
    identity = open_rate_identity(item)
    lane = state.get_stream_lane(identity[0])
    refused = _take_each([(item.rate, identity)], lane, state, None)
    if refused is None:
        lane.is_touched = True
    return refused


def _take_each(
    rates: Iterable[tuple[Rate, RateIdentity]], lane: LaneDraft, state: BatchState, admission: Admission | None
) -> Refused | None:
    taken: list[tuple[RateIdentity, Bucket]] = []
    longest_wait_us = 0
    for rate, identity in rates:
        bucket = state.rates.get(identity)
        full_at_us = 0 if bucket is None else bucket.full_at_us
        after_us, wait_us = take_token(identity, full_at_us, lane.log_time_ms, rate.per_second, rate.burst, admission)
        taken.append((identity, Bucket(after_us)))
        longest_wait_us = max(longest_wait_us, wait_us)
    refused = refuse_for_wait(longest_wait_us, admission, "the limit of new writes is used up")
    if refused is None:
        for identity, after in taken:
            state.rates.put(identity, after)
    return refused


def _iterate_rates(submission: Submission) -> Iterator[tuple[Rate, RateIdentity]]:
    if submission.rate is not None:
        yield submission.rate, rate_identity(submission)
    if submission.stream_rate is not None:
        yield submission.stream_rate, stream_rate_identity(submission)


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

    The wait is 0 or less if the token is there, or if a request that is admitted as a whole may overdraw the bucket.
    With `is_bounded` a bucket that seems much further from full than it can be, by its burst or by the debt of one
    request, counts as full, for times that may go back.
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
    """Refuse a new write that must wait for a token; None if it need not wait.

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
    """True once a bucket counts as absent."""
    return bucket.full_at_us <= log_time_ms * _MILLISECOND_US
