"""What a connection may send at all, before it is read."""

from oncelog.codes import BAD_REQUEST, RATE_LIMITED
from oncelog.doors.faults import DoorError
from oncelog.doors.limits import CONNECT_BYTES_MAX, DoorLimits
from oncelog.stores.clock import Clock


class Pace:
    """Of one connection."""

    __slots__ = ("_clock", "_frames", "_frames_max", "_second")

    def __init__(self, limits: DoorLimits, clock: Clock) -> None:
        self._frames_max = limits.frames_per_second_max
        self._clock = clock
        self._second = 0
        self._frames = 0

    def refusal(self, size: int, *, is_known: bool) -> DoorError | None:
        """What must not even be read: too long for somebody that nobody knows, or too many frames in a second."""
        if not is_known and size > CONNECT_BYTES_MAX:
            message = f"the first message must have at most {CONNECT_BYTES_MAX} bytes, not {size}"
            return DoorError(BAD_REQUEST, message, limit=CONNECT_BYTES_MAX)
        frames_max = self._frames_max
        if not frames_max:
            return None
        second = self._clock.elapsed_ms() // 1000
        if second != self._second:
            self._second, self._frames = second, 0
        self._frames += 1
        if self._frames <= frames_max:
            return None
        message = f"frames_per_second_max is {frames_max}"
        return DoorError(RATE_LIMITED, message, limit=frames_max, retry_after_ms=1000)
