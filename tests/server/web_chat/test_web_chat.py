"""The web chat in a real Chromium: two users, a killed server, a bad network, and keyboard-only use."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

from databases import BOTH_STORES
from deadlines import WAIT_S
from server.running_server import serving
from server.web_chat.chromium import Chromium
from server.web_chat.windows import (
    READY,
    SHIFT,
    Line,
    Window,
    chat_server,
    check_same_messages,
    open_both,
    two_windows,
    window,
)

PHONE: Final = (375, 740)
KEPT: Final = "navigator.serviceWorker.ready.then((one) => one.active !== null)"
"""True once the service worker is active, so that the browser can load the page without the server."""
PICTURE: Final = Path(__file__).parents[3] / "docs/images/chat.png"
PICTURE_BYTES_MAX: Final = 300 * 1024
MESSAGES: Final = 20
"""Enough for the bad network to drop at least one frame."""
FAST_BUT_BAD: Final = {"drop": 0.15, "duplicate": 0.25, "reorder": 0.3, "delayMs": 40}


def all_sent(count: int) -> Any:
    return lambda lines: len(lines) == count and all(one["sequence"] is not None for one in lines)


async def wait_for_both(ann: Window, bob: Window, count: int) -> list[Line]:
    """Wait until both windows show this number of messages, and check that their order and audit panels agree."""
    lines = await ann.wait_for_lines(all_sent(count))
    check_same_messages(lines, await bob.wait_for_lines(all_sent(count)))
    order = await ann.text_of("#audit [data-kind=order]")
    await bob.until("document.querySelector('#audit [data-kind=order]').textContent", order)
    for one in (ann, bob):
        assert await one.tab.run("document.querySelectorAll('#audit [data-kind=bad]').length") == 0
    return lines


@BOTH_STORES
@pytest.mark.rule("CH-12")
@pytest.mark.rule("CH-14")
async def test_two_windows_chat_across_a_killed_server(tmp_path: Path, chromium: Chromium) -> None:
    with chat_server(tmp_path) as served:
        async with two_windows(chromium, served.url) as (ann, bob):
            await open_both(ann, bob)
            await ann.write("hello")
            await bob.wait_for_texts("hello")
            await bob.write("hello yourself")
            await ann.wait_for_texts("hello", "hello yourself")
            await ann.wait_for_marks("delivered")

            await ann.tab.run(KEPT)
            served.kill()
            await ann.wait_for_state("offline")
            await ann.write("are you there?", "bob?")
            await bob.write("the server is away", "I go on")
            await ann.wait_for_marks("delivered", "pending", "pending")
            # A reload uses the page that the service worker has stored, and the pending messages are still there.
            await ann.open_page("ann")
            await ann.wait_for_texts("hello", "hello yourself", "are you there?", "bob?")
            await ann.wait_for_marks("delivered", "pending", "pending")
            assert "2 waiting" in await ann.text_of("#waiting")
            await ann.write("after a reload")

            served.start()
            lines = await wait_for_both(ann, bob, 7)
            texts = [one["text"] for one in lines]
            assert [text for text in texts if text in ("are you there?", "bob?", "after a reload")] == [
                "are you there?",
                "bob?",
                "after a reload",
            ]
            assert texts.index("the server is away") < texts.index("I go on")
            await ann.wait_for_marks(*["delivered"] * 4)
            await bob.wait_for_marks(*["delivered"] * 3)


@pytest.mark.rule("CH-7")
@pytest.mark.rule("CH-12")
async def test_bad_network_neither_loses_nor_duplicates_messages(tmp_path: Path, chromium: Chromium) -> None:
    async with serving(tmp_path) as served, two_windows(chromium, served.url) as (ann, bob):
        await open_both(ann, bob)
        for one in (ann, bob):
            await one.network("bad", **FAST_BUT_BAD)
        for number in range(MESSAGES):
            await ann.write(f"ann {number}")
            await bob.write(f"bob {number}")
        lines = await wait_for_both(ann, bob, 2 * MESSAGES)
        for name in ("ann", "bob"):
            mine = [one["text"] for one in lines if one["text"].startswith(name)]
            assert mine == [f"{name} {number}" for number in range(MESSAGES)]
        assert "dropped 0" not in await ann.text_of("#harm")
        assert "The network dropped" in await ann.text_of("#harm")
        # Delivery marks also arrive, although the network drops some of the frames that carry them.
        await ann.wait_for_marks(*["delivered"] * MESSAGES)
        await bob.wait_for_marks(*["delivered"] * MESSAGES)


@pytest.mark.rule("CH-8")
@pytest.mark.rule("CH-9")
async def test_delivery_marks_private_chats_and_invitations_are_shown(tmp_path: Path, chromium: Chromium) -> None:
    async with serving(tmp_path) as served, two_windows(chromium, served.url) as (ann, bob):
        # A welcome bot greets the first user.
        await ann.open_and_wait("ann")
        await ann.until("document.querySelectorAll('#messages > li').length", 2)
        assert "Welcome" in await ann.text_of("#messages .content")
        await ann.write("is anybody here?")
        await ann.wait_for_marks("sent")

        # Only invited users may read a private chat.
        await ann.tab.run("document.getElementById('new-chat').focus()")
        await ann.type("tea/cake")
        await ann.press("Enter")
        await ann.until("document.getElementById('notice').textContent.includes('chat_id')")
        await ann.until("document.getElementById('new-chat').value", "")
        await ann.type("tea & <b>cake")
        await ann.press("Enter")
        await ann.until("document.getElementById('title').textContent", "tea & <b>cake")
        await ann.until("document.getElementById('manage').hidden", False)
        await ann.write("milk?")
        await bob.open_page("bob", "tea & <b>cake")
        await bob.until("document.getElementById('notice').textContent.includes('not a member')")
        await bob.until("document.getElementById('empty').textContent.includes('not a member')")
        assert await bob.lines() == []
        await ann.click("#manage summary")
        await ann.until("document.getElementById('invite').hidden", False)
        await ann.tab.run("document.getElementById('guest').focus()")
        await ann.type("bob")
        await ann.press("Enter")
        await bob.wait_for_texts("milk?")
        await ann.wait_for_marks("delivered")
        await bob.write("yes")
        await ann.wait_for_texts("milk?", "yes")
        await bob.wait_for_marks("delivered")

        # A message written with the network off is pending. Both windows have it afterwards.
        await bob.network("off")
        await bob.wait_for_state("switched off")
        await bob.write("and sugar")
        await bob.wait_for_marks("delivered", "pending")
        await ann.write("no sugar left")
        await ann.wait_for_marks("delivered", "sent")
        await bob.network("good")
        await wait_for_both(ann, bob, 4)

        # Messages in other chats are counted as unread.
        await bob.click("[data-chat=lobby] button")
        await bob.wait_for_texts("is anybody here?")
        await ann.write("one", "two")
        await bob.until("document.querySelector('#chat-list li:not([data-chat=lobby]) .unread').textContent", "2")
        await ann.click("[data-chat=lobby] button")
        await ann.wait_for_marks("delivered")

        # A user who leaves a chat no longer sees it.
        await bob.click("#chat-list li:not([data-chat=lobby]) button")
        await bob.click("#leave")
        await bob.until("document.querySelectorAll('#chat-list li').length", 1)


@pytest.mark.rule("CH-10")
async def test_messages_are_shown_as_text_and_scripts_are_blocked(tmp_path: Path, chromium: Chromium) -> None:
    nasty = [
        "<script>document.title = 'taken'</script>",
        "<img src=x onerror=\"document.title = 'taken'\">",
        "</p><h1>big</h1> &amp; <a href='javascript:alert(1)'>here</a>",
        "\u202eturned around\nand a second line",
    ]
    async with serving(tmp_path) as served, two_windows(chromium, served.url) as (ann, bob):
        await open_both(ann, bob)
        for text in nasty:
            await ann.write(text)
        await bob.wait_for_texts(*nasty)
        await ann.wait_for_texts(*nasty)
        for one in (ann, bob):
            assert await one.tab.run("document.querySelectorAll('#messages :is(script, img, h1, a)').length") == 0
            assert "taken" not in await one.tab.run("document.title")
        # Even if the page assigned text to innerHTML, the content security policy would reject the assignment.
        script = "try { document.body.innerHTML = '<p>'; 'was taken' } catch (error) { error.name }"
        assert await bob.tab.run(script) == "TypeError"
        loaded = "performance.getEntriesByType('resource').map((one) => new URL(one.name).origin)"
        assert set(await bob.tab.run(loaded)) == {served.url}


async def tab_to(one: Window, selector: str, backwards: bool = False) -> None:
    """Press Tab until the element has the focus. Check that every stop on the way has a name and is visible."""
    for _ in range(40):
        if await one.tab.run(f"document.activeElement?.matches({json.dumps(selector)}) ?? false"):
            return
        await one.press("Tab", SHIFT if backwards else 0)
        stop = await one.tab.run(FOCUSED)
        assert stop["name"], stop
        assert stop["isVisible"], stop
    raise AssertionError(f"Tab does not reach {selector}")


FOCUSED: Final = """
(() => {
  const here = document.activeElement;
  const name = here.getAttribute("aria-label") || here.labels?.[0]?.textContent || here.textContent ||
    document.getElementById(here.getAttribute("aria-labelledby"))?.textContent || "";
  const { width, height } = here.getBoundingClientRect();
  const isVisible = (width > 0 && height > 0) || here === document.body;
  return { tag: here.tagName, id: here.id, name: name.trim(), isVisible };
})()
"""


async def test_page_is_usable_by_keyboard_and_screen_reader(tmp_path: Path, chromium: Chromium) -> None:
    async with serving(tmp_path) as served, two_windows(chromium, served.url) as (ann, bob):
        # The name field has the focus.
        await ann.tab.open(f"{served.url}/chat", 1200, 800)
        await ann.until("document.activeElement.id", "name")
        await ann.type("ann")
        await ann.press("Enter")
        await ann.until("document.getElementById('me')?.textContent", "ann")
        await ann.until(READY)
        await ann.until("document.activeElement.id", "text")
        await bob.open_and_wait("bob")
        await ann.type("first line")
        await ann.tab.call("Input.dispatchKeyEvent", type="keyDown", key="Enter", text="\r", modifiers=SHIFT)
        await ann.type("second line")
        await ann.press("Enter")
        await bob.wait_for_texts("first line\nsecond line")
        await bob.until("document.getElementById('announcer').textContent", "ann: first line\nsecond line")

        # The message list is one tab stop, and the arrow keys move between messages.
        await tab_to(ann, "#messages .number", backwards=True)
        assert await ann.tab.run("document.activeElement.closest('li').dataset.mark") != ""
        await ann.press("ArrowUp")
        assert await ann.tab.run("document.activeElement.textContent") == "#2"
        await ann.press("Enter")
        assert await ann.tab.run("document.activeElement.getAttribute('aria-expanded')") == "true"
        assert "message_id" in await ann.text_of("#messages li:nth-child(2) .details")
        await ann.press("End")
        await ann.press("Tab")
        assert await ann.tab.run("document.activeElement.id") == "text"

        # Use the network switch with the arrow keys, then create a chat and invite a user.
        await tab_to(ann, "#network input")
        await ann.press("ArrowRight")
        await ann.wait_for_state("bad network")
        await ann.press("ArrowRight")
        await ann.wait_for_state("switched off")
        await ann.press("ArrowRight")
        await ann.wait_for_state("live")
        await tab_to(ann, "#frames")
        await tab_to(ann, "#panel-close", backwards=True)
        await ann.press("Enter")
        await ann.until("document.activeElement.id", "panel-toggle")
        await tab_to(ann, "#new-chat")
        await ann.type("tea")
        await ann.press("Enter")
        await ann.until("document.getElementById('title').textContent", "tea")
        await ann.until("document.getElementById('manage').hidden", False)
        await tab_to(ann, "#manage summary")
        await ann.press("Enter")
        await ann.until("document.getElementById('invite').hidden", False)
        await tab_to(ann, "#guest")
        await ann.type("bob")
        await ann.press("Enter")
        await bob.until("document.querySelector('[data-chat=tea]') !== null")


COLOURS: Final = "getComputedStyle(document.body).backgroundColor"
WIDE: Final = """
[...document.querySelectorAll("body *")]
  .filter((one) => one.checkVisibility() && !one.closest("#chat-list"))
  .filter((one) => one.getBoundingClientRect().right > innerWidth + 0.5)
  .map((one) => `${one.tagName} ${one.id} ${one.className} in ${one.parentElement.id} ${one.parentElement.className}`)
