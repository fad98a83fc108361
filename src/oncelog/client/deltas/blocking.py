"""The blocking twin of `DeltasClient`: the same methods, each of which waits for its result.

    with BlockingDeltasClient("http://127.0.0.1:7171", "shop", path="till.db", client_id="till-1") as client:
        client.put("products", "p1", {"name": "Tea"})
        client.synced(timeout_s=10)

Any number of threads may share one.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

from oncelog.client.deltas.change_stream import ChangeStream
from oncelog.client.deltas.client import ROWS_PAGE, DeltasClient
from oncelog.client.deltas.edits import Edits
from oncelog.client.deltas.values import Change, Deletion, HistoryChange, LocalRow, PendingDelta, Refusal, Status
from oncelog.client.runtime.client import build_closed_error
from oncelog.core.canonical import JsonValue
from oncelog.errors import ClientError
from oncelog.portal import Portal

G = TypeVar("G")
T = TypeVar("T")


class BlockingDeltasClient:
    """For code without an event loop. Takes what `DeltasClient` takes; each method does what that one's does."""

    def __init__(self, url: str, gateway: str, **options: Any) -> None:
        self._client = DeltasClient(url, gateway, **options)
        self._open_portal: Portal | None = None
        self._thread_state = threading.local()

    def __enter__(self) -> Self:
        portal = Portal("oncelog-deltas-loop", partial(build_closed_error, "deltas"))
        try:
            portal.call(self._client.__aenter__)
        except BaseException:
            portal.close()
            raise
        self._open_portal = portal
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """As `DeltasClient.close`."""
        portal, self._open_portal = self._open_portal, None
        if portal is not None and not portal.is_forked:
            try:
                portal.call(self._client.close)
            finally:
                portal.close()

    @property
    def _portal(self) -> Portal:
        if self._open_portal is None:
            raise build_closed_error("deltas")
        if getattr(self._thread_state, "is_editing", False):
            raise ClientError("a function that edits must not use the client: it would wait for itself")
        return self._open_portal

    def _forbid_reentry(self, function: Callable[[G], T]) -> Callable[[G], T]:
        """What the function does with this client is refused: it holds the thread that would do it."""

        def call_marked(argument: G) -> T:
            self._thread_state.is_editing = True
            try:
                return function(argument)
            finally:
                self._thread_state.is_editing = False

        return call_marked

    def put(self, table: str, row_id: str, columns: Mapping[str, JsonValue]) -> str | None:
        """As `DeltasClient.put`."""
        return self._portal.call(self._client.put, table, row_id, columns)

    def delete(self, table: str, row_id: str) -> str | None:
        """As `DeltasClient.delete`."""
        return self._portal.call(self._client.delete, table, row_id)

    def edit(
        self,
        table: str,
        row_id: str,
        function: Callable[[dict[str, JsonValue] | None], Mapping[str, JsonValue] | Deletion],
    ) -> str | None:
        """As `DeltasClient.edit`."""
        return self._portal.call(self._client.edit, table, row_id, self._forbid_reentry(function))

    def transact(self, function: Callable[[Edits], T]) -> T:
        """As `DeltasClient.transact`."""
        portal = self._portal

        async def run_transaction() -> T:
            return await self._client.transact(self._forbid_reentry(function))

        return portal.call(run_transaction)

    def row(self, table: str, row_id: str) -> dict[str, JsonValue] | None:
        """As `DeltasClient.row`."""
        return self._portal.call(self._client.row, table, row_id)

    def rows(self, table: str, *, after: str = "", limit: int = ROWS_PAGE) -> list[LocalRow]:
        """As `DeltasClient.rows`."""
        return self._portal.call(self._client.rows, table, after=after, limit=limit)

    def each_row(self, table: str) -> Iterator[LocalRow]:
        """As `DeltasClient.each_row`."""
        return self._portal.iterate(self._client.each_row(table))

    def changes(self, table: str | None = None) -> Iterator[Change]:
        """As `DeltasClient.changes`: from this call on."""
        portal = self._portal

        async def create_stream() -> ChangeStream:
            return self._client.changes(table)

        return portal.iterate(portal.call(create_stream))

    def synced(self, timeout_s: float | None = None) -> None:
        """As `DeltasClient.synced`."""
        self._portal.call(self._client.synced, timeout_s)

    def pending(self) -> list[PendingDelta]:
        """As `DeltasClient.pending`."""
        return self._portal.call(self._client.pending)

    def status(self) -> Status:
        """As `DeltasClient.status`."""
        return self._client.status()

    def until_status(self, condition: Callable[[Status], bool]) -> Status:
        """As `DeltasClient.until_status`; the condition is called on another thread."""
        return self._portal.call(self._client.until_status, condition)

    def refusals(self) -> Iterator[Refusal]:
        """As `DeltasClient.refusals`."""
        return self._portal.iterate(self._client.refusals())

    def history_changes(self) -> Iterator[HistoryChange]:
        """As `DeltasClient.history_changes`."""
        return self._portal.iterate(self._client.history_changes())

    def discard(self, *delta_ids: str) -> None:
        """As `DeltasClient.discard`."""
        self._portal.call(self._client.discard, *delta_ids)

    def retry(self) -> None:
        """As `DeltasClient.retry`."""

        async def run_retry() -> None:
            self._client.retry()

        self._portal.call(run_retry)
