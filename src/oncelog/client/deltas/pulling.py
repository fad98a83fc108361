"""What is read next from the gateway, and what follows from it. Decides, and does nothing itself.

Whoever carries it out asks for the `next_request`, gives the answer to `answered`, does what comes back to the file,
and says `done`. Only then anything here has changed: if the file cannot be written, the same is asked for again.
"""

from msgspec import Struct

from oncelog.client.deltas.messages import (
    HISTORY_CHANGED,
    Fault,
    LiveCompacted,
    LiveDeltas,
    PulledPage,
    SnapshotPage,
    SnapshotRow,
    Unanswered,
)
from oncelog.client.patience import Pause
from oncelog.core.merge import RowDelta
from oncelog.errors import ProtocolError

# --- requests


class Pull(Struct, frozen=True):
    """The deltas after a cursor."""

    since: int
    epoch: str


class ReadSnapshot(Struct, frozen=True):
    """A page of all rows."""

    page: str


class Follow(Struct, frozen=True):
    """What is committed from now on."""

    since: int
    epoch: str


Request = Pull | ReadSnapshot | Follow

# --- what is to be done


class Apply(Struct, frozen=True):
    """Merge deltas and move the cursor."""

    deltas: tuple[RowDelta, ...]
    cursor: int
    epoch: str
    is_caught_up: bool


class Join(Struct, frozen=True):
    """Merge rows of a snapshot. Behind the last page the cursor moves."""

    rows: tuple[SnapshotRow, ...]
    cursor: int
    epoch: str
    next: str


class Stage(Struct, frozen=True):
    """Lay rows of a snapshot aside. Behind the last page they become the rows, and the cursor moves."""

    rows: tuple[SnapshotRow, ...]
    is_first: bool
    cursor: int
    epoch: str
    next: str
    horizon: int | None = None


class Reset(Struct, frozen=True):
    """Replace all rows by those of the snapshot."""

    message: str
    is_compacted: bool = False
    """Not because the history is another one: the snapshot lacks deleted rows that the client may still have."""


class ReadAnew(Struct, frozen=True):
    """The snapshot is read from its first page on. Nothing is to be done to the file."""


Effect = Apply | Join | Stage | Reset | ReadAnew


class _Reading(Struct, frozen=True):
    """A snapshot that is being read."""

    page: str = ""
    cursor: int | None = None
    """None before the first page."""
    epoch: str = ""


class Pulling:
    """How far one client has read its gateway."""

    def __init__(self, cursor: int, epoch: str) -> None:
        self.cursor = cursor
        self.epoch = epoch
        self.is_resetting = False
        self.is_caught_up = False
        self.is_let_in = True
        self.last_error: str | None = None
        self._reading: _Reading | None = None

    def next_request(self, *, is_reset_wanted: bool) -> Request:
        """What to ask for now. Whether all rows are to be read anew is what the file says."""
        if is_reset_wanted and not self.is_resetting:
            self.is_resetting = True
            self._reading = _Reading()
        if self._reading is not None:
            return ReadSnapshot(self._reading.page)
        request = Follow if self.is_caught_up else Pull
        return request(self.cursor, self.epoch)

    def pull_again(self) -> None:
        """Whoever follows asks in between whether that is all."""
        self.is_caught_up = False

    def acknowledged(self, epoch: str) -> None:
        """A push was acknowledged in this history. Before the first page it is the one to read, as the file says too.

        A gateway that is restored before the first page may have lost the push: then all rows are to be replaced.
        """
        self.epoch = self.epoch or epoch

    def connected(self, epoch: str) -> Reset | None:
        """What is live is of this history."""
        return Reset(f"its epoch is {epoch}, was {self.epoch}") if self._is_of_other_history(epoch) else None

    def answered(
        self, request: Request, answer: PulledPage | SnapshotPage | LiveDeltas | LiveCompacted | Fault | Unanswered
    ) -> Effect | Pause:
        """What follows. Raises ProtocolError."""
        match answer:
            case Unanswered():
                self._failed(answer)
                return Pause()
            case Fault():
                return self._refused(request, answer)
            case PulledPage():
                return self._pulled(request, answer)
            case SnapshotPage():
                return self._read(answer)
            case LiveDeltas():
                # A pull in between may have gone further.
                return Apply(answer.deltas, max(answer.cursor, self.cursor), self.epoch, is_caught_up=True)
            case LiveCompacted():
                return ReadAnew()

    def done(self, effect: Effect) -> None:
        """It lies in the file."""
        self.last_error = None
        self.is_let_in = True
        match effect:
            case Apply():
                self.cursor, self.epoch, self.is_caught_up = effect.cursor, effect.epoch, effect.is_caught_up
            case Join() | Stage():
                self._read_on(effect)
            case Reset():
                self.is_caught_up = False
            case ReadAnew():
                self._reading = _Reading()

    def _pulled(self, request: Request, page: PulledPage) -> Effect:
        if self._is_of_other_history(page.epoch):
            return Reset(f"its epoch is {page.epoch}, was {self.epoch}")
        if page.is_compacted:
            return ReadAnew()
        if not isinstance(request, Pull) or page.cursor < request.since:
            raise ProtocolError(f"the gateway's page ends at {page.cursor}, before it begins")
        if page.has_more and page.cursor == request.since:
            raise ProtocolError(f"the gateway's page is empty, and yet there is more after {page.cursor}")
        return Apply(page.deltas, max(page.cursor, self.cursor), page.epoch, is_caught_up=not page.has_more)

    def _read(self, page: SnapshotPage) -> Effect:
        reading = self._reading
        if reading is None:
            raise ProtocolError("the gateway sends a snapshot that nobody has asked for")
        is_first = reading.cursor is None
        if not is_first and (page.cursor, page.epoch) != (reading.cursor, reading.epoch):
            return ReadAnew()  # a backup was restored in between
        if self.is_resetting:
            return Stage(page.rows, is_first, page.cursor, page.epoch, page.next, page.horizon)
        if self._is_of_other_history(page.epoch):
            return Reset(f"its epoch is {page.epoch}, was {self.epoch}")
        if page.horizon is not None:
            return Reset("its snapshot lacks deleted rows", is_compacted=True)
        return Join(page.rows, page.cursor, page.epoch, page.next)

    def _read_on(self, effect: Join | Stage) -> None:
        if effect.next:
            self._reading = _Reading(effect.next, effect.cursor, effect.epoch)
            if isinstance(effect, Join):
                self.epoch = effect.epoch  # the file has rows of this history: rows of another one must replace them
            return
        self.cursor, self.epoch = effect.cursor, effect.epoch
        self.is_resetting = self.is_caught_up = False
        self._reading = None

    def _refused(self, request: Request, fault: Fault) -> Effect | Pause:
        self._failed(fault)
        if fault.code == HISTORY_CHANGED:
            return ReadAnew() if self.is_resetting else Reset(fault.message, fault.is_compacted)
        if fault.is_transient:
            return Pause(fault.retry_after_ms)
        if isinstance(request, ReadSnapshot) and request.page:
            self._reading = _Reading()  # its pages may mean nothing to a gateway that was started anew
            return Pause(fault.retry_after_ms)
        self.is_let_in = False
        return Pause(fault.retry_after_ms, is_long=True)

    def _failed(self, answer: Fault | Unanswered) -> None:
        self.last_error = str(answer)
        self.is_caught_up = False  # whoever comes back asks first what there is

    def _is_of_other_history(self, epoch: str) -> bool:
        return self.epoch not in ("", epoch)
