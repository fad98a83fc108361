"""Makes the picture in the README from the real thing: python examples/todo/screenshot.py docs/images/todo.png

A server, two terminals and the page in Chromium; one terminal is offline, and has something that waits.
"""

import asyncio
import base64
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from textual.pilot import Pilot

from browser import Tab, browser
from oncelog.server.app import Server
from oncelog.server.settings import ServerSettings
from serve_page import address, page_server
from terminal import TodoApp, terminal

WAIT_S: Final = 60
TERMINAL_SIZE: Final = (48, 18)
PAGE_SIZE: Final = (380, 418)
PICTURE_SIZE: Final = (1546, 480)
ADD: Final = """
document.getElementById("new").value = {text!r};
document.getElementById("add").requestSubmit();
"""
TICK: Final = "document.querySelector('#items li .box').click()"
SHOWN: Final = "[...document.querySelectorAll('#items .text')].map((one) => one.textContent)"


@contextmanager
def pages() -> Iterator[int]:
    """The page's own server."""
    server = page_server(0)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


async def shown(app: TodoApp, *texts: str) -> None:
    """Returns when a terminal has these items."""
    async with asyncio.timeout(WAIT_S):
        while [item.text for item in app.items] != list(texts):  # noqa: ASYNC110 - as a user looks
            await asyncio.sleep(0.02)


async def add(pilot: Pilot[None], text: str) -> None:
    """As one types."""
    keys = ["space" if character == " " else character for character in text]
    await pilot.press("a", *keys, "enter", "escape")


async def pictures(directory: Path, port: int) -> list[tuple[str, bytes]]:
    """Two terminals and the page, at the end of a short story."""
    origin = f"http://127.0.0.1:{port}"
    settings = ServerSettings(development=True, port=0, store=str(directory / "log.db"), origins=(origin,))
    async with (
        Server(settings) as server,
        terminal(server.urls[0], "ann", str(directory / "ann.db")) as ann,
        terminal(server.urls[0], "bob", str(directory / "bob.db")) as bob,
        ann.run_test(size=TERMINAL_SIZE) as anns,
        bob.run_test(size=TERMINAL_SIZE) as bobs,
        browser(directory / "profile") as eve,
    ):
        await eve.open(address(port, server=server.urls[0], name="eve"), *PAGE_SIZE)
        await add(anns, "milk")
        await shown(bob, "milk")
        await add(bobs, "bread")
        await shown(ann, "milk", "bread")
        await eve.run(ADD.format(text="call the plumber"))
        await shown(bob, "milk", "bread", "call the plumber")
        await eve.run(TICK)
        await until_done(ann)
        await until_done(bob)
        await bobs.press("o")
        await add(bobs, "water the plants")
        await add(anns, "library books")
        await shown(ann, "milk", "bread", "call the plumber", "library books")
        await until_page(eve, 4)
        await anns.pause()
        await bobs.pause()
        terminals = [
            app.export_screenshot(title=f"terminal.py --name {name}") for app, name in ((ann, "ann"), (bob, "bob"))
        ]
        return [
            *(("image/svg+xml", text.encode()) for text in terminals),
            ("image/png", await eve.picture()),
        ]


async def until_done(app: TodoApp) -> None:
    """Returns when the first item is done."""
    async with asyncio.timeout(WAIT_S):
        while not app.items[0].is_done:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.02)


async def until_page(tab: Tab, count: int) -> None:
    """Returns when the page has so many items."""
    async with asyncio.timeout(WAIT_S):
        while len(await tab.run(SHOWN)) != count:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.02)


def side_by_side(images: list[tuple[str, bytes]]) -> str:
    """A page with all of them."""
    sources = [f"data:{kind};base64,{base64.b64encode(data).decode()}" for kind, data in images]
    return f"""<!doctype html><meta charset="utf-8"><style>
      body {{ margin: 0; padding: 16px; display: flex; gap: 16px; background: #f4f4f4; align-items: stretch; }}
      img, figure {{ flex: none; }}
      img.terminal {{ height: 448px; }}
      figure {{ margin: 0; border-radius: 8px; overflow: hidden; background: #292929; color: #c5c8c6;
        font: 14px/30px sans-serif; text-align: center; height: 448px; }}
      figure img {{ display: block; height: 418px; }}</style>
      <img class="terminal" src="{sources[0]}"><img class="terminal" src="{sources[1]}">
      <figure>a web page, on npm's insieme<img src="{sources[2]}"></figure>"""


async def picture() -> bytes:
    """All three, as one PNG."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name, pages() as port:
        directory = Path(name)
        (directory / "profile").mkdir()
        html = side_by_side(await pictures(directory, port))
        (directory / "all.html").write_text(html, encoding="utf-8")
        (directory / "second").mkdir()
        async with browser(directory / "second") as tab:
            await tab.open((directory / "all.html").as_uri(), *PICTURE_SIZE)
            return await tab.picture()


if __name__ == "__main__":
    Path(sys.argv[1]).write_bytes(asyncio.run(picture()))
