"""Runs: a named tool runs once for its inputs, and its result is stored as an event of a campaign.

    runs = oncelog.Runs(log)
    run = await runs.execute(
        plan_id="plan-7", campaign_id=12, event_type="tool.execute",
        tool_name="dice", ruleset_version="v1", args={"sides": 20}, tool=roll,
    )
    run.output, run.event.ordinal, run.reused
    await runs.look_up(12, run.event.key)

The six fields other than `tool` identify the run (RU-5). The events of a campaign are numbered 1, 2, 3… Arguments and
outputs are stored as JSON. The tool and its callers get the types of the tool's annotations: models, dates, UUIDs.
"""

import asyncio
import inspect
import json
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, overload

import msgspec
from msgspec import Raw, Struct

from oncelog.core.canonical import JsonValue, canonical_args, format_path
from oncelog.core.identity import RUN_KEY_BYTES, check_object, run_key, run_key_v1, scope_of
from oncelog.core.policy import RUNS
from oncelog.core.values import Receipt
from oncelog.engine.answer_cache import WorkResult
from oncelog.engine.blocking import BlockingLeaseManager
from oncelog.engine.held_lease import HeldLease, Work
from oncelog.engine.leases import LeaseManager
from oncelog.engine.log import Log
from oncelog.engine.outcome import Outcome
from oncelog.errors import CanonicalError, LimitExceededError, ResultErasedError, ResultError
from oncelog.idempotency.annotations import format_type, get_name, resolve_annotation
from oncelog.idempotency.call_key import InFlight, build_work_factory
from oncelog.idempotency.once import RUN_S_MAX
from oncelog.idempotency.value_codec import differs_from_json, restore, to_builtins, to_json_arrays, to_json_form

logger: Final = logging.getLogger("oncelog.runs")

SHADOW_VERSION: Final = 2
"""Version of shadow keys that match the original system's keys. Earlier shadow keys have no version: their fields are
in the order of key v2, so they cannot be compared with the original system's keys."""

if TYPE_CHECKING:
    import typing_extensions  # type variables have no defaults before Python 3.13

    OutputT_co = typing_extensions.TypeVar("OutputT_co", default=Any, covariant=True)
else:
    OutputT_co = TypeVar("OutputT_co", covariant=True)

T = TypeVar("T")
Tool = Callable[..., Any]
"""Function, sync or async, that is called with the members of `args` as keyword arguments."""
AnyTool = Callable[..., Awaitable[T] | T]
BlockingTool = Callable[..., T]


class Shadow(Struct, frozen=True, kw_only=True):
    """Fields of a key from before v2, to observe a migration."""

    execution_request_id: str | None
    replay_ordinal: int
    payload: JsonValue


class RunEvent(Struct, frozen=True, kw_only=True):
    """The event of a run in its campaign, identical for all callers."""

    type: str
    plan_id: str | None
    campaign_id: int
    tool_name: str | None
    ruleset_version: str | None
    args: dict[str, Any]
    """Arguments in canonical form, as in the key."""
    output: Any
    args_given: dict[str, Any] | None = None
    """Arguments as passed to the tool, if they differ from the canonical form."""
    shadow_key: str | None = None
    """Key from before v2 in hex, if the caller passed its fields."""
    shadow_version: int | None = None
    """`SHADOW_VERSION`, or None for a shadow key that an earlier version of Oncelog computed by a different rule."""
    key: str = ""
    """Key of the run in hex."""
    ordinal: int = 0
    """Number of the event in its campaign, from 1."""
    receipt: Receipt | None = None


class Run(Struct, Generic[OutputT_co], frozen=True):
    """A run's event, and whether it was already stored."""

    event: RunEvent
    reused: bool
    output_type: Any = Any
    """The annotated type of the tool's result. Any if the tool has no annotation."""

    @property
    def output(self) -> OutputT_co:
        """The tool's result, restored as its annotated type. `event.output` is its JSON form.

        Raises ResultError if the stored result does not have this type.
        """
        try:
            value: OutputT_co = restore(self.event.output, self.output_type)
        except (TypeError, ValueError) as error:
            raise ResultError(
                f"the output of run {self.event.key} of {self.event.tool_name} is not "
                f"{format_type(self.output_type)}: {error}; its JSON form is in event.output"
            ) from error
        return value


class RunCounters(Struct, frozen=True):
    """Counts the outcomes of calls in this process."""

    executed: int = 0
    reused: int = 0
    failed: int = 0
    shadow_mismatches: int = 0
    """Reused runs that would have been executed again under their key from before v2."""


