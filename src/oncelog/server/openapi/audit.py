"""The audit trail in the description of the HTTP interface."""

from oncelog.core.limits import ACT_CHARACTERS_MAX, NAME_CHARACTERS_MAX, TARGET_CHARACTERS_MAX
from oncelog.server.audit.endpoints import PAGE_ACTS_DEFAULT, PAGE_ACTS_MAX
from oncelog.server.openapi.parts import (
    TEXT_SCHEMA,
    Schema,
    integer_schema,
    object_schema,
    operation,
    parameter,
    schema_ref,
    schema_response,
    timestamp_schema,
)

_DESCRIPTION = """\
Administrative acts of all lanes by log time, oldest first. The grant `audit` must name the stream, or be `*` where no \
stream is asked for. A page can be empty and have more. Ask again with `after` set to `cursor`; after the last page, \
acts that are recorded later follow."""


def page_operation() -> Schema:
    """`GET /v1/audit`."""
    texts = {
        "act": (NAME_CHARACTERS_MAX, "Only this act."),
        "actor": (NAME_CHARACTERS_MAX, "Only acts of this actor."),
        "stream": (NAME_CHARACTERS_MAX, "Only acts that concern this stream."),
        "target": (TARGET_CHARACTERS_MAX, "Only acts on this target."),
    }
    limit: Schema = {"type": "integer", "minimum": 1, "maximum": PAGE_ACTS_MAX, "default": PAGE_ACTS_DEFAULT}
    return {
        **operation(
            "readAudit",
            "Read recorded acts",
            _DESCRIPTION,
            schema_response("AuditPage", "A page."),
            (400, 401, 409, 429),
            tag="audit",
        ),
        "parameters": [
            *(
                parameter(name, {**TEXT_SCHEMA, "maxLength": most, "description": about})
                for name, (most, about) in texts.items()
            ),
            parameter("since", integer_schema("Only acts from this time on, in milliseconds since 1970.")),
            parameter("until", integer_schema("Only acts before this time.")),
            parameter("after", {**TEXT_SCHEMA, "description": "The `cursor` of an earlier page."}),
            parameter("limit", {**limit, "description": "Acts of a page, at most."}),
        ],
    }


def build_schemas() -> dict[str, Schema]:
    """The schemas of its answers."""
    act = object_schema(
        time_ms=timestamp_schema(),
        act={**TEXT_SCHEMA, "maxLength": ACT_CHARACTERS_MAX},
        actor=TEXT_SCHEMA,
        stream={**TEXT_SCHEMA, "description": "The stream that the act concerns; empty where it concerns the log."},
        target={**TEXT_SCHEMA, "description": "What the act was done to."},
        details={"type": "object"},
        lane=integer_schema(),
        position=integer_schema(),
        log_time_ms=timestamp_schema(),
        erased={"type": "boolean", "description": "The body of the record was erased."},
    )
    return {
        "Act": act,
        "AuditPage": object_schema(
            acts={"type": "array", "items": schema_ref("Act"), "maxItems": PAGE_ACTS_MAX},
            cursor=TEXT_SCHEMA,
            has_more={"type": "boolean"},
        ),
    }
