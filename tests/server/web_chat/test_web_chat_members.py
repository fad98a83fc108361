"""The web chat's member list in a real Chromium: owners, their buttons, and refusals."""

import json
from pathlib import Path
from typing import Final

import pytest

from server.running_server import Serving, serving
from server.web_chat.chromium import Chromium
from server.web_chat.windows import Window, two_windows

MEMBERS: Final = """
Object.fromEntries([...document.querySelectorAll("#member-list li")].map((li) => [
  li.dataset.user,
  [...li.children].slice(1).filter((one) => !one.hidden).map((one) => one.textContent),
]))
"""
"""The visible role and buttons of each member."""


async def create(served: Serving, chat: str, *names: str) -> None:
    body = {"chat_id": chat, "members": [f"user:{name}" for name in names]}
    assert (await served.request("POST", "/v1/chats", credential=names[0], json=body)).status == 201


async def wait_for_members(window: Window, **wanted: list[str]) -> None:
    await window.until(MEMBERS, {f"user:{name}": shown for name, shown in wanted.items()})


def button_of(name: str, kind: str) -> str:
    return f"#member-list [data-user='user:{name}'] .{kind}"


@pytest.mark.rule("CH-19")
async def test_owner_manages_members_and_others_see_no_buttons(tmp_path: Path, chromium: Chromium) -> None:
    async with serving(tmp_path) as served, two_windows(chromium, served.url) as (ann, bob):
        await create(served, "tea", "ann", "bob", "cyn")
        await ann.open_and_wait("ann", "tea")
        await bob.open_and_wait("bob", "tea")
        managed = ["Make owner", "Remove"]
        await wait_for_members(ann, ann=["owner"], bob=managed, cyn=managed)
        await wait_for_members(bob, ann=["owner"], bob=[], cyn=[])
        assert [await one.tab.run("document.getElementById('invite').hidden") for one in (ann, bob)] == [False, True]
        assert "owners" in await bob.text_of("#owners-only:not([hidden])")
        assert await ann.tab.run("document.getElementById('owners-only').hidden")

        await ann.click(button_of("bob", "make-owner"))
        await wait_for_members(ann, ann=["owner"], bob=["owner", "Remove"], cyn=managed)
        await wait_for_members(bob, ann=["owner", "Remove"], bob=["owner"], cyn=managed)
        await bob.click(button_of("cyn", "remove"))
        await wait_for_members(ann, ann=["owner"], bob=["owner", "Remove"])

        # The last owner leaves, and the longest-standing member becomes owner.
        await bob.click(button_of("ann", "remove"))
        await ann.until("document.querySelector('[data-chat=tea] .preview') !== null")
        await wait_for_members(bob, bob=["owner"])


@pytest.mark.rule("CH-19")
async def test_refused_membership_change_is_explained(tmp_path: Path, chromium: Chromium) -> None:
    async with serving(tmp_path) as served, two_windows(chromium, served.url) as (ann, bob):
        await create(served, "tea", "ann", "bob")
        await ann.open_and_wait("ann", "tea")
        await wait_for_members(ann, ann=["owner"], bob=["Make owner", "Remove"])
        # The window does not know yet that another owner has removed the role.
        await ann.network("off")
        for name, role in (("bob", "owner"), ("ann", "member")):
            path = f"/v1/chats/tea/members/user:{name}"
            assert (await served.request("PUT", path, credential="ann", json={"role": role})).status == 200
        await ann.click(button_of("bob", "remove"))
        await ann.until("document.getElementById('notice').textContent.includes('only owners of the chat')")
        await ann.network("good")
        await wait_for_members(ann, ann=[], bob=["owner"])
        await bob.open_and_wait("bob", "tea")
        await wait_for_members(bob, ann=["Make owner", "Remove"], bob=["owner"])


@pytest.mark.rule("CH-19")
async def test_user_who_has_left_is_not_made_an_owner(tmp_path: Path, chromium: Chromium) -> None:
    async with serving(tmp_path) as served, two_windows(chromium, served.url) as (ann, _):
        await create(served, "tea", "ann", "bob")
        await ann.open_and_wait("ann", "tea")
        await wait_for_members(ann, ann=["owner"], bob=["Make owner", "Remove"])
        # Keep a reference to the button, because a pending member request removes it once bob has left.
        await ann.tab.run(f"window.makeOwner = document.querySelector({json.dumps(button_of('bob', 'make-owner'))}); 0")
        await ann.network("off")
        assert (await served.request("DELETE", "/v1/chats/tea/members/user:bob", credential="bob")).status == 200
        await ann.tab.run("window.makeOwner.click()")
        await ann.until("document.getElementById('notice').textContent.includes('not a member of the chat')")
        await ann.network("good")
        await wait_for_members(ann, ann=["owner"])
