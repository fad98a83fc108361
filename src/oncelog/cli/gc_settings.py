"""When a server looks for objects in cycles: often and shortly, in place of seldom and for long.

Python counts objects that were made against those that were dropped. A server that keeps the newest answers drops an
old one for each new one: the count hardly moves while a hundred thousand young objects come together, and the look
that comes at last holds everybody up for 50 ms. With Python's own 700 it would take 9 % of the time.
"""

import asyncio
import gc
from collections.abc import Callable
from itertools import count
from typing import Final

GC_THRESHOLD_OBJECTS: Final = 50_000
"""By which Python itself looks, should the event loop be kept from it."""
COLLECT_PAUSE_S: Final = 0.1
GENERATION_1_EVERY: Final = 20
GENERATION_2_EVERY: Final = 6000
"""Of the looks at the young: those that take in what is older, and everything."""
CLOSED_CONNECTIONS_MAX: Final = 500
"""Closed connections after which everything is collected. Each leaves about 20 KiB in cycles, and one that was open for
seconds is old: a client that opens and closes connections would use up the memory within ten minutes."""


async def collect_forever(closed_connections: Callable[[], int] = int, pause_s: float = COLLECT_PAUSE_S) -> None:
    """Looks again and again, until it is cancelled. What is there by now is not looked at."""
    gc.collect()  # or the garbage of the start would stay for ever
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD_OBJECTS)
    closed_before = closed_connections()
    for number in count(1):
        await asyncio.sleep(pause_s)
        closed = closed_connections()
        chosen = 2 if closed - closed_before >= CLOSED_CONNECTIONS_MAX else choose_generation(number)
        if chosen == 2:
            closed_before = closed
        gc.collect(chosen)


def choose_generation(number: int) -> int:
    """Up to which generation of objects this look goes."""
    if number % GENERATION_2_EVERY == 0:
        return 2
    return 1 if number % GENERATION_1_EVERY == 0 else 0
