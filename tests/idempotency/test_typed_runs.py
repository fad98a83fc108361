"""Runs pass typed arguments to their tools and return typed outputs, which are stored as JSON."""

import dataclasses
import datetime as dt
import functools
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest
from pydantic import SecretStr

import oncelog
from databases import BOTH_STORES, log_at
from idempotency.run_samples import FIELDS
from idempotency.typed_samples import ITEM, KEY, ORDER, WHEN, Cat, Dog, Item, Login, Order
from oncelog import BlockingRuns, CanonicalError, ResultError, Runs

if TYPE_CHECKING:
    from elsewhere import Missing  # type: ignore[import-not-found]

ORDER_JSON = {
    "id": str(KEY),
    "at": "2026-11-19T12:30:00Z",
    "items": [{"name": "tea", "cents": "4.50"}],
    "Note": "fragile",
}


def with_args(**args: Any) -> dict[str, Any]:
    return {**FIELDS, "args": args}


@BOTH_STORES
@pytest.mark.rule("RU-6")
async def test_output_has_the_annotated_type_for_all_callers(tmp_path: Path) -> None:
    async def price(order: Order, at: dt.datetime) -> list[Item]:
        return order.items

    for is_reused in (False, True):
        async with oncelog.open(log_at(tmp_path / "app.db")) as log:
            run = await Runs(log).execute(**with_args(order=ORDER, at=WHEN), tool=price)
            assert run.reused == is_reused
            assert run.output == [ITEM]
            assert run.event.output == [{"name": "tea", "cents": "4.50"}]
            assert run.event.args == {"order": ORDER_JSON, "at": "2026-11-19T12:30:00Z"}


@pytest.mark.rule("RU-14")
def test_tool_gets_its_arguments_as_given_or_restored_from_json() -> None:
    given: list[Any] = []

    def tool(order: Order, keys: set[UUID], cents: Decimal, kind: Cat | Dog, plain: dict[str, int]) -> None:
        given.append([order, keys, cents, kind, plain])

    typed = {"order": ORDER, "keys": {KEY}, "cents": Decimal("1.50"), "kind": Dog(), "plain": {"a": 1}}
    plain = {"order": ORDER_JSON, "keys": [str(KEY)], "cents": "1.50", "kind": {"kind": "dog"}, "plain": {"a": 1}}
    with oncelog.open_blocking(":memory:") as log:
        runs = BlockingRuns(log)
        first = runs.execute(**{**with_args(**typed), "campaign_id": 1}, tool=tool)
        second = runs.execute(**{**with_args(**plain), "campaign_id": 2}, tool=tool)
    assert given == [list(typed.values())] * 2
    assert given[0][0] is ORDER
    assert first.event.key != second.event.key
    assert first.event.args == second.event.args == plain


@dataclasses.dataclass
class Point:
    x: int


@pytest.mark.rule("RU-6")
@pytest.mark.parametrize("tool", [dict, Point, functools.partial(dict)])
def test_output_of_a_class_is_its_json_form(tool: Any) -> None:
    with oncelog.open_blocking(":memory:") as log:
        runs = BlockingRuns(log)
        for is_reused in (False, True):
            run = runs.execute(**with_args(x=1), tool=tool)
            assert (run.reused, run.output) == (is_reused, {"x": 1})


def test_output_of_a_built_in_function_is_its_json_form() -> None:
    with oncelog.open_blocking(":memory:") as log:
        run = BlockingRuns(log).execute(**with_args(sep="", end=""), tool=print)
    assert run.output is None


def test_typed_and_json_arguments_are_the_same_run() -> None:
    def tool(order: Order) -> str:
        return order.items[0].name

    with oncelog.open_blocking(":memory:") as log:
        runs = BlockingRuns(log)
        runs.execute(**with_args(order=ORDER), tool=tool)
        assert runs.execute(**with_args(order=ORDER_JSON), tool=tool).reused


