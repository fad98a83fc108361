"""Writes that a server does not take for now: what it says of them, so that whoever waits behind them can see why."""

import logging


class BlockedWrites:
    """Of one outbox: at most one in each of its queues, since what is behind a write waits for it."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._errors: dict[str, str] = {}

    @property
    def last_error(self) -> str | None:
        """What was said last, of those that are not over; None if there are none."""
        return next(reversed(self._errors.values()), None)

    def block(self, code: str, message: str, queue: str = "") -> None:
        """The first write of a queue is to be sent again later. Kept over lost connections: it is no other write."""
        is_new = self._errors.pop(queue, None) is None
        self._errors[queue] = f"{code}: {message}"
        if is_new:
            self._logger.warning("not taken for now%s: %s", _format_queue(queue), self._errors[queue])

    def unblock(self, queue: str = "") -> None:
        """A write of this queue has its outcome."""
        if self._errors.pop(queue, None) is not None:
            self._logger.info("writes are taken again%s", _format_queue(queue))


def _format_queue(queue: str) -> str:
    return f" in {queue}" if queue else ""
