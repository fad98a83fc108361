"""Run events: recorded arguments, limits, lookup and shadow keys."""

from types import MappingProxyType
from typing import Any, Final

import pytest

import oncelog
from idempotency.run_samples import FIELDS
from oncelog import (
    BlockingRuns,
    CanonicalError,
    LimitExceededError,
    Limits,
    ResultErasedError,
    RunCounters,
    Runs,
    Shadow,
    Submission,
    run_key,
    run_key_v1,
    scope_of,
)
from oncelog.core.policy import RUNS

KEY: Final = run_key("plan-7", 12, "tool.execute", "dice", "v1", {"sides": 20})
SHADOW: Final = Shadow(execution_request_id="r1", replay_ordinal=0, payload={"roll": 1})
STORED_BEFORE: Final = (
    b'{"args":{"sides":20},"campaign_id":12,"output":{"roll":3},"plan_id":"plan-7","ruleset_version":"v1",'
    b'"shadow_key":"0123456789abcdef0123456789abcdef","tool_name":"dice","type":"tool.execute"}'
)
"""The body of an event as stored by the version before `shadow_version`."""


async def must_not_run(**_: Any) -> None:
    raise AssertionError("the tool must not run")


async def roll(**_: Any) -> int:
    return 3


async def submit_event_of_earlier_version(log: oncelog.Log) -> None:
    await log.submit(Submission(policy=RUNS, scope=scope_of("runs", 12), key=KEY, fingerprint=KEY, body=STORED_BEFORE))


class TestArguments:
    @pytest.mark.rule("RU-14", "RU-3")
    async def test_tool_gets_the_arguments_as_given_and_the_event_records_both_forms(self, place: str) -> None:
        given = {"name": "A\u030a", "note": None, "list": [None, {"x": None}]}
        canonical: dict[str, Any] = {"name": "\u00c5", "list": [None, {}]}
        received = []

        async def tool(**args: Any) -> int:
            received.append(dict(args))
            args["list"].append("changed by the tool")
            return 1

        async with oncelog.open(place) as log:
            runs = Runs(log)
            run = await runs.execute(**FIELDS | {"args": MappingProxyType(given)}, tool=tool)
            again = await runs.execute(**FIELDS | {"args": canonical}, tool=must_not_run)
        assert received[0].keys() == given.keys()
        assert received[0]["name"] == "A\u030a"
        assert run.event.args == canonical
        assert run.event.args_given == {"name": "A\u030a", "note": None, "list": [None, {"x": None}]}
        assert again.event == run.event

    @pytest.mark.rule("RU-14")
    async def test_arguments_in_canonical_form_are_recorded_once(self) -> None:
        async with oncelog.open(":memory:") as log:
            run = await Runs(log).execute(**FIELDS | {"args": {"b": 1, "a": [True, 2**63 - 1]}}, tool=roll)
            (record,) = (await log.read(stream=scope_of("runs", 12))).records
        assert run.event.args_given is None
        assert b"args_given" not in record.body

    @pytest.mark.rule("RU-14", "RU-4")
    @pytest.mark.parametrize("args", [[1], [], "x", "", 0, 7, {1}])
    async def test_arguments_that_are_not_an_object_are_refused_with_their_path(self, args: Any) -> None:
        async with oncelog.open(":memory:") as log:
            with pytest.raises(CanonicalError, match=r"^\$\.args_json: must be an object, not "):
                await Runs(log).execute(**FIELDS | {"args": args}, tool=must_not_run)

    @pytest.mark.rule("RU-14", "CO-34")
    async def test_arguments_beyond_the_limit_are_refused_before_the_tool_runs(self, place: str) -> None:
        limits = Limits(body_bytes_max=1000)
        async with oncelog.open(place, limits=limits) as log:
            runs = Runs(log)
            for _ in range(2):
                with pytest.raises(LimitExceededError, match=r"body_bytes_max is 1000, and .* for args"):
                    await runs.execute(**FIELDS | {"args": {"text": "x" * 1000}}, tool=must_not_run)
            assert runs.counters == RunCounters(failed=2)
            assert (await runs.execute(**FIELDS, tool=roll)).event.ordinal == 1

    @pytest.mark.rule("RU-14", "CO-18")
    async def test_stored_run_is_reused_even_if_its_arguments_exceed_a_lower_limit(self, tmp_path: Any) -> None:
        fields = FIELDS | {"args": {"text": "x" * 1000}}
        async with oncelog.open(tmp_path / "app.db") as log:
            first = await Runs(log).execute(**fields, tool=roll)
        async with oncelog.open(tmp_path / "app.db", limits=Limits(body_bytes_max=1000)) as log:
            assert (await Runs(log).execute(**fields, tool=must_not_run)).event == first.event

    @pytest.mark.rule("RU-14")
    def test_blocking_runs_check_limits_before_the_tool_runs(self) -> None:
        with oncelog.open_blocking(":memory:", limits=Limits(body_bytes_max=1000)) as log:
            fields = FIELDS | {"args": {"text": "x" * 1000}}
            with pytest.raises(LimitExceededError):
                BlockingRuns(log).execute(**fields, tool=lambda **_: pytest.fail("the tool must not run"))


