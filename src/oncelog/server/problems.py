"""Errors over HTTP: problem documents (RFC 9457), with the same shape for every API.

A document has `type`, `title`, `status`, `detail` and `code`; `errors` if the request contains invalid values, each
with its path; `retry_after_ms` if the same request can succeed later; and the other details of the error. It also keeps
the members that clients read before problem documents were introduced.
"""

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, Final

import orjson
from aiohttp import web
from msgspec import Struct

from oncelog import error_codes
from oncelog.server.errors import ApiError
from oncelog.server.messages import PROBLEM_JSON

TYPE_PREFIX: Final = "urn:oncelog:problem:"
PROBLEMS: Final = {
    error_codes.BAD_REQUEST: (400, "Malformed request"),
    error_codes.DELTA_ID_MISMATCH: (400, "Id does not match the delta"),
    error_codes.INVALID_MESSAGE: (400, "Malformed message"),
    error_codes.AUTH_FAILED: (401, "Authentication failed"),
    error_codes.FORBIDDEN: (403, "Access denied"),
    error_codes.NOT_A_MEMBER: (403, "Not a member of the chat"),
    error_codes.NOT_AN_OWNER: (403, "Not an owner of the chat"),
    error_codes.NOT_FOUND: (404, "No such record"),
    error_codes.UNKNOWN_PATH: (404, "No such path"),
    error_codes.METHOD_NOT_ALLOWED: (405, "Method not allowed for this path"),
    error_codes.UNKNOWN_METHOD: (501, "No such method"),
    error_codes.HISTORY_CHANGED: (409, "Cursor from another history"),
    error_codes.CLOCK_DRIFT: (409, "Clock too far ahead"),
    error_codes.LAST_OWNER: (409, "A chat needs an owner"),
    error_codes.INVALID_ACK: (409, "Acknowledgement beyond the last message"),
    error_codes.TOO_LARGE: (413, "Request too large"),
    error_codes.MESSAGE_TOO_LARGE: (413, "Message too large"),
    error_codes.INVALID: (422, "Write not allowed"),
    error_codes.RATE_LIMITED: (429, "Too many requests"),
    error_codes.SERVER_ERROR: (500, "Server error"),
    error_codes.SERVER_BUSY: (503, "Server busy"),
    error_codes.SERVER_STOPPING: (503, "Server stopping"),
    error_codes.READ_ONLY: (503, "No new writes"),
    error_codes.QUOTA_EXCEEDED: (507, "Quota exceeded"),
    error_codes.SEQUENCE_GAP: (409, "Gap in the sequence"),
    error_codes.SEQUENCE_REUSED: (409, "Sequence used for another write"),
    error_codes.IDEMPOTENCY_KEY_REUSED: (409, "Idempotency key used for another write"),
    error_codes.KEY_EXISTS: (412, "Condition not met"),
    error_codes.KEY_NOT_FOUND: (412, "Condition not met"),
    error_codes.VERSION_MISMATCH: (412, "Condition not met"),
    error_codes.VALUE_MISMATCH: (412, "Condition not met"),
}
"""HTTP status and title for each error code."""
_NOT_SHOWN: Final = frozenset({"status", "field"})


def to_error_member(error: ApiError) -> dict[str, Any]:
    """Return the `error` member (code, message, details), which clients read before problem documents existed."""
    details = {name: value for name, value in error.details.items() if name != "status"}
    return {"error": {"code": error.code, "message": error.message, "details": details}}


class ProblemDialect(Struct, frozen=True):
    """How the problem documents of one API differ from the default."""

    spell_code: Callable[[ApiError], str] = attrgetter("code")
    to_previous_members: Callable[[ApiError], dict[str, Any]] = to_error_member
    """Returns the members that clients read before problem documents existed."""
    statuses: Mapping[str, int] = {}
    """Statuses by code, where they differ from `PROBLEMS`."""


DEFAULT_DIALECT: Final = ProblemDialect()


def get_status(error: ApiError, dialect: ProblemDialect = DEFAULT_DIALECT) -> int:
    """Return the HTTP status of an error."""
    status: int = error.details.get("status") or dialect.statuses.get(error.code) or PROBLEMS[error.code][0]
    return status


def to_problem(error: ApiError, dialect: ProblemDialect = DEFAULT_DIALECT) -> dict[str, Any]:
    """Return the problem document of an error."""
    code = dialect.spell_code(error)
    kind = code.lower()
    field = error.details.get("field")
    problem: dict[str, Any] = {
        "type": TYPE_PREFIX + kind,
        # A dialect may replace the code with another common code or with a separate one. The title belongs to the code
        # that the client sees, unless that code is not in the table.
        "title": PROBLEMS.get(kind, PROBLEMS[error.code])[1],
        "status": get_status(error, dialect),
        "detail": error.message,
        "code": code,
    }
    if field:
        problem["errors"] = [{"path": field, "detail": error.message.removeprefix(f"{field}: ")}]
    details = {name: value for name, value in error.details.items() if name not in _NOT_SHOWN}
    return {**problem, **details, **dialect.to_previous_members(error)}


def to_error_response(
    error: ApiError, dialect: ProblemDialect = DEFAULT_DIALECT, headers: Mapping[str, str] | None = None
) -> web.Response:
    """Return the response to a request that failed with this error."""
    headers = dict(headers or {})
    retry_after_ms = error.details.get("retry_after_ms")
    if retry_after_ms is not None:
        headers["Retry-After"] = str(-(-retry_after_ms // 1000))
    if error.code == error_codes.AUTH_FAILED:
        headers["WWW-Authenticate"] = "Bearer"
    response = web.Response(
        body=orjson.dumps(to_problem(error, dialect)),
        status=get_status(error, dialect),
        content_type=PROBLEM_JSON,
        headers=headers,
    )
    if error.details.get("field") == "body":
        response.force_close()  # the unread rest of the body would be parsed as the next request
    return response
