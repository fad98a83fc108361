"""What a client of rows gives its application: rows, changes, refusals, and how it stands."""

from collections.abc import Mapping
from enum import Enum
from typing import Final

from msgspec import Struct

from oncelog.client.runtime.values import BaseStatus
from oncelog.core.canonical import JsonValue, parse


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
