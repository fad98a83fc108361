"""JSON Schemas of the Events API."""

from typing import Final

from oncelog import error_codes
from oncelog.core.limits import NAME_CHARACTERS_MAX, PARTITION_CHARACTERS_MAX, PARTITIONS_MAX
from oncelog.server.json_schemas import (
    NO_NUL,
    TEXT_SCHEMA,
    Schema,
    integer_schema,
    object_schema,
    positive_integer_schema,
    schema_ref,
    timestamp_schema,
)
from oncelog.server.limits import ApiLimits
from oncelog.server.lookups import outcome_schema

UUID_SCHEMA: Final[Schema] = {
    "type": "string",
    "pattern": "^[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}$",
}
_CLIENT_ID_CHARACTERS_MAX: Final = NAME_CHARACTERS_MAX - len("client:")


def build_schemas(limits: ApiLimits) -> Schema:
    """Return the schemas of requests and answers."""
    return {
        "Submission": {
            "type": "object",
            "required": ["events"],
            "properties": {
                "client_id": {
                    "type": ["string", "null"],
                    "minLength": 1,
                    "maxLength": _CLIENT_ID_CHARACTERS_MAX,
                    "pattern": NO_NUL,
                    "description": "Whose events they are. Without it that of the credential.",
                },
                "events": {
                    "type": "array",
                    "minItems": 1,
                    "maxItems": limits.request_events_max,
                    "uniqueItems": True,
                    "description": "No two with the same id.",
                    "items": schema_ref("NewEvent"),
                },
            },
        },
        "NewEvent": _new_event_schema(),
        "Results": object_schema(results={"type": "array", "minItems": 1, "items": _result_schema()}),
        "Event": _event_schema(),
        "EventOutcome": outcome_schema(event=schema_ref("Event")),
        "Page": object_schema(
            partitions={"type": "array", "items": TEXT_SCHEMA},
            events={"type": "array", "maxItems": limits.page_events_max, "items": schema_ref("Event")},
            next_since_committed_id=integer_schema("Read on after this."),
            has_more={"type": "boolean"},
            sync_to_committed_id=integer_schema("The bound: `to` of the pages that follow."),
            epoch=TEXT_SCHEMA,
        ),
    }


def _new_event_schema() -> Schema:
    return {
        "type": "object",
        "required": ["id", "partitions", "event"],
        "properties": {
            "id": {**UUID_SCHEMA, "description": "A UUID. Its letters' case does not matter."},
            "partitions": {
                "type": "array",
                "description": f"1 to {PARTITIONS_MAX} different strings of 1 to {PARTITION_CHARACTERS_MAX} "
                "characters, or the event is rejected.",
            },
            "event": {"description": "An object with a `type` that is a string and not empty, or it is rejected."},
            "expected_committed_id": {
                **integer_schema("Commit only if nothing was committed to its partitions after this number."),
                "type": ["integer", "null"],
            },
        },
    }


def _result_schema() -> Schema:
    identity = {**UUID_SCHEMA, "description": "As it was sent."}
    fault = {
        **object_schema(field=TEXT_SCHEMA, message=TEXT_SCHEMA),
        "properties": {"field": TEXT_SCHEMA, "message": TEXT_SCHEMA, "current_committed_id": integer_schema()},
    }
    committed = object_schema(
        id=identity,
        status={"const": "committed"},
        committed_id=positive_integer_schema(),
        status_updated_at=timestamp_schema(),
    )
    committed["properties"]["erased"] = {"const": True}
    reasons = {"enum": [error_codes.VALIDATION_FAILED, error_codes.FORBIDDEN]}
    errors = {"type": "array", "minItems": 1, "items": fault}
    rejected = object_schema(id=identity, status={"const": "rejected"}, reason=reasons, errors=errors)
    return {"oneOf": [committed, rejected]}


def _event_schema() -> Schema:
    event = object_schema(
        id=UUID_SCHEMA,
        client_id=TEXT_SCHEMA,
        partitions={"type": "array", "minItems": 1, "items": TEXT_SCHEMA},
        committed_id=positive_integer_schema(),
        event={"type": ["object", "null"], "description": "As it was submitted, in canonical form; null if erased."},
        status_updated_at=timestamp_schema(),
    )
    event["properties"]["erased"] = {"const": True}
    about = "The principal that wrote it, as the server knows it. Left out if `show_actors` is off."
    event["properties"]["actor"] = {**TEXT_SCHEMA, "description": about}
    return event
