"""Errors of the client of rows alone; the others are in `oncelog.errors`.

ClientError
├── ChangesLostError      a reader of `changes` fell behind: read the rows, and subscribe again
└── DeltaRefusedError     the gateway refuses a delta that was waited for
"""

from oncelog.client.deltas.values import Refusal
from oncelog.errors import ClientError


class ChangesLostError(ClientError):
    """More changes came than may wait for this reader, and it gets no more. Subscribe again, then read the rows."""

    def __init__(self, limit_name: str, limit: int) -> None:
        super().__init__(f"changes were lost: {limit_name} is {limit}, and more came than that before they were read")


class DeltaRefusedError(ClientError):
    """The gateway does not take a delta, and what is behind it waits. `discard` lets go of it."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(
            f"{refusal.code}: {refusal.message} (delta {refusal.delta_id} of {refusal.table} {refusal.row_id!r})"
        )
        self.refusal = refusal
