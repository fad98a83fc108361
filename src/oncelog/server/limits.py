"""Limits of the server, each with a name and a unit. The fixed limits come first, then the configurable ones."""

from typing import Final

from msgspec import Struct

from oncelog.core.limits import RATE_MAX, SETTING_NUMBER_MAX, WHOLE_REQUEST_ITEMS_MAX, check_whole_numbers

GRANTS_MAX: Final = 1000
"""Maximum number of names and prefixes in each list of an identity's grants."""

TOKEN_CHARACTERS_MAX: Final = 16_384
"""The server refuses a longer token before decoding it."""
TOKEN_HEADER_CHARACTERS_MAX: Final = 4096
TOKEN_SIGNATURE_CHARACTERS_MAX: Final = 1400
"""Length, in base64url, of a signature made with an 8192-bit RSA key."""
TOKEN_KEYS_MAX: Final = 32
"""Maximum number of token keys across all files. A token without a key id is checked against every key without an
id."""
TOKEN_KEY_FILE_BYTES_MAX: Final = 256 * 1024
TLS_FILE_BYTES_MAX: Final = 1024 * 1024
"""Largest certificate chain or private key."""
TLS_HANDSHAKE_BYTES_MAX: Final = 16 * 1024
"""Maximum size of an incomplete TLS handshake. Browsers send about 2 KiB, and the server requests no client
certificate."""
METRICS_CONNECTIONS_MAX: Final = 64
"""Simultaneous connections of the metrics port. Prometheus and health checks need only a few."""
SECRET_BYTES_MIN: Final = 32
"""Shortest secret for HS256: as long as the hash (RFC 7518, 3.2)."""
RSA_BITS_MIN: Final = 2048
LEEWAY_MS_DEFAULT: Final = 30_000
"""Tolerated difference between the clocks of the issuer and the server."""
LEEWAY_MS_MAX: Final = 300_000
TOKEN_LIFETIME_MS_DEFAULT: Final = 30 * 86_400_000
"""30 days. A single token cannot be revoked, so its lifetime limits how long a stolen one can be used."""
TOKEN_TIME_S_MAX: Final = 253_402_300_799
"""The end of the year 9999. A later time is probably in milliseconds."""

TICKET_CHARACTERS_MAX: Final = 16_384
"""The server refuses a longer ticket before decoding it. A ticket contains an actor and a client id."""
TICKET_KEY_FILE_BYTES_MAX: Final = 4096

API_KEYS_MAX: Final = 10_000
"""Maximum number of keys in one file, including revoked ones."""
API_KEYS_FILE_BYTES_MAX: Final = 64 * 1024 * 1024
API_KEY_SECRET_BYTES: Final = 32
API_KEY_ID_BYTES: Final = 8

CONNECT_BYTES_MAX: Final = 32 * 1024
"""Largest WebSocket frame before authentication."""
LONG_FRAME_BYTES: Final = 64 * 1024
"""Frames and bodies longer than this are decoded in a thread, so that other connections do not wait."""
INSIEME_FRAME_BYTES: Final = 64 * 1024 - len("batch-preview") + 36
"""Largest frame that the npm package `insieme` 2.1.0 sends. It limits a batch to 64 KiB while the message id is
"batch-preview", but sends the batch with a UUID instead."""

SETTINGS_FILE_BYTES_MAX: Final = 1024 * 1024
SCHEMAS_FILE_BYTES_MAX: Final = 16 * 1024 * 1024
COMPACT_DELTAS_MAX: Final = 10_000
"""Maximum number of deltas that one request compacts."""
COMPACT_ROWS_MAX: Final = 50_000
"""Maximum number of rows that one compaction request reads to find deleted ones."""

REQUESTS_BURST_SECONDS: Final = 5
"""An actor may burst this many seconds' worth of `requests_per_second_max`, because clients reconnect and retry
together."""
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
    "request_members_max": WHOLE_REQUEST_ITEMS_MAX - 1,  # the chat itself is one more item
    "new_events_per_second_max": RATE_MAX,
    "user_messages_per_second_max": RATE_MAX,
    "chat_messages_per_second_max": RATE_MAX,
    "user_chats_per_second_max": RATE_MAX,
    "user_chats_burst_max": RATE_MAX,
    "ticket_lifetime_ms": 86_400_000,
}
"""Highest values of the limits whose maximum is not `SETTING_NUMBER_MAX`."""


