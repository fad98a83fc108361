"""Clock of a log in a database: the database's time, checked against the steady clock of the server's machine.

All gateways write by one clock, and none by its own. A gateway remembers what that clock showed when it looked last,
and writes it down now and then for those who are started on its machine later: so each of them notices a jump.
"""

from typing import Final

from oncelog.storage.clock import Clock, ClockMark, SystemClock

CLOCK_SAVE_MS: Final = 10_000
"""How often a mark is written down."""


class ClockSnapshot:
    """The database's clock at one moment, with a machine's own steady clock."""

    def __init__(self, wall_ms: int, clock: Clock) -> None:
        self._wall_ms = wall_ms
        self._clock = clock

    def wall_ms(self) -> int:
        """As `Clock` says."""
        return self._wall_ms

    def elapsed_ms(self) -> int:
        """As `Clock` says."""
        return self._clock.elapsed_ms()

    def boot(self) -> str:
        """As `Clock` says."""
        return self._clock.boot()


class DatabaseClock:
    """What one gateway knows of the database's clock. With a clock of its own, as tests have one, it uses that."""

    def __init__(self, clock: Clock | None, jump_ms_max: int, save_ms: int = CLOCK_SAVE_MS) -> None:
        self._own_clock = clock
        self._clock = clock or SystemClock()
        self._jump_ms_max = jump_ms_max
        self._save_interval_ms = save_ms
        self._confirmations = -1
        self._mark: ClockMark | None = None

    @property
    def boot(self) -> str:
        """Which start of the machine its marks are of."""
        return self._clock.boot()

    def now_ms(self, database_ms: int) -> int:
        """The time to write by."""
        return database_ms if self._own_clock is None else self._own_clock.wall_ms()

    def propose(
        self, database_ms: int, confirmations: int, stored: tuple[int | None, int | None]
    ) -> tuple[ClockMark, Exception | None]:
        """The mark of a commit made now, and what stands in its way. `stored` is what was saved on this boot."""
        mark = self._get_newest_mark(confirmations, stored)
        return mark.propose(ClockSnapshot(self.now_ms(database_ms), self._clock), self._jump_ms_max)

    def get_latest_ms(self, database_ms: int, confirmations: int, stored: tuple[int | None, int | None]) -> int:
        """As `ClockMark.get_latest_ms`, with the database's clock."""
        mark = self._get_newest_mark(confirmations, stored)
        return mark.get_latest_ms(ClockSnapshot(self.now_ms(database_ms), self._clock))

    def _get_newest_mark(self, confirmations: int, stored: tuple[int | None, int | None]) -> ClockMark:
        if confirmations != self._confirmations:
            self._confirmations, self._mark = confirmations, None
        elapsed_ms, time_ms = stored
        mark = ClockMark() if elapsed_ms is None or time_ms is None else ClockMark(self.boot, elapsed_ms, time_ms)
        if self._mark is not None and self._mark.boot == self.boot and self._mark.elapsed_ms > mark.elapsed_ms:
            mark = self._mark
        return mark

    def is_save_due(self, mark: ClockMark, stored: tuple[int | None, int | None]) -> bool:
        """Whether it is time to write the mark down."""
        return stored[0] is None or mark.elapsed_ms - stored[0] >= self._save_interval_ms

    def remember(self, mark: ClockMark) -> None:
        """A commit with this mark has been made."""
        self._mark = mark

    def create_mark(self, database_ms: int) -> ClockMark:
        """Of the clock as it is, whatever was known before."""
        return ClockMark(self.boot, self._clock.elapsed_ms(), self.now_ms(database_ms))
