"""The one tree of errors. Outcomes of a submission are values (`core.values`), never one of these.

OncelogError
├── CanonicalError            a value has no canonical form; says where in it and why
├── PolicyError               a policy that contradicts itself, or the one the log knows by that name
├── SettingsError             a setting out of its range, refused at start
├── LimitExceededError        one of the log's named limits; says which and how much
├── ClosedError               the log has been closed, or was opened in another process
├── HistoryChangedError       a cursor of another epoch, or of a log that has been cut
├── SlowReaderError           a subscription was closed because its reader fell behind; its cursor is still good
├── ClockJumpedError          the clock jumped forward; commits wait until an operator confirms it
└── StoreError
    ├── StoreUnavailableError     disk full, I/O error, locked: try again under the same identity
    ├── NotALogError              a file that is not Oncelog's
    ├── NewerSchemaError          a log of a newer version of Oncelog
    └── CorruptError              what is stored contradicts itself
"""


class OncelogError(Exception):
    """The root: catch it to catch all that Oncelog raises on purpose."""


class CanonicalError(OncelogError, ValueError):
    """A value that has no canonical form. `path` says where (`$.items[2].price`), `reason` why."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason


class PolicyError(OncelogError, ValueError):
    """A policy that contradicts itself, or the one that the log knows by its name."""


class SettingsError(OncelogError, ValueError):
    """A setting of the log that is out of its range."""


class LimitExceededError(OncelogError):
    """A limit of the log (`oncelog.Limits`) is used up."""

    def __init__(self, name: str, limit: int) -> None:
        super().__init__(f"{name} is {limit}, and that many are there already")
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

    def __init__(self, cursor: int) -> None:
        super().__init__(f"the reader fell too far behind and was closed; resume after {cursor}")
        self.cursor = cursor


class ClockJumpedError(OncelogError):
    """The clock is `ahead_ms` ahead of where the machine's steady clock says it must be."""

    def __init__(self, ahead_ms: int, limit_ms: int) -> None:
        super().__init__(
            f"the clock jumped {ahead_ms} ms forward (at most {limit_ms} are believed), and remembered identities "
            "would be forgotten too early. Set the clock right, or confirm it: oncelog clock FILE --confirm"
        )
        self.ahead_ms = ahead_ms
        self.limit_ms = limit_ms


class StoreError(OncelogError):
    """The store could not do what was asked."""


class StoreUnavailableError(StoreError):
    """The store cannot be written or read right now.

    The outcome of a submission may be unknown: submit it again under the same identity.
    """


class NotALogError(StoreError):
    """A file that is not Oncelog's. Nothing in it was changed."""


class NewerSchemaError(StoreError):
    """A log made by a newer version of Oncelog. Nothing in it was changed."""


class CorruptError(StoreError):
    """What is stored contradicts itself. `oncelog verify FILE` says where."""
