"""A port that serves an aiohttp application behind the limits of connections."""

import asyncio
import os
import ssl
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final

from aiohttp import web

from oncelog.errors import SettingsError
from oncelog.server.connection_limiter import ConnectionLimiter
from oncelog.server.http_protocol import HttpProtocol, add_response_headers, new_http_logger
from oncelog.server.listener import AddressLookup, Listener, bind
from oncelog.server.preauth_limiter import PreauthLimiter

CLOSE_TIMEOUT_S: Final = 1.0
"""Longest wait for a client that does not read, when the port is closed."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class HttpPort:
    """Base of the server's port and of the metrics port."""

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
        host: str,
        port: int,
        *,
        purpose: str = "",
        tls: ssl.SSLContext | None = None,
        shutdown_timeout_s: float = CLOSE_TIMEOUT_S,
        **protocol_options: Any,
    ) -> None:
        """Serve the application. Raises SettingsError if the address cannot be used."""
        app.middlewares.insert(0, self._count_request)
        app.on_response_prepare.append(add_response_headers)
        self.runner = web.AppRunner(app, shutdown_timeout=shutdown_timeout_s)
        await self.runner.setup()
        assert self.runner.server is not None  # noqa: S101 - it has been set up
        new_protocol = partial(
            HttpProtocol,
            self.runner.server,
            loop=asyncio.get_running_loop(),
            access_log=None,  # type: ignore[arg-type]  # no access log
            logger=new_http_logger(self._limiter.log_limiter),
            **protocol_options,
        )
        try:
            sockets = await bind(host, port)
        except OSError as error:
            # `socket.create_server` repeats the address in its text.
            reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or error
            raise SettingsError(f"cannot listen{purpose} on {host}:{port}: {reason}") from error
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
        """Return the factory of the protocols behind the limiters: aiohttp's, unless a port has a faster path."""
        return lambda _: new_protocol()

    @web.middleware
    async def _count_request(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Tell the connection of a request when it begins and ends."""
        connection = self._limiter.find_connection(request.transport)
        if connection is None:
            return await handler(request)
        connection.start_request()
        try:
            return await handler(request)
        finally:
            connection.finish_request(request.content)

    def close_listener(self) -> None:
        """Accept no more connections."""
        if self._listener is not None:
            self._listener.close()

    async def close(self) -> None:
        """Close the port and its connections."""
        self.close_listener()
        if self.runner is not None:
            runner, self.runner = self.runner, None
            await runner.cleanup()
