"""A clock that stands still until it is told to move."""

from typing import Final

START_MS: Final = 1_700_000_000_000
"""Where the wall clock starts unless told otherwise: in November 2023."""


class ManualClock:
    """A `stores.clock.Clock` for tests: the wall clock and the machine's steady one, moved by hand."""

    def __init__(self, wall_ms: int = START_MS) -> None:
        self._wall_ms = wall_ms
        self._elapsed_ms = 0
        self._boots = 1

    def wall_ms(self) -> int:
        """As `Clock` says."""
        return self._wall_ms

    def elapsed_ms(self) -> int:
        """As `Clock` says."""
        return self._elapsed_ms

    def boot(self) -> str:
        """As `Clock` says."""
        return f"boot {self._boots}"

    def advance(self, ms: int) -> None:
        """Time passes, on both clocks."""
        if ms < 0:
            raise ValueError(f"time does not go back, so it cannot advance by {ms} ms; a wall clock can jump")
        self._wall_ms += ms
        self._elapsed_ms += ms

    def jump(self, ms: int) -> None:
        """Somebody sets the wall clock forward, or back with a number below 0."""
        self._wall_ms += ms

    def restart(self) -> None:
        """The machine starts again: the steady clock counts from 0."""
        self._boots += 1
        self._elapsed_ms = 0
