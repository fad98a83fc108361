"""Contenders that take turns: a slice of time each, one right after the other, round by round."""

import sys
from collections.abc import Awaitable, Callable, Mapping

from bench.server_report import Series
from bench.wire import Slice

SliceOf = Callable[[float], Awaitable[Slice]]
"""Keeps a contender busy for so many seconds."""


async def in_turn(loads: Mapping[str, SliceOf], rounds: int, slice_s: float) -> dict[str, Series]:
    """The slices of each; those of a round before the first, to warm up, are not counted."""
    slices: dict[str, list[Slice]] = {name: [] for name in loads}
    for number in range(rounds + 1):
        for name, load in loads.items():
            say(f"{name}, {f'round {number} of {rounds}' if number else 'to warm up'} …")
            one = await load(slice_s if number else slice_s / 3)
            if number:
                slices[name].append(one)
    return {name: Series(ones) for name, ones in slices.items()}


def say(what: str) -> None:
    """What is being done, for who waits."""
    print(what, file=sys.stderr, flush=True)
