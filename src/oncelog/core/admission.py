"""Admission of a request as a whole: its new items are admitted by the rates together, or none of them is."""

from oncelog.core.values import Refused


class Admission:
    """The rates of one request. Its items take their tokens first; `plan` checks `refused` after the last one.

    A bucket may be overdrawn by a request that has more new items than the burst, if the bucket was full before: no
    waiting would ever make room for such a request. The debt is paid back before the next token.
    """

    __slots__ = ("_before_us", "_missing_us", "refused")

    def __init__(self) -> None:
        self._before_us: dict[object, int] = {}
        """When each bucket would have been full, before the request."""
        self._missing_us = 0
        self.refused: Refused | None = None
        """The refusal with the longest wait; None while the request is admitted."""

    def missing_us(self, bucket: object, before_us: int, missing_us: int, now_us: int) -> int:
        """Return how long the request must wait for a bucket that one of its items takes a token of.

        `before_us` is when the bucket would be full without that token, `missing_us` how long the token takes to come.
        """
        return min(self._before_us.setdefault(bucket, before_us) - now_us, missing_us)

    def refuse(self, refused: Refused, missing_us: int) -> None:
        """Refuse the request, unless a longer wait is known already."""
        if missing_us > self._missing_us:
            self._missing_us, self.refused = missing_us, refused
