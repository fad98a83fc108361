"""Types of the deltas client's public API: rows, changes, refusals, status and limits."""

from collections.abc import Mapping
from enum import Enum
from typing import ClassVar, Final

from msgspec import Struct

from oncelog.client.runtime.values import MIB, BaseHistoryChange, BaseStatus, ConnectionLimits
from oncelog.core.canonical import JsonValue, parse
from oncelog.core.deltas import PUSH_DELTAS_MAX
from oncelog.errors import ClientError


class Deletion(Enum):
    """Returned by a function passed to `edit` to delete the row."""

    DELETE = "delete"


DELETE: Final = Deletion.DELETE


class LocalRow(Struct, frozen=True):
    """A row that exists."""

    row_id: str
    columns: dict[str, JsonValue]


class Change(Struct, frozen=True):
    """The effect of one edit, or of one page from the gateway, on a row."""

    table: str
    row_id: str
    before_forms: Mapping[str, bytes] | None
    """Columns in canonical JSON, or None if the row did not exist."""
    after_forms: Mapping[str, bytes] | None
    is_local: bool
    """Whether an edit of this client made the change."""

    @property
    def before(self) -> dict[str, JsonValue] | None:
        """The columns before the change, or None if the row did not exist."""
        return parse_columns(self.before_forms)

    @property
    def after(self) -> dict[str, JsonValue] | None:
        """The columns after the change, or None if the row no longer exists."""
        return parse_columns(self.after_forms)

    @property
    def bytes(self) -> int:
        """Size of the values in the change."""
        forms = (self.before_forms or {}, self.after_forms or {})
        return sum(len(name) + len(form) for values in forms for name, form in values.items())


def parse_columns(forms: Mapping[str, bytes] | None) -> dict[str, JsonValue] | None:
    """Decode columns in canonical JSON. None means that the row does not exist."""
    return None if forms is None else {name: parse(form) for name, form in forms.items()}


class PendingDelta(Struct, frozen=True):
    """A delta that the gateway has not acknowledged."""

    delta_id: str
    body: bytes
    """The delta as sent, in canonical JSON."""


class Refusal(Struct, frozen=True):
    """A delta that the gateway refuses.

    It blocks the deltas behind it until the application withdraws it or the gateway accepts it.
    """

    delta_id: str
    table: str
    row_id: str
    code: str
    message: str


class DeltaRefusedError(ClientError):
    """The gateway refuses a delta, which blocks the deltas behind it. `withdraw` removes it from the outbox."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(
            f"{refusal.code}: {refusal.message} (delta {refusal.delta_id} of {refusal.table} {refusal.row_id!r})"
        )
        self.refusal = refusal


class HistoryChange(BaseHistoryChange, frozen=True):
    """The gateway's history differs from the one that the client followed, after a restore or a truncation of the log.

    The gateway's rows, with the outbox applied to them, have replaced the local rows. Changes that the gateway has lost
    are lost here too.
    """

    known_cursor: int
    cursor: int


class Status(BaseStatus, frozen=True, kw_only=True):
    """Status of a deltas client for a user interface."""

    pending_bytes: int = 0
    cursor: int = 0
    """All deltas up to this sequence of the gateway have arrived."""
    epoch: str = ""
    """Epoch of the gateway's history. Empty before the first answer."""
    refusal: Refusal | None = None
    """The refused delta that blocks the deltas behind it, or None."""
    clock_wait_ms: int = 0
    """Pause that the gateway requested because this client's clock is ahead, or 0."""
    is_resetting: bool = False
    """Whether the client is about to replace all local rows with the gateway's rows."""
    history_change: HistoryChange | None = None
    """Most recent history change since the client was opened."""


class DeltasLimits(ConnectionLimits, frozen=True, kw_only=True):
    """Limits and timeouts of a deltas client."""

    _server_maximums: ClassVar = {"push_deltas_max": PUSH_DELTAS_MAX}

    outbox_deltas_max: int = 100_000
    """Deltas without an acknowledgement. Beyond this, an edit raises LimitExceededError and changes nothing."""
    outbox_bytes_max: int = 256 * MIB
    """Total size of the outbox."""
    value_bytes_max: int = 256 * 1024
    """Size of a column's value in JSON. The server's default limit is the same."""
    delta_bytes_max: int = 3 * MIB
    """Size of a delta in JSON. By default, servers accept requests of up to 4 MiB."""
    push_deltas_max: int = PUSH_DELTAS_MAX
    """Deltas per push. Servers accept at most 10,000."""
    push_bytes_max: int = 3_500_000
    """Size of a push. A larger delta is pushed alone."""
    page_deltas: int = 500
    """Deltas per page of a pull."""
    page_rows: int = 500
    """Rows per page of a snapshot."""
    changes_max: int = 10_000
    """Changes queued for one reader of `changes`. Beyond this, the reader gets UpdatesLostError."""
    changes_bytes_max: int = 64 * MIB
    """Total size of the values in the queued changes."""
    answer_timeout_ms: int = 60_000
    """If the gateway does not answer a request within this time, the client retries it."""
