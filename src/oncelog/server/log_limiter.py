"""Rate limit of log lines that clients can cause.

A client that fails a thousand times a second must not fill the log. Each message has a budget of lines for each second;
the lines above it are counted, and the next line of that message carries the count.
"""

import logging
from collections.abc import Callable
from typing import Any, Final

from msgspec import Struct

logger: Final = logging.getLogger("oncelog.doors")

LINES_MAX: Final = 5
"""Lines of one message in one window."""
WINDOW_MS: Final = 1000


class _Window(Struct):
    """State of one message."""

    started_ms: float
    lines: int = 0
    suppressed: int = 0
    level: int = 0
    fields: dict[str, Any] = {}
    """Level and fields of the last suppressed line."""


class LogLimiter:
    """Writes lines to the server's logger, at most `lines_max` of one message in a second.

    Messages are constants of the code: the limiter keeps one entry for each of them. Whatever a client chooses belongs
    into the fields. The owner calls `flush` about once a second, so that the count of the last burst is written too.
    """

    def __init__(self, now_ms: Callable[[], float], lines_max: int = LINES_MAX) -> None:
        self._now_ms = now_ms
        self._lines_max = lines_max
        self._windows: dict[str, _Window] = {}

    def log(self, level: int, message: str, **fields: Any) -> None:
        """Write a line, or count it as suppressed."""
        if not logger.isEnabledFor(level):
            return
        now_ms = self._now_ms()
        window = self._windows.get(message)
        if window is None:
            window = self._windows[message] = _Window(now_ms)
        elif now_ms - window.started_ms >= WINDOW_MS:
            window.started_ms, window.lines = now_ms, 0
        if window.lines >= self._lines_max:
            window.suppressed += 1
            window.level, window.fields = level, fields
            return
        window.lines += 1
        suppressed, window.suppressed = window.suppressed, 0
        self._write(level, message, fields, suppressed)

    def warn(self, message: str, **fields: Any) -> None:
        """Write a warning, or count it as suppressed."""
        self.log(logging.WARNING, message, **fields)

    def flush(self) -> None:
        """Write the last suppressed line of each message whose window is over, with the count of the others."""
        now_ms = self._now_ms()
        for message, window in list(self._windows.items()):
            if now_ms - window.started_ms >= WINDOW_MS:
                del self._windows[message]
                if window.suppressed:
                    self._write(window.level, message, window.fields, window.suppressed - 1)

    def _write(self, level: int, message: str, fields: dict[str, Any], suppressed: int) -> None:
        logger.log(level, message, extra={**fields, "suppressed": suppressed} if suppressed else fields)
