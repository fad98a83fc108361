"""Spans of HTTP requests: a middleware for aiohttp, and a wrapper for handlers of the fast path."""

from collections.abc import Mapping
from typing import Any, Final

from aiohttp import web
from multidict import CIMultiDictProxy

from oncelog.server.errors import ApiError
from oncelog.server.http_fast_path import FastHandler, FastRequest
from oncelog.server.problems import get_status
from oncelog.server.request_gate import Handler, find_dialect
from oncelog.server.tracing import RequestSpan, RequestTracer

API_PREFIX: Final = "/v1/"
"""Paths of the APIs. Other paths are for operators: health checks and metrics have no spans."""


class HttpTracer:
    """Traces the HTTP requests of a server."""

    def __init__(self, tracer: RequestTracer, stream_paths: frozenset[str]) -> None:
        self._tracer = tracer
        self._stream_paths = stream_paths

    @web.middleware
    async def handle(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Trace a request, unless its connection stays open: a stream has a span for each delivery."""
        resource = request.match_info.route.resource
        route = "" if resource is None else resource.canonical
        is_open = route in self._stream_paths or request.headers.get("Upgrade", "").lower() == "websocket"
        if is_open or not request.path.startswith(API_PREFIX):
            return await handler(request)
        attributes = _describe(request.method, request.path, request.scheme, route)
        span = self._tracer.start(f"{request.method} {route}".rstrip(), self._get_carrier(request.headers), attributes)
        try:
            with span.activate():
                response = await handler(request)
        except BaseException as error:
            span.end(type(error).__name__)  # a cancelled request, or a lost connection
            raise
        _end(span, response.status)
        return response

    def _get_carrier(self, headers: CIMultiDictProxy[str]) -> dict[str, str]:
        # A request must not have several `traceparent` lines. Joining them produces a value that is invalid too.
        found = {name: headers.getall(name, ()) for name in self._tracer.header_names}
        return {name: ",".join(values) for name, values in found.items() if values}


def trace_fast_route(path: str, handler: FastHandler, tracer: RequestTracer) -> FastHandler:
    """Return a handler with a span for each request. The fast path leaves requests with a trace context to aiohttp."""

    def handle(request: FastRequest) -> None:
        span = tracer.start(f"POST {path}", {}, _describe("POST", path, "http", path))

        def answer(body: bytes) -> None:
            _end(span, 200)
            request.answer(body)

        def fail(error: Exception) -> None:
            _end(span, get_status(error, find_dialect(path)) if isinstance(error, ApiError) else 500)
            request.fail(error)

        traced = FastRequest(request.credential, request.caller, request.body, answer, fail)
        try:
            with span.activate():
                handler(traced)
        except Exception as error:  # noqa: BLE001 - answered like any other failure
            fail(error)

    return handle


def _end(span: RequestSpan, status: int) -> None:
    is_fault = status >= 500
    span.end(str(status) if is_fault else "", is_fault=is_fault, http__response__status_code=status)


def _describe(method: str, path: str, scheme: str, route: str) -> Mapping[str, Any]:
    attributes = {"http.request.method": method, "url.path": path, "url.scheme": scheme}
    return {**attributes, "http.route": route} if route else attributes
