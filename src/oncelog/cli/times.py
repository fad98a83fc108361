"""Times and durations in the options of commands."""

import re
import time
from datetime import UTC, datetime, timedelta
from typing import Final

from oncelog.cli.output import EPOCH
from oncelog.errors import OncelogError

_DURATION: Final = re.compile(r"(\d{1,9})([smhd])", re.ASCII)
_UNIT_MS: Final = {"s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


def parse_utc_ms(text: str) -> int | None:
    """Parse an ISO 8601 time, UTC if it has no offset, into milliseconds since 1970. Return None if it is malformed."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return ((moment if moment.tzinfo else moment.replace(tzinfo=UTC)) - EPOCH) // timedelta(milliseconds=1)


def find_duration_ms(text: str) -> int | None:
    """Parse a duration such as `15m` or `30d` into milliseconds. Return None if the text is not a duration."""
    parts = _DURATION.fullmatch(text)
    return None if parts is None else int(parts[1]) * _UNIT_MS[parts[2]]


def parse_duration_ms(text: str) -> int:
    """Like `find_duration_ms`, but raises OncelogError if the text is not a duration."""
    duration_ms = find_duration_ms(text)
    if duration_ms is None:
        raise OncelogError(f"{text!r} is not a duration: write a number and s, m, h or d")
    return duration_ms


def parse_time_ms(text: str, option: str) -> int | None:
    """Parse a time, or a duration before now, into milliseconds since 1970. Return None for an empty text."""
    if not text:
        return None
    ago_ms = find_duration_ms(text)
    if ago_ms is not None:
        return max(0, round(time.time() * 1000) - ago_ms)
    time_ms = parse_utc_ms(text)
    if time_ms is None:
        raise OncelogError(
            f"{option} must be a time such as 2026-11-18T12:00 (UTC), or a duration such as 24h, not {text!r}"
        )
    return max(0, time_ms)
