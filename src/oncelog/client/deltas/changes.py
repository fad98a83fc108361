"""A reader of changes."""

from collections.abc import Callable

from oncelog.client.deltas.errors import ChangesLostError
from oncelog.client.deltas.limits import DeltasLimits
from oncelog.client.deltas.values import Change
from oncelog.client.streams import BoundedStream


class ChangeStream(BoundedStream[Change]):
    """`async for change in stream`: every change from the moment on that it was made. `aclose` ends it."""

    def __init__(self, table: str | None, limits: DeltasLimits, forget: Callable[["ChangeStream"], None]) -> None:
        super().__init__(
            forget,
            count_max=("changes_max", limits.changes_max),
            bytes_max=("changes_bytes_max", limits.changes_bytes_max),
            lost=ChangesLostError,
            wants=lambda change: table in (None, change.table),
            bytes_of=lambda change: change.bytes,
        )
