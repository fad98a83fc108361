"""The audit trail in the description of the HTTP interface."""

from oncelog.core.limits import ACT_CHARACTERS_MAX, NAME_CHARACTERS_MAX, TARGET_CHARACTERS_MAX
from oncelog.doors.audit_http import PAGE_ACTS_DEFAULT, PAGE_ACTS_MAX
from oncelog.doors.openapi_parts import TEXT, Schema, answer, object_of, operation, parameter, ref, time, whole

_ABOUT = """\
Administrative acts of all lanes by log time, oldest first. The grant `audit` must name the stream, or be `*` where no \
stream is asked for. A page can be empty and have more. Ask again with `after` set to `cursor`; after the last page, \
acts that are recorded later follow."""


def page() -> Schema:
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
            "readAudit", "Read recorded acts", _ABOUT, answer("AuditPage", "A page."), (400, 401, 409, 429), tag="audit"
        ),
        "parameters": [
            *(
                parameter(name, {**TEXT, "maxLength": most, "description": about})
                for name, (most, about) in texts.items()
            ),
            parameter("since", whole("Only acts from this time on, in milliseconds since 1970.")),
            parameter("until", whole("Only acts before this time.")),
            parameter("after", {**TEXT, "description": "The `cursor` of an earlier page."}),
            parameter("limit", {**limit, "description": "Acts of a page, at most."}),
        ],
    }


def schemas() -> dict[str, Schema]:
    """The schemas of its answers."""
    act = object_of(
        time_ms=time(),
        act={**TEXT, "maxLength": ACT_CHARACTERS_MAX},
        actor=TEXT,
        stream={**TEXT, "description": "The stream that the act concerns; empty where it concerns the log."},
        target={**TEXT, "description": "What the act was done to."},
        details={"type": "object"},
        lane=whole(),
        position=whole(),
        log_time_ms=time(),
        erased={"type": "boolean", "description": "The body of the record was erased."},
    )
    return {
        "Act": act,
        "AuditPage": object_of(
            acts={"type": "array", "items": ref("Act"), "maxItems": PAGE_ACTS_MAX},
            cursor=TEXT,
            has_more={"type": "boolean"},
        ),
    }
