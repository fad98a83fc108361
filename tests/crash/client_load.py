"""The submissions of the clients in test_client_storm.py, which every process derives from the seed."""

from random import Random
from typing import Any, Final, NamedTuple
from uuid import UUID

ALL: Final = ("all", "left", "right", "unread")
"""All partitions. No client follows the last one."""
FOLLOWED: Final = {
    "anna": ("all", "left", "right"),
    "boris": ("all", "left", "right"),
    "clara": ("all", "left"),
    "dora": ("all", "left"),
    "emil": ("all", "right"),
    "fritz": ("right",),
}
"""The clients and the partitions that they follow."""
STALE_RATE: Final = 0.08
SHARED_RATE: Final = 0.08
RACE_EVERY: Final = 16
"""A client starts race number n when it receives an event whose position is n times this number."""
_NAMES: Final = tuple(FOLLOWED)
_RACE: Final = 64
"""Offset of the client number in the ids of race submissions."""


class Planned(NamedTuple):
    """A submission of a client."""

    id: str
    event: dict[str, Any]
    partitions: tuple[str, ...]
    expected_committed_id: int | None = None
    """If set, the position is stale, so the submission is always rejected."""
    is_shared: bool = False
    """Other clients submit the same event with the same id, and any of these clients can be first."""


def plan_submission(seed: int, name: str, counter: int) -> Planned:
    """Return a submission. After a crash, the client submits the same event again."""
    is_shared = Random(f"{seed}/shared/{counter}").random() < SHARED_RATE
    who = 1 if is_shared else _client_number(name)
    chance = Random(f"{seed}/{who}/{counter}")
    event = {"type": "said", "by": who, "number": counter, "text": "ä" * chance.randint(0, 40)}
    is_stale = not is_shared and chance.random() < STALE_RATE
    return Planned(_id(who, counter), event, _draw_partitions(chance), 0 if is_stale else None, is_shared)


def count_races(events: int) -> int:
    """Return the number of races if each client submits this many other events."""
    return events // 4


def race(seed: int, name: str, number: int) -> list[Planned]:
    """Return two submissions for one request: one that all clients share, and one that only this client makes.

    All clients submit the shared event concurrently, and only one of them commits it. The others then receive events of
    other clients between their own two submissions.
    """
    first = Planned(_id(_RACE, number), {"type": "won", "number": number}, ("all", "right"), is_shared=True)
    who = _RACE + _client_number(name)
    partitions = _draw_partitions(Random(f"{seed}/{who}/{number}"))
    return [first, Planned(_id(who, number), {"type": "ran", "by": who, "number": number}, partitions)]


def get_race_number(id: str) -> int | None:  # noqa: A002 - its name on the wire
    """Return the number of the race to which an id belongs, or None."""
    who, number = divmod(UUID(id).int, 1 << 64)
    return number if who >= _RACE else None


def plan_submissions(seed: int, name: str, events: int) -> list[Planned]:
    """Return all submissions of a client: first its events in order, then its submissions in races."""
    plan = [plan_submission(seed, name, counter) for counter in range(events)]
    return plan + [one for number in range(1, count_races(events) + 1) for one in race(seed, name, number)]


def _client_number(name: str) -> int:
    return 2 + _NAMES.index(name)


def _id(who: int, number: int) -> str:
    return str(UUID(int=who << 64 | number))


def _draw_partitions(chance: Random) -> tuple[str, ...]:
    return tuple(sorted(chance.sample(ALL, chance.choice((1, 1, 2)))))
