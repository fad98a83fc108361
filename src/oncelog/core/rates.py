"""The limits of new writes: how many an actor may make, over all processes that share the log.

A bucket of tokens, kept as one number: the moment of log time at which it will be full again. Every token that is taken
puts that moment off by the time that one token needs to come back. So whoever has waited long enough needs no entry at
all. That time is rounded up to whole microseconds: every store computes the same, and never more are let through.
"""

from typing import Final

from oncelog.core.desk import Desk, LaneDesk
from oncelog.core.limits import RATE_MAX
from oncelog.core.values import Bucket, Rate, Reason, Refused, Submission, rate_identity

_SECOND_US: Final = 1_000_000
_MILLISECOND_US: Final = 1000
FULL_AFTER_US_MAX: Final = RATE_MAX * _SECOND_US
"""How far a bucket can be from being full: by the slowest rate with the largest burst."""


def held_back(submission: Submission) -> Refused | None:
    """What a new write is told where none is taken for now. Work under a lease was let in when it was claimed."""
    return None if submission.fence else _used_up(submission.retry_after_ms)


def take(submission: Submission, rate: Rate, lane: LaneDesk, desk: Desk) -> Refused | None:
    """Takes a token for a new write that will be committed; refused where there is none, and then takes nothing."""
    if submission.fence:
        return None  # as above
    identity = rate_identity(submission)
    bucket = desk.rates.get(identity)
    now_us = lane.log_time_ms * _MILLISECOND_US
    token_us = -(-_SECOND_US // rate.per_second)
    full_at_us = token_us + (now_us if bucket is None else max(bucket.full_at_us, now_us))
    missing_us = full_at_us - now_us - rate.burst * token_us
    if missing_us > 0:
        return _used_up(-(-missing_us // _MILLISECOND_US))
    desk.rates.put(identity, Bucket(full_at_us))
    return None


def is_full(bucket: Bucket, log_time_ms: int) -> bool:
    """True once a bucket counts as absent."""
    return bucket.full_at_us <= log_time_ms * _MILLISECOND_US


def _used_up(retry_after_ms: int) -> Refused:
    return Refused(
        Reason.RATE_LIMITED,
        f"the limit of new writes is used up; try again in {retry_after_ms} ms",
        retry_after_ms=retry_after_ms,
    )
