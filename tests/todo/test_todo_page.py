"""Two terminals and a web page of examples/todo (in a real Chromium, with the npm client) edit one list."""

import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final
from urllib.error import HTTPError
from urllib.parse import parse_qs
from urllib.request import urlopen

import pytest

from browser import Tab
from deadlines import WAIT_S, until
from insieme.clients import npm_packages
from serve_page import build_page_url, create_page_server
from server.running_server import serving
from server.web_chat.chromium import Chromium
from todo.screens import Line, Screen, screen

PROGRAM: Final = Path(__file__).parents[2] / "examples/todo/serve_page.py"
PICTURE: Final = Path(__file__).parents[2] / "docs/images/todo.png"
PICTURE_BYTES_MAX: Final = 200 * 1024
READ: Final = """
[...document.querySelectorAll("#items li[data-id]")].map((li) => ({
  id: li.dataset.id,
  place: Number(li.dataset.place),
  text: li.querySelector(".text").textContent,
  isDone: li.querySelector(".box").checked,
  isPending: li.querySelector(".waits") !== null,
}))
"""


class Web:
    """The page as its user sees and operates it."""

    def __init__(self, tab: Tab) -> None:
        self.tab = tab

    async def items(self) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = await self.tab.run(READ)
        return items

    async def lines(self) -> list[Line]:
        return [(one["text"], one["isDone"], one["isPending"]) for one in await self.items()]

    async def places(self) -> list[tuple[str, int]]:
        return [(one["id"], one["place"]) for one in await self.items()]

    async def status(self) -> str:
        return str(await self.tab.run('document.getElementById("status").textContent'))

    async def add(self, text: str) -> None:
        await self.tab.run('document.getElementById("new").focus()')
        await self.tab.call("Input.insertText", text=text)
        for kind in ("keyDown", "keyUp"):
            await self.tab.call("Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", text="\r")

    async def toggle(self, text: str) -> None:
        await self._click(text, ".box")

    async def remove(self, text: str) -> None:
        await self._click(text, ".remove")

    async def switch(self) -> None:
        await self.tab.run('document.getElementById("offline").click()')

    async def _click(self, text: str, what: str) -> None:
        line = "[...document.querySelectorAll('#items li')]"
        line += f".find((li) => li.querySelector('.text')?.textContent === {json.dumps(text)})"
        await self.wait_for_text(text)
        await self.tab.run(f"{line}.querySelector({json.dumps(what)}).click()")

    async def wait_for_text(self, text: str) -> None:
        async def is_there() -> bool:
            return text in [one for one, _, _ in await self.lines()]

        await until(is_there, lambda: text)

    async def wait_for_items(self, *lines: str, waiting: tuple[str, ...] = ()) -> None:
        """Wait until the list has exactly these items. A leading `x` marks an item as done."""
        wanted = [
            (line.removeprefix("x "), line.startswith("x "), line.removeprefix("x ") in waiting) for line in lines
        ]
        seen: list[Line] = []

        async def is_so() -> bool:
            seen[:] = await self.lines()
            return seen == wanted

        await until(is_so, lambda: (wanted, seen))

    async def wait_for_status(self, words: str) -> None:
        seen = [""]

        async def is_so() -> bool:
            seen[0] = await self.status()
            return words in seen[0]

        await until(is_so, lambda: (words, seen))


@pytest.fixture
def page_port() -> Iterator[int]:
    """The port of the server that serves the page."""
    npm_packages()
    server = create_page_server(0)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@asynccontextmanager
async def web(chromium: Chromium, url: str, port: int) -> AsyncIterator[Web]:
    async with chromium.tab() as tab:
        await tab.open(build_page_url(port, server=url, name="eve"))
        yield Web(tab)


async def wait_for_all(screens: list[Screen], page: Web, *lines: str) -> None:
    """Wait until the page and all terminals show this list, and assert that items and positions agree."""
    await page.wait_for_items(*lines)
    for one in screens:
        await one.wait_for_items(*lines)
        assert [(item.id, item.place) for item in one.app.items] == await page.places()


