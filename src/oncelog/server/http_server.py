"""HTTP and WebSocket on one port: aiohttp's application behind the listener, and the fast path in front of it."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Final

import aiohttp
from aiohttp import web

from oncelog.errors import SettingsError
from oncelog.server.auth_gate import AuthGate
from oncelog.server.connection_limiter import Connection
from oncelog.server.endpoint import Endpoint, EndpointRouter
from oncelog.server.http_fast_path import FastHandler, HttpFastPath
from oncelog.server.http_headers import add_response_headers
from oncelog.server.http_log import new_http_logger
from oncelog.server.http_protocol import HttpProtocol
from oncelog.server.listener import Listener, bind
from oncelog.server.log_limiter import LogLimiter
from oncelog.server.metrics import Counts
from oncelog.server.middleware import RequestMiddleware, find_dialect
from oncelog.server.preauth_limiter import PreauthLimiter
from oncelog.server.request_gate import RequestGate
from oncelog.server.settings import ServerSettings
from oncelog.server.tls import ServerCertificate
from oncelog.server.web_chat.endpoints import WebChat

logger: Final = logging.getLogger("oncelog.doors")

KEEP_ALIVE_S: Final = 75.0
"""How long a connection without a request is kept for the next one."""
CLOSE_TIMEOUT_S: Final = 1.0
"""Longest wait for a client that does not read, when the server stops."""
LINE_BYTES_MAX: Final = 64 * 1024
"""Longest request line. A relationship of three names of 1,024 characters, percent-encoded, needs 36 KiB of it, and the
token of its page 16 KiB."""
HEADER_BYTES_MAX: Final = 32 * 1024
"""Longest header. A token of the allowed length needs more than aiohttp's default."""


class HttpServer:
    """Serves endpoints over HTTP until it is closed."""

    def __init__(
        self,
        settings: ServerSettings,
        gate: RequestGate,
        auth_gate: AuthGate,
        certificate: ServerCertificate,
        fast_routes: Mapping[str, FastHandler],
        counts: Counts,
        log_limiter: LogLimiter,
    ) -> None:
        self._settings = settings
        self._gate = gate
        self._certificate = certificate
        self._counts = counts
        self._log_limiter = log_limiter
        frame_bytes_max = settings.api_limits.frame_bytes_max
        self._middleware = RequestMiddleware(gate, counts, body_bytes_max=frame_bytes_max)
        self._router = EndpointRouter(auth_gate, counts, find_caller=gate.find_caller, admit_stream=gate.admit_stream)
        self.fast_path = HttpFastPath(
            fast_routes,
            check_host=gate.check_host,
            count_failure=self._middleware.count_failure,
            find_dialect=find_dialect,
            body_bytes_max=frame_bytes_max,
            varies_by_origin=gate.varies_by_origin,
        )
        self.runner: web.AppRunner | None = None
        self._listener: Listener | None = None
        self.urls: list[str] = []
        """Addresses that are listened on."""

    async def start(self, endpoints: Iterable[Endpoint]) -> None:
        """Listen. Raises SettingsError if the address cannot be used."""
        settings = self._settings
        app = web.Application(
            client_max_size=settings.api_limits.frame_bytes_max, middlewares=[self._middleware.handle]
        )
        self._router.add_routes(app, endpoints)
        if settings.development:
            WebChat().add_routes(app)
        app.on_response_prepare.append(self._gate.add_cors_headers)
        app.on_response_prepare.append(add_response_headers)
        # aiohttp waits for it twice. Accepted requests have been waited for before.
        self.runner = web.AppRunner(app, shutdown_timeout=min(CLOSE_TIMEOUT_S, settings.shutdown_ms / 1000))
        await self.runner.setup()
        assert self.runner.server is not None  # noqa: S101 - it has been set up
        new_protocol = partial(
            HttpProtocol,
            self.runner.server,
            loop=asyncio.get_running_loop(),
            access_log=None,  # type: ignore[arg-type]  # no access log
            logger=new_http_logger(self._log_limiter),
            keepalive_timeout=KEEP_ALIVE_S,
            max_field_size=HEADER_BYTES_MAX,
            max_line_size=LINE_BYTES_MAX,
            # `read_body` decompresses, up to its limit; aiohttp would do it for unauthenticated callers too.
            auto_decompress=False,
        )
        try:
            sockets = await bind(settings.host, settings.port)
        except OSError as error:
            place = f"{settings.host}:{settings.port}"
            raise SettingsError(f"cannot listen on {place}: {error.strerror or error}") from error
        self._listener = Listener(
            sockets,
            self._gate.limiter,
            partial(self._new_protocol, self._choose_path(new_protocol)),
            find_address=self._gate.find_peer_address,
            tls=self._certificate.context,
            log_limiter=self._log_limiter,
            refusal_counts=self._counts.connections_refused,
        )
        self._listener.start()
        scheme = "http" if self._certificate.context is None else "https"
        self.urls = [f"{scheme}://{format_address(socket.getsockname())}" for socket in self._listener.sockets]

    def _choose_path(
        self, new_protocol: Callable[[], asyncio.Protocol]
    ) -> Callable[[PreauthLimiter], asyncio.Protocol]:
        """Return the factory of protocols: connections begin on the fast path, unless it does not fit aiohttp."""
        difference = self.fast_path.find_difference()
        if not difference:
            return partial(self.fast_path.new_protocol, new_protocol)
        logger.warning(
            "aiohttp %s differs from the versions that the HTTP fast path knows, so aiohttp serves all requests: %s",
            aiohttp.__version__,
            difference,
        )
        return lambda _: new_protocol()

    def _new_protocol(
        self, new_protocol: Callable[[PreauthLimiter], asyncio.Protocol], connection: Connection
    ) -> PreauthLimiter:
        count_refusal = partial(self._gate.limiter.count_refusal, "too_large", connection.address)
        return PreauthLimiter(connection, new_protocol, count_refusal)

    @property
    def is_busy(self) -> bool:
        """Whether a request that has arrived as a whole has no answer yet."""
        # The body of a request that has not arrived as a whole may never do so.
        return self.fast_path.is_busy or any(body.is_eof() for body in self._gate.open_requests.values())

    def close_idle(self) -> None:
        """Close connections of the fast path without a request for `KEEP_ALIVE_S`. aiohttp closes the others."""
        self.fast_path.close_idle(asyncio.get_running_loop().time() - KEEP_ALIVE_S)

    def start_shutdown(self) -> None:
        """Close each connection with its next answer, from now on."""
        self._router.is_closing = self._gate.is_closing = True
        self.fast_path.start_shutdown()

    def close_listener(self) -> None:
        """Accept no more connections."""
        if self._listener is not None:
            self._listener.close()

    async def close(self) -> None:
        """Close all connections."""
        self.close_listener()
        self.fast_path.close_all()
        if self.runner is not None:
            runner, self.runner = self.runner, None
            await runner.cleanup()


def format_address(address: tuple[str, int] | str) -> str:
    """Return `host:port`, an IPv6 address in brackets."""
    host, port = address[0], address[1]
    return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"
