"""Terminals of examples/todo without a terminal: what is on their screens, and keys that are pressed."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from textual.pilot import Pilot
from textual.widgets import OptionList, Static

import model
from oncelog.client import ClientLimits
from terminal import TodoApp, terminal

WAIT_S: Final = 60
"""Nothing takes that long, on a machine that does other things too. It is here so that what hangs ends as a failure."""
LIMITS: Final = ClientLimits(pause_ms_min=10, pause_ms_max=50)

Line = tuple[str, bool, bool]
"""Text, whether it is done, whether it waits."""


async def until(condition: Callable[[], bool | Awaitable[bool]], what: Callable[[], object]) -> None:
    """Looks again and again, and says what there was instead if it does not come."""
    try:
        async with asyncio.timeout(WAIT_S):
            while True:
                found = condition()
                if found is True or (not isinstance(found, bool) and await found):
                    return
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(what()) from None


class Screen:
    """A terminal, as its user sees it."""

    def __init__(self, app: TodoApp, pilot: Pilot[None]) -> None:
        self.app = app
        self.pilot = pilot

    @property
    def lines(self) -> list[Line]:
        """Of the list."""
        return [(item.text, item.is_done, item.is_pending) for item in self.app.items]

    @property
    def ids(self) -> list[str]:
        return [item.id for item in self.app.items]

    @property
    def drawn(self) -> list[str]:
        """What the list has on the screen, rejected ones too."""
        return [str(option.prompt) for option in self.app.query_one("#items", OptionList).options]

    @property
    def status(self) -> str:
        return str(self.app.query_one("#status", Static).content)

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)

    async def add(self, *texts: str) -> None:
        for text in texts:
            await self.press(
                "a", *("space" if character == " " else character for character in text), "enter", "escape"
            )

    async def choose(self, text: str) -> None:
        """Moves to a line, as one does."""
        await self.shows_text(text)
        await self.press("home", *["down"] * [one for one, _, _ in self.lines].index(text))

    async def toggle(self, text: str) -> None:
        await self.choose(text)
        await self.press("space")

    async def remove(self, text: str) -> None:
        await self.choose(text)
        await self.press("d")

    async def shows_text(self, text: str) -> None:
        await until(lambda: text in [one for one, _, _ in self.lines], lambda: (text, self.lines, self.status))

    async def shows(self, *lines: str) -> None:
        """Returns when the list is this one, all of it committed. `x` before a text says that it is done."""
        wanted = [(line.removeprefix("x "), line.startswith("x "), False) for line in lines]
        await until(lambda: self.lines == wanted, lambda: (wanted, self.lines, self.status))

    async def says(self, word: str) -> None:
        """Returns when the status line has it."""
        await until(lambda: word in self.status, lambda: (word, self.status))


@asynccontextmanager
async def screen(url: str, name: str, directory: Path, **options: Any) -> AsyncIterator[Screen]:
    """A terminal whose file is in the directory; the next one of that name finds it there."""
    options.setdefault("limits", LIMITS)
    async with (
        terminal(url, name, str(directory / f"{name}.db"), **options) as app,
        app.run_test(size=(60, 20)) as pilot,
    ):
        yield Screen(app, pilot)


def places(screens: Iterable[Screen]) -> list[list[tuple[str, int]]]:
    """The order that each has: items and their numbers in the log."""
    return [[(item.id, item.place) for item in model.visible(one.app.items)] for one in screens]
