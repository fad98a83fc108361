"""Protocol of reading from the gateway, without I/O: the next request, and the effect of its answer on the store.

The puller takes `next_request`, gives the answer to `handle_answer`, applies the returned effect to the file, and calls
`confirm`. The state changes only then: if the file cannot be written, the same request comes again.
"""

from msgspec import Struct

from oncelog.client.deltas.codec import (
    HISTORY_CHANGED,
    DeltaPage,
    LiveCompacted,
    LiveDeltas,
    NoReply,
    ServerError,
    SnapshotPage,
    SnapshotRow,
)
from oncelog.client.runtime.backoff import RetryPause
from oncelog.core.merge import RowDelta
from oncelog.errors import ProtocolError

# --- requests


class PullDeltas(Struct, frozen=True):
    """The deltas after a cursor."""

    since: int
    epoch: str


class ReadSnapshot(Struct, frozen=True):
    """A page of all rows."""

    page: str


class FollowDeltas(Struct, frozen=True):
    """What is committed from now on."""

    since: int
    epoch: str


PullRequest = PullDeltas | ReadSnapshot | FollowDeltas

# --- what is to be done


class ApplyDeltas(Struct, frozen=True):
    """Merge deltas and move the cursor."""

    deltas: tuple[RowDelta, ...]
    cursor: int
    epoch: str
    is_caught_up: bool


class JoinRows(Struct, frozen=True):
    """Merge rows of a snapshot. Behind the last page the cursor moves."""

    rows: tuple[SnapshotRow, ...]
    cursor: int
    epoch: str
    next: str


class StageRows(Struct, frozen=True):
    """Lay rows of a snapshot aside. Behind the last page they become the rows, and the cursor moves."""

    rows: tuple[SnapshotRow, ...]
    is_first: bool
    cursor: int
    epoch: str
    next: str
    horizon: int | None = None


class ResetRows(Struct, frozen=True):
    """Replace all rows by those of the snapshot."""

    message: str
    is_compacted: bool = False
    """Not because the history is another one: the snapshot lacks deleted rows that the client may still have."""


class RestartSnapshot(Struct, frozen=True):
    """The snapshot is read from its first page on. Nothing is to be done to the file."""


PullEffect = ApplyDeltas | JoinRows | StageRows | ResetRows | RestartSnapshot


class _SnapshotProgress(Struct, frozen=True):
    """A snapshot that is being read."""

    page: str = ""
    cursor: int | None = None
    """None before the first page."""
    epoch: str = ""


