"""Translation of PostgreSQL errors for callers."""

from typing import Any

import asyncpg
import pytest
from asyncpg.exceptions import _base

from oncelog.errors import CorruptError, DiskFullError, StoreUnavailableError, UnstorableError
from oncelog.storage.postgres.connection import terminate_after
from oncelog.storage.postgres.errors import is_lost, translate_error


async def test_connection_terminated_during_a_statement_is_lost(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """asyncpg raises AttributeError if the connection is lost between the two round trips of a statement."""
    connection = await asyncpg.connect(database)
    prepare = asyncpg.Connection._get_statement

    async def prepare_and_terminate(*arguments: Any, **named: Any) -> Any:
        prepared = await prepare(*arguments, **named)
        connection.terminate()
        return prepared

    monkeypatch.setattr(asyncpg.Connection, "_get_statement", prepare_and_terminate)
    gone = pytest.raises(asyncpg.ConnectionDoesNotExistError, match="terminated during a statement")
    with gone as caught, terminate_after(connection, 600_000):
        await connection.fetchval("SELECT 1")
    assert is_lost(caught.value)


def test_parameter_that_cannot_be_encoded_is_not_an_outage() -> None:
    """If the error were treated as an outage, the whole batch would be retried forever."""
    error = _base.DataError("invalid input for query argument $1: value out of int64 range")
    assert isinstance(error, asyncpg.InterfaceError)
    assert not is_lost(error)
    assert type(translate_error(error, "the log")) is UnstorableError


@pytest.mark.parametrize(
    ("error", "kind", "ends_the_session"),
    [
        (asyncpg.ConnectionDoesNotExistError("gone"), StoreUnavailableError, True),
        (asyncpg.InterfaceError("the underlying connection is closed"), StoreUnavailableError, True),
        (asyncpg.IdleInTransactionSessionTimeoutError("too long"), StoreUnavailableError, True),
        (asyncpg.CannotConnectNowError("the database system is starting up"), StoreUnavailableError, True),
        (TimeoutError(), StoreUnavailableError, True),
        (asyncpg.DiskFullError("full"), DiskFullError, False),
        (asyncpg.LockNotAvailableError("held"), StoreUnavailableError, False),
        (asyncpg.DeadlockDetectedError("deadlock"), StoreUnavailableError, False),
        (asyncpg.DataCorruptedError("torn"), CorruptError, False),
        (asyncpg.CharacterNotInRepertoireError("0x00"), UnstorableError, False),
        (asyncpg.NumericValueOutOfRangeError("too large"), UnstorableError, False),
        (asyncpg.CheckViolationError("refused"), UnstorableError, False),
        (asyncpg.ProgramLimitExceededError("index row size"), UnstorableError, False),
        (asyncpg.UniqueViolationError("twice"), CorruptError, False),
        (asyncpg.InvalidColumnReferenceError("no unique constraint"), StoreUnavailableError, False),
        (asyncpg.PLPGSQLError("raised"), asyncpg.PLPGSQLError, False),
    ],
)
def test_postgres_error_is_translated(error: Exception, kind: type[Exception], ends_the_session: bool) -> None:
    assert type(translate_error(error, "the log")) is kind
    assert is_lost(error) is ends_the_session
