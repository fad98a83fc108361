"""How a client stands, in the same words for all clients."""

from enum import Enum

from msgspec import Struct


class ConnectionState(Enum):
    """How a client stands to its server."""

    OFFLINE = "offline"
    """Not connected; it tries again by itself. Writes are taken, and kept."""
    CONNECTING = "connecting"
    CATCHING_UP = "catching_up"
    """Connected; what others have written is on its way."""
    LIVE = "live"
    """Everything there is has arrived, and what comes arrives as it is committed."""
    REFUSED = "refused"
    """The server does not let it in: a token, a grant or an address is not right. It tries again, more slowly."""
    HISTORY_CHANGED = "history_changed"
    """The server's log is another one than before (a restored backup). It waits for `start_over`."""
    CLOSED = "closed"
    NOT_LET_IN = "refused"  # noqa: PIE796 - deprecated name of REFUSED
    """Deprecated: use REFUSED."""


class BaseStatus(Struct, frozen=True, kw_only=True):
    """For a user interface: what the status of every client has."""

    state: ConnectionState
    pending: int = 0
    """Writes without an outcome."""
    refused: int = 0
    """Refused writes that the application has not seen to. A ledger keeps none: it gives each outcome to the caller."""
    last_error: str | None = None
    """Why something is not as it should be, or why writes wait; None while all is well."""

    @property
    def is_connected(self) -> bool:
        """Whether the server is there."""
        return self.state in (ConnectionState.CATCHING_UP, ConnectionState.LIVE)
