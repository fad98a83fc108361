"""The worker thread runs calls one after another and reports each result."""

import asyncio
import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator

import pytest

from deadlines import WAIT_S
from oncelog.storage.sqlite.worker_thread import WorkerThread


@pytest.fixture
def worker() -> Iterator[WorkerThread]:
    worker = WorkerThread("worker")
    yield worker
    worker.stop()


async def test_worker_runs_calls_in_order_on_one_thread(worker: WorkerThread) -> None:
    seen: list[tuple[int, str]] = []

    def do(number: int) -> int:
        seen.append((number, threading.current_thread().name))
        return -number

    assert await asyncio.gather(*[worker.submit(do, number) for number in range(100)]) == [*range(0, -100, -1)]
    assert seen == [(number, "worker") for number in range(100)]


async def test_worker_is_idle_only_after_all_calls_have_ended(worker: WorkerThread) -> None:
    seen = [worker.is_idle]
    go_on = threading.Event()
    first, second = worker.submit(go_on.wait, WAIT_S), worker.submit(go_on.wait, WAIT_S)
    seen.append(worker.is_idle)
    first.cancel()  # the call continues without a waiting caller
    await asyncio.sleep(0)
    seen.append(worker.is_idle)
    go_on.set()
    await second
    seen.append(worker.is_idle)
    assert seen == [True, False, False, True]


async def test_immediate_call_runs_without_waiting_for_the_loop(worker: WorkerThread) -> None:
    began, go_on = threading.Event(), threading.Event()

    def do() -> None:
        began.set()
        go_on.wait(WAIT_S)

    switch_s = sys.getswitchinterval()
    sys.setswitchinterval(30)  # prevents switches away from the event loop's thread
    try:
        waiting = worker.submit(do, start_now=True)
        for _ in range(1000):
            sum(range(100))  # the worker may not have reached `set` yet, but runs when this thread waits
        assert await asyncio.to_thread(began.wait, WAIT_S)
    finally:
        sys.setswitchinterval(switch_s)
    go_on.set()
    await waiting


async def test_submit_with_start_now_does_not_wait_for_an_earlier_call(worker: WorkerThread) -> None:
    go_on = threading.Event()
    first, second = worker.submit(go_on.wait, WAIT_S), worker.submit(int, start_now=True)  # returns immediately
    go_on.set()
    assert await first
    assert await second == 0


@pytest.mark.parametrize("error", [ZeroDivisionError(), KeyboardInterrupt()], ids=["error", "interrupt"])
async def test_worker_reports_an_error_and_runs_the_next_call(worker: WorkerThread, error: BaseException) -> None:
    def fail() -> None:
        raise error

    failing, next_one = worker.submit(fail), worker.submit(int)
    await asyncio.gather(failing, next_one, return_exceptions=True)
    assert failing.exception() is error
    assert next_one.result() == 0


async def test_reported_error_does_not_keep_the_arguments_of_the_call_alive(worker: WorkerThread) -> None:
    class Batch:
        pass

    def fail(_: Batch) -> None:
        raise ZeroDivisionError

    gc.disable()
    try:
        batch = Batch()
        kept = weakref.ref(batch)
        with pytest.raises(ZeroDivisionError):
            await worker.submit(fail, batch)
        await worker.submit(int)  # the worker has dropped the previous call
        del batch
        assert kept() is None
    finally:
        gc.enable()


async def test_cancelled_call_is_skipped_if_it_has_not_begun(worker: WorkerThread) -> None:
    go_on = threading.Event()
    done: list[int] = []
    first, second, third = (
        worker.submit(go_on.wait, WAIT_S),
        worker.submit(done.append, 2),
        worker.submit(done.append, 3),
    )
    second.cancel()
    go_on.set()
    await first
    await third
    assert done == [3]
    assert worker.is_idle


async def test_worker_finishes_queued_calls_before_it_stops(worker: WorkerThread) -> None:
    done: list[int] = []
    waiting = [worker.submit(done.append, number) for number in range(10)]
    await asyncio.to_thread(worker.stop)
    assert done == [*range(10)]
    await asyncio.gather(*waiting)
    worker.stop()  # can be repeated
    with pytest.raises(RuntimeError, match="has been stopped"):
        worker.submit(int)


def test_call_that_ends_after_its_loop_is_ignored() -> None:
    go_on = threading.Event()

    async def started() -> WorkerThread:
        worker = WorkerThread("worker")
        worker.submit(go_on.wait, WAIT_S)
        return worker

    worker = asyncio.run(started())
    go_on.set()
    worker.stop()


def test_program_that_does_not_stop_the_worker_ends_after_all_calls() -> None:
    program = """
import asyncio
from oncelog.storage.sqlite.worker_thread import WorkerThread

async def main():
    worker = WorkerThread("worker")
    for number in range(1000):
        worker.submit(print, number)

asyncio.run(main())
"""
    ended = subprocess.run(  # noqa: S603 - our own
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert ended.stdout.split() == [*map(str, range(1000))]
    assert ended.stderr == ""
