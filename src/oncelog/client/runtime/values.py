"""Values that all clients share: limits, writes in an outbox, and the status of a client."""

from collections.abc import Hashable, Mapping
from enum import Enum
from typing import Annotated, ClassVar, Final, Generic, NamedTuple, TypeVar

from msgspec import Meta, Struct

from oncelog.core.limits import check_whole_numbers
from oncelog.errors import SettingsError

LIMIT_MAX: Final = 2**40
MIB: Final = 2**20
Number = Annotated[int, Meta(ge=0, le=2**53 - 1)]
"""A number of a server: committed ids, sequences and times."""

# --- limits


class BaseLimits(Struct, frozen=True, kw_only=True):
    """Timeouts and pauses of a client, and the largest message that it accepts."""

    _server_maximums: ClassVar[Mapping[str, int]] = {}
    """Names of limits that servers restrict, and the largest values that they allow."""

    message_bytes_max: int = 64 * MIB
    """Largest answer or message of the server."""
    answer_timeout_ms: int = 30_000
    """After this time without an awaited answer the client ends the connection or the request, and tries again."""
    heartbeat_ms: int = 20_000
    """Interval of pings over a connection that carries no messages."""
    pause_ms_min: int = 200
    """Pause before the second attempt. Each further pause is twice as long."""
    pause_ms_max: int = 30_000
    refused_pause_ms_min: int = 5000
    """Like `pause_ms_min`, after the server has denied access or refused for a reason that a person has to remove."""
    refused_pause_ms_max: int = 300_000
    retry_after_ms_max: int = 300_000
    """Longest pause that the client grants to a server that asks for one."""

    def __post_init__(self) -> None:
        check_whole_numbers(self, self.__struct_fields__, highest=LIMIT_MAX)
        for shorter, longer in (("pause_ms_min", "pause_ms_max"), ("refused_pause_ms_min", "refused_pause_ms_max")):
            if getattr(self, shorter) > getattr(self, longer):
                raise SettingsError(f"{shorter} must not be more than {longer}")
        for name, maximum in self._server_maximums.items():
            if getattr(self, name) > maximum:
                raise SettingsError(f"{name} must be at most {maximum}, not {getattr(self, name)}")


class ConnectionLimits(BaseLimits, frozen=True, kw_only=True):
    """Limits of clients that connect over HTTP and WebSockets."""

    connect_timeout_ms: int = 10_000


# --- writes in an outbox


class BaseEntry(Struct, frozen=True, gc=False):
    """A write in the outbox."""

    number: int
    """Place in the outbox: writes are sent in this order. 0 before the write has a place."""

    def __str__(self) -> str:
        """Name of the write in errors and logs."""
        raise NotImplementedError

    @property
    def identity(self) -> Hashable:
        """Equal for two submissions of one write."""
        raise NotImplementedError

    @property
    def equality_key(self) -> Hashable:
        """What two submissions of one write must have in common."""
        raise NotImplementedError

    @property
    def size(self) -> int:
        """Bytes that count against the limit of the outbox; 0 without a limit."""
        return 0


Entry = TypeVar("Entry", bound=BaseEntry)
OutcomeType = TypeVar("OutcomeType")


class Settled(NamedTuple, Generic[Entry, OutcomeType]):
    """A write and its outcome."""

    entry: Entry
    outcome: OutcomeType


# --- status


class ConnectionState(Enum):
    """How a client stands to its server."""

    OFFLINE = "offline"
    """Not connected. The client accepts and stores writes, and tries to connect again."""
    CONNECTING = "connecting"
    CATCHING_UP = "catching_up"
    """Connected, and reading what other clients have written."""
    LIVE = "live"
    """Everything on the server has arrived. New writes of others arrive as the server commits them."""
    REFUSED = "refused"
    """The server denies access because of a token, a grant or an address. The client tries again, more slowly."""
    HISTORY_CHANGED = "history_changed"
    """The server has another history, for example after a restore. The client waits for `start_over`."""
    CLOSED = "closed"
    NOT_LET_IN = "refused"  # noqa: PIE796 - deprecated name of REFUSED
    """Deprecated: use REFUSED."""


class BaseStatus(Struct, frozen=True, kw_only=True):
    """Status of a client for a user interface: the fields that all clients have."""

    state: ConnectionState
    pending: int = 0
    """Writes without an outcome."""
    refused: int = 0
    """Refused writes that the application has not seen to. A ledger client has none: each caller gets its outcome."""
    last_error: str | None = None
    """Why the client is not connected, or why writes wait. None without a problem."""

    @property
    def is_connected(self) -> bool:
        """Whether the client is connected to the server."""
        return self.state in (ConnectionState.CATCHING_UP, ConnectionState.LIVE)
