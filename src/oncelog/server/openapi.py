"""The OpenAPI 3.1 document, built from a server's endpoints and limits.

The document is exactly as strict as the server, and tests send requests that it allows and requests that it forbids. A
request's schema does not restrict individual events, because an invalid event is reported in the result of that event
(EV-9).
"""

from collections.abc import Iterable, Mapping
from operator import itemgetter
from typing import Any, Final

from oncelog import error_codes
from oncelog.server import live_streams, operator_endpoints
from oncelog.server.audit import endpoints as audit
from oncelog.server.chat import codec as chat
from oncelog.server.deltas import codec as deltas
from oncelog.server.endpoint import API_DESCRIPTIONS, Endpoint, Parameter
from oncelog.server.events import native_dialect as events
from oncelog.server.ledger import codec as ledger
from oncelog.server.limits import ApiLimits
from oncelog.server.messages import JSON, Schema, problem_response, problem_schema, schema_ref
from oncelog.server.problems import PROBLEMS

_DESCRIPTION: Final = """\
An idempotent append log: submit an event any number of times; it commits once, in an order that never changes.

The WebSocket at `/v1/events` submits, reads pages and delivers committed events on one connection; OpenAPI cannot \
describe it. docs/reference/http.md explains these operations, docs/guides/server.md the settings and limits."""


_ERROR_DESCRIPTIONS: Final[Mapping[int, str]] = {
    400: "The request is malformed: `errors` names the fields. Nothing was written.",
    401: "The credential is missing, wrong, or belongs to another client. The text is always the same.",
    403: "The caller has no access to this, or the page's origin is not allowed.",
    404: "The record does not exist, or it belongs to another scope.",
    408: "The body took too long to arrive.",
    409: "The cursor belongs to another history: its `epoch` differs, or it is ahead of the log. Or the write "
    "conflicts with an earlier write, or its clock is too far ahead.",
    412: "A condition of the write is not met. Nothing was written.",
    413: "The body is larger than the server accepts.",
    415: "`Content-Type` is not JSON, or `Content-Encoding` is unknown.",
    422: "A table schema, a limit or the application's validation does not allow the write.",
    429: "Too many failed authentications, requests or new writes. Try again after `Retry-After`.",
    500: "The server failed, and the outcome of the write is unknown. Send the request again, with the same ids.",
    503: "The server is busy, accepts no new writes, cannot read the log, or is stopping. It decided nothing new: send "
    "the whole request again.",
    507: "A tenant has exceeded a quota. Try again after `Retry-After`.",
}
RETRYABLE_STATUSES: Final = frozenset({429, 500, 503, 507})
COMMON_ERRORS: Final = (403, 500)


_CREDENTIAL_ERRORS: Final = (401, 429)
_BODY_ERRORS: Final = (400, 408, 413, 415)


def build_document(endpoints: Iterable[Endpoint], limits: ApiLimits) -> dict[str, Any]:
    """Return the document that describes these endpoints."""
    paths: dict[str, dict[str, Schema]] = {}
    for endpoint in endpoints:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = describe_endpoint(endpoint, limits)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Oncelog",
            "version": error_codes.PROTOCOL_VERSION,
            "summary": "Events, committed once and in one order",
            "description": _DESCRIPTION,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "tags": [{"name": name, "description": description} for name, description in API_DESCRIPTIONS.items()],
        "paths": paths,
        "components": {
            "schemas": {
                "Problem": _describe_problem(),
                **operator_endpoints.build_schemas(),
                **live_streams.build_schemas(),
                **events.build_schemas(limits),
                **audit.build_schemas(),
                **ledger.build_schemas(limits),
                **deltas.build_schemas(limits),
                **chat.build_schemas(limits),
            },
            "securitySchemes": {
                "bearer": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "A token (JWT) or an API key. The development mode needs none.",
                }
            },
        },
    }


def _describe_problem() -> Schema:
    """Return the schema of a problem document, with all codes. `/docs` shows them as a table."""
    schema = problem_schema()
    codes = [{"code": code, "status": status, "title": title} for code, (status, title) in PROBLEMS.items()]
    schema["properties"]["code"]["x-codes"] = sorted(codes, key=itemgetter("status", "code"))
    return schema


def describe_endpoint(endpoint: Endpoint, limits: ApiLimits) -> Schema:
    """Return the operation object that describes an endpoint."""
    operation: Schema = {"operationId": endpoint.name, "tags": [endpoint.api], "summary": endpoint.summary}
    if endpoint.description:
        operation["description"] = endpoint.description
    operation["security"] = [] if endpoint.is_public else [{"bearer": []}]
    operation["responses"] = {
        **{str(status): response for status, response in endpoint.responses.items()},
        **{
            str(status): _describe_error(status)
            for status in sorted(_list_error_statuses(endpoint) - endpoint.responses.keys())
        },
    }
    if endpoint.parameters:
        operation["parameters"] = [
            *(_describe_parameter(one, one.name) for one in endpoint.parameters),
            *(
                {**_describe_parameter(one, one.previous_name), "deprecated": True}
                for one in endpoint.parameters
                if one.previous_name
            ),
        ]
    if endpoint.body is not None:
        operation["requestBody"] = {
            "required": endpoint.body.is_required,
            "description": f"At most {limits.frame_bytes_max} bytes.",
            "content": {JSON: {"schema": schema_ref(endpoint.body.schema), "example": endpoint.body.example}},
        }
    return operation


def _list_error_statuses(endpoint: Endpoint) -> set[int]:
    statuses = {*COMMON_ERRORS, *endpoint.errors}
    if not endpoint.is_public:
        statuses.update(_CREDENTIAL_ERRORS)
    if endpoint.path.startswith("/v1/"):
        statuses.add(503)  # the server is stopping
    if endpoint.parameters:
        statuses.add(400)
    if endpoint.body is not None:
        statuses.update(_BODY_ERRORS)
    return statuses


def _describe_parameter(parameter: Parameter, name: str) -> Schema:
    schema = dict(parameter.schema)
    described: Schema = {
        "name": name,
        "in": parameter.place,
        "description": schema.pop("description"),
        "schema": schema,
    }
    if parameter.is_required:
        described["required"] = True
    if parameter.example is not None:
        described["example"] = parameter.example
    if parameter.is_repeated:
        described.update(style="form", explode=True)
    return described


def _describe_error(status: int) -> Schema:
    response = problem_response(_ERROR_DESCRIPTIONS[status])
    if status in RETRYABLE_STATUSES:
        seconds = {"type": "integer", "minimum": 0}
        response["headers"] = {"Retry-After": {"description": "Seconds to wait, if known.", "schema": seconds}}
    if status == 401:
        response["headers"] = {"WWW-Authenticate": {"required": True, "schema": {"const": "Bearer"}}}
    return response
