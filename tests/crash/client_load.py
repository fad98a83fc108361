"""What the clients of test_client_storm.py submit: the same in every process that asks for it, by the seed."""

from random import Random
from typing import Any, Final, NamedTuple
from uuid import UUID

ALL: Final = ("all", "left", "right", "nobody's")
"""Every partition there is. The last one is followed by no client."""
FOLLOWED: Final = {
    "anna": ("all", "left", "right"),
    "boris": ("all", "left", "right"),
    "clara": ("all", "left"),
    "dora": ("all", "left"),
    "emil": ("all", "right"),
    "fritz": ("right",),
}
"""The clients, and what each of them follows."""
STALE_RATE: Final = 0.08
SHARED_RATE: Final = 0.08
RACE_EVERY: Final = 16
"""When an event with so high a number is handed over, the first race is on; at twice as high a one the second; …"""
_NAMES: Final = tuple(FOLLOWED)
_RACE: Final = 64
"""Added to who submits it, in the id of what is submitted in a race."""


class Planned(NamedTuple):
    """One submission of one client."""

    id: str
    event: dict[str, Any]
    partitions: tuple[str, ...]
    expected_committed_id: int | None = None
    """Where it is given it is stale: the submission is rejected, whenever it comes."""
    is_shared: bool = False
    """Others submit the same, under the same id: who comes first is up to chance."""


def planned(seed: int, name: str, counter: int) -> Planned:
    """The same whenever it is asked for: what a client submits again after a crash is what it had submitted before."""
    is_shared = Random(f"{seed}/shared/{counter}").random() < SHARED_RATE
    who = 1 if is_shared else _who(name)
    chance = Random(f"{seed}/{who}/{counter}")
    event = {"type": "said", "by": who, "number": counter, "text": "ä" * chance.randint(0, 40)}
    is_stale = not is_shared and chance.random() < STALE_RATE
    return Planned(_id(who, counter), event, _some_partitions(chance), 0 if is_stale else None, is_shared)


def races(events: int) -> int:
    """How many races there are, where each client submits so many events besides."""
    return events // 4


def race(seed: int, name: str, number: int) -> list[Planned]:
    """All clients submit the first of these at the same moment, each with an event of its own in the same request.

    Only one of them is the first. For the others there are events between the two of theirs.
    """
    first = Planned(_id(_RACE, number), {"type": "won", "number": number}, ("all", "right"), is_shared=True)
    who = _RACE + _who(name)
    partitions = _some_partitions(Random(f"{seed}/{who}/{number}"))
    return [first, Planned(_id(who, number), {"type": "ran", "by": who, "number": number}, partitions)]


def raced(id: str) -> int | None:  # noqa: A002 - its name on the wire
    """The number of the race in which it was submitted, if it was one."""
    who, number = divmod(UUID(id).int, 1 << 64)
    return number if who >= _RACE else None


def plan_of(seed: int, name: str, events: int) -> list[Planned]:
    """All that a client submits: first its events, in their order, then what it submits in races."""
    plan = [planned(seed, name, counter) for counter in range(events)]
    return plan + [one for number in range(1, races(events) + 1) for one in race(seed, name, number)]


def _who(name: str) -> int:
    return 2 + _NAMES.index(name)


def _id(who: int, number: int) -> str:
    return str(UUID(int=who << 64 | number))


def _some_partitions(chance: Random) -> tuple[str, ...]:
    return tuple(sorted(chance.sample(ALL, chance.choice((1, 1, 2)))))
