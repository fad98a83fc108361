"""A decorated function runs once for a key, whoever calls it, and gives every caller the same."""

import asyncio
import dataclasses
import datetime as dt
import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path
from typing import Any, Final
from uuid import UUID

import msgspec
import pytest

import oncelog
from databases import BOTH_STORES, log_at
from engine.watched import Gate, run, turns, until
from oncelog import (
    FOREVER,
    CanonicalError,
    ClosedError,
    ConflictError,
    InFlightError,
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
LEASE_MS: Final = 30_000


class Counted:
    """How often something was done."""

    def __init__(self) -> None:
        self.times = 0


@dataclasses.dataclass
class Invoice:
    number: UUID
    at: dt.datetime
    lines: list[tuple[str, int]]


@dataclasses.dataclass(frozen=True)
class Refund:
    cents: int


@dataclasses.dataclass(frozen=True)
class Charge:
    cents: int


class Node(msgspec.Struct):
    children: "list[Node]"


class DeclinedError(Exception):
    def __init__(self, card: str, code: int) -> None:
        super().__init__(f"{card}: {code}")
        self.card = card
        self.code = code


class TestAnAsyncFunction:
    @pytest.mark.rule("RU-11")
    def test_runs_once_for_equal_arguments_however_they_are_given(self, place: str) -> None:
        async def main() -> None:
            log, calls = oncelog.open(place), Counted()

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

        run(main())

    @BOTH_STORES
    @pytest.mark.rule("RU-11")
    def test_gives_the_same_after_a_restart(self, tmp_path: Path) -> None:
        calls = Counted()
        number, at = UUID(int=7), dt.datetime(2026, 11, 16, tzinfo=dt.UTC)

        async def session() -> Invoice:
            log = oncelog.open(log_at(tmp_path / "app.db"))

            @once(log, name="invoice")
            async def invoice(customer: str) -> Invoice:
                calls.times += 1
                return Invoice(number, at, [(customer, 1)])

            async with log:
                return await invoice("a")

        assert run(session()) == run(session()) == Invoice(number, at, [("a", 1)])
        assert calls.times == 1

    @pytest.mark.rule("RU-7", "RU-11")
    def test_a_storm_of_callers_runs_it_once(self, place: str) -> None:
        async def main() -> None:
            log, calls, gate = oncelog.open(place), Counted(), Gate()

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

        run(main())

    @pytest.mark.rule("RU-11")
    def test_a_key_with_other_arguments_is_a_conflict_and_nothing_runs(self, place: str) -> None:
        async def main() -> None:
            log, calls, gate = oncelog.open(place), Counted(), Gate()

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
                    await pay("a", 2)  # while it runs
                gate.open()
                assert await first == 1
                with pytest.raises(ConflictError):
                    await pay("a", 2)
                assert await pay("a", 1) == 1
                assert calls.times == 1
                assert await pay("b", 2) == 2

        run(main())

    @pytest.mark.rule("RU-7")
    def test_an_exception_is_not_kept_and_those_who_waited_get_it(self, place: str) -> None:
        async def main() -> None:
            log, calls, gate = oncelog.open(place), Counted(), Gate()

            @once(log, name="work")
            async def work() -> int:
                calls.times += 1
                await gate()
                if calls.times == 1:
                    raise KeyError("first")
                return calls.times

            async with log:
                gate.shut()
                callers = [asyncio.create_task(work()) for _ in range(5)]
                await gate.reached.wait()
                await turns()
                gate.open()
                outcomes = await asyncio.gather(*callers, return_exceptions=True)
                assert [repr(outcome) for outcome in outcomes] == ["KeyError('first')"] * 5
                assert await work() == 2
                assert await work() == 2

        run(main())

    @BOTH_STORES
    @pytest.mark.rule("RU-11")
    def test_a_listed_exception_is_kept_and_raised_again(self, tmp_path: Path) -> None:
        calls = Counted()

        async def session() -> DeclinedError:
            log = oncelog.open(log_at(tmp_path / "app.db"))

            @once(log, name="charge", remember=(DeclinedError,))
            async def charge(card: str) -> int:
                calls.times += 1
                raise DeclinedError(card, 51)

            async with log:
                with pytest.raises(DeclinedError) as raised:
                    await charge("visa")
                return raised.value

        first, second = run(session()), run(session())
        assert (
            (second.card, second.code, second.args)
            == (first.card, first.code, first.args)
            == ("visa", 51, ("visa: 51",))
        )
        assert calls.times == 1

    def test_a_listed_exception_that_no_json_can_hold_is_kept_by_its_text(self, place: str) -> None:
        async def main() -> None:
            log, calls = oncelog.open(place), Counted()

            @once(log, name="odd", remember=(LookupError,))
            async def odd() -> int:
                calls.times += 1
                raise KeyError(object)

            async with log:
                with pytest.raises(KeyError):
                    await odd()
                with pytest.raises(LookupError, match="class 'object'"):
                    await odd()
            assert calls.times == 1

        run(main())

    @pytest.mark.parametrize("remember", [(), (ValueError,)])
    def test_an_error_whose_text_has_no_form_leaves_no_lease(self, place: str, remember: Any) -> None:
        class OddError(ValueError):
            def __str__(self) -> str:
                return "\ud800"

        async def main() -> None:
            log, calls = oncelog.open(place, clock=ManualClock()), Counted()

            @once(log, name="work", remember=remember)
            async def work() -> int:
                calls.times += 1
                raise OddError(object())

            async with log:
                for _ in range(2):
                    with pytest.raises(ValueError):
                        await work()
                assert log.works.leases == 0
            assert calls.times == (1 if remember else 2)

        run(main())

    def test_an_error_that_cannot_even_be_printed_leaves_no_lease(self, place: str) -> None:
        class UnprintableError(Exception):
            def __str__(self) -> str:
                raise RuntimeError

        async def main() -> None:
            async with oncelog.open(place, clock=ManualClock()) as log:

                @once(log, name="work")
                async def work() -> int:
                    raise UnprintableError

                for _ in range(2):
                    with pytest.raises(UnprintableError):
                        await work()

        run(main())

    def test_stop_iteration_is_an_error_like_others(self, place: str) -> None:
        """No future takes it, and those who wait must not wait for ever."""

        async def main() -> None:
            gate = Gate()
            nothing: list[int] = []
            async with oncelog.open(place) as log:

                @once(log, name="work")
                async def work() -> int:
                    await gate()
                    return next(iter(nothing))

                gate.shut()
                callers = [asyncio.create_task(work()) for _ in range(3)]
                await gate.reached.wait()
                await turns()
                gate.open()
                outcomes = await asyncio.gather(*callers, return_exceptions=True)
                assert {type(outcome) for outcome in outcomes} == {RuntimeError}
                assert log.works.leases == 0

        run(main())

    @pytest.mark.rule("RU-7")
    def test_cancelling_the_one_that_runs_passes_it_on_at_once(self, place: str) -> None:
        async def main() -> None:
            clock = ManualClock()  # it stands still: the lease does not end by itself
            log, calls, gate = oncelog.open(place, clock=clock), Counted(), Gate()

            @once(log, name="work")
            async def work() -> int:
                calls.times += 1
                await gate()
                return calls.times

            async with log:
                gate.shut()
                first = asyncio.create_task(work())
                await gate.reached.wait()
                second = asyncio.create_task(work())
                await turns()
                first.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await first
                await until(lambda: calls.times == 2)
                gate.open()
                assert await second == 2
                assert await work() == 2

        run(main())

    def test_cancelling_one_that_waits_harms_nobody(self, place: str) -> None:
        async def main() -> None:
            log, calls, gate = oncelog.open(place), Counted(), Gate()

            @once(log, name="work")
            async def work() -> int:
                calls.times += 1
                await gate()
                return calls.times

            async with log:
                gate.shut()
                callers = [asyncio.create_task(work()) for _ in range(3)]
                await gate.reached.wait()
                await turns()
                waiting = callers[1]
                waiting.cancel()
                gate.open()
                outcomes = await asyncio.gather(*callers, return_exceptions=True)
                assert [type(outcome) for outcome in outcomes] == [int, asyncio.CancelledError, int]
            assert calls.times == 1

        run(main())

    def test_cancelled_at_any_turn_it_leaves_no_lease_behind(self, place: str) -> None:
        """The claim may be on its way when its caller goes."""

        async def main() -> None:
            log, calls = oncelog.open(place, clock=ManualClock()), Counted()

            @once(log, name="work")
            async def work(number: int) -> int:
                calls.times += 1
                return number

            async with log:
                for number in range(40):
                    caller = asyncio.create_task(work(number))
                    await turns(number)
                    caller.cancel()
                    await asyncio.gather(caller, return_exceptions=True)
                    assert await work(number) == number  # would wait for ever: the clock stands still

        run(main())

    def test_in_flight_can_be_an_error(self, place: str) -> None:
        async def main() -> None:
            log, gate = oncelog.open(place, clock=ManualClock()), Gate()

            async def work() -> int:
                await gate()
                return 1

            eager = once(log, name="work", in_flight="raise")(work)
            patient = once(log, name="work", wait_s=0.001)(work)
            async with log:
                gate.shut()
                first = asyncio.create_task(eager())
                await gate.reached.wait()
                with pytest.raises(InFlightError) as raised:
                    await eager()
                assert raised.value.retry_after_ms == LEASE_MS
                with pytest.raises(InFlightError):
                    await patient()
                gate.open()
                assert await first == await eager() == await patient() == 1

        run(main())

    def test_a_timeout_of_the_function_is_its_own(self, place: str) -> None:
        """Not the end of the waiting, which has a limit too."""

        async def main() -> None:
            log, gate = oncelog.open(place), Gate()

            @once(log, name="work", wait_s=60)
            async def work() -> int:
                await gate()
                raise TimeoutError("too slow")

            async with log:
                gate.shut()
                callers = [asyncio.create_task(work()) for _ in range(2)]
                await gate.reached.wait()
                await turns()
                gate.open()
                outcomes = await asyncio.gather(*callers, return_exceptions=True)
            assert [repr(outcome) for outcome in outcomes] == ["TimeoutError('too slow')"] * 2

        run(main())

    @pytest.mark.rule("RU-11", "CO-17")
    def test_is_forgotten_after_a_day_or_as_told(self, place: str) -> None:
        async def main() -> None:
            clock = ManualClock()
            log, calls = oncelog.open(place, clock=clock), Counted()

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

        run(main())

    def test_another_retention_under_the_same_name_is_refused(self, place: str) -> None:
        async def main() -> None:
            log = oncelog.open(place)

            async def work() -> int:
                return 1

            async with log:
                await once(log, name="work")(work)()
                with pytest.raises(PolicyError):
                    await once(log, name="work", retention=FOREVER)(work)()

        run(main())

    def test_scopes_keep_equal_keys_apart(self, place: str) -> None:
        async def main() -> None:
            log, calls = oncelog.open(place), Counted()

            @once(log, name="work", key=lambda _, key: key, scope=lambda user, *_: user, ignore=["user"])
            async def work(user: str, key: str) -> str:
                calls.times += 1
                return user

            async with log:
                assert [await work(user, "k") for user in ("a", "b", "a", "b")] == ["a", "b", "a", "b"]
            assert calls.times == 2

        run(main())

    def test_arguments_of_two_classes_are_two_calls(self, place: str) -> None:
        async def main() -> None:
            async with oncelog.open(place) as log:

                @once(log, name="book")
                async def book(entry: Any) -> str:
                    return type(entry).__name__

                calls: list[Any] = [Refund(5), Charge(5), [Refund(5)], [Charge(5)], {"a": 1}, Node([]), Refund(5)]
                given = [await book(call) for call in calls]
            assert given == ["Refund", "Charge", "list", "list", "dict", "Node", "Refund"]

        run(main())

    def test_what_looks_alike_in_json_is_not_alike(self, place: str) -> None:
        async def main() -> None:
            async with oncelog.open(place) as log:

                @once(log, name="look")
                async def look(value: Any) -> str:
                    return repr(value)

                id_ = UUID(int=1)
                day = dt.date(2026, 1, 1)
                values: list[Any] = [b"abc", "YWJj", Decimal("1.0"), "1.0", 1, id_, str(id_), day, day.isoformat()]
                values += [{1, 2}, [1, 2], frozenset({1, 2}), 2**60, str(2**60), 2**70, True, "True", None]
                assert [await look(value) for value in values] == [repr(value) for value in values]
                assert await look((1, 2)) == "[1, 2]"  # but for tuples, which JSON has none of

        run(main())

    def test_a_call_of_itself_is_told(self, place: str) -> None:
        async def main() -> None:
            async with oncelog.open(place) as log:

                @once(log, name="work")
                async def work(number: int) -> int:
                    return number if number == 2 else await work(2 if number == 0 else number)

                assert await work(0) == 2
                with pytest.raises(WorkError, match="itself"):
                    await work(1)
                assert log.works.leases == 0

        run(main())

    def test_the_wait_has_a_limit_but_not_the_claim(self, place: str) -> None:
        async def main() -> None:
            async with oncelog.open(place) as log:

                @once(log, name="work", wait_s=0.001)
                async def work(number: int) -> int:
                    return number

                assert [await work(number) for number in range(20)] == list(range(20))

        run(main())

    def test_listed_exceptions_that_cannot_be_made_again_are_told(self, place: str) -> None:
        class StubbornError(Exception):
            def __new__(cls, *, needed: int) -> "StubbornError":
                return super().__new__(cls, needed)

            def __init__(self, *, needed: int) -> None:
                super().__init__(needed)

        async def main() -> None:
            calls = Counted()
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
                    with pytest.raises(ResultError, match="cannot be made again"):
                        await work(kind)
            assert calls.times == 2

        run(main())

    def test_two_functions_do_not_share_their_keys(self, place: str) -> None:
        async def main() -> None:
            log = oncelog.open(place)

            async def work() -> str:
                return "first"

            async def other() -> str:
                return "second"

            async with log:
                assert await once(log, name="work")(work)() == "first"
                assert await once(log, name="Work")(other)() == "second"

        run(main())

    @pytest.mark.rule("CO-41")
    def test_an_erased_result_is_not_given_and_not_made_again(self, place: str) -> None:
        async def main() -> None:
            log, calls = oncelog.open(place), Counted()

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

        run(main())

    def test_small_and_no_memory_of_results_give_the_same(self, place: str) -> None:
        async def main(limit: int) -> None:
            log, calls = oncelog.open(place, limits=Limits(results_bytes_max=limit)), Counted()

            @once(log, name="work")
            async def work(number: int) -> str:
                calls.times += 1
                return str(number) * 100

            async with log:
                for _ in range(2):
                    assert [await work(number) for number in range(20)] == [str(number) * 100 for number in range(20)]
                if place == ":memory:":
                    assert calls.times == 20

        for limit in (0, 1, 2000):
            run(main(limit))

    def test_the_log_may_come_from_a_function(self, place: str) -> None:
        async def main() -> None:
            logs: list[oncelog.Log] = []

            @once(lambda: logs[0], name="work")
            async def work() -> int:
                return 1

            async with oncelog.open(place) as log:
                logs.append(log)
                assert await work() == 1

        run(main())

    def test_needs_an_open_log(self, place: str) -> None:
        log = oncelog.open(place)

        @once(log, name="work")
        async def work() -> int:
            raise AssertionError

        with pytest.raises(ClosedError):
            run(work())

    def test_a_result_that_is_not_what_was_said_is_told_and_not_kept(self, place: str) -> None:
        async def main() -> None:
            log, answers = oncelog.open(place), [object(), "text", 3]

            @once(log, name="work", result=int)
            async def work() -> Any:
                return answers.pop(0)

            async with log:
                for _ in range(2):
                    with pytest.raises(ResultError, match="int"):
                        await work()
                assert await work() == await work() == 3

        run(main())

    def test_a_result_beyond_the_limit_is_told_and_leaves_no_lease(self, place: str) -> None:
        async def main() -> None:
            log = oncelog.open(place, limits=Limits(body_bytes_max=100), clock=ManualClock())
            sizes = [200, 10]

            @once(log, name="work")
            async def work() -> str:
                return "x" * sizes.pop(0)

            async with log:
                with pytest.raises(ResultError, match="100 bytes"):
                    await work()
                assert await work() == "x" * 10

        run(main())

    @pytest.mark.rule("RU-7")
    def test_the_lease_is_renewed_while_it_runs(self, place: str) -> None:
        async def main() -> None:
            clock = ManualClock()
            log, gate = oncelog.open(place, clock=clock), Gate()

            @once(log, name="work", lease_s=0.003, in_flight="raise")
            async def work() -> int:
                await gate()
                return 1

            async with log:
                gate.shut()
                first = asyncio.create_task(work())
                await gate.reached.wait()
                for _ in range(3):
                    clock.advance(2)
                    before = clock.wall_ms()
                    await _until_renewed(log, work_of(work), before)
                with pytest.raises(InFlightError):
                    await work()
                gate.open()
                assert await first == 1

        run(main())


async def _until_renewed(log: oncelog.Log, work: oncelog.Work, now_ms: int) -> None:
    """The loop's own time passes in milliseconds, which the lease's renewal waits for."""
    while True:
        outcome = await log.lookup(work.key, policy=work.policy, scope=work.scope)
        if outcome.lease is not None and outcome.lease.until_ms > now_ms + 1:
            return
        await asyncio.sleep(0)


class TestABlockingFunction:
    @pytest.mark.rule("RU-7", "RU-11")
    def test_runs_once_for_many_threads(self, place: str) -> None:
        log, calls = oncelog.open_blocking(place), Counted()
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
            answers = [caller.result(30) for caller in callers]
            assert answers == [work(1)] * 20
        assert calls.times == 1

    def test_exceptions_are_passed_on_and_only_listed_ones_kept(self, place: str) -> None:
        log, calls = oncelog.open_blocking(place), Counted()

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

    def test_interrupted_it_gives_its_lease_back(self, place: str) -> None:
        log, calls = oncelog.open_blocking(place, clock=ManualClock()), Counted()

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

    def test_interrupted_with_the_lease_on_its_way_it_is_given_back(
        self, place: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        log = oncelog.open_blocking(place, clock=ManualClock())

        @once(log, name="work")
        def work() -> int:
            return 1

        with log:
            works = log.works
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
            assert work() == 1  # would wait for ever: the clock stands still

    def test_methods_take_self_out_of_the_key(self, place: str) -> None:
        log = oncelog.open_blocking(place)

        class Shop:
            def __init__(self, name: str) -> None:
                self.name = name

            @once(log, name="Shop.sell", ignore=["self"])
            def sell(self, number: int) -> str:
                return f"{self.name} {number}"

        with log:
            assert [Shop("a").sell(1), Shop("b").sell(1), Shop("b").sell(2)] == ["a 1", "a 1", "b 2"]


def sync_int() -> int:
    return 1


async def async_int() -> int:
    return 1


class TestDecorating:
    """What cannot work is an error when the function is decorated, not when it runs."""

    @pytest.mark.rule("RU-11")
    @pytest.mark.parametrize(
        "kind",
        [object, complex, list[threading.Lock], dict[str, Callable[[], int]], threading.Thread, dict[int, object]],
    )
    def test_a_result_that_json_cannot_hold(self, kind: object) -> None:
        def work() -> Any: ...

        work.__annotations__["return"] = kind
        with pytest.raises(TypeError, match="cannot be kept as JSON"):
            once(oncelog.open_blocking(":memory:"), name="work")(work)

    @pytest.mark.parametrize(
        "kind", [None, int, list[Invoice], dict[str, Any], tuple[int, str], set[UUID] | None, dt.date, bytes]
    )
    def test_a_result_that_json_can_hold(self, kind: object) -> None:
        def work() -> Any: ...

        work.__annotations__["return"] = kind
        once(oncelog.open_blocking(":memory:"), name="work")(work)

    def test_a_type_that_contains_itself(self) -> None:
        once(oncelog.open_blocking(":memory:"), name="work", result=Node)(sync_int)

    def test_a_function_without_annotation(self) -> None:
        def work():  # type: ignore[no-untyped-def]
            return 1

        with pytest.raises(TypeError, match="does not say what it returns"):
            once(oncelog.open_blocking(":memory:"), name="work")(work)

    def test_a_log_of_the_other_kind(self) -> None:
        with pytest.raises(TypeError, match="is async"):
            once(oncelog.open_blocking(":memory:"))(async_int)
        with pytest.raises(TypeError, match="is not async"):
            once(oncelog.open(":memory:"))(sync_int)

    def test_what_is_no_function(self) -> None:
        log = oncelog.open_blocking(":memory:")
        with pytest.raises(TypeError, match="functions"):
            once(log, name="work")(functools.partial(sync_int))
        with pytest.raises(TypeError, match=r"@oncelog.once\(log\)"):
            once(abs)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="takes a log"):
            once("app.db")  # type: ignore[arg-type]

    @pytest.mark.parametrize("scope", [5, b"x", lambda: None])
    def test_scopes_that_are_no_texts(self, scope: Any) -> None:
        with pytest.raises(TypeError, match="scope"):
            work_of(once(oncelog.open_blocking(":memory:"), scope=scope)(sync_int))

    def test_generators(self) -> None:
        def numbers() -> Any:
            yield 1

        with pytest.raises(TypeError, match="generator"):
            once(oncelog.open_blocking(":memory:"), name="work")(numbers)

    def test_a_function_inside_another_needs_a_name(self) -> None:
        def inner() -> int:
            return 1

        with pytest.raises(ValueError, match="name="):
            once(oncelog.open_blocking(":memory:"))(inner)

    def test_names(self) -> None:
        log = oncelog.open_blocking(":memory:")
        work = work_of(once(log)(sync_int))
        assert work.scope == f"once/{__name__}.sync_int"
        assert work.policy.name == f"once.{__name__}.sync_int"
        long = work_of(once(log, name="A" * 100)(sync_int))
        assert len(long.policy.name) == 64
        assert long.policy.name != work_of(once(log, name="a" * 100)(sync_int)).policy.name
        assert sync_int.__name__ == once(log)(sync_int).__name__

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"ignore": ["nobody"]}, "nobody"),
            ({"in_flight": "maybe"}, "in_flight"),
            ({"lease_s": 0}, "lease_s"),
            ({"lease_s": 100_000}, "lease_s"),
            ({"wait_s": -1}, "wait_s"),
            ({"wait_s": True}, "wait_s"),
            ({"remember": [3]}, "remember"),
            ({"remember": [KeyboardInterrupt]}, "remember"),
            ({"remember": ValueError}, "remember"),
            ({"ignore": "nobody"}, "ignore"),
            ({"key": "k"}, "key"),
            ({"name": 5}, "name"),
            ({"name": ""}, "name"),
            ({"name": "x" * 300}, "name"),
            ({"name": "a\0"}, "name"),
            ({"name": "\ud800"}, "name"),
        ],
    )
    def test_options_out_of_range(self, options: dict[str, Any], said: str) -> None:
        with pytest.raises((ValueError, TypeError), match=said):
            once(oncelog.open_blocking(":memory:"), **options)(sync_int)

    def test_arguments_that_have_no_canonical_form(self) -> None:
        log = oncelog.open_blocking(":memory:")

        @once(log, name="work")
        def work(good: int, bad: Any) -> int:
            raise AssertionError

        with log:
            for bad in (object(), {1: 2}, {"a": {2: "b"}}, {"a": [object()]}, float("nan"), "\ud800", {b"a", 1.5j}):
                with pytest.raises(CanonicalError, match=r"\$.*bad"):
                    work(1, bad)
            with pytest.raises(TypeError, match="missing"):
                work(1)  # type: ignore[call-arg]

    @pytest.mark.parametrize(
        ("key", "said"),
        [("", "1 to 255"), ("x" * 256, "1 to 255"), (3, "text"), (None, "text"), ("\ud800", "surrogates")],
    )
    def test_keys_that_are_none(self, key: Any, said: str) -> None:
        log = oncelog.open_blocking(":memory:")
        with log, pytest.raises((ValueError, TypeError), match=said):
            once(log, key=lambda: key)(sync_int)()

    def test_who_is_not_decorated_has_no_work(self) -> None:
        with pytest.raises(TypeError, match="not decorated"):
            work_of(sync_int)
