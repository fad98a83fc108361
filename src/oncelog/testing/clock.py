"""A clock that tests move by hand."""

from typing import Final

START_MS: Final = 1_700_000_000_000
"""Default start of the wall clock: November 2023."""


class ManualClock:
    """A `storage.clock.Clock` for tests: the wall clock and the machine's steady clock move only by
    method calls."""

    def __init__(self, wall_ms: int = START_MS) -> None:
        self._wall_ms = wall_ms
        self._elapsed_ms = 0
        self._boots = 1

    def wall_ms(self) -> int:
        """Return the time of the wall clock."""
        return self._wall_ms

    def elapsed_ms(self) -> int:
        """Return the time of the steady clock."""
        return self._elapsed_ms

    def boot(self) -> str:
        """Return the id of the current boot."""
        return f"boot {self._boots}"

    def advance(self, ms: int) -> None:
        """Advance both clocks."""
        if ms < 0:
            raise ValueError(f"time does not go back, so it cannot advance by {ms} ms; a wall clock can jump")
        self._wall_ms += ms
        self._elapsed_ms += ms

    def jump(self, ms: int) -> None:
        """Set the wall clock forward, or back by a negative number."""
        self._wall_ms += ms

    def restart(self) -> None:
        """Restart the machine: the steady clock counts from 0."""
        self._boots += 1
        self._elapsed_ms = 0
