"""`share`: stores a call's result in the same transaction as the application's rows."""

import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any, overload

from msgspec import Struct
from msgspec.structs import replace

from oncelog.core.values import Committed, Reason, Receipt, Record, Refused, Replayed, Submission, Verdict
from oncelog.engine.held_lease import Work, build_erased_error, to_work_error
from oncelog.storage.clock import Clock
from oncelog.storage.sqlite.borrowed_transaction import BorrowedTransaction

if TYPE_CHECKING:
    from oncelog.storage.postgres.borrowed_transaction import BorrowedTransaction as PostgresTransaction


class SharedTransaction(Struct):
    """A piece of work in a shared transaction."""

    result: bytes | None
    """Stored result of an earlier call, or None if the function must run."""
    guard_function: Callable[[], Any]
    """Returns a context manager, blocking or async, in which the caller's function runs.

    The function cannot end the transaction, and an error undoes its writes.
    """
    body: bytes | None = None
    """Result of the work, committed together with the caller's writes."""


class SharedLog:
    """The log in the file of the caller's own connection, for `once`. Created by `oncelog.share`."""

    def __init__(self, connection: sqlite3.Connection, *, clock: Clock | None = None) -> None:
        self._borrowed = BorrowedTransaction(connection, clock=clock)

    @contextmanager
    def transaction(self, work: Work) -> Iterator["SharedTransaction"]:
        """Hold the file's write lock while the work is done, and commit its result."""
        submission = _build_submission(work)
        with self._borrowed.transaction() as borrowed:
            borrowed.declare(work.policy)
            receipt = _check_receipt(borrowed.preview(submission))
            result = None if receipt is None else _check_body(borrowed.load_record(receipt))
            shared = SharedTransaction(result, borrowed.guard_transaction)
            yield shared
            if shared.body is not None:
                _check_committed(borrowed.commit(replace(submission, body=shared.body)))


class AsyncSharedLog:
    """The log in the database of the caller's own asyncpg connection, for `once`. Created by `oncelog.share`."""

    def __init__(self, connection: Any, *, clock: Clock | None = None) -> None:
        module = import_module("oncelog.storage.postgres.borrowed_transaction")
        self._borrowed: PostgresTransaction = module.BorrowedTransaction(connection, clock=clock)

    @asynccontextmanager
    async def transaction(self, work: Work) -> AsyncIterator["SharedTransaction"]:
        """Lock the key while the work is done, and commit its result."""
        submission = _build_submission(work)
        context = self._borrowed.transaction(work.policy, work.identity, waits=work.waits, wait_ms=work.wait_ms)
        async with context as borrowed:
            result = None
            receipt = _check_receipt(await borrowed.preview(submission))
            if receipt is not None:
                await borrowed.end()
                result = _check_body(await borrowed.load_record(receipt))
            shared = SharedTransaction(result, borrowed.guard_transaction)
            yield shared
            if shared.body is not None:
                _check_committed(await borrowed.commit(replace(submission, body=shared.body)))


def _build_submission(work: Work) -> Submission:
    return Submission(policy=work.policy, scope=work.scope, key=work.key, fingerprint=work.fingerprint)


def _check_receipt(verdict: Verdict) -> Receipt | None:
    """Return the receipt if the work is done, or None if it must be done. Raises the error for any other refusal."""
    if isinstance(verdict, Refused) and verdict.reason is Reason.NOT_KNOWN:
        return None
    if not isinstance(verdict, Replayed) or verdict.receipt is None:
        raise to_work_error(verdict)
    return verdict.receipt


def _check_body(record: Record) -> bytes:
    if record.erased:
        raise build_erased_error()
    return record.body


def _check_committed(verdict: Verdict) -> None:
    if not isinstance(verdict, Committed):
        raise to_work_error(verdict)


@overload
def share(connection: sqlite3.Connection, *, clock: Clock | None = None) -> SharedLog: ...


@overload
def share(connection: Any, *, clock: Clock | None = None) -> AsyncSharedLog: ...


def share(connection: Any, *, clock: Clock | None = None) -> SharedLog | AsyncSharedLog:
    """Return the log behind a connection, for `once`: the function's rows and its stored result commit together.

    The connection is a sqlite3 connection to the log's file, or an asyncpg connection (pooled or not) to the log's
    database. A shared log is cheap, so create one per connection or per call. Raises NotALogError if the file is not a
    log.
    """
    if type(connection).__module__.partition(".")[0] == "asyncpg":
        return AsyncSharedLog(connection, clock=clock)
    return SharedLog(connection, clock=clock)
