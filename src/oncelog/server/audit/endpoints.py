"""`GET /v1/audit`: pages of the administrative acts that the log has recorded (CO-43)."""

from typing import Final

import orjson
from aiohttp import web

from oncelog import error_codes
from oncelog.core.canonical import canonical
from oncelog.core.limits import NAME_CHARACTERS_MAX, TARGET_CHARACTERS_MAX
from oncelog.core.rules.audit import KEY_REVOKED, act_key
from oncelog.core.values import RecordAct
from oncelog.engine.audit import AuditFilter, AuditPage, entry_to_json
from oncelog.engine.log import Log
from oncelog.errors import HistoryChangedError
from oncelog.server.auth.credential_events import CredentialEvent
from oncelog.server.auth_gate import AuthGate
from oncelog.server.connection_limiter import Caller
from oncelog.server.errors import ApiError, translate_errors
from oncelog.server.http_requests import JSON, get_credential, parse_number, parse_parameters
from oncelog.server.metrics import Counts

SERVER_ACTOR: Final = "system:server"
"""Actor of acts that the server finds in its settings and files."""
PAGE_ACTS_DEFAULT: Final = 100
PAGE_ACTS_MAX: Final = 500
QUERY_PARAMETERS: Final = ("act", "actor", "stream", "target", "since", "until", "after", "limit")


class AuditEndpoints:
    """The handler. Every request is authenticated, and its grant is checked before anything is read."""

    def __init__(self, log: Log, auth_gate: AuthGate, counts: Counts) -> None:
        self._log = log
        self._auth_gate = auth_gate
        self._counts = counts

    async def get_page(self, request: web.Request, caller: Caller) -> web.Response:
        """Answer with a page of acts, oldest first."""
        principal = self._auth_gate.authenticate(get_credential(request), caller)
        given = parse_parameters(request, QUERY_PARAMETERS)
        if not principal.grants.may_audit(given.get("stream", "")):
            what = "acts of this stream" if given.get("stream") else "acts of the whole log"
            raise ApiError(error_codes.FORBIDDEN, f"{what} may not be read: the grant `audit` is missing")
        limit = parse_number(given["limit"], "limit") if "limit" in given else PAGE_ACTS_DEFAULT
        if not 1 <= limit <= PAGE_ACTS_MAX:
            message = f"limit: must be from 1 to {PAGE_ACTS_MAX}, not {limit}"
            raise ApiError(error_codes.BAD_REQUEST, message, field="limit", limit=PAGE_ACTS_MAX)
        try:
            with translate_errors():
                page = await self._load_page(given.get("after", ""), limit, _parse_filter(given))
        except ValueError as error:
            raise ApiError(error_codes.BAD_REQUEST, f"after: {error}", field="after") from None
        body = orjson.dumps(
            {
                "acts": [entry_to_json(entry) for entry in page.entries],
                "cursor": self._log.audit_cursor(page),
                "has_more": page.has_more,
            }
        )
        self._counts.requests["audit", "http", "ok"] += 1
        self._counts.bytes_sent += len(body)
        return web.Response(body=body, content_type=JSON, headers={"Cache-Control": "no-store"})

    async def _load_page(self, after: str, limit: int, audit_filter: AuditFilter) -> AuditPage:
        try:
            return await self._log.audit(after, limit, audit_filter)
        except HistoryChangedError:
            message = "after: is of another history; read from the beginning"
            raise ApiError(error_codes.HISTORY_CHANGED, message, field="after", epoch=self._log.epoch) from None


def to_record_act(event: CredentialEvent) -> RecordAct | None:
    """Return the act that ended a key; None for a key that has expired by itself."""
    if event.act == "api_key_expired":
        return None
    kind, _, how = event.act.rpartition("_")
    details = {"kind": kind, "how": how, "file": event.path[-NAME_CHARACTERS_MAX:]}
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


def _parse_filter(parameters: dict[str, str]) -> AuditFilter:
    for name in ("act", "actor", "stream", "target"):
        most = TARGET_CHARACTERS_MAX if name == "target" else NAME_CHARACTERS_MAX
        if len(parameters.get(name, "")) > most:
            message = f"{name}: must have at most {most} characters"
            raise ApiError(error_codes.BAD_REQUEST, message, field=name, limit=most)
    return AuditFilter(
        act=parameters.get("act", ""),
        actor=parameters.get("actor", ""),
        stream=parameters.get("stream", ""),
        target=parameters.get("target", ""),
        since_ms=parse_number(parameters["since"], "since") if "since" in parameters else 0,
        until_ms=parse_number(parameters["until"], "until") if "until" in parameters else None,
    )
