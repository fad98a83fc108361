"""Writes that a server refuses temporarily, and its reasons, for the status of a client whose later writes wait."""

import logging


class BlockedWrites:
    """Blocked writes of one outbox: at most one in each queue, since later writes of a queue wait for it."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._errors: dict[str, str] = {}

    @property
    def last_error(self) -> str | None:
        """The last reason of the writes that are still blocked; None without one."""
        return next(reversed(self._errors.values()), None)

    def block(self, code: str, message: str, queue: str = "") -> None:
        """Record that the first write of a queue is sent again later. A lost connection does not change that."""
        is_new = self._errors.pop(queue, None) is None
        self._errors[queue] = f"{code}: {message}"
        if is_new:
            self._logger.warning("not taken for now%s: %s", _format_queue(queue), self._errors[queue])

    def unblock(self, queue: str = "") -> None:
        """Record that a write of a queue has its outcome."""
        if self._errors.pop(queue, None) is not None:
            self._logger.info("writes are taken again%s", _format_queue(queue))


def _format_queue(queue: str) -> str:
    return f" in {queue}" if queue else ""
