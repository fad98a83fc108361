"""Translation of PostgreSQL errors: connection lost, server unavailable, or statement at fault."""

from typing import Final

import asyncpg

from oncelog.errors import CorruptError, DiskFullError, StoreError, StoreUnavailableError, UnstorableError

_SESSION_LOST_ERRORS: Final = (
    asyncpg.PostgresConnectionError,
    asyncpg.InterfaceError,  # used after it was closed
    asyncpg.InternalClientError,
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
    asyncpg.CannotConnectNowError,
    asyncpg.IdleInTransactionSessionTimeoutError,
    asyncpg.ReadOnlySQLTransactionError,  # the server is a standby by now
    asyncpg.InvalidCachedStatementError,  # asyncpg has forgotten what was prepared (`preparing`)
    OSError,  # TimeoutError among them
)
"""The session is gone, or is with a server that is not the one to write to. On another one it can be tried again."""

_TRANSIENT_ERRORS: Final = (asyncpg.DeadlockDetectedError, asyncpg.SerializationError)
"""Nothing has happened; the same transaction can be begun anew on the same session."""

_UNAVAILABLE_ERRORS: Final = (
    asyncpg.InsufficientResourcesError,  # a full disk, too many connections, no memory
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
    asyncpg.UniqueViolationError,  # decisions rule it out: the tables contradict each other
)
_UNSTORABLE_ERRORS: Final = (
    asyncpg.DataError,  # class 22
    asyncpg.IntegrityConstraintViolationError,  # class 23
    asyncpg.ProgramLimitExceededError,  # class 54
)
"""The batch has a value that the server rejects, and would reject again."""

POSTGRES_ERRORS: Final = (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, OSError)
"""All that using a connection may raise."""


def is_lost(error: BaseException) -> bool:
    """Whether the session is of no more use."""
    # A ValueError is what asyncpg makes of a parameter that it cannot send.
    return isinstance(error, _SESSION_LOST_ERRORS) and not isinstance(error, ValueError)


def is_transient(error: BaseException) -> bool:
    """Whether the transaction can be begun anew as it is."""
    return isinstance(error, _TRANSIENT_ERRORS)


def translate_error(error: BaseException, name: str, hint: str = "") -> BaseException:
    """An error in our words; the same error if it says nothing about the server or the session."""
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
        # Without the text of the error: it may quote other rows.
        return UnstorableError(f"{name} cannot store this: SQLSTATE {error.sqlstate} ({type(error).__name__})")
    if isinstance(error, asyncpg.SyntaxOrAccessError):
        return StoreUnavailableError(f"{message}; has a newer Oncelog migrated the log?")
    return error
