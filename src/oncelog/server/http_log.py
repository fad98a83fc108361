"""The logger that aiohttp writes to: malformed requests become one short line with the address of the client."""

import logging
from typing import Final

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from oncelog.server.log_limiter import LogLimiter

LOGGER_NAME: Final = "oncelog.server.http"
_CLIENT_ERRORS: Final = (HttpProcessingError, web.RequestPayloadError, ConnectionError)


def new_http_logger(log_limiter: LogLimiter) -> logging.Logger:
    """Return a logger for one server, below `oncelog.doors`."""
    http_logger = logging.Logger(LOGGER_NAME)  # noqa: LOG001 - one for each server, and not one of the process
    http_logger.parent = logging.getLogger("oncelog.doors")
    http_logger.addFilter(_ClientErrorFilter(log_limiter))
    return http_logger


class _ClientErrorFilter(logging.Filter):
    """Replaces records of malformed requests.

    The bytes of the request are left out: a client that used a wrong port may have sent a token.
    """

    def __init__(self, log_limiter: LogLimiter) -> None:
        super().__init__()
        self._log_limiter = log_limiter

    def filter(self, record: logging.LogRecord) -> bool:
        """Keep errors of the server; write those of a client as a rate-limited line."""
        kind = record.exc_info[0] if record.exc_info else None
        if kind is None or not issubclass(kind, _CLIENT_ERRORS):
            return True
        # aiohttp: "Error handling request from %s", with the address.
        address = record.args[0] if isinstance(record.args, tuple) and record.args else None
        self._log_limiter.log(
            min(record.levelno, logging.WARNING),
            "received data is not valid HTTP",
            address=address,
            error=kind.__name__,
        )
        return False
