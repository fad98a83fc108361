"""Submissions: what is to be submitted, and what waits for its outcome."""

from collections.abc import Sequence
from typing import Any, NamedTuple
from uuid import UUID, uuid4

import msgspec

from oncelog.client.events.values import OutboxEntry, Outcome
from oncelog.client.runtime.pending_write import BasePending
from oncelog.core.builders import event as submission_of
from oncelog.core.canonical import INTEGER_MAX, JsonValue
from oncelog.errors import CanonicalError


class Draft(NamedTuple):
    """What is to be submitted."""

    event: JsonValue
    partitions: Sequence[str] | None = None
    """None for that of the client, if it has one alone."""
    id: UUID | str | None = None
    """None for a new one. Who might submit the same again must give it an id."""
    expected_committed_id: int | None = None


class PreparedEvent(NamedTuple):
    """A draft that is an event: an entry of the outbox but for its number."""

    id: str
    key: bytes
    partitions: tuple[str, ...]
    body: bytes
    fingerprint: bytes
    expected_committed_id: int | None


def prepare(draft: Draft, partitions: Sequence[str], body_bytes_max: int) -> PreparedEvent:
    """Raises CanonicalError for what is no event, or one that is too large."""
    expected = draft.expected_committed_id
    if expected is not None and (type(expected) is not int or not 0 <= expected <= INTEGER_MAX):
        raise CanonicalError("$.expected_committed_id", f"must be a whole number from 0 to {INTEGER_MAX}")
    submission = submission_of(uuid4() if draft.id is None else draft.id, draft.event, partitions)
    if len(submission.body) > body_bytes_max:
        reason = f"must have at most {body_bytes_max} bytes (body_bytes_max), not {len(submission.body)}"
        raise CanonicalError("$.event", reason)
    digits = submission.key.hex()
    text = f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"
    return PreparedEvent(
        text,
        submission.key,
        submission.partitions,
        submission.body,
        submission.fingerprint,
        expected,
    )


class Pending(BasePending[Outcome]):
    """A submission that lies in the outbox."""

    __slots__ = ("_body", "_content", "id", "partitions")

    def __init__(self, entry: PreparedEvent | OutboxEntry) -> None:
        super().__init__()
        self.id = entry.id
        self.partitions = entry.partitions
        self._body = entry.body
        self._content = (entry.fingerprint, entry.expected_committed_id)

    @property
    def event(self) -> dict[str, Any]:
        """What was submitted, for a user interface that shows it before it is committed."""
        event: dict[str, Any] = msgspec.json.decode(self._body)
        return event

    @property
    def result(self) -> Outcome | None:
        """What became of it; None as long as that is not known."""
        return self._get_result()

    async def outcome(self) -> Outcome:
        """Waits for what becomes of it, however long the server is away. Raises ClosedError if the client is closed."""
        return await self._wait_for_outcome()

    def has_same_content(self, other: PreparedEvent) -> bool:
        """Whether it has this content."""
        return self._content == (other.fingerprint, other.expected_committed_id)
