"""A warning about readers that are ahead of the log."""

import logging
from time import monotonic
from typing import Final

logger: Final = logging.getLogger("oncelog.engine")

WARNING_INTERVAL_S: Final = 600
"""Pause between two warnings about readers of the same history."""
_EPOCHS_MAX: Final = 100
_last_warning_s: dict[str, float] = {}
"""When the last warning was logged, by epoch."""


def warn_of_reader_ahead(order: str, cursor: int, newest: int, epoch: str) -> None:
    """Log that a cursor is ahead of the order that it reads: the log may have been put back to an earlier state."""
    now_s = monotonic()
    if now_s - _last_warning_s.get(epoch, -WARNING_INTERVAL_S) < WARNING_INTERVAL_S:
        return
    if len(_last_warning_s) >= _EPOCHS_MAX:
        _last_warning_s.clear()
    _last_warning_s[epoch] = now_s
    logger.warning(
        "a reader of %s is at %d, ahead of the newest record, %d. If the log was restored without `oncelog restore`, "
        "stop everything that uses it and run `oncelog epoch LOG --renew`",
        order,
        cursor,
        newest,
    )
