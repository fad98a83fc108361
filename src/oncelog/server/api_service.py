"""Base class of the API services, with page sizes, page tokens and rate limits."""

from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable
from typing import Any, Final, TypeVar

import msgspec
from msgspec import Struct

from oncelog.core.values import Rate
from oncelog.engine.log import Log
from oncelog.server.auth_gate import AuthGate
from oncelog.server.endpoint import Parameter, keep
from oncelog.server.errors import field_error
from oncelog.server.http_requests import parse_number
from oncelog.server.json_schemas import TEXT_SCHEMA, Schema, integer_schema

T = TypeVar("T", bound=tuple[Any, ...])

EPOCH_PARAMETER: Final = Parameter(
    name="epoch",
    schema={
        **TEXT_SCHEMA,
        "description": "Epoch that the cursor belongs to. A request with a different epoch gets 409.",
    },
)


def path_parameter(
    name: str, schema: Schema, description: str, example: str, decode: Callable[[Any, str], Any] = keep
) -> Parameter:
    """Declare a path parameter."""
    schema = {**schema, "description": description}
    return Parameter(name=name, place="path", schema=schema, decode=decode, is_required=True, example=example)


def resume_parameter(id_name: str, cursor_name: str = "since") -> Parameter:
    """Declare the header that resumes a stream of server-sent events, whose event ids are `id_name` values."""
    schema = {
        "anyOf": [integer_schema(), {"type": "string", "maxLength": 0}],
        "description": f"The last `{id_name}` that the client received. Unless empty, it overrides `{cursor_name}`.",
    }
    return Parameter(name="Last-Event-ID", place="header", schema=schema, decode=parse_number)


class PageSizes(Struct, frozen=True):
    """Default and maximum number of items per page."""

    default: int
    largest: int

    def clamp(self, requested: int | None) -> int:
        """Return the page size for a requested limit. None selects the default."""
        return max(1, min(self.default if requested is None else requested, self.largest))

    def to_parameter(self, what: str = "Maximum number of items.") -> Parameter:
        """Declare the parameter `limit`."""
        schema = {
            **integer_schema(),
            "default": self.clamp(None),
            "description": f"{what} 0 counts as 1, and values above {self.largest} count as {self.largest}.",
        }
        return Parameter(name="limit", schema=schema, decode=parse_number)


class ApiService:
    """Service of one API, shared by its transports."""

    def __init__(self, log: Log, auth_gate: AuthGate) -> None:
        self.log = log
        self.auth_gate = auth_gate
        self.clock = auth_gate.clock
        self.limits = auth_gate.limits
        self.counts = auth_gate.counts
        self.page_sizes = PageSizes(self.limits.page_events_default, self.limits.page_events_max)


def new_rate(per_second: int, burst: int = 0) -> Rate | None:
    """Return the rate limit for new writes, which the log enforces. 0 means no limit."""
    return Rate(per_second, burst=burst or per_second) if per_second else None


def page_members(following: str, has_more: str = "has_more", next_after: str = "next_after") -> dict[str, Any]:
    """Return the response members for paging. `following` is empty on the last page."""
    return {has_more: True, next_after: following} if following else {has_more: False}


def encode_page_token(*position: str | int | None) -> str:
    """Encode the position at which the next page begins."""
    return urlsafe_b64encode(msgspec.json.encode(position)).decode()


def decode_page_token(token: str, field: str, decoder: msgspec.json.Decoder[T]) -> T:
    """Decode a token into the position of a page. Raises ApiError if the token is invalid."""
    try:
        position = decoder.decode(urlsafe_b64decode(token.encode("ascii")))
        if not any("\0" in item for item in position if isinstance(item, str)):
            return position
    except (ValueError, msgspec.MsgspecError):
        pass
    raise field_error(field, "must be a token from a previous page")