"""
CHATS: Final = ("tea", "cake-on-monday", "z")
CUT_NAMES: Final = """
[...document.querySelectorAll(".chat-name")]
  .filter((one) => one.clientWidth < 1 || one.scrollWidth > one.clientWidth)
  .map((one) => `${one.textContent} has ${one.clientWidth} of ${one.scrollWidth}`)
"""


async def test_page_fits_a_phone_and_has_light_and_dark_themes(tmp_path: Path, chromium: Chromium) -> None:
    long_word = "w" * 300
    async with serving(tmp_path) as served, window(chromium, served.url) as ann:
        await ann.open_and_wait("ann-with-a-name-that-is-rather-long-for-a-phone", None, *PHONE)
        await ann.write(long_word, "short")
        await ann.wait_for_marks("sent", "sent")
        await ann.click("#messages li:last-child .number")
        for is_panel_open in (False, True):
            assert await ann.tab.run("document.getElementById('panel').hidden") is not is_panel_open
            assert await ann.tab.run("document.documentElement.scrollWidth") == PHONE[0]
            assert await ann.tab.run(WIDE) == []
            await ann.click("#panel-toggle")

        for chat in CHATS:
            await ann.tab.run(f"document.getElementById('new-chat').value = {json.dumps(chat)}")
            await ann.click("#create button")
            await ann.until("document.querySelector('#chat-list [aria-current] .chat-name').textContent", chat)
        assert await ann.tab.run(CUT_NAMES) == []
        assert await ann.tab.run("document.documentElement.scrollWidth") == PHONE[0]
        assert await ann.tab.run(WIDE) == []

        light = await ann.tab.run(COLOURS)
        dark_system = [{"name": "prefers-color-scheme", "value": "dark"}]
        await ann.tab.call("Emulation.setEmulatedMedia", features=dark_system)
        dark = await ann.tab.run(COLOURS)
        assert dark != light
        await ann.click("#theme")  # light, regardless of the system theme
        assert await ann.tab.run(COLOURS) == light
        await ann.click("#theme")
        assert await ann.tab.run(COLOURS) == dark
        await ann.tab.call("Emulation.setEmulatedMedia", features=[])
        assert await ann.tab.run(COLOURS) == dark
        await ann.open_page("ann", None, *PHONE)  # the choice is stored
        assert await ann.tab.run(COLOURS) == dark
        await ann.click("#theme")
        assert await ann.tab.run(COLOURS) == light


def delete_log(directory: Path) -> None:
    """Delete the server's log."""
    for file in directory.glob("log.db*"):
        file.unlink()


async def test_pending_messages_go_to_the_lobby_of_a_new_log(tmp_path: Path, chromium: Chromium) -> None:
    with chat_server(tmp_path) as served:
        async with window(chromium, served.url) as ann:
            await ann.open_and_wait("ann")
            await ann.write("in the old log")
            await ann.wait_for_marks("sent")
            served.kill()
            await ann.wait_for_state("offline")
            await ann.write("waits")
            await asyncio.to_thread(delete_log, tmp_path)
            served.start()
            (line,) = await ann.wait_for_lines(lambda lines: [one["mark"] for one in lines] == ["sent"])
            assert (line["text"], line["sequence"]) in (("waits", 1), ("waits", 2), ("waits", 3))


def test_readme_picture_can_be_regenerated(tmp_path: Path) -> None:
    command = [sys.executable, str(Path(__file__).parent / "picture.py"), str(tmp_path / "chat.png")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=WAIT_S, cwd=tmp_path)  # noqa: S603
    assert done.returncode == 0, done.stderr
    for picture in (tmp_path / "chat.png", PICTURE):
        data = picture.read_bytes()
        assert data.startswith(b"\x89PNG")
        assert 50_000 < len(data) < PICTURE_BYTES_MAX
