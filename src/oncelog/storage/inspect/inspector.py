"""What the commands that inspect a log need of it, for both databases."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol, TypeVar

from msgspec import Struct

from oncelog.core.proof import Block
from oncelog.core.tenants import Tenant, Usage
from oncelog.core.values import KeyIdentity, LaneHead, Record
from oncelog.storage.clock import Clock, ClockMark
from oncelog.storage.leaps import NO_OPERATOR, EpochRenewal, LaneGaps, Operator
from oncelog.storage.metadata import LogMetadata
from oncelog.storage.queries import records
from oncelog.storage.queries.statement import SharedQuery
from oncelog.storage.queries.tenants import load_usage
from oncelog.storage.store import Consumer, Evidence, KeyStatus
from oncelog.storage.verify.findings import DEFAULT_OPTIONS, ExportedHead, Finding, VerifyOptions

T = TypeVar("T")
SCAN_PAGE_RECORDS: Final = 50_000
"""Records that a statement of `LogView.scan_records` reads; progress is reported after each."""


class ClockStatus(Struct, frozen=True):
    """The clock that a log's time comes from, and what is known of it."""

    clock: Clock
    name: str
    """What people call it."""
    mark: ClockMark
    """What it showed at a commit, as far as this machine can tell."""
    newest_ms: int
    """The time of the newest commit; 0 if there is none."""
    blind_reason: str
    """Why a jump could not be seen, where the mark is not of this start of this machine."""


class LogView(ABC):
    """A log in one read transaction."""

    metadata: LogMetadata

    @abstractmethod
    def run_query(self, query: SharedQuery[T], *arguments: Any) -> T:
        """Return the result of a shared query."""

    @abstractmethod
    def iterate_rows(self, statement: str, *parameters: Any) -> Iterator[tuple[Any, ...]]:
        """Yield the rows of a statement of `queries.sql`."""

    @abstractmethod
    def get_key_status(self, identity: KeyIdentity) -> KeyStatus:
        """As `Store.get_key_status`, but for the time."""

    @abstractmethod
    def find_stored_keys(self, identities: Sequence[KeyIdentity]) -> list[KeyIdentity]:
        """Those of the identities that have a record, by the key index."""

    @abstractmethod
    def estimate_records(self) -> int:
        """Estimate the number of records; 0 if the database has no estimate."""

    @abstractmethod
    def scan_records(self, keys: Sequence[bytes]) -> Iterator[tuple[int, list[KeyIdentity]]]:
        """Read all records. For each page yield the number of records, and the identities of records with the keys."""

    @abstractmethod
    def get_clock_status(self) -> ClockStatus:
        """What is known of the clock."""

    @abstractmethod
    def get_sizes(self) -> dict[str, Any]:
        """What only this database has to say of itself, for `oncelog stats`."""

    def load_heads(self) -> Mapping[int, LaneHead]:
        """Of the lanes that have been written to."""
        return self.run_query(records.load_heads)

    def load_gaps(self) -> Mapping[int, LaneGaps]:
        """What leaps have passed over in these lanes."""
        return self.run_query(records.load_gaps)

    def list_internal_records(self, after: Mapping[int, int], limit: int) -> list[Record]:
        """As `Store.internal_records`."""
        return self.run_query(records.list_internal_records, after, limit)

    def count_audit_records(self) -> int:
        """Count the audit records."""
        return self.run_query(records.count_audit_records)

    def list_policies(self) -> list[tuple[str, str]]:
        """Names and declarations."""
        return [(name, declaration) for name, declaration in self.iterate_rows("policies")]

    def list_consumers(self) -> list[Consumer]:
        """All of them, with how far each is behind."""
        return self.run_query(records.list_consumers)

    def list_usage(self) -> list[tuple[Tenant, Usage]]:
        """The tenants with their quotas, and what each has."""
        return self.run_query(load_usage)

    def count_erasures(self) -> int:
        """How many there have been."""
        return self.run_query(records.count_erasures)

    def iterate_streams(self) -> Iterator[str]:
        """The scopes of all streams."""
        return (scope for (scope,) in self.iterate_rows("scopes"))

    def iterate_clients(self) -> Iterator[tuple[str, str, str]]:
        """Policy, scope and name of the clients whose sequences are remembered."""
        return ((policy, scope, client) for policy, scope, client in self.iterate_rows("client_names"))

    def find_leases(self, key: bytes, limit: int) -> list[KeyIdentity]:
        """The identities under which a key has a lease."""
        rows = self.iterate_rows("leases_of_key", key.hex(), limit)
        return [(policy, scope, client, key) for policy, scope, client in rows]

    def find_record(self, lane: int, position: int) -> Record | None:
        """What stands at a place."""
        return self.run_query(records.find_record, lane, position)

    def find_block(self, lane: int, height: int) -> Block | None:
        """The block of a height."""
        return self.run_query(records.find_block, lane, height)

    def load_block(self, lane: int, height: int) -> tuple[Block, list[Evidence]]:
        """As `Store.block`."""
        return self.run_query(records.load_block, lane, height)


def select_stored_keys(identities: Iterable[KeyIdentity], rows: Iterable[Sequence[Any]]) -> list[KeyIdentity]:
    """Return the identities that a row has. The client is part of one only where clients number their writes."""
    stored = {(policy, scope, client if number else "", key) for *_, number, policy, scope, client, key, _, _ in rows}
    return [identity for identity in identities if identity in stored]


class Inspector(Protocol):
    """Looks at a log that is there. None of it makes a log or migrates one.

    Every method raises NotALogError, NewerSchemaError, CorruptError or StoreUnavailableError.
    """

    def open_view(self) -> AbstractContextManager[LogView]:
        """A view, which ends with the block."""

    def verify(self, head: ExportedHead | None = None, options: VerifyOptions = DEFAULT_OPTIONS) -> Iterator[Finding]:
        """Goes through a log. The last finding is a Lie, the first one found, or Passed; before it comes Progress."""

    def confirm_clock(self) -> None:
        """Believes the clock."""

    def renew_epoch(self, above: int | None = None, operator: Operator = NO_OPERATOR) -> EpochRenewal:
        """Start a new history: another epoch, and numbers that continue above those of the lost one (CO-12).

        Raises SettingsError for an `above` that is below a number of the log.
        """
