"""The outbox of an events client: drafts, and submissions without an outcome."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple
from uuid import UUID, uuid4

import msgspec

from oncelog.client.events.protocol import EventsProtocol
from oncelog.client.events.store import ClientStore
from oncelog.client.events.values import ClientLimits, OutboxEntry, Outcome, Refused, SettledEntry
from oncelog.client.runtime.client import ProtocolRuntime, get_wall_ms
from oncelog.client.runtime.outbox import BaseOutbox, BasePending
from oncelog.core.builders import event as submission_of
from oncelog.core.canonical import INTEGER_MAX, JsonValue
from oncelog.errors import CanonicalError

EventsRuntime = ProtocolRuntime[ClientStore, ClientLimits, EventsProtocol]
"""Runtime of an events client."""


class Draft(NamedTuple):
    """An event to submit."""

    event: JsonValue
    partitions: Sequence[str] | None = None
    """Partitions of the event. None means the client's partition, if it follows exactly one."""
    id: UUID | str | None = None
    """Id of the event. None generates one. A caller that may submit the same event again must choose the id."""
    expected_committed_id: int | None = None


def prepare(draft: Draft, partitions: Sequence[str], body_bytes_max: int) -> OutboxEntry:
    """Validate a draft and convert it to an outbox entry, not yet numbered. `partitions` are the client's partitions.

    Raises CanonicalError for a malformed or oversized event, and ValueError if the draft has no partitions and the
    client does not follow exactly one.
    """
    expected = draft.expected_committed_id
    if expected is not None and (type(expected) is not int or not 0 <= expected <= INTEGER_MAX):
        raise CanonicalError("$.expected_committed_id", f"must be a whole number from 0 to {INTEGER_MAX}")
    if draft.partitions is None and len(partitions) != 1:
        raise ValueError(f"partitions must be given, because the client follows {len(partitions)} of them")
    own = list(partitions) if draft.partitions is None else draft.partitions
    submission = submission_of(uuid4() if draft.id is None else draft.id, draft.event, own)
    if len(submission.body) > body_bytes_max:
        reason = f"must have at most {body_bytes_max} bytes (body_bytes_max), not {len(submission.body)}"
        raise CanonicalError("$.event", reason)
    text = str(UUID(bytes=submission.key))
    return OutboxEntry(0, text, submission.partitions, submission.body, submission.fingerprint, expected)


class Pending(BasePending[OutboxEntry, Outcome]):
    """A submission in the outbox."""

    __slots__ = ()

    @property
    def id(self) -> str:
        """Id of the event."""
        return self._entry.id

    @property
    def partitions(self) -> tuple[str, ...]:
        """Partitions of the event."""
        return self._entry.partitions

    @property
    def event(self) -> dict[str, Any]:
        """A copy of the event, for example to display it before it is committed."""
        event: dict[str, Any] = msgspec.json.decode(self._entry.body)
        return event


class Outbox(BaseOutbox[EventsRuntime, OutboxEntry, Pending, list[SettledEntry]]):
    """Outbox of an events client."""

    def __init__(self, runtime: EventsRuntime) -> None:
        limits = runtime.limits
        super().__init__(
            runtime,
            Pending,
            count_max=("outbox_events_max", limits.outbox_events_max),
            bytes_max=("outbox_bytes_max", limits.outbox_bytes_max),
        )
        self.refused_count = 0

    async def submit_drafts(self, drafts: Iterable[Draft], withdrawn: Sequence[str] = ()) -> list[Pending]:
        """Prepare drafts and submit all of them or none."""
        partitions, body_bytes_max = self._runtime.protocol.partitions, self._runtime.limits.body_bytes_max
        return await self.submit([prepare(draft, partitions, body_bytes_max) for draft in drafts], withdrawn)

    def _take_changes(self) -> list[SettledEntry]:
        return self._runtime.protocol.take_settled()

    async def _save_batch(
        self, entries: Sequence[OutboxEntry], withdrawn: Sequence[str], changes: list[SettledEntry]
    ) -> None:
        store, now_ms = self._runtime.store, get_wall_ms()
        self.refused_count += await self._runtime.save(store.save_outbox, entries, withdrawn, changes, now_ms)
        self._runtime.protocol.enqueue(entries)
        for entry, outcome in changes:
            if isinstance(outcome, Refused):
                self._runtime.logger.warning("the %s was refused: %s", entry, outcome)
            self._settle(entry, outcome)
        self._runtime.wake_tasks()
