"""What descriptions of the HTTP interface are put together from."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from oncelog.core.canonical import INTEGER_MAX

Schema = dict[str, Any]

JSON: Final = "application/json"
NO_NUL: Final = "^[^\\u0000]*$"
_ERROR_DESCRIPTIONS: Final[Mapping[int, str]] = {
    400: "The request is none: its message says what is wrong, and where. Nothing was written.",
    401: "No credential, or none that is good, or one of another client. All get the same text.",
    403: "What may not be read, or not be written, or a page of an origin that may not connect.",
    404: "There is no such thing, or it is another scope's.",
    409: "The history is another one than the reader's: its `epoch` is not ours, or its cursor is ahead of the log. Of "
    "a write: its clock is too far ahead.",
    408: "The body took too long to come.",
    413: "The body is larger than the server takes.",
    415: "The body is not said to be JSON, or is encoded in a way that is not known.",
    422: "A write that is good in form is not what a schema of tables, a limit or the application allows.",
    429: "Too many failed attempts to authenticate, or too many new writes. Try again after `Retry-After`.",
    500: "The server is at fault. Whether something was written is not known: send it again, under the same ids.",
    503: "The server is busy, takes no new writes, or is being stopped. Nothing new of the request has been decided: "
    "send all of it again.",
    507: "A tenant has as much as it may have. Try again after `Retry-After`: somebody has to make room first.",
}
RETRYABLE_STATUSES: Final = frozenset({429, 500, 503, 507})
COMMON_ERRORS: Final = (403, 500)


TEXT_SCHEMA: Final[Schema] = {"type": "string"}
QUOTA_PROPERTIES: Final[dict[str, Schema]] = {
    "tenant": {**TEXT_SCHEMA, "description": "Whose quota it is."},
    "quota": {**TEXT_SCHEMA, "description": "Which of them."},
    "usage": {"type": "integer", "minimum": 0, "description": "What the tenant has."},
}
"""What an error tells of a quota, beside its limit."""


def operation(
    name: str,
    summary: str,
    description: str,
    response: Schema,
    errors: Sequence[int],
    *,
    tag: str = "events",
    error_schema: str = "Error",
) -> Schema:
    """An operation that asks for a credential. `fault` is the schema of its errors."""
    return {
        "operationId": name,
        "tags": [tag],
        "summary": summary,
        "description": description,
        "security": [{"bearer": []}],
        "responses": {
            "200": response,
            **{str(status): error_response(status, error_schema) for status in sorted({*errors, *COMMON_ERRORS})},
        },
    }


def parameter(name: str, schema: Schema) -> Schema:
    """A parameter of a query."""
    about = schema.pop("description")
    return {"name": name, "in": "query", "description": about, "schema": schema}


def schema_ref(name: str) -> Schema:
    """A schema by its name."""
    return {"$ref": f"#/components/schemas/{name}"}


def json_response(description: str, schema: Schema) -> Schema:
    """An answer in JSON."""
    return {"description": description, "content": {JSON: {"schema": schema}}}


def schema_response(name: str, description: str) -> Schema:
    """An answer in JSON, of a schema that has a name."""
    return json_response(description, schema_ref(name))


def error_response(status: int, schema: str = "Error") -> Schema:
    """What is told in place of an answer."""
    response = schema_response(schema, _ERROR_DESCRIPTIONS[status])
    if status in RETRYABLE_STATUSES:
        seconds = {"type": "integer", "minimum": 0}
        response["headers"] = {"Retry-After": {"description": "Seconds, where they are known.", "schema": seconds}}
    if status == 401:
        response["headers"] = {"WWW-Authenticate": {"required": True, "schema": {"const": "Bearer"}}}
    return response


def object_schema(**properties: Any) -> Schema:
    """An object that has all of them."""
    return {"type": "object", "required": list(properties), "properties": properties}


def integer_schema(description: str = "") -> Schema:
    """A whole number from 0 on."""
    schema: Schema = {"type": "integer", "minimum": 0, "maximum": INTEGER_MAX}
    return {**schema, "description": description} if description else schema


def positive_integer_schema() -> Schema:
    """A whole number from 1 on."""
    return {"type": "integer", "minimum": 1, "maximum": INTEGER_MAX}


def timestamp_schema() -> Schema:
    """A time of the log."""
    return {**positive_integer_schema(), "description": "Milliseconds since 1970."}
