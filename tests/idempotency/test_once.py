"""A decorated function runs once per key and returns the same result to every caller."""

import asyncio
import datetime as dt
import threading
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path
from typing import Any, Final
from uuid import UUID

import pytest

import oncelog
from databases import BOTH_STORES, log_at
from engine.observable_store import Gate, count_leases
from idempotency.once_samples import CallCounter, Charge, DeclinedError, Invoice, Node, Refund
from oncelog import (
    FOREVER,
    ClosedError,
    ConflictError,
    Limits,
    PolicyError,
    ResultErasedError,
    ResultError,
    Status,
    WorkError,
    kept_for,
    once,
    work_of,
)
from oncelog.testing.clock import ManualClock

HOUR_MS: Final = 3_600_000


class TestAsyncFunctions:
    @pytest.mark.rule("RU-11")
    async def test_function_runs_once_for_equal_arguments_regardless_of_spelling(self, place: str) -> None:
        log, calls = oncelog.open(place), CallCounter()

        @once(log, name="add")
        async def add(a: int, b: int = 2) -> dict[str, int]:
            calls.times += 1
            return {"sum": a + b}

        async with log:
            answers = [await add(1), await add(1, 2), await add(b=2, a=1), await add(a=1)]
            assert answers == [{"sum": 3}] * 4
            assert calls.times == 1
            assert await add(2) == {"sum": 4}
            assert calls.times == 2

    @BOTH_STORES
    @pytest.mark.rule("RU-11")
    async def test_result_is_replayed_after_a_restart(self, tmp_path: Path) -> None:
        calls = CallCounter()
        number, at = UUID(int=7), dt.datetime(2026, 11, 16, tzinfo=dt.UTC)

        async def session() -> Invoice:
            log = oncelog.open(log_at(tmp_path / "app.db"))

            @once(log, name="invoice")
            async def invoice(customer: str) -> Invoice:
                calls.times += 1
                return Invoice(number, at, [(customer, 1)])

            async with log:
                return await invoice("a")

        assert await session() == await session() == Invoice(number, at, [("a", 1)])
        assert calls.times == 1

    @pytest.mark.rule("RU-7", "RU-11")
    async def test_concurrent_callers_run_the_function_once(self, place: str) -> None:
        log, calls, gate = oncelog.open(place), CallCounter(), Gate()

        @once(log, name="work")
        async def work(number: int) -> int:
            calls.times += 1
            await gate()
            return number

        async with log:
            gate.shut()
            callers = [asyncio.create_task(work(5)) for _ in range(100)]
            await gate.reached.wait()
            gate.open()
            assert await asyncio.gather(*callers) == [5] * 100
        assert calls.times == 1

    @pytest.mark.rule("RU-11")
    async def test_key_reused_with_other_arguments_raises_conflict_and_runs_nothing(self, place: str) -> None:
        log, calls, gate = oncelog.open(place), CallCounter(), Gate()

        @once(log, name="pay", key=lambda order, *_: order)
        async def pay(order: str, amount: int) -> int:
            calls.times += 1
            await gate()
            return amount

        async with log:
            gate.shut()
            first = asyncio.create_task(pay("a", 1))
            await gate.reached.wait()
            with pytest.raises(ConflictError):
                await pay("a", 2)  # while the function runs
            gate.open()
            assert await first == 1
            with pytest.raises(ConflictError, match="the key 'a' of 'once/pay' was already used with different"):
                await pay("a", 2)
            assert await pay("a", 1) == 1
            assert calls.times == 1
            assert await pay("b", 2) == 2

    @pytest.mark.rule("RU-11", "CO-17")
    async def test_result_expires_after_a_day_or_the_configured_retention(self, place: str) -> None:
        clock = ManualClock()
        log, calls = oncelog.open(place, clock=clock), CallCounter()

        async def work() -> int:
            calls.times += 1
            return calls.times

        daily = once(log, name="daily")(work)
        hourly = once(log, name="hourly", retention=kept_for(hours=1))(work)
        for_ever = once(log, name="for-ever", retention=FOREVER)(work)
        async with log:
            assert [await daily(), await hourly(), await for_ever()] == [1, 2, 3]
            clock.advance(HOUR_MS - 1)
            assert [await daily(), await hourly(), await for_ever()] == [1, 2, 3]
            clock.advance(1)
            assert [await daily(), await hourly(), await for_ever()] == [1, 4, 3]
            for _ in range(23):
                clock.advance(HOUR_MS)
                await log.confirm_clock()
            assert [await daily(), await for_ever()] == [5, 3]

    async def test_different_retention_under_the_same_name_is_refused(self, place: str) -> None:
        log = oncelog.open(place)

        async def work() -> int:
            return 1

        async with log:
            await once(log, name="work")(work)()
            with pytest.raises(PolicyError):
                await once(log, name="work", retention=FOREVER)(work)()

    async def test_equal_keys_in_different_scopes_are_separate(self, place: str) -> None:
        log, calls = oncelog.open(place), CallCounter()

        @once(log, name="work", key=lambda _, key: key, scope=lambda user, *_: user, ignore=["user"])
        async def work(user: str, key: str) -> str:
            calls.times += 1
            return user

        async with log:
            assert [await work(user, "k") for user in ("a", "b", "a", "b")] == ["a", "b", "a", "b"]
        assert calls.times == 2

    async def test_equal_fields_of_different_classes_are_different_arguments(self, place: str) -> None:
        async with oncelog.open(place) as log:

            @once(log, name="book")
            async def book(entry: Any) -> str:
                return type(entry).__name__

            calls: list[Any] = [Refund(5), Charge(5), [Refund(5)], [Charge(5)], {"a": 1}, Node([]), Refund(5)]
            given = [await book(call) for call in calls]
        assert given == ["Refund", "Charge", "list", "list", "dict", "Node", "Refund"]

    async def test_values_with_equal_json_are_different_arguments(self, place: str) -> None:
        async with oncelog.open(place) as log:

            @once(log, name="look")
            async def describe(value: Any) -> str:
                return repr(value)

            id_ = UUID(int=1)
            day = dt.date(2026, 1, 1)
            values: list[Any] = [b"abc", "YWJj", Decimal("1.0"), "1.0", 1, id_, str(id_), day, day.isoformat()]
            values += [{1, 2}, [1, 2], frozenset({1, 2}), 2**60, str(2**60), 2**70, True, "True", None]
            assert [await describe(value) for value in values] == [repr(value) for value in values]
            assert await describe((1, 2)) == "[1, 2]"  # a tuple equals a list, because JSON has no tuples

    async def test_recursive_call_with_the_same_key_raises_work_error(self, place: str) -> None:
        async with oncelog.open(place) as log:

            @once(log, name="work")
            async def work(number: int) -> int:
                return number if number == 2 else await work(2 if number == 0 else number)

            assert await work(0) == 2
            with pytest.raises(WorkError, match="itself"):
                await work(1)
            assert count_leases(log) == 0

    async def test_wait_s_does_not_limit_the_claim(self, place: str) -> None:
        async with oncelog.open(place) as log:

            @once(log, name="work", wait_s=0.001)
            async def work(number: int) -> int:
                return number

            assert [await work(number) for number in range(20)] == list(range(20))

    async def test_stored_exception_that_cannot_be_rebuilt_raises_result_error(self, place: str) -> None:
        class StubbornError(Exception):
            def __new__(cls, *, needed: int) -> "StubbornError":
                return super().__new__(cls, needed)

            def __init__(self, *, needed: int) -> None:
                super().__init__(needed)

        calls = CallCounter()
        async with oncelog.open(place) as log:

            @once(log, name="work", remember=[StubbornError, ExceptionGroup])
            async def work(kind: str) -> int:
                calls.times += 1
                if kind == "stubborn":
                    raise StubbornError(needed=1)
                raise ExceptionGroup("several", [ValueError(1)])

            for kind, first in (("stubborn", StubbornError), ("group", ExceptionGroup)):
                with pytest.raises(first):
                    await work(kind)
                with pytest.raises(ResultError, match="cannot be rebuilt"):
                    await work(kind)
        assert calls.times == 2

    async def test_functions_with_different_names_do_not_share_keys(self, place: str) -> None:
        log = oncelog.open(place)

        async def work() -> str:
            return "first"

        async def other() -> str:
            return "second"

        async with log:
            assert await once(log, name="work")(work)() == "first"
            assert await once(log, name="Work")(other)() == "second"

    @pytest.mark.rule("CO-41")
    async def test_erased_result_is_neither_replayed_nor_rerun(self, place: str) -> None:
        log, calls = oncelog.open(place), CallCounter()

        @once(log, name="work")
        async def work(number: int) -> int:
            calls.times += 1
            return number

        async with log:
            await work(1)
            done = work_of(work, 1)
            found = await log.lookup(done.key, policy=done.policy, scope=done.scope)
            assert found.status is Status.COMMITTED
            assert await log.erase(key=done.key, policy=done.policy, scope=done.scope) == 1
            with pytest.raises(ResultErasedError):
                await work(1)
        assert calls.times == 1

    async def test_size_of_the_result_cache_does_not_change_results(self, place: str) -> None:
        calls = CallCounter()
        for limit in (0, 1, 2000):
            calls.times = 0
            log = oncelog.open(place, limits=Limits(results_bytes_max=limit))

            @once(log, name="work")
            async def work(number: int) -> str:
                calls.times += 1
                return str(number) * 100

            async with log:
                for _ in range(2):
                    assert [await work(number) for number in range(20)] == [str(number) * 100 for number in range(20)]
                if place == ":memory:":
                    assert calls.times == 20

    async def test_log_may_be_a_function(self, place: str) -> None:
        logs: list[oncelog.Log] = []

        @once(lambda: logs[0], name="work")
        async def work() -> int:
            return 1

        async with oncelog.open(place) as log:
            logs.append(log)
            assert await work() == 1

    async def test_call_without_an_open_log_raises_closed_error(self, place: str) -> None:
        log = oncelog.open(place)

        @once(log, name="work")
        async def work() -> int:
            raise AssertionError

        with pytest.raises(ClosedError):
            await work()

    async def test_result_of_the_wrong_type_raises_result_error_and_is_not_stored(self, place: str) -> None:
        log, answers = oncelog.open(place), [object(), "text", 3]

        @once(log, name="work", result=int)
        async def work() -> Any:
            return answers.pop(0)

        async with log:
            for _ in range(2):
                with pytest.raises(
                    ResultError, match=r"the result of work cannot be stored as int: .*; nothing was stored"
                ):
                    await work()
            assert await work() == await work() == 3

    async def test_result_above_the_body_limit_raises_result_error_and_leaves_no_lease(self, place: str) -> None:
        log = oncelog.open(place, limits=Limits(body_bytes_max=100), clock=ManualClock())
        sizes = [200, 10]

        @once(log, name="work")
        async def work() -> str:
            return "x" * sizes.pop(0)

        async with log:
            with pytest.raises(
                ResultError, match=r"the result for the key .* of 'once/work' cannot be stored: .*100 bytes"
            ):
                await work()
            assert await work() == "x" * 10


