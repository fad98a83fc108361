"""`share`: stores a call's result in the same transaction as the application's rows."""

import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any, overload

from msgspec import Struct
from msgspec.structs import replace

from oncelog.core.values import Committed, Reason, Refused, Replayed, Request, Submission
from oncelog.engine.held_lease import Work, build_erased_error, to_work_error
from oncelog.storage.clock import Clock
from oncelog.storage.queries.records import load_records
from oncelog.storage.queries.statement import CommitBatch, QuerySteps
from oncelog.storage.queries.writes import declare_policies
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
    """The log in the file of the caller's sqlite3 connection, for `once`. Created by `oncelog.share`."""

    def __init__(self, connection: sqlite3.Connection, *, clock: Clock | None = None) -> None:
        self._borrowed = BorrowedTransaction(connection, clock=clock)

    @contextmanager
    def transaction(self, work: Work) -> Iterator["SharedTransaction"]:
        """Hold the file's write lock during the work, and commit its result."""
        submission = _build_submission(work)
        with self._borrowed.transaction() as borrowed:
            borrowed.run(declare_policies, [work.policy])
            shared = SharedTransaction(borrowed.run(_load_result, submission), borrowed.guard_transaction)
            yield shared
            if shared.body is not None:
                borrowed.run(_save_result, replace(submission, body=shared.body))


class AsyncSharedLog:
    """The log in the database of the caller's asyncpg connection, for `once`. Created by `oncelog.share`."""

    def __init__(self, connection: Any, *, clock: Clock | None = None) -> None:
        module = import_module("oncelog.storage.postgres.borrowed_transaction")
        self._borrowed: PostgresTransaction = module.BorrowedTransaction(connection, clock=clock)

    @asynccontextmanager
    async def transaction(self, work: Work) -> AsyncIterator["SharedTransaction"]:
        """Lock the key during the work, and commit its result."""
        submission = _build_submission(work)
        context = self._borrowed.transaction(work.policy, work.identity, waits=work.waits, wait_ms=work.wait_ms)
        async with context as borrowed:
            shared = SharedTransaction(await borrowed.run(_load_result, submission), borrowed.guard_transaction)
            if shared.result is not None:
                await borrowed.end()
            yield shared
            if shared.body is not None:
                await borrowed.run(_save_result, replace(submission, body=shared.body))


def _build_submission(work: Work) -> Submission:
    return Submission(policy=work.policy, scope=work.scope, key=work.key, fingerprint=work.fingerprint)


def _load_result(submission: Submission) -> QuerySteps[bytes | None]:
    """Return the stored result of the work, or None if the work must be done."""
    batch = yield CommitBatch([Request((replace(submission, known_only=True),))])
    verdict = batch.verdicts[0][0]
    if isinstance(verdict, Refused) and verdict.reason is Reason.NOT_KNOWN:
        return None
    if not isinstance(verdict, Replayed) or verdict.receipt is None:
        raise to_work_error(verdict, submission)
    [record] = yield from load_records(verdict.receipt.lane, [verdict.receipt.position])
    if record.erased:
        raise build_erased_error()
    return record.body


def _save_result(submission: Submission) -> QuerySteps[None]:
    batch = yield CommitBatch([Request((submission,))])
    verdict = batch.verdicts[0][0]
    if not isinstance(verdict, Committed):
        raise to_work_error(verdict, submission)


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
