"""Protocol of pushing, without I/O: the bounds of the next push, and the effect of each answer.

Every push begins at the head of the outbox. After a failure nothing is known about the pushed deltas, so all of them
are pushed again. A gateway accepts or refuses a push as a whole, so the deltas before a refused one are pushed without
it.
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
    """Limits of the next push."""

    before: int | None
    """Only deltas whose number in the outbox is below this one."""
    deltas_max: int


class _HeldDelta(Struct, frozen=True):
    """A delta that is not pushed before a pause has passed."""

    number: int
    pause: RetryPause


class PushProtocol:
    """State of pushing one outbox."""

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
        """Number of withdrawals. A failed push from before a withdrawal may be about a withdrawn delta."""

    @property
    def bounds(self) -> PushBounds:
        """Limits of the next push."""
        return PushBounds(None if self._held is None else self._held.number, self._deltas_max)

    def get_held_pause(self) -> RetryPause | None:
        """Return the pause of a held delta when everything before it is pushed; None without a held delta."""
        return None if self._held is None else self._held.pause

    def release(self) -> None:
        """Allow a held delta to be pushed."""
        self._held = None

    def on_discarded(self) -> None:
        """Reset the refusal after deltas, perhaps the refused one, were taken out of the outbox."""
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
            # The clocks of deltas in the outbox rise, so the gateway may accept the deltas before the rejected one.
            self.clock_wait_ms = max(answer.retry_after_ms, 1)
            self._held = _HeldDelta((rejected_entry or batch[0]).number, RetryPause(answer.retry_after_ms))
            return None
        if rejected_entry is not None and answer.code in _DELTA_ERROR_CODES:
            self._handle_refusal(rejected_entry, answer)
            return None
        if answer.code == TOO_LARGE:  # without an index the push as a whole is too large
            self._ceiling = self._deltas_max = len(batch) // 2
            return None
        if answer.code in (RATE_LIMITED, SERVER_BUSY):  # the gateway can accept a smaller push sooner
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
        """Forget the refusal. It may have been the reason for small pushes, so the next push may be large again."""
        self.refusal, self.refused_number = None, 0
        self._ceiling = self._configured_max

    def _handle_refusal(self, entry: OutboxEntry, error: GatewayRefusedError) -> None:
        delta = entry.decode()
        self.refusal = Refusal(entry.delta_id.hex(), delta.table, delta.row_id, error.code.upper(), error.message)
        self.refused_number = entry.number
        self._held = _HeldDelta(entry.number, RetryPause(error.retry_after_ms, is_long=True))


def _find_rejected_entry(batch: Sequence[OutboxEntry], error: GatewayRefusedError) -> OutboxEntry | None:
    """Return the delta that the gateway refuses.

    Without an index, it is a delta that is too large and was pushed alone.
    """
    if error.index is not None:
        return batch[error.index] if 0 <= error.index < len(batch) else None
    return batch[0] if error.code == TOO_LARGE and len(batch) == 1 else None
