"""Makes the picture in the README: python examples/todo/screenshot.py docs/images/todo.png

It runs a server, two terminals, and the page in Chromium. One terminal is offline and has a pending item.
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

from browser import Tab, open_browser
from oncelog.server.app import Server
from oncelog.server.settings import ServerSettings
from serve_page import build_page_url, create_page_server
from terminal import TodoApp, open_terminal

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
def serve_page() -> Iterator[int]:
    """Serve the page in a thread, and yield the port."""
    server = create_page_server(0)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


async def wait_for_items(app: TodoApp, *texts: str) -> None:
    """Wait until a terminal has these items."""
    async with asyncio.timeout(WAIT_S):
        while [item.text for item in app.items] != list(texts):  # noqa: ASYNC110 - polls the screen, as a user does
            await asyncio.sleep(0.02)


async def add_item(pilot: Pilot[None], text: str) -> None:
    """Type a new item."""
    keys = ["space" if character == " " else character for character in text]
    await pilot.press("a", *keys, "enter", "escape")


async def capture_screens(directory: Path, port: int) -> list[tuple[str, bytes]]:
    """Edit one list in two terminals and the page, and return pictures of all three with their media types."""
    origin = f"http://127.0.0.1:{port}"
    settings = ServerSettings(development=True, port=0, store=str(directory / "log.db"), origins=(origin,))
    async with (
        Server(settings) as server,
        open_terminal(server.urls[0], "ann", str(directory / "ann.db")) as ann,
        open_terminal(server.urls[0], "bob", str(directory / "bob.db")) as bob,
        ann.run_test(size=TERMINAL_SIZE) as anns,
        bob.run_test(size=TERMINAL_SIZE) as bobs,
        open_browser(directory / "profile") as eve,
    ):
        await eve.open(build_page_url(port, server=server.urls[0], name="eve"), *PAGE_SIZE)
        await add_item(anns, "milk")
        await wait_for_items(bob, "milk")
        await add_item(bobs, "bread")
        await wait_for_items(ann, "milk", "bread")
        await eve.run(ADD.format(text="call the plumber"))
        await wait_for_items(bob, "milk", "bread", "call the plumber")
        await eve.run(TICK)
        await wait_until_done(ann)
        await wait_until_done(bob)
        await bobs.press("o")
        await add_item(bobs, "water the plants")
        await add_item(anns, "library books")
        await wait_for_items(ann, "milk", "bread", "call the plumber", "library books")
        await wait_for_page(eve, 4)
        await anns.pause()
        await bobs.pause()
        terminals = [
            app.export_screenshot(title=f"terminal.py --name {name}") for app, name in ((ann, "ann"), (bob, "bob"))
        ]
        return [
            *(("image/svg+xml", text.encode()) for text in terminals),
            ("image/png", await eve.capture_png()),
        ]


async def wait_until_done(app: TodoApp) -> None:
    """Wait until the first item is done."""
    async with asyncio.timeout(WAIT_S):
        while not app.items[0].is_done:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.02)


async def wait_for_page(tab: Tab, count: int) -> None:
    """Wait until the page has this number of items."""
    async with asyncio.timeout(WAIT_S):
        while len(await tab.run(SHOWN)) != count:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.02)


def build_page(images: list[tuple[str, bytes]]) -> str:
    """Return a page that shows the pictures side by side."""
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


async def capture_all() -> bytes:
    """Return one PNG with the two terminals and the page."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name, serve_page() as port:
        directory = Path(name)
        (directory / "profile").mkdir()
        html = build_page(await capture_screens(directory, port))
        (directory / "all.html").write_text(html, encoding="utf-8")
        (directory / "second").mkdir()
        async with open_browser(directory / "second") as tab:
            await tab.open((directory / "all.html").as_uri(), *PICTURE_SIZE)
            return await tab.capture_png()


if __name__ == "__main__":
    Path(sys.argv[1]).write_bytes(asyncio.run(capture_all()))
