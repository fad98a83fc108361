"""A Chromium without a window, driven by its DevTools protocol: for the test of the page, and for its picture."""

import asyncio
import base64
import itertools
import json
import os
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

import aiohttp

WAIT_S: Final = 60


class Tab:
    """One page."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command of the protocol. One at a time."""
        number = next(self._numbers)
        async with asyncio.timeout(WAIT_S):
            await self._socket.send_json({"id": number, "method": method, "params": parameters})
            while True:
                told = await self._socket.receive_json()
                if told.get("id") == number:  # what else is told are events
                    break
        if "error" in told:
            raise RuntimeError(f"{method}: {told['error']}")
        result: dict[str, Any] = told["result"]
        return result

    async def run(self, script: str) -> Any:
        """What an expression comes to, in the page; a promise is waited for."""
        answer = await self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(json.dumps(answer["exceptionDetails"]))
        return answer["result"].get("value")

    async def open(self, url: str, width: int = 480, height: int = 400) -> None:
        """Goes to an address, in a window of that size, and returns when the page is loaded."""
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        answer = await self.call("Page.navigate", url=url)
        if answer.get("errorText"):
            raise RuntimeError(f"{url}: {answer['errorText']}")
        async with asyncio.timeout(WAIT_S):
            while await self.run("document.readyState") != "complete":  # noqa: ASYNC110 - it is in another process
                await asyncio.sleep(0.02)

    async def picture(self) -> bytes:
        """The page as it looks now, as a PNG."""
        return base64.b64decode((await self.call("Page.captureScreenshot", format="png"))["data"])


@asynccontextmanager
async def browser(profile: Path) -> AsyncIterator[Tab]:
    """A browser with a profile of its own (an empty directory, or that of an earlier run), and one page."""
    program = shutil.which("chromium")
    if program is None:
        raise RuntimeError("chromium is missing: apt-get install chromium")
    told = profile / "DevToolsActivePort"
    told.unlink(missing_ok=True)
    process = await asyncio.create_subprocess_exec(
        program,
        "--headless=new",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--disable-extensions",
        "--hide-scrollbars",
        "--no-first-run",
        "--no-proxy-server",
        "--remote-debugging-port=0",
        f"--user-data-dir={profile}",
        *(["--no-sandbox"] if os.geteuid() == 0 else []),
        "about:blank",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,  # so that all its processes can be ended, and no others
    )
    try:
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(await _page_of(told, process, session), max_msg_size=0) as socket,
        ):
            yield Tab(socket)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


def _first_line(path: Path) -> str:
    return path.read_text().split("\n")[0] if path.exists() else ""


async def _page_of(told: Path, process: asyncio.subprocess.Process, session: aiohttp.ClientSession) -> str:
    """Where its page is spoken to. It writes the port into a file when it listens."""
    async with asyncio.timeout(WAIT_S):
        while True:
            if process.returncode is not None:
                raise RuntimeError(f"chromium ended with {process.returncode}")
            port = _first_line(told)
            if port:
                async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                    pages = [one for one in await answer.json() if one["type"] == "page"]
                if pages:
                    return str(pages[0]["webSocketDebuggerUrl"])
            await asyncio.sleep(0.02)
