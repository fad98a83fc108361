"""Clock of an embedded log: the wall clock, checked against the machine's monotonic clock.

Keys expire by log time, so a wall clock that jumps forward would make the log forget keys too early. A log stores the
time of its newest commit as read from both clocks (`ClockMark`). From this mark every process, including one that
starts later, can tell a jump from time that has really passed, as long as the machine has not been restarted.
"""

import os
import time
from pathlib import Path
from typing import Final, Protocol

from msgspec import Struct
from msgspec.structs import replace

from oncelog.errors import ClockJumpedError

JUMP_MS_MAX: Final = 600_000
"""How far the wall clock may run ahead of the monotonic clock between two commits."""


class Clock(Protocol):
    """Source of time for a log. Tests inject a clock that they control."""

    def wall_ms(self) -> int:
        """Return the milliseconds since 1970 according to the machine's wall clock, which may jump."""

    def elapsed_ms(self) -> int:
        """Return the milliseconds since the machine started, including sleep. This clock never jumps."""

    def boot(self) -> str:
        """Return the id of the machine's current boot, from which `elapsed_ms` counts."""


class SystemClock:
    """Clock of the operating system."""

    def __init__(self) -> None:
        self._boot_id = _read_boot_id()

    def wall_ms(self) -> int:
        """See `Clock`."""
        return time.time_ns() // 1_000_000

    def elapsed_ms(self) -> int:
        """See `Clock`. CLOCK_MONOTONIC is not suitable, because it stops while the machine sleeps."""
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000

    def boot(self) -> str:
        """See `Clock`."""
        return self._boot_id


class ClockMark(Struct, frozen=True):
    """A reading of both clocks, at a commit or now."""

    boot: str = ""
    elapsed_ms: int = 0
    time_ms: int = 0

    @classmethod
    def read(cls, clock: Clock) -> "ClockMark":
        """Return the current reading of a clock."""
        return cls(clock.boot(), clock.elapsed_ms(), clock.wall_ms())

    def advance(self, now: "ClockMark", jump_ms_max: int = JUMP_MS_MAX) -> "ClockMark":
        """Return the mark of a commit made now, after the commit that set this mark. It is never earlier than this
        mark.

        Raises ClockJumpedError if the wall clock has advanced further than the monotonic clock allows.
        """
        if now.time_ms <= self.time_ms:
            # The wall clock was set back. Keep the older mark, so that a later correction is not treated as a jump.
            return self
        ahead_ms = now.time_ms - self.predict_wall_ms(now)
        if self.boot == now.boot and ahead_ms > jump_ms_max:
            raise ClockJumpedError(ahead_ms, jump_ms_max)
        return now

    def propose(self, now: "ClockMark", jump_ms_max: int = JUMP_MS_MAX) -> "tuple[ClockMark, ClockJumpedError | None]":
        """Return the mark of a commit made now, and an error if the wall clock has jumped.

        After a jump the mark has the time that the monotonic clock predicts, so that retries are still answered.
        """
        try:
            return self.advance(now, jump_ms_max), None
        except ClockJumpedError as jumped:
            return replace(self, time_ms=self.predict_wall_ms(now)), jumped

    def get_latest_ms(self, now: "ClockMark") -> int:
        """Return the later of the wall clock and its prediction by the monotonic clock.

        After a restart of the machine only the wall clock is available.
        """
        return max(now.time_ms, self.predict_wall_ms(now)) if self.boot == now.boot else now.time_ms

    def predict_wall_ms(self, now: "ClockMark") -> int:
        """Return the wall time that the monotonic clock predicts, or the mark's time after a restart of the machine."""
        passed_ms = now.elapsed_ms - self.elapsed_ms if now.boot == self.boot else 0
        return self.time_ms + max(0, passed_ms)


def _read_boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return f"process {os.getpid()} at {time.time_ns()}"  # without the file, only this process can detect a jump
