"""Metrics and health on a port of their own, without credentials: for Prometheus, on a network that only it reaches."""

from collections.abc import Awaitable, Callable, Mapping

from aiohttp import web

from oncelog.doors.http_headers import add_response_headers
from oncelog.errors import SettingsError

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class MetricsListener:
    """Serves some paths of a server on another address."""

    def __init__(self, routes: Mapping[str, Handler]) -> None:
        self._routes = routes
        self._runner: web.AppRunner | None = None
        self.port = 0
        """The port that it listens on, once started."""

    async def start(self, host: str, port: int) -> None:
        """Listen. Raises SettingsError if the address cannot be used."""
        app = web.Application()
        for path, handler in self._routes.items():
            app.router.add_get(path, handler)
        app.on_response_prepare.append(add_response_headers)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, host, port).start()
        except OSError as error:
            await self.stop()
            place = f"{host}:{port}"
            raise SettingsError(f"cannot listen for metrics on {place}: {error.strerror or error}") from error
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Close the port and its connections."""
        if self._runner is not None:
            runner, self._runner = self._runner, None
            await runner.cleanup()
