"""What an error of PostgreSQL's means for those who wait."""

import asyncpg
import pytest
from asyncpg.exceptions import _base

from oncelog.errors import CorruptError, DiskFullError, StoreUnavailableError
from oncelog.stores.postgres.troubles import is_lost, translated


def test_a_parameter_that_cannot_be_sent_is_the_fault_of_its_batch() -> None:
    """Told as an outage it would be tried again for ever, and all of its batch with it."""
    error = _base.DataError("invalid input for query argument $1: value out of int64 range")
    assert isinstance(error, asyncpg.InterfaceError)
    assert not is_lost(error)
    assert translated(error, "the log") is error


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
        (asyncpg.CharacterNotInRepertoireError("0x00"), asyncpg.CharacterNotInRepertoireError, False),
    ],
)
def test_errors_are_told_in_our_words(error: Exception, kind: type[Exception], ends_the_session: bool) -> None:
    assert type(translated(error, "the log")) is kind
    assert is_lost(error) is ends_the_session
