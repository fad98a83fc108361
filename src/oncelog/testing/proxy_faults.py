"""Faults of connections through `oncelog.testing.proxy`: their kinds, their rates, and the random decisions."""

from dataclasses import dataclass, fields
from enum import StrEnum
from random import Random
from typing import Final

from oncelog.testing.proxy_frames import Unit

DUPLICATED_BYTES_MAX: Final = 2**20
"""Maximum size of a duplicated frame, which is buffered until it is complete. Longer frames are sent once."""


class Direction(StrEnum):
    """Direction in which bytes flow."""

    TO_SERVER = "to_server"
    TO_CLIENT = "to_client"


class Incident(StrEnum):
    """Connection event that `FaultyProxy.done` counts. A cut is counted once."""

    REFUSED = "refused"
    """A connection was accepted and immediately closed."""
    UNREACHABLE = "unreachable"
    """A connection was closed because the target did not accept it, which is not a fault of the proxy."""
    CUT_IN_HEAD = "cut_in_head"
    """Cut before the end of the head of an HTTP upgrade."""
    CUT_IN_FRAME = "cut_in_frame"
    """Cut before the end of a frame, possibly before its first byte."""
    CUT_AFTER_FRAME = "cut_after_frame"
    """Cut immediately after a whole frame or head."""
    CUT_AT_ANSWER = "cut_at_answer"
    """Cut after a client's frame or head was forwarded, when the server's next bytes reached the proxy."""
    STALLED = "stalled"
    """From this point on, bytes were dropped."""
    DELAYED = "delayed"
    """A frame or head was held."""
    DUPLICATED = "duplicated"
    """A frame was sent twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Fault rates, from 0 (never) to 1 (always), per frame and head. Only `refuse_rate` is per connection.

    For a single fault: `dataclasses.replace(CALM, cut_rate=1)`.
    """

    refuse_rate: float = 0.05
    """Per connection."""
    cut_rate: float = 0.02
    answer_ms_max: int = 500
    """Maximum time that a cut waits for the answer to drop."""
    stall_rate: float = 0.005
    stall_ms_max: int = 500
    """Maximum time until a stalled connection is cut."""
    delay_rate: float = 0.2
    delay_ms_max: int = 20
    duplicate_rate: float = 0.05
    """Applies only to whole text frames."""

    def __post_init__(self) -> None:
        for faults_field in fields(self):
            value = getattr(self, faults_field.name)
            if value < 0 or (faults_field.name.endswith("_rate") and value > 1):
                raise ValueError(
                    f"{faults_field.name} must be {'0 to 1' if faults_field.name.endswith('_rate') else '0 or more'}"
                )


CALM: Final = Faults(refuse_rate=0, cut_rate=0, stall_rate=0, delay_rate=0, duplicate_rate=0)
"""No faults."""


@dataclass(frozen=True, slots=True)
class Break:
    """How one direction of a connection ends: with a cut, or with a stall before the cut."""

    incident: Incident
    at: int
    """How many bytes of the unit are forwarded before the end."""
    is_reset: bool
    """Whether the cut is a RST rather than a FIN."""
    wait_s: float = 0.0
    """Maximum duration of a stall, or of the wait for an answer."""
    both_ways: bool = False
    """Whether a stall affects both directions."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Fault of one unit."""

    delay_s: float = 0.0
    is_duplicated: bool = False
    breaks: Break | None = None


NO_FAULT: Final = Decision()


class FaultSampler:
    """Decides the faults for one direction of a connection, based only on the seed, the connection's number and the
    direction.

    For example, the fault of a client's tenth frame depends neither on other connections nor on how its bytes arrived.
    """

    def __init__(self, seed: int, number: int, direction: Direction) -> None:
        self._direction = direction
        self._random = Random(f"{seed}/{number}/{direction}")  # noqa: S311  it must be repeatable

    def decide(self, unit: Unit, faults: Faults) -> Decision:
        """Decide the fault of the next unit."""
        # Every unit draws the same number of values, so that changing a rate does not shift other faults.
        cut, where, stall, both, reset, place, delay, duplicate, stall_share, delay_share = (
            self._random.random() for _ in range(10)
        )
        at = int(place * unit.size)
        is_reset = reset < 0.5
        breaks = None
        if cut < faults.cut_rate:
            breaks = self._cut(unit, where, at, is_reset, faults.answer_ms_max / 1000)
        elif stall < faults.stall_rate:
            breaks = Break(Incident.STALLED, at, is_reset, stall_share * faults.stall_ms_max / 1000, both < 0.5)
        can_repeat = unit.is_whole_text and unit.size <= DUPLICATED_BYTES_MAX
        return Decision(
            delay_s=delay_share * faults.delay_ms_max / 1000 if delay < faults.delay_rate else 0.0,
            is_duplicated=can_repeat and breaks is None and duplicate < faults.duplicate_rate,
            breaks=breaks,
        )

    def _cut(self, unit: Unit, where: float, at: int, is_reset: bool, answer_s: float) -> Break:
        # Half of a client's cuts lose the answer, because most tests need a committed write without an answer.
        if self._direction is Direction.TO_SERVER and where < 0.5:
            return Break(Incident.CUT_AT_ANSWER, unit.size, is_reset, answer_s)
        if where < 0.75:
            return Break(Incident.CUT_IN_HEAD if unit.is_head else Incident.CUT_IN_FRAME, at, is_reset)
        return Break(Incident.CUT_AFTER_FRAME, unit.size, is_reset)


def should_refuse(seed: int, number: int, faults: Faults) -> bool:
    """Return whether a connection is refused: accepted and immediately closed."""
    return Random(f"{seed}/{number}").random() < faults.refuse_rate  # noqa: S311  it must be repeatable
