"""The push and pull protocols, without I/O.

Pushing: every push begins at the head of the outbox. After a failure the client does not know which deltas were
committed, so it pushes all of them again. A gateway accepts all deltas of a push or none, so the client pushes the
deltas before a refused one again without it.

Pulling: the puller sends `next_request`, passes the answer to `handle_answer`, applies the returned effect to the file
and calls `confirm`. Only then does the state change: if the file cannot be written, the same request is sent again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from oncelog.client.deltas.codec import (
    DeltaPage,
    GatewayRefusedError,
    OutboxEntry,
    PushReply,
    RowPage,
    SnapshotPage,
    describe_failure,
)
from oncelog.client.deltas.values import Refusal
from oncelog.client.runtime.backoff import RetryPause
from oncelog.core.merge import RowDelta
from oncelog.error_codes import (
    BAD_REQUEST,
    CLOCK_DRIFT,
    DELTA_ID_MISMATCH,
    FORBIDDEN,
    HISTORY_CHANGED,
    INVALID,
    RATE_LIMITED,
    SERVER_BUSY,
    TOO_LARGE,
)
from oncelog.errors import ClientError, ProtocolError

_DELTA_ERROR_CODES: Final = frozenset({BAD_REQUEST, DELTA_ID_MISMATCH, FORBIDDEN, TOO_LARGE, INVALID})


class HeldDelta(Struct, frozen=True):
    """A delta that is not pushed until a pause ends. The pause begins once the deltas before it are pushed."""

    number: int
    pause: RetryPause


class PushProtocol:
    """State of pushing one outbox."""

    def __init__(self, deltas_max: int) -> None:
        self._configured_max = deltas_max
        self._ceiling = deltas_max
        self.deltas_max = deltas_max
        """Maximum number of deltas in the next push."""
        self.held: HeldDelta | None = None
        """If set, the next push contains only deltas before this one."""
        self.refusal: Refusal | None = None
        self.refused_number = 0
        self.clock_wait_ms = 0
        self.last_error: str | None = None
        self.is_authorized = True
        self.discards = 0
        """Number of withdrawals so far. A push sent before a withdrawal may have failed because of a withdrawn
        delta."""

    def release(self) -> None:
        """Allow a held delta to be pushed."""
        self.held = None

    def on_discarded(self) -> None:
        """Reset the refusal after deltas, possibly the refused one, were removed from the outbox."""
        self.discards += 1
        self.held = None
        self.clock_wait_ms = 0
        self._forget_refusal()

    def handle_answer(self, batch: Sequence[OutboxEntry], answer: PushReply | ClientError) -> RetryPause | None:
        """Process the answer to a push, and return the pause before the next push, or None.

        An acknowledgement must be saved in the outbox before this call.
        """
        if isinstance(answer, PushReply):
            self._handle_acknowledgement(batch)
            return None
        self.last_error = describe_failure(answer)
        if not isinstance(answer, GatewayRefusedError):
            return RetryPause()
        self.is_authorized = True
        rejected_entry = _find_rejected_entry(batch, answer)
        if answer.code == CLOCK_DRIFT:
            # Clock readings increase along the outbox, so the gateway may accept the deltas before the rejected one.
            self.clock_wait_ms = max(answer.retry_after_ms, 1)
            self.held = HeldDelta((rejected_entry or batch[0]).number, RetryPause(answer.retry_after_ms))
            return None
        if rejected_entry is not None and answer.code in _DELTA_ERROR_CODES:
            self._handle_refusal(rejected_entry, answer)
            return None
        if answer.code == TOO_LARGE:  # without an index, the whole push is too large
            self._ceiling = self.deltas_max = len(batch) // 2
            return None
        if answer.code in (RATE_LIMITED, SERVER_BUSY):  # the gateway can accept a smaller push sooner
            self.deltas_max = max(1, len(batch) // 2)
        if answer.is_transient:
            return RetryPause(answer.retry_after_ms)
        self.is_authorized = False
        return RetryPause(answer.retry_after_ms, is_long=True)

    def _handle_acknowledgement(self, batch: Sequence[OutboxEntry]) -> None:
        self.deltas_max = min(2 * self.deltas_max, self._ceiling)
        self.is_authorized = True
        if self.held is None:
            self.last_error = None
            self.clock_wait_ms = 0
        if self.refusal is not None and batch[-1].number >= self.refused_number:
            self._forget_refusal()

    def _forget_refusal(self) -> None:
        """Clear the refusal. It may have been the reason for small pushes, so allow large ones again."""
        self.refusal, self.refused_number = None, 0
        self._ceiling = self._configured_max

    def _handle_refusal(self, entry: OutboxEntry, error: GatewayRefusedError) -> None:
        delta = entry.decode()
        self.refusal = Refusal(entry.delta_id.hex(), delta.table, delta.row_id, error.code.upper(), error.message)
        self.refused_number = entry.number
        self.held = HeldDelta(entry.number, RetryPause(error.retry_after_ms, is_long=True))


def _find_rejected_entry(batch: Sequence[OutboxEntry], error: GatewayRefusedError) -> OutboxEntry | None:
    """Return the delta that the gateway refuses, or None if it refuses the whole push.

    An error without an index can mean a delta that was pushed alone and is too large.
    """
    if error.index is not None:
        return batch[error.index] if 0 <= error.index < len(batch) else None
    return batch[0] if error.code == TOO_LARGE and len(batch) == 1 else None


# --- requests


class ReadDeltas(Struct, frozen=True):
    """Read the stored deltas after a cursor or, with `is_live`, each new delta as the gateway commits it."""

    since: int
    epoch: str
    is_live: bool = False


class ReadSnapshot(Struct, frozen=True):
    """Read a page of all rows."""

    page: str


PullRequest = ReadDeltas | ReadSnapshot

# --- effects


class StageRows(Struct, frozen=True):
    """Stage the rows of a page. After the last page they replace all rows, and the cursor moves."""

    page: RowPage
    is_first: bool


class ResetRows(Struct, frozen=True):
    """Start replacing all rows with the rows of a snapshot."""

    message: str
    is_compacted: bool = False
    """Whether the history is the same, but the snapshot lacks deleted rows that the client may still have."""


class RestartSnapshot(Struct, frozen=True):
    """Restart reading the snapshot from its first page. The file does not change."""


PullEffect = DeltaPage[RowDelta] | RowPage | StageRows | ResetRows | RestartSnapshot
"""A page is itself an effect: the client merges it into the rows. A page of deltas and the last page of a snapshot also
move the cursor."""


_NO_PAGE: Final = RowPage((), 0, "", "")
"""Value of `PullProtocol._snapshot` before the first page of a snapshot has arrived."""


@dataclass(slots=True, eq=False)
class PullProtocol:
    """Tracks how far one client has read the deltas of its gateway."""

    cursor: int
    epoch: str
    is_resetting: bool = False
    is_caught_up: bool = False
    is_authorized: bool = True
    last_error: str | None = None
    _snapshot: RowPage | None = None
    """Last received page of the snapshot that is being read, or None if no snapshot is being read."""

    def next_request(self, *, is_reset_wanted: bool) -> PullRequest:
        """Return the next request. `is_reset_wanted` is the flag in the file: whether all rows must be replaced."""
        if is_reset_wanted and not self.is_resetting:
            self.is_resetting = True
            self._snapshot = _NO_PAGE
        if self._snapshot is not None:
            return ReadSnapshot(self._snapshot.next)
        return ReadDeltas(self.cursor, self.epoch, self.is_caught_up)

    def pull_again(self) -> None:
        """Request a page next, even though the live connection delivers all deltas."""
        self.is_caught_up = False

    def on_acknowledged(self, epoch: str) -> None:
        """Process the epoch of an acknowledged push.

        Before the first page arrives, the client adopts this epoch, here and in the file. If a restore then changes the
        epoch, the client replaces all rows when the first page arrives, because the gateway may have lost the push.
        """
        self.epoch = self.epoch or epoch

    def handle_answer(
        self, request: PullRequest, answer: DeltaPage[RowDelta] | RowPage | ClientError
    ) -> PullEffect | RetryPause:
        """Return the effect of an answer on the file, or the pause before the next request. Raises ProtocolError."""
        match answer:
            case DeltaPage():
                return self._handle_delta_page(request, answer)
            case SnapshotPage():
                return self._handle_snapshot_page(answer)
            case ClientError():
                self.last_error = describe_failure(answer)
                self.is_caught_up = False  # the client pulls the stored deltas before it goes live
                return (
                    self._handle_refusal(request, answer) if isinstance(answer, GatewayRefusedError) else RetryPause()
                )

    def confirm(self, effect: PullEffect) -> None:
        """Update the state after the effect has been saved."""
        self.last_error = None
        self.is_authorized = True
        match effect:
            case DeltaPage():
                self.cursor, self.epoch, self.is_caught_up = effect.cursor, effect.epoch, not effect.has_more
            case SnapshotPage():
                self._advance_snapshot(effect)
                # The file now has rows of this history. Rows from a different history replace them and are not merged.
                self.epoch = effect.epoch
            case StageRows():
                self._advance_snapshot(effect.page)
            case ResetRows():
                self.is_caught_up = False
            case RestartSnapshot():
                self._snapshot = _NO_PAGE

    def _handle_delta_page(self, request: PullRequest, page: DeltaPage[RowDelta]) -> PullEffect:
        if self._is_of_other_history(page.epoch):
            return ResetRows(f"its epoch is {page.epoch}, but was {self.epoch}")
        if page.is_compacted:
            return RestartSnapshot()
        if not isinstance(request, ReadDeltas) or (page.cursor < request.since and not request.is_live):
            raise ProtocolError(f"the gateway sent a page that ends at {page.cursor}, before its start")
        if page.has_more and page.cursor == request.since:
            raise ProtocolError(f"the gateway sent an empty page but reports more deltas after {page.cursor}")
        return replace(page, cursor=max(page.cursor, self.cursor))  # an earlier pull may have moved the cursor further

    def _handle_snapshot_page(self, page: RowPage) -> PullEffect:
        snapshot = self._snapshot
        if snapshot is None:
            raise ProtocolError("the gateway sent a snapshot that the client did not request")
        is_first = snapshot is _NO_PAGE
        if not is_first and (page.cursor, page.epoch) != (snapshot.cursor, snapshot.epoch):
            return RestartSnapshot()  # a backup was restored in the meantime
        if self.is_resetting:
            return StageRows(page, is_first)
        if self._is_of_other_history(page.epoch):
            return ResetRows(f"its epoch is {page.epoch}, but was {self.epoch}")
        if page.horizon is not None:
            return ResetRows("its snapshot lacks deleted rows", is_compacted=True)
        return page

    def _advance_snapshot(self, page: RowPage) -> None:
        if page.next:
            self._snapshot = page
            return
        self.cursor, self.epoch = page.cursor, page.epoch
        self.is_resetting = self.is_caught_up = False
        self._snapshot = None

    def _handle_refusal(self, request: PullRequest, error: GatewayRefusedError) -> PullEffect | RetryPause:
        if error.code == HISTORY_CHANGED:
            return RestartSnapshot() if self.is_resetting else ResetRows(error.message, error.is_compacted)
        pause = RetryPause(error.retry_after_ms)
        if error.is_transient:
            return pause
        if isinstance(request, ReadSnapshot) and request.page:
            self._snapshot = _NO_PAGE  # a restarted gateway may not recognise its page tokens
            return pause
        self.is_authorized = False
        return RetryPause(error.retry_after_ms, is_long=True)

    def _is_of_other_history(self, epoch: str) -> bool:
        return self.epoch not in ("", epoch)
