"""Builders of the JSON Schemas in the OpenAPI document."""

from typing import Any, Final

from oncelog.core.canonical import INTEGER_MAX

Schema = dict[str, Any]

JSON: Final = "application/json"
PROBLEM_JSON: Final = "application/problem+json"
NO_NUL: Final = "^[^\\u0000]*$"
TEXT_SCHEMA: Final[Schema] = {"type": "string"}
POSITIVE_INTEGER: Final[Schema] = {"type": "integer", "minimum": 1, "maximum": INTEGER_MAX}
TIMESTAMP: Final[Schema] = {**POSITIVE_INTEGER, "description": "Milliseconds since 1970."}
SSE_RESPONSE: Final[Schema] = {
    "description": "A stream of server-sent events, which the client ends.",
    "content": {"text/event-stream": {"schema": {"type": "string"}}},
}


def schema_ref(name: str) -> Schema:
    """Return a reference to a named schema."""
    return {"$ref": f"#/components/schemas/{name}"}


def json_response(description: str, schema: Schema) -> Schema:
    """Return the description of an answer in JSON."""
    return {"description": description, "content": {JSON: {"schema": schema}}}


def problem_response(description: str) -> Schema:
    """Return the description of an answer that is a problem document."""
    return {"description": description, "content": {PROBLEM_JSON: {"schema": schema_ref("Problem")}}}


def schema_response(name: str, description: str) -> Schema:
    """Return the description of an answer in JSON with a named schema."""
    return json_response(description, schema_ref(name))


def object_schema(**properties: Any) -> Schema:
    """Return the schema of an object with these required properties."""
    return {"type": "object", "required": list(properties), "properties": properties}


def with_optional(schema: Schema, **properties: Any) -> Schema:
    """Return the schema of the same object with further, optional properties."""
    return {**schema, "properties": {**schema["properties"], **properties}}


def page_schema(has_more: str = "has_more", next_after: str = "next_after", /, **properties: Any) -> Schema:
    """Return the schema of a page, with the names of the two members that every page has."""
    schema = object_schema(**properties, **{has_more: {"type": "boolean"}})
    description = f"While `{has_more}` is true: value of `after` for the next page."
    return with_optional(schema, **{next_after: {**TEXT_SCHEMA, "description": description}})


def integer_schema(description: str = "") -> Schema:
    """Return the schema of a whole number from 0 on."""
    schema: Schema = {"type": "integer", "minimum": 0, "maximum": INTEGER_MAX}
    return {**schema, "description": description} if description else schema


def problem_schema() -> Schema:
    """Return the schema of the problem document (RFC 9457) of every error."""
    fault = object_schema(
        path={**TEXT_SCHEMA, "description": "Parameter, header or member that is wrong."}, detail=TEXT_SCHEMA
    )
    schema = object_schema(
        type={**TEXT_SCHEMA, "description": "`urn:oncelog:problem:` and the code in lower case."},
        title=TEXT_SCHEMA,
        status={"type": "integer", "minimum": 400, "maximum": 599},
        detail={**TEXT_SCHEMA, "description": "The error, for people."},
        code={**TEXT_SCHEMA, "description": "The error, for programs. The manual of each API lists its codes."},
    )
    return with_optional(
        schema,
        errors={"type": "array", "minItems": 1, "items": fault},
        retry_after_ms=integer_schema("Delay after which to send the same request again."),
        limit=integer_schema("Largest accepted value."),
        tenant={**TEXT_SCHEMA, "description": "Tenant whose quota or rate is used up."},
        quota={**TEXT_SCHEMA, "description": "Name of the quota or rate."},
        usage=integer_schema("Usage of the quota by the tenant."),
        epoch={**TEXT_SCHEMA, "description": "Epoch of the log, if that of the reader differs."},
        error={"deprecated": True, "description": "The error in the form of servers before problem documents."},
    )
