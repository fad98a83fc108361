"""Run contenders in turn. In every round, each contender has a slice of time."""

import sys
from collections.abc import Awaitable, Callable, Mapping

from bench.server_report import Series
from bench.wire import Slice

SliceOf = Callable[[float], Awaitable[Slice]]
"""Keeps a contender busy for a number of seconds."""


async def in_turn(loads: Mapping[str, SliceOf], rounds: int, slice_s: float) -> dict[str, Series]:
    """Return the slices of each contender, without the warm-up round."""
    slices: dict[str, list[Slice]] = {name: [] for name in loads}
    for number in range(rounds + 1):
        for name, load in loads.items():
            print_progress(f"{name}, {f'round {number} of {rounds}' if number else 'warm-up'} …")
            one = await load(slice_s if number else slice_s / 3)
            if number:
                slices[name].append(one)
    return {name: Series(ones) for name, ones in slices.items()}


def print_progress(what: str) -> None:
    """Print a line of progress."""
    print(what, file=sys.stderr, flush=True)
