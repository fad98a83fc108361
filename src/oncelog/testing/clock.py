"""A clock that tests set by hand."""

from typing import Final

START_MS: Final = 1_700_000_000_000
"""Default start of the wall clock: November 2023."""


class ManualClock:
    """A `storage.clock.Clock` for tests.

    Its wall clock and its monotonic clock move only when a test calls a method.
    """

    def __init__(self, wall_ms: int = START_MS) -> None:
        self._wall_ms = wall_ms
        self._elapsed_ms = 0
        self._boots = 1

    def wall_ms(self) -> int:
        """Return the time of the wall clock."""
        return self._wall_ms

    def elapsed_ms(self) -> int:
        """Return the time of the monotonic clock."""
        return self._elapsed_ms

    def boot(self) -> str:
        """Return the id of the current boot."""
        return f"boot {self._boots}"

    def advance(self, ms: int) -> None:
        """Advance both clocks."""
        if ms < 0:
            raise ValueError(f"ms must be at least 0, not {ms}; use `jump` to set the wall clock back")
        self._wall_ms += ms
        self._elapsed_ms += ms

    def jump(self, ms: int) -> None:
        """Set the wall clock forward, or back if `ms` is negative."""
        self._wall_ms += ms

    def restart(self) -> None:
        """Simulate a restart of the machine, which resets the monotonic clock to 0."""
        self._boots += 1
        self._elapsed_ms = 0
