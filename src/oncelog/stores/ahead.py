"""A warning about readers that are ahead of the log."""

import logging
from time import monotonic
from typing import Final

logger: Final = logging.getLogger("oncelog.engine")

WARN_PAUSE_S: Final = 600
"""Pause between two warnings about readers of the same history."""
_HISTORIES_MAX: Final = 100
_warned_s: dict[str, float] = {}
"""When the last warning was logged, by epoch."""


def warn_of_reader_ahead(order: str, cursor: int, newest: int, epoch: str) -> None:
    """Log that a cursor is ahead of the order that it reads: the log may have been put back to an earlier state."""
    now_s = monotonic()
    if now_s - _warned_s.get(epoch, -WARN_PAUSE_S) < WARN_PAUSE_S:
        return
    if len(_warned_s) >= _HISTORIES_MAX:
        _warned_s.clear()
    _warned_s[epoch] = now_s
    logger.warning(
        "a reader of %s is at %d, ahead of the newest record, %d. If the log was restored without `oncelog restore`, "
        "stop everything that uses it and run `oncelog epoch LOG --renew`",
        order,
        cursor,
        newest,
    )
