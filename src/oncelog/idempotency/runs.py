"""Runs: a named tool is executed once for its inputs, and its result is an event of its campaign.

    runs = oncelog.Runs(log)
    run = await runs.execute(
        plan_id="plan-7", campaign_id=12, event_type="tool.execute",
        tool_name="dice", ruleset_version="v1", args={"sides": 20}, tool=roll,
    )
    run.event.output, run.event.ordinal, run.reused

The six fields decide which run it is, and nothing else does (RU-5). Events of a campaign are numbered 1, 2, 3…
"""

import asyncio
import inspect
import json
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import msgspec
from msgspec import Struct

from oncelog.core.canonical import JsonValue, canonical_args
from oncelog.core.identity import object_field, run_key, run_key_v1, scope_of
from oncelog.core.limits import RUN_MS_LIMIT
from oncelog.core.policy import RUNS
from oncelog.core.values import Receipt
from oncelog.engine.blocking import BlockingLog
from oncelog.engine.log import Log
from oncelog.engine.results import Result
from oncelog.engine.work import Holding, Work
from oncelog.errors import ResultError
from oncelog.idempotency.calls import json_arrays
from oncelog.idempotency.decorator import RUN_S_MAX, InFlight, milliseconds

logger: Final = logging.getLogger("oncelog.runs")

Tool = Callable[..., Any]
"""Called with the members of `args` by name. Sync or async."""


class Shadow(Struct, frozen=True, kw_only=True):
    """The fields of a key before v2, for a migration that is watched."""

    execution_request_id: str | None
    replay_ordinal: int
    payload: JsonValue


class RunEvent(Struct, frozen=True, kw_only=True):
    """What a run left in its campaign. The same for everyone who asks."""

    type: str
    plan_id: str | None
    campaign_id: int
    tool_name: str | None
    ruleset_version: str | None
    args: dict[str, Any]
    output: Any
    shadow_key: str | None = None
    """The key before v2, in hex, where the caller gave its fields."""
    key: str = ""
    """In hex."""
    ordinal: int = 0
    """In the campaign, from 1."""
    receipt: Receipt | None = None


class Run(Struct, frozen=True):
    """An event, and whether it was there already."""

    event: RunEvent
    reused: bool


class RunCounters(Struct, frozen=True):
    """What became of the calls in this process."""

    executed: int = 0
    reused: int = 0
    failed: int = 0
    shadow_mismatches: int = 0
    """Runs that were reused though the key before v2 would have executed them again."""


class _Asked(Struct, frozen=True):
    """One call of `execute`."""

    event: RunEvent
    work: Work
    tool: Tool
    args: Mapping[str, Any]


class _Runs:
    """What both twins do without waiting for anything."""

    def __init__(self) -> None:
        self._counters = RunCounters()
        self._lock = threading.Lock()

    @property
    def counters(self) -> RunCounters:
        """What became of the calls so far."""
        return self._counters

    def _count(self, **counted: int) -> None:
        with self._lock:
            old = self._counters
            new = {name: getattr(old, name) + number for name, number in counted.items()}
            self._counters = msgspec.structs.replace(old, **new)

    @contextmanager
    def _counting_failures(self) -> Iterator[None]:
        try:
            yield
        except Exception:
            self._count(failed=1)
            raise

    def _ended(self, asked: _Asked, result: Result, *, reused: bool) -> Run:
        event = _event(asked.work, result)
        shadow = asked.event.shadow_key
        mismatch = reused and None not in (shadow, event.shadow_key) and shadow != event.shadow_key
        if mismatch:
            logger.info("run %s was reused; by its key before v2 it would have run again", event.key)
        self._count(reused=reused, executed=not reused, shadow_mismatches=mismatch)
        return Run(event, reused)


class Runs(_Runs):
    """Runs of a log. Make one a process, and keep it: it counts."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self._works = log.works

    async def execute(  # noqa: PLR0913 - the six fields of the key, and what to do
        self,
        *,
        plan_id: str | None,
        campaign_id: int,
        event_type: str,
        tool_name: str | None,
        ruleset_version: str | None,
        args: Mapping[str, Any] | None,
        tool: Tool,
        shadow: Shadow | None = None,
        in_flight: InFlight = "wait",
        wait_s: float | None = None,
        lease_s: float = 30,
        run_s_max: float = RUN_S_MAX,
    ) -> Run:
        """The event of the run with these fields: executed now, or reused.

        If the tool raises, nothing is kept; this caller and those who waited get the error, and the next one runs it
        again. A tool that is not async runs in a thread; it cannot be cancelled, so it goes on though its caller does
        not, and its result is kept.
        """
        fields = _fields(plan_id, campaign_id, event_type, tool_name, ruleset_version, args, shadow)
        asked = _asked(fields, args, tool, _Waiting(in_flight, wait_s, lease_s, run_s_max))
        begun = self._works.recall(asked.work) or await self._works.begin(asked.work)
        if not isinstance(begun, Holding):
            return self._ended(asked, begun, reused=True)
        if inspect.iscoroutinefunction(tool):
            return await self._carry_out(asked, begun)
        return await self._works.kept(self._carry_out(asked, begun))

    async def _carry_out(self, asked: _Asked, holding: Holding) -> Run:
        tool, args = asked.tool, asked.args

        async def call() -> tuple[bytes, None]:
            if inspect.iscoroutinefunction(tool):
                output = await tool(**args)
            else:
                output, error = await asyncio.to_thread(_tried, tool, args)
                if error is not None:
                    raise error
                if inspect.isawaitable(output):
                    output = await output
            return _body(asked.event, output), None

        with self._counting_failures():
            result, _ = await self._works.carry_out(holding, call)
        return self._ended(asked, result, reused=False)


class BlockingRuns(_Runs):
    """The blocking twin of `Runs`. The tool runs on the caller's own thread."""

    def __init__(self, log: BlockingLog) -> None:
        super().__init__()
        self._log = log

    def execute(  # noqa: PLR0913 - as `Runs.execute`
        self,
        *,
        plan_id: str | None,
        campaign_id: int,
        event_type: str,
        tool_name: str | None,
        ruleset_version: str | None,
        args: Mapping[str, Any] | None,
        tool: Tool,
        shadow: Shadow | None = None,
        in_flight: InFlight = "wait",
        wait_s: float | None = None,
        lease_s: float = 30,
        run_s_max: float = RUN_S_MAX,
    ) -> Run:
        """As `Runs.execute`."""
        if inspect.iscoroutinefunction(tool):
            raise TypeError(f"{tool!r} is async: use Runs with a log of `oncelog.open`")
        fields = _fields(plan_id, campaign_id, event_type, tool_name, ruleset_version, args, shadow)
        asked = _asked(fields, args, tool, _Waiting(in_flight, wait_s, lease_s, run_s_max))
        works = self._log.works
        begun = works.recall(asked.work) or works.begin(asked.work)
        if not isinstance(begun, Holding):
            return self._ended(asked, begun, reused=True)
        with self._counting_failures():
            result, _ = works.carry_out(begun, lambda: (_body(asked.event, tool(**asked.args)), None))
        return self._ended(asked, result, reused=False)


