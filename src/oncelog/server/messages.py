"""JSON messages: decoders for field values, and declarations that define a message's decoder and JSON Schema.

Decoders raise an `ApiError` that names the path of the wrong value.
"""

import asyncio
import re
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, Final, Generic, TypeVar

import msgspec
from msgspec import Struct

from oncelog.core.canonical import (
    INTEGER_MAX,
    SEND_AS_STRING,
    JsonValue,
    UnreadableValue,
    canonical_text,
    parse_parts,
)
from oncelog.core.identity import locate_fault
from oncelog.errors import CanonicalError
from oncelog.server.errors import ApiError, field_error
from oncelog.server.limits import LONG_FRAME_BYTES

Schema = dict[str, Any]

T = TypeVar("T")

# --- schemas ---------------------------------------------------------------------------------------------

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
    """Return a `$ref` to a named schema."""
    return {"$ref": f"#/components/schemas/{name}"}


def json_response(description: str, schema: Schema) -> Schema:
    """Return the response object of a JSON answer."""
    return {"description": description, "content": {JSON: {"schema": schema}}}


def problem_response(description: str) -> Schema:
    """Return the response object of an answer that is a problem document."""
    return {"description": description, "content": {PROBLEM_JSON: {"schema": schema_ref("Problem")}}}


def schema_response(name: str, description: str) -> Schema:
    """Return the response object of a JSON answer with a named schema."""
    return json_response(description, schema_ref(name))


def object_schema(**properties: Any) -> Schema:
    """Return the schema of an object with these required properties."""
    return {"type": "object", "required": list(properties), "properties": properties}


def with_optional(schema: Schema, **properties: Any) -> Schema:
    """Return the schema of the same object with further, optional properties."""
    return {**schema, "properties": {**schema["properties"], **properties}}


def page_schema(has_more: str = "has_more", next_after: str = "next_after", /, **properties: Any) -> Schema:
    """Return the schema of a page: these properties and the two paging members, under the given names."""
    schema = object_schema(**properties, **{has_more: {"type": "boolean"}})
    description = f"While `{has_more}` is true: value of `after` for the next page."
    return with_optional(schema, **{next_after: {**TEXT_SCHEMA, "description": description}})


def integer_schema(description: str = "") -> Schema:
    """Return the schema of a non-negative whole number."""
    schema: Schema = {"type": "integer", "minimum": 0, "maximum": INTEGER_MAX}
    return {**schema, "description": description} if description else schema


def problem_schema() -> Schema:
    """Return the schema of the problem document (RFC 9457), which describes every error."""
    fault = object_schema(
        path={**TEXT_SCHEMA, "description": "Invalid parameter, header or member."}, detail=TEXT_SCHEMA
    )
    schema = object_schema(
        type={**TEXT_SCHEMA, "description": "`urn:oncelog:problem:` and the code in lower case."},
        title=TEXT_SCHEMA,
        status={"type": "integer", "minimum": 400, "maximum": 599},
        detail={**TEXT_SCHEMA, "description": "Description of the error, for people."},
        code={**TEXT_SCHEMA, "description": "Error code, for programs. The reference of each API lists its codes."},
    )
    return with_optional(
        schema,
        errors={"type": "array", "minItems": 1, "items": fault},
        retry_after_ms=integer_schema("Delay after which to send the same request again."),
        limit=integer_schema("Largest accepted value."),
        tenant={**TEXT_SCHEMA, "description": "Tenant whose quota or rate is exceeded."},
        quota={**TEXT_SCHEMA, "description": "Name of the quota or rate."},
        usage=integer_schema("The tenant's usage of the quota."),
        epoch={**TEXT_SCHEMA, "description": "Epoch of the log, if it differs from the reader's epoch."},
        error={"deprecated": True, "description": "The error in the format that preceded problem documents."},
    )


# --- values ----------------------------------------------------------------------------------------------

_UNKNOWN_PATTERN: Final = re.compile("Object contains unknown field `(.+)`", re.DOTALL)
_ASSIGNED_REASON: Final = "is assigned by the server and must be omitted"
_UNKNOWN_REASON: Final = "is not a member of this object; check its spelling"
_NUMBER_TYPE: Final = "a whole number from 0 to 2^53−1"
_TYPE_NAMES: Final = {
    dict: "an object",
    list: "an array",
    str: "a string",
    int: "a whole number",
    bool: "true or false",
}


def parse_json(data: bytes) -> JsonValue:
    """Parse a JSON text. Raises ApiError if it is malformed."""
    try:
        return parse_parts(data)
    except CanonicalError as error:
        raise field_error(error.path, error.reason) from None


def _decode_as(kind: type[T], value: Any, path: str) -> T:
    if type(value) is not kind:
        raise type_error(path, value, _TYPE_NAMES[kind])
    return value


decode_object: Final = partial(_decode_as, dict)
decode_array: Final = partial(_decode_as, list)
decode_text: Final = partial(_decode_as, str)
decode_boolean: Final = partial(_decode_as, bool)
"""Return the value if it has the expected type. Raise ApiError for a value of any other type."""


def get_required(members: Mapping[str, JsonValue], name: str, path: str) -> JsonValue:
    """Return a required member. Raises ApiError if it is missing."""
    try:
        return members[name]
    except KeyError:
        raise field_error(f"{path}.{name}", "is missing") from None


def get_text(members: Mapping[str, JsonValue], name: str, path: str) -> str:
    """Return a required string member. Raises ApiError if it is missing or not a string."""
    return decode_text(get_required(members, name, path), f"{path}.{name}")


