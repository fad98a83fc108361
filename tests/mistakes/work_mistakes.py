"""Mistakes with `once`, `Runs` and the middleware for the `Idempotency-Key` header."""

from collections.abc import Iterator, Mapping
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

import oncelog
from mistakes.mistake import MistakeTable
from mistakes.workplace import Workplace, raised

MISTAKES = MistakeTable()


def pay(order: str, cents: int) -> dict[str, int]:
    return {order: cents}


async def pay_later(order: str, cents: int) -> dict[str, int]:
    return pay(order, cents)


def pay_untyped(order, cents):  # type: ignore[no-untyped-def]
    return {order: cents}


def get_cents(*arguments: Any) -> Any:
    return arguments[1]


def pay_in_parts(order: str) -> Iterator[int]:
    yield len(order)


def pay_with_an_object(order: str, till: object) -> None:
    """Receive an argument of any type."""


def misread(order: str) -> int:
    total: Any = f"{order}: 17 euros"
    return total  # type: ignore[no-any-return]


class Till:
    """A class that cannot be stored."""


def open_till(order: str) -> Till:
    raise NotImplementedError(order)


# --- once


def decorate(function: Any, **options: Any) -> Any:
    """Decorate a function with `once`, using an in-memory log."""
    return oncelog.once(oncelog.open_blocking(":memory:"), **options)(function)


async def raised_by_call(function: Any, *arguments: Any, **options: Any) -> str:
    """Return the error of a call to a decorated function."""
    with oncelog.open_blocking(":memory:") as log:
        return await raised(lambda: oncelog.once(log, name="work", **options)(function)(*arguments))


@MISTAKES.add("once needs the log", remedy="@oncelog.once(log)")
async def once_without_a_log(_: Workplace) -> str:
    once: Any = oncelog.once
    return await raised(lambda: once(pay))


@MISTAKES.add("once needs a log", "str", remedy="open one with oncelog.open_blocking")
async def once_with_a_path(_: Workplace) -> str:
    path: Any = "app.db"
    return await raised(lambda: oncelog.once(path))


@MISTAKES.add("pay_untyped has no return type", remedy="annotate it")
async def function_without_a_return_type(_: Workplace) -> str:
    return await raised(lambda: decorate(pay_untyped))


@MISTAKES.add("pay_later is async", remedy="oncelog.open")
async def async_function_with_a_blocking_log(_: Workplace) -> str:
    return await raised(lambda: decorate(pay_later))


@MISTAKES.add("pay is not async", remedy="oncelog.open_blocking")
async def function_with_an_async_log(_: Workplace) -> str:
    return await raised(lambda: oncelog.once(oncelog.open(":memory:"))(pay))


@MISTAKES.add("key", "str", remedy="must be a function")
async def name_of_a_parameter_as_key(_: Workplace) -> str:
    return await raised(lambda: decorate(pay, key="order"))


@MISTAKES.add("key=", "work", remedy="must be a function with the same parameters")
async def key_function_with_other_parameters(_: Workplace) -> str:
    return await raised_by_call(pay, "o-17", 100, key=lambda order: order)


@MISTAKES.add("key", "int", remedy="must be a string, bytes or a UUID")
async def key_that_is_a_number(_: Workplace) -> str:
    return await raised_by_call(pay, "o-17", 100, key=get_cents)


@MISTAKES.add("key", "not 0", remedy="must have 1 to 255 bytes")
async def empty_key(_: Workplace) -> str:
    return await raised_by_call(pay, "o-17", 100, key=lambda *_: "")


@MISTAKES.add("o-17", "already used", remedy="use a new key for new work")
async def key_used_for_different_work(_: Workplace) -> str:
    with oncelog.open_blocking(":memory:") as log:
        paid = oncelog.once(log, name="pay", key=lambda *arguments: arguments[0])(pay)
        paid("o-17", 100)
        return await raised(lambda: paid("o-17", 200))


@MISTAKES.add("$.till", "Till", remedy="list it in ignore")
async def argument_that_cannot_identify_the_call(_: Workplace) -> str:
    return await raised_by_call(pay_with_an_object, "o-17", Till())


@MISTAKES.add("$.cents", "NaN", remedy="use null")
async def argument_that_is_not_a_number(_: Workplace) -> str:
    return await raised_by_call(pay, "o-17", float("nan"))


@MISTAKES.add("cents", remedy="missing a required argument")
async def forgotten_argument(_: Workplace) -> str:
    return await raised_by_call(pay, "o-17")


@MISTAKES.add("misread", "int", remedy="return that type, or change the annotation")
async def result_of_another_type(_: Workplace) -> str:
    return await raised_by_call(misread, "o-17")


@MISTAKES.add("open_till", "Till", remedy="return a dataclass")
async def return_type_that_cannot_be_stored(_: Workplace) -> str:
    return await raised(lambda: decorate(open_till))


@MISTAKES.add("pay_in_parts is a generator", remedy="single result")
async def generator(_: Workplace) -> str:
    return await raised(lambda: decorate(pay_in_parts))


@MISTAKES.add("inside another function", remedy="set a name with name=")
async def function_inside_a_function(_: Workplace) -> str:
    def charge(order: str) -> str:
        return order

    return await raised(lambda: decorate(charge))


@MISTAKES.add("remember", remedy="must be a list")
async def one_exception_to_remember(_: Workplace) -> str:
    return await raised(lambda: decorate(pay, remember=ValueError))


@MISTAKES.add("ignore", "till", "pay", remedy="the parameters of pay are: order, cents")
async def unknown_parameter_to_ignore(_: Workplace) -> str:
    return await raised(lambda: decorate(pay, ignore=["till"]))


