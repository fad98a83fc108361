"""Clients for the end-to-end tests: the npm package in Node and in Chromium, and a Python client of the native dialect.

Each client records the positions and ids of received events, and their order on each connection.
"""

import asyncio
import json
import os
import shutil
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest
from aiohttp import WSMsgType, web

from deadlines import WAIT_S

ROOT: Final = Path(__file__).parents[2]
HERE: Final = Path(__file__).parent
NODE_MODULES: Final = ROOT / ".node/node_modules"
END_S: Final = 60
"""Time that a browser has to exit before it is killed."""
PROJECT: Final = "p1"

Json = dict[str, Any]


def find_program(name: str, package: str) -> str:
    """Return the path of a required program. If the program is missing, the test fails, because a skipped test proves
    nothing.
    """
    found = shutil.which(name)
    if found is None:
        pytest.fail(f"{name} is missing: `make test` installs it, as does apt-get install {package}")
    return found


def npm_packages() -> Path:
    """Return the directory of the installed npm packages."""
    if not (NODE_MODULES.parent / ".whole").exists():
        pytest.fail("the npm packages are not there: run `make test`, or `make .node/.whole`")
    return NODE_MODULES


class KnownEvents:
    """The events that a client has received so far."""

    def __init__(self) -> None:
        self.runs: list[list[int]] = []
        """Received positions of each connection, in order of arrival."""
        self.known: dict[int, Any] = {}
        """Event ids by position."""
        self._change = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def record_event(self, number: int, what: object) -> None:
        assert self.known.setdefault(number, what) == what
        self.runs[-1].append(number)

    def listen(self, receiving: Any) -> None:
        """Replace the receiving task. If the task fails, `until` raises its error."""
        self.end()
        self._task = asyncio.ensure_future(receiving)
        self._task.add_done_callback(lambda _: self._change.set())

    def notify(self) -> None:
        self._change.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                assert self._task is not None
                if self._task.done():
                    self._task.result()
                    raise AssertionError("the client has ended")
                self._change.clear()
                await self._change.wait()

    async def wait_for_events(self, count: int) -> None:
        """Wait until the client has received `count` events."""
        await self.until(lambda: len(self.known) >= count)

    def end(self) -> None:
        if self._task is not None:
            self._task.cancel()


class Package(KnownEvents):
    """A client of the npm package, in Node or in a browser."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.events: list[Json] = []
        self._send: Callable[[str], Any]
        self._numbers = 0
        self._done: dict[int, Json] = {}

    def attach(self, send: Callable[[str], Any], lines: AsyncIterator[str]) -> None:
        """Use a new connection to the client's process or page."""
        self._send = send
        self.listen(self._receive(lines))

    async def _receive(self, lines: AsyncIterator[str]) -> None:
        async for line in lines:
            message = json.loads(line)
            self._handle_message(message["type"], message.get("payload") or {})
            self.notify()

    def _handle_message(self, kind: str, payload: Json) -> None:
        match kind:
            case "done":
                self._done[payload["number"]] = payload
                return
            case "connected":
                self.runs.append([])
            case "sync_page":
                for event in payload["events"]:
                    self.record_event(event["committedId"], event["id"])
            case "committed" | "broadcast":
                self.record_event(payload["committedId"], payload["id"])
        self.events.append({"type": kind, "payload": payload})

    async def do(self, command: str, **arguments: Any) -> Any:
        """Send a command to the client, wait until it is done, and return its result."""
        self._numbers += 1
        number = self._numbers
        sent = self._send(json.dumps({"do": command, "number": number, **arguments}))
        if asyncio.iscoroutine(sent):
            await sent
        if command == "reload":
            return None
        await self.until(lambda: number in self._done)
        done = self._done[number]
        assert "error" not in done, done
        return done["result"]

    async def open(self, url: str, **more: Any) -> None:
        socket_url = url.replace("http", "ws", 1) + "/v1/events"
        await self.do("open", url=socket_url, clientId=self.name, projectId=PROJECT, **more)

    async def wait_for_report(self, kind: str, count: int = 1) -> None:
        """Wait until the client has sent `count` reports of a kind."""
        await self.until(lambda: len(self.reports(kind)) >= count)

    def reports(self, kind: str) -> list[Json]:
        return [event["payload"] for event in self.events if event["type"] == kind]

    async def submit(self, count: int, text: str = "", *, has_ids: bool = False) -> None:
        """Submit new events. If `has_ids` is set, the test chooses the ids, otherwise the package does."""
        events = [card(f"{self.name} {text}{number}") for number in range(count)]
        for number, event in enumerate(events):
            if has_ids:
                event["id"] = f"{self.name}/{text}{number}"
        await self.do("submit", events=events)


