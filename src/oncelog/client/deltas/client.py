"""Asyncio client for the Deltas API: edits apply to local rows immediately and are synced with a gateway.

    async with DeltasClient("http://127.0.0.1:7171", "shop", path="till.db", client_id="till-1") as client:
        await client.put("products", "p1", {"name": "Tea", "price": 3.5})
        async for change in client.changes("products"):
            print(change.row_id, change.after)

Two independent tasks do the syncing: the `pusher` sends the outbox, and the `puller` reads the gateway. The `protocol`
makes the decisions without I/O, and the `store` saves the state.
"""

import asyncio
import logging
import os
import random
import ssl
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from typing import Final, TypeVar

from msgspec.structs import replace

from oncelog.client.deltas.edits import Edits, check_identifier, check_names
from oncelog.client.deltas.store import DeltasRuntime, DeltasStore
from oncelog.client.deltas.tasks import Puller, Pusher
from oncelog.client.deltas.transport import DeltasTransport
from oncelog.client.deltas.values import (
    DELETE,
    Change,
    Deletion,
    DeltaRefusedError,
    DeltasLimits,
    HistoryChange,
    LocalRow,
    PendingDelta,
    Refusal,
    Status,
)
from oncelog.client.runtime.bounded_stream import BoundedStream
from oncelog.client.runtime.client import BaseClient, get_wall_ms
from oncelog.client.runtime.http import normalize_url
from oncelog.client.runtime.options import Token, check_client_id, check_limits, check_path, check_token
from oncelog.client.runtime.values import ConnectionState
from oncelog.core.canonical import JsonValue
from oncelog.core.deltas import find_gateway_fault
from oncelog.deprecation import alias_method
from oncelog.errors import ClientError, SettingsError

logger: Final = logging.getLogger("oncelog.client.deltas")
T = TypeVar("T")
ROWS_PAGE: Final = 500
UNLIMITED: Final = 2**62


