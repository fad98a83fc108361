"""Validation by the application: validator lookup, and the effect of objections."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any
from uuid import UUID

import aiohttp
import pytest

from databases import BOTH_STORES, log_at
from oncelog.core.builders import event
from oncelog.core.policy import CHAT
from oncelog.core.values import Submission
from oncelog.errors import SettingsError
from oncelog.server.app import Server
from oncelog.server.event_validator import (
    OBJECTION_CHARACTERS_MAX,
    VALIDATORS_GROUP,
    NewEvent,
    load_validator,
    to_validator,
)
from oncelog.server.settings import ServerSettings

MODULE = """
from pathlib import Path

asked = []

class Rules:
    def strict(self, event):
        raise ValueError("nothing is good enough")

    async def waiting(self, event):
        pass

class Awaited:
    async def __call__(self, event):
        pass

rules = Rules()
awaited = Awaited()
number = 7

def check(event):
    asked.append(event)
    limit = int(Path("limit.txt").read_text())
    if event.body.get("total", 0) > limit:
        raise ValueError(f"total must be at most {limit}")
    if "stop" in event.body:
        raise SystemExit
    if "silent" in event.body:
        raise RuntimeError
    if "says" in event.body:
        return "said so"
    if "false" in event.body:
        return False

async def waiting(event):
    pass
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Write a module to the working directory and return its name."""
    name = f"rules_of_{abs(hash(tmp_path))}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    (tmp_path / "limit.txt").write_text("100")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield name
    sys.modules.pop(name, None)


def item(number: int, **members: Any) -> dict[str, Any]:
    return {"id": str(UUID(int=number)), "partitions": ["orders"], "event": {"type": "order.placed", **members}}


async def submit(server: Server, *items: Mapping[str, Any]) -> Sequence[dict[str, Any]]:
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{server.urls[0]}/v1/events", json={"events": items, "client_id": "shop"}) as response,
    ):
        assert response.status == 200, await response.text()
        results: list[dict[str, Any]] = (await response.json())["results"]
        return results


def serving(tmp_path: Path, name: str) -> Server:
    return Server(ServerSettings(development=True, port=0, store=log_at(tmp_path / "log.db"), validate=name))


def refusal(name: str) -> str:
    with pytest.raises(SettingsError) as caught:
        load_validator(name)
    return str(caught.value)


# --- lookup --------------------------------------------------------------------------------------


def test_callable_of_a_module_in_the_working_directory_is_found(module: str) -> None:
    validate = load_validator(f"{module}:check")
    order = event(str(UUID(int=1)), {"type": "order.placed", "total": 101}, ["b", "a"], actor="user:ada", client="shop")
    with pytest.raises(ValueError, match=r"^total must be at most 100$"):
        validate(order)
    assert sys.modules[module].asked == [
        NewEvent(
            id=UUID(int=1),
            type="order.placed",
            body={"type": "order.placed", "total": 101},
            partitions=("a", "b"),
            client_id="shop",
            actor="user:ada",
        )
    ]


def test_method_is_found_by_its_path(module: str) -> None:
    validate = load_validator(f"{module}:rules.strict")
    with pytest.raises(ValueError, match=r"^nothing is good enough$"):
        validate(event(str(UUID(int=1)), {"type": "x"}, ["a"]))


def test_validator_entry_point_is_found_and_must_be_unique(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "shop-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: shop\nVersion: 1.0\n")
    entries = f"[{VALIDATORS_GROUP}]\nshop = {module}:check\nbroken = {module}:nothing\nnumber = {module}:number\n"
    (package / "entry_points.txt").write_text(entries)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load_validator("shop")(event(str(UUID(int=1)), {"type": "x", "total": 100}, ["a"])) is None
    assert refusal("broken").startswith("validate: broken cannot be loaded: AttributeError: ")
    assert refusal("number") == "validate: number is not callable"
    again = tmp_path / "other"
    again.mkdir()
    (again / "shop2-1.0.dist-info").mkdir()
    (again / "shop2-1.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: shop2\nVersion: 1.0\n")
    (again / "shop2-1.0.dist-info/entry_points.txt").write_text(entries)
    monkeypatch.syspath_prepend(str(again))
    assert len(metadata.entry_points(group=VALIDATORS_GROUP, name="shop")) == 2
    assert (
        refusal("shop") == "validate: there is more than one entry point named 'shop' in the group oncelog.validators"
    )


def test_missing_validator_is_reported(module: str, tmp_path: Path) -> None:
    assert refusal("no_such_module:check") == (
        "validate: no_such_module:check cannot be imported: ModuleNotFoundError: No module named 'no_such_module'; "
        "install the module for the server's Python, or add its directory to PYTHONPATH"
    )
    assert f"{module}:nothing cannot be imported: AttributeError" in refusal(f"{module}:nothing")
    assert refusal(f"{module}:number") == f"validate: {module}:number is not callable"
    assert refusal("nobody") == "validate: there is no entry point named 'nobody' in the group oncelog.validators"
    (tmp_path / "broken_rules.py").write_text("1 / 0")
    assert refusal("broken_rules:check").endswith("ZeroDivisionError: division by zero")


@pytest.mark.parametrize("name", ["waiting", "rules.waiting", "awaited"])
def test_coroutine_function_is_refused_as_validator(module: str, name: str) -> None:
    assert refusal(f"{module}:{name}") == (
        f"validate: {module}:{name} is a coroutine function; it must be a regular function"
    )


def test_server_does_not_start_without_its_validator(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="no_such_module:check cannot be imported"):
        serving(tmp_path, "no_such_module:check")
    assert not (tmp_path / "log.db").exists()


# --- objections -----------------------------------------------------------------------------


@BOTH_STORES
@pytest.mark.rule("EV-10")
async def test_objection_rejects_only_its_event(module: str, tmp_path: Path) -> None:
    async with serving(tmp_path, f"{module}:check") as server:
        several = await submit(
            server, item(1, total=1), item(2, total=101), item(3, silent=1), item(4, stop=1), item(5, total=100)
        )
        others = await submit(server, item(6, says=1), item(7, false=1), item(8))
    assert [(one["status"], one.get("committed_id")) for one in several] == [
        ("committed", 1),
        ("rejected", None),
        ("rejected", None),
        ("rejected", None),
        ("committed", 2),
    ]
    assert {one["reason"] for one in several if "reason" in one} == {"validation_failed"}
    messages = [one["errors"][0]["message"] for one in several if "errors" in one]
    assert messages == ["total must be at most 100", "RuntimeError", "SystemExit"]
    # A returned string is an objection. Any other value except None is a fault of the validator.
    assert [one["errors"][0]["message"] for one in others if "errors" in one] == [
        "said so",
        "the application's validation returned an invalid result",
    ]
    assert others[2]["committed_id"] == 3


@BOTH_STORES
@pytest.mark.rule("EV-10")
async def test_validator_is_called_only_for_new_ids(module: str, tmp_path: Path) -> None:
    async with serving(tmp_path, f"{module}:check") as server:
        committed, rejected = await submit(server, item(1, total=90), item(2, total=101))
    (tmp_path / "limit.txt").write_text("50")
    sys.modules[module].asked.clear()
    async with serving(tmp_path, f"{module}:check") as server:
        again, still, new = await submit(server, item(1, total=90), item(2, total=101), item(3, total=90))
    assert again == committed
    assert (rejected["status"], still["status"], new["status"]) == ("rejected", "rejected", "rejected")
    # A rejected event is not stored, so its id is still new.
    assert [one.id.int for one in sys.modules[module].asked] == [2, 3]


@BOTH_STORES
@pytest.mark.rule("EV-10")
async def test_rejected_event_commits_once_the_validator_accepts_it(module: str, tmp_path: Path) -> None:
    async with serving(tmp_path, f"{module}:check") as server:
        (before,) = await submit(server, item(1, total=101))
        (tmp_path / "limit.txt").write_text("200")
        (after,) = await submit(server, item(1, total=101))
    assert (before["status"], after["status"]) == ("rejected", "committed")


def test_objection_is_escaped_and_truncated() -> None:
    class MuteError(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    def objection(error: Exception) -> str:
        def check(_: NewEvent) -> None:
            raise error

        with pytest.raises(ValueError) as caught:
            to_validator(check)(event(str(UUID(int=1)), {"type": "x"}, ["a"]))
        return str(caught.value)

    assert objection(MuteError()) == "MuteError"
    assert objection(ValueError("half \ud800")) == "half ?"
    assert objection(ValueError("x" * (OBJECTION_CHARACTERS_MAX + 5))).endswith("x… (5 more characters)")


def test_writes_of_other_policies_are_not_validated() -> None:
    def check(_: NewEvent) -> None:
        raise AssertionError

    message = Submission(policy=CHAT, scope="room", key=b"k" * 16, fingerprint=b"f", body=b"no json")
    assert to_validator(check)(message) is None
