"""`share`: the memory of a call in one transaction with its caller's own rows."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

from msgspec.structs import replace

from oncelog.core.values import Committed, Reason, Refused, Replayed, Submission
from oncelog.engine.work import Work, refusal
from oncelog.errors import ResultErasedError
from oncelog.stores.clock import Clock
from oncelog.stores.sqlite.guest import Guest


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
        self._submission = Submission(policy=work.policy, scope=work.scope, key=work.key, fingerprint=work.fingerprint)
        self.result = self._known()
        """What was kept by an earlier call; None if the work is to be done now."""

    @contextmanager
    def function(self) -> Iterator[None]:
        """Around the caller's own function: it must not end the transaction. What it wrote is undone if it raises."""
        with self._guest.not_ended():
            yield

    def complete(self, body: bytes) -> None:
        """Keeps what it said, together with what was written."""
        verdict = self._guest.commit(replace(self._submission, body=body))
        if not isinstance(verdict, Committed):
            raise refusal(verdict)

    def _known(self) -> bytes | None:
        verdict = self._guest.look(self._submission)
        if isinstance(verdict, Refused) and verdict.reason is Reason.RATE_LIMITED:
            return None
        if not isinstance(verdict, Replayed) or verdict.receipt is None:
            raise refusal(verdict)
        record = self._guest.record(verdict.receipt)
        if record.erased:
            raise ResultErasedError("it was done, but what it said has been erased since")
        return record.body


def share(connection: sqlite3.Connection, *, clock: Clock | None = None) -> SharedLog:
    """The log in whose file the connection is, for `once`: the function's own rows and its memory commit together.

    Cheap to make: one for every connection, or one for every call. Raises NotALogError if the file is not a log.
    """
    return SharedLog(connection, clock=clock)
