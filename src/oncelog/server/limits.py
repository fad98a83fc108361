"""Limits of the server, each with a name and its unit: fixed ones of authentication, then the configurable ones."""

from typing import Final

from msgspec import Struct

from oncelog.core.limits import RATE_MAX, SETTING_NUMBER_MAX, WHOLE_REQUEST_ITEMS_MAX, check_whole_numbers

GRANTS_MAX: Final = 1000
"""Names and prefixes in each list of one identity's grants."""

TOKEN_CHARACTERS_MAX: Final = 16_384
"""A longer token is refused before it is decoded."""
TOKEN_HEADER_CHARACTERS_MAX: Final = 4096
TOKEN_SIGNATURE_CHARACTERS_MAX: Final = 1400
"""Signature of an RSA key of 8192 bits in base64url."""
TOKEN_KEYS_MAX: Final = 32
"""Keys for tokens, over all files. A token without a key id is tried with each key that has no id."""
TOKEN_KEY_FILE_BYTES_MAX: Final = 256 * 1024
TLS_FILE_BYTES_MAX: Final = 1024 * 1024
"""Largest certificate chain or private key."""
TLS_HANDSHAKE_BYTES_MAX: Final = 16 * 1024
"""Bytes of an incomplete TLS handshake. Browsers send about 2 KiB, and the server asks for no client certificate."""
METRICS_CONNECTIONS_MAX: Final = 64
"""Connections of the metrics port at a time. Prometheus and health checks need a few."""
SECRET_BYTES_MIN: Final = 32
"""Shortest secret for HS256: as long as its hash (RFC 7518, 3.2)."""
RSA_BITS_MIN: Final = 2048
LEEWAY_MS_DEFAULT: Final = 30_000
"""Largest difference between the clocks of the issuer and the server."""
LEEWAY_MS_MAX: Final = 300_000
TOKEN_LIFETIME_MS_DEFAULT: Final = 30 * 86_400_000
"""30 days. A single token cannot be revoked, so its lifetime bounds the use of a stolen one."""
TOKEN_TIME_S_MAX: Final = 253_402_300_799
"""The end of the year 9999. A later time is probably in milliseconds."""

API_KEYS_MAX: Final = 10_000
"""Keys of one file, including revoked ones."""
API_KEYS_FILE_BYTES_MAX: Final = 64 * 1024 * 1024
API_KEY_SECRET_BYTES: Final = 32
API_KEY_ID_BYTES: Final = 8

CONNECT_BYTES_MAX: Final = 32 * 1024
"""Largest frame of a WebSocket before authentication."""
LONG_FRAME_BYTES: Final = 64 * 1024
"""Longer frames and bodies are decoded in a thread, so that other connections do not wait."""
INSIEME_FRAME_BYTES: Final = 64 * 1024 - len("batch-preview") + 36
"""Largest frame of the npm package `insieme` 2.1.0: it measures its batches, of at most 64 KiB, with "batch-preview" as
their message id, and sends them with a UUID."""

SETTINGS_FILE_BYTES_MAX: Final = 1024 * 1024
SCHEMAS_FILE_BYTES_MAX: Final = 16 * 1024 * 1024
COMPACT_DELTAS_MAX: Final = 10_000
"""Deltas that one request compacts."""
COMPACT_ROWS_MAX: Final = 50_000
"""Rows that one request to compact reads, to find deleted ones."""

REQUESTS_BURST_SECONDS: Final = 5
"""Seconds of `requests_per_second_max` that an actor can use at once: clients reconnect and retry together."""
_MIB: Final = 2**20
_OPTIONAL_LIMITS: Final = frozenset(
    {
        "auth_failures_per_minute_max",
        "requests_per_second_max",
        "new_events_per_second_max",
        "frames_per_second_max",
        "user_messages_per_second_max",
        "chat_messages_per_second_max",
        "user_chats_per_second_max",
        "connections_per_address_max",
        "connections_per_principal_max",
        "unauthenticated_connections_max",
    }
)
_HIGHEST: Final = {
    "request_events_max": WHOLE_REQUEST_ITEMS_MAX,
    "request_members_max": WHOLE_REQUEST_ITEMS_MAX - 1,  # the chat is one item more
    "new_events_per_second_max": RATE_MAX,
    "user_messages_per_second_max": RATE_MAX,
    "chat_messages_per_second_max": RATE_MAX,
    "user_chats_per_second_max": RATE_MAX,
    "user_chats_burst_max": RATE_MAX,
}
"""Highest values of the limits that have another one than `SETTING_NUMBER_MAX`."""


