"""Types of the deltas client's public API: rows, changes, refusals, status and limits."""

from collections.abc import Mapping
from enum import Enum
from typing import ClassVar, Final

from msgspec import Struct

from oncelog.client.runtime.values import MIB, BaseStatus, ConnectionLimits
from oncelog.core.canonical import JsonValue, parse
from oncelog.core.deltas import PUSH_DELTAS_MAX
from oncelog.errors import ClientError


class Deletion(Enum):
    """Result of the function of `edit` that deletes the row."""

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
    """Columns in canonical JSON; None if the row did not exist."""
    after_forms: Mapping[str, bytes] | None
    is_local: bool
    """Whether an edit of this client made the change."""

    @property
    def before(self) -> dict[str, JsonValue] | None:
        """The columns before the change; None if the row did not exist."""
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
    """Decode columns."""
    return None if forms is None else {name: parse(form) for name, form in forms.items()}


class PendingDelta(Struct, frozen=True):
    """A delta that the gateway has not acknowledged."""

    delta_id: str
    body: bytes
    """The delta as it is sent, in canonical JSON."""


class Refusal(Struct, frozen=True):
    """A delta that the gateway refuses.

    It blocks the deltas behind it until `withdraw`, or until the gateway accepts it.
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


class HistoryChange(Struct, frozen=True):
    """The gateway has another history than this client had followed, because a backup was restored or the log was cut.

    The local rows are those of the gateway, with the outbox applied to them. Changes that the gateway has lost are lost
    here too.
    """

    known_epoch: str
    epoch: str
    known_cursor: int
    cursor: int


class Status(BaseStatus, frozen=True, kw_only=True):
    """Status of the client, for a user interface."""

    pending_bytes: int = 0
    cursor: int = 0
    """Sequence of the gateway up to which everything has arrived."""
    epoch: str = ""
    """Epoch of the gateway's history; empty before the first answer."""
    refusal: Refusal | None = None
    """The delta that blocks the deltas behind it."""
    clock_wait_ms: int = 0
    """Pause that the gateway has asked for because the clock of this client is ahead; 0 without one."""
    is_resetting: bool = False
    """Whether the rows of the gateway are going to replace all local rows."""
    history_change: HistoryChange | None = None
    """The last change of the history since the client was opened."""


class DeltasLimits(ConnectionLimits, frozen=True, kw_only=True):
    """Limits and timeouts of a deltas client. Every field can be set."""

    _server_maximums: ClassVar = {"push_deltas_max": PUSH_DELTAS_MAX}

    outbox_deltas_max: int = 100_000
    """Deltas without an acknowledgement. Beyond it an edit raises LimitExceededError and changes nothing."""
    outbox_bytes_max: int = 256 * MIB
    """Total size of the outbox."""
    value_bytes_max: int = 256 * 1024
    """Size of the value of a column in JSON. It is also the default of servers."""
    delta_bytes_max: int = 3 * MIB
    """Size of a delta in JSON. Servers accept requests of 4 MiB by default."""
    push_deltas_max: int = PUSH_DELTAS_MAX
    """Deltas of a push. Servers accept at most 10,000."""
    push_bytes_max: int = 3_500_000
    """Size of a push. A larger delta is pushed alone."""
    page_deltas: int = 500
    """Deltas to request at a time."""
    page_rows: int = 500
    """Rows of a snapshot to request at a time."""
    changes_max: int = 10_000
    """Changes in the queue of one reader of `changes`. Beyond it the reader gets UpdatesLostError."""
    changes_bytes_max: int = 64 * MIB
    """Size of the values in these changes."""
    answer_timeout_ms: int = 60_000
    """Time without an answer after which a request is made again."""
