"""`share`: the memory of a call in one transaction with its caller's own rows."""

import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any, overload

from msgspec.structs import replace

from oncelog.core.values import Committed, Reason, Receipt, Record, Refused, Replayed, Submission, Verdict
from oncelog.engine.held_lease import Work, build_erased_error, build_key_fields, to_work_error
from oncelog.storage.clock import Clock
from oncelog.storage.sqlite.borrowed_transaction import BorrowedTransaction

if TYPE_CHECKING:
    from oncelog.storage.postgres.borrowed_transaction import BorrowedTransaction as PostgresGuest


class SharedLog:
    """The log in the file of its caller's own connection, for `once`. Made by `oncelog.share`."""

    def __init__(self, connection: sqlite3.Connection, *, clock: Clock | None = None) -> None:
        self._borrowed = BorrowedTransaction(connection, clock=clock)

    @contextmanager
    def transaction(self, work: Work) -> Iterator["SharedTransaction"]:
        """Takes the file's write lock and says what is known; commits, at the end, what was completed inside."""
        with self._borrowed.transaction() as borrowed:
            borrowed.declare(work.policy)
            yield SharedTransaction(borrowed, work)


class SharedTransaction:
    """A piece of work inside of its transaction."""

    def __init__(self, borrowed: BorrowedTransaction, work: Work) -> None:
        self._borrowed = borrowed
        self._submission = _build_submission(work)
        self.result = self._find_result()
        """What was kept by an earlier call; None if the work is to be done now."""

    def guard_function(self) -> AbstractContextManager[None]:
        """Return a context for the caller's function. It cannot end the transaction; an error undoes its writes."""
        return self._borrowed.guard_transaction()

    def complete(self, body: bytes) -> None:
        """Keeps what it said, together with what was written."""
        _check_committed(self._borrowed.commit(replace(self._submission, body=body)))

    def _find_result(self) -> bytes | None:
        receipt = _check_receipt(self._borrowed.preview(self._submission))
        return None if receipt is None else _check_body(self._borrowed.load_record(receipt))


class AsyncSharedLog:
    """The log in the database of its caller's own connection of asyncpg, for `once`. Made by `oncelog.share`."""

    def __init__(self, connection: Any, *, clock: Clock | None = None) -> None:
        module = import_module("oncelog.storage.postgres.borrowed_transaction")
        self._borrowed: PostgresGuest = module.BorrowedTransaction(connection, clock=clock)

    @asynccontextmanager
    async def transaction(self, work: Work) -> AsyncIterator["AsyncSharedTransaction"]:
        """Keeps others from the key and says what is known; commits, at the end, what was completed inside."""
        borrowed_context = self._borrowed.transaction(
            work.policy, work.identity, waits=work.waits, wait_ms=work.wait_ms
        )
        async with borrowed_context as borrowed:
            shared = AsyncSharedTransaction(borrowed, work)
            await shared.load_result()
            yield shared


class AsyncSharedTransaction:
    """A piece of work inside of its transaction."""

    def __init__(self, borrowed: "PostgresGuest", work: Work) -> None:
        self._borrowed = borrowed
        self._submission = _build_submission(work)
        self.result: bytes | None = None
        """What was kept by an earlier call; None if the work is to be done now."""

    async def load_result(self) -> None:
        """Finds out what is known."""
        receipt = _check_receipt(await self._borrowed.preview(self._submission))
        if receipt is not None:
            await self._borrowed.end()
            self.result = _check_body(await self._borrowed.load_record(receipt))

    def guard_function(self) -> AbstractAsyncContextManager[None]:
        """As `SharedTransaction.guard_function`."""
        return self._borrowed.guard_transaction()

    async def complete(self, body: bytes) -> None:
        """Keeps what it said, together with what was written."""
        _check_committed(await self._borrowed.commit(replace(self._submission, body=body)))


def _build_submission(work: Work) -> Submission:
    return Submission(**build_key_fields(work), fingerprint=work.fingerprint)


def _check_receipt(verdict: Verdict) -> Receipt | None:
    """Return the receipt of work that is done, None if it must be done, or raise the error of another refusal."""
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
    """The log where the connection is, for `once`: the function's own rows and its memory commit together.

    A connection of sqlite3 to the log's file, or of asyncpg (also one of a pool) to the log's database. Cheap to make:
    one for every connection, or one for every call. Raises NotALogError if there is no log.
    """
    if type(connection).__module__.partition(".")[0] == "asyncpg":
        return AsyncSharedLog(connection, clock=clock)
    return SharedLog(connection, clock=clock)
