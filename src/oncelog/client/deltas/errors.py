"""Errors of the client of rows alone; the others are in `oncelog.errors`.

ClientError
└── DeltaRefusedError     the gateway refuses a delta that was waited for
"""

from oncelog.client.deltas.values import Refusal
from oncelog.errors import ClientError


class DeltaRefusedError(ClientError):
    """The gateway does not take a delta, and what is behind it waits. `discard` lets go of it."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(
            f"{refusal.code}: {refusal.message} (delta {refusal.delta_id} of {refusal.table} {refusal.row_id!r})"
        )
        self.refusal = refusal
