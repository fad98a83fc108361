"""The ports of a server: one for HTTP and WebSocket, and optionally a separate one for metrics."""

import asyncio
import ssl
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Final

import aiohttp
from aiohttp import web

from oncelog.server import logger
from oncelog.server.connection_limiter import ConnectionLimiter, ConnectionLimits
from oncelog.server.endpoint import Endpoint, EndpointRouter
from oncelog.server.http_fast_path import FastHandler, HttpFastPath, measure_fast_route
from oncelog.server.http_protocol import HttpProtocol, add_response_headers, new_http_logger
from oncelog.server.http_tracing import HttpTracer, trace_fast_route
from oncelog.server.limits import METRICS_CONNECTIONS_MAX
from oncelog.server.listen_address import ListenAddress
from oncelog.server.listener import AddressLookup, Listener
from oncelog.server.pages.endpoints import Pages
from oncelog.server.preauth_limiter import PreauthLimiter
from oncelog.server.request_gate import Handler, RequestGate
from oncelog.server.settings import ServerSettings
from oncelog.server.tls import ServerCertificate
from oncelog.server.web_chat.endpoints import WebChat

KEEP_ALIVE_S: Final = 75.0
"""How long an idle connection stays open for the next request."""
LINE_BYTES_MAX: Final = 64 * 1024
"""Longest request line. A relationship with three names of 1,024 characters, percent-encoded, needs 36 KiB, and its
page token 16 KiB."""
HEADER_BYTES_MAX: Final = 32 * 1024
"""Longest header. The longest allowed token needs more than aiohttp's default."""
CLOSE_TIMEOUT_S: Final = 1.0
"""Longest wait for a client that does not read while a port closes."""


