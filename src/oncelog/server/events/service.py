"""The Events API without its transports: authorization, results of requests, pages and metrics.

CO-18 sets the order: `decode` checks the shape, this module authorizes, and only then is the log queried. A principal
without write access to a partition receives the same answer for every id, without a look-up (CO-22).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from msgspec.structs import replace

from oncelog.core.policy import EVENTS
from oncelog.core.tenants import Tenant, Tenants
from oncelog.core.values import Committed, Replayed, Submission
from oncelog.engine.log import Log
from oncelog.error_codes import FORBIDDEN, HISTORY_CHANGED, VALIDATION_FAILED
from oncelog.errors import HistoryChangedError
from oncelog.server.api_service import ApiService, describe_outcome, new_rate, unknown_error
from oncelog.server.auth.principal import Principal
from oncelog.server.auth_gate import AuthGate
from oncelog.server.errors import ApiError
from oncelog.server.events.dialect import Dialect, ItemResult, RejectedItem, Submit, Sync, get_reason
from oncelog.server.events.hub import EventsHub
from oncelog.server.events.insieme_dialect import InsiemeDialect
from oncelog.server.events.native_dialect import NATIVE, NativeDialect
from oncelog.storage.store import RecordViewPage


class EventsService(ApiService):
    """A server's Events API. Calls raise ApiError, or OncelogError if the log cannot be read."""

    def __init__(
        self,
        log: Log,
        hub: EventsHub,
        auth_gate: AuthGate,
        *,
        native: NativeDialect = NATIVE,
        insieme: Dialect | None = None,
    ) -> None:
        super().__init__(log, auth_gate)
        self.hub = hub
        self._rate = new_rate(self.limits.new_events_per_second_max)
        self.native = native
        self._tenants = Tenants(())
        self.insieme: Dialect = insieme or InsiemeDialect(None)

    def set_tenants(self, tenants: Sequence[Tenant]) -> None:
        """Use the scopes of these tenants for event ids. The log must already have these tenants."""
        self._tenants = Tenants(tenants)

    # --- submit

    def authorize(self, submit: Submit, may_write: Callable[[str], bool]) -> Submit:
        """Return the submission. A rejection replaces each item that the caller may not write (EV-10)."""
        rate = self._rate
        have_own_ids = bool(self._tenants.event_scopes)
        items: list[Submission | RejectedItem] = []
        bytes_max = self.log.limits.body_bytes_max  # the log would refuse all items because of one above the limit
        for item in submit.items:
            if isinstance(item, Submission):
                if len(item.body) > bytes_max:
                    items.append(RejectedItem(VALIDATION_FAILED, "body", f"must have at most {bytes_max} bytes"))
                    continue
                if not all(map(may_write, item.partitions)):
                    items.append(_FORBIDDEN_ITEM)
                    continue
                if have_own_ids and not item.scope:
                    item = replace(item, scope=self._tenants.get_event_scope(item.partitions))  # noqa: PLW2901 - the same item, in the scope of its tenant
                if rate is not None:
                    item = replace(item, rate=rate)  # noqa: PLW2901 - the same item, with the rate of its actor
            items.append(item)
        return Submit(submit.ids, items, submit.mode, submit.traceparent)

    def count_results(self, results: Sequence[ItemResult]) -> None:
        """Count a request's results in the metrics."""
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
        """Raise ApiError unless the principal may read all of these partitions (EV-11)."""
        if not all(map(principal.grants.may_read, partitions)):
            raise ApiError(
                FORBIDDEN,
                "partitions: the credential has no read access to some of them; its grants must include them",
                field="partitions",
            )

    def check_project_access(self, partition: str, principal: Principal) -> None:
        """Raise ApiError if the principal may neither read nor write the project."""
        if not principal.grants.may_read(partition) and not principal.grants.may_write(partition):
            raise ApiError(FORBIDDEN, "the credential has no access to this project", field="projectId")

    def check_epoch(self, epoch: str | None) -> None:
        """Raise ApiError if a reader's cursor belongs to a different history (CO-40)."""
        if epoch is not None and epoch != self.log.epoch:
            raise self._history_error("the log has another epoch; read again from a known position, or from 0")

    async def load_page(self, sync: Sync, upto: int | None, dialect: Dialect | None = None) -> RecordViewPage:
        """Return a page up to a bound or to the newest event. Raises ApiError if the cursor is ahead of the log."""
        try:
            return await self.log.read_views(
                (dialect or self.native).encode_events,
                partitions=sync.partitions,
                after=sync.since,
                upto=upto,
                limit=self.page_sizes.clamp(sync.limit),
            )
        except HistoryChangedError as error:
            raise self._history_error(str(error)) from error

    async def find_event(self, key: bytes, partitions: Sequence[str]) -> Mapping[str, Any]:
        """Return the outcome of the event with this id. Raises ApiError if these partitions have no such event.

        An event in other partitions gets the same answer as an unknown event. So does an event of a tenant with
        separate ids if none of the partitions belongs to that tenant, because the search would have to cover all of the
        tenant's scopes.
        """
        for scope in self._tenants.list_event_scopes(tuple(partitions)):
            outcome = await self.log.lookup(key, policy=EVENTS, scope=scope)
            if outcome.record is not None and not set(partitions).isdisjoint(outcome.record.partitions):
                native = self.native
                return await describe_outcome(
                    self.log, outcome, "event", native.encode_event, with_proof=native.shows_actor
                )
        raise unknown_error("id")

    def encode_page(self, sync: Sync, page: RecordViewPage, dialect: Dialect | None = None) -> list[bytes]:
        """Encode a page's payload in parts, and count its events in the metrics."""
        self.counts.deliveries += page.count
        return (dialect or self.native).encode_page(sync, page, self.log.epoch)

    def _history_error(self, message: str) -> ApiError:
        details = {"epoch": self.log.epoch, "server_last_committed_id": self.hub.position}
        return ApiError(HISTORY_CHANGED, message, **details)


_FORBIDDEN_ITEM: Final = RejectedItem(
    FORBIDDEN, "partitions", "the credential has no write access to some of them; its grants must include them"
)