class DeltasClient(BaseClient[DeltasRuntime, Status]):
    """A client for one gateway, with its own file. `async with` opens and closes it."""

    def __init__(  # noqa: PLR0913 - keyword arguments, most with a default
        self,
        url: str,
        gateway: str,
        *,
        path: str | os.PathLike[str],
        client_id: str,
        token: Token = None,
        limits: DeltasLimits | None = None,
        headers: Mapping[str, str] | None = None,
        tls: ssl.SSLContext | None = None,
        wall_ms: Callable[[], int] | None = None,
        chance: random.Random | None = None,
        wire: DeltasTransport | None = None,
    ) -> None:
        """Store the configuration. Opening the client opens the file.

        `path` is the client's file, which is created if it is missing; ":memory:" keeps the rows until the client is
        closed. A file cannot be reused for a different client or gateway. `client_id` is the client id of the
        credential. `token` is a string, or a function that returns one and is called for every request. `wall_ms`
        returns the time; the default is the system clock.
        """
        self.limits = check_limits(limits, DeltasLimits)
        check_token(token)
        checked_id = check_client_id(client_id)
        if checked_id is None:
            raise SettingsError("client_id must be given: it breaks ties between writes with equal clocks")
        self.url = normalize_url(url)
        fault = find_gateway_fault(gateway)
        if fault is not None:
            raise SettingsError(f"gateway {fault}")
        self.gateway = gateway
        self.client_id = checked_id
        self._wall_ms = wall_ms or get_wall_ms
        store = DeltasStore(check_path(path), self.limits)
        self._runtime = DeltasRuntime("deltas", logger, store, self.limits, chance)
        self._transport = wire or DeltasTransport(
            self.url, gateway, token=token, limits=self.limits, headers=headers, tls=tls
        )

    # --- opening and closing

    async def _open(self) -> None:
        runtime = self._runtime
        await runtime.call_store(runtime.store.open, self.client_id, self.gateway)
        self._puller = Puller(runtime, self._transport)
        self._pusher = Pusher(runtime, self._transport, self._puller.check_epoch)
        runtime.start_task("push", self._pusher.run)
        runtime.start_task("pull", self._puller.run)

    async def _release(self) -> None:
        await self._transport.close()

    # --- editing

    async def put(self, table: str, row_id: str, columns: Mapping[str, JsonValue]) -> str | None:
        """Set some columns of a row and keep the others. Create the row if it does not exist.

        When the call returns, the edit is on disk. Returns the delta id, or None if nothing changed. Raises
        CanonicalError for an invalid name or value, LimitExceededError or StoreError; the row is then unchanged.
        """
        return await self.transact(lambda edits: edits.put(table, row_id, columns))

    async def delete(self, table: str, row_id: str) -> str | None:
        """Delete a row. Return the delta id, or None if the row does not exist. Raises the same errors as `put`."""
        return await self.transact(lambda edits: edits.delete(table, row_id))

    async def edit(
        self,
        table: str,
        row_id: str,
        function: Callable[[dict[str, JsonValue] | None], Mapping[str, JsonValue] | Deletion],
    ) -> str | None:
        """Edit a row with a function, which returns the columns to set, or `DELETE` to delete the row.

        The function gets the columns of the row, or None if the row does not exist. No other edit runs in between. The
        function runs in a worker thread and must not use the client. If it returns None, usually because of a missing
        `return`, the client raises ClientError and changes nothing.
        """

        def apply_edit(edits: Edits) -> str | None:
            columns: object = function(edits.row(table, row_id))
            if columns is None:
                raise ClientError(
                    "the function passed to edit returned None, and nothing was changed: return the columns to set, or "
                    "oncelog.client.deltas.DELETE to delete the row"
                )
            if columns is DELETE:
                return edits.delete(table, row_id)
            return edits.put(table, row_id, columns)  # type: ignore[arg-type] # `put` refuses other types

        return await self.transact(apply_edit)

    async def transact(self, function: Callable[[Edits], T]) -> T:
        """Call a function that edits rows in one transaction, and return its result.

        The function gets an `Edits` object and calls its methods `row`, `put` and `delete`. If the function raises,
        nothing changes. It runs in a worker thread and must not use the client. The client sends the deltas in one push
        if they fit, and the gateway commits them one by one.
        """
        runtime = self._runtime
        runtime.check_open()

        def publish(outcome: tuple[T, list[Change]]) -> None:
            self._pusher.notify()
            runtime.publish(outcome[1])

        store, wall_now_ms = runtime.store, self._wall_ms()
        result, _ = await runtime.call_store(lambda: store.transact(function, wall_now_ms), notify=publish)
        return result

    # --- reading

    async def row(self, table: str, row_id: str) -> dict[str, JsonValue] | None:
        """Return the columns of a local row, or None if it does not exist."""
        self._runtime.check_open()
        check_names(table, row_id)
        return await self._runtime.call_store(self._runtime.store.load_row, table, row_id)

    async def rows(self, table: str, *, after: str = "", limit: int = ROWS_PAGE) -> list[LocalRow]:
        """Return a page of a table's local rows, in the code point order of `row_id`. Deleted rows are left out."""
        self._runtime.check_open()
        check_identifier(table, "table")
        return await self._runtime.call_store(self._runtime.store.list_rows, table, after, limit)

    async def each_row(self, table: str) -> AsyncIterator[LocalRow]:
        """Yield all local rows of a table, page by page."""
        after = ""
        while page := await self.rows(table, after=after):
            for row in page:
                yield row
            after = page[-1].row_id

    def changes(self, table: str | None = None) -> BoundedStream[Change]:
        """Stream all changes from now on, to one table or all tables: `async for change in client.changes()`.

        Raises UpdatesLostError if the reader falls too far behind. The stream is not durable: after a restart, read the
        rows instead.
        """
        self._runtime.check_open()
        if table is not None:
            check_identifier(table, "table")
        return BoundedStream(
            self._runtime.streams,
            count_max=("changes_max", self.limits.changes_max),
            bytes_max=("changes_bytes_max", self.limits.changes_bytes_max),
            accepts=lambda change: table in (None, change.table),
            get_size=lambda change: change.bytes,
        )

    # --- status

    async def synced(self, timeout_s: float | None = None) -> None:
        """Wait until the gateway has acknowledged all earlier edits and its current deltas have arrived here.

        Raises DeltaRefusedError if the gateway refuses one of the edits, and TimeoutError after `timeout_s`.
        """
        async with asyncio.timeout(timeout_s):
            store = self._runtime.store
            number = store.sync_state.newest_number

            def is_pushed() -> bool:
                protocol = self._pusher.protocol
                if protocol.refusal is not None and protocol.refused_number <= number:
                    raise DeltaRefusedError(protocol.refusal)
                return not 0 < store.sync_state.oldest_number <= number

            await self._runtime.wait_until(is_pushed)
            await self._puller.run_round()

    async def pending(self) -> list[PendingDelta]:
        """Return the deltas in the outbox, in the order in which they will be sent."""
        self._runtime.check_open()
        found = await self._runtime.call_store(self._runtime.store.list_pending, None, UNLIMITED, UNLIMITED)
        return [PendingDelta(entry.delta_id.hex(), entry.body) for entry in found]

    def status(self) -> Status:
        """Return the current status, for example for a user interface. `until_status` waits for a particular one."""
        runtime, sync_state = self._runtime, self._runtime.store.sync_state
        status = Status(
            state=ConnectionState.CLOSED,
            pending=sync_state.pending,
            pending_bytes=sync_state.pending_bytes,
            cursor=sync_state.cursor,
            epoch=sync_state.epoch,
            last_error=runtime.failure_text,
        )
        if not runtime.is_open:
            return status
        push_protocol, pull_protocol = self._pusher.protocol, self._puller.protocol
        if not (push_protocol.is_authorized and pull_protocol.is_authorized):
            state = ConnectionState.REFUSED
        elif pull_protocol.last_error is not None:
            state = ConnectionState.OFFLINE
        else:
            state = ConnectionState.LIVE if self._puller.is_live else ConnectionState.CATCHING_UP
        return replace(
            status,
            state=state,
            refused=0 if push_protocol.refusal is None else 1,
            refusal=push_protocol.refusal,
            clock_wait_ms=push_protocol.clock_wait_ms,
            is_resetting=sync_state.is_reset_wanted,
            history_change=self._puller.history_change,
            last_error=pull_protocol.last_error or push_protocol.last_error,
        )

    def refusals(self) -> AsyncIterator[Refusal]:
        """Yield the current refusal and each later one.

        The outbox stops at a refused delta, so there is at most one at a time.
        """
        return self._iterate_values(lambda status: status.refusal, None)

    def history_changes(self) -> AsyncIterator[HistoryChange]:
        """Yield each change to the gateway's history, once the rows of the new history have replaced the local ones.

        If the history changes several times in quick succession, only the last change may be reported.
        """
        return self._iterate_values(lambda status: status.history_change, self.status().history_change)

    async def _iterate_values(self, part: Callable[[Status], T | None], last: T | None) -> AsyncIterator[T]:
        def is_other(status: Status) -> bool:
            return part(status) != last

        while True:
            last = part(await self.until_status(is_other))
            if last is not None:
                yield last

    # --- refused deltas

    def refused(self) -> list[Refusal]:
        """Return the refused delta, if any. The outbox stops at a refused delta, so there is at most one."""
        refusal = self.status().refusal
        return [] if refusal is None else [refusal]

    async def send_again(self, delta_id: str) -> None:
        """Resend a refused delta immediately. Raises ClientError if the delta is not refused."""
        self._check_refused((delta_id,))
        self.reconnect_now()

    async def forget_refused(self, *delta_ids: str) -> None:
        """Withdraw refused deltas that the application has handled. Without an id, withdraw all of them.

        Raises ClientError if one of them is not refused.
        """
        self._check_refused(delta_ids)
        names = delta_ids or [refusal.delta_id for refusal in self.refused()]
        if names:
            await self.withdraw(*names)

    def _check_refused(self, delta_ids: Collection[str]) -> None:
        self._runtime.check_open()
        unknown = set(delta_ids) - {refusal.delta_id for refusal in self.refused()}
        if unknown:
            raise ClientError(f"no refused delta has the id {min(unknown)}")

    async def withdraw(self, *delta_ids: str) -> None:
        """Remove pending deltas from the outbox. The client then fetches all rows again and reapplies the other deltas.

        Until then, the local rows still contain the withdrawn edits. If a delta was already sent, the gateway may still
        commit it. Raises ClientError if one of the deltas is not in the outbox.
        """
        self._runtime.check_open()
        try:
            ids = [bytes.fromhex(delta_id) for delta_id in delta_ids]
        except (ValueError, TypeError) as error:
            raise ClientError(f"a delta id must have 64 hexadecimal digits: {error}") from error

        def notify(_count: int) -> None:
            self._pusher.on_discarded()
            self._puller.skip_pause()
            self._runtime.wake_waiters()

        count = await self._runtime.call_store(self._runtime.store.discard, ids, notify=notify)
        if count != len(set(ids)):
            raise ClientError(f"{len(set(ids)) - count} of the deltas are not in the outbox")

    discard = alias_method("DeltasClient.discard", "withdraw")

    def reconnect_now(self) -> None:
        """Skip all pauses: retry a refused delta or an unreachable gateway immediately."""
        self._runtime.check_open()
        self._pusher.skip_pause()
        self._puller.skip_pause()

    retry = alias_method("DeltasClient.retry", "reconnect_now")
