"""Hybrid logical clocks: 48 bits of wall milliseconds, 16 bits of counter, one 64-bit number.

Kept as that number, the whole algebra is `max` and `+ 1`: a counter that overflows carries into the wall part by
itself. Nothing here reads a clock; the caller says what time it is.
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
    """A remote clock is further ahead than is believed. Nothing was received."""

    ahead_ms: int
    limit_ms: int = CLOCK_DRIFT_MS_MAX


class ClockExhausted(Struct, frozen=True):
    """There is no larger 64-bit number. A wall clock in order gets here in the year 10889."""


def wall_ms(hlc: int) -> int:
    """The wall part."""
    return hlc >> COUNTER_BITS


def tick(last: int, wall_now_ms: int) -> int | ClockExhausted:
    """The next local reading: larger than `last`, and not behind the wall clock."""
    return _check_range(max(last + 1, wall_now_ms << COUNTER_BITS))


def receive(last: int, remote: int, wall_now_ms: int) -> int | ClockDrift | ClockExhausted:
    """The reading after a remote one has been seen: larger than both."""
    drift = check_drift(remote, wall_now_ms)
    return drift or _check_range(max(last + 1, remote + 1, wall_now_ms << COUNTER_BITS))


def check_drift(remote: int, wall_now_ms: int) -> ClockDrift | None:
    """None if the remote reading can be believed: exactly the limit still can."""
    ahead_ms = wall_ms(remote) - wall_now_ms
    return ClockDrift(ahead_ms) if ahead_ms > CLOCK_DRIFT_MS_MAX else None


def parse_hlc(text: str, path: str = "$.hlc") -> int:
    """The number behind the decimal text of the wire, which has one spelling only."""
    hlc = int(text) if _CANONICAL_DECIMAL.fullmatch(text) else HLC_MAX + 1
    if hlc > HLC_MAX:
        raise CanonicalError(path, "must be a decimal string from 0 to 2^64−1 without leading zeros")
    return hlc


def format_hlc(hlc: int, path: str = "$.hlc") -> str:
    """The decimal text of the wire. Raises CanonicalError for a number that no clock has."""
    if not 0 <= hlc <= HLC_MAX:
        raise CanonicalError(path, "must be from 0 to 2^64−1")
    return str(hlc)


def _check_range(hlc: int) -> int | ClockExhausted:
    return hlc if hlc <= HLC_MAX else ClockExhausted()
