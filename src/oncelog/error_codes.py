"""Error codes that the server and its clients share."""

from typing import Final

PROTOCOL_VERSION: Final = "1.0"

BAD_REQUEST: Final = "bad_request"
FORBIDDEN: Final = "forbidden"
NOT_FOUND: Final = "not_found"
VALIDATION_FAILED: Final = "validation_failed"
SERVER_BUSY: Final = "server_busy"
HISTORY_CHANGED: Final = "history_changed"
AUTH_FAILED: Final = "auth_failed"
VERSION_UNSUPPORTED: Final = "protocol_version_unsupported"
RATE_LIMITED: Final = "rate_limited"
QUOTA_EXCEEDED: Final = "quota_exceeded"
READ_ONLY: Final = "read_only"
SERVER_ERROR: Final = "server_error"
CLOCK_DRIFT: Final = "clock_drift"
DELTA_ID_MISMATCH: Final = "delta_id_mismatch"
TOO_LARGE: Final = "too_large"
INVALID: Final = "invalid"
NOT_A_MEMBER: Final = "not_a_member"
NOT_AN_OWNER: Final = "not_an_owner"
LAST_OWNER: Final = "last_owner"
INVALID_MESSAGE: Final = "invalid_message"
MESSAGE_TOO_LARGE: Final = "message_too_large"
INVALID_ACK: Final = "invalid_ack"
SLOW_CONSUMER: Final = "slow_consumer"
SERVER_STOPPING: Final = "server_stopping"

RETRYABLE_CODES: Final = frozenset({SERVER_BUSY, SERVER_ERROR, RATE_LIMITED, QUOTA_EXCEEDED, READ_ONLY})
"""Nothing is wrong with what was sent: it may be sent again as it is, after a while."""