@pytest.mark.rule("EV-18")
async def test_two_terminals_and_a_page_converge_after_offline_edits(
    page_port: int, chromium: Chromium, tmp_path: Path
) -> None:
    async with (
        serving(tmp_path, origins=(f"http://127.0.0.1:{page_port}",)) as served,
        screen(served.url, "ann", tmp_path) as ann,
        screen(served.url, "bob", tmp_path) as bob,
        web(chromium, served.url, page_port) as eve,
    ):
        await eve.wait_for_status("● live · event 0")
        await eve.add("milk")
        await ann.wait_for_items("milk")
        await ann.add("bread")
        await bob.toggle("milk")
        await wait_for_all([ann, bob], eve, "x milk", "bread")
        await eve.toggle("milk")
        await eve.toggle("bread")
        await wait_for_all([ann, bob], eve, "milk", "x bread")
        assert ann.drawn_lines == ["· milk  eve", "✓ bread  ann"]
        await eve.wait_for_status("● live · event 5")

        # Ann and Eve go offline, and all three users continue to edit.
        await eve.switch()
        await ann.press("o")
        await eve.wait_for_status("○ switched off")
        await ann.wait_for_status("○ switched off")
        await eve.add("tea")
        await eve.toggle("milk")
        await eve.add("salt")
        await ann.add("rice")
        await ann.toggle("milk")
        await ann.toggle("bread")
        await bob.remove("milk")
        await bob.add("eggs")
        await bob.wait_for_items("x bread", "eggs")
        await eve.wait_for_items("x milk", "x bread", "tea", "salt", waiting=("milk", "tea", "salt"))
        await eve.wait_for_status("· 3 waiting")
        await ann.wait_for_status("· 3 waiting")
        await ann.wait_for_lines(("milk", True, True), ("bread", False, True), ("rice", False, True))

        # They reconnect one by one, and all agree on one order.
        await eve.switch()
        await eve.wait_for_items("x bread", "eggs", "tea", "salt")
        await ann.press("o")
        await wait_for_all([ann, bob], eve, "bread", "eggs", "tea", "salt", "rice")
        for one in (ann, bob):
            await one.wait_for_status("● live · event 13")
        await eve.wait_for_status("● live · event 13")


@pytest.mark.rule("EV-18")
async def test_page_reconnects_and_keeps_pending_changes_across_a_reload(
    page_port: int, chromium: Chromium, tmp_path: Path
) -> None:
    origins = (f"http://127.0.0.1:{page_port}",)
    async with serving(tmp_path, origins=origins) as served:
        url = served.url
        async with screen(url, "ann", tmp_path) as ann, web(chromium, url, page_port) as eve:
            await eve.add("milk")
            await wait_for_all([ann], eve, "milk")
            await served.server.__aexit__(None, None, None)
            await eve.wait_for_status("○ offline")
            await eve.add("bread")
            await eve.wait_for_status("○ offline · event 1 · 1 waiting")
            await eve.tab.open(build_page_url(page_port, server=url, name="eve"))
            await eve.wait_for_items("milk", "bread", waiting=("bread",))
            async with serving(tmp_path, port=served.port, origins=origins):
                await wait_for_all([ann], eve, "milk", "bread")
                await ann.toggle("bread")
                await wait_for_all([ann], eve, "milk", "x bread")


def test_create_page_server_serves_only_files_of_the_page(tmp_path: Path) -> None:
    command = [sys.executable, str(PROGRAM), "--port", "0", "--url", "http://127.0.0.1:9"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path)  # noqa: S603
    try:
        assert process.stdout is not None
        found = re.search(r"The page is at (http://127\.0\.0\.1:\d+/)\?(\S+)", process.stdout.readline())
        assert found is not None
        assert parse_qs(found[2]) == {"server": ["http://127.0.0.1:9"], "name": ["eve"]}
        with urlopen(found[0].split()[-1], timeout=WAIT_S) as page:  # noqa: S310
            assert b'src="todo.mjs"' in page.read()
        for path in ("../serve_page.py", "%2e%2e/serve_page.py", "node_modules/../../pyproject.toml", "model.py"):
            with pytest.raises(HTTPError, match="404"):
                urlopen(found[1] + path, timeout=WAIT_S)  # noqa: S310
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 0
    finally:
        process.kill()
        process.communicate()


def test_readme_picture_can_be_regenerated(tmp_path: Path) -> None:
    command = [sys.executable, str(PROGRAM.parent / "screenshot.py"), str(tmp_path / "todo.png")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=WAIT_S, cwd=tmp_path)  # noqa: S603
    assert done.returncode == 0, done.stderr
    for picture in (tmp_path / "todo.png", PICTURE):
        data = picture.read_bytes()
        assert data.startswith(b"\x89PNG")
        assert 20_000 < len(data) < PICTURE_BYTES_MAX


RULES: Final = """
def check(event):
    if event.body["payload"].get("text") == "beer":
        raise ValueError("no beer")
"""


@pytest.mark.rule("EV-18")
async def test_page_shows_rejected_changes_until_dismissed(
    page_port: int, chromium: Chromium, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "todo_page_rules.py").write_text(RULES)
    monkeypatch.syspath_prepend(tmp_path)

    origins = (f"http://127.0.0.1:{page_port}",)
    async with (
        serving(tmp_path, origins=origins, validate="todo_page_rules:check") as served,
        web(chromium, served.url, page_port) as eve,
    ):
        await eve.add("beer")
        await eve.add("milk")
        await eve.wait_for_items("milk")
        rejected = "document.querySelector('#items li.rejected')"
        assert "no beer" in await eve.tab.run(f"{rejected}.textContent")
        await eve.tab.run(f"{rejected}.querySelector('.remove').click()")

        async def is_gone() -> bool:
            return await eve.tab.run(f"{rejected} === null") is True

        await until(is_gone, lambda: "the rejected item is still shown")
