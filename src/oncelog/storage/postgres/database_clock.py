"""Clock of a log in a database: the database's time, checked against this machine's monotonic clock.

All processes use the database's clock, so that they agree on log time. Each process keeps the newest reading
(`ClockMark`) and saves it regularly, so that a process that starts later on the same machine can detect a jump too.
"""

from typing import Final

from oncelog.storage.clock import Clock, ClockMark, SystemClock

CLOCK_SAVE_MS: Final = 10_000
"""Interval between two saved marks."""


class DatabaseClock:
    """The database's clock as one process sees it. Tests pass a clock to replace it."""

    def __init__(self, clock: Clock | None, jump_ms_max: int, save_ms: int = CLOCK_SAVE_MS) -> None:
        self._own_clock = clock
        self._clock = clock or SystemClock()
        self._jump_ms_max = jump_ms_max
        self._save_interval_ms = save_ms
        self._confirmations = -1
        self._mark: ClockMark | None = None

    @property
    def boot(self) -> str:
        """Return the id of this boot of the machine, to which its marks refer."""
        return self._clock.boot()

    def now_ms(self, database_ms: int) -> int:
        """Return the time that commits use."""
        return database_ms if self._own_clock is None else self._own_clock.wall_ms()

    def propose(
        self, database_ms: int, confirmations: int, stored: tuple[int | None, int | None]
    ) -> tuple[ClockMark, Exception | None]:
        """Return the mark of a commit made now, and an error if the clock has jumped.

        `stored` is the mark that was saved since this boot of the machine.
        """
        mark = self._get_newest_mark(confirmations, stored)
        return mark.propose(self.create_mark(database_ms), self._jump_ms_max)

    def get_latest_ms(self, database_ms: int, confirmations: int, stored: tuple[int | None, int | None]) -> int:
        """Like `ClockMark.get_latest_ms`, with the database's clock."""
        mark = self._get_newest_mark(confirmations, stored)
        return mark.get_latest_ms(self.create_mark(database_ms))

    def _get_newest_mark(self, confirmations: int, stored: tuple[int | None, int | None]) -> ClockMark:
        if confirmations != self._confirmations:
            self._confirmations, self._mark = confirmations, None
        elapsed_ms, time_ms = stored
        mark = ClockMark() if elapsed_ms is None or time_ms is None else ClockMark(self.boot, elapsed_ms, time_ms)
        if self._mark is not None and self._mark.boot == self.boot and self._mark.elapsed_ms > mark.elapsed_ms:
            mark = self._mark
        return mark

    def is_save_due(self, mark: ClockMark, stored: tuple[int | None, int | None]) -> bool:
        """Return whether the mark should be saved."""
        return stored[0] is None or mark.elapsed_ms - stored[0] >= self._save_interval_ms

    def remember(self, mark: ClockMark) -> None:
        """Remember the mark of a commit."""
        self._mark = mark

    def create_mark(self, database_ms: int) -> ClockMark:
        """Return a mark of the current time, without checking it against earlier marks."""
        return ClockMark(self.boot, self._clock.elapsed_ms(), self.now_ms(database_ms))
