"""Run terminals of examples/todo without a real terminal: read their screens and press keys."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

from textual.pilot import Pilot
from textual.widgets import OptionList, Static

import model
from deadlines import until
from oncelog.client import ClientLimits
from terminal import TodoApp, open_terminal

SETTLE_ROUNDS: Final = 3
"""A widget that handles a key may request a change from the application. The widgets then handle that change."""
LIMITS: Final = ClientLimits(pause_ms_min=10, pause_ms_max=50)

Line = tuple[str, bool, bool]
"""The text, whether the item is done, and whether it is pending."""


class Screen:
    """A terminal as its user sees and operates it."""

    def __init__(self, app: TodoApp, pilot: Pilot[None]) -> None:
        self.app = app
        self.pilot = pilot

    @property
    def lines(self) -> list[Line]:
        """Return the lines of the list."""
        return [(item.text, item.is_done, item.is_pending) for item in self.app.items]

    @property
    def ids(self) -> list[str]:
        return [item.id for item in self.app.items]

    @property
    def drawn_lines(self) -> list[str]:
        """Return the drawn lines of the list, including rejected items."""
        return [str(option.prompt) for option in self.app.query_one("#items", OptionList).options]

    @property
    def status(self) -> str:
        return str(self.app.query_one("#status", Static).content)

    async def press(self, *keys: str) -> None:
        """Press keys one by one, and wait after each until all widgets have handled it."""
        for key in keys:
            await self.pilot.press(key)
            for _ in range(SETTLE_ROUNDS):
                handled = asyncio.Event()
                self.app.call_later(handled.set)
                await handled.wait()
                await self.pilot.pause(0)

    async def quit(self) -> None:
        """Quit the application. It handles no messages afterwards."""
        await self.pilot.press("q")

    async def add(self, *texts: str) -> None:
        for text in texts:
            await self.press(
                "a", *("space" if character == " " else character for character in text), "enter", "escape"
            )

    async def choose(self, text: str) -> None:
        """Move to a line with the arrow keys."""
        await self.wait_for_text(text)
        await self.press("home", *["down"] * [one for one, _, _ in self.lines].index(text))

    async def toggle(self, text: str) -> None:
        await self.choose(text)
        await self.press("space")

    async def remove(self, text: str) -> None:
        await self.choose(text)
        await self.press("d")

    async def wait_for_text(self, text: str) -> None:
        await until(lambda: text in [one for one, _, _ in self.lines], lambda: (text, self.lines, self.status))

    async def wait_for_lines(self, *lines: Line) -> None:
        """Wait until the list has exactly these lines."""
        await until(lambda: self.lines == list(lines), lambda: (lines, self.lines, self.status))

    async def wait_for_items(self, *lines: str) -> None:
        """Wait until the list has exactly these items, all committed. A leading `x` marks an item as done."""
        wanted = [(line.removeprefix("x "), line.startswith("x "), False) for line in lines]
        await until(lambda: self.lines == wanted, lambda: (wanted, self.lines, self.status))

    async def wait_for_status(self, word: str) -> None:
        """Wait until the status line contains the word."""
        await until(lambda: word in self.status, lambda: (word, self.status))


@asynccontextmanager
async def screen(url: str, name: str, directory: Path, **options: Any) -> AsyncIterator[Screen]:
    """Run a terminal whose file is in the directory. A later terminal with the same name uses the same file."""
    options.setdefault("limits", LIMITS)
    # After each key, Textual waits until the process has been idle for a while. `Screen.press` waits only for messages.
    with patch("textual.app.wait_for_idle", asyncio.sleep):
        async with (
            open_terminal(url, name, str(directory / f"{name}.db"), **options) as app,
            app.run_test(size=(60, 20)) as pilot,
        ):
            yield Screen(app, pilot)


def places(screens: Iterable[Screen]) -> list[list[tuple[str, int]]]:
    """Return the order of the items in each terminal, with their log positions."""
    return [[(item.id, item.place) for item in model.list_visible(one.app.items)] for one in screens]
