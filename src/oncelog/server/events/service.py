"""The Events API without its transport: authorization, results of requests, pages and metrics.

The order is that of CO-18: shape (`decode`), authorization (here), and only then the log is asked. A principal that may
not write a partition gets the same answer for every id, and nothing is looked up for it (CO-22).
"""

from collections.abc import Sequence
from itertools import takewhile
from typing import Final

from msgspec.structs import replace

from oncelog.core.policy import EVENTS
from oncelog.core.tenants import Tenant, Tenants
from oncelog.core.values import Committed, Mode, Rate, Reason, Refused, Replayed, Submission, Verdict
from oncelog.engine.log import Log
from oncelog.engine.outcome import Outcome
from oncelog.error_codes import FORBIDDEN, HISTORY_CHANGED, VALIDATION_FAILED
from oncelog.errors import HistoryChangedError, OncelogError
from oncelog.server.auth.principal import Principal
from oncelog.server.auth_gate import AuthGate
from oncelog.server.errors import UNREADABLE, ApiError, to_api_error, translate_errors
from oncelog.server.events.codec import ItemResult, RejectedItem, get_reason
from oncelog.server.events.decode import Submit, Sync
from oncelog.server.events.dialect import NATIVE, Dialect, NativeDialect
from oncelog.server.events.hub import EventsHub
from oncelog.server.events.insieme_dialect import InsiemeDialect
from oncelog.server.limits import ApiLimits
from oncelog.server.lookups import unknown_error
from oncelog.server.metrics import Counts
from oncelog.storage.store import RecordViewPage

KNOWN_PARTITIONS_MAX: Final = 1000
"""Of one connection, so that grants need not be asked for each event."""


class EventsService:
    """One for a server."""

    def __init__(
        self,
        log: Log,
        hub: EventsHub,
        auth_gate: AuthGate,
        *,
        limits: ApiLimits,
        counts: Counts,
        native: NativeDialect = NATIVE,
        insieme: Dialect | None = None,
    ) -> None:
        self.log = log
        self.hub = hub
        self.auth_gate = auth_gate
        self.limits = limits
        self.counts = counts
        self.clock = auth_gate.clock
        per_second = limits.new_events_per_second_max
        self._rate = Rate(per_second, burst=per_second) if per_second else None
        self._body_bytes_max = log.limits.body_bytes_max
        self.is_closing = False
        self.native = native
        self._tenants = Tenants(())
        self.insieme: Dialect = insieme or InsiemeDialect(None)

    def set_tenants(self, tenants: Sequence[Tenant]) -> None:
        """Put ids of events into the scopes of these tenants. The log must have them already."""
        self._tenants = Tenants(tenants)

    # --- submit

    def authorize(
        self, submit: Submit, principal: Principal, writable: set[tuple[str, ...]] | None = None
    ) -> list[Submission | RejectedItem]:
        """Return the items, with a rejection in place of those that the principal may not write (EV-10).

        `writable` caches partitions that this principal may write with its current rights.
        """
        rate = self._rate
        have_own_ids = bool(self._tenants.event_scopes)
        items: list[Submission | RejectedItem] = []
        bytes_max = self._body_bytes_max  # the log would refuse all of them for the size of one
        for item in submit.items:
            if isinstance(item, Submission):
                if len(item.body) > bytes_max:
                    items.append(RejectedItem(VALIDATION_FAILED, "body", f"must have at most {bytes_max} bytes"))
                    continue
                if (writable is None or item.partitions not in writable) and not self._may_write(
                    item, principal, writable
                ):
                    items.append(_FORBIDDEN_ITEM)
                    continue
                if have_own_ids and not item.scope:
                    item = replace(item, scope=self._tenants.get_event_scope(item.partitions))  # noqa: PLW2901 - the same, in its tenant
                if rate is not None:
                    item = replace(item, rate=rate)  # noqa: PLW2901 - the same, with what its actor may do
            items.append(item)
        return items

    def _may_write(self, item: Submission, principal: Principal, writable: set[tuple[str, ...]] | None) -> bool:
        if not all(map(principal.grants.may_write, item.partitions)):
            return False
        if writable is not None:
            if len(writable) >= KNOWN_PARTITIONS_MAX:
                writable.clear()
            writable.add(item.partitions)
        return True

    def count_results(self, results: Sequence[ItemResult]) -> None:
        """What became of a request, for those who watch the server."""
        counts = self.counts
        for result in results:
            kind = type(result)
            if kind is Committed:
                counts.events_committed += 1
            elif kind is Replayed:
                counts.events_replayed += 1
            else:
                counts.events_rejected[get_reason(result)] += 1

    # --- sync

    def check_readable(self, partitions: Sequence[str], principal: Principal) -> None:
        """Raises ApiError unless all of them may be read (EV-11)."""
        if not all(map(principal.grants.may_read, partitions)):
            raise ApiError(FORBIDDEN, "partitions: not all of them may be read", field="partitions")

    def check_project_access(self, partition: str, principal: Principal) -> None:
        """Raises ApiError for a project in which the principal may do nothing at all."""
        grants = principal.grants
        if not grants.may_read(partition) and not grants.may_write(partition):
            raise ApiError(FORBIDDEN, "the project may neither be read nor written", field="projectId")

    def check_epoch(self, epoch: str | None) -> None:
        """Raises ApiError for a reader of another history (CO-40)."""
        if epoch is not None and epoch != self.log.epoch:
            raise self._history_error("the epoch is another one: read again from a point that you know, or from 0")

    async def load_page(self, sync: Sync, upto: int | None, dialect: Dialect | None = None) -> RecordViewPage:
        """A page, up to a bound; without one, to the newest. Raises ApiError."""
        limits = self.limits
        limit = limits.page_events_default if sync.limit is None else sync.limit
        try:
            return await self.log.read_views(
                (dialect or self.native).encode_events,
                partitions=sync.partitions,
                after=sync.since,
                upto=upto,
                limit=max(1, min(limit, limits.page_events_max)),
            )
        except HistoryChangedError as error:
            raise self._history_error(str(error)) from error
        except OncelogError as error:
            raise to_api_error(error, UNREADABLE) from error

    async def find_event(self, key: bytes, partitions: Sequence[str]) -> Outcome:
        """Return what became of the event of that id in these partitions. Raises ApiError if they have no such event.

        An event of other partitions is answered like an unknown one. So is an event of a tenant with separate ids, if
        none of the partitions belongs to that tenant: all its scopes would have to be searched.
        """
        for scope in self._tenants.list_event_scopes(tuple(partitions)):
            with translate_errors():
                outcome = await self.log.lookup(key, policy=EVENTS, scope=scope)
            if outcome.record is not None and not set(partitions).isdisjoint(outcome.record.partitions):
                return outcome
        raise unknown_error("id")

    def encode_page(self, sync: Sync, page: RecordViewPage, dialect: Dialect | None = None) -> list[bytes]:
        """The payload of its answer, in parts."""
        self.counts.deliveries += page.count
        return (dialect or self.native).encode_page(sync, page, self.log.epoch)

    def _history_error(self, message: str) -> ApiError:
        details = {"epoch": self.log.epoch, "server_last_committed_id": self.hub.position}
        return ApiError(HISTORY_CHANGED, message, **details)


