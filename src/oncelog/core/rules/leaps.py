"""Leaps: after a restore, numbers continue above every number that the lost history may have used (CO-12).

A leap has one number, `above`. It appends a restore record to every lane, as the only record of its block, at position
and height `above + 1`. Fencing numbers and the sequences of all streams also continue with `above + 1`. Positions,
heights and sequences have no gaps other than those of leaps (docs/decisions/0030).
"""

from collections.abc import Iterable
from typing import Final

from oncelog.core.batch_state import BatchState
from oncelog.core.internal_records import RESTORE_ACTOR
from oncelog.core.policy import RESTORE_POLICY
from oncelog.core.values import Applied, LaneHead, Leap, Reason, Refused

LEAP_MIN: Final = 1_000_000
LEAP_PER_SECOND: Final = 100_000
"""More records per second than a log can commit."""
CLOCK_BEHIND_MS_MAX: Final = 1000 * LEAP_MIN // LEAP_PER_SECOND
"""A clock that is behind by less than this shortens a leap by less than `LEAP_MIN`."""


def choose_leap_number(heads: Iterable[LaneHead], created_ms: int, now_ms: int) -> int:
    """Choose a number that the lost history cannot have reached in the time since the newest remaining commit."""
    known = list(heads)
    seconds = max(0, -(-(now_ms - find_last_commit_ms(known, created_ms)) // 1000))
    return find_highest_number(known) + LEAP_MIN + LEAP_PER_SECOND * seconds


def find_last_commit_ms(heads: Iterable[LaneHead], created_ms: int) -> int:
    """Return the time of the newest commit, or `created_ms`, the log's creation time, if it has no records."""
    return max((head.log_time_ms for head in heads), default=0) or created_ms


def find_highest_number(heads: Iterable[LaneHead]) -> int:
    """Return the highest number that any lane has assigned. Sequences and heights never exceed the lane's position."""
    return max((max(head.position, head.fence, head.revision) for head in heads), default=0)


def decide_leap(item: Leap, state: BatchState) -> Applied | Refused:
    """Decide a leap, which must be the only item of its batch."""
    lanes = [state.get_lane(number) for number in range(state.settings.lanes + 1)]
    highest = max(max(lane.position, lane.fence, lane.head.revision) for lane in lanes)
    if item.above < highest:
        message = f"must be at least {highest}, the highest number that the log has assigned"
        return Refused(Reason.UNEXPECTED_POSITION, message, field="above", current=highest)
    if state.records:
        return Refused(Reason.MALFORMED, "a leap must be the only item in its batch", field="above")
    for lane in lanes:
        lane.leap(item.above)
        state.append_internal(lane, RESTORE_POLICY, RESTORE_ACTOR, item.body)
    state.leap_above = item.above
    return Applied(changed=True)
