"""Windows of the web chat in real Chromium, as their visitors see and use them."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

from browser import Tab, browser
from cli.served import Served, serving
from insieme.clients import component

WAIT_S: Final = 60
"""Nothing takes that long, on a machine that does other things too. It is here so that what hangs ends as a failure."""
READ: Final = """
[...document.querySelectorAll("#messages > li")].map((li) => ({
  id: li.dataset.id,
  sequence: li.dataset.sequence === "" ? null : Number(li.dataset.sequence),
  mark: li.dataset.mark,
  sender: li.querySelector(".sender")?.textContent ?? "You",
  text: li.querySelector(".content").textContent,
}))
"""
READY: Final = """
document.getElementById("state").dataset.state === "live" && !document.getElementById("manage").hidden
"""
KEYS: Final = {"Enter": "\r", " ": " "}
SHIFT: Final = 8
KEEPER: Final = "doorkeeper"

Line = dict[str, Any]


class Window:
    """One window of one visitor."""

    def __init__(self, tab: Tab, url: str) -> None:
        self.tab = tab
        self.url = url

    async def come(self, name: str, chat: str | None = None, width: int = 1200, height: int = 800) -> None:
        """Opens the page, whether there is a server or not."""
        asked = {"name": name} if chat is None else {"name": name, "chat": chat}
        await self.tab.open(f"{self.url}/chat?{urlencode(asked)}", width, height)
        await self.until("document.getElementById('app').hidden === false")

    async def arrive(self, name: str, chat: str | None = None, width: int = 1200, height: int = 800) -> None:
        """Opens the page, and returns when its chat has caught up."""
        await self.come(name, chat, width, height)
        await self.until(READY)

    # --- what is seen

    async def until(self, script: str, wanted: Any = True) -> None:
        """Returns when an expression comes to that in the page."""
        seen = [None]

        async def is_so() -> bool:
            seen[0] = await self.tab.run(script)
            return bool(seen[0] == wanted)

        await until(is_so, lambda: (script, wanted, seen[0]))

    async def lines(self) -> list[Line]:
        """The open chat, without what its keeper said."""
        found: list[Line] = await self.tab.run(READ)
        return [one for one in found if one["sender"] != KEEPER]

    async def shows(self, condition: Callable[[list[Line]], bool]) -> list[Line]:
        """Returns when the lines are so."""
        seen: list[Line] = []

        async def is_so() -> bool:
            seen[:] = await self.lines()
            return condition(seen)

        await until(is_so, lambda: seen)
        return seen

    async def shows_texts(self, *texts: str) -> list[Line]:
        """Returns when the lines are these, in this order, whatever their marks."""
        return await self.shows(lambda lines: [one["text"] for one in lines] == list(texts))

    async def shows_marks(self, *marks: str) -> list[Line]:
        """The marks of one's own messages, oldest first."""
        return await self.shows(lambda lines: [one["mark"] for one in lines if one["mark"]] == list(marks))

    async def says(self, word: str) -> None:
        """Returns when the state in the bar has that word."""
        await self.until(f"document.getElementById('state').textContent.includes({json.dumps(word)})")

    async def text_of(self, selector: str) -> str:
        return str(await self.tab.run(f"document.querySelector({json.dumps(selector)}).textContent"))

    # --- what is done

    async def type(self, text: str) -> None:
        """Where the focus is."""
        await self.tab.call("Input.insertText", text=text)

    async def press(self, key: str, modifiers: int = 0) -> None:
        text = {"text": KEYS[key]} if key in KEYS else {}
        code = {"code": "Space" if key == " " else key, "windowsVirtualKeyCode": _CODES[key]}
        named = {"key": key, "modifiers": modifiers, **code}
        await self.tab.call("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", **named, **text)
        await self.tab.call("Input.dispatchKeyEvent", type="keyUp", **named)

    async def write(self, *texts: str) -> None:
        for text in texts:
            await self.tab.run("document.getElementById('text').focus()")
            await self.type(text)
            await self.press("Enter")

    async def click(self, selector: str) -> None:
        await self.tab.run(f"document.querySelector({json.dumps(selector)}).click()")

    async def network(self, mode: str, **rates: float) -> None:
        """The switch: good, bad or off; rates as the sliders have them."""
        await self.click(f"#network [value={mode}]")
        for name, value in rates.items():
            slider = f"document.querySelector('#rates [name={name}]')"
            await self.tab.run(
                f"{slider}.value = {value}; {slider}.dispatchEvent(new Event('input', {{bubbles: true}}))"
            )


_CODES: Final = {
    "Enter": 13,
    " ": 32,
    "Tab": 9,
    "Escape": 27,
    "End": 35,
    "Home": 36,
    "ArrowUp": 38,
    "ArrowRight": 39,
    "ArrowDown": 40,
}


async def until(condition: Callable[[], Any], what: Callable[[], object]) -> None:
    """Looks again and again, and says what there was instead if it does not come."""
    try:
        async with asyncio.timeout(WAIT_S):
            while not await condition():  # noqa: ASYNC110 - it is in another process
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(what()) from None


def chat_server(directory: Path) -> AbstractContextManager[Served]:
    """A server that can be killed and started again. Without gRPC, whose port nobody holds meanwhile."""
    return serving(directory, "--development", "--quiet", "--set", "grpc=false")


@asynccontextmanager
async def window(directory: Path, url: str, name: str) -> AsyncIterator[Window]:
    """A browser of its own, with what an earlier one of that name has kept; no page is open yet."""
    component("chromium", "chromium")
    profile = directory / f"{name}-profile"
    profile.mkdir(exist_ok=True)
    async with browser(profile) as tab:
        yield Window(tab, url)


@asynccontextmanager
async def two_windows(directory: Path, url: str) -> AsyncIterator[tuple[Window, Window]]:
    """Two browsers, Ann's and Bob's, which start at the same time."""
    async with AsyncExitStack() as stack:
        started = [stack.enter_async_context(window(directory, url, name)) for name in ("ann", "bob")]
        ann, bob = await asyncio.gather(*started)
        yield ann, bob


async def both_arrive(ann: Window, bob: Window) -> None:
    await asyncio.gather(ann.arrive("ann"), bob.arrive("bob"))


def same(*windows: list[Line]) -> None:
    """All show the same messages in the same order, each once, with numbers that have no gap."""
    first = [(one["sequence"], one["id"], one["text"]) for one in windows[0]]
    for lines in windows:
        assert [(one["sequence"], one["id"], one["text"]) for one in lines] == first
    sequences = [sequence for sequence, _, _ in first]
    assert sequences == list(range(sequences[0], sequences[0] + len(sequences)))
    assert len({id_ for _, id_, _ in first}) == len(first)
