"""The exception hierarchy. Outcomes of a submission are values (`core.values`): only `unwrap` raises them.

OncelogError
├── CanonicalError            a value has no canonical form; gives the path and the reason
├── ProofError                an invalid proof document (`oncelog.proof`); gives the path and the reason
├── PolicyError               a policy contradicts itself, or differs from the log's policy of the same name
├── SettingsError             a setting is out of range, or differs from the log's setting; raised at startup
├── RefusedError              the log refused a write (`Refused.unwrap`); has the reason
│   └── RetryLaterError           the log may accept the same write after `retry_after_ms`
├── LimitExceededError        a limit of the log is reached; gives the limit and its value
├── ClosedError               the log is closed, or was opened in another process
├── HistoryChangedError       a cursor from a different epoch, or from a log that has been truncated
├── SlowReaderError           a subscription was closed because its reader fell behind; its cursor is still valid
├── ClockJumpedError          the clock jumped forward; commits wait until an operator confirms it
├── UnstorableError           the store cannot hold a write; retrying does not help
├── AuthError                 an invalid credential; only the server's log has the reason
├── ClientError               errors of clients (`oncelog.client`)
│   ├── LostError                 the server cannot be reached, or the connection broke
│   ├── ServerRefusedError        the server refused the request; has the server's code and message
│   ├── ProtocolError             the server sent an invalid message
│   ├── IdReusedError             a different submission with this id is in the outbox
│   ├── StoreInUseError           another client has the file open
│   ├── PartitionsChangedError    the file belongs to different partitions
│   └── UpdatesLostError          a reader of updates or changes fell behind: subscribe again, then read the state
├── WorkError                 errors of work that runs once (`once`, `Runs`, the `Idempotency-Key` header)
│   ├── ConflictError             the key was used for different work
│   ├── InFlightError             another caller is doing the work
│   ├── RunFailedError            the work that this caller waited for failed in another process
│   ├── LeaseLostError            another caller took over; this caller's result was dropped
│   ├── ResultError               the result cannot be stored
│   ├── ResultErasedError         the work was done, but its result has been erased
│   ├── BusyError                 the log is overloaded, read-only, or at a limit
│   └── TransactionError          the shared transaction is in an unexpected state
└── StoreError
    ├── StoreUnavailableError     I/O error, locked, unreachable: retry under the same identity
    │   ├── DiskFullError             the disk is full
    │   └── LogReplacedError          a different log or history is at this address: restart the process
    ├── NotALogError              a file that is not a log
    ├── NewerSchemaError          a log written by a newer version of Oncelog
    ├── MovedError                a log that has been moved into a database: open it there
    └── CorruptError              stored data contradicts itself
"""

from typing import Final

from oncelog.cursor import Cursor
from oncelog.error_codes import RETRYABLE_CODES
from oncelog.error_translation import shorten_middle
from oncelog.refusal_reasons import Reason


class OncelogError(Exception):
    """Base class of all Oncelog errors."""


class _PathError(OncelogError, ValueError):
    """A fault in a value: `path` locates it, `reason` describes it. The message contains a shortened path."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{shorten_middle(path)}: {reason}")
        self.path = path
        self.reason = reason


class CanonicalError(_PathError):
    """A value without a canonical form. `path` locates the fault (`$.items[2].price`), `reason` describes it."""


class ProofError(_PathError):
    """An invalid proof document. `path` locates the fault (`$.block.hash`), `reason` describes it."""


class PolicyError(OncelogError, ValueError):
    """A policy contradicts itself, or differs from the policy that the log has under this name."""


class SettingsError(OncelogError, ValueError):
    """A setting is out of range, or differs from the existing log's setting."""


class RefusedError(OncelogError):
    """The log refused a write, and nothing was written. `Refused.unwrap` raises it.

    `reason` is a `Reason`. `field` is the faulty field, and `current` the current value in the log that the reason
    refers to.
    """

    def __init__(self, reason: Reason, message: str, field: str = "", current: int = 0) -> None:
        super().__init__(f"{reason.value}: {message}")
        self.reason = reason
        self.field = field
        self.current = current


class RetryLaterError(RefusedError):
    """The log currently refuses the write: its load is high, a rate or a quota is exceeded, it is read-only, or another
    call with the same key is running (`IN_FLIGHT`). Submit the write again, under the same identity, after
    `retry_after_ms`."""

    def __init__(
        self, reason: Reason, message: str, field: str = "", current: int = 0, *, retry_after_ms: int = 0
    ) -> None:
        super().__init__(reason, message, field, current)
        self.retry_after_ms = retry_after_ms


class LimitExceededError(OncelogError):
    """A limit of the log (`oncelog.Limits`) is reached."""

    def __init__(self, name: str, limit: int, reason: str = "this limit is reached") -> None:
        super().__init__(f"{name} is {limit}, and {reason}")
        self.name = name
        self.limit = limit


class ClosedError(OncelogError):
    """The log is closed, or was opened before a fork: open it in the process that uses it."""


class HistoryChangedError(OncelogError):
    """The cursor belongs to a different history: start again with the current state of this log.

    `epoch` is the log's epoch, `newest` the highest number in the requested order.
    """

    def __init__(self, message: str, epoch: str, newest: int) -> None:
        super().__init__(message)
        self.epoch = epoch
        self.newest = newest


