"""A client's store thread ends with the client, even if the close is cancelled."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from oncelog.client.runtime.client import close_store_thread


async def test_store_is_closed_after_queued_calls_and_the_thread_has_ended() -> None:
    calls: list[str] = []
    with ThreadPoolExecutor(1, "store-thread") as thread:
        thread.submit(calls.append, "queued")
        await close_store_thread(thread, lambda: calls.append("closed"))
        assert calls == ["queued", "closed"]
        assert not any(one.name.startswith("store-thread") for one in threading.enumerate())


async def test_cancelled_close_still_closes_the_store() -> None:
    release, closed = threading.Event(), threading.Event()
    with ThreadPoolExecutor(1) as thread:
        thread.submit(release.wait)
        closing = asyncio.create_task(close_store_thread(thread, closed.set))
        await asyncio.sleep(0)  # Let the task start waiting.
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        release.set()
    # The thread has finished all calls.
    assert closed.is_set()
