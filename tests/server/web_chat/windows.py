"""The web chat in real Chromium windows, driven the way a user would drive it."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

from browser import Tab
from cli.server_process import ServerProcess, serving
from deadlines import until
from server.web_chat.chromium import Chromium

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
NAVIGATED: Final = "Inspected target navigated"
"""Chromium's error for a script that is running while the page reloads."""
KEYS: Final = {"Enter": "\r", " ": " "}
SHIFT: Final = 8
WELCOME_BOT: Final = "doorkeeper"
GREETINGS: Final = 2
"""Number of messages that the welcome bot sends to a new lobby."""

Line = dict[str, Any]


class Window:
    """A user's window."""

    def __init__(self, tab: Tab, url: str) -> None:
        self.tab = tab
        self.url = url

    async def open_page(self, name: str, chat: str | None = None, width: int = 1200, height: int = 800) -> None:
        """Open the page, even if no server is running."""
        asked = {"name": name} if chat is None else {"name": name, "chat": chat}
        await self.tab.open(f"{self.url}/chat?{urlencode(asked)}", width, height)
        await self.until("document.getElementById('app').hidden === false")

    async def open_and_wait(self, name: str, chat: str | None = None, width: int = 1200, height: int = 800) -> None:
        """Open the page and wait until its chat has caught up."""
        await self.open_page(name, chat, width, height)
        await self.until(READY)

    # --- reading

    async def until(self, script: str, wanted: Any = True) -> None:
        """Wait until the expression has this value in the page."""
        seen = [None]

        async def is_so() -> bool:
            try:
                seen[0] = await self.tab.run(script)
            except RuntimeError as error:
                if NAVIGATED not in str(error):
                    raise
                return False  # the page is loading
            return bool(seen[0] == wanted)

        await until(is_so, lambda: (script, wanted, seen[0]))

    async def lines(self) -> list[Line]:
        """Return the lines of the open chat, without the greetings of the welcome bot."""
        found: list[Line] = await self.tab.run(READ)
        return [one for one in found if one["sender"] != WELCOME_BOT]

    async def wait_for_lines(self, condition: Callable[[list[Line]], bool]) -> list[Line]:
        """Wait until the lines satisfy the condition."""
        seen: list[Line] = []

        async def is_so() -> bool:
            seen[:] = await self.lines()
            return condition(seen)

        await until(is_so, lambda: seen)
        return seen

    async def wait_for_texts(self, *texts: str) -> list[Line]:
        """Wait until the lines have these texts, in this order."""
        return await self.wait_for_lines(lambda lines: [one["text"] for one in lines] == list(texts))

    async def wait_for_marks(self, *marks: str) -> list[Line]:
        """Wait until the user's own messages have these marks, oldest first."""
        return await self.wait_for_lines(lambda lines: [one["mark"] for one in lines if one["mark"]] == list(marks))

    async def wait_for_state(self, word: str) -> None:
        """Wait until the connection state contains the word."""
        await self.until(f"document.getElementById('state').textContent.includes({json.dumps(word)})")

    async def text_of(self, selector: str) -> str:
        return str(await self.tab.run(f"document.querySelector({json.dumps(selector)}).textContent"))

    # --- actions

    async def type(self, text: str) -> None:
        """Type text into the focused element."""
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
        """Set the network switch to good, bad or off, and the sliders to these rates."""
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


def chat_server(directory: Path) -> AbstractContextManager[ServerProcess]:
    """Run a server that can be killed and restarted."""
    return serving(directory)


@asynccontextmanager
async def window(chromium: Chromium, url: str) -> AsyncIterator[Window]:
    """Open a window with separate storage; no page is open yet."""
    async with chromium.tab() as tab:
        yield Window(tab, url)


@asynccontextmanager
async def two_windows(chromium: Chromium, url: str) -> AsyncIterator[tuple[Window, Window]]:
    """Open windows for Ann and Bob, with separate storage."""
    async with window(chromium, url) as ann, window(chromium, url) as bob:
        yield ann, bob


async def open_both(ann: Window, bob: Window) -> None:
    """Open both pages in an empty lobby and wait for the greetings, so that they do not mix with later messages."""
    await asyncio.gather(ann.open_and_wait("ann"), bob.open_and_wait("bob"))
    await asyncio.gather(
        *(one.until(f"{READ}.filter((one) => one.sender === '{WELCOME_BOT}').length", GREETINGS) for one in (ann, bob))
    )


def check_same_messages(*windows: list[Line]) -> None:
    """Check that all windows show the same messages once, in the same order, with gapless sequences."""
    first = [(one["sequence"], one["id"], one["text"]) for one in windows[0]]
    for lines in windows:
        assert [(one["sequence"], one["id"], one["text"]) for one in lines] == first
    sequences = [sequence for sequence, _, _ in first]
    assert sequences == list(range(sequences[0], sequences[0] + len(sequences)))
    assert len({id_ for _, id_, _ in first}) == len(first)