def _tried(tool: Tool, args: Mapping[str, Any]) -> tuple[Any, Exception | None]:
    """On a thread. What it raises is brought back as a value: there are exceptions that no future takes."""
    try:
        return tool(**args), None
    except Exception as error:  # noqa: BLE001 - raised again where it is awaited
        return None, error


# --- what is asked for -------------------------------------------------------------------------------


class _Waiting(Struct, frozen=True):
    in_flight: InFlight
    wait_s: float | None
    lease_s: float
    run_s_max: float


def _fields(
    plan_id: str | None,
    campaign_id: int,
    event_type: str,
    tool_name: str | None,
    ruleset_version: str | None,
    args: Mapping[str, Any] | None,
    shadow: Shadow | None,
) -> RunEvent:
    """Raises CanonicalError, with the path, for what cannot be part of a key."""
    said = object_field(dict(args or {}), "$.args_json")
    key = run_key(plan_id, campaign_id, event_type, tool_name, ruleset_version, dict(said))
    shadow_key = None
    if shadow is not None:
        request, ordinal, payload = shadow.execution_request_id, shadow.replay_ordinal, shadow.payload
        shadow_key = run_key_v1(plan_id, campaign_id, event_type, request, ordinal, payload).hex()
    return RunEvent(
        type=event_type,
        plan_id=plan_id,
        campaign_id=campaign_id,
        tool_name=tool_name,
        ruleset_version=ruleset_version,
        args=msgspec.json.decode(canonical_args(dict(said))),
        output=None,
        shadow_key=shadow_key,
        key=key.hex(),
    )


def _asked(event: RunEvent, args: Mapping[str, Any] | None, tool: Tool, waiting: _Waiting) -> _Asked:
    if waiting.in_flight not in ("wait", "raise"):
        raise ValueError(f"in_flight must be 'wait' or 'raise', not {waiting.in_flight!r}")
    key = bytes.fromhex(event.key)
    work = Work(
        policy=RUNS,
        scope=scope_of("runs", event.campaign_id),
        key=key,
        fingerprint=key,
        lease_ms=milliseconds("lease_s", waiting.lease_s),
        run_ms_max=milliseconds("run_s_max", waiting.run_s_max, RUN_MS_LIMIT),
        waits=waiting.in_flight == "wait",
        wait_ms=None if waiting.wait_s is None else milliseconds("wait_s", waiting.wait_s),
    )
    return _Asked(event, work, tool, dict(args or {}))


# --- what is kept ------------------------------------------------------------------------------------


def _body(event: RunEvent, output: Any) -> bytes:
    """The event as it is committed. Arguments may have integers of 64 bits, and so may what the tool returned."""
    try:
        plain = json_arrays(msgspec.to_builtins(output, order="deterministic", str_keys=True))
        said = json.dumps(plain, allow_nan=False, ensure_ascii=False, separators=(",", ":"), sort_keys=True).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ResultError(f"what the tool returned cannot be kept as JSON: {error}") from error
    return b'{"args":%b,"campaign_id":%d,"output":%b,"plan_id":%b,"ruleset_version":%b,%b"tool_name":%b,"type":%b}' % (
        canonical_args(event.args),
        event.campaign_id,
        said,
        msgspec.json.encode(event.plan_id),
        msgspec.json.encode(event.ruleset_version),
        b'"shadow_key":%b,' % msgspec.json.encode(event.shadow_key) if event.shadow_key else b"",
        msgspec.json.encode(event.tool_name),
        msgspec.json.encode(event.type),
    )


def _event(work: Work, result: Result) -> RunEvent:
    event = msgspec.json.decode(result.body, type=RunEvent)
    receipt = result.receipt
    return msgspec.structs.replace(event, key=work.key.hex(), ordinal=receipt.sequence, receipt=receipt)