def card(text: str, **more: Any) -> Json:
    """Return an event in the package's format."""
    return {
        "partition": "boards/7",
        "type": "card.added",
        "schemaVersion": 1,
        "payload": {"text": text, "list": [1.5, None, "é\u2028"]},
        **more,
    }


@asynccontextmanager
async def node_client(name: str, directory: Path) -> AsyncIterator[Package]:
    """Run the package in a Node process."""
    home = directory / name
    home.mkdir()
    (home / "node_modules").symlink_to(npm_packages(), target_is_directory=True)
    for script in ("driver.mjs", "node.mjs"):
        shutil.copy(HERE / script, home)
    process = await asyncio.create_subprocess_exec(
        find_program("node", "nodejs"),
        str(home / "node.mjs"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=2**24,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    stdin, stdout = process.stdin, process.stdout

    async def lines() -> AsyncIterator[str]:
        async for line in stdout:
            yield line.decode()

    package = Package(name)
    package.attach(lambda text: stdin.write(text.encode() + b"\n"), lines())
    try:
        yield package
    finally:
        package.end()
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


# --- a browser -----------------------------------------------------------------------------------------


class Page:
    """Serves a page to a browser, and controls the client on the page."""

    def __init__(self, name: str) -> None:
        self.package = Package(name)
        self.origin = ""
        self._loaded = asyncio.Event()

    async def loaded(self) -> None:
        """Wait until the page is connected, also after a reload."""
        async with asyncio.timeout(WAIT_S):
            await self._loaded.wait()
        self._loaded.clear()

    async def control(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(max_msg_size=0)
        await socket.prepare(request)
        gone = asyncio.Event()

        async def lines() -> AsyncIterator[str]:
            async for message in socket:
                assert message.type is WSMsgType.TEXT
                yield message.data
            gone.set()

        self.package.attach(socket.send_str, lines())
        self._loaded.set()
        await gone.wait()
        return socket

    async def start(self) -> web.AppRunner:
        application = web.Application()
        application.router.add_get("/", _html)
        application.router.add_get("/control", self.control)
        for script in ("driver.mjs", "page.mjs"):
            application.router.add_get(f"/{script}", _script(HERE / script))
        application.router.add_static("/node_modules", npm_packages(), follow_symlinks=True)
        runner = web.AppRunner(application)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        self.origin = f"http://127.0.0.1:{port}"
        return runner


def _script(path: Path) -> Callable[[web.Request], Any]:
    text = path.read_text()

    async def handler(_: web.Request) -> web.Response:
        return web.Response(text=text, content_type="text/javascript")

    return handler


async def _html(_: web.Request) -> web.Response:
    """Return a page that loads the package's `exports` without a bundler.

    The dependency immer has a separate file for browsers, because its main file needs Node's `process`.
    """
    exports = json.loads((npm_packages() / "insieme/package.json").read_text())["exports"]
    names = {
        "insieme/browser": "/node_modules/insieme/" + exports["./browser"]["import"].removeprefix("./"),
        "immer": "/node_modules/immer/dist/immer.production.mjs",
    }
    page = (
        '<!doctype html><meta charset="utf-8"><title>insieme</title>'
        f'<script type="importmap">{json.dumps({"imports": names})}</script>'
        '<script type="module" src="/page.mjs"></script>'
    )
    return web.Response(text=page, content_type="text/html")


@asynccontextmanager
async def chromium_client(name: str, directory: Path) -> AsyncIterator[Page]:
    """Serve a page. `run_chromium` starts the browser later, when the server knows the page's origin."""
    page = Page(name)
    runner = await page.start()
    try:
        yield page
    finally:
        page.package.end()
        await runner.cleanup()


@asynccontextmanager
async def run_chromium(page: Page, directory: Path) -> AsyncIterator[None]:
    """Run a headless Chromium on the page."""
    options = [
        "--headless=new",
        "--enable-logging=stderr",  # includes the page's console
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--disable-extensions",
        "--no-first-run",
        "--no-proxy-server",
        "--remote-debugging-port=0",
        f"--user-data-dir={directory / 'profile'}",
        *(["--no-sandbox"] if os.geteuid() == 0 else []),
    ]
    log_path = directory / "chromium.log"
    log = log_path.open("wb")
    process = await asyncio.create_subprocess_exec(
        find_program("chromium", "chromium"),
        *options,
        page.origin,
        stdout=log,
        stderr=log,
        start_new_session=True,  # needed to kill its process group
    )
    try:
        try:
            await page.loaded()
        except TimeoutError:
            raise AssertionError(log_path.read_text(errors="replace")[-4000:]) from None
        yield
    finally:
        with suppress(ProcessLookupError):
            process.terminate()  # allows the browser to stop its child processes
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), END_S)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        log.close()


# --- the native dialect --------------------------------------------------------------------------------


class NativeClient(KnownEvents):
    """A client of the native dialect that follows the project and keeps its events until they have a result."""

    def __init__(self, name: str, session: aiohttp.ClientSession) -> None:
        super().__init__()
        self.name = name
        self.seen: dict[int, Json] = {}
        self.waiting: dict[str, Json] = {}
        self._session = session
        self._socket: aiohttp.ClientWebSocketResponse
        self._cursor = 0
        self._has_caught_up = False

    async def connect(self, url: str) -> None:
        """Connect or reconnect, catch up, and resend events without a result."""
        self._has_caught_up = False
        self._socket = await self._session.ws_connect(url + "/v1/events", max_msg_size=0)
        self.runs.append([])
        await self._send("connect", {"client_id": self.name, "token": None})
        await self._sync()
        self.listen(self._receive(self._socket))
        await self.until(lambda: self._has_caught_up)
        for item in list(self.waiting.values()):
            await self._send("submit_events", {"events": [item]})

    async def _send(self, kind: str, payload: Json) -> None:
        await self._socket.send_json({"type": kind, "protocol_version": "1.0", "payload": payload})

    async def _sync(self) -> None:
        await self._send("sync", {"partitions": [f"project/{PROJECT}"], "since_committed_id": self._cursor})

    async def submit(self, *items: Json) -> None:
        for item in items:
            self.waiting[item["id"]] = item
            await self._send("submit_events", {"events": [item]})

    async def _receive(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        async for frame in socket:
            message = json.loads(frame.data)
            payload = message["payload"]
            match message["type"]:
                case "sync_response":
                    for event in payload["events"]:
                        self.waiting.pop(event["id"], None)
                        self._record(event)
                    self._cursor = payload["next_since_committed_id"]
                    if payload["has_more"]:
                        await self._sync()
                    else:
                        self._has_caught_up = True
                case "event_broadcast":
                    self._record(payload)
                case "submit_events_result":
                    for result in payload["results"]:
                        assert result["status"] == "committed", result
                        item = self.waiting.pop(result["id"])
                        self._record({**item, "committed_id": result["committed_id"]})
                case kind:
                    assert kind == "connected", message
            self.notify()
        await asyncio.get_running_loop().create_future()  # connection lost: wait until `connect` replaces this task

    def _record(self, event: Json) -> None:
        number = event["committed_id"]
        self.record_event(number, event["id"])
        self.seen[number] = event
        self._cursor = max(self._cursor, number)


@asynccontextmanager
async def native_client(name: str) -> AsyncIterator[NativeClient]:
    """Create a client that is not connected yet."""
    async with aiohttp.ClientSession() as session:
        native = NativeClient(name, session)
        try:
            yield native
        finally:
            native.end()
