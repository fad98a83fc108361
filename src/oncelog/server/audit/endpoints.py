"""`GET /v1/audit`: pages of the administrative acts that the log has recorded (CO-43)."""

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from oncelog import error_codes
from oncelog.core.canonical import canonical
from oncelog.core.limits import ACT_CHARACTERS_MAX, NAME_CHARACTERS_MAX, TARGET_CHARACTERS_MAX
from oncelog.core.rules.audit import KEY_REVOKED, act_key
from oncelog.core.values import RecordAct
from oncelog.engine.audit import AuditFilter, entry_to_json
from oncelog.engine.log import Log
from oncelog.errors import HistoryChangedError
from oncelog.server.auth.credential_files import CredentialEvent
from oncelog.server.endpoint import Call, Endpoint, Parameter, parse_number
from oncelog.server.errors import ApiError, field_error
from oncelog.server.messages import (
    TEXT_SCHEMA,
    TIMESTAMP,
    Schema,
    integer_schema,
    new_decoder,
    object_schema,
    schema_ref,
    schema_response,
)

SERVER_ACTOR: Final = "system:server"
"""Actor of acts that the server records because its settings or files have changed."""
PAGE_ACTS_DEFAULT: Final = 100
PAGE_ACTS_MAX: Final = 500
_FILTERS: Final = {
    "act": (NAME_CHARACTERS_MAX, "Only this act."),
    "actor": (NAME_CHARACTERS_MAX, "Only acts of this actor."),
    "stream": (NAME_CHARACTERS_MAX, "Only acts that concern this stream."),
    "target": (TARGET_CHARACTERS_MAX, "Only acts on this target."),
}
"""Maximum length and description of each string parameter that filters acts."""
_DESCRIPTION: Final = """\
Administrative acts of all lanes by log time, oldest first. The `audit` grant must include the stream, or be `*` if \
the request has no `stream`. A page can be empty even though more pages follow. Request the next page with `after` set \
to `next_after`. With the `next_after` of the last page, the request returns acts that were recorded later."""


def list_endpoints(log: Log) -> list[Endpoint]:
    """Return the declarations of the Audit API."""
    since = integer_schema("Only acts at or after this time, in milliseconds since 1970.")
    after = {**TEXT_SCHEMA, "description": "`next_after` of an earlier page."}
    limit = {
        "type": "integer",
        "minimum": 1,
        "maximum": PAGE_ACTS_MAX,
        "default": PAGE_ACTS_DEFAULT,
        "description": "Maximum number of acts on a page.",
    }
    return [
        Endpoint(
            method="GET",
            path="/v1/audit",
            api="audit",
            name="readAudit",
            summary="Read audit records",
            description=_DESCRIPTION,
            parameters=(
                *(_text_parameter(name, most, about) for name, (most, about) in _FILTERS.items()),
                Parameter(name="since", schema=since, decode=parse_number, default=0),
                Parameter(name="until", schema=integer_schema("Only acts before this time."), decode=parse_number),
                Parameter(name="after", schema=after, default=""),
                Parameter(name="limit", schema=limit, decode=_parse_limit, default=PAGE_ACTS_DEFAULT),
            ),
            authorize=_authorize,
            handle=partial(_get_page, log),
            responses={200: schema_response("AuditPage", "A page.")},
            errors=(409,),
        )
    ]


async def _get_page(log: Log, call: Call) -> Mapping[str, Any]:
    texts = {name: call[name] for name in _FILTERS}
    audit_filter = AuditFilter(**texts, since_ms=call["since"], until_ms=call["until"])
    try:
        page = await log.audit(call["after"], call["limit"], audit_filter)
    except HistoryChangedError:
        reason = "belongs to another history; read from the beginning"
        raise field_error("after", reason, error_codes.HISTORY_CHANGED, epoch=log.epoch) from None
    except ValueError as error:
        raise field_error("after", str(error)) from None
    cursor = log.audit_cursor(page)
    acts = [entry_to_json(entry) for entry in page.entries]
    return {"acts": acts, "cursor": cursor, "next_after": cursor, "has_more": page.has_more}


def to_record_act(event: CredentialEvent) -> RecordAct | None:
    """Return the act that made a key invalid, or None if the key has expired."""
    if event.act == "api_key_expired":
        return None
    kind, _, ending = event.act.rpartition("_")
    details = {"kind": kind, "how": ending, "file": event.path[-NAME_CHARACTERS_MAX:]}
    if event.client_id is not None:
        details["client_id"] = event.client_id
    if event.fingerprint is not None:
        details["fingerprint"] = event.fingerprint
    return RecordAct(
        act=KEY_REVOKED,
        actor=SERVER_ACTOR,
        target=event.id[:TARGET_CHARACTERS_MAX],
        details=canonical(details),
        time_ms=event.at_ms,
        key=act_key(event.act, event.id, event.fingerprint or "", str(event.changed_ns or event.at_ms)),
    )


def _authorize(call: Call) -> str:
    stream: str = call["stream"]
    if not call.principal.grants.may_audit(stream):
        what = "this stream" if stream else "the whole log"
        raise ApiError(error_codes.FORBIDDEN, f"the credential has no `audit` grant for {what}")
    return stream


def _text_parameter(name: str, characters_max: int, description: str) -> Parameter:
    return Parameter(
        name=name,
        schema={**TEXT_SCHEMA, "maxLength": characters_max, "description": description},
        decode=new_decoder(
            lambda text: len(text) <= characters_max,
            f"must have at most {characters_max} characters",
            limit=characters_max,
        ),
        default="",
    )


def _parse_limit(text: str, name: str) -> int:
    limit = parse_number(text, name)
    if not 1 <= limit <= PAGE_ACTS_MAX:
        raise field_error(name, f"must be from 1 to {PAGE_ACTS_MAX}, not {limit}", limit=PAGE_ACTS_MAX)
    return limit


def build_schemas() -> dict[str, Schema]:
    """Return the schemas of the Audit API's answers."""
    act = object_schema(
        time_ms=TIMESTAMP,
        act={**TEXT_SCHEMA, "maxLength": ACT_CHARACTERS_MAX},
        actor=TEXT_SCHEMA,
        stream={**TEXT_SCHEMA, "description": "The stream that the act concerns; empty if it concerns the whole log."},
        target={**TEXT_SCHEMA, "description": "The object of the act."},
        details={"type": "object"},
        lane=integer_schema(),
        position=integer_schema(),
        log_time_ms=TIMESTAMP,
        erased={"type": "boolean", "description": "The body of the record was erased."},
    )
    return {
        "Act": act,
        "AuditPage": object_schema(
            acts={"type": "array", "items": schema_ref("Act"), "maxItems": PAGE_ACTS_MAX},
            cursor={**TEXT_SCHEMA, "deprecated": True, "description": "Same value as `next_after`."},
            next_after=TEXT_SCHEMA,
            has_more={"type": "boolean"},
        ),
    }
