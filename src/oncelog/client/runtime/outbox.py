"""A client's outbox: writes without an outcome, and the task that saves them before they are sent.

The same task saves data from the server before the client reports it. Writes and data that arrive during a store
transaction go into the next transaction.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from msgspec import structs

from oncelog.client.runtime.backoff import wait_for_store
from oncelog.client.runtime.client import Runtime
from oncelog.client.runtime.store_file import BaseStore
from oncelog.client.runtime.values import LIMIT_MAX, Entry
from oncelog.errors import IdReusedError, LimitExceededError, StoreError

OutcomeType = TypeVar("OutcomeType")


class BasePending(Generic[Entry, OutcomeType]):
    """A write in the outbox, and the callers that wait for its outcome."""

    __slots__ = ("_entry", "_outcome", "_waiter")

    def __init__(self, entry: Entry) -> None:
        self._entry = entry
        self._outcome: OutcomeType | Exception | None = None
        self._waiter: asyncio.Event | None = None

    @property
    def result(self) -> OutcomeType | None:
        """The outcome, or None until it is known."""
        return None if isinstance(self._outcome, Exception) else self._outcome

    async def outcome(self) -> OutcomeType:
        """Wait for the outcome without a time limit. Raises ClosedError if the client is closed."""
        while self._outcome is None:
            if self._waiter is None:
                self._waiter = asyncio.Event()
            await self._waiter.wait()
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome

    def has_same_content(self, other: Entry) -> bool:
        """Whether a submission under the same id has the same content. For internal use by the client."""
        return self._entry.equality_key == other.equality_key

    def check_accepted(self) -> None:
        """Raise the error if the write was not saved. For internal use by the client."""
        if isinstance(self._outcome, Exception):
            raise self._outcome

    def settle(self, outcome: OutcomeType | Exception) -> None:
        """Store the outcome and wake the waiting callers. For internal use by the client."""
        self._outcome = outcome
        if self._waiter is not None:
            self._waiter.set()


class OutboxStore(BaseStore):
    """Base class of stores with an outbox."""

    _next_number = 1

    def assign_numbers(self, drafts: Iterable[Entry]) -> list[Entry]:
        """Number the drafts and return them. They enter the outbox when the store saves them."""
        entries = [structs.replace(draft, number=number) for number, draft in enumerate(drafts, self._next_number)]
        self._next_number += len(entries)
        return entries


Pending = TypeVar("Pending", bound=BasePending[Any, Any])
Changes = TypeVar("Changes")
"""Server data that has arrived since the last transaction."""
Limit = tuple[str, int]
"""Name and value of a limit."""


class _Submission(NamedTuple, Generic[Entry]):
    """Drafts waiting to be saved."""

    drafts: Sequence[Entry]
    withdrawn: Sequence[Any]
    """Keys of refused writes to remove."""
    saved: "asyncio.Future[None]"


class BaseOutbox(ABC, Generic[Runtime, Entry, Pending, Changes]):
    """Base class of outboxes. `run` is the body of the task; a subclass saves and reports."""

    reused_text: ClassVar[str] = (
        "a different write with the id of the {draft} is in the outbox; use a new id for a new write"
    )
    """Error text when a different write reuses the id of a pending one."""

    def __init__(
        self,
        runtime: Runtime,
        new_pending: Callable[[Entry], Pending],
        *,
        count_max: Limit,
        bytes_max: Limit = ("", LIMIT_MAX),
    ) -> None:
        self._runtime = runtime
        self._new_pending = new_pending
        self._count_max = count_max
        self._bytes_max = bytes_max
        self._bytes = 0
        self._wakeup = asyncio.Event()
        self._pending_accepts: list[_Submission[Entry]] = []
        self._unsaved: Changes | None = None
        """Changes whose transaction failed. The next transaction retries them alone, before later changes."""
        self._save_task: asyncio.Task[None] | None = None
        self.pending: dict[Hashable, Pending] = {}
        """Writes without an outcome, by their identities."""
        self.is_busy = False
        """Whether a transaction is in progress or its changes are not yet reported."""
        runtime.end_calls.append(self._fail_pending)

    # --- for subclasses

    @abstractmethod
    def _take_changes(self) -> Changes:
        """Return the server data that has arrived since the last call."""

    @abstractmethod
    async def _save_batch(self, entries: Sequence[Entry], withdrawn: Sequence[Any], changes: Changes) -> None:
        """Save everything in one transaction, pass the entries to the protocol, and report the changes.

        If it raises StoreError, nothing is saved.
        """

    # --- calls

    @property
    def unsaved_submissions(self) -> "list[asyncio.Future[None]]":
        """Futures of the submissions waiting for a transaction."""
        return [submission.saved for submission in self._pending_accepts]

    def load(self, entries: Iterable[Entry]) -> None:
        """Add writes without an outcome that the store loaded from disk."""
        for entry in entries:
            self._add(entry, self._new_pending(entry))

    def wake(self) -> None:
        """Wake the task to check for data to save."""
        self._wakeup.set()

    async def submit(self, drafts: Iterable[Entry], withdrawn: Sequence[Any] = ()) -> list[Pending]:
        """Accept all drafts or none. Return once they, and any earlier drafts with the same ids, are on disk.

        `withdrawn` lists the keys of refused writes to remove in the same transaction. If it raises StoreError, nothing
        is saved.
        """
        found: list[Pending] = []
        new: dict[Hashable, tuple[Entry, Pending]] = {}
        for draft in drafts:
            pending = self.pending.get(draft.identity)
            if pending is None:
                _, pending = new.setdefault(draft.identity, (draft, self._new_pending(draft)))
            if not pending.has_same_content(draft):
                raise IdReusedError(self.reused_text.format(draft=draft))
            found.append(pending)
        size = sum(draft.size for draft, _ in new.values())
        if new and len(self.pending) + len(new) > self._count_max[1]:
            raise LimitExceededError(*self._count_max)
        if self._bytes + size > self._bytes_max[1]:
            raise LimitExceededError(*self._bytes_max)
        for draft, pending in new.values():
            self._add(draft, pending)
        await self.save([draft for draft, _ in new.values()], withdrawn)
        for pending in found:
            pending.check_accepted()
        return found

    async def save(self, drafts: Sequence[Entry] = (), withdrawn: Sequence[Any] = ()) -> None:
        """Wait until the drafts, and all data that arrived before them, are on disk. Raises StoreError."""
        if self._runtime.is_ended:
            raise self._runtime.end_error
        submission = _Submission(drafts, withdrawn, asyncio.get_running_loop().create_future())
        self._pending_accepts.append(submission)
        self._wakeup.set()
        # Cancelling the caller does not withdraw the submission, because it may already be on disk.
        await asyncio.shield(submission.saved)

    async def finish(self) -> None:
        """Save the data that has arrived, after the tasks have finished. The server resends whatever is not saved."""
        if self._save_task is not None:
            await asyncio.gather(self._save_task, return_exceptions=True)
        try:
            if self._unsaved is not None:
                await self._save([], self._unsaved)
            await self._save([], self._take_changes())
        except StoreError as error:
            self._runtime.logger.warning("%s", error)

    # --- the task

    async def run(self) -> None:
        """Save submissions and server data until cancelled."""
        try:
            while True:
                await self._wakeup.wait()
                self._wakeup.clear()
                self.is_busy = True
                self.is_busy = not await self._save_next()
                self._runtime.wake_waiters()
                if self.is_busy:
                    await wait_for_store()
                    self._wakeup.set()
        finally:
            submissions, self._pending_accepts = self._pending_accepts, []
            self._reject(submissions, self._runtime.end_error)

    async def _save_next(self) -> bool:
        submissions: list[_Submission[Entry]] = []
        if self._unsaved is None:
            submissions, self._pending_accepts = self._pending_accepts, []
            self._unsaved = self._take_changes()
        else:
            self._wakeup.set()  # later changes go into the next transaction
        # If this task is cancelled, the transaction still runs to completion and reports what it saved.
        self._save_task = asyncio.create_task(self._save(submissions, self._unsaved))
        try:
            await asyncio.shield(self._save_task)
        except StoreError:
            if not self._unsaved:
                self._unsaved = None  # only submissions failed, so later ones need not wait for a retry
            return False
        return True

    async def _save(self, submissions: Sequence[_Submission[Entry]], changes: Changes) -> None:
        entries = self._runtime.store.assign_numbers(draft for one in submissions for draft in one.drafts)
        withdrawn = [key for one in submissions for key in one.withdrawn]
        try:
            if entries or withdrawn or changes or self._runtime.store_error is not None:
                await self._save_batch(entries, withdrawn, changes)
        except BaseException as error:
            self._reject(submissions, error if isinstance(error, Exception) else self._runtime.end_error)
            raise
        self._unsaved = None
        for submission in submissions:
            if not submission.saved.done():
                submission.saved.set_result(None)

    # --- writes without an outcome

    def _add(self, entry: Entry, pending: Pending) -> None:
        self.pending[entry.identity] = pending
        self._bytes += entry.size

    def _settle(self, entry: Entry, outcome: object) -> None:
        pending = self.pending.pop(entry.identity, None)
        if pending is not None:
            self._bytes -= entry.size
            pending.settle(outcome)

    def _reject(self, submissions: Sequence[_Submission[Entry]], error: Exception) -> None:
        for submission in submissions:
            for draft in submission.drafts:
                self._settle(draft, error)
            if not submission.saved.done():
                submission.saved.set_exception(error)
                submission.saved.exception()  # marks it as retrieved, because the caller may have been cancelled

    def _fail_pending(self) -> None:
        for pending in self.pending.values():
            pending.settle(self._runtime.end_error)
