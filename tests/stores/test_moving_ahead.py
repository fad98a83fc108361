"""A move reads the next part of the file in a thread while it writes the one before."""

import asyncio
import gc
from collections.abc import Iterator
from contextlib import aclosing
from threading import Event

import pytest

from oncelog.stores.moving.mover import _ahead

TURNS = 10
"""Of the loop: more than anything takes that waits for nobody."""


async def turns() -> None:
    for _ in range(TURNS):
        await asyncio.sleep(0)


@pytest.mark.parametrize("times", [1, 2, 3])
def test_it_is_over_when_the_thread_is_however_often_it_is_cancelled(times: int) -> None:
    """Whoever comes next closes the file."""
    may_go_on = Event()

    def parts() -> Iterator[int]:
        yield 1
        may_go_on.wait()
        yield 2

    async def main() -> None:
        has_begun = asyncio.Event()

        async def copied() -> None:
            async with aclosing(_ahead(parts())) as found:
                async for _ in found:
                    has_begun.set()

        copying = asyncio.create_task(copied())
        try:
            await has_begun.wait()
            await turns()
            for _ in range(times):
                copying.cancel()
                await turns()
                assert not copying.done()
        finally:
            may_go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await copying

    asyncio.run(main())


def test_what_was_wrong_with_a_part_that_nobody_came_to_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    is_read = Event()

    def parts() -> Iterator[int]:
        yield 1
        is_read.set()
        raise ValueError("of the file")

    async def copied() -> None:
        async with aclosing(_ahead(parts())) as found:
            async for _ in found:
                await asyncio.to_thread(is_read.wait)
                raise OSError("of the database")

    gc.collect()  # what tests before this one left is not this one's
    caplog.clear()
    with pytest.raises(OSError, match="of the database"):
        asyncio.run(copied())
    gc.collect()
    assert [record.message for record in caplog.records if record.name == "asyncio"] == []
