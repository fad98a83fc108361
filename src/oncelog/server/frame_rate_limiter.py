"""What a connection may send at all, before it is read."""

from oncelog.error_codes import BAD_REQUEST, RATE_LIMITED
from oncelog.server.errors import ApiError
from oncelog.server.limits import CONNECT_BYTES_MAX, ApiLimits
from oncelog.storage.clock import Clock


class FrameRateLimiter:
    """Of one connection."""

    __slots__ = ("_clock", "_frames", "_frames_max", "_second")

    def __init__(self, limits: ApiLimits, clock: Clock) -> None:
        self._frames_max = limits.frames_per_second_max
        self._clock = clock
        self._second = 0
        self._frames = 0

    def find_violation(self, size: int, *, is_authenticated: bool) -> ApiError | None:
        """What must not even be read: too long for somebody that nobody knows, or too many frames in a second."""
        if not is_authenticated and size > CONNECT_BYTES_MAX:
            message = f"the first message must have at most {CONNECT_BYTES_MAX} bytes, not {size}"
            return ApiError(BAD_REQUEST, message, limit=CONNECT_BYTES_MAX)
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
        return ApiError(RATE_LIMITED, message, limit=frames_max, retry_after_ms=1000)
