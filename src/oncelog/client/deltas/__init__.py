"""Deltas client: edits rows offline and syncs them with a gateway. See docs/guides/deltas-client.md."""

from typing import TYPE_CHECKING

from oncelog.client.deltas.values import (
    DELETE,
    Change,
    Deletion,
    DeltaRefusedError,
    DeltasLimits,
    HistoryChange,
    LocalRow,
    PendingDelta,
    Refusal,
    Status,
)
from oncelog.client.runtime.values import ConnectionState
from oncelog.errors import UpdatesLostError
from oncelog.lazy_names import import_lazily

if TYPE_CHECKING:
    from oncelog.client.deltas.blocking import BlockingDeltasClient
    from oncelog.client.deltas.client import DeltasClient
    from oncelog.client.deltas.edits import Edits

__getattr__, __dir__ = import_lazily(
    __name__,
    {
        "BlockingDeltasClient": "oncelog.client.deltas.blocking",
        "DeltasClient": "oncelog.client.deltas.client",
        "Edits": "oncelog.client.deltas.edits",
    },
    renamed={"ChangesLostError": "UpdatesLostError", "State": "ConnectionState"},
)


__all__ = [
    "DELETE",
    "BlockingDeltasClient",
    "Change",
    "ConnectionState",
    "Deletion",
    "DeltaRefusedError",
    "DeltasClient",
    "DeltasLimits",
    "Edits",
    "HistoryChange",
    "LocalRow",
    "PendingDelta",
    "Refusal",
    "Status",
    "UpdatesLostError",
]
