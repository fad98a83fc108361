"""Outbox of one scope: the pending writes, their callers, and saving what the protocol changes."""

import logging
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final
from uuid import UUID

from oncelog.client.ledger.entries import QueuedWrite, SettledWrite
from oncelog.client.ledger.protocol import LedgerProtocol
from oncelog.client.ledger.store import LedgerStore, StoredScope
from oncelog.client.ledger.values import LedgerLimits, Outcome, PendingWrite
from oncelog.client.runtime.client import ClientRuntime
from oncelog.client.runtime.outbox import BaseOutbox, BasePending
from oncelog.errors import ClientError, ServerRefusedError, StoreError

if TYPE_CHECKING:
    from oncelog.client.ledger.transport import LedgerTransport

logger: Final = logging.getLogger("oncelog.client.ledger")


class LedgerRuntime(ClientRuntime[LedgerStore, LedgerLimits]):
    """State that the scopes of one ledger client share: a store, and a channel to the server."""

    def __init__(
        self,
        store: LedgerStore,
        transport: "LedgerTransport",
        limits: LedgerLimits,
        random_source: random.Random | None,
    ) -> None:
        super().__init__("ledger", logger, store, limits, random_source)
        self.transport = transport


class Pending(BasePending[QueuedWrite, Outcome]):
    """A write, and the callers that wait for its outcome."""

    __slots__ = ()

    @property
    def entry(self) -> QueuedWrite:
        """The write as it was submitted."""
        return self._entry


class LedgerOutbox(BaseOutbox[LedgerRuntime, QueuedWrite, Pending, bool]):
    """Outbox of one scope. The protocol keeps its changes until they are saved."""

    reused_text = "a write with other operations is pending under the key {draft}"

    def __init__(self, runtime: LedgerRuntime, stored: StoredScope, on_saved: Callable[[], None]) -> None:
        """Call `on_saved` when the protocol may have new calls to make."""
        limits = runtime.limits
        super().__init__(
            runtime,
            Pending,
            count_max=("pending_writes_max", limits.pending_writes_max),
            bytes_max=("pending_bytes_max", limits.pending_bytes_max),
        )
        self.protocol = LedgerProtocol(stored.state, stored.pending, in_flight_max=limits.in_flight_max)
        self.denied: dict[int, ServerRefusedError] = {}
        """Refusals of pending writes, by number."""
        self._scope_id = stored.id
        self._on_saved = on_saved
        # A key is stored twice if the first write was reported and not removed before a power failure.
        self.load({entry.key: entry for entry in stored.pending}.values())

    def _take_changes(self) -> bool:
        return True  # the protocol has them, and those of a failed save

    async def _save_batch(self, entries: Sequence[QueuedWrite], withdrawn: Sequence[object], changes: bool) -> None:
        del withdrawn, changes
        protocol = self.protocol
        for entry in entries:
            protocol.submit(entry)
        unsaved = protocol.take_changes()
        if unsaved is None:
            return
        try:
            await self._runtime.save(self._runtime.store.save, self._scope_id, unsaved)
        except StoreError:
            protocol.revert_unsaved(unsaved)
            raise
        protocol.confirm_saved(unsaved)
        for settled in unsaved.settled:
            self.report(settled)
        self._on_saved()

    def list_pending(self) -> list[PendingWrite]:
        """Return the writes without an outcome, in their order, also the ones that are not saved yet."""
        known = {entry.key for entry in self.protocol.entries}
        drafts = [pending.entry for key, pending in self.pending.items() if key not in known]
        found = [(entry.sequence, entry) for entry in self.protocol.entries]
        found += enumerate(drafts, self.protocol.next_sequence)
        return [PendingWrite(UUID(bytes=entry.key), sequence, entry.operations) for sequence, entry in found]

    def report(self, settled: SettledWrite) -> None:
        """Report an outcome once: a committed write is reported before it is saved, and settled again after that."""
        entry, outcome = settled
        if not entry.is_reported:
            entry.is_reported, entry.outcome = True, outcome
            self.denied.pop(entry.number, None)
            self._settle(entry, outcome or ClientError(f"the application withdrew the write {UUID(bytes=entry.key)}"))

    def fail_callers(self, entry: QueuedWrite, error: Exception) -> None:
        """Raise an error to the callers that wait for a write. It stays pending, and can have new callers."""
        self._settle(entry, error)
        self.load([entry])