class ApiLimits(Struct, frozen=True, kw_only=True):
    """Limits of one server's APIs. Work above a limit is answered with an error, never silently dropped."""

    connections_max: int = 10_000
    """Simultaneous connections of all APIs except gRPC."""
    connections_per_address_max: int = 5000
    """Connections from one address, or from one 64-bit network for IPv6. Never more than half of `connections_max`. 0
    switches the limit off."""
    connections_per_principal_max: int = 2500
    """Connections of one principal, gRPC streams included. Never more than half of `connections_max`. 0 switches the
    limit off."""
    unauthenticated_connections_max: int = 1000
    """Unauthenticated connections, TLS handshakes included. Above the limit the server closes the oldest ones. 0
    switches the limit off."""
    grpc_connections_max: int = 1000
    """Connections of the gRPC port, authenticated or not. Never more than `connections_max`.

    gRPC keeps up to 200 KB for an anonymous connection with an unfinished message, and does not report which
    connections are anonymous. This limit therefore also bounds their memory."""
    frame_bytes_max: int = 4 * _MIB
    """Size of one WebSocket frame or one HTTP request body. The npm package `insieme` needs 65,559."""
    request_events_max: int = 1000
    """Events per request, and writes per message of a gRPC stream. Never more than `request_items_max`, and at most
    10,000."""
    events_in_flight_max: int = 10_000
    """Unanswered events or messages of one connection. Further ones are answered as busy. A single request is always
    accepted."""
    page_events_default: int = 500
    """Default page size in events. Never more than `page_events_max`."""
    page_events_max: int = 1000
    """Maximum page size in events, even if the reader requests more."""
    outbox_frames_max: int = 10_000
    """Frames queued for one reader. At half of the limit the server logs a warning; above the limit it closes the
    reader."""
    outbox_bytes_max: int = 8 * _MIB
    """Bytes queued for one reader. At half of the limit the server logs a warning; above the limit it closes the
    reader."""
    entity_value_bytes_max: int = _MIB
    """Size of one ledger entity's value."""
    column_value_bytes_max: int = 256 * 1024
    """Size of one column value in a delta, in canonical JSON."""
    connect_timeout_ms: int = 10_000
    """Time within which a connection must send its first request and a WebSocket must authenticate."""
    heartbeat_ms: int = 30_000
    """Interval of pings on a silent connection."""
    cycle_idle_ms: int = 2000
    """How long an open sync cycle may go without requesting its next page while a reply waits behind it."""
    close_wait_ms: int = 5000
    """How long an error that closes a WebSocket waits for the replies to earlier requests."""
    ticket_lifetime_ms: int = 600_000
    """How long a ticket for a stream is valid, unless its credential expires earlier. A browser can reconnect with it
    until then. At most 86,400,000 (a day)."""
    auth_failures_per_minute_max: int = 60
    """Failed authentications from one address, or from one 64-bit network for IPv6. Further wrong credentials are
    answered as rate limited; valid ones are accepted. 0 switches the limit off."""
    new_events_per_second_max: int = 0
    """New events of one actor across all processes of the log, not counting retries. After a pause the actor may send
    this many at once. At most 1,000,000. 0 switches the limit off."""
    requests_per_second_max: int = 2000
    """HTTP requests, gRPC calls, messages of gRPC streams and WebSocket connections of one actor at this server. 0
    switches the limit off. After a pause an actor can make five times as many at once (`REQUESTS_BURST_SECONDS`).
    """
    frames_per_second_max: int = 5000
    """Frames that one connection may send. 0 switches the limit off."""
    message_bytes_max: int = 4096
    """Size of one chat message's content, in UTF-8."""
    page_messages_default: int = 100
    """Default page size in chat messages. Never more than `page_messages_max`."""
    page_messages_max: int = 500
    """Maximum page size in messages, chats or members, even if the reader requests more."""
    request_members_max: int = 500
    """Members that one request may add to a chat. Always below `request_items_max` and below 10,000."""
    user_messages_per_second_max: int = 0
    """New messages of one user in one chat across all processes of the log, not counting retries. After a pause the
    user may send this many at once. At most 1,000,000. 0 switches the limit off."""
    chat_messages_per_second_max: int = 0
    """New messages of all users in one chat across all processes of the log, not counting retries. After a pause the
    users may send this many at once. At most 1,000,000. 0 switches the limit off."""
    user_chats_per_second_max: int = 1
    """New chats of one user in the long run, across all processes of the log, not counting retries. At most 1,000,000.
    0 switches the limit off."""
    user_chats_burst_max: int = 1000
    """New chats that one user may create in one burst after a pause. At most 1,000,000."""
    live_chats_max: int = 10_000
    """Chats that the server keeps in memory for one connected user. Messages of other chats are delivered by
    look-ups."""
    delivery_ms: int = 50
    """How long the server collects acknowledgements before it sends them to the members of their chat."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            highest = _HIGHEST.get(name, SETTING_NUMBER_MAX)
            check_whole_numbers(self, [name], highest=highest, may_be_zero=_OPTIONAL_LIMITS)
