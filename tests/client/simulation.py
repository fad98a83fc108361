"""Random actions on clients and a model of their server."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import TypeVar

S = TypeVar("S", bound="Simulation")


class Simulation(ABC):
    """Performs random actions by weight. The seed determines all choices."""

    actions: dict[Callable[[], None], int]

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.chance = Random(seed)
        self.seen: Counter[str] = Counter()

    def run(self: S, steps: int) -> S:
        """Perform `steps` actions, settle without faults, and check the result."""
        print(f"seed {self.seed}")  # noqa: T201 - pytest shows it where the test fails
        actions, weights = list(self.actions), list(self.actions.values())
        for _ in range(steps):
            action = self.chance.choices(actions, weights)[0]
            self.seen[action.__name__] += 1
            action()
        self.settle()
        self.check()
        return self

    @abstractmethod
    def settle(self) -> None:
        """Run without faults until all clients are idle."""

    @abstractmethod
    def check(self) -> None: ...
