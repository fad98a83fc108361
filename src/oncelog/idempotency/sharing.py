"""`share`: the memory of a call in one transaction with its caller's own rows."""

import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any, overload

from msgspec.structs import replace

from oncelog.core.values import Committed, Reason, Receipt, Record, Refused, Replayed, Submission, Verdict
from oncelog.engine.work import Work, refusal
from oncelog.errors import ResultErasedError
from oncelog.stores.clock import Clock
from oncelog.stores.sqlite.guest import Guest

if TYPE_CHECKING:
    from oncelog.stores.postgres.guest import Guest as PostgresGuest


class SharedLog:
    """The log in the file of its caller's own connection, for `once`. Made by `oncelog.share`."""

    def __init__(self, connection: sqlite3.Connection, *, clock: Clock | None = None) -> None:
        self._guest = Guest(connection, clock=clock)

    @contextmanager
    def transaction(self, work: Work) -> Iterator["Shared"]:
        """Takes the file's write lock and says what is known; commits, at the end, what was completed inside."""
        with self._guest.transaction() as guest:
            guest.declare(work.policy)
            yield Shared(guest, work)


class Shared:
    """A piece of work inside of its transaction."""

    def __init__(self, guest: Guest, work: Work) -> None:
        self._guest = guest
        self._submission = _submission(work)
        self.result = self._known()
        """What was kept by an earlier call; None if the work is to be done now."""

    @contextmanager
    def function(self) -> Iterator[None]:
        """Around the caller's own function: it must not end the transaction. What it wrote is undone if it raises."""
        with self._guest.not_ended():
            yield

    def complete(self, body: bytes) -> None:
        """Keeps what it said, together with what was written."""
        _demand_committed(self._guest.commit(replace(self._submission, body=body)))

    def _known(self) -> bytes | None:
        receipt = _receipt(self._guest.look(self._submission))
        return None if receipt is None else _body(self._guest.record(receipt))


class AsyncSharedLog:
    """The log in the database of its caller's own connection of asyncpg, for `once`. Made by `oncelog.share`."""

    def __init__(self, connection: Any, *, clock: Clock | None = None) -> None:
        guest = import_module("oncelog.stores.postgres.guest")
        self._guest: PostgresGuest = guest.Guest(connection, clock=clock)

    @asynccontextmanager
    async def transaction(self, work: Work) -> AsyncIterator["AsyncShared"]:
        """Keeps others from the key and says what is known; commits, at the end, what was completed inside."""
        begun = self._guest.transaction(work.policy, work.identity, waits=work.waits, wait_ms=work.wait_ms)
        async with begun as guest:
            shared = AsyncShared(guest, work)
            await shared.look()
            yield shared


class AsyncShared:
    """A piece of work inside of its transaction."""

    def __init__(self, guest: "PostgresGuest", work: Work) -> None:
        self._guest = guest
        self._submission = _submission(work)
        self.result: bytes | None = None
        """What was kept by an earlier call; None if the work is to be done now."""

    async def look(self) -> None:
        """Finds out what is known."""
        receipt = _receipt(await self._guest.look(self._submission))
        if receipt is not None:
            await self._guest.end()
            self.result = _body(await self._guest.record(receipt))

    @asynccontextmanager
    async def function(self) -> AsyncIterator[None]:
        """Around the caller's own function: it must not end the transaction. What it wrote is undone if it raises."""
        async with self._guest.not_ended():
            yield

    async def complete(self, body: bytes) -> None:
        """Keeps what it said, together with what was written."""
        _demand_committed(await self._guest.commit(replace(self._submission, body=body)))


def _submission(work: Work) -> Submission:
    return Submission(policy=work.policy, scope=work.scope, key=work.key, fingerprint=work.fingerprint)


def _receipt(verdict: Verdict) -> Receipt | None:
    """Of what is known; None if the work is to be done. Raises what stands in its way."""
    if isinstance(verdict, Refused) and verdict.reason is Reason.RATE_LIMITED:
        return None
    if not isinstance(verdict, Replayed) or verdict.receipt is None:
        raise refusal(verdict)
    return verdict.receipt


def _body(record: Record) -> bytes:
    if record.erased:
        raise ResultErasedError("it was done, but what it said has been erased since")
    return record.body


def _demand_committed(verdict: Verdict) -> None:
    if not isinstance(verdict, Committed):
        raise refusal(verdict)


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
