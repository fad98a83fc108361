"""The outbox: submissions without an outcome, and the task that saves them before they are sent."""

import time
from collections.abc import Callable, Iterable, Sequence

from oncelog.client.events.runtime import EventsRuntime
from oncelog.client.events.submissions import Draft, Pending, PreparedEvent, prepare
from oncelog.client.events.values import Refused, SettledEntry
from oncelog.client.runtime.persister import BasePersister
from oncelog.errors import IdReusedError, LimitExceededError


class Outbox(BasePersister[Sequence[PreparedEvent], list[SettledEntry]]):
    """Outbox of a client of events."""

    def __init__(self, runtime: EventsRuntime, on_saved: Callable[[], None]) -> None:
        """`on_saved` is called when there may be something new to send."""
        super().__init__(runtime)
        self._runtime = runtime
        self._on_saved = on_saved

    async def submit(self, drafts: Iterable[Draft], partitions: Sequence[str]) -> list[Pending]:
        """Accept all or none. Return when they are on the disk, as are those before them with the same ids."""
        runtime, limits = self._runtime, self._runtime.limits
        found: list[Pending] = []
        new: dict[str, tuple[PreparedEvent, Pending]] = {}
        for draft in drafts:
            prepared = prepare(draft, _get_partitions(draft, partitions), limits.body_bytes_max)
            pending = runtime.pending.get(prepared.id) or new.get(prepared.id, (None, None))[1]
            if pending is None:
                pending = Pending(prepared)
                new[prepared.id] = (prepared, pending)
            elif not pending.has_same_content(prepared):
                raise IdReusedError(f"another event waits under the id {prepared.id}")
            found.append(pending)
        if len(runtime.pending) + len(new) > limits.outbox_events_max:
            raise LimitExceededError("outbox_events_max", limits.outbox_events_max)
        size = sum(len(prepared.body) for prepared, _ in new.values())
        if runtime.outbox_bytes + size > limits.outbox_bytes_max:
            raise LimitExceededError("outbox_bytes_max", limits.outbox_bytes_max)
        runtime.pending.update({prepared.id: pending for prepared, pending in new.values()})
        runtime.outbox_bytes += size
        await self.accept([prepared for prepared, _ in new.values()])
        for pending in found:
            pending.check_accepted()
        return found

    def _take_changes(self) -> list[SettledEntry]:
        return self._runtime.protocol.take_settled()

    async def _save(self, accepted: Sequence[Sequence[PreparedEvent]], changes: list[SettledEntry]) -> None:
        runtime = self._runtime
        entries = runtime.store.assign_numbers([prepared for group in accepted for prepared in group])
        if entries or changes or self.last_error is not None:
            await runtime.call_store(runtime.store.save_outbox, entries, changes, time.time_ns() // 1_000_000)
        runtime.protocol.enqueue(entries)
        for one in changes:
            if isinstance(one.outcome, Refused):
                runtime.refused_count += 1
                runtime.logger.warning("%s was refused: %s", one.entry.id, one.outcome)
            pending = self._forget(one.entry.id, one.entry.body)
            if pending is not None:
                pending.settle(one.outcome)
        self._on_saved()

    def _reject(self, submitted: Sequence[PreparedEvent], error: Exception) -> None:
        for prepared in submitted:
            pending = self._forget(prepared.id, prepared.body)
            if pending is not None:
                pending.settle(error)

    def _forget(self, submission_id: str, body: bytes) -> Pending | None:
        pending = self._runtime.pending.pop(submission_id, None)
        if pending is not None:
            self._runtime.outbox_bytes -= len(body)
        return pending


def _get_partitions(draft: Draft, partitions: Sequence[str]) -> Sequence[str]:
    if draft.partitions is not None:
        return draft.partitions
    if len(partitions) != 1:
        raise ValueError(f"partitions must be given: the client follows {len(partitions)}, not one")
    return list(partitions)