def decode_integer(value: JsonValue, path: str, expected: str = "a whole number") -> int:
    """Decode a whole number; 1, 1.0 and 1e0 are equal (CO-1). Raises ApiError for any other value."""
    if type(value) is float and value.is_integer():
        return int(value)
    if type(value) is not int:
        raise type_error(path, value, expected)
    return value


def decode_number(value: JsonValue, path: str) -> int:
    """Decode a whole number in the range of positions and sequences. Raises ApiError for any other value."""
    number = decode_integer(value, path, _NUMBER_TYPE)
    if not 0 <= number <= INTEGER_MAX:
        raise field_error(path, f"must be {_NUMBER_TYPE}, not {number}")
    return number


def new_decoder(is_valid: Callable[[Any], object], reason: str, **details: Any) -> Callable[[Any, str], Any]:
    """Return a decoder that keeps valid values and raises ApiError with the reason and details for others."""

    def decode(value: Any, path: str) -> Any:
        if not is_valid(value):
            raise field_error(path, reason, **details)
        return value

    return decode


def type_error(path: str, value: JsonValue, expected: str) -> ApiError:
    """Return the error for a value of an unexpected type, or for an invalid value."""
    if type(value) is UnreadableValue:
        return field_error("".join([path, *(f".{step}" for step in value.steps)]), value.reason)
    found = "null" if value is None else _TYPE_NAMES.get(type(value), "a number")
    return field_error(path, f"must be {expected}, not {found}")


def value_error(error: CanonicalError) -> ApiError:
    """Return the error for a body that contains a value without a canonical form."""
    return field_error(error.path.removeprefix("$").removeprefix(".") or "body", error.reason)


def decode_struct(body: bytes, decoder: msgspec.json.Decoder[T], assigned: Collection[str] = ()) -> T:
    """Decode a body into a struct that forbids unknown members. Raises ApiError with the path of the fault.

    `assigned` lists the members that clients must leave out because the server assigns them.
    """
    # Convert to the canonical form first: the conversion rejects rounded numbers and repeated keys, and writes 1.0 as 1
    # (CO-1 to CO-3).
    try:
        return decoder.decode(canonical_text(body))
    except CanonicalError as error:
        # The advice to send a number as a string does not apply here, because these bodies accept only numbers.
        raise value_error(CanonicalError(error.path, error.reason.removesuffix(SEND_AS_STRING))) from error
    except msgspec.ValidationError as error:
        path, reason = locate_fault(error)
        field = path.removeprefix("$").removeprefix(".")
        unknown = _UNKNOWN_PATTERN.fullmatch(reason)
        if unknown is not None:
            name = unknown[1]
            field = f"{field}.{name}".removeprefix(".")
            reason = _ASSIGNED_REASON if name in assigned else _UNKNOWN_REASON
        raise field_error(field or "body", reason) from error


# --- messages


class Field(Struct, frozen=True, kw_only=True):
    """One member of a message."""

    name: str
    decode: Callable[[Any, str], Any]
    """Converts the value at a path. Raises ApiError, or CanonicalError with the path, for an invalid value."""
    schema: Schema = {}
    """JSON Schema with limits and description. Empty in WebSocket messages, which OpenAPI cannot describe."""
    is_required: bool = False
    is_nullable: bool = True
    """Whether null is the same as leaving out an optional member."""
    default: Any = None
    """Converted value of an omitted member."""
    previous_name: str = ""
    """Deprecated name under which clients may still send the member."""

    def convert(self, value: Any, path: str) -> Any:
        """Convert a value. Raises ApiError with the path of the fault."""
        try:
            return self.decode(value, path)
        except CanonicalError as error:
            raise field_error(error.path, error.reason) from None


class Message(Generic[T]):
    """A JSON object with these fields. Other members are ignored (CO-20)."""

    def __init__(self, build: Callable[..., T], *fields: Field) -> None:
        self._build = build
        self._fields = fields

    def decode(self, members: Mapping[str, JsonValue], path: str = "$", *more: object) -> T:
        """Build the message from its decoded fields, in order, and `more`. Raises ApiError with the path of a fault."""
        values = []
        for field in self._fields:
            name = field.name
            if field.previous_name and name not in members and field.previous_name in members:
                name = field.previous_name
            value = members.get(name)
            if value is None and (name not in members or (field.is_nullable and not field.is_required)):
                if field.is_required:
                    raise field_error(f"{path}.{name}", "is missing")
                values.append(field.default)
            else:
                values.append(field.convert(value, f"{path}.{name}"))
        return self._build(*values, *more)

    def decode_body(self, body: bytes, _: object = None) -> T:
        """Decode the body of an HTTP request. Raises ApiError if it is invalid."""
        return self.decode(decode_object(parse_json(body), "$"))

    def to_schema(self) -> Schema:
        """Return the JSON Schema of the message."""
        required = [field.name for field in self._fields if field.is_required]
        return {
            "type": "object",
            **({"required": required} if required else {}),
            "properties": {field.name: _describe(field) for field in self._fields},
        }


async def run_long(size: int, function: Callable[[], T]) -> T:
    """Call a function, in a thread if its input is long, so that other requests do not wait for it."""
    return await asyncio.to_thread(function) if size > LONG_FRAME_BYTES else function()


def _describe(field: Field) -> Schema:
    """Return a field's schema, which allows null wherever the decoder does."""
    schema = field.schema
    if field.is_required or not field.is_nullable:
        return schema
    if "enum" in schema:
        return {**schema, "enum": [*schema["enum"], None]}
    return {**schema, "type": [schema["type"], "null"]}
