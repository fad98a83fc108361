"""The web chat in real Chromium: two visitors, a server that is killed, a bad network, and no mouse."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Final

import pytest

from databases import BOTH_STORES
from web.windows import READY, SHIFT, Line, Window, both_arrive, chat_server, same, two_windows, window

RUN_S: Final = 200
PHONE: Final = (375, 740)
KEPT: Final = "navigator.serviceWorker.ready.then((one) => one.active !== null)"
"""From then on the browser can load the page without the server."""
PICTURE: Final = Path(__file__).parents[2] / "docs/images/chat.png"
PICTURE_BYTES_MAX: Final = 300 * 1024
FAST_BUT_BAD: Final = {"drop": 0.15, "duplicate": 0.25, "reorder": 0.3, "delayMs": 40}


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, RUN_S))


def all_sent(count: int) -> Any:
    return lambda lines: len(lines) == count and all(one["sequence"] is not None for one in lines)


async def both_have(ann: Window, bob: Window, count: int) -> list[Line]:
    """Both show so many messages, the same, in the same order, and their panels say so too."""
    lines = await ann.shows(all_sent(count))
    same(lines, await bob.shows(all_sent(count)))
    order = await ann.text_of("#audit [data-kind=order]")
    await bob.until("document.querySelector('#audit [data-kind=order]').textContent", order)
    for one in (ann, bob):
        assert await one.tab.run("document.querySelectorAll('#audit [data-kind=bad]').length") == 0
    return lines


@BOTH_STORES
@pytest.mark.rule("CH-12")
@pytest.mark.rule("CH-14")
def test_two_browsers_chat_through_a_server_that_is_killed(tmp_path: Path) -> None:
    async def main() -> None:
        with chat_server(tmp_path) as served:
            async with two_windows(tmp_path, served.url) as (ann, bob):
                await both_arrive(ann, bob)
                await ann.write("hello")
                await bob.shows_texts("hello")
                await bob.write("hello yourself")
                await ann.shows_texts("hello", "hello yourself")
                await ann.shows_marks("delivered")

                await ann.tab.run(KEPT)
                served.kill()
                await ann.says("offline")
                await ann.write("are you there?", "bob?")
                await bob.write("the server is away", "I go on")
                await ann.shows_marks("delivered", "pending", "pending")
                # Loaded again, from what the browser has kept of the page, and what waits is there.
                await ann.come("ann")
                await ann.shows_texts("hello", "hello yourself", "are you there?", "bob?")
                await ann.shows_marks("delivered", "pending", "pending")
                assert "2 waiting" in await ann.text_of("#waiting")
                await ann.write("after a reload")

                served.start()
                lines = await both_have(ann, bob, 7)
                texts = [one["text"] for one in lines]
                assert [text for text in texts if text in ("are you there?", "bob?", "after a reload")] == [
                    "are you there?",
                    "bob?",
                    "after a reload",
                ]
                assert texts.index("the server is away") < texts.index("I go on")
                await ann.shows_marks(*["delivered"] * 4)
                await bob.shows_marks(*["delivered"] * 3)

    run(main())


@pytest.mark.rule("CH-7")
@pytest.mark.rule("CH-12")
def test_on_a_bad_network_nothing_is_lost_and_nothing_comes_twice(tmp_path: Path) -> None:
    async def main() -> None:
        with chat_server(tmp_path) as served:
            async with two_windows(tmp_path, served.url) as (ann, bob):
                await both_arrive(ann, bob)
                for one in (ann, bob):
                    await one.network("bad", **FAST_BUT_BAD)
                for number in range(30):
                    await ann.write(f"ann {number}")
                    await bob.write(f"bob {number}")
                lines = await both_have(ann, bob, 60)
                for name in ("ann", "bob"):
                    mine = [one["text"] for one in lines if one["text"].startswith(name)]
                    assert mine == [f"{name} {number}" for number in range(30)]
                assert "dropped 0" not in await ann.text_of("#harm")
                assert "The network dropped" in await ann.text_of("#harm")
                # Marks come through as well, though frames that bring them are dropped too.
                await ann.shows_marks(*["delivered"] * 30)
                await bob.shows_marks(*["delivered"] * 30)

    run(main())


@pytest.mark.rule("CH-8")
@pytest.mark.rule("CH-9")
def test_marks_chats_and_invitations(tmp_path: Path) -> None:
    async def main() -> None:
        with chat_server(tmp_path) as served:
            async with two_windows(tmp_path, served.url) as (ann, bob):
                # Somebody greets whoever is first, and there is nobody else.
                await ann.arrive("ann")
                await ann.until("document.querySelectorAll('#messages > li').length", 2)
                assert "Welcome" in await ann.text_of("#messages .content")
                await ann.write("is anybody here?")
                await ann.shows_marks("sent")

                # A chat of one's own: nobody comes in who is not let in.
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
                await bob.come("bob", "tea & <b>cake")
                await bob.until("document.getElementById('notice').textContent.includes('not a member')")
                await bob.until("document.getElementById('empty').textContent.includes('not a member')")
                assert await bob.lines() == []
                await ann.click("#manage summary")
                await ann.tab.run("document.getElementById('guest').focus()")
                await ann.type("bob")
                await ann.press("Enter")
                await bob.shows_texts("milk?")
                await ann.shows_marks("delivered")
                await bob.write("yes")
                await ann.shows_texts("milk?", "yes")
                await bob.shows_marks("delivered")

                # The network off: it waits, and is there in both after.
                await bob.network("off")
                await bob.says("switched off")
                await bob.write("and sugar")
                await bob.shows_marks("delivered", "pending")
                await ann.write("no sugar left")
                await ann.shows_marks("delivered", "sent")
                await bob.network("good")
                await both_have(ann, bob, 4)

                # What is said elsewhere is counted.
                await bob.click("[data-chat=lobby] button")
                await bob.shows_texts("is anybody here?")
                await ann.write("one", "two")
                await bob.until(
                    "document.querySelector('#chat-list li:not([data-chat=lobby]) .unread').textContent", "2"
                )
                await ann.click("[data-chat=lobby] button")
                await ann.shows_marks("delivered")

                # Who leaves has it no more.
                await bob.click("#chat-list li:not([data-chat=lobby]) button")
                await bob.click("#leave")
                await bob.until("document.querySelectorAll('#chat-list li').length", 1)

    run(main())


@pytest.mark.rule("CH-10")
def test_text_is_text_and_nothing_else_may_run(tmp_path: Path) -> None:
    nasty = [
        "<script>document.title = 'taken'</script>",
        "<img src=x onerror=\"document.title = 'taken'\">",
        "</p><h1>big</h1> &amp; <a href='javascript:alert(1)'>here</a>",
        "\u202eturned around\nand a second line",
    ]

    async def main() -> None:
        with chat_server(tmp_path) as served:
            async with two_windows(tmp_path, served.url) as (ann, bob):
                await both_arrive(ann, bob)
                for text in nasty:
                    await ann.write(text)
                await bob.shows_texts(*nasty)
                await ann.shows_texts(*nasty)
                for one in (ann, bob):
                    assert (
                        await one.tab.run("document.querySelectorAll('#messages :is(script, img, h1, a)').length") == 0
                    )
                    assert "taken" not in await one.tab.run("document.title")
                # And where a mistake of ours would let it in, the browser does not.
                script = "try { document.body.innerHTML = '<p>'; 'was taken' } catch (error) { error.name }"
                assert await bob.tab.run(script) == "TypeError"
                loaded = "performance.getEntriesByType('resource').map((one) => new URL(one.name).origin)"
                assert set(await bob.tab.run(loaded)) == {served.url}

    run(main())


async def tab_to(one: Window, selector: str, backwards: bool = False) -> None:
    """Presses Tab until the focus is there. Every stop on the way has a name and can be seen."""
    for _ in range(40):
        if await one.tab.run(f"document.activeElement?.matches({json.dumps(selector)}) ?? false"):
            return
        await one.press("Tab", SHIFT if backwards else 0)
        stop = await one.tab.run(FOCUSED)
        assert stop["name"], stop
        assert stop["isVisible"], stop
    raise AssertionError(f"Tab does not come to {selector}")


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


def test_it_can_be_used_by_keyboard_alone_and_is_read_out(tmp_path: Path) -> None:
    async def main() -> None:
        with chat_server(tmp_path) as served:
            async with two_windows(tmp_path, served.url) as (ann, bob):
                # The name is there already: Enter comes in.
                await ann.tab.open(f"{served.url}/chat", 1200, 800)
                await ann.until("document.activeElement.id", "name")
                await ann.type("ann")
                await ann.press("Enter")
                await ann.until("document.getElementById('me')?.textContent", "ann")
                await ann.until(READY)
                await ann.until("document.activeElement.id", "text")
                await bob.arrive("bob")
                await ann.type("first line")
                await ann.tab.call("Input.dispatchKeyEvent", type="keyDown", key="Enter", text="\r", modifiers=SHIFT)
                await ann.type("second line")
                await ann.press("Enter")
                await bob.shows_texts("first line\nsecond line")
                await bob.until("document.getElementById('announcer').textContent", "ann: first line\nsecond line")

                # Among messages there is one stop, and arrows go from one to the next.
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

                # The switch of the network, by arrows; then the invitation and a new chat.
                await tab_to(ann, "#network input")
                await ann.press("ArrowRight")
                await ann.says("bad network")
                await ann.press("ArrowRight")
                await ann.says("switched off")
                await ann.press("ArrowRight")
                await ann.says("live")
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
                await tab_to(ann, "#guest")
                await ann.type("bob")
                await ann.press("Enter")
                await bob.until("document.querySelector('[data-chat=tea]') !== null")

    run(main())


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


def test_it_fits_a_phone_and_has_light_and_dark(tmp_path: Path) -> None:
    long_word = "w" * 300

    async def main() -> None:
        with chat_server(tmp_path) as served:
            async with window(tmp_path, served.url, "ann") as ann:
                await ann.arrive("ann-with-a-name-that-is-rather-long-for-a-phone", None, *PHONE)
                await ann.write(long_word, "short")
                await ann.shows_marks("sent", "sent")
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
                await ann.click("#theme")  # light, whatever the system has
                assert await ann.tab.run(COLOURS) == light
                await ann.click("#theme")
                assert await ann.tab.run(COLOURS) == dark
                await ann.tab.call("Emulation.setEmulatedMedia", features=[])
                assert await ann.tab.run(COLOURS) == dark
                await ann.come("ann", None, *PHONE)  # and it stays so
                assert await ann.tab.run(COLOURS) == dark
                await ann.click("#theme")
                assert await ann.tab.run(COLOURS) == light

    run(main())


def forget(directory: Path) -> None:
    """The server's log."""
    for file in directory.glob("log.db*"):
        file.unlink()


def test_another_log_has_another_lobby_and_what_waits_goes_there(tmp_path: Path) -> None:
    async def main() -> None:
        with chat_server(tmp_path) as served:
            async with window(tmp_path, served.url, "ann") as ann:
                await ann.arrive("ann")
                await ann.write("in the old log")
                await ann.shows_marks("sent")
                served.kill()
                await ann.says("offline")
                await ann.write("waits")
                await asyncio.to_thread(forget, tmp_path)
                served.start()
                (line,) = await ann.shows(lambda lines: [one["mark"] for one in lines] == ["sent"])
                assert (line["text"], line["sequence"]) in (("waits", 1), ("waits", 2), ("waits", 3))

    run(main())


def test_the_picture_in_the_readme_can_be_made_anew(tmp_path: Path) -> None:
    command = [sys.executable, str(Path(__file__).parent / "picture.py"), str(tmp_path / "chat.png")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=RUN_S, cwd=tmp_path)  # noqa: S603
    assert done.returncode == 0, done.stderr
    for picture in (tmp_path / "chat.png", PICTURE):
        data = picture.read_bytes()
        assert data.startswith(b"\x89PNG")
        assert 50_000 < len(data) < PICTURE_BYTES_MAX
