"""Make the README's picture: python tests/server/web_chat/picture.py docs/images/chat.png

It shows two windows connected to one server, one light and one dark. Bob is on a bad network and has two pending
messages.
"""

import asyncio
import base64
import sys
import tempfile
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "examples/todo")]  # as in the pytest configuration

from cli.server_process import ServerProcess  # noqa: E402
from server.web_chat.chromium import Chromium, running_chromium  # noqa: E402
from server.web_chat.windows import Window, chat_server, two_windows  # noqa: E402

WINDOW: Final = (940, 700)
SCALE: Final = 1.5
PICTURE: Final = (1480, 577)
BEFORE: Final = ((0, "I am going to kill the server now"), (1, "Go ahead"))
AWAY: Final = "Written while the server was away"
AFTER: Final = (
    (0, "It is back, and so is your message"),
    (1, "Now with a bad network on my side"),
    (0, "Everything arrives once, though"),
    (1, "And in the same order for both of us"),
)
WAITING: Final = ("Now it drops every frame", "So this waits")
DARK: Final = [{"name": "prefers-color-scheme", "value": "dark"}]


async def open_with_panel(one: Window, name: str) -> None:
    """Open the page with its panel, at the size of the picture."""
    await one.open_and_wait(name, None, *WINDOW)
    await one.tab.run("document.getElementById('panel').hidden && document.getElementById('panel-toggle').click()")


async def take_pictures(chromium: Chromium, served: ServerProcess) -> list[bytes]:
    """Play a short conversation and take a screenshot of both windows."""
    async with two_windows(chromium, served.url) as (ann, bob):
        both = (ann, bob)
        await bob.tab.call("Emulation.setEmulatedMedia", features=DARK)
        for one, name in ((ann, "ann"), (bob, "bob")):
            await open_with_panel(one, name)
        await _converse(both, BEFORE, 0)
        served.kill()
        await bob.wait_for_state("offline")
        await bob.write(AWAY)
        served.start()
        await _until_delivered(both, len(BEFORE) + 1)
        await _converse(both, AFTER[:2], len(BEFORE) + 1)
        await bob.network("bad", delayMs=80)
        await _converse(both, AFTER[2:], len(BEFORE) + 3)
        await bob.network("bad", drop=1)
        await bob.write(*WAITING)
        await bob.wait_for_lines(lambda lines: sum(line["mark"] == "pending" for line in lines) == len(WAITING))
        for one in both:
            await one.tab.run("document.activeElement.blur()")
        return [await _shot(one) for one in both]


async def _converse(both: tuple[Window, Window], story: tuple[tuple[int, str], ...], count: int) -> None:
    for number, (writer, text) in enumerate(story, count + 1):
        await both[writer].write(text)
        await _until_delivered(both, number)


async def _until_delivered(both: tuple[Window, Window], count: int) -> None:
    """Wait until both windows show this number of messages, all delivered."""
    for one in both:
        await one.wait_for_lines(
            lambda lines: len(lines) == count and all(line["mark"] in ("", "delivered") for line in lines)
        )


async def _shot(one: Window) -> bytes:
    width, height = WINDOW
    await one.tab.call(
        "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=SCALE, mobile=False
    )
    await one.tab.run("document.getElementById('scroll').scrollTop = 1e9")
    return await one.tab.capture_png()


def combine(images: list[bytes]) -> str:
    """Return a page that shows both pictures."""
    sources = [f"data:image/png;base64,{base64.b64encode(data).decode()}" for data in images]
    return f"""<!doctype html><meta charset="utf-8"><style>
      body {{ margin: 0; padding: 28px; display: flex; gap: 24px; background: #dfe2ec; }}
      img {{ display: block; width: 700px; border-radius: 10px; box-shadow: 0 6px 24px rgb(20 24 40 / 22%); }}</style>
      <img src="{sources[0]}"><img src="{sources[1]}">"""


async def make_picture(chromium: Chromium, directory: Path) -> bytes:
    """Return the picture as PNG."""
    with chat_server(directory) as served:
        page = directory / "both.html"
        page.write_text(combine(await take_pictures(chromium, served)), encoding="utf-8")
        async with chromium.tab() as tab:
            await tab.open(page.as_uri(), *PICTURE)
            return await tab.capture_png()


if __name__ == "__main__":
    with running_chromium() as running, tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        Path(sys.argv[1]).write_bytes(asyncio.run(make_picture(running, Path(name))))