_UNTIL_REFUSED: Final = Mode.UNTIL_REFUSED  # Python 3.11 takes long to find an enum's member
_FORBIDDEN_ITEM: Final = RejectedItem(FORBIDDEN, "partitions", "not all of them may be written")


def select_submissions(items: Sequence[Submission | RejectedItem], mode: Mode = Mode.EACH) -> list[Submission]:
    """Return the items to submit: not those that the API refuses, nor those behind one that ends the request."""
    if mode is _UNTIL_REFUSED:
        items = list(takewhile(lambda item: type(item) is Submission, items))
    return [item for item in items if type(item) is Submission]


def merge_results(
    items: Sequence[Submission | RejectedItem], verdicts: Sequence[Verdict], mode: Mode = Mode.EACH
) -> Sequence[ItemResult]:
    """Return one result for each item: the verdict of the log, or the refusal of the API."""
    if len(verdicts) == len(items):
        return verdicts
    if mode is Mode.UNTIL_REFUSED:
        return _merge_until_refused(items, verdicts)
    following = iter(verdicts)
    return [next(following) if isinstance(item, Submission) else item for item in items]


def _merge_until_refused(
    items: Sequence[Submission | RejectedItem], verdicts: Sequence[Verdict]
) -> Sequence[ItemResult]:
    """The same where one is the end: it is one of the verdicts, or the first item that the log was not asked about."""
    refused = next((index for index, verdict in enumerate(verdicts) if isinstance(verdict, Refused)), None)
    results: list[ItemResult] = list(verdicts)
    if refused is None:
        refused = len(verdicts)
        results.append(items[refused])  # type: ignore[arg-type]  # `select_submissions` ends at what is no submission
    skipped = Refused(Reason.NOT_PROCESSED, f"item {refused} was refused", index=refused)
    return [*results, *[skipped] * (len(items) - len(results))]


def find_highest_position(results: Sequence[ItemResult]) -> int:
    """The highest number that a client is told; 0 if none."""
    numbers = [
        result.receipt.position for result in results if isinstance(result, Committed | Replayed) and result.receipt
    ]
    return max(numbers, default=0)
