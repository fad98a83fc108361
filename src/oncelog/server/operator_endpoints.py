"""Endpoints for operators: health, metrics, and the description of all endpoints."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from aiohttp import web

from oncelog import error_codes
from oncelog.server.endpoint import Call, Endpoint
from oncelog.server.errors import ApiError
from oncelog.server.json_schemas import (
    TEXT_SCHEMA,
    Schema,
    integer_schema,
    json_response,
    object_schema,
    schema_response,
    with_optional,
)

OperatorHandler = Callable[[web.Request], Awaitable[web.StreamResponse]]

METRICS_PATH: Final = "/metrics"
METRICS_GRANT: Final = "oncelog/metrics"
"""A credential needs a read grant for this name to read `/metrics`."""
_METRICS_DESCRIPTION: Final = (
    "Needs the grant to read `oncelog/metrics`, unless `metrics_public` is set. It may be on another port, or off."
)
_METRICS_RESPONSE: Final[Schema] = {
    "description": "Prometheus' text format.",
    "content": {"text/plain": {"schema": TEXT_SCHEMA}},
}


def list_endpoints(handlers: Mapping[str, OperatorHandler], *, has_public_metrics: bool) -> list[Endpoint]:
    """Return the endpoints of the paths that have a handler."""
    return [
        Endpoint(
            method="GET",
            path=path,
            api="operators",
            name=name,
            summary=summary,
            description=_METRICS_DESCRIPTION if path == METRICS_PATH else "",
            responses=responses,
            parameters=None,  # Prometheus and load balancers may add some
            is_public=path != METRICS_PATH or has_public_metrics,
            authorize=None if path != METRICS_PATH or has_public_metrics else _authorize_metrics,
            handle=_take_request(handlers[path]),
        )
        for path, name, summary, responses in _OPERATIONS
        if path in handlers
    ]


def build_schemas() -> dict[str, Schema]:
    """Return the schemas of their answers."""
    names = ("oncelog", "events", "ledger", "deltas", "chat", "health")
    ready = object_schema(status={"const": "ok"}, epoch=TEXT_SCHEMA, last_committed_id=integer_schema())
    read_only = {**TEXT_SCHEMA, "description": "Why no new writes are taken, if they are not."}
    return {
        "Hello": object_schema(**dict.fromkeys(names, TEXT_SCHEMA)),
        "Health": object_schema(status=TEXT_SCHEMA),
        "Ready": with_optional(ready, read_only=read_only),
    }


_OPERATIONS: Final = (
    ("/", "hello", "What this is", {200: schema_response("Hello", "Hello.")}),
    ("/healthz", "health", "Whether the process lives", {200: schema_response("Health", "It does.")}),
    (
        "/readyz",
        "readiness",
        "Whether it can do its work",
        {
            200: schema_response("Ready", "It can."),
            503: schema_response("Health", "The log cannot be read, or the server is stopping."),
        },
    ),
    (METRICS_PATH, "metrics", "Counters and gauges", {200: _METRICS_RESPONSE}),
    ("/openapi.json", "describe", "This document", {200: json_response("It.", {"type": "object"})}),
)


def _take_request(handler: OperatorHandler) -> Callable[[Call], Awaitable[web.StreamResponse]]:
    return lambda call: handler(call.request)


def _authorize_metrics(call: Call) -> str:
    if not call.principal.grants.may_read(METRICS_GRANT):
        raise ApiError(error_codes.FORBIDDEN, f"metrics: need the grant to read {METRICS_GRANT}")
    return METRICS_GRANT
