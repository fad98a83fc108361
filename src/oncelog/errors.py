"""The one tree of errors. Outcomes of a submission are values (`core.values`), never one of these.

OncelogError
├── CanonicalError            a value has no canonical form; says where in it and why
├── ProofError                a document that is no proof (`oncelog.proof`); says where in it and why
├── PolicyError               a policy that contradicts itself, or the one the log knows by that name
├── SettingsError             a setting out of its range, or not the one that the log was made with; refused at start
├── LimitExceededError        one of the log's named limits; says which and how much
├── ClosedError               the log has been closed, or was opened in another process
├── HistoryChangedError       a cursor of another epoch, or of a log that has been cut
├── SlowReaderError           a subscription was closed because its reader fell behind; its cursor is still good
├── ClockJumpedError          the clock jumped forward; commits wait until an operator confirms it
├── UnstorableError           a write that the store cannot hold; a retry does not help
├── AuthError                 nobody the server knows; says why in the log only
├── ClientError               of a client of a server (`oncelog.client`)
│   ├── LostError                 the server cannot be reached, or went away
│   ├── ServerRefusedError        the server says no, and why
│   ├── ProtocolError             the server says something that no server says
│   ├── IdReusedError             another submission with this id waits in the outbox
│   ├── StoreInUseError           another client has the file open
│   ├── PartitionsChangedError    the file belongs to other partitions
│   └── UpdatesLostError          a reader of updates or changes fell behind: subscribe again, then read what there is
├── WorkError                 of work that is done once (`once`, `Runs`, the `Idempotency-Key` header)
│   ├── ConflictError             its key was used for something else
│   ├── InFlightError             another caller does it right now
│   ├── RunFailedError            the caller who was waited for failed, in another process
│   ├── LeaseLostError            another caller took over; what this one did was not kept
│   ├── ResultError               its result cannot be kept
│   ├── ResultErasedError         it was done, but its result has been erased
│   ├── BusyError                 the log has too much to do
│   └── TransactionError          the transaction that is shared is not as it must be
└── StoreError
    ├── StoreUnavailableError     I/O error, locked, not reached: try again under the same identity
    │   ├── DiskFullError             the disk is full
    │   └── LogReplacedError          another log or history is at the address: start the process again
    ├── NotALogError              a file that is not Oncelog's
    ├── NewerSchemaError          a log of a newer version of Oncelog
    ├── MovedError                a log that has been moved into a database: open it there
    └── CorruptError              what is stored contradicts itself
"""

from oncelog.cursor import Cursor
from oncelog.error_codes import RETRYABLE_CODES


class OncelogError(Exception):
    """The root: catch it to catch all that Oncelog raises on purpose."""


class _PathError(OncelogError, ValueError):
    """A fault in a value. `path` is the place of the fault, `reason` describes it."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason


class CanonicalError(_PathError):
    """A value without a canonical form. `path` names the place (`$.items[2].price`), `reason` the fault."""


class ProofError(_PathError):
    """An invalid proof document. `path` names the place (`$.block.hash`), `reason` the fault."""


class PolicyError(OncelogError, ValueError):
    """A policy that contradicts itself, or the one that the log knows by its name."""


class SettingsError(OncelogError, ValueError):
    """A setting that is out of its range, or that a log which is there was not made with."""


class LimitExceededError(OncelogError):
    """A limit of the log (`oncelog.Limits`) is used up."""

    def __init__(self, name: str, limit: int, reason: str = "that many are there already") -> None:
        super().__init__(f"{name} is {limit}, and {reason}")
        self.name = name
        self.limit = limit


class ClosedError(OncelogError):
    """The log has been closed, or was opened before a fork: open it in the process that uses it."""


class HistoryChangedError(OncelogError):
    """The cursor belongs to another history: start again from what this log has.

    `epoch` is the log's, `newest` the newest number of the order that was asked for.
    """

    def __init__(self, message: str, epoch: str, newest: int) -> None:
        super().__init__(message)
        self.epoch = epoch
        self.newest = newest


class SlowReaderError(OncelogError):
    """The reader of a subscription fell behind and was closed. Resume after `cursor`: nothing is lost."""

    def __init__(self, cursor: Cursor) -> None:
        super().__init__(f"the reader fell too far behind and was closed; resume after {cursor}")
        self.cursor = cursor


class ClockJumpedError(OncelogError):
    """The clock is `ahead_ms` ahead of where the machine's steady clock says it must be."""

    def __init__(self, ahead_ms: int, limit_ms: int) -> None:
        super().__init__(
            f"the clock jumped {ahead_ms} ms forward (at most {limit_ms} are believed), and remembered identities "
            "would be forgotten too early. Set the clock right, or confirm it: oncelog clock LOG --confirm"
        )
        self.ahead_ms = ahead_ms
        self.limit_ms = limit_ms