class HttpPort:
    """A port that serves an aiohttp application behind the connection limits."""

    def __init__(self, limiter: ConnectionLimiter, find_address: AddressLookup) -> None:
        self._limiter = limiter
        self._find_address = find_address
        self.runner: web.AppRunner | None = None
        self._listener: Listener | None = None
        self.addresses: list[Any] = []
        """The addresses that the port listens on."""

    async def _listen(
        self,
        app: web.Application,
        address: ListenAddress,
        *,
        tls: ssl.SSLContext | None = None,
        shutdown_timeout_s: float = CLOSE_TIMEOUT_S,
        **protocol_options: Any,
    ) -> None:
        """Listen and serve the application. Raises SettingsError if the address cannot be used."""
        app.middlewares.insert(0, self._count_request)
        app.on_response_prepare.append(add_response_headers)
        self.runner = web.AppRunner(app, shutdown_timeout=shutdown_timeout_s)
        await self.runner.setup()
        assert self.runner.server is not None  # noqa: S101 - set by `setup`
        new_protocol = partial(
            HttpProtocol,
            self.runner.server,
            loop=asyncio.get_running_loop(),
            access_log=None,  # type: ignore[arg-type]  # no access log
            logger=new_http_logger(self._limiter.log_limiter),
            **protocol_options,
        )
        sockets = await address.bind()
        self._listener = Listener(
            sockets,
            self._limiter,
            partial(PreauthLimiter, new_protocol=self._choose_path(new_protocol)),
            find_address=self._find_address,
            tls=tls,
        )
        self._listener.start()
        self.addresses = [bound.getsockname() for bound in sockets]

    def _choose_path(
        self, new_protocol: Callable[[], asyncio.Protocol]
    ) -> Callable[[PreauthLimiter], asyncio.Protocol]:
        """Return the factory for the protocol behind a `PreauthLimiter`. A subclass may add a fast path."""
        return lambda _: new_protocol()

    @web.middleware
    async def _count_request(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Inform a request's connection when the request starts and finishes."""
        connection = self._limiter.by_transport.get(request.transport)
        if connection is None:
            return await handler(request)
        connection.start_request()
        try:
            return await handler(request)
        finally:
            connection.finish_request(request.content)

    def close_listener(self) -> None:
        """Stop accepting connections."""
        if self._listener is not None:
            self._listener.close()

    async def close(self) -> None:
        """Close the port and all of its connections."""
        self.close_listener()
        if self.runner is not None:
            runner, self.runner = self.runner, None
            await runner.cleanup()


class HttpServer(HttpPort):
    """Serves endpoints over HTTP until it is closed, through an aiohttp application behind the fast path."""

    def __init__(
        self,
        settings: ServerSettings,
        gate: RequestGate,
        certificate: ServerCertificate,
        fast_routes: Mapping[str, FastHandler],
    ) -> None:
        super().__init__(gate.limiter, gate.find_peer_address)
        self._tracer = tracer = gate.auth_gate.tracer
        if tracer is not None:
            fast_routes = {path: trace_fast_route(path, handler, tracer) for path, handler in fast_routes.items()}
        if gate.auth_gate.measures_latency:
            fast_routes = {path: measure_fast_route(handler) for path, handler in fast_routes.items()}
        self._settings = settings
        self._gate = gate
        self._certificate = certificate
        self._router = EndpointRouter(gate.auth_gate, find_caller=gate.find_caller, admit_stream=gate.admit_stream)
        self.fast_path = HttpFastPath(
            fast_routes,
            check_request=gate.check_fast_request,
            respond_to_failure=gate.respond_to_failure,
            body_bytes_max=settings.api_limits.frame_bytes_max,
            varies_by_origin=bool(settings.origins),
            trace_headers=() if tracer is None else tracer.header_names,
        )

    async def start(self, endpoints: Iterable[Endpoint]) -> None:
        """Listen. Raises SettingsError if the address cannot be used."""
        settings = self._settings
        endpoints = list(endpoints)
        app = web.Application(client_max_size=settings.api_limits.frame_bytes_max, middlewares=[self._gate.handle])
        if self._tracer is not None:
            stream_paths = frozenset(endpoint.path for endpoint in endpoints if endpoint.is_stream)
            app.middlewares.insert(0, HttpTracer(self._tracer, stream_paths).handle)
        self._router.add_routes(app, endpoints)
        Pages(has_docs=settings.openapi).add_routes(app)
        if settings.development:
            WebChat().add_routes(app)
        app.on_response_prepare.append(self._gate.add_cors_headers)
        await self._listen(
            app,
            settings.http_address,
            tls=self._certificate.context,
            # aiohttp applies this timeout twice. Accepted requests have been answered by then.
            shutdown_timeout_s=min(CLOSE_TIMEOUT_S, settings.shutdown_ms / 1000),
            keepalive_timeout=KEEP_ALIVE_S,
            max_field_size=HEADER_BYTES_MAX,
            max_line_size=LINE_BYTES_MAX,
            # `read_body` decompresses, with a limit. aiohttp would decompress bodies of unauthenticated callers too.
            auto_decompress=False,
        )

    @property
    def urls(self) -> list[str]:
        """The URLs that the server listens on."""
        scheme = "http" if self._certificate.context is None else "https"
        return [f"{scheme}://{format_address(address)}" for address in self.addresses]

    def _choose_path(
        self, new_protocol: Callable[[], asyncio.Protocol]
    ) -> Callable[[PreauthLimiter], asyncio.Protocol]:
        """Return the protocol factory. Connections begin on the fast path if it supports this version of aiohttp."""
        difference = self.fast_path.find_difference()
        if not difference:
            return partial(self.fast_path.new_protocol, new_protocol)
        logger.warning(
            "aiohttp %s differs from the versions that the HTTP fast path knows, so aiohttp serves all requests: %s",
            aiohttp.__version__,
            difference,
        )
        return super()._choose_path(new_protocol)

    @property
    def is_busy(self) -> bool:
        """Whether a request that has arrived completely is still unanswered."""
        # The rest of an incomplete body may never arrive.
        return self.fast_path.is_busy or any(body.is_eof() for body in self._gate.open_requests.values())

    def close_idle(self) -> None:
        """Close fast-path connections that have been idle for `KEEP_ALIVE_S`. aiohttp closes the others."""
        self.fast_path.close_idle(asyncio.get_running_loop().time() - KEEP_ALIVE_S)

    async def close(self) -> None:
        """Close all connections."""
        self.close_listener()
        self.fast_path.close_all()
        await super().close()


class MetricsListener(HttpPort):
    """Serves metrics and health checks without credentials, for a network that only Prometheus can reach.

    At most `METRICS_CONNECTIONS_MAX` connections are open at a time; a new one replaces the oldest. The owner calls
    `close_expired` about once a second.
    """

    def __init__(self, routes: Mapping[str, Handler], shared: ConnectionLimiter) -> None:
        limits = ConnectionLimits(total_max=METRICS_CONNECTIONS_MAX, timeout_ms=shared.limits.timeout_ms)
        limiter = ConnectionLimiter(limits, shared.now_ms, shared.counts, shared.log_limiter)
        super().__init__(limiter, lambda address: (address or "", False))
        self._routes = routes
        self.close_expired = limiter.close_expired

    async def start(self, address: ListenAddress) -> None:
        """Listen. Raises SettingsError if the address cannot be used."""
        app = web.Application()
        for path, handler in self._routes.items():
            app.router.add_get(path, handler)
        await self._listen(app, address)

    @property
    def port(self) -> int:
        """The port that the listener is bound to, or 0 if it has not started."""
        return next((address[1] for address in self.addresses), 0)


def format_address(address: tuple[str, int] | str) -> str:
    """Return `host:port`, with an IPv6 address in brackets."""
    host, port = address[0], address[1]
    return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"
