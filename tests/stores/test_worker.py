"""The writer's thread: one thing after the other, and what became of each."""

import asyncio
import gc
import subprocess
import sys
import threading
import weakref

import pytest

from oncelog.stores.sqlite.worker import Worker


def test_things_are_done_in_order_by_one_thread() -> None:
    async def main() -> None:
        worker = Worker("worker")
        seen: list[tuple[int, str]] = []

        def do(number: int) -> int:
            seen.append((number, threading.current_thread().name))
            return -number

        assert await asyncio.gather(*[worker.start(do, number) for number in range(100)]) == [*range(0, -100, -1)]
        assert seen == [(number, "worker") for number in range(100)]
        worker.stop()

    asyncio.run(main())


def test_it_is_idle_when_all_has_ended_and_not_before() -> None:
    async def main() -> None:
        worker = Worker("worker")
        seen = [worker.is_idle]
        go_on = threading.Event()
        first, second = worker.start(go_on.wait, 60), worker.start(go_on.wait, 60)
        seen.append(worker.is_idle)
        first.cancel()  # it goes on, whether or not somebody waits for it
        await asyncio.sleep(0)
        seen.append(worker.is_idle)
        go_on.set()
        await second
        seen.append(worker.is_idle)
        assert seen == [True, False, False, True]
        worker.stop()

    asyncio.run(main())


def test_what_is_wanted_at_once_has_begun_though_the_loop_goes_on() -> None:
    async def main() -> None:
        worker = Worker("worker")
        began, go_on = threading.Event(), threading.Event()

        def do() -> None:
            began.set()
            go_on.wait(60)

        switch_s = sys.getswitchinterval()
        sys.setswitchinterval(30)  # so that nobody takes the interpreter from the loop's thread
        try:
            waiting = worker.start(do, at_once=True)
            for _ in range(1000):
                sum(range(100))  # it may not have come to `set` yet, but it has the interpreter whenever we let go
            assert await asyncio.to_thread(began.wait, 60)
        finally:
            sys.setswitchinterval(switch_s)
        go_on.set()
        await waiting
        worker.stop()

    asyncio.run(main())


def test_what_is_behind_something_is_not_waited_for() -> None:
    async def main() -> None:
        worker = Worker("worker")
        go_on = threading.Event()
        first, second = worker.start(go_on.wait, 60), worker.start(int, at_once=True)  # returns all the same
        go_on.set()
        assert await first
        assert await second == 0
        worker.stop()

    asyncio.run(main())


@pytest.mark.parametrize("error", [ZeroDivisionError(), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_an_error_is_told_and_the_next_thing_is_done(error: BaseException) -> None:
    def fail() -> None:
        raise error

    async def main() -> None:
        worker = Worker("worker")
        failing, next_one = worker.start(fail), worker.start(int)
        await asyncio.gather(failing, next_one, return_exceptions=True)
        assert failing.exception() is error
        assert next_one.result() == 0
        worker.stop()

    asyncio.run(main())


def test_nothing_is_kept_by_an_error_that_was_told() -> None:
    class Batch:
        pass

    def fail(_: Batch) -> None:
        raise ZeroDivisionError

    async def main() -> None:
        worker = Worker("worker")
        batch = Batch()
        kept = weakref.ref(batch)
        with pytest.raises(ZeroDivisionError):
            await worker.start(fail, batch)
        await worker.start(int)  # by now it has let go of the one before
        del batch
        assert kept() is None
        worker.stop()

    gc.disable()
    try:
        asyncio.run(main())
    finally:
        gc.enable()


def test_what_nobody_waits_for_any_more_is_left_out_if_it_has_not_begun() -> None:
    async def main() -> None:
        worker = Worker("worker")
        go_on = threading.Event()
        done: list[int] = []
        first, second, third = worker.start(go_on.wait, 60), worker.start(done.append, 2), worker.start(done.append, 3)
        second.cancel()
        go_on.set()
        await first
        await third
        assert done == [3]
        assert worker.is_idle
        worker.stop()

    asyncio.run(main())


def test_it_stops_when_all_has_been_done_and_takes_nothing_more() -> None:
    async def main() -> None:
        worker = Worker("worker")
        done: list[int] = []
        waiting = [worker.start(done.append, number) for number in range(10)]
        await asyncio.to_thread(worker.stop)
        assert done == [*range(10)]
        await asyncio.gather(*waiting)
        worker.stop()  # as often as one likes
        with pytest.raises(RuntimeError, match="has been stopped"):
            worker.start(int)

    asyncio.run(main())


def test_a_loop_that_is_closed_is_told_nothing() -> None:
    go_on = threading.Event()

    async def main() -> Worker:
        worker = Worker("worker")
        worker.start(go_on.wait, 60)
        return worker

    worker = asyncio.run(main())
    go_on.set()
    worker.stop()


def test_a_program_that_stops_nothing_ends_when_all_has_been_done() -> None:
    program = """
import asyncio
from oncelog.stores.sqlite.worker import Worker

async def main():
    worker = Worker("worker")
    for number in range(1000):
        worker.start(print, number)

asyncio.run(main())
"""
    ended = subprocess.run(  # noqa: S603 - our own
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stdout.split() == [*map(str, range(1000))]
    assert ended.stderr == ""
