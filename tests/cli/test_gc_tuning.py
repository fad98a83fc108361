"""A server collects garbage frequently and in short runs."""

import asyncio
import gc
from collections import Counter
from collections.abc import Iterator

import pytest

from oncelog.cli.serve import (
    CLOSED_CONNECTIONS_MAX,
    GENERATION_1_EVERY,
    GENERATION_2_EVERY,
    choose_generation,
    collect_forever,
)


@pytest.fixture
def restore_collector() -> Iterator[None]:
    """Restore the collector settings after the test."""
    threshold = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*threshold)


def test_most_collections_are_of_the_youngest_generation() -> None:
    looks = Counter(choose_generation(number) for number in range(1, GENERATION_2_EVERY + 1))
    assert looks[2] == 1
    assert looks[1] == GENERATION_2_EVERY // GENERATION_1_EVERY - 1
    assert looks[0] == GENERATION_2_EVERY - GENERATION_2_EVERY // GENERATION_1_EVERY


@pytest.mark.usefixtures("restore_collector")
async def test_collector_runs_until_it_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    enough = asyncio.Event()
    collect = gc.collect

    def record_generation(generation: int = 2) -> int:
        looked.append(generation)
        if len(looked) == 1 + GENERATION_1_EVERY:
            enough.set()
        return collect(generation)

    monkeypatch.setattr(gc, "collect", record_generation)
    collecting = asyncio.ensure_future(collect_forever(pause_s=0))
    await enough.wait()
    collecting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await collecting
    assert looked[: 1 + GENERATION_1_EVERY] == [2] + [0] * (GENERATION_1_EVERY - 1) + [1], (
        "the first collection is a full one"
    )


@pytest.mark.rule("CO-27")
@pytest.mark.usefixtures("restore_collector")
async def test_everything_is_collected_after_many_closed_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    enough = asyncio.Event()

    def record_generation(generation: int = 2) -> int:
        looked.append(generation)
        if len(looked) == 8:
            enough.set()
        return 0

    monkeypatch.setattr(gc, "collect", record_generation)
    closed = iter([0, 10, CLOSED_CONNECTIONS_MAX - 1, CLOSED_CONNECTIONS_MAX, CLOSED_CONNECTIONS_MAX + 1, *[5000] * 10])
    collecting = asyncio.ensure_future(collect_forever(lambda: next(closed), pause_s=0))
    await enough.wait()
    collecting.cancel()
    assert looked[:8] == [2, 0, 0, 2, 0, 2, 0, 0]
