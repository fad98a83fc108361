"""How long to wait before the next attempt: longer each time, not all alike, and not less than the gateway asks for."""

import random
from collections.abc import Iterator
from typing import Final

from oncelog.client.deltas.limits import DeltasLimits
from oncelog.client.deltas.pushing import Pause
from oncelog.client.wire import pauses_s

STORE_PAUSE: Final = Pause(500)
"""Before the next attempt to write to a file that cannot be written."""


class Patience:
    """Of one task."""

    def __init__(self, limits: DeltasLimits, chance: random.Random) -> None:
        self._limits = limits
        self._chance = chance
        self._short: Iterator[float]
        self._long: Iterator[float]
        self.renew()

    def renew(self) -> None:
        """It went well: the next pause is a short one again."""
        limits = self._limits
        self._short = pauses_s(limits.pause_ms_min, limits.pause_ms_max, self._chance)
        self._long = pauses_s(limits.refused_pause_ms_min, limits.refused_pause_ms_max, self._chance)

    def pause_s(self, pause: Pause) -> float:
        """For one attempt."""
        least_ms = min(pause.least_ms, self._limits.retry_after_ms_max)
        return max(next(self._long if pause.is_long else self._short), least_ms * self._chance.uniform(1, 1.2) / 1000)