class SlowReaderError(OncelogError):
    """The reader of a subscription fell behind, and the subscription was closed. Resume after `cursor`: nothing is
    lost."""

    def __init__(self, cursor: Cursor) -> None:
        super().__init__(f"the reader fell too far behind and was closed; resume after {cursor}")
        self.cursor = cursor


class ClockJumpedError(OncelogError):
    """The wall clock is `ahead_ms` ahead of the time that the machine's monotonic clock predicts."""

    def __init__(self, ahead_ms: int, limit_ms: int) -> None:
        super().__init__(
            f"the clock jumped {ahead_ms} ms forward (at most {limit_ms} ms are accepted), so the log would forget "
            "keys too early. Correct the clock, or confirm the new time: oncelog clock LOG --confirm"
        )
        self.ahead_ms = ahead_ms
        self.limit_ms = limit_ms


class UnstorableError(OncelogError):
    """The store cannot hold a write, because of a limit or a constraint. Nothing was written; retrying does not
    help."""


AUTHENTICATION_FAILED: Final = (
    "authentication failed: send a valid token or API key; the server's log says why it refused one"
)
"""The same text for every reason, so that it reveals nothing about a credential."""


class AuthError(OncelogError):
    """A credential is invalid. Only the server's log has the `reason`; callers get the same text for every reason."""

    def __init__(self, reason: str) -> None:
        super().__init__(AUTHENTICATION_FAILED)
        self.reason = reason


class StoreError(OncelogError):
    """The store failed."""


class StoreUnavailableError(StoreError):
    """The store cannot currently be read or written.

    The outcome of a submission may be unknown: submit it again under the same identity.
    """


class DiskFullError(StoreUnavailableError):
    """The disk is full. Free space, then submit again under the same identity."""


class LogReplacedError(StoreUnavailableError):
    """The file or database now holds a different log, or a different epoch of the same log.

    This process still caches answers and cursors of the old history. Reopen the log; in a server, restart the process.
    """


class NotALogError(StoreError):
    """The file is not a log. Oncelog did not change it."""


class NewerSchemaError(StoreError):
    """A newer version of Oncelog created the log. This version did not change it."""


class MovedError(StoreError):
    """The log has been moved into a database (`oncelog move`) and can only be written there.

    Nothing was written here. `target` is the database address, without a password.
    """

    def __init__(self, message: str, target: str) -> None:
        super().__init__(message)
        self.target = target


class CorruptError(StoreError):
    """Stored data contradicts itself. `oncelog verify FILE` reports where."""


class WorkError(OncelogError):
    """Base class of all errors from work that runs once."""


class ConflictError(WorkError):
    """The key was used for different arguments or a different request. Nothing was done."""


class InFlightError(WorkError):
    """Another caller is doing the work. Its lease expires in `retry_after_ms` unless renewed."""

    def __init__(self, message: str, retry_after_ms: int = 0) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms


class RunFailedError(WorkError):
    """The work that the caller waited for failed in another process. `kind` is the error's class name, `message` its
    text.

    No result was stored; the next call does the work again.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"the awaited work failed: {kind}: {message}")
        self.kind = kind
        self.message = message


class LeaseLostError(WorkError):
    """The work took longer than its lease, the lease could not be renewed, and another caller took over."""


class ResultError(WorkError):
    """The result of the work cannot be stored: it is too large or does not have the declared type."""


class ResultErasedError(WorkError):
    """The work was done, but its result has been erased. The work is not repeated."""


class BusyError(WorkError):
    """The log currently accepts no new work. Nothing was done; retry after `retry_after_ms`.

    `reason` is `busy`, `rate_limited`, `read_only` or `quota_exceeded`.
    """

    def __init__(self, message: str, retry_after_ms: int, reason: str = "busy") -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms
        self.reason = reason


class TransactionError(WorkError):
    """A transaction was already open, or the function tried to end the shared transaction. Nothing was done."""


class ClientError(OncelogError):
    """Base class of all client errors."""


class LostError(ClientError):
    """The server cannot be reached, or the connection broke. Sent submissions may or may not be committed."""


class ServerRefusedError(ClientError):
    """The server refused the request, or the write whose outcome is unwrapped.

    `code` is the server's error code; the text includes its message.
    """

    def __init__(self, code: str, message: str, retry_after_ms: int = 0) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.retry_after_ms = retry_after_ms

    @property
    def is_transient(self) -> bool:
        """Whether a retry of the same request can succeed."""
        return self.code in RETRYABLE_CODES


class ProtocolError(ClientError):
    """The server sent an invalid message. The connection cannot be used."""


class IdReusedError(ClientError):
    """The outbox already has a submission with this id and different content. Nothing was added."""


class StoreInUseError(ClientError):
    """Another client, in this or another process, has the file open."""


class PartitionsChangedError(ClientError):
    """The file holds a cursor for different partitions. Use a different file, or pass `reset`."""

    def __init__(self, path: str, partitions: tuple[str, ...]) -> None:
        super().__init__(
            f"{path} was created for the partitions {list(partitions)} and would miss earlier events of others. "
            "Use another file, or pass `reset` to delete its state and start again"
        )
        self.partitions = partitions


class UpdatesLostError(ClientError):
    """A reader of `updates` or `changes` fell behind and was closed. Subscribe again, then read the state."""

    def __init__(self, limit_name: str, limit: int) -> None:
        super().__init__(f"updates were lost: {limit_name} is {limit}, and more were waiting to be read")
