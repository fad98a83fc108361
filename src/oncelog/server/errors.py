"""Errors that clients receive, common to every API and transport."""

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Final

import orjson

from oncelog.core.values import Reason, Refused
from oncelog.error_codes import (
    AUTH_FAILED,
    BAD_REQUEST,
    QUOTA_EXCEEDED,
    RATE_LIMITED,
    READ_ONLY,
    SERVER_BUSY,
    SERVER_ERROR,
)
from oncelog.error_translation import translate_raised
from oncelog.errors import (
    CanonicalError,
    ClockJumpedError,
    ClosedError,
    MovedError,
    OncelogError,
    StoreUnavailableError,
    UnstorableError,
)
from oncelog.server import logger

RETRY_AFTER_MS: Final = 1000
"""Suggested retry delay while the log cannot accept new writes."""
BUSY_RETRY_AFTER_MS: Final = 100
"""Suggested retry delay for a client with too many requests in flight: the next commit makes room."""
UNKNOWN_OUTCOME: Final = "the outcome is unknown; send the request again with the same id"
UNSTORABLE: Final = "the store cannot hold this write; nothing was written, and sending it again does not help"
UNREADABLE: Final = "the log cannot be read at the moment; try again"


class ApiError(Exception):
    """An error that the server sends as an answer. The client receives `message`, which must contain no secret."""

    reply_to: Any = None
    """The ids of the WebSocket message, which the error repeats so that the client can match it with its request."""

    def __init__(self, code: str, message: str, **details: Any) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.details = details


def field_error(field: str, reason: str, code: str = BAD_REQUEST, **details: Any) -> ApiError:
    """Return the error for an invalid value in a request: the path of the field, and the reason."""
    field = field.encode("utf-8", "replace").decode()  # a path may contain lone surrogates, which cannot be encoded
    return ApiError(code, str(CanonicalError(field, reason)), field=field, **details)


def raise_first(new_error: Callable[[str], Exception], *faults: tuple[bool, str]) -> None:
    """Raise the error for the first fault whose condition is true, if any."""
    for is_present, fault in faults:
        if is_present:
            raise new_error(fault)


class MalformedMessageError(ApiError):
    """A malformed WebSocket message. `reply_to` holds the ids that could be read."""

    def __init__(self, error: ApiError, reply_to: Any) -> None:
        super().__init__(error.code, error.message, **error.details)
        self.reply_to = reply_to


SERVER_FAILURE: Final = ApiError(SERVER_ERROR, "internal server error", status=500)
"""Answer to a request that failed because of a fault in the server."""


def encode_error(error: ApiError) -> bytes:
    """Encode an error as a JSON object."""
    return orjson.dumps({"code": error.code, "message": error.message, "details": error.details})


RETRYABLE_CODES: Final = {
    Reason.BUSY: SERVER_BUSY,
    Reason.WRONG_SCOPE: SERVER_BUSY,
    Reason.RATE_LIMITED: RATE_LIMITED,
    Reason.QUOTA_EXCEEDED: QUOTA_EXCEEDED,
    Reason.READ_ONLY: READ_ONLY,
}
"""Codes of refusals that leave a write undecided, so that the client may retry it unchanged."""


def retryable_error(refusal: Refused) -> ApiError:
    """Return the error for a refusal in `RETRYABLE_CODES`."""
    details: dict[str, Any] = {"retry_after_ms": refusal.retry_after_ms}
    if refusal.tenant:
        details |= {"tenant": refusal.tenant, "quota": refusal.field, "limit": refusal.limit}
        if refusal.reason is Reason.QUOTA_EXCEEDED:
            details["usage"] = refusal.current
    return ApiError(RETRYABLE_CODES[refusal.reason], refusal.message, **details)


QUIET_POLLS: Final = 10
"""An outage is over after this many polls without a failure. Clients retry within seconds."""


class StoreFailures:
    """Counts requests that the store could not serve, and logs the beginning and the end of each outage once."""

    def __init__(self) -> None:
        self._kinds: set[type[BaseException]] = set()
        self._count = 0
        self._quiet_polls = 0

    def count(self, error: BaseException) -> None:
        """Count a failed request, and log the first one of each kind."""
        is_reported = type(error) in self._kinds
        logger.log(logging.DEBUG if is_reported else logging.ERROR, "the log could not serve a request: %s", error)
        if isinstance(error, StoreUnavailableError):  # other errors are not part of an outage
            self._kinds.add(type(error))
            self._count += 1
            self._quiet_polls = 0

    def poll(self) -> None:
        """Check whether the outage is over. Called periodically, once for all APIs."""
        self._quiet_polls += 1
        if self._kinds and self._quiet_polls > QUIET_POLLS:
            logger.warning("the log serves requests again, after %d failed requests", self._count)
            self._kinds.clear()
            self._count = 0


store_failures: Final = StoreFailures()


def shutdown_error(code: str = SERVER_BUSY) -> ApiError:
    """Return the error for new requests during shutdown."""
    return ApiError(code, "the server is stopping", retry_after_ms=RETRY_AFTER_MS)


def credential_ended_error() -> ApiError:
    """Return the error for a caller whose credential or rights are no longer valid."""
    return ApiError(AUTH_FAILED, "the token has expired, or its rights have changed")


_ERRORS: Final[Mapping[type[OncelogError], tuple[str, str]]] = {
    ClockJumpedError: (
        SERVER_BUSY,
        "the server's clock may be wrong; new writes are not accepted until it is corrected or confirmed",
    ),
    MovedError: (SERVER_ERROR, "the log has been moved; nothing was written here"),
    ClosedError: (SERVER_ERROR, "the server is stopping; send the request again"),
}
"""Code and message for each error of the log after which a retry of the same request can succeed."""


def to_api_error(error: BaseException, default_message: str = UNKNOWN_OUTCOME) -> ApiError:
    """Convert an error of the log to an ApiError.

    The outcome of the request is unknown, and the client may retry it. For reads, pass `UNREADABLE` as the default
    message.
    """
    if isinstance(error, ApiError):
        return error
    for kind, (code, message) in _ERRORS.items():
        if isinstance(error, kind):
            return ApiError(code, message, retry_after_ms=RETRY_AFTER_MS)
    if isinstance(error, UnstorableError):
        logger.warning("the store rejected a request: %s", error)
        return ApiError(BAD_REQUEST, UNSTORABLE)
    store_failures.count(error)
    return ApiError(SERVER_ERROR, default_message, retry_after_ms=RETRY_AFTER_MS)


def translate_errors() -> AbstractContextManager[None]:
    """Convert errors of the log to `ApiError`, for reads."""
    return translate_raised(OncelogError, lambda error: to_api_error(error, UNREADABLE))
