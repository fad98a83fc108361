"""Ledger API reads over both wires: entities, relationships and transactions."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

import pytest

from databases import BOTH_STORES
from oncelog.testing.clock import ManualClock
from server.ledger.ledger_servers import SharedServer, key, run_server
from server.ledger.ledger_transports import GRPC, HTTP, Json, Ledger, expect_success, put, relate, remove
from server.ledger.ledger_transports import unrelate as unrelate_one

pytestmark = BOTH_STORES

SET: Final = put("a", b"1")


# --- entities and relationships ------------------------------------------------------------------------------------


async def read_pages(ledger: Ledger, name: str, page_size: int, **members: Any) -> list[list[Json]]:
    """Read and return all pages."""
    call = {"entities": ledger.list_entities, "relationships": ledger.list_relationships}[name]
    pages, page_token = [], ""
    while True:
        page = await call(page_size=page_size, page_token=page_token, **members)
        assert page.keys() == {name, "next_page_token"}
        pages.append(page[name])
        page_token = page["next_page_token"]
        if not page_token:
            return pages


def all_of(pages: Iterable[list[Json]]) -> list[Json]:
    return [one for page in pages for one in page]


async def test_entities_are_listed_in_key_order_by_page_and_prefix(shared_server: SharedServer) -> None:
    ledger = shared_server.ledger()
    assert await ledger.list_entities() == {"entities": [], "next_page_token": ""}
    keys = [
        "A",
        "a",
        "a b",
        "a/1",
        "a/10",
        "a/2",
        "b",
        "z",
        "é",
        "ｚ",
        "𝄞",
        "\ud7ff1",
        "\ue000",
        "\U0010ffff1",
        '"',
        "\x7f",
        "%",
        "a%",
    ]
    await ledger.write(1, *[put(one, one.encode()) for one in reversed(keys)], put("z1", expires_at_ms=1))
    await ledger.write(2, remove("b"), put("é", b"2", expires_at_ms=2**50))
    expected: list[Json] = [
        {"key": one, "value": one.encode(), "version": 1} for one in sorted(keys) if one not in ("b", "é")
    ]
    changed = {"key": "é", "value": b"2", "version": 2, "expires_at_ms": 2**50}
    expected = sorted([*expected, changed], key=lambda one: one["key"])
    for size in (1, 2, 3, 100):
        pages = await read_pages(ledger, "entities", size)
        assert all_of(pages) == expected
        assert all(len(page) == size for page in pages[:-1])
    for prefix in ("a", "a/1", "a/", "é", "𝄞", "%", "none", '"', "\ud7ff", "\U0010ffff"):
        found = all_of(await read_pages(ledger, "entities", 2, prefix=prefix))
        assert found == [one for one in expected if one["key"].startswith(prefix)]


async def test_expired_entities_are_not_listed(tmp_path: Path, wire: str) -> None:
    clock = ManualClock()
    async with run_server(tmp_path, wire, clock=clock) as server:
        ledger = server.ledger(client_id="app")
        end_ms = clock.wall_ms() + 1000
        chosen = [put(f"{number:02}", expires_at_ms=end_ms if number % 3 else None) for number in range(30)]
        await ledger.write(1, *chosen)
        assert len(all_of(await read_pages(ledger, "entities", 7))) == 30
        page = await ledger.list_entities(page_size=7)
        clock.advance(1000)
        left = [f"{number:02}" for number in range(0, 30, 3)]
        pages = await read_pages(ledger, "entities", 4)
        assert [[one["key"] for one in page] for page in pages] == [left[:4], left[4:8], left[8:]]
        # The token refers to a key that has expired. The next page still starts after it.
        rest = await ledger.list_entities(page_token=page["next_page_token"])
        assert [one["key"] for one in rest["entities"]] == left[3:]


async def test_page_size_is_limited_to_the_maximum(tmp_path: Path, wire: str) -> None:
    async with run_server(tmp_path, wire, page_events_max=5, page_events_default=3) as server:
        ledger = server.ledger(client_id="app")
        await ledger.write(1, *[put(f"{n}") for n in range(9)], *[relate(f"{n}") for n in range(9)])
        for size, count in ((0, 3), (1, 1), (5, 5), (6, 5), (2**32 - 1, 5)):
            assert len((await ledger.list_entities(page_size=size))["entities"]) == count
            assert len((await ledger.list_relationships(page_size=size))["relationships"]) == count
        assert len((await ledger.list_entities())["entities"]) == 3


async def test_relationships_are_filtered_by_their_fields_and_paged(shared_server: SharedServer) -> None:
    ledger = shared_server.ledger()
    names = [
        (resource, relation, subject)
        for resource in ("doc:1", "doc:2", "é")
        for relation in ("owner", "viewer")
        for subject in ("user:1", "user:2", "𝄞")
    ]
    await ledger.write(1, *[relate(*one) for one in reversed(names)])
    await ledger.write(2, unrelate_one(*names[4]), relate(*names[5]))
    left = [one for one in sorted(names) if one != names[4]]
    for asked in (
        {},
        {"resource": "doc:1"},
        {"resource": "doc:1", "relation": "viewer"},
        {"subject": "user:2"},
        {"subject": "𝄞", "relation": "owner"},
        {"resource": "é", "subject": "user:1"},
        {"resource": "doc:2", "relation": "owner", "subject": "user:1"},
        {"resource": "doc"},
        {"subject": "user"},
    ):
        fields = ("resource", "relation", "subject")
        expected = [
            one for one in left if all(asked.get(field, name) == name for field, name in zip(fields, one, strict=True))
        ]
        for size in (1, 2, 100):
            pages = await read_pages(ledger, "relationships", size, **asked)
            found = all_of(pages)
            assert [(one["resource"], one["relation"], one["subject"]) for one in found] == expected
            assert {one["version"] for one in found} <= {1}
            assert all(len(page) == size for page in pages[:-1])


# --- transactions ---------------------------------------------------------------------------------------------------


@pytest.mark.rule("LG-1", "LG-2")
async def test_transaction_returns_its_operations_as_sent(shared_server: SharedServer) -> None:
    ledger = shared_server.ledger()
    operations = [
        put("empty"),
        put('é𝄞 "\\\n', bytes(range(256)), expires_at_ms=0),
        put("x", b"1", condition={"must_not_exist": True}, expires_at_ms=2**53 - 1),
        put("x", b"2", condition={"must_exist": True}),
        put("x", b"3", condition={"version_is": 1}),
        put("x", b"", condition={"value_equals": b"3"}),
        put("x", b"", condition={"value_equals": b""}),
        remove("y"),
        relate("r", "é", "𝄞"),
        unrelate_one("r", "é", "𝄞"),
    ]
    answer = expect_success(await ledger.write(1, *operations, key=key(1)))
    assert (await ledger.get_transaction(answer["committed_tx_id"]))["operations"] == operations


async def test_both_wires_return_equal_answers(shared_server: SharedServer) -> None:
    here = shared_server.ledger()
    there = here.through(shared_server.server.wire(HTTP if shared_server.server.kind == GRPC else GRPC))
    answer = expect_success(await here.write(1, SET, put("b", b"\xff", expires_at_ms=2**50), relate("r"), key=key(1)))
    assert await there.write(1, SET, put("b", b"\xff", expires_at_ms=2**50), relate("r"), key=key(1)) == answer
    tx_id = answer["committed_tx_id"]
    calls: list[Callable[[Ledger], Any]] = [
        lambda one: one.write(9, SET, key=key(2)),
        lambda one: one.write(1, SET, key=key(1)),
        lambda one: one.write(1, put("x")),
        lambda one: one.write(2, put("a", condition={"must_not_exist": True}), key=key(2)),
        lambda one: one.write(2, put("none", condition={"must_exist": True}), key=key(2)),
        lambda one: one.get_client_state(),
        lambda one: one.get_entity("b"),
        lambda one: one.get_entity("none"),
        lambda one: one.list_entities(page_size=1),
        lambda one: one.list_relationships(),
        lambda one: one.check_relationship("r"),
        lambda one: one.get_transaction(tx_id),
        lambda one: one.get_proof(tx_id),
        lambda one: one.get_block(answer["block_height"]),
    ]
    for asked in calls:
        assert await asked(here) == await asked(there)
