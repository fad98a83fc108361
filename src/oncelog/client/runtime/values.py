"""Values that all clients share: limits, outbox writes and the client status."""

from collections.abc import Hashable, Mapping
from enum import Enum
from typing import Annotated, ClassVar, Final, Generic, Literal, NamedTuple, NoReturn, Self, TypeVar

from msgspec import Meta, Struct

from oncelog.core.limits import check_whole_numbers
from oncelog.errors import ServerRefusedError, SettingsError

LIMIT_MAX: Final = 2**40
MIB: Final = 2**20
Number = Annotated[int, Meta(ge=0, le=2**53 - 1)]
"""A number that the server assigns: a committed id, a sequence or a time."""

# --- limits


class BaseLimits(Struct, frozen=True, kw_only=True):
    """Timeouts and pauses of a client, and the largest message that it accepts."""

    _server_maximums: ClassVar[Mapping[str, int]] = {}
    """Limits that servers restrict, with the largest value that a server accepts."""

    message_bytes_max: int = 64 * MIB
    """Largest answer or message that the client accepts from the server."""
    answer_timeout_ms: int = 30_000
    """If an awaited answer takes longer than this, the client drops the connection or request and retries."""
    heartbeat_ms: int = 20_000
    """Ping interval on an idle connection."""
    pause_ms_min: int = 200
    """Pause before the second attempt. Each later pause is twice as long as the one before."""
    pause_ms_max: int = 30_000
    refused_pause_ms_min: int = 5000
    """Like `pause_ms_min`, but after the server has denied access or refused for a reason that a person must fix."""
    refused_pause_ms_max: int = 300_000
    retry_after_ms_max: int = 300_000
    """Longest server-requested pause that the client honours."""

    def __post_init__(self) -> None:
        check_whole_numbers(self, self.__struct_fields__, highest=LIMIT_MAX)
        for shorter, longer in (("pause_ms_min", "pause_ms_max"), ("refused_pause_ms_min", "refused_pause_ms_max")):
            if getattr(self, shorter) > getattr(self, longer):
                raise SettingsError(f"{shorter} must not be more than {longer}")
        for name, maximum in self._server_maximums.items():
            if getattr(self, name) > maximum:
                raise SettingsError(f"{name} must be at most {maximum}, not {getattr(self, name)}")


class ConnectionLimits(BaseLimits, frozen=True, kw_only=True):
    """Limits for clients that connect over HTTP and WebSockets."""

    connect_timeout_ms: int = 10_000


# --- writes in an outbox


class BaseEntry(Struct, frozen=True, gc=False):
    """A write in the outbox."""

    number: int
    """Position in the outbox, which is also the sending order. 0 until the outbox assigns one."""

    def __str__(self) -> str:
        """Return how errors and logs refer to the write."""
        raise NotImplementedError

    @property
    def identity(self) -> Hashable:
        """Id of the write: equal for every submission of the same write."""
        raise NotImplementedError

    @property
    def equality_key(self) -> Hashable:
        """Content that must be equal in every submission of the same write."""
        raise NotImplementedError

    @property
    def size(self) -> int:
        """Bytes that count against the size limit of the outbox, or 0 if the outbox has none."""
        return 0


Entry = TypeVar("Entry", bound=BaseEntry)
OutcomeType = TypeVar("OutcomeType")


class Settled(NamedTuple, Generic[Entry, OutcomeType]):
    """A write and its outcome."""

    entry: Entry
    outcome: OutcomeType


# --- outcomes


class BaseCommitted(Struct, frozen=True):
    """Outcome of a write that the server has. Like the verdicts of a log, it has `ok` and `unwrap`."""

    ok: ClassVar[Literal[True]] = True
    """Whether the server has the write."""

    def unwrap(self) -> Self:
        """Return this outcome."""
        return self


class BaseRefused(Struct, frozen=True):
    """Outcome of a refused write."""

    ok: ClassVar[Literal[False]] = False
    """Whether the server has the write."""

    def unwrap(self) -> NoReturn:
        """Raise the refusal as a ServerRefusedError, whose `code` is the reason."""
        raise ServerRefusedError(*self._get_code_and_message())

    def _get_code_and_message(self) -> tuple[str, str]:
        raise NotImplementedError


# --- status


class ConnectionState(Enum):
    """State of a client's connection to its server."""

    OFFLINE = "offline"
    """Not connected. The client accepts and stores writes, and keeps trying to reconnect."""
    CONNECTING = "connecting"
    CATCHING_UP = "catching_up"
    """Connected, and reading what other clients have written."""
    LIVE = "live"
    """The client has received everything on the server. New writes by others arrive as the server commits them."""
    REFUSED = "refused"
    """The server denies access because of a token, a grant or an address. The client retries, with longer pauses."""
    HISTORY_CHANGED = "history_changed"
    """The server has a different history, for example after a restore. The client waits for `start_over`."""
    CLOSED = "closed"
    NOT_LET_IN = "refused"  # noqa: PIE796 - deprecated name of REFUSED
    """Deprecated: use REFUSED."""


class BaseHistoryChange(Struct, frozen=True):
    """The server has a different history: its epoch is `epoch`, and the client followed `known_epoch`."""

    known_epoch: str
    epoch: str


class BaseStatus(Struct, frozen=True, kw_only=True):
    """Client status for a user interface: the fields that all clients share."""

    state: ConnectionState
    pending: int = 0
    """Writes without an outcome."""
    refused: int = 0
    """Refused writes that the application has not handled. 0 for a ledger client: each caller gets its outcome."""
    last_error: str | None = None
    """Why the client is not connected, or why writes wait. None if all is well."""

    @property
    def is_connected(self) -> bool:
        """Whether the client is connected to the server."""
        return self.state in (ConnectionState.CATCHING_UP, ConnectionState.LIVE)
