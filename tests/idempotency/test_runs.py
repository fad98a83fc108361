"""A tool runs once per combination of six fields, and its result is an event of its campaign."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import pytest

import oncelog
from databases import BOTH_STORES, log_at
from deadlines import until
from engine.observable_store import Gate, count_leases
from idempotency.conftest import Waiters
from idempotency.run_samples import FIELDS
from oncelog import (
    BlockingRuns,
    CanonicalError,
    InFlightError,
    LeaseLostError,
    ResultError,
    RunCounters,
    RunFailedError,
    Runs,
    Shadow,
    run_key,
    run_key_v1,
    scope_of,
)
from oncelog.engine import leases
from oncelog.testing.clock import ManualClock

LEASE_MS: Final = 30_000


class Dice:
    """A tool that records its calls."""

    def __init__(self) -> None:
        self.rolls: list[dict[str, Any]] = []

    async def __call__(self, **args: Any) -> dict[str, Any]:
        return self.roll(**args)

    async def roll_async(self, **args: Any) -> dict[str, Any]:
        return self.roll(**args)

    def roll(self, **args: Any) -> dict[str, Any]:
        self.rolls.append(args)
        return {"roll": len(self.rolls)}


class TestRuns:
    @pytest.mark.rule("RU-6")
    async def test_first_call_runs_the_tool_and_later_calls_reuse_its_event(self, place: str) -> None:
        dice = Dice()
        async with oncelog.open(place) as log:
            runs = Runs(log)
            first = await runs.execute(**FIELDS, tool=dice.roll)
            again = await runs.execute(**FIELDS, tool=dice.roll_async)
            other = await runs.execute(**FIELDS | {"args": {"sides": 6}}, tool=dice)
        assert (first.reused, again.reused, other.reused) == (False, True, False)
        assert first.event == again.event
        assert (first.event.output, first.event.ordinal) == ({"roll": 1}, 1)
        assert (other.event.output, other.event.ordinal) == ({"roll": 2}, 2)
        assert first.event.key == run_key("plan-7", 12, "tool.execute", "dice", "v1", {"sides": 20}).hex()
        assert first.event.args == {"sides": 20}
        assert dice.rolls == [{"sides": 20}, {"sides": 6}]
        assert runs.counters == RunCounters(executed=2, reused=1)

    @BOTH_STORES
    @pytest.mark.rule("RU-6")
    async def test_event_is_reused_after_a_restart(self, tmp_path: Path) -> None:
        dice = Dice()

        async def session() -> oncelog.Run:
            async with oncelog.open(log_at(tmp_path / "app.db")) as log:
                return await Runs(log).execute(**FIELDS, tool=dice.roll)

        first, second = await session(), await session()
        assert first.event == second.event
        assert (first.reused, second.reused, len(dice.rolls)) == (False, True, 1)

    @pytest.mark.rule("RU-6")
    async def test_ordinals_of_a_campaign_have_no_gaps(self, place: str) -> None:
        dice = Dice()
        async with oncelog.open(place) as log:
            runs = Runs(log)
            ordinals = []
            for number in range(5):
                for campaign in (1, 2):
                    fields = FIELDS | {"campaign_id": campaign, "args": {"number": number}}
                    ordinals.append((await runs.execute(**fields, tool=dice.roll)).event.ordinal)
                with pytest.raises(ZeroDivisionError):
                    await runs.execute(**FIELDS | {"campaign_id": 1, "args": {"bad": number}}, tool=_fail)
            records = (await log.read(stream=scope_of("runs", 1))).records
        assert ordinals == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
        assert [record.sequence for record in records] == [1, 2, 3, 4, 5]

    @pytest.mark.rule("RU-8")
    async def test_campaigns_do_not_share_keys(self, place: str) -> None:
        dice = Dice()
        async with oncelog.open(place) as log:
            events = [
                (await Runs(log).execute(**FIELDS | {"campaign_id": campaign}, tool=dice.roll)).event
                for campaign in (1, 2, -1)
            ]
        assert [event.output for event in events] == [{"roll": 1}, {"roll": 2}, {"roll": 3}]
        assert len({event.key for event in events}) == 3

    @pytest.mark.rule("RU-2", "RU-3")
    async def test_null_empty_and_missing_fields_identify_the_same_run(self, place: str) -> None:
        dice = Dice()
        async with oncelog.open(place) as log:
            runs = Runs(log)
            spellings: list[dict[str, Any]] = [
                {"plan_id": None, "args": None},
                {"plan_id": "", "args": {}},
                {"plan_id": "", "args": {"left": None}},
            ]
            answers = [await runs.execute(**FIELDS | spelling, tool=dice.roll) for spelling in spellings]
        assert [answer.reused for answer in answers] == [False, True, True]
        assert dice.rolls == [{}]

    @pytest.mark.rule("RU-4")
    @pytest.mark.parametrize(
        ("wrong", "path"),
        [
            ({"args": {"x": 1.5}}, r"\$.args_json.x"),
            ({"args": {"x": object()}}, r"\$.args_json.x"),
            ({"args": {1: 2}}, r"\$.args_json"),
            ({"campaign_id": "12"}, r"\$.campaign_id"),
            ({"event_type": None}, r"\$.event_type"),
        ],
    )
    async def test_invalid_field_is_refused_with_its_path_and_runs_nothing(
        self, wrong: dict[str, Any], path: str
    ) -> None:
        async with oncelog.open(":memory:") as log:
            with pytest.raises(CanonicalError, match=path):
                await Runs(log).execute(**FIELDS | wrong, tool=_must_not_run)

    @pytest.mark.rule("RU-4", "RU-6")
    async def test_large_integers_are_stored_exactly(self, place: str) -> None:
        async with oncelog.open(place) as log:
            fields = FIELDS | {"args": {"sides": 2**63 - 1}, "campaign_id": 2**70}
            for reused in (False, True):
                answer = await Runs(log).execute(**fields, tool=lambda sides: {"got": sides, "half": 0.5})
                assert answer.reused is reused
                assert answer.event.args == {"sides": 2**63 - 1}
                assert answer.event.output == {"got": 2**63 - 1, "half": 0.5}
                assert answer.event.campaign_id == 2**70

    @pytest.mark.rule("RU-7")
    @pytest.mark.parametrize("kind", ["async", "thread"])
    async def test_concurrent_callers_run_the_tool_once(self, place: str, kind: str) -> None:
        gate, go_on, times = Gate(), threading.Event(), [0]

        async def wait_for_gate(**_: Any) -> str:
            times[0] += 1
            await gate()
            return "done"

        def wait_in_thread(**_: Any) -> str:
            times[0] += 1
            gate_reached()
            go_on.wait()
            return "done"

        loop = asyncio.get_running_loop()

        def gate_reached() -> None:
            loop.call_soon_threadsafe(gate.reached.set)

        async with oncelog.open(place) as log:
            runs = Runs(log)
            gate.shut()
            tool = wait_for_gate if kind == "async" else wait_in_thread
            callers = [asyncio.create_task(runs.execute(**FIELDS, tool=tool)) for _ in range(100)]
            await gate.reached.wait()
            gate.open()
            go_on.set()
            answers = await asyncio.gather(*callers)
        assert times == [1]
        assert [answer.reused for answer in answers].count(False) == 1
        assert len({answer.event.receipt for answer in answers}) == 1

    @pytest.mark.rule("RU-7")
    async def test_failed_tool_commits_nothing_and_runs_again_on_the_next_call(
        self, place: str, waiters: Waiters
    ) -> None:
        gate = Gate()

        async def fail(**_: Any) -> str:
            await gate()
            raise OSError("no dice")

        async with oncelog.open(place) as log:
            runs = Runs(log)
            gate.shut()
            callers = [asyncio.create_task(runs.execute(**FIELDS, tool=fail)) for _ in range(3)]
            await gate.reached.wait()
            await waiters.until(2)
            gate.open()
            outcomes = await asyncio.gather(*callers, return_exceptions=True)
            assert [str(outcome) for outcome in outcomes] == ["no dice"] * 3
            assert (await log.read(stream=scope_of("runs", 12))).records == []
            assert not (await runs.execute(**FIELDS, tool=Dice().roll)).reused
        assert runs.counters == RunCounters(executed=1, failed=1)

    @BOTH_STORES
    @pytest.mark.rule("RU-7")
    async def test_callers_waiting_on_another_log_get_the_error(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        gate, refused, pause = Gate(), asyncio.Event(), leases._pause

        async def pause_after_a_refusal(pause_s: float, deadline: float | None) -> None:
            refused.set()
            await pause(pause_s, deadline)

        async def fail(**_: Any) -> str:
            await gate()
            raise OSError("no dice" * 2000)

        path = log_at(tmp_path / "a.db")
        async with oncelog.open(path) as here, oncelog.open(path) as there:
            gate.shut()
            first = asyncio.create_task(Runs(here).execute(**FIELDS, tool=fail))
            await gate.reached.wait()
            second = asyncio.create_task(Runs(there).execute(**FIELDS, tool=_must_not_run))
            monkeypatch.setattr(leases, "_pause", pause_after_a_refusal)
            await refused.wait()
            gate.open()
            with pytest.raises(OSError, match="no dice"):
                await first
            with pytest.raises(RunFailedError, match="OSError: no dice") as raised:
                await second
            assert raised.value.kind == "OSError"

    @BOTH_STORES
    @pytest.mark.rule("RU-7")
    async def test_caller_with_an_expired_lease_cannot_complete_after_a_takeover(self, tmp_path: Path) -> None:
        clock, gate = ManualClock(), Gate()

        async def work_slowly(**_: Any) -> str:
            await gate()
            return "late"

        path = log_at(tmp_path / "a.db")
        async with oncelog.open(path, clock=clock) as here, oncelog.open(path, clock=clock) as there:
            gate.shut()
            first = asyncio.create_task(Runs(here).execute(**FIELDS, tool=work_slowly))
            await gate.reached.wait()
            with pytest.raises(InFlightError):
                await Runs(there).execute(**FIELDS, tool=_must_not_run, in_flight="raise")
            clock.advance(LEASE_MS)
            taken_over = await Runs(there).execute(**FIELDS, tool=Dice().roll)
            assert not taken_over.reused
            gate.open()
            with pytest.raises(LeaseLostError):
                await first
            again = await Runs(here).execute(**FIELDS, tool=_must_not_run)
            assert again.event == taken_over.event

    @pytest.mark.rule("RU-7")
    async def test_cancelled_caller_lets_a_threaded_tool_finish(self, place: str) -> None:
        began, go_on, times = threading.Event(), threading.Event(), [0]

        def work_slowly(**_: Any) -> str:
            times[0] += 1
            began.set()
            go_on.wait()
            return "done"

        async with oncelog.open(place, clock=ManualClock()) as log:
            runs = Runs(log)
            caller = asyncio.create_task(runs.execute(**FIELDS, tool=work_slowly))
            await until(began.is_set)
            caller.cancel()
            with pytest.raises(asyncio.CancelledError):
                await caller
            with pytest.raises(InFlightError):
                await runs.execute(**FIELDS, tool=work_slowly, in_flight="raise")
            go_on.set()
            assert (await runs.execute(**FIELDS, tool=work_slowly)).event.output == "done"
        assert times == [1]

    @BOTH_STORES
    @pytest.mark.rule("RU-7")
    async def test_closing_the_log_stores_the_result_of_a_running_thread(self, tmp_path: Path) -> None:
        began, go_on = threading.Event(), threading.Event()

        def work_slowly(**_: Any) -> str:
            began.set()
            go_on.wait()
            return "done"

        async with oncelog.open(log_at(tmp_path / "app.db")) as log:
            caller = asyncio.create_task(Runs(log).execute(**FIELDS, tool=work_slowly))
            await until(began.is_set)
            caller.cancel()
            await asyncio.gather(caller, return_exceptions=True)
            closing = asyncio.create_task(log.close())
            works = log.leases
            await until(lambda: works._is_closing)
            go_on.set()
            await closing
        async with oncelog.open(log_at(tmp_path / "app.db")) as log:
            assert (await Runs(log).execute(**FIELDS, tool=_must_not_run)).event.output == "done"

    async def test_stop_iteration_from_a_tool_is_a_failure(self, place: str) -> None:
        def raise_stop_iteration(**_: Any) -> int:
            return next(iter(nothing))

        nothing: list[int] = []
        async with oncelog.open(place, clock=ManualClock()) as log:
            for _ in range(2):
                with pytest.raises(RuntimeError):
                    await Runs(log).execute(**FIELDS, tool=raise_stop_iteration)
            assert count_leases(log) == 0

    @pytest.mark.rule("RU-7")
    async def test_cancelled_caller_of_an_async_tool_releases_the_lease_immediately(self, place: str) -> None:
        gate = Gate()

        async def wait_for_gate(**_: Any) -> str:
            await gate()
            return "done"

        async with oncelog.open(place, clock=ManualClock()) as log:
            runs = Runs(log)
            gate.shut()
            caller = asyncio.create_task(runs.execute(**FIELDS, tool=wait_for_gate))
            await gate.reached.wait()
            caller.cancel()
            with pytest.raises(asyncio.CancelledError):
                await caller
            gate.open()
            assert not (await runs.execute(**FIELDS, tool=wait_for_gate)).reused

    @pytest.mark.rule("RU-9")
    async def test_shadow_key_is_stored_and_mismatches_are_counted(self, place: str) -> None:
        dice = Dice()
        async with oncelog.open(place) as log:
            runs = Runs(log)
            old = Shadow(execution_request_id="r1", replay_ordinal=0, payload={"roll": 1})
            other = Shadow(execution_request_id="r2", replay_ordinal=0, payload={"roll": 1})
            first = await runs.execute(**FIELDS, tool=dice.roll, shadow=old)
            assert first.event.shadow_key == run_key_v1("plan-7", 12, "tool.execute", "r1", 0, {"roll": 1}).hex()
            assert runs.counters == RunCounters(executed=1)
            assert (await runs.execute(**FIELDS, tool=dice.roll, shadow=old)).event == first.event
            assert runs.counters == RunCounters(executed=1, reused=1)
            # The lookup uses the v2 key; with the old key, the tool would run again.
            again = await runs.execute(**FIELDS, tool=dice.roll, shadow=other)
            assert (again.event, again.reused) == (first.event, True)
            assert runs.counters == RunCounters(executed=1, reused=2, shadow_mismatches=1)
            await runs.execute(**FIELDS, tool=dice.roll)
            assert runs.counters == RunCounters(executed=1, reused=3, shadow_mismatches=1)
        assert len(dice.rolls) == 1

    @pytest.mark.rule("RU-9")
    async def test_events_without_a_shadow_key_are_not_changed(self, place: str) -> None:
        async with oncelog.open(place) as log:
            runs = Runs(log)
            first = await runs.execute(**FIELDS, tool=Dice().roll)
            shadow = Shadow(execution_request_id="r", replay_ordinal=1, payload={})
            again = await runs.execute(**FIELDS, tool=_must_not_run, shadow=shadow)
            assert (again.event, again.event.shadow_key) == (first.event, None)
            assert runs.counters == RunCounters(executed=1, reused=1)

    async def test_output_without_json_form_raises_result_error_and_is_not_stored(self, place: str) -> None:
        async with oncelog.open(place, clock=ManualClock()) as log:
            runs = Runs(log)
            for output in (object(), float("nan"), {1: object()}):
                with pytest.raises(ResultError):
                    await runs.execute(**FIELDS, tool=lambda output=output, **_: output)
            assert (await runs.execute(**FIELDS, tool=lambda **_: (1, 2.5))).event.output == [1, 2.5]


class TestBlockingRuns:
    @pytest.mark.rule("RU-6", "RU-7")
    def test_concurrent_threads_run_the_tool_once(self, place: str) -> None:
        dice, began, go_on = Dice(), threading.Event(), threading.Event()

        def tool(**args: Any) -> dict[str, Any]:
            began.set()
            go_on.wait()
            return dice.roll(**args)

        with oncelog.open_blocking(place) as log, ThreadPoolExecutor(10) as threads:
            runs = BlockingRuns(log)
            callers = [threads.submit(lambda: runs.execute(**FIELDS, tool=tool)) for _ in range(10)]
            began.wait()
            go_on.set()
            answers = [caller.result() for caller in callers]
        assert len({answer.event.receipt for answer in answers}) == len(dice.rolls) == 1
        assert [answer.reused for answer in answers].count(False) == 1

    @pytest.mark.rule("RU-7")
    def test_failed_or_interrupted_tool_runs_again(self, place: str) -> None:
        with oncelog.open_blocking(place, clock=ManualClock()) as log:
            runs = BlockingRuns(log)
            with pytest.raises(ZeroDivisionError):
                runs.execute(**FIELDS, tool=_fail)
            with pytest.raises(KeyboardInterrupt):
                runs.execute(**FIELDS, tool=_interrupt)
            assert not runs.execute(**FIELDS, tool=Dice().roll).reused
            assert runs.counters == RunCounters(executed=1, failed=1)

    def test_async_tool_is_refused_by_blocking_runs(self) -> None:
        with oncelog.open_blocking(":memory:") as log, pytest.raises(TypeError, match="async"):
            BlockingRuns(log).execute(**FIELDS, tool=Dice().roll_async)


def _fail(**_: Any) -> int:
    return 1 // 0


def _interrupt(**_: Any) -> int:
    raise KeyboardInterrupt


def _must_not_run(**_: Any) -> int:
    raise AssertionError("the tool must not run")
