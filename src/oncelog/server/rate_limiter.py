"""Rate limits by key, for example for failed authentications by address, and for log lines that clients can cause.

Each key's token bucket is one number: the time at which the bucket will be full again. Each token that a caller takes
delays that time by the refill time of one token. A full bucket needs no entry, and no task refills buckets.
"""

import logging
import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final

from oncelog.errors import SettingsError
from oncelog.server import logger

LINES_MAX: Final = 5
"""Lines per second with the same message."""
_MESSAGES_MAX: Final = 1000
"""Higher than the number of different messages in the server, so the limiter evicts none."""

_ROUNDING_MS: Final = 1e-6
"""Tolerance: much larger than rounding errors, and much smaller than any delay that matters to a caller."""


class RateLimiter:
    """Token buckets by key: `per_second` in the long run, and `burst` at once. A rate of 0 switches the limit off.

    `now_ms` must be a steady clock. The limiter stores `keys_max` keys and evicts the least recently used one, whose
    bucket is then full again.
    """

    def __init__(self, per_second: float, burst: int, keys_max: int, now_ms: Callable[[], float]) -> None:
        if per_second < 0 or burst < 1 or keys_max < 1:
            raise SettingsError("per_second must be at least 0, and burst and keys_max must be at least 1")
        self._keys_max = keys_max
        self._now_ms = now_ms
        self._token_ms = 1000 / per_second if per_second else 0.0
        self._slack_ms = self._token_ms * (burst - 1)
        """Time that a bucket with exactly one token needs to become full."""
        self._full_at_ms: OrderedDict[str, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._full_at_ms)

    def allows(self, key: str) -> bool:
        """Return whether the bucket has a token, without taking it."""
        return self._get_deficit_ms(key) <= _ROUNDING_MS

    def take(self, key: str, count: int = 1) -> None:
        """Take tokens. The bucket may be overdrawn; the key must then wait until it has refilled."""
        if not self._token_ms or count <= 0:
            return
        now_ms = self._now_ms()
        self._full_at_ms[key] = max(self._full_at_ms.get(key, now_ms), now_ms) + count * self._token_ms
        self._full_at_ms.move_to_end(key)
        if len(self._full_at_ms) > self._keys_max:
            self._full_at_ms.popitem(last=False)

    def retry_after_ms(self, key: str) -> int:
        """Return the time until `allows` returns True, or 0 if it already does."""
        return max(0, math.ceil(self._get_deficit_ms(key) - _ROUNDING_MS))

    def _get_deficit_ms(self, key: str) -> float:
        full_ms = self._full_at_ms.get(key)
        if full_ms is None:
            return 0.0
        # A look-up counts as use: a refused key must not be evicted while its caller keeps trying.
        self._full_at_ms.move_to_end(key)
        return full_ms - self._now_ms() - self._slack_ms


class LogLimiter:
    """Writes lines to the server's logger, at most `lines_max` per second for each message.

    A client that fails a thousand times a second must not fill the log. The limiter counts the lines above the limit,
    and the next line of that message carries the count.

    Messages are constants in the code; values that a client chooses belong in the fields. The owner calls `flush` about
    once a second, so that the count of the last burst is written too.
    """

    def __init__(self, now_ms: Callable[[], float], lines_max: int = LINES_MAX) -> None:
        self._rates = RateLimiter(lines_max, lines_max, _MESSAGES_MAX, now_ms)
        self._suppressed: dict[str, tuple[int, int, dict[str, Any]]] = {}
        """How many lines were suppressed, by message, with the level and fields of the last suppressed line."""

    def log(self, level: int, message: str, **fields: Any) -> None:
        """Write a line, or count it as suppressed."""
        if not logger.isEnabledFor(level):
            return
        suppressed = self._suppressed.get(message, (0,))[0]
        if self._rates.allows(message):
            self._write(level, message, fields, suppressed)
        else:
            self._suppressed[message] = (suppressed + 1, level, fields)

    def warn(self, message: str, **fields: Any) -> None:
        """Write a warning, or count it as suppressed."""
        self.log(logging.WARNING, message, **fields)

    def flush(self) -> None:
        """For each message that is back within its limit, write the last suppressed line, with the suppressed count."""
        for message, (suppressed, level, fields) in list(self._suppressed.items()):
            if self._rates.allows(message):
                self._write(level, message, fields, suppressed - 1)

    def _write(self, level: int, message: str, fields: dict[str, Any], suppressed: int) -> None:
        self._rates.take(message)
        self._suppressed.pop(message, None)
        logger.log(level, message, extra={**fields, "suppressed": suppressed} if suppressed else fields)
