"""Base class of the API services, with page sizes, page tokens, rate limits, and look-ups by id.

A look-up returns the outcome of a write, its reason, and its proof. Callers authorize first (CO-22), and treat a record
that the principal may not read as if it did not exist.
"""

from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable
from typing import Any, Final, TypeVar

import msgspec
import orjson
from msgspec import Struct

from oncelog import error_codes
from oncelog.core.policy import Policy
from oncelog.core.values import Rate, Record
from oncelog.engine.log import Log
from oncelog.engine.outcome import NEVER_COMMITTED, Outcome, Status, describe_stored
from oncelog.proof import encode as encode_document
from oncelog.proof import proof_document
from oncelog.server.auth_gate import AuthGate
from oncelog.server.endpoint import Parameter, keep, parse_number
from oncelog.server.errors import ApiError, field_error
from oncelog.server.messages import TEXT_SCHEMA, Schema, integer_schema, object_schema, schema_ref, with_optional

T = TypeVar("T", bound=tuple[Any, ...])

# --- look-ups --------------------------------------------------------------------------------------------


async def find_outcome(log: Log, record: Record) -> Outcome:
    """Return the outcome of the write that committed a stored record."""
    if not record.key:
        return describe_stored(record, None)
    policy = log.policies[record.policy]
    return describe_stored(
        record, await log.lookup(record.key, policy=policy, scope=record.scope, client=record.client)
    )


async def load_outcome(log: Log, field: str, key: bytes, *, policy: Policy, scope: str, client: str = "") -> Outcome:
    """Look up the outcome of a write by its identity. Raises ApiError with the field name if the write is unknown."""
    outcome = await log.lookup(key, policy=policy, scope=scope, client=client)
    if outcome.record is None:
        raise unknown_error(field)
    return outcome


async def describe_outcome(
    log: Log, outcome: Outcome, name: str, encode: Callable[[Record], bytes], *, with_proof: bool = True
) -> dict[str, Any]:
    """Return the answer to a look-up: the outcome, the record's content in the `name` member, and its proof."""
    record = outcome.record
    assert record is not None  # noqa: S101 - callers answer absent records with `unknown_error`
    answer = {"status": outcome.status.value, "reason": outcome.why, name: orjson.Fragment(encode(record))}
    if not with_proof:
        return answer
    proven = await log.prove(record.receipt)
    return {**answer, "proof": orjson.Fragment(encode_document(proof_document(proven)))}


def unknown_error(field: str) -> ApiError:
    """Return the error for an id that has no record, or none that the caller may read."""
    return field_error(field, NEVER_COMMITTED, error_codes.NOT_FOUND)


def outcome_schema(**content: Schema) -> Schema:
    """Return the schema of an answer to a look-up."""
    schema = object_schema(
        status={"enum": [Status.COMMITTED.value, Status.FORGOTTEN.value]},
        reason={
            **TEXT_SCHEMA,
            "description": "Explanation in words, and whether a retry is answered or counts as a new write.",
        },
        **content,
    )
    return with_optional(schema, proof=schema_ref("ProofDocument"))


# --- pages and services ----------------------------------------------------------------------------------

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
    """Declare the header that resumes a stream of server-sent events. The event ids are `id_name` values."""
    schema = {
        "anyOf": [integer_schema(), {"type": "string", "maxLength": 0}],
        "description": f"The last `{id_name}` that the client received. Unless empty, it overrides `{cursor_name}`.",
    }
    return Parameter(name="Last-Event-ID", place="header", schema=schema, decode=parse_number)


class PageSizes(Struct, frozen=True):
    """Default and maximum page size, in items."""

    default: int
    largest: int

    def clamp(self, requested: int | None) -> int:
        """Return the page size for a requested limit, or the default for None."""
        return max(1, min(self.default if requested is None else requested, self.largest))

    def to_parameter(self, what: str = "Maximum number of items.") -> Parameter:
        """Declare the `limit` parameter."""
        schema = {
            **integer_schema(),
            "default": self.clamp(None),
            "description": f"{what} 0 counts as 1, and values above {self.largest} count as {self.largest}.",
        }
        return Parameter(name="limit", schema=schema, decode=parse_number)


class ApiService:
    """Base class of the service that all transports of one API share."""

    def __init__(self, log: Log, auth_gate: AuthGate) -> None:
        self.log = log
        self.auth_gate = auth_gate
        self.clock = auth_gate.clock
        self.limits = auth_gate.limits
        self.counts = auth_gate.counts
        self.page_sizes = PageSizes(self.limits.page_events_default, self.limits.page_events_max)


def new_rate(per_second: int, burst: int = 0) -> Rate | None:
    """Return the rate limit for new writes, which the log enforces, or None (no limit) for a rate of 0."""
    return Rate(per_second, burst=burst or per_second) if per_second else None


def page_members(following: str, has_more: str = "has_more", next_after: str = "next_after") -> dict[str, Any]:
    """Return the paging members of a response. `following` is empty on the last page."""
    return {has_more: True, next_after: following} if following else {has_more: False}


def encode_page_token(*position: str | int | None) -> str:
    """Return a token for the position at which the next page begins."""
    return urlsafe_b64encode(msgspec.json.encode(position)).decode()


def decode_page_token(token: str, field: str, decoder: msgspec.json.Decoder[T]) -> T:
    """Decode a page token into the position where its page begins. Raises ApiError if the token is invalid."""
    try:
        position = decoder.decode(urlsafe_b64decode(token.encode("ascii")))
        if not any("\0" in item for item in position if isinstance(item, str)):
            return position
    except (ValueError, msgspec.MsgspecError):
        pass
    raise field_error(field, "must be a token from a previous page")