class BaseRuns:
    """Counts the outcomes of calls. The part of `Runs` that does not wait for the log."""

    def __init__(self) -> None:
        self._counters = RunCounters()
        self._lock = threading.Lock()

    @property
    def counters(self) -> RunCounters:
        """The outcomes of calls so far."""
        return self._counters

    def _check_log(self, log: object, kind: type) -> None:
        if not isinstance(log, kind):
            raise TypeError(
                f"{type(self).__name__} needs a {kind.__name__}, not {type(log).__name__}: Runs uses a log opened with "
                "oncelog.open(…), BlockingRuns a log opened with oncelog.open_blocking(…)"
            )

    def _count(self, **increments: int) -> None:
        with self._lock:
            old = self._counters
            new = {name: getattr(old, name) + number for name, number in increments.items()}
            self._counters = msgspec.structs.replace(old, **new)

    @contextmanager
    def _count_failures(self) -> Iterator[None]:
        try:
            yield
        except Exception:
            self._count(failed=1)
            raise

    def _finish(self, requested: RunEvent, result: WorkResult, output_type: Any, *, reused: bool) -> Run:
        event = decode_event(requested.key, result.receipt, result.body)
        mismatch = reused and is_shadow_mismatch(requested, event)
        if mismatch:
            logger.info("run %s was reused; its key before v2 would have executed it again", event.key)
        self._count(reused=reused, executed=not reused, shadow_mismatches=mismatch)
        return Run(event, reused, output_type)


class Runs(BaseRuns):
    """The runs of a log. Create one object per process and keep it, because it counts calls."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self._check_log(log, Log)
        self._log = log

    @overload
    async def execute(
        self,
        *,
        plan_id: str | None,
        campaign_id: int,
        event_type: str,
        tool_name: str | None,
        ruleset_version: str | None,
        args: Mapping[str, Any] | None,
        tool: Callable[..., Awaitable[T]],
        shadow: Shadow | None = None,
        in_flight: InFlight = "wait",
        wait_s: float | None = None,
        lease_s: float = 30,
        run_s_max: float = RUN_S_MAX,
    ) -> Run[T]: ...

    @overload
    async def execute(
        self,
        *,
        plan_id: str | None,
        campaign_id: int,
        event_type: str,
        tool_name: str | None,
        ruleset_version: str | None,
        args: Mapping[str, Any] | None,
        tool: Callable[..., T],
        shadow: Shadow | None = None,
        in_flight: InFlight = "wait",
        wait_s: float | None = None,
        lease_s: float = 30,
        run_s_max: float = RUN_S_MAX,
    ) -> Run[T]: ...

    async def execute(  # noqa: PLR0913 - the six fields of the key, the tool and options
        self,
        *,
        plan_id: str | None,
        campaign_id: int,
        event_type: str,
        tool_name: str | None,
        ruleset_version: str | None,
        args: Mapping[str, Any] | None,
        tool: AnyTool[T],
        shadow: Shadow | None = None,
        in_flight: InFlight = "wait",
        wait_s: float | None = None,
        lease_s: float = 30,
        run_s_max: float = RUN_S_MAX,
    ) -> Run[T]:
        """Execute the run with these fields or reuse its result, and return its event.

        Arguments are identified by their JSON form. The tool gets them as given, except that JSON is restored as the
        annotated type of a parameter: `{"id": 17}` for a model, a string for a datetime or a UUID.

        If the tool raises, nothing is stored: the error is raised in this caller and all waiting callers, and the next
        call executes the tool again. A sync tool runs in a thread and cannot be cancelled: if its caller is cancelled,
        the tool continues and its result is stored.

        Before the tool runs, raises CanonicalError for fields that cannot be part of a key or are not of the annotated
        type, and LimitExceededError for arguments that are too large for the log.
        """
        leases = self._log.leases
        call_tool, wait = prepare_tool(tool, leases)
        given = check_args(args)
        forms = encode_args(given, tool)
        event = build_event(plan_id, campaign_id, event_type, tool_name, ruleset_version, forms, shadow)
        given = restore_args(given, forms, tool)
        work = build_work(event, build_work_factory(in_flight, wait_s, lease_s, run_s_max))
        output_type = get_output_type(tool)
        result_or_lease = leases.recall(work) or await leases.begin(work)
        if not isinstance(result_or_lease, HeldLease):
            return self._finish(event, result_or_lease, output_type, reused=True)
        return await wait(self._run_tool(event, call_tool, given, output_type, result_or_lease))

    async def look_up(self, campaign_id: int, key: bytes | str) -> RunEvent | None:
        """Return the event of the run with this key (v2, as 16 bytes or in hex), or None for an unknown run.

        Raises ResultErasedError if the event's body has been erased.
        """
        raw = parse_key(key)
        return decode_outcome(raw, await self._log.lookup(raw, policy=RUNS, scope=build_scope(campaign_id)))

    async def _run_tool(
        self, event: RunEvent, call_tool: Tool, args: Mapping[str, Any], output_type: Any, lease: HeldLease
    ) -> Run:
        async def call() -> tuple[bytes, None]:
            inputs = encode_inputs(event, self._log.limits.body_bytes_max)
            return encode_body(inputs, await call_tool(**args)), None

        with self._count_failures():
            result, _ = await self._log.leases.run(lease, call)
        return self._finish(event, result, output_type, reused=False)


def prepare_tool(tool: Tool, leases: LeaseManager) -> tuple[Tool, Callable[[Coroutine[Any, Any, Run]], Awaitable[Run]]]:
    """Return an async function that calls the tool, and a function that waits for the run.

    A sync tool runs in a thread, and its run continues if its caller is cancelled.
    """
    _check_tool(tool)
    if inspect.iscoroutinefunction(tool):
        return tool, lambda running: running

    async def call_in_thread(**args: Any) -> Any:
        output, error = await asyncio.to_thread(_try_tool, tool, args)
        if error is not None:
            raise error
        return await output if inspect.isawaitable(output) else output

    return call_in_thread, leases.shield


def prepare_blocking_tool(tool: Tool, _: BlockingLeaseManager) -> tuple[Tool, Callable[[Run], Run]]:
    """Return the tool, which runs in the caller's thread, and a function that returns its run."""
    _check_tool(tool)
    if inspect.iscoroutinefunction(tool):
        raise TypeError(f"{tool!r} is async: use Runs with a log opened with `oncelog.open`")
    return tool, lambda run: run


