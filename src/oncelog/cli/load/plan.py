"""The options of a load test, and the events that it submits."""

from collections.abc import Callable
from math import isfinite
from typing import Final
from uuid import uuid4

from msgspec import Struct

from oncelog.cli.load.pacer import ClosedLoopPacer, OpenLoopPacer, Pacer, Schedule, Send
from oncelog.errors import OncelogError

PREFIX: Final = "load/"
SIZE_BYTES_MIN: Final = 64


class LoadPlan(Struct, frozen=True):
    """What a load test sends. The fields are the options of the command."""

    connections: int
    in_flight: int
    batch: int
    seconds: float
    size: int
    partitions: int
    retries: float
    rate: float | None = None
    """Events per second, or None for a closed loop."""

    def check(self) -> None:
        """Raise OncelogError if the options do not determine when requests are due, or if none is."""
        if not self.seconds > 0:  # also refuses NaN
            raise OncelogError("--seconds must be more than 0. Nothing was sent")
        if self.rate is None:
            return
        if not isfinite(self.seconds):
            raise OncelogError("--rate needs a finite number of --seconds. Nothing was sent")
        if not self._build_schedule(self.rate, 0.0).requests:
            raise OncelogError(
                f"at --rate {self.rate:g}, less than one request is due in --seconds {self.seconds:g}: "
                f"--rate × --seconds must be at least --batch ({self.batch}). Nothing was sent"
            )

    def create_pacer(self, send: Send, start_s: float, now_s: Callable[[], float]) -> Pacer:
        """Return the pacer of a test that starts at this time."""
        if self.rate is None:
            return ClosedLoopPacer(send, self.connections, self.in_flight, start_s + self.seconds, now_s)
        return OpenLoopPacer(send, self.connections, self.in_flight, self._build_schedule(self.rate, start_s), now_s)

    def build_event(self, number: int) -> "SentEvent":
        """Build an event with a new id. The number selects the partition and is part of the event."""
        id_text = str(uuid4())
        head = b'{"type":"load","n":%d,"filler":"' % number
        event = head + b"x" * (self.size - len(head) - 2) + b'"}'
        partition = f"{PREFIX}{number % self.partitions}".encode()
        return SentEvent(id_text, b'{"id":"%b","partitions":["%b"],"event":%b}' % (id_text.encode(), partition, event))

    def _build_schedule(self, rate: float, start_s: float) -> Schedule:
        return Schedule(start_s, rate / self.batch, self.seconds)


class SentEvent(Struct):
    """An event of the load test, and the number that the server gave it."""

    id: str
    text: bytes
    committed_id: int = 0
