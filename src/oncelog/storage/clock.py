"""The time of an embedded log: the wall clock, checked against the machine's steady one.

Remembered identities are forgotten by log time, so a wall clock that jumps forward would make the log forget. What a
log keeps of the time of its newest commit (`ClockMark`) lets every process, also one that was started later, tell a
jump from time that has really passed: on the same boot of the machine the steady clock has counted it.
"""

import os
import time
from pathlib import Path
from typing import Final, Protocol

from msgspec import Struct
from msgspec.structs import replace

from oncelog.errors import ClockJumpedError

JUMP_MS_MAX: Final = 600_000
"""How far the wall clock may run ahead of the steady one between two commits."""


class Clock(Protocol):
    """What a log asks for the time. Tests have one that they can set."""

    def wall_ms(self) -> int:
        """Milliseconds since 1970, as the machine believes; may jump."""

    def elapsed_ms(self) -> int:
        """Milliseconds since the machine started, sleep included; never jumps."""

    def boot(self) -> str:
        """Which start of the machine `elapsed_ms` counts from."""


class SystemClock:
    """The clocks of the machine."""

    def __init__(self) -> None:
        self._boot_id = _read_boot_id()

    def wall_ms(self) -> int:
        """As `Clock` says."""
        return time.time_ns() // 1_000_000

    def elapsed_ms(self) -> int:
        """As `Clock` says. CLOCK_MONOTONIC would stand still while a laptop sleeps."""
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000

    def boot(self) -> str:
        """As `Clock` says."""
        return self._boot_id


class ClockMark(Struct, frozen=True):
    """The time of the newest commit, by both clocks."""

    boot: str = ""
    elapsed_ms: int = 0
    time_ms: int = 0

    def advance(self, clock: Clock, jump_ms_max: int = JUMP_MS_MAX) -> "ClockMark":
        """The mark of a commit made now. Its time is never before this one's.

        Raises ClockJumpedError if more time has passed on the wall clock than on the steady one.
        """
        now = ClockMark(clock.boot(), clock.elapsed_ms(), clock.wall_ms())
        if now.time_ms <= self.time_ms:
            # A clock that was set back. The older mark stays, so that the way forward again is not a jump.
            return self
        ahead_ms = now.time_ms - self.predict_wall_ms(clock)
        if self.boot == now.boot and ahead_ms > jump_ms_max:
            raise ClockJumpedError(ahead_ms, jump_ms_max)
        return now

    def propose(self, clock: Clock, jump_ms_max: int = JUMP_MS_MAX) -> "tuple[ClockMark, ClockJumpedError | None]":
        """As `advance`; behind a jump the error, and the time that must be right: retries are still answered."""
        try:
            return self.advance(clock, jump_ms_max), None
        except ClockJumpedError as jumped:
            return replace(self, time_ms=self.predict_wall_ms(clock)), jumped

    def get_latest_ms(self, clock: Clock) -> int:
        """Return the later of the wall clock and what it must show by the steady one.

        After a restart of the machine only the wall clock is known.
        """
        wall_ms = clock.wall_ms()
        return max(wall_ms, self.predict_wall_ms(clock)) if self.boot == clock.boot() else wall_ms

    def predict_wall_ms(self, clock: Clock) -> int:
        """What the wall clock must show by the steady one, if the machine has not been restarted since."""
        passed_ms = clock.elapsed_ms() - self.elapsed_ms if clock.boot() == self.boot else 0
        return self.time_ms + max(0, passed_ms)


def _read_boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return f"process {os.getpid()} at {time.time_ns()}"  # no such file: at least this process notices a jump
