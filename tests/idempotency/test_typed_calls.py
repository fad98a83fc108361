"""`once` accepts and returns models, dataclasses, structs, dates, UUIDs and decimals by annotation."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pydantic import BaseModel, SecretStr

import oncelog
from databases import BOTH_STORES, log_at
from idempotency.typed_samples import (
    CALLS,
    CASES,
    ITEM,
    KEY,
    ORDER,
    Cat,
    Dog,
    Item,
    Login,
    Order,
    make_async,
    return_by_id,
    return_dict,
    return_model,
    return_with_missing_parameter_type,
)
from oncelog import CanonicalError, ConflictError, ResultError, once, work_of

IDS = [f"{function.__name__}-{type(value).__name__}" for function, value in CASES]


@pytest.fixture(autouse=True)
def no_calls() -> None:
    CALLS.clear()


@pytest.mark.rule("RU-11")
@pytest.mark.parametrize(("function", "value"), CASES, ids=IDS)
def test_replay_returns_the_annotated_type(function: Callable[[Any], Any], value: Any) -> None:
    with oncelog.open_blocking(":memory:") as log:
        decorated = once(log, name="work")(function)
        results = [decorated(value) for _ in range(2)]
    assert results == [value, value]
    assert [type(result) for result in results] == [type(value)] * 2
    assert [value] == CALLS


@pytest.mark.rule("RU-11")
@pytest.mark.parametrize(("function", "value"), CASES, ids=IDS)
async def test_replay_of_an_async_function_returns_the_annotated_type(
    function: Callable[[Any], Any], value: Any
) -> None:
    async with oncelog.open(":memory:") as log:
        decorated = once(log, name="work")(make_async(function))
        results = [await decorated(value) for _ in range(2)]
    assert results == [value, value]
    assert [type(result) for result in results] == [type(value)] * 2
    assert [value] == CALLS


@BOTH_STORES
def test_result_has_its_type_after_a_restart(tmp_path: Path) -> None:
    for _ in range(2):
        with oncelog.open_blocking(log_at(tmp_path / "app.db")) as log:
            assert once(log, name="work")(return_dict)({"a": ORDER}) == {"a": ORDER}
    assert len(CALLS) == 1


def test_models_identify_calls_by_class_and_content() -> None:
    with oncelog.open_blocking(":memory:") as log:

        @once(log, name="work")
        def work(value: Any) -> int:
            CALLS.append(value)
            return len(CALLS)

        values = [Cat(), Cat(lives=8), Dog(), {"kind": "dog"}, ITEM, [ITEM], {"x": ITEM}]
        assert [work(value) for value in values] == [1, 2, 3, 4, 5, 6, 7]
        assert work(Item(name="tea", cents=ITEM.cents)) == 5


def test_key_with_a_different_model_is_a_conflict() -> None:
    with oncelog.open_blocking(":memory:") as log:
        work = once(log, name="work", key=lambda value: value.id)(return_model)
        work(ORDER)
        with pytest.raises(ConflictError):
            work(Order(id=KEY, at=ORDER.at, Note="other"))


class Pair(BaseModel):
    base: Item


class Discounted(Item):
    percent: int = 10


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (Login(user="ann", password=SecretStr("x")), "field password of Login is different after a round trip"),
        (Pair(base=Discounted(name="tea", cents=ITEM.cents)), "field base of Pair is different after a round trip"),
        ([Login(user="ann", password=SecretStr("x"))], "field password of Login is different after a round trip"),
        (object(), "a value of type object has no JSON form"),
        ({"at": float("nan")}, "NaN and infinities have no JSON form"),
    ],
)
def test_argument_without_a_form_names_function_parameter_and_type(value: Any, reason: str) -> None:
    def pay(login: Any) -> int:
        CALLS.append(login)
        return 1

    with oncelog.open_blocking(":memory:") as log, pytest.raises(CanonicalError) as raised:
        once(log, name="work")(pay)(value)
    text = str(raised.value)
    assert text.startswith("$.login")
    assert f"the argument login of {pay.__qualname__}, of type {type(value).__name__}, has no canonical form" in text
    assert reason in text
    assert "list it in ignore=…" in text
    assert CALLS == []


def test_result_that_cannot_be_restored_names_function_and_type() -> None:
    def log_in() -> Login:
        return Login(user="ann", password=SecretStr("x"))

    with oncelog.open_blocking(":memory:") as log, pytest.raises(ResultError) as raised:
        once(log, name="work")(log_in)()
    assert "the result of log_in cannot be stored as" in str(raised.value)
    assert "field password of Login is different after a round trip through JSON" in str(raised.value)


def test_invalid_result_lists_the_faults_of_the_model() -> None:
    def order() -> Order:
        return {"id": 1}  # type: ignore[return-value]

    with oncelog.open_blocking(":memory:") as log, pytest.raises(ResultError) as raised:
        once(log, name="work")(order)()
    assert "id: " in str(raised.value)
    assert "at: Field required" in str(raised.value)


def test_stored_result_that_is_no_longer_valid_names_function_and_type(tmp_path: Path) -> None:
    def old() -> dict[str, str]:
        return {"name": "tea"}

    def new() -> Item:
        raise AssertionError("the result is stored")

    with oncelog.open_blocking(tmp_path / "app.db") as log:
        once(log, name="work")(old)()
        with pytest.raises(ResultError, match=r"the stored result of new is not .*Item: cents: Field required"):
            once(log, name="work")(new)()


def test_only_the_return_type_is_evaluated() -> None:
    with oncelog.open_blocking(":memory:") as log:
        assert once(log, name="work")(return_with_missing_parameter_type)(1) == ITEM


def test_union_that_pydantic_cannot_restore_is_refused_when_decorating() -> None:
    class Row(msgspec.Struct):
        number: int

    def work() -> Any: ...

    work.__annotations__["return"] = Item | Row
    with pytest.raises(TypeError, match="cannot be stored as JSON"):
        once(oncelog.open_blocking(":memory:"), name="work")(work)


def test_keys_of_a_dict_have_their_type() -> None:
    with oncelog.open_blocking(":memory:") as log:
        work = once(log, name="work")(return_by_id)
        assert [work(ITEM) for _ in range(2)] == [{KEY: ITEM}] * 2


def test_work_of_a_call_with_a_model_is_its_identity() -> None:
    with oncelog.open_blocking(":memory:") as log:
        work = once(log, name="work")(return_model)
        work(ORDER)
        identity = work_of(work, ORDER)
        assert log.lookup(identity.key, policy=identity.policy, scope=identity.scope).record is not None


def test_functions_with_plain_types_do_not_import_pydantic(tmp_path: Path) -> None:
    program = """
import sys
import dataclasses
import oncelog

@dataclasses.dataclass
class Order:
    cents: int

with oncelog.open_blocking(":memory:") as log:
    @oncelog.once(log)
    def charge(order: Order) -> Order:
        return order

    assert charge(Order(5)) == charge(Order(5)) == Order(5)
assert not {"pydantic", "attrs", "attr"} & set(sys.modules)
"""
    (tmp_path / "program.py").write_text(program)
    subprocess.run([sys.executable, "program.py"], check=True, cwd=tmp_path)
