"""Pagination of lists: `after` and `limit` in requests, `next_after` and `has_more` in answers, and former names."""

from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from oncelog.core.values import RecordAct
from server.deltas.delta_servers import change
from server.running_server import Answer, Serving, serving

NAMES: Final = ("a", "b", "c")


async def fill(served: Serving) -> None:
    """Write three items of each kind that can be listed."""
    for name in NAMES:
        await served.request("POST", "/v1/chats", json={"chat_id": name, "members": []})
        await served.server.log.submit(RecordAct(act="erase", actor="user:ada", target=name))
    operations = [{"set_entity": {"key": name, "value": "MQ=="}} for name in NAMES]
    operations += [{"create_relationship": {"resource": name, "relation": "r", "subject": "s"}} for name in NAMES]
    body = {"organization": "acme", "sequence": 1, "operations": operations}
    assert (await served.request("POST", "/v1/ledger/write", json=body)).status == 200
    pushed = {
        "deltas": [
            change(number, name, table="products", client="user:developer", a=1) for number, name in enumerate(NAMES, 1)
        ]
    }
    assert (await served.request("POST", "/v1/sync/shop/push", json=pushed)).status == 200


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Serving]:
    async with serving(tmp_path) as found:
        await fill(found)
        yield found


async def get(served: Serving, path: str, **parameters: object) -> Answer:
    query = "&".join(f"{name}={value}" for name, value in parameters.items())
    return await served.get(f"{path}{'&' if '?' in path else '?'}{query}")


def member(page: Mapping[str, Any], name: str) -> Any:
    """Return a member of a page, in its API's spelling."""
    first, *others = name.split("_")
    camel = first + "".join(word.capitalize() for word in others)
    return page[name] if name in page else page.get(camel)


@pytest.mark.parametrize(
    ("path", "items", "name"),
    [
        ("/v1/audit?act=erase", "acts", "target"),
        ("/v1/ledger/entities?organization=acme", "entities", "key"),
        ("/v1/ledger/relationships?organization=acme", "relationships", "resource"),
        ("/v1/sync/shop/rows/products", "rows", "rowId"),
        ("/v1/sync/shop/snapshot", "rows", "rowId"),
        ("/v1/chats", "chats", "chat_id"),
    ],
)
async def test_all_lists_are_paged_with_the_same_names(served: Serving, path: str, items: str, name: str) -> None:
    first = (await get(served, path, limit=2)).json
    assert ([one[name] for one in first[items]], member(first, "has_more")) == (["a", "b"], True)
    second = (await get(served, path, limit=2, after=member(first, "next_after"))).json
    assert ([one[name] for one in second[items]], member(second, "has_more")) == (["c"], False)


@pytest.mark.parametrize(
    ("path", "after", "limit", "next_after"),
    [
        ("/v1/ledger/entities?organization=acme", "page_token", "page_size", "next_page_token"),
        ("/v1/ledger/relationships?organization=acme", "page_token", "page_size", "next_page_token"),
        ("/v1/sync/shop/snapshot", "page", "limit", "next"),
        ("/v1/sync/shop/rows/products", "after", "limit", "next"),
        ("/v1/audit?act=erase", "after", "limit", "cursor"),
    ],
)
async def test_former_names_are_accepted_and_sent(
    served: Serving, path: str, after: str, limit: str, next_after: str
) -> None:
    first = (await get(served, path, **{limit: 2})).json
    assert first[next_after] == member(first, "next_after")
    token = first[next_after]
    previous = await get(served, path, **{limit: 2, after: token})
    assert previous.json == (await get(served, path, limit=2, after=token)).json
    if next_after != "cursor":
        assert previous.json[next_after] == ""


async def test_name_and_former_name_are_mutually_exclusive(served: Serving) -> None:
    answer = await get(served, "/v1/ledger/entities?organization=acme", limit=1, page_size=1)
    assert (answer.status, answer.error["details"]) == (400, {"field": "page_size"})
    body = {"upto": 0, "after": "x", "page": "x"}
    compact = await served.request("POST", "/v1/sync/shop/compact", json=body)
    assert (compact.status, compact.json["errors"][0]["path"]) == (400, "page")


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/v1/ledger/entities?organization=acme", "after"),
        ("/v1/ledger/entities?organization=acme", "page_token"),
        ("/v1/sync/shop/snapshot", "after"),
        ("/v1/sync/shop/snapshot", "page"),
        ("/v1/audit", "after"),
    ],
)
async def test_invalid_cursor_is_reported_under_the_name_sent(served: Serving, path: str, name: str) -> None:
    answer = await get(served, path, **{name: "none"})
    assert (answer.status, answer.json["errors"][0]["path"]) == (400, name)


@pytest.mark.parametrize("name", ["after", "after_height"])
async def test_height_ahead_of_the_lane_is_reported_under_the_name_sent(served: Serving, name: str) -> None:
    answer = await get(served, "/v1/ledger/blocks/stream?organization=acme", **{name: 900})
    assert (answer.status, answer.json["errors"][0]["path"]) == (409, name)
    headers = {"Last-Event-ID": "900"}
    resumed = await served.get(f"/v1/ledger/blocks/stream?organization=acme&{name}=1", headers=headers)
    assert (resumed.status, resumed.json["errors"][0]["path"]) == (409, "Last-Event-ID")


async def test_former_names_are_deprecated_in_the_openapi_document(served: Serving) -> None:
    paths = (await served.get("/openapi.json")).json["paths"]
    described = paths["/v1/ledger/entities"]["get"]["parameters"]
    assert {one["name"] for one in described if one.get("deprecated")} == {"page_token", "page_size"}
    assert {"after", "limit"} <= {one["name"] for one in described if not one.get("deprecated")}


async def test_pages_of_members_and_messages_contain_has_more(served: Serving) -> None:
    body = {"chat_id": "tea", "members": ["user:ada", "user:bob"]}
    await served.request("POST", "/v1/chats", json=body)
    first = (await served.get("/v1/chats/tea?limit=2")).json
    assert (len(first["members"]), first["has_more"]) == (2, True)
    rest = (await get(served, "/v1/chats/tea", limit=2, after=first["next_after"])).json
    assert (len(rest["members"]), rest["has_more"], rest.get("next_after")) == (1, False, None)
    for number in range(1, 4):
        message = {"client_message_id": f"00000000-0000-4000-8000-{number:012x}", "content": str(number)}
        assert (await served.request("POST", "/v1/chats/tea/messages", json=message)).status == 201
    page = (await served.get("/v1/chats/tea/messages?after=0&limit=2")).json
    assert (page["next_after"], page["next_sequence"], page["has_more"]) == (2, 2, True)
