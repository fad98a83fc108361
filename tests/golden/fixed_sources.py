"""Fork server whose commands have a frozen clock and a fixed sequence of random bytes.

Timestamps, epochs, salts, generated ids and hashes are therefore the same in every run, and golden files can contain
them. The module replaces the sources in the standard library before any Oncelog module is imported, so it must not
import from Oncelog itself.
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
"""The machine has been up for an hour."""


class FixedRandom:
    """Replacement for `os.urandom`. Each size has a separate sequence, so that an additional draw shifts only draws of
    its size.
    """

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
    """Replace the wall and boot clocks and the source of random bytes, but not the monotonic clock."""
    real_clock_ns = time.clock_gettime_ns
    fixed_ns = {time.CLOCK_REALTIME: NOW_MS * 10**6, time.CLOCK_BOOTTIME: ELAPSED_MS * 10**6}
    time.time = lambda: NOW_MS / 1000
    time.time_ns = lambda: NOW_MS * 10**6
    time.clock_gettime_ns = lambda clock: fixed_ns[clock] if clock in fixed_ns else real_clock_ns(clock)
    os.urandom = FixedRandom()
    # These modules keep their own reference to `os.urandom` once they are imported.
    for module in ("random", "secrets", "uuid", "tempfile"):
        if module in sys.modules:
            raise RuntimeError(f"{module} was imported before its source of random bytes could be replaced")


if __name__ == "__main__":
    fix_sources()
    import runpy

    runpy.run_module("cli.fork_server", run_name="__main__", alter_sys=True)
