"""Delivers the membership changes of a lane, ordered by revision.

Changes by this process are delivered immediately. A poll detects changes by other processes by comparing the lane's
revision, and the member tailer then reads them from the store.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final, Protocol

from oncelog.core.rules.members import get_effective_role
from oncelog.core.values import Changes, LaneHead
from oncelog.engine import logger
from oncelog.errors import StoreError
from oncelog.storage.side_state import ACKNOWLEDGEMENT, build_member_change_rows
from oncelog.storage.store import MemberChange, MemberCursor, Store

PAGE_CHANGES: Final = 500


class MemberListener(Protocol):
    """Receives membership changes."""

    def deliver_changes(self, changes: Sequence[MemberChange]) -> None:
        """Handle changes, each with the resulting state. A change may arrive twice. Must be fast and must not raise."""


class LaneReader(ABC):
    """Reads new records or changes of a lane. Its task runs until it has delivered all of them."""

    def __init__(self, lane: int, name: str) -> None:
        self.lane = lane
        self._name = name
        self._task: asyncio.Task[None] | None = None
        self._error: Exception | None = None
        """Error of the latest read. The next poll of a `Tailer` counts it."""
        self._failed_polls = 0

    @property
    @abstractmethod
    def _has_more(self) -> bool:
        """Whether there is more to read."""

    @abstractmethod
    async def _read_next(self) -> bool:
        """Read and deliver once. Return False if the store does not have the announced records or changes."""

    def _wake(self) -> None:
        if self._task is None and self._has_more:
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        try:
            while self._has_more and await self._read_next():
                self._error, self._failed_polls = None, 0
        except Exception as error:  # the next wake tries again
            if self._error is None and not self._failed_polls:
                exc_info = not isinstance(error, StoreError)
                logger.warning("%s could not be read: %s", self._name, error, exc_info=exc_info)
            self._error = error
        finally:
            self._task = None


class MemberTailer(LaneReader):
    """Reads the membership changes of a lane. It is idle without listeners."""

    def __init__(self, store: Store, lane: int) -> None:
        super().__init__(lane, f"members of lane {lane}")
        self.listeners: list[MemberListener] = []
        self._store = store
        self.revision = 0
        """All changes up to this revision are delivered."""
        self._newest = 0

    def is_behind(self, revision: int) -> bool:
        """Return whether a change up to this revision is not yet delivered."""
        return bool(self.listeners) and self.revision < revision

    @property
    def _has_more(self) -> bool:
        return self.is_behind(self._newest)

    def reset(self, revision: int) -> None:
        """Continue after a revision, because the lane was rewound or has its first listener."""
        self.revision = self._newest = revision

    async def wait_for_revision(self, revision: int) -> None:
        """Wait until all changes up to a revision are delivered. Raises the store's error."""
        while self.is_behind(revision):
            self.poll(revision)
            if self._task is not None:
                await asyncio.wait([self._task])
            if self._error is not None and self.is_behind(revision):
                raise self._error

    def notify_commit(self, changes: Changes, head: LaneHead) -> None:
        """Deliver the changes of a commit by this process, or poll if another process committed in between."""
        if self._task is None and head.revision == self.revision + 1:
            self.revision = head.revision
            self._newest = max(self._newest, head.revision)
            if self.listeners and (changes.members or changes.acknowledged):
                self._publish(changes)
        else:
            self.poll(head.revision)

    def _publish(self, changes: Changes) -> None:
        member_changes: list[MemberChange] = []
        for lane, scope, member, kind, revision in build_member_change_rows(changes, self._store.settings.lanes):
            if lane == self.lane:
                acknowledged = changes.acknowledged.get((scope, member)) or 0
                state = None if kind == ACKNOWLEDGEMENT else changes.members[scope, member]
                role = None if state is None else get_effective_role(state, changes.rosters[scope])
                present = kind == ACKNOWLEDGEMENT or state is not None  # only members acknowledge
                member_changes.append(MemberChange(revision, scope, member, kind, present, acknowledged, role))
        if member_changes:
            self._deliver(member_changes)

    def _deliver(self, changes: Sequence[MemberChange]) -> None:
        for listener in self.listeners:
            listener.deliver_changes(changes)

    def poll(self, newest: int) -> None:
        """Read changes up to a revision of the lane."""
        self._newest = max(self._newest, newest)
        self._wake()

    async def close(self) -> None:
        """Stop delivery."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _read_next(self) -> bool:
        newest = self._newest
        # Names are not empty, so this cursor sorts before all changes of the next revision.
        start_revision = self.revision
        place: MemberCursor = (start_revision + 1, "", "", 0)
        while True:
            changes = await self._store.member_changes(self.lane, place, PAGE_CHANGES)
            if changes:
                self._deliver(changes)
                place = changes[-1].cursor
            if len(changes) < PAGE_CHANGES:
                break
        # A full page may end within a revision. The loop ends at a page that is not full, so no revision is incomplete.
        if self.revision == start_revision:  # not reset in the meantime
            self.revision = max(newest, place[0] - (0 if changes else 1))
        return True
