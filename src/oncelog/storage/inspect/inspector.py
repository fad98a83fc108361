"""Read access to a log for commands: a view of one read transaction, the same for all databases."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol, TypeVar

from msgspec import Struct

from oncelog.core.values import KeyIdentity
from oncelog.storage.clock import ClockMark
from oncelog.storage.metadata import EpochRenewal, LogMetadata, Operator
from oncelog.storage.queries.statement import SharedQuery
from oncelog.storage.store import KeyStatus

T = TypeVar("T")
RowTuple = tuple[Any, ...]
SCAN_PAGE_RECORDS: Final = 50_000
"""How many records a statement of `LogView.scan_records` reads. Progress is reported after each statement."""


class ClockStatus(Struct, frozen=True):
    """The clock that determines log time, and its readings at commits."""

    now: ClockMark
    """Current reading."""
    name: str
    """Name of the clock, for messages."""
    mark: ClockMark
    """Reading at a commit that this machine has seen."""
    newest_ms: int
    """Time of the newest commit, or 0 before the first one."""
    blind_reason: str
    """Why a jump would not be detected if the mark is from an earlier boot of this machine."""


class LogView(ABC):
    """A log in one read transaction.

    Methods yield rows one by one, because tables may exceed memory. Both databases have statements with the same names.
    """

    metadata: LogMetadata
    directory: str | None = None
    """Directory of a log in a file."""

    @abstractmethod
    def run_query(self, query: SharedQuery[T], *arguments: Any) -> T:
        """Return the result of a shared query."""

    @abstractmethod
    def iterate_rows(self, statement: str, *parameters: Any) -> Iterator[RowTuple]:
        """Yield the rows of a statement."""

    def fetch_first(self, statement: str, *parameters: Any) -> RowTuple | None:
        """Return the first row of a statement, or None if it has no rows or the database has no such statement."""
        return next(self.iterate_rows(statement, *parameters), None)

    @abstractmethod
    def get_key_status(self, identity: KeyIdentity) -> KeyStatus:
        """Like `Store.get_key_status`, but without the time."""

    @abstractmethod
    def find_stored_keys(self, identities: Sequence[KeyIdentity]) -> list[KeyIdentity]:
        """Return the identities that have a record according to the key index."""

    def estimate_records(self) -> int:
        """Estimate the number of records. Returns 0 if the database has no estimate."""
        [(estimate,)] = self.iterate_rows("record_estimate")
        return int(estimate)

    @abstractmethod
    def scan_records(self, keys: Sequence[bytes]) -> Iterator[tuple[int, list[KeyIdentity]]]:
        """Read all records.

        For each page, yield the number of records, and the identities of those with one of the keys.
        """

    @abstractmethod
    def get_clock_status(self) -> ClockStatus:
        """Return the log's clock, and the readings that the log has saved."""

    @abstractmethod
    def get_sizes(self) -> dict[str, Any]:
        """Return the figures for `oncelog stats` that only this database has."""


class Inspector(Protocol):
    """Access to an existing log for commands. No method creates or migrates a log.

    Every method may raise NotALogError, NewerSchemaError, CorruptError or StoreUnavailableError.
    """

    def open_view(self) -> AbstractContextManager[LogView]:
        """Open a view for the duration of the block."""

    def confirm_clock(self) -> None:
        """Accept the clock's current time."""

    def renew_epoch(self, above: int | None = None, operator: Operator = Operator()) -> EpochRenewal:
        """Start a new history with a new epoch. Its numbers continue above those of the lost history (CO-12).

        Raises SettingsError if `above` is below a number that the log has assigned.
        """
