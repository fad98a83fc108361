"""One headless Chromium for many tests. Each tab has a separate browser context and storage.

The process does not belong to an event loop, so tests with different loops can share it.
"""

import itertools
import os
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest

from browser import Tab
from deadlines import wait_until
from insieme.clients import find_program

OPTIONS: Final = (
    "--headless=new",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-background-timer-throttling",
    "--disable-backgrounding-occluded-windows",
    "--disable-renderer-backgrounding",
    "--hide-scrollbars",
    "--no-first-run",
    "--no-proxy-server",
    "--remote-debugging-port=0",
)


class Chromium:
    """A browser process."""

    def __init__(self, port: int, path: str) -> None:
        self._url = f"ws://127.0.0.1:{port}"
        self._path = path
        self._numbers = itertools.count(1)

    @asynccontextmanager
    async def tab(self) -> AsyncIterator[Tab]:
        """Open an empty page in a new browser context, which is disposed of at the end of the block."""
        async with aiohttp.ClientSession() as session, session.ws_connect(self._url + self._path) as control:
            context = (await self._call(control, "Target.createBrowserContext"))["browserContextId"]
            try:
                target = await self._call(
                    control, "Target.createTarget", url="about:blank", browserContextId=context, newWindow=True
                )
                address = f"{self._url}/devtools/page/{target['targetId']}"
                async with session.ws_connect(address, max_msg_size=0) as socket:
                    tab = Tab(socket)
                    await tab.call("Emulation.setFocusEmulationEnabled", enabled=True)
                    yield tab
            finally:
                await self._call(control, "Target.disposeBrowserContext", browserContextId=context)

    async def _call(self, control: aiohttp.ClientWebSocketResponse, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        await control.send_json({"id": number, "method": method, "params": parameters})
        while True:
            message = await control.receive_json()
            if message.get("id") == number:
                result: dict[str, Any] = message["result"]
                return result


@contextmanager
def running_chromium() -> Iterator[Chromium]:
    """Start a browser with an empty profile, and kill it at the end of the block."""
    with tempfile.TemporaryDirectory(prefix="oncelog-chromium-", ignore_cleanup_errors=True) as name:
        profile = Path(name)
        sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
        process = subprocess.Popen(  # noqa: S603
            [find_program("chromium", "chromium"), *OPTIONS, f"--user-data-dir={profile}", *sandbox, "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a separate process group, which can be killed as a whole
        )
        try:
            yield Chromium(*_address(profile / "DevToolsActivePort", process))
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture(scope="session")
def chromium() -> Iterator[Chromium]:
    """A browser for all tests in a directory."""
    with running_chromium() as found:
        yield found


def _address(file: Path, process: "subprocess.Popen[bytes]") -> tuple[int, str]:
    """Return the port and path of the DevTools protocol, which the browser writes to a file once it listens."""

    def lines() -> list[str]:
        assert process.poll() is None, f"chromium ended with {process.returncode}"
        found = file.read_text().splitlines() if file.exists() else []
        return found if len(found) == 2 else []

    port, path = wait_until(lines, lambda: "chromium does not listen")
    return int(port), path
