"""Translation of PostgreSQL errors: session lost, server unavailable, tables damaged, or value rejected."""

from typing import Final

import asyncpg

from oncelog.errors import CorruptError, DiskFullError, StoreError, StoreUnavailableError, UnstorableError

_SESSION_LOST_ERRORS: Final = (
    asyncpg.PostgresConnectionError,
    asyncpg.InterfaceError,  # the connection was used after it was closed
    asyncpg.InternalClientError,
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
    asyncpg.CannotConnectNowError,
    asyncpg.IdleInTransactionSessionTimeoutError,
    asyncpg.ReadOnlySQLTransactionError,  # the server has become a standby
    asyncpg.InvalidCachedStatementError,  # asyncpg has dropped the prepared statements (`writer.STATEMENTS`)
    OSError,  # includes TimeoutError
)
"""The session has ended, or its server no longer accepts writes. The work can be retried on another session."""

_TRANSIENT_ERRORS: Final = (asyncpg.DeadlockDetectedError, asyncpg.SerializationError)
"""The server has rolled the transaction back. It can be retried on the same session."""

_UNAVAILABLE_ERRORS: Final = (
    asyncpg.InsufficientResourcesError,  # full disk, too many connections, out of memory
    asyncpg.LockNotAvailableError,
    asyncpg.QueryCanceledError,
    asyncpg.OperatorInterventionError,
    asyncpg.PostgresSystemError,
    asyncpg.InvalidAuthorizationSpecificationError,
    asyncpg.InvalidCatalogNameError,
    asyncpg.InsufficientPrivilegeError,
)
_CORRUPT_ERRORS: Final = (
    asyncpg.DataCorruptedError,
    asyncpg.IndexCorruptedError,
    asyncpg.UndefinedTableError,
    asyncpg.UniqueViolationError,  # `plan` prevents it, so the tables contradict each other
)
_UNSTORABLE_ERRORS: Final = (
    asyncpg.DataError,  # class 22
    asyncpg.IntegrityConstraintViolationError,  # class 23
    asyncpg.ProgramLimitExceededError,  # class 54
)
"""The server rejects a value of the batch, and would reject it again."""

POSTGRES_ERRORS: Final = (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, OSError)
"""All errors that a call on a connection may raise."""


def is_lost(error: BaseException) -> bool:
    """Return whether the session cannot be used any more."""
    # asyncpg raises an error that is also a ValueError for a parameter that it cannot encode.
    return isinstance(error, _SESSION_LOST_ERRORS) and not isinstance(error, ValueError)


def is_transient(error: BaseException) -> bool:
    """Return whether the same session can retry the transaction."""
    return isinstance(error, _TRANSIENT_ERRORS)


def translate_error(error: BaseException, name: str, hint: str = "") -> BaseException:
    """Return the StoreError for an error, or the error itself if it is not about server, session or stored data."""
    if isinstance(error, StoreError):
        return error
    if isinstance(error, ValueError):
        return UnstorableError(f"{name} cannot store this: a value has no form that can be sent to the server")
    message = f"{name}: {str(error) or type(error).__name__}{hint}"
    if isinstance(error, asyncpg.DiskFullError):
        return DiskFullError(message)
    if isinstance(error, (*_SESSION_LOST_ERRORS, *_TRANSIENT_ERRORS, *_UNAVAILABLE_ERRORS)):
        return StoreUnavailableError(message)
    if isinstance(error, _CORRUPT_ERRORS):
        return CorruptError(f"{name} is damaged: {error}")
    if isinstance(error, _UNSTORABLE_ERRORS):
        # The text of the error may quote other rows, so the message omits it.
        return UnstorableError(f"{name} cannot store this: SQLSTATE {error.sqlstate} ({type(error).__name__})")
    if isinstance(error, asyncpg.SyntaxOrAccessError):
        return StoreUnavailableError(f"{message}; has a newer Oncelog migrated the log?")
    return error