class UnstorableError(OncelogError):
    """The store cannot hold a write, because of a limit or a constraint. Nothing was written; a retry does not help."""


class AuthError(OncelogError):
    """A credential that is not good. `reason` is for the server's log alone: whoever guesses gets one text for all."""

    def __init__(self, reason: str) -> None:
        super().__init__("authentication failed")
        self.reason = reason


class StoreError(OncelogError):
    """The store could not do what was asked."""


class StoreUnavailableError(StoreError):
    """The store cannot be written or read right now.

    The outcome of a submission may be unknown: submit it again under the same identity.
    """


class DiskFullError(StoreUnavailableError):
    """There is no room for what was to be written. Make room, and submit it again under the same identity."""


class LogReplacedError(StoreUnavailableError):
    """The file or database has another log, or another epoch of it, than when it was opened.

    Memory has answers and cursors of the old history, so the log must be opened again, in a new process for a server.
    """


class NotALogError(StoreError):
    """A file that is not Oncelog's. Nothing in it was changed."""


class NewerSchemaError(StoreError):
    """A log made by a newer version of Oncelog. Nothing in it was changed."""


class MovedError(StoreError):
    """The log has been moved into a database (`oncelog move`), and is written to there alone.

    Nothing was written here. `target` is its address, without a password.
    """

    def __init__(self, message: str, target: str) -> None:
        super().__init__(message)
        self.target = target


class CorruptError(StoreError):
    """What is stored contradicts itself. `oncelog verify FILE` says where."""


class WorkError(OncelogError):
    """Of work that is done once."""


class ConflictError(WorkError):
    """The key was used for something else: other arguments, another request. Nothing was done."""


class InFlightError(WorkError):
    """Another caller does the work right now. Its lease ends in `retry_after_ms` if it is not renewed."""

    def __init__(self, message: str, retry_after_ms: int = 0) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms


class RunFailedError(WorkError):
    """The work that was waited for failed in another process: `kind` is the name of its error, `message` its text.

    Nothing was kept; the next call does the work again.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"the work that was waited for failed: {kind}: {message}")
        self.kind = kind
        self.message = message


class LeaseLostError(WorkError):
    """The work took longer than its lease, which could not be renewed, and another caller took over."""


class ResultError(WorkError):
    """What the work returned cannot be kept: it is too large, or is not of the type that was declared."""


class ResultErasedError(WorkError):
    """The work was done, but its result has been erased since. It is not done again."""


class BusyError(WorkError):
    """The log takes no new work for now. Nothing was done; try again after `retry_after_ms`.

    `reason` says why: `busy`, `rate_limited`, `read_only` or `quota_exceeded`.
    """

    def __init__(self, message: str, retry_after_ms: int, reason: str = "busy") -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms
        self.reason = reason


class TransactionError(WorkError):
    """A transaction was open before, or the function tried to end its own. Nothing was done."""


class ClientError(OncelogError):
    """Of a client of a server."""


class LostError(ClientError):
    """The server cannot be reached, or went away: what was sent may have been committed or not."""


class ServerRefusedError(ClientError):
    """The server says no, in its own words."""

    def __init__(self, code: str, message: str, retry_after_ms: int = 0) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.retry_after_ms = retry_after_ms

    @property
    def is_transient(self) -> bool:
        """Whether the same may be sent again later."""
        return self.code in RETRYABLE_CODES


class ProtocolError(ClientError):
    """The server says something that no server says: the connection is of no use."""


class IdReusedError(ClientError):
    """A submission with this id and other content waits in the outbox. Nothing was taken."""


class StoreInUseError(ClientError):
    """Another client, in this process or another one, has the file open."""


class PartitionsChangedError(ClientError):
    """The file has the cursor of other partitions. Use another file, or say what to do about it (`reset`)."""

    def __init__(self, path: str, partitions: tuple[str, ...]) -> None:
        super().__init__(
            f"{path} has followed the partitions {list(partitions)}: of others it would miss what came before. "
            "Use another file, or give `reset`, which removes what was made of them, to begin again"
        )
        self.partitions = partitions


class UpdatesLostError(ClientError):
    """A reader of `updates` or `changes` fell behind and gets no more. Subscribe again, then read what there is."""

    def __init__(self, limit_name: str, limit: int) -> None:
        super().__init__(f"updates were lost: {limit_name} is {limit}, and more updates arrived before they were read")
