"""The gate that every HTTP request passes through.

The gate checks the host, the origin, the client's address and the number of streams, and converts exceptions to error
responses.
"""

import asyncio
from collections.abc import Awaitable, Callable
from functools import lru_cache
from typing import Final

from aiohttp import StreamReader, web

from oncelog import error_codes
from oncelog.server import logger
from oncelog.server.auth_gate import AuthGate
from oncelog.server.chat.codec import PROBLEM_DIALECT as CHAT_PROBLEMS
from oncelog.server.chat.endpoints import WEBSOCKET_PATH
from oncelog.server.connection_limiter import Caller, Connection, ConnectionLimiter, CountedStream
from oncelog.server.deltas.codec import PROBLEM_DIALECT as DELTAS_PROBLEMS
from oncelog.server.endpoint import check_single_authorization
from oncelog.server.errors import SERVER_FAILURE, ApiError, field_error
from oncelog.server.ledger.codec import PROBLEM_DIALECT as LEDGER_PROBLEMS
from oncelog.server.origins import (
    find_client_address,
    get_scheme,
    is_allowed_origin,
    is_loopback_host,
    is_trusted,
    normalize_origin,
    parse_networks,
    to_client_network,
)
from oncelog.server.problems import DEFAULT_DIALECT, ProblemDialect, to_error_response
from oncelog.server.settings import ServerSettings

