"""Fork server whose commands have a clock that stands still and a fixed sequence of random bytes.

Timestamps, epochs, salts, generated ids and hashes are then the same in every run, and golden files can contain them.
The sources are replaced in the standard library, before anything of Oncelog is imported. So this module depends on no
name of the product, and must not import one.
"""

import os
import sys
import time
from collections import Counter
from hashlib import blake2b
from typing import Final

NOW_MS: Final = 1_767_225_600_000
"""2026-01-01T00:00:00Z."""
ELAPSED_MS: Final = 3_600_000
"""The machine started an hour before."""


class FixedRandom:
    """Replaces `os.urandom`. Draws of different sizes are separate sequences, so that they do not shift each other."""

    def __init__(self) -> None:
        self.seed = ""
        self._draws = Counter[int]()

    def __call__(self, size: int) -> bytes:
        self._draws[size] += 1
        blocks = range(-(-size // 64))
        return b"".join(
            blake2b(f"{self.seed} {size} {self._draws[size]} {block}".encode()).digest() for block in blocks
        )[:size]


def fix_sources() -> None:
    """Replace the clocks that show a time, and the source of random bytes. Monotonic clocks for waits go on."""
    real_clock_ns = time.clock_gettime_ns
    fixed_ns = {time.CLOCK_REALTIME: NOW_MS * 10**6, time.CLOCK_BOOTTIME: ELAPSED_MS * 10**6}
    time.time = lambda: NOW_MS / 1000
    time.time_ns = lambda: NOW_MS * 10**6
    time.clock_gettime_ns = lambda clock: fixed_ns[clock] if clock in fixed_ns else real_clock_ns(clock)
    os.urandom = FixedRandom()
    # Modules that were imported before this one and have taken their own reference.
    for module in ("random", "secrets", "uuid", "tempfile"):
        if module in sys.modules:
            raise RuntimeError(f"{module} was imported before its source of random bytes could be replaced")


if __name__ == "__main__":
    fix_sources()
    import runpy

    runpy.run_module("cli.fork_server", run_name="__main__", alter_sys=True)
