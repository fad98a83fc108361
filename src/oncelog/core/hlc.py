"""Hybrid logical clocks: 48 bits of wall milliseconds and 16 bits of counter in one 64-bit number.

The only operations on this number are `max` and `+ 1`; a counter overflow carries into the wall part. This module reads
no clock: callers pass the time.
"""

import re
from typing import Final

from msgspec import Struct

from oncelog.core.limits import CLOCK_DRIFT_MS_MAX
from oncelog.errors import CanonicalError

COUNTER_BITS: Final = 16
HLC_MAX: Final = 2**64 - 1

_CANONICAL_DECIMAL: Final = re.compile(r"0|[1-9][0-9]{0,19}")


class ClockDrift(Struct, frozen=True):
    """A remote clock is too far ahead. Its reading was rejected."""

    ahead_ms: int
    limit_ms: int = CLOCK_DRIFT_MS_MAX


class ClockExhausted(Struct, frozen=True):
    """The next number does not fit in 64 bits. A correct wall clock reaches this in the year 10889."""


def wall_ms(hlc: int) -> int:
    """Return the wall part of a reading."""
    return hlc >> COUNTER_BITS


def tick(last: int, wall_now_ms: int) -> int | ClockExhausted:
    """Return the next local reading, above `last` and not behind the wall clock."""
    return _check_range(max(last + 1, wall_now_ms << COUNTER_BITS))


def receive(last: int, remote: int, wall_now_ms: int) -> int | ClockDrift | ClockExhausted:
    """Return the next local reading after receiving a remote one, above both and not behind the wall clock."""
    drift = check_drift(remote, wall_now_ms)
    return drift or _check_range(max(last + 1, remote + 1, wall_now_ms << COUNTER_BITS))


def check_drift(remote: int, wall_now_ms: int) -> ClockDrift | None:
    """Return the drift if a remote reading is further ahead than the limit allows, or None."""
    ahead_ms = wall_ms(remote) - wall_now_ms
    return ClockDrift(ahead_ms) if ahead_ms > CLOCK_DRIFT_MS_MAX else None


def parse_hlc(text: str, path: str = "$.hlc") -> int:
    """Parse a reading from decimal text without leading zeros. Raises CanonicalError."""
    hlc = int(text) if _CANONICAL_DECIMAL.fullmatch(text) else HLC_MAX + 1
    if hlc > HLC_MAX:
        raise CanonicalError(path, "must be a decimal string from 0 to 2^64−1 without leading zeros")
    return hlc


def format_hlc(hlc: int, path: str = "$.hlc") -> str:
    """Format a reading as decimal text. Raises CanonicalError for a number out of range."""
    if not 0 <= hlc <= HLC_MAX:
        raise CanonicalError(path, "must be from 0 to 2^64−1")
    return str(hlc)


def _check_range(hlc: int) -> int | ClockExhausted:
    return hlc if hlc <= HLC_MAX else ClockExhausted()
