"""The aiohttp middleware of all requests: checks them, and turns exceptions into error responses."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from aiohttp import web

from oncelog import error_codes
from oncelog.server.chat.codec import PROBLEM_DIALECT as CHAT_PROBLEMS
from oncelog.server.chat.endpoints import WEBSOCKET_PATH
from oncelog.server.deltas.codec import PROBLEM_DIALECT as DELTAS_PROBLEMS
from oncelog.server.errors import ApiError
from oncelog.server.ledger.codec import PROBLEM_DIALECT as LEDGER_PROBLEMS
from oncelog.server.metrics import Counts
from oncelog.server.problems import DEFAULT_DIALECT, ProblemDialect, to_error_response
from oncelog.server.request_gate import RequestGate

logger: Final = logging.getLogger("oncelog.doors")

PREFLIGHT_HEADERS: Final = {
    "Access-Control-Allow-Methods": "GET, POST, PUT, DELETE",
    "Access-Control-Allow-Headers": "Authorization, Content-Type, Last-Event-ID",
    "Access-Control-Max-Age": "600",
}
"""Answer to a browser that asks before it sends a request of another origin (CORS)."""
_API_NAMES: Final = {"/v1/ledger/": "ledger", "/v1/sync/": "deltas", WEBSOCKET_PATH: "chat", "/v1/audit": "audit"}
_PROBLEM_DIALECTS: Final = {"deltas": DELTAS_PROBLEMS, "chat": CHAT_PROBLEMS, "ledger": LEDGER_PROBLEMS}
_FAILURE: Final = ApiError(error_codes.SERVER_ERROR, "the server is at fault", status=500)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class RequestMiddleware:
    """Wraps the handlers of all routes."""

    def __init__(self, gate: RequestGate, counts: Counts, *, body_bytes_max: int) -> None:
        self._gate = gate
        self._counts = counts
        self._body_bytes_max = body_bytes_max

    @web.middleware
    async def handle(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer a request. While the server is being stopped, each answer is the last one of its connection."""
        self._gate.open_requests[id(request)] = request.content
        try:
            response = await self._respond(request, handler)
        finally:
            self._gate.open_requests.pop(id(request), None)
        if self._gate.is_closing and not response.prepared:
            response.force_close()
        return response

    async def _respond(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        dialect = find_dialect(request.path)
        try:
            self._gate.check_request(request)
            if request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers:
                return web.Response(status=204, headers=PREFLIGHT_HEADERS)
            return await handler(request)
        except ApiError as error:
            self.count_failure(request.path, error)
            return to_error_response(error, dialect)
        except web.HTTPException as error:
            allowed = {name: error.headers[name] for name in ("Allow",) if name in error.headers}
            return to_error_response(self._to_api_error(error), dialect, allowed)
        except (asyncio.CancelledError, ConnectionError):
            raise
        except Exception:
            logger.exception("a request failed", extra={"method": request.method, "path": request.path})
            return to_error_response(_FAILURE, dialect)

    def _to_api_error(self, error: web.HTTPException) -> ApiError:
        """Return the error for a request that aiohttp refuses."""
        match error:
            case web.HTTPRequestEntityTooLarge():
                size = self._body_bytes_max
                message = f"body: must have at most {size} bytes"
                return ApiError(error_codes.BAD_REQUEST, message, field="body", limit=size, status=413)
            case web.HTTPNotFound():
                return ApiError(error_codes.UNKNOWN_PATH, "the server has no such path; `GET /` names its APIs")
            case web.HTTPMethodNotAllowed():
                message = f"the path takes {', '.join(sorted(error.allowed_methods))} only"
                return ApiError(error_codes.METHOD_NOT_ALLOWED, message)
            case _:
                return ApiError(error_codes.BAD_REQUEST, error.reason, status=error.status)

    def count_failure(self, path: str, error: ApiError) -> None:
        """Count a request that was refused."""
        self._counts.requests[_find_api_name(path), "http", error.code] += 1


def _find_api_name(path: str) -> str:
    for prefix, api_name in _API_NAMES.items():
        if path.startswith(prefix):
            return api_name
    return "events"


def find_dialect(path: str) -> ProblemDialect:
    """Return the dialect of the errors of a path."""
    return _PROBLEM_DIALECTS.get(_find_api_name(path), DEFAULT_DIALECT)
