"""What the tasks of one client share: the file with its thread, who waits for something, and who is told of changes."""

import logging
import random
from typing import Final

from oncelog.client.deltas.change_stream import ChangeStream
from oncelog.client.deltas.limits import DeltasLimits
from oncelog.client.deltas.store import DeltasStore, Replacement
from oncelog.client.deltas.values import Change
from oncelog.client.runtime.client import ClientRuntime

logger: Final = logging.getLogger("oncelog.client.deltas")


class DeltasRuntime(ClientRuntime[DeltasStore, DeltasLimits]):
    """State of one deltas client."""

    def __init__(self, store: DeltasStore, limits: DeltasLimits, random_source: random.Random | None) -> None:
        super().__init__("deltas", logger, store, limits, random_source)
        self.streams: list[ChangeStream] = []
        self.end_calls.append(self._end_streams)

    def _end_streams(self) -> None:
        for stream in list(self.streams):
            stream.finish(self.failure_error)

    def publish_changes(self, changes: list[Change]) -> None:
        """To all who read changes, and all who wait for something."""
        for stream in list(self.streams):
            stream.put(changes)
        self.wake_waiters()

    def publish_replacement(self, replaced: Replacement) -> None:
        """The same behind a reset."""
        if not replaced.is_complete:
            for stream in list(self.streams):
                stream.overflow("changes_max", self.limits.changes_max)
        self.publish_changes(replaced.changes)
