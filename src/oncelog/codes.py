"""The codes of the events door, which both its ends say: the server (`doors.events`) and its client (`client`)."""

from typing import Final

PROTOCOL_VERSION: Final = "1.0"

BAD_REQUEST: Final = "bad_request"
FORBIDDEN: Final = "forbidden"
VALIDATION_FAILED: Final = "validation_failed"
SERVER_BUSY: Final = "server_busy"
HISTORY_CHANGED: Final = "history_changed"
AUTH_FAILED: Final = "auth_failed"
VERSION_UNSUPPORTED: Final = "protocol_version_unsupported"
RATE_LIMITED: Final = "rate_limited"
SERVER_ERROR: Final = "server_error"
