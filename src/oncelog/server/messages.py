"""Messages in JSON: one declaration of the fields of a message gives its decoder and its JSON Schema."""

from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from msgspec import Struct

from oncelog.core.canonical import JsonValue
from oncelog.errors import CanonicalError
from oncelog.server.errors import field_error
from oncelog.server.json_fields import decode_object, parse_json
from oncelog.server.json_schemas import Schema

T = TypeVar("T")


class Field(Struct, frozen=True, kw_only=True):
    """One member of a message."""

    name: str
    decode: Callable[[Any, str], Any]
    """Converts the value at a path. Raises ApiError, or CanonicalError with the path."""
    schema: Schema = {}
    """JSON Schema with limits and description. Empty in messages of WebSockets, which OpenAPI cannot describe."""
    is_required: bool = False
    is_nullable: bool = True
    """Whether null leaves an optional member out."""
    default: Any = None
    """Converted value of a member that is left out."""
    previous_name: str = ""
    """Deprecated name that the member may be sent under."""


class Message(Generic[T]):
    """A JSON object with these fields. Other members have no meaning (CO-20)."""

    def __init__(self, build: Callable[..., T], *fields: Field) -> None:
        self._build = build
        self._fields = fields

    def decode(self, members: Mapping[str, JsonValue], path: str = "$", *more: object) -> T:
        """Build the message from its decoded fields, in their order, and `more`. Raises ApiError with the path."""
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
                try:
                    values.append(field.decode(value, f"{path}.{name}"))
                except CanonicalError as error:
                    raise field_error(error.path, error.reason) from None
        return self._build(*values, *more)

    def decode_body(self, body: bytes, _: object = None) -> T:
        """Decode the body of an HTTP request. Raises ApiError."""
        return self.decode(decode_object(parse_json(body), "$"))

    def to_schema(self) -> Schema:
        """Return the JSON Schema of the message."""
        required = [field.name for field in self._fields if field.is_required]
        return {
            "type": "object",
            **({"required": required} if required else {}),
            "properties": {field.name: _describe(field) for field in self._fields},
        }


def _describe(field: Field) -> Schema:
    """Return the schema of a field, which allows null where the decoder does."""
    schema = field.schema
    if field.is_required or not field.is_nullable:
        return schema
    if "enum" in schema:
        return {**schema, "enum": [*schema["enum"], None]}
    return {**schema, "type": [schema["type"], "null"]}
