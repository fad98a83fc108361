"""How often something may happen in one process, by key: failed authentications of an address.

A bucket of tokens, kept as one number a key: the moment at which it will be full again. Every token that is taken
puts that moment off by the time that one token needs to come back. So a key that has waited long enough needs no entry
at all, and nothing has to run in the background.
"""

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from oncelog.errors import SettingsError

_ROUNDING_MS: Final = 1e-6
"""Far more than floats lose here, far less than anybody can wait."""


class RateLimiter:
    """At most `per_second` in the long run, and `burst` at once; 0 a second is no limit.

    `now_ms` must be a steady clock. At most `keys_max` keys are known: the least recently used goes first, and starts
    anew with a full bucket if it comes again.
    """

    def __init__(self, per_second: float, burst: int, keys_max: int, now_ms: Callable[[], float]) -> None:
        if per_second < 0 or burst < 1 or keys_max < 1:
            raise SettingsError("a rate must be 0 or more a second, its burst and its keys 1 or more")
        self._keys_max = keys_max
        self._now_ms = now_ms
        self._token_ms = 1000 / per_second if per_second else 0.0
        self._slack_ms = self._token_ms * (burst - 1)
        """How far off a full bucket may be while there is a whole token in it."""
        self._full_at_ms: OrderedDict[str, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._full_at_ms)

    def allows(self, key: str) -> bool:
        """Whether it may happen once more. Takes nothing."""
        return self._get_deficit_ms(key) <= _ROUNDING_MS

    def take(self, key: str, count: int = 1) -> None:
        """It has happened. More than there was may be taken: then the key waits until that has come back too."""
        if not self._token_ms or count <= 0:
            return
        now_ms = self._now_ms()
        self._full_at_ms[key] = max(self._full_at_ms.get(key, now_ms), now_ms) + count * self._token_ms
        self._full_at_ms.move_to_end(key)
        if len(self._full_at_ms) > self._keys_max:
            self._full_at_ms.popitem(last=False)

    def retry_after_ms(self, key: str) -> int:
        """After how long `allows` will say yes; 0 if it does now."""
        return max(0, math.ceil(self._get_deficit_ms(key) - _ROUNDING_MS))

    def _get_deficit_ms(self, key: str) -> float:
        full_ms = self._full_at_ms.get(key)
        if full_ms is None:
            return 0.0
        # Asked for is used: one who is held off must not be forgotten while they keep trying.
        self._full_at_ms.move_to_end(key)
        return full_ms - self._now_ms() - self._slack_ms