def _check_tool(tool: object) -> None:
    if not callable(tool):
        raise TypeError(f"tool must be a function, which is called with the members of args, not {type(tool).__name__}")


def _try_tool(tool: Tool, args: Mapping[str, Any]) -> tuple[Any, Exception | None]:
    """Call a tool in a thread. Returns errors as values, because a future does not accept every exception."""
    try:
        return tool(**args), None
    except Exception as error:  # noqa: BLE001 - the caller raises it
        return None, error


# --- requests ----------------------------------------------------------------------------------------


def build_event(
    plan_id: str | None,
    campaign_id: int,
    event_type: str,
    tool_name: str | None,
    ruleset_version: str | None,
    args: dict[str, Any],
    shadow: Shadow | None,
) -> RunEvent:
    """Build the event of a run, without its output. Raises CanonicalError with the path for a malformed field."""
    key = run_key(plan_id, campaign_id, event_type, tool_name, ruleset_version, args)
    canonical = msgspec.json.decode(canonical_args(args))
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
        args=canonical,
        args_given=None if args == canonical else args,
        output=None,
        shadow_key=shadow_key,
        shadow_version=None if shadow_key is None else SHADOW_VERSION,
        key=key.hex(),
    )


def build_work(event: RunEvent, new_work: Callable[..., Work]) -> Work:
    """Return the work that a run represents."""
    key = bytes.fromhex(event.key)
    return new_work(policy=RUNS, scope=build_scope(event.campaign_id), key=key, fingerprint=key)