class TestBlockingFunctions:
    @pytest.mark.rule("RU-7", "RU-11")
    def test_concurrent_threads_run_the_function_once(self, place: str) -> None:
        log, calls = oncelog.open_blocking(place), CallCounter()
        began, go_on = threading.Event(), threading.Event()

        @once(log, name="work")
        def work(number: int) -> Invoice:
            calls.times += 1
            began.set()
            go_on.wait()
            return Invoice(UUID(int=number), dt.datetime(2026, 1, 1, tzinfo=dt.UTC), [("a", 1)])

        with log, ThreadPoolExecutor(20) as threads:
            callers = [threads.submit(work, 1) for _ in range(20)]
            began.wait()
            go_on.set()
            answers = [caller.result() for caller in callers]
            assert answers == [work(1)] * 20
        assert calls.times == 1

    def test_exceptions_propagate_and_only_listed_ones_are_stored(self, place: str) -> None:
        log, calls = oncelog.open_blocking(place), CallCounter()

        @once(log, name="work", remember=[DeclinedError])
        def work(card: str) -> int:
            calls.times += 1
            if card == "bad":
                raise DeclinedError(card, calls.times)
            raise OSError(calls.times)

        with log:
            for expected in (1, 2):
                with pytest.raises(OSError, match=str(expected)):
                    work("good")
            for _ in range(2):
                with pytest.raises(DeclinedError, match="bad: 3"):
                    work("bad")
        assert calls.times == 3

    def test_interrupted_function_releases_its_lease(self, place: str) -> None:
        log, calls = oncelog.open_blocking(place, clock=ManualClock()), CallCounter()

        @once(log, name="work")
        def work() -> int:
            calls.times += 1
            if calls.times == 1:
                raise KeyboardInterrupt
            return calls.times

        with log:
            with pytest.raises(KeyboardInterrupt):
                work()
            assert work() == 2

    def test_interrupt_during_the_claim_releases_the_lease(self, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
        log = oncelog.open_blocking(place, clock=ManualClock())

        @once(log, name="work")
        def work() -> int:
            return 1

        with log:
            works = log.leases
            begin = works._portal.call
            interrupts = [KeyboardInterrupt()]

            def call(function: Any, *arguments: Any) -> Any:
                outcome = begin(function, *arguments)
                if interrupts:
                    raise interrupts.pop()
                return outcome

            monkeypatch.setattr(works._portal, "call", call)
            with pytest.raises(KeyboardInterrupt):
                work()
            # This call would never return while the lease is held, because the clock does not advance.
            assert work() == 1

    def test_ignored_self_is_not_part_of_the_key(self, place: str) -> None:
        log = oncelog.open_blocking(place)

        class Shop:
            def __init__(self, name: str) -> None:
                self.name = name

            @once(log, name="Shop.sell", ignore=["self"])
            def sell(self, number: int) -> str:
                return f"{self.name} {number}"

        with log:
            assert [Shop("a").sell(1), Shop("b").sell(1), Shop("b").sell(2)] == ["a 1", "a 1", "b 2"]
