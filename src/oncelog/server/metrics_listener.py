"""Metrics and health on a port of their own, without credentials: for Prometheus, on a network that only it reaches."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

from aiohttp import web

from oncelog.errors import SettingsError
from oncelog.server.connection_limiter import Connection, ConnectionLimiter, ConnectionLimits
from oncelog.server.http_headers import add_response_headers
from oncelog.server.http_log import new_http_logger
from oncelog.server.http_protocol import HttpProtocol
from oncelog.server.limits import METRICS_CONNECTIONS_MAX
from oncelog.server.listener import Listener, bind
from oncelog.server.log_limiter import LogLimiter
from oncelog.server.metrics import Counts
from oncelog.server.preauth_limiter import PreauthLimiter

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class MetricsListener:
    """Serves some paths of a server on another address, to at most `METRICS_CONNECTIONS_MAX` connections.

    A further connection takes the place of the oldest one. Its owner calls `close_expired` about once a second.
    """

    def __init__(
        self,
        routes: Mapping[str, Handler],
        *,
        timeout_ms: int,
        now_ms: Callable[[], int],
        counts: Counts,
        log_limiter: LogLimiter,
    ) -> None:
        self._routes = routes
        self._counts = Counts()
        # Refusals are counted with those of the server's port; the gauge of unauthenticated connections is not shared.
        self._counts.connections_refused = counts.connections_refused
        self._log_limiter = log_limiter
        limits = ConnectionLimits(total_max=METRICS_CONNECTIONS_MAX, timeout_ms=timeout_ms)
        self._limiter = ConnectionLimiter(limits, now_ms, self._counts, log_limiter)
        self._runner: web.AppRunner | None = None
        self._listener: Listener | None = None
        self.port = 0
        """The port that it listens on, once started."""

    async def start(self, host: str, port: int) -> None:
        """Listen. Raises SettingsError if the address cannot be used."""
        app = web.Application(middlewares=[self._count_request])
        for path, handler in self._routes.items():
            app.router.add_get(path, handler)
        app.on_response_prepare.append(add_response_headers)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        assert self._runner.server is not None  # noqa: S101 - it has been set up
        try:
            sockets = await bind(host, port)
        except OSError as error:
            await self.stop()
            place = f"{host}:{port}"
            raise SettingsError(f"cannot listen for metrics on {place}: {error.strerror or error}") from error
        self._listener = Listener(
            sockets,
            self._limiter,
            partial(self._new_protocol, self._runner.server),
            find_address=lambda address: (address or "", False),
            tls=None,
            log_limiter=self._log_limiter,
            refusal_counts=self._counts.connections_refused,
        )
        self._listener.start()
        self.port = sockets[0].getsockname()[1]

    def close_expired(self) -> None:
        """Close connections that have been idle for too long."""
        self._limiter.close_expired()

    async def stop(self) -> None:
        """Close the port and its connections."""
        if self._listener is not None:
            self._listener.close()
        if self._runner is not None:
            runner, self._runner = self._runner, None
            await runner.cleanup()

    def _new_protocol(self, server: web.Server, connection: Connection) -> PreauthLimiter:
        serve = partial(
            HttpProtocol,
            server,
            loop=asyncio.get_running_loop(),
            access_log=None,  # type: ignore[arg-type]  # no access log
            logger=new_http_logger(self._log_limiter),
        )
        count_refusal = partial(self._limiter.count_refusal, "too_large", connection.address)
        return PreauthLimiter(connection, lambda _: serve(), count_refusal)

    @web.middleware
    async def _count_request(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        connection = self._limiter.find_connection(request.transport)
        if connection is None:
            return await handler(request)
        connection.start_request()
        try:
            return await handler(request)
        finally:
            connection.finish_request(request.content)
