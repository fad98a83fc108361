"""Clients for the end-to-end tests: the npm package in Node and in Chromium, and the raw first dialect in Python.

Each keeps what it was told: the numbers with what they stand for, and their order on each connection.
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

ROOT: Final = Path(__file__).parents[2]
HERE: Final = Path(__file__).parent
NODE_MODULES: Final = ROOT / ".node/node_modules"
WAIT_S: Final = 90
"""Nothing takes that long, on a machine that does other things too. It is here so that what hangs ends as a failure."""
END_S: Final = 20
"""For a browser to end in order, before it is made to."""
PROJECT: Final = "p1"

Json = dict[str, Any]


def component(name: str, package: str) -> str:
    """A program that the tests need. Without it they fail: nothing is proven by tests that were left out."""
    found = shutil.which(name)
    if found is None:
        pytest.fail(f"{name} is missing: `make test` installs it, as does apt-get install {package}")
    return found


def installed() -> Path:
    """Where the npm packages are."""
    if not (NODE_MODULES.parent / ".whole").exists():
        pytest.fail("the npm packages are not there: run `make test`, or `make .node/.whole`")
    return NODE_MODULES


class Told:
    """What a client has been told so far. `until` waits for more."""

    def __init__(self) -> None:
        self.runs: list[list[int]] = []
        """The numbers of each connection, in the order in which they came."""
        self.known: dict[int, Any] = {}
        """All numbers, and what the client calls what they stand for."""
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def take(self, number: int, what: object) -> None:
        assert self.known.setdefault(number, what) == what
        self.runs[-1].append(number)

    def listen(self, listening: Any) -> None:
        """Keeps a task that receives, in place of the one before, and fails with it."""
        self.end()
        self._task = asyncio.ensure_future(listening)
        self._task.add_done_callback(lambda _: self._news.set())

    def wake(self) -> None:
        self._news.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                assert self._task is not None
                if self._task.done():
                    self._task.result()
                    raise AssertionError("the client has gone")
                self._news.clear()
                await self._news.wait()

    async def knows(self, count: int) -> None:
        """Returns when it has been told of so many events."""
        await self.until(lambda: len(self.known) >= count)

    def end(self) -> None:
        if self._task is not None:
            self._task.cancel()


class Package(Told):
    """A client of the npm package, wherever it runs."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.events: list[Json] = []
        self._send: Callable[[str], Any]
        self._numbers = 0
        self._done: dict[int, Json] = {}

    def speak(self, send: Callable[[str], Any], lines: AsyncIterator[str]) -> None:
        """By which way it is spoken to from now on."""
        self._send = send
        self.listen(self._receive(lines))

    async def _receive(self, lines: AsyncIterator[str]) -> None:
        async for line in lines:
            told = json.loads(line)
            self._take(told["type"], told.get("payload") or {})
            self.wake()

    def _take(self, kind: str, payload: Json) -> None:
        match kind:
            case "done":
                self._done[payload["number"]] = payload
                return
            case "connected":
                self.runs.append([])
            case "sync_page":
                for event in payload["events"]:
                    self.take(event["committedId"], event["id"])
            case "committed" | "broadcast":
                self.take(payload["committedId"], payload["id"])
        self.events.append({"type": kind, "payload": payload})

    async def do(self, command: str, **arguments: Any) -> Any:
        """Gives a command, and returns what came of it when it is done."""
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

    async def happened(self, kind: str, count: int = 1) -> None:
        """Returns when it has told of so many of a kind."""
        await self.until(lambda: len(self.of(kind)) >= count)

    def of(self, kind: str) -> list[Json]:
        return [event["payload"] for event in self.events if event["type"] == kind]

    async def submit(self, count: int, text: str = "", *, has_ids: bool = False) -> None:
        """So many new events, under ids of its own or those that the package makes."""
        events = [card(f"{self.name} {text}{number}") for number in range(count)]
        for number, event in enumerate(events):
            if has_ids:
                event["id"] = f"{self.name}/{text}{number}"
        await self.do("submit", events=events)


def card(text: str, **more: Any) -> Json:
    """An event as one hands it to the package."""
    return {
        "partition": "boards/7",
        "type": "card.added",
        "schemaVersion": 1,
        "payload": {"text": text, "list": [1.5, None, "é\u2028"]},
        **more,
    }