class PullProtocol:
    """How far one client has read its gateway."""

    def __init__(self, cursor: int, epoch: str) -> None:
        self.cursor = cursor
        self.epoch = epoch
        self.is_resetting = False
        self.is_caught_up = False
        self.is_authorized = True
        self.last_error: str | None = None
        self._snapshot: _SnapshotProgress | None = None

    def next_request(self, *, is_reset_wanted: bool) -> PullRequest:
        """What to ask for now. Whether all rows are to be read anew is what the file says."""
        if is_reset_wanted and not self.is_resetting:
            self.is_resetting = True
            self._snapshot = _SnapshotProgress()
        if self._snapshot is not None:
            return ReadSnapshot(self._snapshot.page)
        request = FollowDeltas if self.is_caught_up else PullDeltas
        return request(self.cursor, self.epoch)

    def pull_again(self) -> None:
        """Whoever follows asks in between whether that is all."""
        self.is_caught_up = False

    def on_acknowledged(self, epoch: str) -> None:
        """A push was acknowledged in this history. Before the first page it is the one to read, as the file says too.

        A gateway that is restored before the first page may have lost the push: then all rows are to be replaced.
        """
        self.epoch = self.epoch or epoch

    def on_connected(self, epoch: str) -> ResetRows | None:
        """What is live is of this history."""
        return ResetRows(f"its epoch is {epoch}, was {self.epoch}") if self._is_of_other_history(epoch) else None

    def handle_answer(
        self,
        request: PullRequest,
        answer: DeltaPage | SnapshotPage | LiveDeltas | LiveCompacted | ServerError | NoReply,
    ) -> PullEffect | RetryPause:
        """What follows. Raises ProtocolError."""
        match answer:
            case NoReply():
                self._record_failure(answer)
                return RetryPause()
            case ServerError():
                return self._handle_error(request, answer)
            case DeltaPage():
                return self._handle_delta_page(request, answer)
            case SnapshotPage():
                return self._handle_snapshot_page(answer)
            case LiveDeltas():
                # A pull in between may have gone further.
                return ApplyDeltas(answer.deltas, max(answer.cursor, self.cursor), self.epoch, is_caught_up=True)
            case LiveCompacted():
                return RestartSnapshot()

    def confirm(self, effect: PullEffect) -> None:
        """It lies in the file."""
        self.last_error = None
        self.is_authorized = True
        match effect:
            case ApplyDeltas():
                self.cursor, self.epoch, self.is_caught_up = effect.cursor, effect.epoch, effect.is_caught_up
            case JoinRows() | StageRows():
                self._advance_snapshot(effect)
            case ResetRows():
                self.is_caught_up = False
            case RestartSnapshot():
                self._snapshot = _SnapshotProgress()

    def _handle_delta_page(self, request: PullRequest, page: DeltaPage) -> PullEffect:
        if self._is_of_other_history(page.epoch):
            return ResetRows(f"its epoch is {page.epoch}, was {self.epoch}")
        if page.is_compacted:
            return RestartSnapshot()
        if not isinstance(request, PullDeltas) or page.cursor < request.since:
            raise ProtocolError(f"the gateway's page ends at {page.cursor}, before it begins")
        if page.has_more and page.cursor == request.since:
            raise ProtocolError(f"the gateway's page is empty, and yet there is more after {page.cursor}")
        return ApplyDeltas(page.deltas, max(page.cursor, self.cursor), page.epoch, is_caught_up=not page.has_more)

    def _handle_snapshot_page(self, page: SnapshotPage) -> PullEffect:
        snapshot = self._snapshot
        if snapshot is None:
            raise ProtocolError("the gateway sends a snapshot that nobody has asked for")
        is_first = snapshot.cursor is None
        if not is_first and (page.cursor, page.epoch) != (snapshot.cursor, snapshot.epoch):
            return RestartSnapshot()  # a backup was restored in between
        if self.is_resetting:
            return StageRows(page.rows, is_first, page.cursor, page.epoch, page.next, page.horizon)
        if self._is_of_other_history(page.epoch):
            return ResetRows(f"its epoch is {page.epoch}, was {self.epoch}")
        if page.horizon is not None:
            return ResetRows("its snapshot lacks deleted rows", is_compacted=True)
        return JoinRows(page.rows, page.cursor, page.epoch, page.next)

    def _advance_snapshot(self, effect: JoinRows | StageRows) -> None:
        if effect.next:
            self._snapshot = _SnapshotProgress(effect.next, effect.cursor, effect.epoch)
            if isinstance(effect, JoinRows):
                self.epoch = effect.epoch  # the file has rows of this history: rows of another one must replace them
            return
        self.cursor, self.epoch = effect.cursor, effect.epoch
        self.is_resetting = self.is_caught_up = False
        self._snapshot = None

    def _handle_error(self, request: PullRequest, error: ServerError) -> PullEffect | RetryPause:
        self._record_failure(error)
        if error.code == HISTORY_CHANGED:
            return RestartSnapshot() if self.is_resetting else ResetRows(error.message, error.is_compacted)
        if error.is_transient:
            return RetryPause(error.retry_after_ms)
        if isinstance(request, ReadSnapshot) and request.page:
            self._snapshot = _SnapshotProgress()  # its pages may mean nothing to a gateway that was started anew
            return RetryPause(error.retry_after_ms)
        self.is_authorized = False
        return RetryPause(error.retry_after_ms, is_long=True)

    def _record_failure(self, answer: ServerError | NoReply) -> None:
        self.last_error = str(answer)
        self.is_caught_up = False  # whoever comes back asks first what there is

    def _is_of_other_history(self, epoch: str) -> bool:
        return self.epoch not in ("", epoch)
