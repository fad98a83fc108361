"""Queue of acknowledgements, which submits one at a time for each user and chat.

Clients acknowledge every message. Of the acknowledgements that arrive during a commit, the queue submits only the one
with the highest sequence, because it covers the others.
"""

from collections.abc import Callable
from typing import Final

from msgspec import Struct

from oncelog import error_codes
from oncelog.core.values import Acknowledge, Reason, Refused, Verdict
from oncelog.engine.log import Log
from oncelog.errors import OncelogError
from oncelog.server.chat.service import refusal_error
from oncelog.server.errors import BUSY_RETRY_AFTER_MS, ApiError, to_api_error

PENDING_ACKS_MAX: Final = 1000
"""Maximum number of queued acknowledgements per user and chat. The queue keeps the lower ones too, because the log may
refuse the highest."""


class PendingAck(Struct, eq=False, gc=False):
    """An acknowledgement and the callback for its refusal."""

    sequence: int
    on_refused: Callable[[ApiError], None]


class AckQueue:
    """The queued acknowledgements of a server."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._batches: dict[tuple[str, str], _AckBatch] = {}

    def submit(self, scope: str, user_id: str, pending: PendingAck) -> None:
        """Submit an acknowledgement immediately, or together with others after the current commit."""
        batch = self._batches.get((scope, user_id))
        if batch is not None:
            batch.enqueue(pending)
        else:
            batch = self._batches[scope, user_id] = _AckBatch(self, scope, user_id)
            batch.enqueue(pending)
            self.flush(batch)

    def flush(self, batch: "_AckBatch") -> None:
        """Submit the batch's highest queued acknowledgement, or remove the batch if it is empty."""
        while batch.queued:
            batch.in_flight, batch.queued = batch.queued, []
            highest = max(ack.sequence for ack in batch.in_flight)
            try:
                verdict = self._log.submit_nowait(Acknowledge(batch.scope, batch.user_id, highest), batch)
            except OncelogError as error:
                batch.fail(to_api_error(error))
                continue
            if verdict is None:
                return
            batch.apply_verdict(verdict)
        self._batches.pop((batch.scope, batch.user_id), None)


class _AckBatch:
    """The acknowledgements of one user in one chat, and the committer's `VerdictSink` for them."""

    __slots__ = ("_acks", "in_flight", "queued", "scope", "user_id")

    def __init__(self, acks: AckQueue, scope: str, user_id: str) -> None:
        self._acks = acks
        self.scope = scope
        self.user_id = user_id
        self.in_flight: list[PendingAck] = []
        self.queued: list[PendingAck] = []

    def enqueue(self, pending: PendingAck) -> None:
        self.queued.append(pending)
        if len(self.queued) > PENDING_ACKS_MAX:
            # Refuse the acknowledgement with the lowest sequence now, because the queue cannot keep it to notify its
            # sender later. A higher one may still cover it.
            lowest = min(self.queued, key=lambda ack: ack.sequence)
            self.queued.remove(lowest)
            message = f"more than {PENDING_ACKS_MAX} acknowledgements for this chat are queued"
            lowest.on_refused(ApiError(error_codes.SERVER_BUSY, message, retry_after_ms=BUSY_RETRY_AFTER_MS))

    def done(self) -> bool:
        return False

    def set_result(self, result: Verdict, /) -> None:
        self.apply_verdict(result)
        self._acks.flush(self)

    def set_exception(self, exception: Exception, /) -> None:
        self.fail(to_api_error(exception))
        self._acks.flush(self)

    def apply_verdict(self, verdict: Verdict) -> None:
        """Settle the submitted acknowledgements.

        A successful acknowledgement gets no reply. If the verdict is a refusal, acknowledgements beyond the end of the
        chat are refused and the others are queued again.
        """
        submitted, self.in_flight = self.in_flight, []
        if not isinstance(verdict, Refused):
            return
        if verdict.reason is not Reason.INVALID_ACKNOWLEDGEMENT:
            _notify(submitted, refusal_error(verdict))
            return
        _notify([ack for ack in submitted if ack.sequence > verdict.current], refusal_error(verdict))
        self.queued.extend(ack for ack in submitted if ack.sequence <= verdict.current)

    def fail(self, error: ApiError) -> None:
        """Report an unknown outcome for the submitted acknowledgements."""
        submitted, self.in_flight = self.in_flight, []
        _notify(submitted, error)


def _notify(pending: list[PendingAck], error: ApiError) -> None:
    for ack in pending:
        ack.on_refused(error)
