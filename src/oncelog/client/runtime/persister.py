"""The task that saves: submissions go to the disk before they are sent, and what arrives before it is reported.

One store transaction saves everything that has gathered while the previous one was under way.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

from oncelog.client.runtime.backoff import wait_for_store
from oncelog.client.runtime.client import ClientRuntime
from oncelog.errors import StoreError

Accepted = TypeVar("Accepted")
"""What one caller submits."""
Changes = TypeVar("Changes")
"""What has arrived since the last transaction."""


class _PendingAccept(NamedTuple, Generic[Accepted]):
    """A submission on its way to the disk, and the caller that waits for it."""

    submitted: Accepted
    saved: "asyncio.Future[None]"


class BasePersister(ABC, Generic[Accepted, Changes]):
    """`run` is the task. A subclass says what is saved and what follows from it."""

    def __init__(self, runtime: ClientRuntime) -> None:
        self._client_runtime = runtime
        self._wakeup = asyncio.Event()
        self._pending_accepts: list[_PendingAccept[Accepted]] = []
        self._unsaved: Changes | None = None
        """Changes that could not be saved. They are saved alone, before anything that follows them."""
        self._save_task: asyncio.Task[None] | None = None
        self.last_error: str | None = None
        """Why the store cannot be written; None while it can."""
        self.is_busy = False
        """Whether something is being saved and has not been reported yet."""

    # --- what a subclass says

    @abstractmethod
    def _take_changes(self) -> Changes:
        """Return what has arrived and is not saved yet."""

    @abstractmethod
    async def _save(self, accepted: Sequence[Accepted], changes: Changes) -> None:
        """Save in one transaction, then report. Raises StoreError: nothing was saved."""

    @abstractmethod
    def _reject(self, submitted: Accepted, error: Exception) -> None:
        """Forget a submission that was not saved."""

    # --- calls

    def wake(self) -> None:
        """There may be something to save."""
        self._wakeup.set()

    async def accept(self, submitted: Accepted) -> None:
        """Wait until a submission is on the disk. Raises StoreError: then it is not."""
        if self._client_runtime.is_ended:
            raise self._client_runtime.end_error
        waiting = _PendingAccept(submitted, asyncio.get_running_loop().create_future())
        self._pending_accepts.append(waiting)
        self._wakeup.set()
        # A caller that stops waiting does not take it back: it may be on the disk already.
        await asyncio.shield(waiting.saved)

    async def finish(self) -> None:
        """Save what has arrived, after the tasks have ended. What cannot be saved arrives again."""
        if self._save_task is not None:
            await asyncio.gather(self._save_task, return_exceptions=True)
        try:
            if self._unsaved is not None:
                await self._save([], self._unsaved)
            await self._save([], self._take_changes())
        except StoreError as error:
            self._client_runtime.logger.warning("%s", error)

    # --- the task

    async def run(self) -> None:
        """Save until cancelled."""
        try:
            while True:
                await self._wakeup.wait()
                self._wakeup.clear()
                self.is_busy = True
                self.is_busy = not await self._save_next()
                self._client_runtime.wake_waiters()
                if self.is_busy:
                    await wait_for_store()
                    self._wakeup.set()
        finally:
            waiting, self._pending_accepts = self._pending_accepts, []
            self._reject_waiting(waiting, self._client_runtime.end_error)

    async def _save_next(self) -> bool:
        waiting: list[_PendingAccept[Accepted]] = []
        if self._unsaved is None:
            waiting, self._pending_accepts = self._pending_accepts, []
            self._unsaved = self._take_changes()
        else:
            self._wakeup.set()  # what has gathered meanwhile is next
        try:
            # A cancelled task leaves the transaction to its end: what has been saved is reported.
            self._save_task = asyncio.create_task(self._save_and_confirm([one.submitted for one in waiting]))
            await asyncio.shield(self._save_task)
        except StoreError as error:
            self._reject_waiting(waiting, error)
            if not self._unsaved:
                self._unsaved = None  # only submissions failed: the next ones need not wait for the store
            if self.last_error is None:
                self._client_runtime.logger.warning("%s", error)
            self.last_error = str(error)
            return False
        except BaseException as error:
            self._reject_waiting(waiting, error if isinstance(error, Exception) else self._client_runtime.end_error)
            raise
        for one in waiting:
            if not one.saved.done():
                one.saved.set_result(None)
        return True

    async def _save_and_confirm(self, accepted: Sequence[Accepted]) -> None:
        assert self._unsaved is not None  # noqa: S101 - `_save_next` has set it
        await self._save(accepted, self._unsaved)
        self.last_error = self._unsaved = None

    def _reject_waiting(self, waiting: Sequence[_PendingAccept[Accepted]], error: Exception) -> None:
        for one in waiting:
            self._reject(one.submitted, error)
            if not one.saved.done():
                one.saved.set_exception(error)
                one.saved.exception()  # the caller may have gone