def test_null_members_of_a_model_are_stored_as_given() -> None:
    def tool(order: Order) -> None: ...

    with oncelog.open_blocking(":memory:") as log:
        event = BlockingRuns(log).execute(**with_args(order=Order(id=KEY, at=WHEN)), tool=tool).event  # type: ignore[call-arg]
    assert event.args == {"order": {"id": str(KEY), "at": "2026-11-19T12:30:00Z", "items": []}}
    assert event.args_given == {"order": {"id": str(KEY), "at": "2026-11-19T12:30:00Z", "items": [], "Note": None}}


@pytest.mark.parametrize(
    ("args", "path", "reason"),
    [
        ({"order": {"id": 1}}, "$.args_json.order", "the argument of refused is not .*Order: id: "),
        (
            {"order": Login(user="ann", password=SecretStr("x"))},
            "$.args_json.order",
            "refused, of type Login, cannot be",
        ),
        ({"order": object()}, "$.args_json.order", "refused, of type object, cannot be stored: a value of type object"),
        ({"order": {"at": [1.5]}}, "$.args_json.order.at[0]", "floats are not allowed"),
        ({"an order": object()}, '$.args_json["an order"]', "of type object"),
    ],
)
def test_argument_that_does_not_fit_is_refused_before_the_tool_runs(
    args: dict[str, Any], path: str, reason: str
) -> None:
    def refused(order: Order) -> None:
        raise AssertionError("the tool must not run")

    refused.__qualname__ = "refused"
    with oncelog.open_blocking(":memory:") as log:
        with pytest.raises(CanonicalError, match=reason) as raised:
            BlockingRuns(log).execute(**with_args(**args), tool=refused)
        assert raised.value.path == path
        assert log.heads() == {}


def test_output_that_does_not_have_the_annotated_type_is_available_as_json() -> None:
    def tool() -> Item:
        return {"name": "tea"}  # type: ignore[return-value]

    with oncelog.open_blocking(":memory:") as log:
        run = BlockingRuns(log).execute(**with_args(), tool=tool)
    assert run.event.output == {"name": "tea"}
    with pytest.raises(ResultError, match=r"the output of run .* of dice is not .*Item: cents: Field required"):
        _ = run.output


def test_output_that_cannot_be_stored_names_tool_and_type() -> None:
    def tool() -> Login:
        return Login(user="ann", password=SecretStr("x"))

    with oncelog.open_blocking(":memory:") as log, pytest.raises(ResultError) as raised:
        BlockingRuns(log).execute(**with_args(), tool=tool)
    assert str(raised.value).startswith("the output of dice, of type Login, cannot be stored as JSON: field password")


def test_tool_without_annotations_gets_and_returns_json() -> None:
    def tool(order, **more):  # type: ignore[no-untyped-def]
        return {"order": order, **more}

    with oncelog.open_blocking(":memory:") as log:
        run = BlockingRuns(log).execute(**with_args(order=ORDER_JSON, n=1), tool=tool)
    assert run.output == run.event.output == {"order": ORDER_JSON, "n": 1}


def test_tool_whose_annotations_cannot_be_evaluated_still_runs() -> None:
    def tool(order: "Missing") -> "Missing":
        return order

    with oncelog.open_blocking(":memory:") as log:
        run = BlockingRuns(log).execute(**with_args(order=ORDER_JSON), tool=tool)
    assert run.event.output == ORDER_JSON
    with pytest.raises(ResultError, match="name 'Missing' is not defined"):
        _ = run.output


class Desk:
    def sell(self, item: int, order: Order) -> Item:
        return order.items[item]

    def __call__(self, order: Order) -> Item:
        return self.sell(0, order)


@pytest.mark.parametrize("tool", [Desk(), functools.partial(Desk().sell, 0), functools.partial(Desk())])
def test_annotations_of_methods_and_partial_functions_apply(tool: Any) -> None:
    with oncelog.open_blocking(":memory:") as log:
        assert BlockingRuns(log).execute(**with_args(order=ORDER_JSON), tool=tool).output == ITEM