class TestLookup:
    @pytest.mark.rule("RU-14")
    async def test_lookup_returns_the_event_of_a_campaign_and_key(self, place: str) -> None:
        async with oncelog.open(place) as log:
            runs = Runs(log)
            assert await runs.look_up(12, KEY) is None
            run = await runs.execute(**FIELDS, tool=roll)
            assert await runs.look_up(12, KEY) == await runs.look_up(12, run.event.key) == run.event
            assert await runs.look_up(13, KEY) is None
            assert runs.counters == RunCounters(executed=1)

    @pytest.mark.rule("RU-14")
    async def test_lookup_of_an_erased_event_raises(self, place: str) -> None:
        async with oncelog.open(place) as log:
            runs = Runs(log)
            await runs.execute(**FIELDS, tool=roll)
            await log.erase(stream=scope_of("runs", 12))
            with pytest.raises(ResultErasedError):
                await runs.look_up(12, KEY)

    @pytest.mark.rule("RU-14")
    def test_blocking_runs_find_the_same_event(self) -> None:
        with oncelog.open_blocking(":memory:") as log:
            runs = BlockingRuns(log)
            run = runs.execute(**FIELDS, tool=lambda **_: 3)
            assert runs.look_up(12, KEY.hex()) == run.event
            assert runs.look_up(12, bytes(16)) is None

    async def test_lookup_of_a_malformed_key_or_campaign_is_refused_with_its_name(self) -> None:
        async with oncelog.open(":memory:") as log:
            runs = Runs(log)
            wrong_keys: list[Any] = [b"", KEY[:15], KEY.hex()[:-1], "not hex", 7, None]
            for key in wrong_keys:
                with pytest.raises(ValueError, match="key must be 16 bytes, or 32 hexadecimal digits"):
                    await runs.look_up(12, key)
            wrong_campaigns: list[Any] = ["12", True, None]
            for campaign in wrong_campaigns:
                with pytest.raises(CanonicalError, match=r"\$\.campaign_id"):
                    await runs.look_up(campaign, KEY)


class TestShadowKeys:
    @pytest.mark.rule("RU-9")
    async def test_shadow_key_equals_the_key_of_the_original_system_and_has_a_version(self, place: str) -> None:
        async with oncelog.open(place) as log:
            runs = Runs(log)
            run = await runs.execute(**FIELDS, tool=roll, shadow=SHADOW)
            assert run.event.shadow_key == run_key_v1("plan-7", 12, "tool.execute", "r1", 0, {"roll": 1}).hex()
            assert run.event.shadow_version == 2
            assert (await runs.execute(**FIELDS, tool=must_not_run, shadow=SHADOW)).event == run.event
            other = Shadow(execution_request_id="r2", replay_ordinal=0, payload={"roll": 1})
            await runs.execute(**FIELDS, tool=must_not_run, shadow=other)
            assert runs.counters == RunCounters(executed=1, reused=2, shadow_mismatches=1)

    @pytest.mark.rule("RU-9", "RU-6")
    async def test_shadow_key_of_an_earlier_version_is_not_a_mismatch(self, place: str) -> None:
        async with oncelog.open(place) as log:
            await submit_event_of_earlier_version(log)
            runs = Runs(log)
            run = await runs.execute(**FIELDS, tool=must_not_run, shadow=SHADOW)
            assert (run.reused, run.event.output) == (True, {"roll": 3})
            assert (run.event.shadow_key, run.event.shadow_version) == ("0123456789abcdef" * 2, None)
            assert await runs.look_up(12, KEY) == run.event
            assert runs.counters == RunCounters(reused=1)
