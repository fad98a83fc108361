"""What is pushed next, and what follows from the answer. Decides, and does nothing itself.

The outbox is pushed from its head, always: after a failure nobody knows what has arrived, so all of it goes again. A
push is taken as a whole or not at all, so a delta that is refused is kept from those before it: they go without it.
"""

from collections.abc import Sequence
from typing import Final

from msgspec import Struct

from oncelog.client.deltas.codec import GatewayRefusedError, OutboxEntry, PushReply, describe_failure
from oncelog.client.deltas.values import Refusal
from oncelog.client.runtime.backoff import RetryPause
from oncelog.error_codes import (
    BAD_REQUEST,
    CLOCK_DRIFT,
    DELTA_ID_MISMATCH,
    FORBIDDEN,
    INVALID,
    RATE_LIMITED,
    SERVER_BUSY,
    TOO_LARGE,
)
from oncelog.errors import ClientError

_DELTA_ERROR_CODES: Final = frozenset({BAD_REQUEST, DELTA_ID_MISMATCH, FORBIDDEN, TOO_LARGE, INVALID})


class PushBounds(Struct, frozen=True):
    """Of the next push."""

    before: int | None
    """Only what is before this number in the outbox."""
    deltas_max: int


class _HeldDelta(Struct, frozen=True):
    """A delta that is not to be pushed for now."""

    number: int
    pause: RetryPause


class PushProtocol:
    """The state of one outbox's way to its gateway."""

    def __init__(self, deltas_max: int) -> None:
        self._configured_max = deltas_max
        self._ceiling = deltas_max
        self._deltas_max = deltas_max
        self._held: _HeldDelta | None = None
        self.refusal: Refusal | None = None
        self.refused_number = 0
        self.clock_wait_ms = 0
        self.last_error: str | None = None
        self.is_authorized = True
        self.discards = 0
        """How often deltas were taken out of the outbox: an answer to a push of before may be about one of them."""

    @property
    def bounds(self) -> PushBounds:
        """What may be pushed."""
        return PushBounds(None if self._held is None else self._held.number, self._deltas_max)

    def get_held_pause(self) -> RetryPause | None:
        """All within the bounds is pushed. None if there was no more to push, else how long the held one waits."""
        return None if self._held is None else self._held.pause

    def release(self) -> None:
        """What was held may be tried again."""
        self._held = None

    def on_discarded(self) -> None:
        """Deltas were taken out of the outbox, and perhaps the one that was refused."""
        self.discards += 1
        self._held = None
        self.clock_wait_ms = 0
        self._forget_refusal()

    def handle_answer(self, batch: Sequence[OutboxEntry], answer: PushReply | ClientError) -> RetryPause | None:
        """Return the pause before the next push, or None. Save an acknowledgement in the outbox before this call."""
        if isinstance(answer, PushReply):
            self._handle_acknowledgement(batch)
            return None
        self.last_error = describe_failure(answer)
        if not isinstance(answer, GatewayRefusedError):
            return RetryPause()
        self.is_authorized = True
        rejected_entry = _find_rejected_entry(batch, answer)
        if answer.code == CLOCK_DRIFT:
            # The clocks of deltas rise: the deltas before the rejected one may be in time.
            self.clock_wait_ms = max(answer.retry_after_ms, 1)
            self._held = _HeldDelta((rejected_entry or batch[0]).number, RetryPause(answer.retry_after_ms))
            return None
        if rejected_entry is not None and answer.code in _DELTA_ERROR_CODES:
            self._handle_refusal(rejected_entry, answer)
            return None
        if answer.code == TOO_LARGE:  # without an index: the push as a whole is too large
            self._ceiling = self._deltas_max = len(batch) // 2
            return None
        if answer.code in (RATE_LIMITED, SERVER_BUSY):  # a smaller push finds room sooner
            self._deltas_max = max(1, len(batch) // 2)
        if answer.is_transient:
            return RetryPause(answer.retry_after_ms)
        self.is_authorized = False
        return RetryPause(answer.retry_after_ms, is_long=True)

    def _handle_acknowledgement(self, batch: Sequence[OutboxEntry]) -> None:
        self._deltas_max = min(2 * self._deltas_max, self._ceiling)
        self.is_authorized = True
        if self._held is None:
            self.last_error = None
            self.clock_wait_ms = 0
        if self.refusal is not None and batch[-1].number >= self.refused_number:
            self._forget_refusal()

    def _forget_refusal(self) -> None:
        """The refused delta may have been the reason for small pushes, so the next one may be large again."""
        self.refusal, self.refused_number = None, 0
        self._ceiling = self._configured_max

    def _handle_refusal(self, entry: OutboxEntry, error: GatewayRefusedError) -> None:
        delta = entry.decode()
        self.refusal = Refusal(entry.delta_id.hex(), delta.table, delta.row_id, error.code.upper(), error.message)
        self.refused_number = entry.number
        self._held = _HeldDelta(entry.number, RetryPause(error.retry_after_ms, is_long=True))


def _find_rejected_entry(batch: Sequence[OutboxEntry], error: GatewayRefusedError) -> OutboxEntry | None:
    """Return the delta that the gateway refuses. Without an index that is a delta pushed alone that is too large."""
    if error.index is not None:
        return batch[error.index] if 0 <= error.index < len(batch) else None
    return batch[0] if error.code == TOO_LARGE and len(batch) == 1 else None
