"""Translates PostgreSQL errors: session lost, server unavailable, tables damaged, or value rejected."""

import errno
import os
import re
from collections.abc import Mapping
from typing import Any, Final

import asyncpg

from oncelog.errors import CorruptError, DiskFullError, OncelogError, StoreError, StoreUnavailableError, UnstorableError

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
"""The session is closed, or its server no longer accepts writes. The work can be retried on another session."""

_TRANSIENT_ERRORS: Final = (asyncpg.DeadlockDetectedError, asyncpg.SerializationError)
"""The server has rolled back the transaction, which can be retried on the same session."""

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
    asyncpg.UniqueViolationError,  # `plan` prevents duplicates, so the tables contradict each other
)
_UNSTORABLE_ERRORS: Final = (
    asyncpg.DataError,  # class 22
    asyncpg.IntegrityConstraintViolationError,  # class 23
    asyncpg.ProgramLimitExceededError,  # class 54
)
"""The server rejects a value in the batch, and would reject it again."""

POSTGRES_ERRORS: Final = (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, OSError)
"""All errors that a call on a connection may raise."""


_TRANSLATIONS: Final[tuple[tuple[Any, type[OncelogError], str], ...]] = (
    (ValueError, UnstorableError, "{name} cannot store this: a value cannot be encoded for the server"),
    (asyncpg.DiskFullError, DiskFullError, "{name}: {text}{hint}"),
    (
        (*_SESSION_LOST_ERRORS, *_TRANSIENT_ERRORS, *_UNAVAILABLE_ERRORS),
        StoreUnavailableError,
        "{name}: {text}{hint}",
    ),
    (_CORRUPT_ERRORS, CorruptError, "{name} is damaged: {error}"),
    # The text of such an error may quote other rows, so the message leaves it out.
    (_UNSTORABLE_ERRORS, UnstorableError, "{name} cannot store this: SQLSTATE {error.sqlstate} ({kind})"),
    (
        asyncpg.SyntaxOrAccessError,
        StoreUnavailableError,
        "{name}: {text}{hint}; has a newer Oncelog migrated the log?",
    ),
)
"""Errors, each with its StoreError and message. The first match applies."""


_ADVICE: Final[Mapping[type[BaseException], str]] = {
    asyncpg.InvalidCatalogNameError: "create it with CREATE DATABASE, or correct the address",
    asyncpg.InvalidAuthorizationSpecificationError: "check the user and the password in the address",
    asyncpg.InsufficientPrivilegeError: "grant the privilege to the user in the address",
}
"""What an operator can do about an error."""
_ERRNO_PATTERN: Final = re.compile(r"\[Errno (\d+)\]")


def find_errnos(error: OSError) -> set[int]:
    """Return the error numbers of an OSError. asyncio joins the errors of all addresses of a host into one message."""
    if error.errno is not None:
        return {error.errno}
    return {int(number) for number in _ERRNO_PATTERN.findall(str(error))}


def describe_error(error: BaseException) -> str:
    """Return the text of an error. An operating-system error is described in words rather than by its number."""
    if isinstance(error, OSError):
        names = [os.strerror(number) for number in sorted(find_errnos(error)) if number > 0]
        if names:
            is_refused = errno.ECONNREFUSED in find_errnos(error)
            return ", ".join(names) + (" (is the server running at this address?)" if is_refused else "")
        if error.strerror:
            return f"{error.strerror} (check the host name)"  # a failed DNS lookup
    advice = next((f" ({text})" for kind, text in _ADVICE.items() if isinstance(error, kind)), "")
    return (str(error) or type(error).__name__) + advice


def is_lost(error: BaseException) -> bool:
    """Return whether the session can no longer be used."""
    # For a parameter that it cannot encode, asyncpg raises an error that is also a ValueError.
    return isinstance(error, _SESSION_LOST_ERRORS) and not isinstance(error, ValueError)


def is_transient(error: BaseException) -> bool:
    """Return whether the same session can retry the transaction."""
    return isinstance(error, _TRANSIENT_ERRORS)


def translate_error(error: BaseException, name: str, hint: str = "") -> BaseException:
    """Return the StoreError for an error, or the error itself if it is of another kind."""
    if isinstance(error, StoreError):
        return error
    kind = type(error).__name__
    for errors, store_error, message in _TRANSLATIONS:
        if isinstance(error, errors):
            return store_error(message.format(name=name, text=describe_error(error), hint=hint, error=error, kind=kind))
    return error
