"""A headless Chromium, driven over the DevTools protocol, for testing the page and for taking its picture."""

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
        """Send a protocol command and return its result. Commands must not overlap."""
        number = next(self._numbers)
        async with asyncio.timeout(WAIT_S):
            await self._socket.send_json({"id": number, "method": method, "params": parameters})
            while True:
                message = await self._socket.receive_json()
                if message.get("id") == number:  # the other messages are events
                    break
        if "error" in message:
            raise RuntimeError(f"{method}: {message['error']}")
        result: dict[str, Any] = message["result"]
        return result

    async def run(self, script: str) -> Any:
        """Evaluate an expression in the page and return its value. Waits for a promise."""
        answer = await self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(json.dumps(answer["exceptionDetails"]))
        return answer["result"].get("value")

    async def open(self, url: str, width: int = 480, height: int = 400) -> None:
        """Open an address in a window of this size, and wait until the page is loaded."""
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        answer = await self.call("Page.navigate", url=url)
        if answer.get("errorText"):
            raise RuntimeError(f"{url}: {answer['errorText']}")
        async with asyncio.timeout(WAIT_S):
            while await self.run("document.readyState") != "complete":  # noqa: ASYNC110 - the page is in another process
                await asyncio.sleep(0.02)

    async def capture_png(self) -> bytes:
        """Return a picture of the page as a PNG."""
        return base64.b64decode((await self.call("Page.captureScreenshot", format="png"))["data"])


@asynccontextmanager
async def open_browser(profile: Path) -> AsyncIterator[Tab]:
    """Run a browser with one page. The profile is an empty directory, or one from an earlier run."""
    program = shutil.which("chromium")
    if program is None:
        raise RuntimeError("chromium is missing: apt-get install chromium")
    port_file = profile / "DevToolsActivePort"
    port_file.unlink(missing_ok=True)
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
        start_new_session=True,  # to end all of its processes, and no others
    )
    try:
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(await _find_page_socket(port_file, process, session), max_msg_size=0) as socket,
        ):
            yield Tab(socket)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


def _read_first_line(path: Path) -> str:
    return path.read_text().split("\n")[0] if path.exists() else ""


async def _find_page_socket(
    port_file: Path, process: asyncio.subprocess.Process, session: aiohttp.ClientSession
) -> str:
    """Return the address of the page's socket. The browser writes its port to a file when it listens."""
    async with asyncio.timeout(WAIT_S):
        while True:
            if process.returncode is not None:
                raise RuntimeError(f"chromium ended with {process.returncode}")
            port = _read_first_line(port_file)
            if port:
                async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                    pages = [one for one in await answer.json() if one["type"] == "page"]
                if pages:
                    return str(pages[0]["webSocketDebuggerUrl"])
            await asyncio.sleep(0.02)
