"""A server looks for garbage often and shortly."""

import asyncio
import gc
from collections import Counter
from collections.abc import Iterator

import pytest

from oncelog.cli.garbage import OLDER_EVERY, OLDEST_EVERY, collect_for_ever, generation


@pytest.fixture
def own_collector() -> Iterator[None]:
    """What a test does to Python's collector ends with it."""
    threshold = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*threshold)


def test_most_looks_are_at_the_young() -> None:
    looks = Counter(generation(number) for number in range(1, OLDEST_EVERY + 1))
    assert looks[2] == 1
    assert looks[1] == OLDEST_EVERY // OLDER_EVERY - 1
    assert looks[0] == OLDEST_EVERY - OLDEST_EVERY // OLDER_EVERY


@pytest.mark.usefixtures("own_collector")
def test_it_looks_again_and_again_until_it_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    enough = asyncio.Event()
    collect = gc.collect

    def counted(generation: int = 2) -> int:
        looked.append(generation)
        if len(looked) == 1 + OLDER_EVERY:
            enough.set()
        return collect(generation)

    monkeypatch.setattr(gc, "collect", counted)

    async def main() -> None:
        collecting = asyncio.ensure_future(collect_for_ever(pause_s=0))
        await enough.wait()
        collecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await collecting

    asyncio.run(main())
    assert looked[: 1 + OLDER_EVERY] == [2] + [0] * (OLDER_EVERY - 1) + [1], "first at all that the start has left"
