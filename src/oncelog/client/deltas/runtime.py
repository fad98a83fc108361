"""State that the tasks of a deltas client share, and the readers of its changes."""

import logging
import random
from collections.abc import Callable
from typing import Final

from oncelog.client.deltas.store import DeltasStore
from oncelog.client.deltas.values import Change, DeltasLimits
from oncelog.client.runtime.bounded_stream import BoundedStream
from oncelog.client.runtime.client import ClientRuntime

logger: Final = logging.getLogger("oncelog.client.deltas")


class ChangeStream(BoundedStream[Change]):
    """Reader of changes, from its creation on: `async for change in stream`. `aclose` ends it."""

    def __init__(self, table: str | None, limits: DeltasLimits, on_close: Callable[["ChangeStream"], None]) -> None:
        super().__init__(
            on_close,
            count_max=("changes_max", limits.changes_max),
            bytes_max=("changes_bytes_max", limits.changes_bytes_max),
            accepts=lambda change: table in (None, change.table),
            get_size=lambda change: change.bytes,
        )


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
        """Give changes to all readers, and wake callers that wait."""
        for stream in list(self.streams):
            stream.put(changes)
        self.wake_waiters()

    def publish_replacement(self, changes: list[Change] | None) -> None:
        """Give the changes of a reset to all readers. None means too many changes: the readers end with an error."""
        if changes is None:
            for stream in list(self.streams):
                stream.overflow("changes_max", self.limits.changes_max)
        self.publish_changes(changes or [])
