"""What can happen to a connection through `oncelog.testing.proxy`, how often, and the chance that decides it."""

from collections import Counter
from dataclasses import dataclass, field, fields
from enum import StrEnum
from random import Random
from typing import Final

from oncelog.testing.proxy_frames import Unit

DUPLICATED_BYTES_MAX: Final = 2**20
"""A frame that is sent twice is kept until its end; longer ones are sent once."""


class Direction(StrEnum):
    """Which way bytes go."""

    TO_SERVER = "to_server"
    TO_CLIENT = "to_client"


class Incident(StrEnum):
    """What has happened to a connection, as `FaultyProxy.done` counts it. No cut is counted twice."""

    REFUSED = "refused"
    """A connection was accepted and closed at once."""
    UNREACHABLE = "unreachable"
    """A connection was closed because the target did not take it: no fault of the proxy."""
    CUT_IN_HEAD = "cut_in_head"
    """Before the end of a head of the HTTP upgrade."""
    CUT_IN_FRAME = "cut_in_frame"
    """Before the end of a frame; perhaps before its first byte."""
    CUT_AFTER_FRAME = "cut_after_frame"
    """At once after a frame, or a head, was passed on whole."""
    CUT_AT_ANSWER = "cut_at_answer"
    """A client's frame, or its head, was passed on; what the server sent next came as far as the proxy."""
    STALLED = "stalled"
    """From here on bytes vanish."""
    DELAYED = "delayed"
    """A frame, or a head, was held back."""
    DUPLICATED = "duplicated"
    """A frame was sent twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """How often each fault happens: 0 is never, 1 is always. A rate is per frame (and per head) but for `refuse_rate`.

    For one fault alone: `dataclasses.replace(CALM, cut_rate=1)`.
    """

    refuse_rate: float = 0.05
    """Per connection."""
    cut_rate: float = 0.02
    answer_ms_max: int = 500
    """How long a cut waits at most for the answer that is to be lost."""
    stall_rate: float = 0.005
    stall_ms_max: int = 500
    """After how long at most a connection that has stalled is cut."""
    delay_rate: float = 0.2
    delay_ms_max: int = 20
    duplicate_rate: float = 0.05
    """Whole text frames only."""

    def __post_init__(self) -> None:
        for faults_field in fields(self):
            value = getattr(self, faults_field.name)
            if value < 0 or (faults_field.name.endswith("_rate") and value > 1):
                raise ValueError(
                    f"{faults_field.name} must be {'0 to 1' if faults_field.name.endswith('_rate') else '0 or more'}"
                )


CALM: Final = Faults(refuse_rate=0, cut_rate=0, stall_rate=0, delay_rate=0, duplicate_rate=0)
"""Nothing happens."""


@dataclass(slots=True)
class FaultState:
    """What the connections of a proxy share."""

    seed: int
    faults: Faults
    done: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class Break:
    """How a direction ends: a cut, or a stall before it."""

    incident: Incident
    at: int
    """So many bytes of the unit are passed on before it."""
    is_reset: bool
    """The cut is a RST, else a FIN."""
    wait_s: float = 0.0
    """Of a stall or for an answer, at most."""
    both_ways: bool = False
    """Of a stall."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What happens to one unit."""

    delay_s: float = 0.0
    is_duplicated: bool = False
    breaks: Break | None = None


NO_FAULT: Final = Decision()


class FaultSampler:
    """Decides for one direction of one connection, from nothing but the seed, the connection's number and the way.

    So what happens to the tenth frame of a client does not depend on other connections, nor on how its bytes came.
    """

    def __init__(self, seed: int, number: int, direction: Direction) -> None:
        self._direction = direction
        self._random = Random(f"{seed}/{number}/{direction}")  # noqa: S311  it must be repeatable

    def decide(self, unit: Unit, faults: Faults) -> Decision:
        """What happens to the next unit."""
        # As many draws for each unit whatever the rates: a rate that is changed moves no other fault elsewhere.
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
        # A write that is committed and not answered is what most tests are after: half of a client's cuts.
        if self._direction is Direction.TO_SERVER and where < 0.5:
            return Break(Incident.CUT_AT_ANSWER, unit.size, is_reset, answer_s)
        if where < 0.75:
            return Break(Incident.CUT_IN_HEAD if unit.is_head else Incident.CUT_IN_FRAME, at, is_reset)
        return Break(Incident.CUT_AFTER_FRAME, unit.size, is_reset)


def should_refuse(seed: int, number: int, faults: Faults) -> bool:
    """Whether a connection is closed at once."""
    return Random(f"{seed}/{number}").random() < faults.refuse_rate  # noqa: S311  it must be repeatable
