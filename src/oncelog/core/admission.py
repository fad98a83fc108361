"""Admission of a request as a whole: its new items are admitted by the rates together, or none of them is."""

from oncelog.core.values import Refused


class Admission:
    """The rates of one request. Its items take their tokens first; `plan` checks `refusal` after the last one.

    A bucket may be overdrawn by a request that has more new items than the burst, if the bucket was full before: no
    waiting would ever make room for such a request. The debt is paid back before the next token.
    """

    __slots__ = ("_full_at_us", "_longest_wait_us", "refusal")

    def __init__(self) -> None:
        self._full_at_us: dict[object, int] = {}
        """When each bucket would have been full, before the request."""
        self._longest_wait_us = 0
        self.refusal: Refused | None = None
        """The refusal with the longest wait; None while the request is admitted."""

    def compute_wait_us(self, bucket: object, full_at_us: int, wait_us: int, now_us: int) -> int:
        """Return how long the request must wait for a bucket that one of its items takes a token of.

        `full_at_us` is when the bucket would be full without that token, `wait_us` how long the token takes to come.
        """
        return min(self._full_at_us.setdefault(bucket, full_at_us) - now_us, wait_us)

    def refuse(self, refusal: Refused, wait_us: int) -> None:
        """Refuse the request, unless a longer wait is known already."""
        if wait_us > self._longest_wait_us:
            self._longest_wait_us, self.refusal = wait_us, refusal