def check_args(args: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the arguments to pass to the tool. Raises CanonicalError if they are not an object."""
    if args is None:
        return {}
    plain_args = dict(args) if isinstance(args, Mapping) else args
    return dict(check_object(plain_args, "$.args_json"))


def encode_args(args: Mapping[str, Any], tool: Tool) -> dict[str, Any]:
    """Return the JSON forms of the arguments. Raises CanonicalError for a value without a JSON form."""
    forms = {}
    for name, value in args.items():
        try:
            forms[name] = to_json_form(value)
        except RecursionError:
            forms[name] = value  # `build_event` refuses it with its path
        except (TypeError, ValueError) as error:
            reason = f"the argument of {get_name(tool)}, of type {type(value).__name__}, cannot be stored: {error}"
            raise CanonicalError(f"$.args_json{format_path([name])[1:]}", reason) from error
    return forms


def restore_args(args: dict[str, Any], forms: Mapping[str, Any], tool: Tool) -> dict[str, Any]:
    """Return the arguments with JSON values restored as the annotated types of the tool's parameters.

    An argument that is not JSON does not change. Raises CanonicalError for a value that does not have the type.
    """
    return {name: _restore_argument(name, value, forms[name], tool) for name, value in args.items()}


def _restore_argument(name: str, value: Any, form: Any, tool: Tool) -> Any:
    if name == "return":  # names the type of the result, not a parameter
        return value
    try:
        kind = resolve_annotation(tool, name)
    except Exception:  # noqa: BLE001 - without a type that can be evaluated, the tool gets the value as given
        return value
    if type(value) is not type(form) or value != form or not differs_from_json(kind):
        return value
    try:
        return restore(form, kind)
    except (TypeError, ValueError) as error:
        reason = f"the argument of {get_name(tool)} is not {format_type(kind)}: {error}"
        raise CanonicalError(f"$.args_json{format_path([name])[1:]}", reason) from error


def get_output_type(tool: Tool) -> Any:
    """Return the annotated type of the tool's result, Any without an annotation, or a description of an invalid one."""
    try:
        return resolve_annotation(tool, "return")
    except KeyError:
        return Any
    except Exception as error:  # noqa: BLE001 - evaluating an annotation may raise anything; `Run.output` reports it
        return f"a value of the annotated type ({error})"


def build_scope(campaign_id: int) -> str:
    """Return the stream of a campaign. Raises CanonicalError if its number is not an integer."""
    if type(campaign_id) is not int:
        raise CanonicalError("$.campaign_id", f"must be an integer, not {type(campaign_id).__name__}")
    return scope_of("runs", campaign_id)


def parse_key(key: bytes | str) -> bytes:
    """Return the bytes of a key. Raises ValueError if it is malformed."""
    try:
        raw = bytes.fromhex(key) if isinstance(key, str) else key
    except ValueError:
        raw = b""
    if type(raw) is not bytes or len(raw) != RUN_KEY_BYTES:
        raise ValueError(f"key must be {RUN_KEY_BYTES} bytes, or {2 * RUN_KEY_BYTES} hexadecimal digits, not {key!r}")
    return raw


def is_shadow_mismatch(requested: RunEvent, found: RunEvent) -> bool:
    """Return whether the original system would have executed the run again. False if the keys cannot be compared."""
    if requested.shadow_key is None or found.shadow_key is None or requested.shadow_version != found.shadow_version:
        return False
    return requested.shadow_key != found.shadow_key


# --- stored events -----------------------------------------------------------------------------------


def encode_inputs(event: RunEvent, bytes_max: int) -> dict[str, Any]:
    """Encode the stored members other than the output. Called before the tool runs, because the tool may change its
    arguments.

    Arguments may include 64-bit integers. Raises LimitExceededError if the event is too large even without an output.
    """
    members: dict[str, Any] = {
        "args": Raw(canonical_args(event.args)),
        "campaign_id": Raw(str(event.campaign_id).encode()),
        "plan_id": event.plan_id,
        "ruleset_version": event.ruleset_version,
        "tool_name": event.tool_name,
        "type": event.type,
    }
    if event.args_given is not None:
        members["args_given"] = Raw(msgspec.json.encode(event.args_given))
    if event.shadow_key is not None:
        members |= {"shadow_key": event.shadow_key, "shadow_version": SHADOW_VERSION}
    size = len(msgspec.json.encode({**members, "output": 0}))
    if size > bytes_max:
        reason = (
            f"this run needs {size} bytes without its output, most of them for args: "
            "pass large values by reference, or open the log with a higher limit"
        )
        raise LimitExceededError("Limits.body_bytes_max", bytes_max, reason)
    return members


def encode_body(inputs: dict[str, Any], output: Any) -> bytes:
    """Encode the body of the event. The output may include 64-bit integers."""
    try:
        plain = to_json_arrays(to_builtins(output))
        encoded = json.dumps(plain, allow_nan=False, ensure_ascii=False, separators=(",", ":"), sort_keys=True).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ResultError(
            f"the output of {inputs['tool_name']}, of type {type(output).__name__}, cannot be stored as JSON: {error}; "
            "return JSON, a dataclass, a pydantic model or a msgspec.Struct"
        ) from error
    return msgspec.json.encode({**inputs, "output": Raw(encoded)}, order="sorted")


def decode_event(key: str, receipt: Receipt, body: bytes) -> RunEvent:
    """Decode a stored event."""
    event = msgspec.json.decode(body, type=RunEvent)
    return msgspec.structs.replace(event, key=key, ordinal=receipt.sequence, receipt=receipt)


def decode_outcome(key: bytes, outcome: Outcome) -> RunEvent | None:
    """Return the event of a looked-up run, or None for an unknown run. Raises ResultErasedError."""
    record = outcome.record
    if record is None:
        return None
    if record.erased:
        raise ResultErasedError("the tool has run, but the body of its event has been erased")
    return decode_event(key.hex(), record.receipt, record.body)
