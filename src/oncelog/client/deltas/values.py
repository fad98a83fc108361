"""What a client of rows gives its application: rows, changes, refusals, and how it stands."""

from collections.abc import Mapping
from enum import Enum
from typing import Final

from msgspec import Struct

from oncelog.client.runtime.values import MIB, BaseStatus, ConnectionLimits, check_at_most
from oncelog.core.canonical import JsonValue, parse
from oncelog.core.deltas import PUSH_DELTAS_MAX
from oncelog.errors import ClientError


class Deletion(Enum):
    """What the function of `edit` returns to delete the row."""

    DELETE = "delete"


DELETE: Final = Deletion.DELETE


class LocalRow(Struct, frozen=True):
    """A row that exists."""

    row_id: str
    columns: dict[str, JsonValue]


class Change(Struct, frozen=True):
    """What happened to a row, by one edit or by one page from the gateway."""

    table: str
    row_id: str
    before_forms: Mapping[str, bytes] | None
    """In canonical JSON; None for a row that did not exist."""
    after_forms: Mapping[str, bytes] | None
    is_local: bool
    """Made here; else by what came from the gateway."""

    @property
    def before(self) -> dict[str, JsonValue] | None:
        """The columns before; None for a row that did not exist."""
        return parse_columns(self.before_forms)

    @property
    def after(self) -> dict[str, JsonValue] | None:
        """The columns after; None for a row that exists no more."""
        return parse_columns(self.after_forms)

    @property
    def bytes(self) -> int:
        """Of all values in it."""
        forms = (self.before_forms or {}, self.after_forms or {})
        return sum(len(name) + len(form) for values in forms for name, form in values.items())


def parse_columns(forms: Mapping[str, bytes] | None) -> dict[str, JsonValue] | None:
    """Columns as values."""
    return None if forms is None else {name: parse(form) for name, form in forms.items()}


class PendingDelta(Struct, frozen=True):
    """A delta that no gateway has acknowledged."""

    delta_id: str
    body: bytes
    """As it goes over the wire, in canonical JSON."""


class Refusal(Struct, frozen=True):
    """A delta that the gateway does not take. It and all behind it wait, for `discard` or for another answer."""

    delta_id: str
    table: str
    row_id: str
    code: str
    message: str


class DeltaRefusedError(ClientError):
    """The gateway does not take a delta, and what is behind it waits. `discard` lets go of it."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(
            f"{refusal.code}: {refusal.message} (delta {refusal.delta_id} of {refusal.table} {refusal.row_id!r})"
        )
        self.refusal = refusal


class HistoryChange(Struct, frozen=True):
    """The gateway's history was another one than this client had followed: a backup was restored, or the log was cut.

    The rows are the gateway's again, with what waits in the outbox over them; what the gateway has lost is lost here.
    """

    known_epoch: str
    epoch: str
    known_cursor: int
    cursor: int


class Status(BaseStatus, frozen=True, kw_only=True):
    """For a user interface."""

    pending_bytes: int = 0
    cursor: int = 0
    """Everything up to this number of the gateway's has arrived."""
    epoch: str = ""
    """Of the gateway's history; empty before the first answer."""
    refusal: Refusal | None = None
    """The delta that holds back those behind it."""
    clock_wait_ms: int = 0
    """Not 0 while the gateway says that our clock is ahead of its own: so long it told us to wait."""
    is_resetting: bool = False
    """The rows are to be replaced by the gateway's."""
    history_change: HistoryChange | None = None
    """The last one since the client was opened."""


class DeltasLimits(ConnectionLimits, frozen=True, kw_only=True):
    """What a client holds at most, and how long it waits."""

    outbox_deltas_max: int = 100_000
    """Deltas without an acknowledgement. Beyond it an edit raises LimitExceededError, and nothing is changed."""
    outbox_bytes_max: int = 256 * MIB
    """Of all of them together."""
    value_bytes_max: int = 256 * 1024
    """Of the value of one column in JSON. A gateway's own limit is the same unless it was told otherwise."""
    delta_bytes_max: int = 3 * MIB
    """Of one delta in JSON. A gateway takes requests of 4 MiB unless it was told otherwise."""
    push_deltas_max: int = PUSH_DELTAS_MAX
    """Deltas of one push. More than 10,000 no gateway takes."""
    push_bytes_max: int = 3_500_000
    """Of one push; a delta that is larger goes alone."""
    page_deltas: int = 500
    """Deltas that are asked for at a time."""
    page_rows: int = 500
    """Rows of a snapshot that are asked for at a time."""
    changes_max: int = 10_000
    """Changes that wait for one reader of `changes`. Beyond it the reader gets UpdatesLostError."""
    changes_bytes_max: int = 64 * MIB
    """Of the values in them."""
    answer_timeout_ms: int = 60_000
    """A request without an answer for so long is given up, and made again."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_most(self, "push_deltas_max", PUSH_DELTAS_MAX)