CACHED_CHECKS_MAX: Final = 256
"""Size of each cache of check results, by address and headers."""
PREFLIGHT_HEADERS: Final = {
    "Access-Control-Allow-Methods": "GET, POST, PUT, DELETE",
    "Access-Control-Allow-Headers": "Authorization, Content-Type, Last-Event-ID, Traceparent, Tracestate",
    "Access-Control-Max-Age": "600",
}
"""Answer to a browser's preflight request (CORS)."""
_API_NAMES: Final = {
    "/v1/ledger/": "ledger",
    "/v1/sync/": "deltas",
    WEBSOCKET_PATH: "chat",
    "/v1/audit": "audit",
    "/v1/stats": "operators",
}
_PROBLEM_DIALECTS: Final = {"deltas": DELTAS_PROBLEMS, "chat": CHAT_PROBLEMS, "ledger": LEDGER_PROBLEMS}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class RequestGate:
    """Checks requests, finds their callers, and answers failed requests."""

    def __init__(
        self,
        settings: ServerSettings,
        auth_gate: AuthGate,
        limiter: ConnectionLimiter,
        *,
        has_tls: Callable[[], bool],
        count_streams: Callable[[], int],
    ) -> None:
        self._is_development = settings.development
        self.auth_gate = auth_gate
        self.limiter = limiter
        self._has_tls = has_tls
        self._count_streams = count_streams
        """Returns how many WebSockets and streams are open."""
        self._trusted_networks = parse_networks(settings.trusted_proxies)
        self._allowed_origins = frozenset(filter(None, map(normalize_origin, settings.origins)))
        self._find_refusal_cached = lru_cache(maxsize=CACHED_CHECKS_MAX)(self._find_refusal)
        self.to_network = lru_cache(maxsize=CACHED_CHECKS_MAX)(self._to_network)
        """Returns the client's network, given the peer address and `X-Forwarded-For`."""
        self.open_requests: dict[int, StreamReader] = {}
        """The bodies of unanswered requests, except streams."""

    # --- requests and their errors

    @web.middleware
    async def handle(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer a request. During shutdown, each answer closes its connection."""
        self.open_requests[id(request)] = request.content
        try:
            response = await self._respond(request, handler)
        finally:
            self.open_requests.pop(id(request), None)
        if self.auth_gate.is_closing and not response.prepared:
            response.force_close()
        return response

    async def _respond(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            self.check_request(request)
            if request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers:
                return web.Response(status=204, headers=PREFLIGHT_HEADERS)
            return await handler(request)
        except web.HTTPException as error:
            allowed = {name: error.headers[name] for name in ("Allow",) if name in error.headers}
            return to_error_response(self._to_api_error(error), find_dialect(request.path), allowed)
        except (asyncio.CancelledError, ConnectionError):
            raise
        except Exception as error:  # noqa: BLE001 - logged with the stack trace
            return self.respond_to_failure(request.method, request.path, error)

    def respond_to_failure(self, method: str, path: str, error: Exception) -> web.Response:
        """Return the response to a failed request. Counts client errors, and logs server errors."""
        if isinstance(error, ApiError):
            self.limiter.counts.requests[_find_api_name(path), "http", error.code] += 1
        else:
            logger.error("a request failed", exc_info=error, extra={"method": method, "path": path})
            error = SERVER_FAILURE
        return to_error_response(error, find_dialect(path))

    def _to_api_error(self, error: web.HTTPException) -> ApiError:
        """Return the error for a request that aiohttp refused."""
        match error:
            case web.HTTPRequestEntityTooLarge():
                size = self.auth_gate.limits.frame_bytes_max
                return field_error("body", f"must have at most {size} bytes", limit=size, status=413)
            case web.HTTPNotFound():
                return ApiError(error_codes.UNKNOWN_PATH, "the server has no such path; `GET /` lists its APIs")
            case web.HTTPMethodNotAllowed():
                message = f"the path accepts only {', '.join(sorted(error.allowed_methods))}"
                return ApiError(error_codes.METHOD_NOT_ALLOWED, message)
            case _:
                return ApiError(error_codes.BAD_REQUEST, error.reason, status=error.status)

    # --- host and origin

    def check_request(self, request: web.Request) -> None:
        """Raise ApiError for a request that the server refuses."""
        headers = request.headers
        check_single_authorization(headers.getall("Authorization", ()))
        forwarded = ",".join(headers.getall("X-Forwarded-Proto", ())) or None
        self.check_host(request.remote, headers.get("Host"), forwarded, headers.get("Origin"))
        if request.path.startswith("/v1/"):
            self.auth_gate.check_open()

    def check_fast_request(self, remote: str, host: str) -> None:
        """Raise ApiError for a fast-path request that the server refuses."""
        self.check_host(remote, host)
        self.auth_gate.check_open()

    def check_host(
        self, remote: str | None, host: str | None, forwarded: str | None = None, origin: str | None = None
    ) -> None:
        """Raise ApiError if the host or the origin is not allowed."""
        refused = self._find_refusal_cached(remote, host, forwarded, origin)
        if refused is not None:
            raise field_error(*refused, error_codes.FORBIDDEN)

    def _find_refusal(
        self, remote: str | None, host: str | None, forwarded: str | None, origin: str | None
    ) -> tuple[str, str] | None:
        """Return the header that causes a refusal and the reason, or None. Cached, because most requests are alike."""
        if self._is_development and not is_loopback_host(host):
            # An attacker can point a web page's host name at this machine, which makes the page share the server's
            # origin.
            return "Host", "must be a loopback name in development mode"
        scheme = get_scheme(remote, forwarded, self._has_tls(), self._trusted_networks)
        if not is_allowed_origin(origin, scheme, host, self._allowed_origins):
            return "Origin", "is not an allowed origin"
        return None

    async def add_cors_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        """Allow pages from configured origins to read the answer. Other origins have already been refused."""
        origin = request.headers.get("Origin")
        if origin is not None and normalize_origin(origin) in self._allowed_origins:
            response.headers["Access-Control-Allow-Origin"] = origin
            response.headers["Access-Control-Expose-Headers"] = "Retry-After"
        if self._allowed_origins:
            vary = response.headers.get("Vary")
            response.headers["Vary"] = "Origin" if vary is None else f"{vary}, Origin"

    # --- callers

    def find_peer_address(self, host: str | None) -> tuple[str, bool]:
        """Return the address under which a peer's connections are counted, and whether it is a trusted proxy."""
        return self.to_network(host, None), is_trusted(host, self._trusted_networks)

    def find_caller(self, request: web.Request) -> Caller:
        """Return the caller of a request."""
        connection = self.limiter.by_transport.get(request.transport)
        if connection is not None and not connection.is_proxy:
            return connection
        return Caller(self._get_address(request), connection)

    def _get_address(self, request: web.Request) -> str:
        # The trusted proxy wrote the last of several header lines, just as it wrote the last of several addresses in
        # one line.
        forwarded = ",".join(request.headers.getall("X-Forwarded-For", ())) or None
        return self.to_network(request.remote, forwarded)

    def _to_network(self, remote: str | None, forwarded: str | None) -> str:
        return to_client_network(find_client_address(remote, forwarded, self._trusted_networks))

    # --- streams

    def admit_stream(self, request: web.Request) -> Caller:
        """Admit a WebSocket or other long-lived stream. Return its caller. Raises ApiError if a limit is reached."""
        connection = self.limiter.by_transport.get(request.transport)
        self._check_capacity(connection)
        self.open_requests.pop(id(request), None)
        if connection is None:
            return Caller(self._get_address(request))
        connection.is_stream = True
        if not connection.is_proxy:
            return connection
        return self.limiter.open_stream(self._get_address(request), connection)

    def admit_grpc_stream(self, address: str) -> CountedStream:
        """Count a gRPC stream. Raises ApiError if a limit is reached."""
        self._check_capacity()
        return self.limiter.open_stream(address)

    def _check_capacity(self, connection: Connection | None = None) -> None:
        if (
            self._count_streams() >= self.auth_gate.limits.connections_max
            and not self.limiter.close_unauthenticated_stream(connection)
        ):
            message = f"too many open connections: connections_max is {self.auth_gate.limits.connections_max}"
            raise ApiError(error_codes.SERVER_BUSY, message, retry_after_ms=1000)
        self.auth_gate.check_open()


def _find_api_name(path: str) -> str:
    for prefix, api_name in _API_NAMES.items():
        if path.startswith(prefix):
            return api_name
    return "events"


def find_dialect(path: str) -> ProblemDialect:
    """Return the problem dialect for errors at a path."""
    return _PROBLEM_DIALECTS.get(_find_api_name(path), DEFAULT_DIALECT)
