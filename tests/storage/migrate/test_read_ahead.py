"""A move reads the next part of the file in a thread while it writes the previous part."""

import asyncio
import gc
from collections.abc import Iterator
from contextlib import aclosing
from threading import Event

import pytest

from deadlines import turns
from oncelog.storage.migrate.migration import _read_ahead


@pytest.mark.parametrize("times", [1, 2, 3])
async def test_cancelled_read_ahead_waits_for_its_thread(times: int) -> None:
    """The next step closes the file, so the thread must no longer use it."""
    may_go_on = Event()

    def parts() -> Iterator[int]:
        yield 1
        may_go_on.wait()
        yield 2

    has_begun = asyncio.Event()

    async def copy() -> None:
        async with aclosing(_read_ahead(parts())) as found:
            async for _ in found:
                has_begun.set()

    copying = asyncio.create_task(copy())
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


async def test_error_of_an_unused_read_ahead_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    is_read = Event()

    def parts() -> Iterator[int]:
        yield 1
        is_read.set()
        raise ValueError("of the file")

    async def copy() -> None:
        async with aclosing(_read_ahead(parts())) as found:
            async for _ in found:
                await asyncio.to_thread(is_read.wait)
                raise OSError("of the database")

    gc.collect()  # ignores errors logged by earlier tests
    caplog.clear()
    with pytest.raises(OSError, match="of the database"):
        await copy()
    gc.collect()
    assert [record.message for record in caplog.records if record.name == "asyncio"] == []