@asynccontextmanager
async def in_node(name: str, directory: Path) -> AsyncIterator[Package]:
    """A process of Node that runs the package."""
    home = directory / name
    home.mkdir()
    (home / "node_modules").symlink_to(installed(), target_is_directory=True)
    for script in ("driver.mjs", "node.mjs"):
        shutil.copy(HERE / script, home)
    process = await asyncio.create_subprocess_exec(
        component("node", "nodejs"),
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
    package.speak(lambda text: stdin.write(text.encode() + b"\n"), lines())
    try:
        yield package
    finally:
        package.end()
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


# --- a browser -----------------------------------------------------------------------------------------


class Page:
    """Serves a page to a browser, and speaks to the client in it."""

    def __init__(self, name: str) -> None:
        self.package = Package(name)
        self.origin = ""
        self._came = asyncio.Event()

    async def came(self) -> None:
        """Returns when the page (the next one, if it was told to load itself again) has been loaded and speaks."""
        async with asyncio.timeout(WAIT_S):
            await self._came.wait()
        self._came.clear()

    async def control(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(max_msg_size=0)
        await socket.prepare(request)
        gone = asyncio.Event()

        async def lines() -> AsyncIterator[str]:
            async for message in socket:
                assert message.type is WSMsgType.TEXT
                yield message.data
            gone.set()

        self.package.speak(socket.send_str, lines())
        self._came.set()
        await gone.wait()
        return socket

    async def start(self) -> web.AppRunner:
        application = web.Application()
        application.router.add_get("/", _html)
        application.router.add_get("/control", self.control)
        for script in ("driver.mjs", "page.mjs"):
            application.router.add_get(f"/{script}", _script(HERE / script))
        application.router.add_static("/node_modules", installed(), follow_symlinks=True)
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
    """What the package's own `exports` name is what is loaded, with no bundler in between.

    Of immer, which it needs, there is a file for browsers too: the other one asks for Node's `process`.
    """
    exports = json.loads((installed() / "insieme/package.json").read_text())["exports"]
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
async def in_chromium(name: str, directory: Path) -> AsyncIterator[Page]:
    """A page; the browser comes with `browsing`, when the server knows the page's origin."""
    page = Page(name)
    runner = await page.start()
    try:
        yield page
    finally:
        page.package.end()
        await runner.cleanup()


@asynccontextmanager
async def browsing(page: Page, directory: Path) -> AsyncIterator[None]:
    """A real Chromium that looks at the page, without a window."""
    options = [
        "--headless=new",
        "--enable-logging=stderr",  # what the page says on its console too
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--disable-extensions",
        "--no-first-run",
        "--no-proxy-server",
        "--remote-debugging-port=0",
        f"--user-data-dir={directory / 'profile'}",
        *(["--no-sandbox"] if os.geteuid() == 0 else []),
    ]
    log = directory / "chromium.log"
    said = log.open("wb")
    process = await asyncio.create_subprocess_exec(
        component("chromium", "chromium"),
        *options,
        page.origin,
        stdout=said,
        stderr=said,
        start_new_session=True,  # so that all its processes can be ended, and no others
    )
    try:
        try:
            await page.came()
        except TimeoutError:
            raise AssertionError(log.read_text(errors="replace")[-4000:]) from None
        yield
    finally:
        with suppress(ProcessLookupError):
            process.terminate()  # then it ends its own processes, and waits for them
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), END_S)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        said.close()


# --- the first dialect ---------------------------------------------------------------------------------


class Python(Told):
    """A client of the first dialect that follows the project, and keeps its events until they have a result."""

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
        """Comes, or comes back, and sends again what has no result and was not among what it missed."""
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
        async for message in socket:
            told = json.loads(message.data)
            payload = told["payload"]
            match told["type"]:
                case "sync_response":
                    for event in payload["events"]:
                        self.waiting.pop(event["id"], None)
                        self._see(event)
                    self._cursor = payload["next_since_committed_id"]
                    if payload["has_more"]:
                        await self._sync()
                    else:
                        self._has_caught_up = True
                case "event_broadcast":
                    self._see(payload)
                case "submit_events_result":
                    for result in payload["results"]:
                        assert result["status"] == "committed", result
                        item = self.waiting.pop(result["id"])
                        self._see({**item, "committed_id": result["committed_id"]})
                case kind:
                    assert kind == "connected", told
            self.wake()
        await asyncio.get_running_loop().create_future()  # gone, until it comes back

    def _see(self, event: Json) -> None:
        number = event["committed_id"]
        self.take(number, event["id"])
        self.seen[number] = event
        self._cursor = max(self._cursor, number)


@asynccontextmanager
async def in_python(name: str) -> AsyncIterator[Python]:
    """A client that has not come yet."""
    async with aiohttp.ClientSession() as session:
        python = Python(name, session)
        try:
            yield python
        finally:
            python.end()
