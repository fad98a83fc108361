"""JSON Schemas of the Audit API."""

from oncelog.core.limits import ACT_CHARACTERS_MAX
from oncelog.server.audit.endpoints import PAGE_ACTS_MAX
from oncelog.server.json_schemas import (
    TEXT_SCHEMA,
    Schema,
    integer_schema,
    object_schema,
    schema_ref,
    timestamp_schema,
)


def build_schemas() -> dict[str, Schema]:
    """Return the schemas of its answers."""
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
            cursor={**TEXT_SCHEMA, "deprecated": True, "description": "As `next_after`."},
            next_after=TEXT_SCHEMA,
            has_more={"type": "boolean"},
        ),
    }
