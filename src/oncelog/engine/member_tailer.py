"""Delivers changes of members to the followers of a lane: by revision, as records are delivered by position.

What this process has committed is told at once. What others have is found by the look at the lanes' heads, whose
revision says that something has changed, and is then read from the store: as much as has changed, and no more.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Final, Protocol

from oncelog.core.rules.members import get_effective_role
from oncelog.core.values import Changes, LaneHead
from oncelog.errors import StoreError
from oncelog.storage.side_state import ACKNOWLEDGEMENT, build_member_change_rows
from oncelog.storage.store import MemberChange, MemberCursor, Store

logger: Final = logging.getLogger("oncelog.engine")

PAGE_CHANGES: Final = 500


class MemberListener(Protocol):
    """Takes changes of members as they come."""

    def deliver_changes(self, changes: Sequence[MemberChange]) -> None:
        """These have changed, and stand so. The same may be told again. Must not raise, and must not take long."""


class MemberTailer:
    """Of one lane, for one listener."""

    def __init__(self, store: Store, lane: int, revision: int, listener: MemberListener) -> None:
        self.lane = lane
        self._store = store
        self._revision = revision
        self._newest = revision
        self._listener = listener
        self._task: asyncio.Task[None] | None = None
        self._error: Exception | None = None
        """Of the newest reading."""

    def is_behind(self, revision: int) -> bool:
        """Whether something of this revision, or before it, has not been told yet."""
        return self._revision < revision

    @property
    def revision(self) -> int:
        """All that was changed up to here has been told."""
        return self._revision

    def reset(self, revision: int) -> None:
        """The lane is back at this revision: what comes after it has not been told."""
        self._revision = self._newest = revision

    async def wait_for_revision(self, revision: int) -> None:
        """Waits until all up to the revision has been told. Raises what keeps it from being read."""
        while self.is_behind(revision):
            self.poll(revision)
            if self._task is not None:
                await asyncio.wait([self._task])
            if self._error is not None and self.is_behind(revision):
                raise self._error

    def notify_commit(self, changes: Changes, head: LaneHead) -> None:
        """These were made durable here. They are told as they are if nothing else has come in between."""
        if self._task is None and head.revision == self._revision + 1:
            self._revision = head.revision
            self._newest = max(self._newest, head.revision)
            if changes.members or changes.acknowledged:
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
            self._listener.deliver_changes(member_changes)

    def poll(self, newest: int) -> None:
        """The lane is at this revision."""
        self._newest = max(self._newest, newest)
        if self._task is None and self._revision < self._newest:
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Nothing more is told."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        try:
            while self._revision < self._newest:
                await self._catch_up(self._newest)
                self._error = None
        except Exception as error:  # the next look tries again
            if self._error is None:
                logger.warning(
                    "changes of members in lane %d could not be read: %s",
                    self.lane,
                    error,
                    exc_info=not isinstance(error, StoreError),
                )
            self._error = error
        finally:
            self._task = None

    async def _catch_up(self, newest: int) -> None:
        # Names are not empty, so that this stands before all of the next revision.
        start_revision = self._revision
        place: MemberCursor = (start_revision + 1, "", "", 0)
        while True:
            changes = await self._store.member_changes(self.lane, place, PAGE_CHANGES)
            if changes:
                self._listener.deliver_changes(changes)
                place = changes[-1].cursor
            if len(changes) < PAGE_CHANGES:
                break
        # After a full page there may be another of its revision; after the last nothing is left of any that it has.
        if self._revision == start_revision:  # it has not begun again meanwhile
            self._revision = max(newest, place[0] - (0 if changes else 1))
