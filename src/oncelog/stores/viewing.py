"""What the commands that look at a log need of it, whatever database it lies in."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol

from msgspec import Struct

from oncelog.core.proof import Block
from oncelog.core.tenants import Tenant, Usage
from oncelog.core.values import KeyIdentity, LaneHead, Record
from oncelog.stores.about import About
from oncelog.stores.clock import Clock, ClockMark
from oncelog.stores.leaps import NO_OPERATOR, LaneGaps, Operator, Renewed
from oncelog.stores.protocol import Consumer, Standing
from oncelog.stores.verifying.findings import DEFAULT_OPTIONS, ExportedHead, Finding, Options

SCAN_PAGE_RECORDS: Final = 50_000
"""Records that a statement of `View.scan` reads; progress is reported after each."""


class TimeSeen(Struct, frozen=True):
    """The clock that a log's time comes from, and what is known of it."""

    clock: Clock
    name: str
    """What people call it."""
    mark: ClockMark
    """What it showed at a commit, as far as this machine can tell."""
    newest_ms: int
    """The time of the newest commit; 0 if there is none."""
    blindness: str
    """Why a jump could not be seen, where the mark is not of this start of this machine."""


class View(Protocol):
    """A log in one read transaction."""

    about: About

    def heads(self) -> Mapping[int, LaneHead]:
        """Of the lanes that have been written to."""

    def gaps(self) -> Mapping[int, LaneGaps]:
        """What leaps have passed over in these lanes."""

    def internal_records(self, after: Mapping[int, int], limit: int) -> list[Record]:
        """As `Store.internal_records`."""

    def count_audit(self) -> int:
        """Count the audit records."""

    def policies(self) -> list[tuple[str, str]]:
        """Names and declarations."""

    def consumers(self) -> list[Consumer]:
        """All of them, with how far each is behind."""

    def usage(self) -> list[tuple[Tenant, Usage]]:
        """The tenants with their quotas, and what each has."""

    def erasures(self) -> int:
        """How many there have been."""

    def standing(self, identity: KeyIdentity) -> Standing:
        """As `Store.standing`, but for the time."""

    def known(self, identities: Sequence[KeyIdentity]) -> list[KeyIdentity]:
        """Those of the identities that have a record, by the key index."""

    def streams(self) -> Iterator[str]:
        """The scopes of all streams."""

    def clients(self) -> Iterator[tuple[str, str, str]]:
        """Policy, scope and name of the clients whose sequences are remembered."""

    def leased(self, key: bytes, limit: int) -> list[KeyIdentity]:
        """The identities under which a key has a lease."""

    def record_estimate(self) -> int:
        """Estimate the number of records; 0 if the database has no estimate."""

    def scan(self, keys: Sequence[bytes]) -> Iterator[tuple[int, list[KeyIdentity]]]:
        """Read all records. For each page yield the number of records, and the identities of records with the keys."""

    def record_at(self, lane: int, position: int) -> Record | None:
        """What stands at a place."""

    def block_at(self, lane: int, height: int) -> Block | None:
        """The block of a height."""

    def time(self) -> TimeSeen:
        """What is known of the clock."""

    def sizes(self) -> dict[str, Any]:
        """What only this database has to say of itself, for `oncelog stats`."""


class Inspector(Protocol):
    """Looks at a log that is there. None of it makes a log or migrates one.

    Every method raises NotALogError, NewerSchemaError, CorruptError or StoreUnavailableError.
    """

    def looking(self) -> AbstractContextManager[View]:
        """A view, which ends with the block."""

    def verify(self, head: ExportedHead | None = None, options: Options = DEFAULT_OPTIONS) -> Iterator[Finding]:
        """Goes through a log. The last finding is a Lie, the first one found, or Passed; before it comes Progress."""

    def confirm_clock(self) -> None:
        """Believes the clock."""

    def renew_epoch(self, above: int | None = None, operator: Operator = NO_OPERATOR) -> Renewed:
        """Start a new history: another epoch, and numbers that continue above those of the lost one (CO-12).

        Raises SettingsError for an `above` that is below a number of the log.
        """
