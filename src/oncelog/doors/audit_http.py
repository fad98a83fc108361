"""`GET /v1/audit`: pages of the administrative acts that the log has recorded (CO-43)."""

from typing import Final

import orjson
from aiohttp import web

from oncelog import codes
from oncelog.core.audit import KEY_REVOKED, act_key
from oncelog.core.canonical import canonical
from oncelog.core.limits import NAME_CHARACTERS_MAX, TARGET_CHARACTERS_MAX
from oncelog.core.values import RecordAct
from oncelog.doors.connections import Caller
from oncelog.doors.credential_events import CredentialEvent
from oncelog.doors.entrance import Entrance
from oncelog.doors.faults import DoorError, telling
from oncelog.doors.metrics import Counts
from oncelog.doors.requests import JSON, credential_of, number_of, parameters_of
from oncelog.engine.audit import AuditFilter, AuditPage, entry_json
from oncelog.engine.log import Log
from oncelog.errors import HistoryChangedError

SERVER_ACTOR: Final = "system:server"
"""Actor of acts that the server finds in its settings and files."""
PAGE_ACTS_DEFAULT: Final = 100
PAGE_ACTS_MAX: Final = 500
PARAMETERS: Final = ("act", "actor", "stream", "target", "since", "until", "after", "limit")


class AuditHttp:
    """The handler. Every request is authenticated, and its grant is checked before anything is read."""

    def __init__(self, log: Log, entrance: Entrance, counts: Counts) -> None:
        self._log = log
        self._entrance = entrance
        self._counts = counts

    async def page(self, request: web.Request, caller: Caller) -> web.Response:
        """Answer with a page of acts, oldest first."""
        principal = self._entrance.authenticate(credential_of(request), caller)
        given = parameters_of(request, PARAMETERS)
        if not principal.grants.may_audit(given.get("stream", "")):
            what = "acts of this stream" if given.get("stream") else "acts of the whole log"
            raise DoorError(codes.FORBIDDEN, f"{what} may not be read: the grant `audit` is missing")
        limit = number_of(given["limit"], "limit") if "limit" in given else PAGE_ACTS_DEFAULT
        if not 1 <= limit <= PAGE_ACTS_MAX:
            message = f"limit: must be from 1 to {PAGE_ACTS_MAX}, not {limit}"
            raise DoorError(codes.BAD_REQUEST, message, field="limit", limit=PAGE_ACTS_MAX)
        try:
            with telling():
                page = await self._page(given.get("after", ""), limit, _filter_of(given))
        except ValueError as error:
            raise DoorError(codes.BAD_REQUEST, f"after: {error}", field="after") from None
        body = orjson.dumps(
            {
                "acts": [entry_json(entry) for entry in page.entries],
                "cursor": self._log.audit_cursor(page),
                "has_more": page.has_more,
            }
        )
        self._counts.requests["audit", "http", "ok"] += 1
        self._counts.bytes_sent += len(body)
        return web.Response(body=body, content_type=JSON, headers={"Cache-Control": "no-store"})

    async def _page(self, after: str, limit: int, wanted: AuditFilter) -> AuditPage:
        try:
            return await self._log.audit(after, limit, wanted)
        except HistoryChangedError:
            message = "after: is of another history; read from the beginning"
            raise DoorError(codes.HISTORY_CHANGED, message, field="after", epoch=self._log.epoch) from None


def act_of_credential(event: CredentialEvent) -> RecordAct | None:
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


def _filter_of(given: dict[str, str]) -> AuditFilter:
    for name in ("act", "actor", "stream", "target"):
        most = TARGET_CHARACTERS_MAX if name == "target" else NAME_CHARACTERS_MAX
        if len(given.get(name, "")) > most:
            message = f"{name}: must have at most {most} characters"
            raise DoorError(codes.BAD_REQUEST, message, field=name, limit=most)
    return AuditFilter(
        act=given.get("act", ""),
        actor=given.get("actor", ""),
        stream=given.get("stream", ""),
        target=given.get("target", ""),
        since_ms=number_of(given["since"], "since") if "since" in given else 0,
        until_ms=number_of(given["until"], "until") if "until" in given else None,
    )
