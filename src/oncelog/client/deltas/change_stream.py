"""A reader of changes."""

from collections.abc import Callable

from oncelog.client.deltas.limits import DeltasLimits
from oncelog.client.deltas.values import Change
from oncelog.client.runtime.bounded_stream import BoundedStream


class ChangeStream(BoundedStream[Change]):
    """`async for change in stream`: every change from the moment on that it was made. `aclose` ends it."""

    def __init__(self, table: str | None, limits: DeltasLimits, on_close: Callable[["ChangeStream"], None]) -> None:
        super().__init__(
            on_close,
            count_max=("changes_max", limits.changes_max),
            bytes_max=("changes_bytes_max", limits.changes_bytes_max),
            accepts=lambda change: table in (None, change.table),
            get_size=lambda change: change.bytes,
        )