@MISTAKES.add("in_flight", "'wiat'", remedy="must be 'wait' or 'raise'")
async def misspelt_option_of_once(_: Workplace) -> str:
    return await raised(lambda: decorate(pay, in_flight="wiat"))


@MISTAKES.add("lease_s", "0", remedy="must be from")
async def lease_without_length(_: Workplace) -> str:
    return await raised(lambda: decorate(pay, lease_s=0))


@MISTAKES.add("retention", "24", remedy="use kept_for")
async def retention_of_once_that_is_a_number(_: Workplace) -> str:
    return await raised(lambda: decorate(pay, retention=24))


@MISTAKES.add("scope", "int", remedy="must be a string")
async def scope_that_is_a_number(_: Workplace) -> str:
    return await raised_by_call(pay, "o-17", 100, scope=17)


@MISTAKES.add("pay is not decorated", remedy="pass a function that @oncelog.once(log) decorates")
async def work_of_an_undecorated_function(_: Workplace) -> str:
    return await raised(lambda: oncelog.work_of(pay, "o-17", 100))


# --- Runs

RUN: Mapping[str, Any] = {
    "plan_id": "plan-7",
    "campaign_id": 12,
    "event_type": "tool.execute",
    "tool_name": "dice",
    "ruleset_version": "v1",
    "args": {"sides": 20},
}


def roll(sides: int) -> int:
    return sides


async def raised_by_run(**changed: Any) -> str:
    """Return the error of a run."""
    async with oncelog.open(":memory:") as log:
        return await raised(oncelog.Runs(log).execute(**{**RUN, "tool": roll, **changed}))


@MISTAKES.add("campaign_id", "str", remedy="must be an integer")
async def campaign_that_is_text(_: Workplace) -> str:
    return await raised_by_run(campaign_id="12")


@MISTAKES.add("$.args_json", "array", remedy="must be an object")
async def arguments_in_a_list(_: Workplace) -> str:
    return await raised_by_run(args=[20])


@MISTAKES.add("tool", "int", remedy="must be a function")
async def result_instead_of_the_tool(_: Workplace) -> str:
    return await raised_by_run(tool=20)


@MISTAKES.add("dice", "Till", remedy="return JSON, a dataclass")
async def output_that_cannot_be_stored(_: Workplace) -> str:
    return await raised_by_run(tool=lambda **_: Till())


@MISTAKES.add("Runs needs a Log", "str", remedy="opened with oncelog.open")
async def runs_of_a_path(_: Workplace) -> str:
    path: Any = "app.db"
    return await raised(lambda: oncelog.Runs(path))


@MISTAKES.add("Runs needs a Log", "BlockingLog", remedy="BlockingRuns a log opened with")
async def runs_of_a_blocking_log(_: Workplace) -> str:
    log: Any = oncelog.open_blocking(":memory:")
    return await raised(lambda: oncelog.Runs(log))


@MISTAKES.add("key", "'17'", remedy="must be 16 bytes")
async def run_key_that_is_malformed(_: Workplace) -> str:
    async with oncelog.open(":memory:") as log:
        return await raised(oncelog.Runs(log).look_up(12, "17"))


# --- the middleware


async def answer(_: Request) -> JSONResponse:
    return JSONResponse({"paid": True})


async def post(*keys: str, content: str = "{}", earlier: str | None = None, **options: Any) -> str:
    """Send a request to an application with the middleware, and return the problem in its response."""
    async with oncelog.open(":memory:") as log:
        middleware = Middleware(oncelog.IdempotencyMiddleware, log=log, scope=lambda _: "user:ann", **options)
        application = Starlette(routes=[Route("/pay", answer, methods=["POST"])], middleware=[middleware])
        headers = [("Idempotency-Key", key) for key in keys]
        async with httpx.AsyncClient(transport=httpx.ASGITransport(application), base_url="http://shop") as client:
            if earlier is not None:
                await client.post("/pay", headers=headers, content=earlier)
            response = await client.post("/pay", headers=headers, content=content)
    assert response.status_code >= 400
    problem = response.json()
    return f"{response.status_code} {problem['title']} {problem['detail']}"


@MISTAKES.add("400", "Idempotency-Key", remedy="needs")
async def request_without_a_key(_: Workplace) -> str:
    return await post(required=True)


@MISTAKES.add("400", "several", remedy="must be one Idempotency-Key header")
async def request_with_two_keys(_: Workplace) -> str:
    return await post("a", "b")


@MISTAKES.add("400", "Idempotency-Key", remedy="must have 1 to 255")
async def request_with_a_long_key(_: Workplace) -> str:
    return await post("k" * 10_000)


@MISTAKES.add("422", "Idempotency-Key", "another request", remedy="use a new key")
async def request_with_a_key_of_another_request(_: Workplace) -> str:
    return await post("k", earlier='{"cents": 100}', content='{"cents": 200}')


@MISTAKES.add("413", "Idempotency-Key", remedy="at most 100 bytes")
async def request_that_is_too_large(_: Workplace) -> str:
    return await post("k", content="a" * 200, request_bytes_max=100)


def build_middleware(**options: Any) -> Any:
    return oncelog.IdempotencyMiddleware(Starlette(), **{"log": "app.db", "scope": lambda _: "user:ann", **options})


@MISTAKES.add("log", "BlockingLog", remedy="must be an open Log")
async def middleware_with_a_blocking_log(_: Workplace) -> str:
    return await raised(lambda: build_middleware(log=oncelog.open_blocking(":memory:")))


@MISTAKES.add("scope", remedy="must be a function")
async def middleware_with_a_fixed_user(_: Workplace) -> str:
    return await raised(lambda: build_middleware(scope="user:ann"))


@MISTAKES.add("methods", remedy="must be a list")
async def one_method_instead_of_a_list(_: Workplace) -> str:
    return await raised(lambda: build_middleware(methods="POST"))