class ApiLimits(Struct, frozen=True, kw_only=True):
    """Limits of the APIs of one server. Work above a limit is answered with an error; nothing is dropped."""

    connections_max: int = 10_000
    """Connections at a time, over all APIs except gRPC."""
    connections_per_address_max: int = 5000
    """Connections of one address, of IPv6 of one network of 64 bits. Never more than half of `connections_max`. 0
    switches the limit off."""
    connections_per_principal_max: int = 2500
    """Connections of one principal, gRPC streams included. Never more than half of `connections_max`. 0 switches the
    limit off."""
    unauthenticated_connections_max: int = 1000
    """Connections before authentication, TLS handshakes included. Above it the oldest ones are closed. 0 switches the
    limit off."""
    grpc_connections_max: int = 1000
    """Connections of the gRPC port, authenticated or not. Never more than `connections_max`.

    gRPC keeps up to 200 KB for an anonymous connection with an unfinished message, and does not say which connections
    are anonymous. So this limit also bounds their memory."""
    frame_bytes_max: int = 4 * _MIB
    """Size of one WebSocket frame, or of the body of one HTTP request. The npm package `insieme` needs 65,559."""
    request_events_max: int = 1000
    """Events that one request submits. Never more than `request_items_max`, and at most 10,000."""
    events_in_flight_max: int = 10_000
    """Events or messages of one connection without an answer. Further ones are answered as busy. One request alone is
    always accepted."""
    page_events_default: int = 500
    """Events of a page if the reader requests no number. Never more than `page_events_max`."""
    page_events_max: int = 1000
    """Maximum number of events of a page, also if the reader requests more."""
    outbox_frames_max: int = 10_000
    """Frames that wait for one reader. At half of the limit the server logs a warning, above it closes the reader."""
    outbox_bytes_max: int = 8 * _MIB
    """Bytes that wait for one reader. At half of the limit the server logs a warning, above it closes the reader."""
    entity_value_bytes_max: int = _MIB
    """Size of the value of one entity of a ledger."""
    column_value_bytes_max: int = 256 * 1024
    """Size of the value of one column of a delta, in canonical JSON."""
    connect_timeout_ms: int = 10_000
    """Time in which a connection must send its first request, and a WebSocket authenticate."""
    heartbeat_ms: int = 30_000
    """Interval of pings on a silent connection."""
    cycle_idle_ms: int = 2000
    """How long an open sync cycle may request no further page while a reply waits behind it."""
    close_wait_ms: int = 5000
    """How long an error that closes a WebSocket waits for the replies to requests before it."""
    auth_failures_per_minute_max: int = 60
    """Failed authentications from one address, of IPv6 from one network of 64 bits. Further wrong credentials are
    answered as rate limited; valid ones are accepted. 0 switches the limit off."""
    new_events_per_second_max: int = 0
    """New events of one actor, in all processes of the log, without retries, and as many at once after a pause. At
    most 1,000,000. 0 switches the limit off."""
    requests_per_second_max: int = 2000
    """HTTP requests, gRPC calls and WebSocket connections of one actor at this server. 0 switches it off.

    After a pause an actor can make five times as many at once (`REQUESTS_BURST_SECONDS`).
    """
    frames_per_second_max: int = 5000
    """Frames that one connection sends. 0 switches the limit off."""
    message_bytes_max: int = 4096
    """Size of the content of one chat message, in UTF-8."""
    page_messages_default: int = 100
    """Messages of a page of a chat if the reader requests no number. Never more than `page_messages_max`."""
    page_messages_max: int = 500
    """Maximum number of messages, chats or members of a page, also if the reader requests more."""
    request_members_max: int = 500
    """Members that one request adds to a chat. Always below `request_items_max` and below 10,000."""
    user_messages_per_second_max: int = 0
    """New messages of one user in one chat, in all processes of the log, without retries, and as many at once after a
    pause. At most 1,000,000. 0 switches the limit off."""
    chat_messages_per_second_max: int = 0
    """New messages of all users in one chat, in all processes of the log, without retries, and as many at once after a
    pause. At most 1,000,000. 0 switches the limit off."""
    user_chats_per_second_max: int = 1
    """New chats of one user in the long run, in all processes of the log, without retries. At most 1,000,000. 0
    switches the limit off."""
    user_chats_burst_max: int = 1000
    """New chats of one user at once, after a pause. At most 1,000,000."""
    live_chats_max: int = 10_000
    """Chats of one connected user in memory. Messages of further chats are delivered by a look-up."""
    delivery_ms: int = 50
    """How long acknowledgements gather before the server sends them to the members of their chat."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            highest = _HIGHEST.get(name, SETTING_NUMBER_MAX)
            check_whole_numbers(self, [name], highest=highest, may_be_zero=_OPTIONAL_LIMITS)
