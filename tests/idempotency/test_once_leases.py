"""Leases of decorated functions: errors, cancellation, waiting callers and renewal."""

import asyncio
from pathlib import Path
from typing import Any, Final

import pytest

import oncelog
from databases import BOTH_STORES, log_at
from deadlines import turns, until
from engine.observable_store import Gate, count_leases
from idempotency.conftest import Waiters
from idempotency.once_samples import CallCounter, DeclinedError
from oncelog import (
    InFlightError,
    once,
    work_of,
)
from oncelog.testing.clock import ManualClock

LEASE_MS: Final = 30_000


class TestErrorsAndCancellation:
    @pytest.mark.rule("RU-7")
    async def test_exception_is_not_stored_and_reaches_waiting_callers(self, place: str, waiters: Waiters) -> None:
        log, calls, gate = oncelog.open(place), CallCounter(), Gate()

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
            await waiters.until(4)
            gate.open()
            outcomes = await asyncio.gather(*callers, return_exceptions=True)
            assert [repr(outcome) for outcome in outcomes] == ["KeyError('first')"] * 5
            assert await work() == 2
            assert await work() == 2

    @BOTH_STORES
    @pytest.mark.rule("RU-11")
    async def test_listed_exception_is_stored_and_raised_again(self, tmp_path: Path) -> None:
        calls = CallCounter()

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

        first, second = await session(), await session()
        assert (
            (second.card, second.code, second.args)
            == (first.card, first.code, first.args)
            == ("visa", 51, ("visa: 51",))
        )
        assert calls.times == 1

    async def test_listed_exception_without_json_form_is_stored_as_text(self, place: str) -> None:
        log, calls = oncelog.open(place), CallCounter()

        @once(log, name="odd", remember=(LookupError,))
        async def raise_unencodable() -> int:
            calls.times += 1
            raise KeyError(object)

        async with log:
            with pytest.raises(KeyError):
                await raise_unencodable()
            with pytest.raises(LookupError, match="class 'object'"):
                await raise_unencodable()
        assert calls.times == 1

    @pytest.mark.parametrize("remember", [(), (ValueError,)])
    async def test_error_whose_text_cannot_be_encoded_leaves_no_lease(self, place: str, remember: Any) -> None:
        class OddError(ValueError):
            def __str__(self) -> str:
                return "\ud800"

        log, calls = oncelog.open(place, clock=ManualClock()), CallCounter()

        @once(log, name="work", remember=remember)
        async def work() -> int:
            calls.times += 1
            raise OddError(object())

        async with log:
            for _ in range(2):
                with pytest.raises(ValueError):
                    await work()
            assert count_leases(log) == 0
        assert calls.times == (1 if remember else 2)

    async def test_error_that_cannot_be_printed_leaves_no_lease(self, place: str) -> None:
        class UnprintableError(Exception):
            def __str__(self) -> str:
                raise RuntimeError

        async with oncelog.open(place, clock=ManualClock()) as log:

            @once(log, name="work")
            async def work() -> int:
                raise UnprintableError

            for _ in range(2):
                with pytest.raises(UnprintableError):
                    await work()

    async def test_stop_iteration_becomes_a_runtime_error_for_all_callers(self, place: str, waiters: Waiters) -> None:
        """A future cannot hold StopIteration, but the waiting callers must still get an answer."""
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
            await waiters.until(2)
            gate.open()
            outcomes = await asyncio.gather(*callers, return_exceptions=True)
            assert {type(outcome) for outcome in outcomes} == {RuntimeError}
            assert count_leases(log) == 0

    @pytest.mark.rule("RU-7")
    async def test_cancelling_the_running_caller_lets_a_waiting_caller_run_immediately(
        self, place: str, waiters: Waiters
    ) -> None:
        clock = ManualClock()  # The clock does not advance, so the lease does not expire.
        log, calls, gate = oncelog.open(place, clock=clock), CallCounter(), Gate()

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
            await waiters.until(1)
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first
            await until(lambda: calls.times == 2)
            gate.open()
            assert await second == 2
            assert await work() == 2

    async def test_cancelling_a_waiting_caller_does_not_affect_the_others(self, place: str, waiters: Waiters) -> None:
        log, calls, gate = oncelog.open(place), CallCounter(), Gate()

        @once(log, name="work")
        async def work() -> int:
            calls.times += 1
            await gate()
            return calls.times

        async with log:
            gate.shut()
            callers = [asyncio.create_task(work()) for _ in range(3)]
            await gate.reached.wait()
            await waiters.until(2)
            waiting = callers[1]
            waiting.cancel()
            gate.open()
            outcomes = await asyncio.gather(*callers, return_exceptions=True)
            assert [type(outcome) for outcome in outcomes] == [int, asyncio.CancelledError, int]
        assert calls.times == 1

    async def test_cancellation_in_any_loop_iteration_leaves_no_lease(self, place: str) -> None:
        """The claim can still be in the queue when its caller is cancelled."""
        log, calls = oncelog.open(place, clock=ManualClock()), CallCounter()

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
                assert (
                    await work(number) == number
                )  # This call would never return while a lease is held, because the clock does not advance.

    async def test_option_in_flight_raise_and_wait_s_raise_in_flight_error(self, place: str) -> None:
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

    async def test_timeout_error_of_the_function_is_passed_to_all_callers(self, place: str, waiters: Waiters) -> None:
        """The error must not be mistaken for the `wait_s` timeout."""
        log, gate = oncelog.open(place), Gate()

        @once(log, name="work", wait_s=60)
        async def work() -> int:
            await gate()
            raise TimeoutError("too slow")

        async with log:
            gate.shut()
            callers = [asyncio.create_task(work()) for _ in range(2)]
            await gate.reached.wait()
            await waiters.until(1)
            gate.open()
            outcomes = await asyncio.gather(*callers, return_exceptions=True)
        assert [repr(outcome) for outcome in outcomes] == ["TimeoutError('too slow')"] * 2

    @pytest.mark.rule("RU-7")
    async def test_lease_is_renewed_while_the_function_runs(self, place: str) -> None:
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


async def _until_renewed(log: oncelog.Log, work: oncelog.Work, now_ms: int) -> None:
    """Wait for the renewal, which runs on event loop time."""
    while True:
        outcome = await log.lookup(work.key, policy=work.policy, scope=work.scope)
        if outcome.lease is not None and outcome.lease.until_ms > now_ms + 1:
            return
        await asyncio.sleep(0)
