"""HTTP protocol of one connection.

It extends aiohttp's protocol with response headers, error responses, log lines, and a callback for lost connections.
"""

import asyncio
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final

from aiohttp import web
from aiohttp.http_exceptions import BadHttpMethod, HttpProcessingError, LineTooLong
from aiohttp.web_protocol import RequestHandler
from multidict import CIMultiDict

from oncelog import error_codes
from oncelog.server.errors import SERVER_FAILURE, ApiError
from oncelog.server.problems import to_error_response
from oncelog.server.rate_limiter import LogLimiter

SERVER_NAME: Final = "oncelog"
"""Value of the `Server` header. It omits the version, which would tell an attacker which vulnerabilities to try."""
RESPONSE_HEADERS: Final = {
    "Server": SERVER_NAME,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
"""Headers of every response, including aiohttp's error responses. `nosniff` keeps browsers from interpreting stored
text as HTML or a script. `no-referrer` keeps addresses, which may contain a ticket, from other sites."""
DEFAULT_HEADERS: Final = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
}
"""Headers of every response that does not set them itself. Pages have a policy that allows their own files."""
_MISSING_HEADERS: Final = CIMultiDict({**RESPONSE_HEADERS, **DEFAULT_HEADERS})
"""Headers that most responses lack."""
del _MISSING_HEADERS["Server"]
LOGGER_NAME: Final = "oncelog.server.http"
MALFORMED_MESSAGE: Final = "the request is not valid HTTP"
"""A fixed text, because aiohttp's message quotes the request, which may contain the credential."""
UNKNOWN_METHOD_MESSAGE: Final = "the server knows only the methods GET, HEAD, POST, PUT, DELETE and OPTIONS"
_UNKNOWN_METHOD: Final = re.compile(r"b['\"][\w!#$%&*+.^`|~-]+ \S+ HTTP/1\.[01]['\"]", re.ASCII)
"""Matches the request line quoted in aiohttp's error if only the method is wrong. Anything else is not HTTP."""
TOO_LONG_MESSAGE: Final = "the request line or a request header is too long"
_CLIENT_ERRORS: Final = (HttpProcessingError, web.RequestPayloadError, ConnectionError)


class HttpProtocol(RequestHandler):
    """One HTTP connection that aiohttp serves.

    aiohttp answers malformed HTTP itself, bypassing the application and its signals. It does not notify a request's
    handler when the client closes the connection.
    """

    __slots__ = ("_on_lost",)

    _on_lost: Callable[[], None] | None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See aiohttp."""
        self._on_lost = None
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        """See aiohttp. Also runs the callbacks of `call_on_loss`."""
        on_lost, self._on_lost = self._on_lost, None
        super().connection_lost(exc)
        if on_lost is not None:
            on_lost()

    @property
    def is_reading_paused(self) -> bool:
        """Whether aiohttp has stopped reading because a body or pipelined requests are waiting.

        aiohttp has no public attribute for either. A version that lacks one of these private attributes counts as
        reading.
        """
        return any(getattr(self, name, False) for name in ("_reading_paused", "_buffer_paused"))

    @contextmanager
    def call_on_loss(self, on_lost: Callable[[], None]) -> Iterator[None]:
        """Call `on_lost` if the connection is lost within the block, or immediately if it is lost already."""
        if self.transport is None:
            on_lost()
        self._on_lost = on_lost
        try:
            yield
        finally:
            self._on_lost = None

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """See aiohttp. The response quotes no part of the request."""
        super().handle_error(request, status, exc, message)  # logs, and raises if a response has already started
        error = SERVER_FAILURE
        if isinstance(exc, BadHttpMethod) and _UNKNOWN_METHOD.search(str(exc)):
            error = ApiError(error_codes.UNKNOWN_METHOD, UNKNOWN_METHOD_MESSAGE)
        elif status < web.HTTPInternalServerError.status_code:
            text = TOO_LONG_MESSAGE if isinstance(exc, LineTooLong) else MALFORMED_MESSAGE
            error = ApiError(error_codes.BAD_REQUEST, text, status=status)
        response = to_error_response(error)
        set_headers(response.headers)
        response.force_close()
        return response


def set_headers(headers: CIMultiDict[str]) -> None:
    """Add the headers that every response has."""
    if "Cache-Control" in headers or "Content-Security-Policy" in headers:
        headers.update(RESPONSE_HEADERS)
        for name, value in DEFAULT_HEADERS.items():
            headers.setdefault(name, value)
    else:  # takes half the time of the other branch
        headers["Server"] = SERVER_NAME  # aiohttp has set its own
        headers.extend(_MISSING_HEADERS)


async def add_response_headers(_: web.BaseRequest, response: web.StreamResponse) -> None:
    """Add the headers to a handler's response (`on_response_prepare`)."""
    set_headers(response.headers)


def new_http_logger(log_limiter: LogLimiter) -> logging.Logger:
    """Return the logger that one server's aiohttp writes to, a child of `oncelog.doors`."""
    http_logger = logging.Logger(LOGGER_NAME)  # noqa: LOG001 - one logger for each server
    http_logger.parent = logging.getLogger("oncelog.doors")
    http_logger.addFilter(partial(_replace_client_error, log_limiter))
    return http_logger


def _replace_client_error(log_limiter: LogLimiter, record: logging.LogRecord) -> bool:
    """Keep the log record of a server error, but replace a client error's record with a rate-limited line.

    The line omits the request's bytes: a client that connected to the wrong port may have sent a token.
    """
    kind = record.exc_info[0] if record.exc_info else None
    if kind is None or not issubclass(kind, _CLIENT_ERRORS):
        return True
    # The record is aiohttp's "Error handling request from %s", with the address as its argument.
    address = record.args[0] if isinstance(record.args, tuple) and record.args else None
    level = min(record.levelno, logging.WARNING)
    log_limiter.log(level, "received data is not valid HTTP", address=address, error=kind.__name__)
    return False
