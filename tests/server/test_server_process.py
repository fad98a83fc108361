"""The server process: documented curl examples, signals and startup errors."""

import asyncio
import json
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest

import curl
from cli.server_process import ENVIRONMENT
from databases import BOTH_STORES, log_at
from deadlines import soon
from oncelog.testing.clock import ManualClock
from server.running_server import Serving, SocketClient, item, numbers, serving

HANDBOOK: Final = Path(__file__).parent.parent.parent / "docs" / "reference" / "http.md"
DOCUMENTED_MS: Final = 1_794_808_200_000
"""The time that the answers in the handbook show."""


# --- documented examples ----------------------------------------------------------------------------------------


async def run_curl(command: str, environment: Mapping[str, str]) -> tuple[int | None, str]:
    """Run a command and return its exit status and output."""
    pipe = asyncio.subprocess.PIPE
    started = await asyncio.create_subprocess_shell(_failing(command), stdout=pipe, env=environment)
    text, _ = await soon(started.communicate())
    return started.returncode, text.decode()


async def run_curl_until(command: str, environment: Mapping[str, str], expected: str) -> str:
    """Run an endless command until it has printed the expected text, and return its output."""
    pipe = asyncio.subprocess.PIPE
    started = await asyncio.create_subprocess_shell(f"exec {_failing(command)}", stdout=pipe, env=environment)
    assert started.stdout is not None
    text = ""
    try:
        while expected not in text:
            piece = await soon(started.stdout.read(65_536))
            assert piece, text
            text += piece.decode()
    finally:
        started.kill()
        await started.communicate()
    return text


def _failing(command: str) -> str:
    """Return the command with an option that makes curl exit with an error status on HTTP errors."""
    return command.replace("curl ", "curl --fail ", 1)


def documented_examples(served: Serving) -> list[tuple[str, str]]:
    """Return the handbook's curl commands and outputs, with the address and epoch of a server filled in."""
    page = HANDBOOK.read_text(encoding="utf-8")
    page = page.replace("127.0.0.1:7171", served.url.removeprefix("http://"))
    page = page.replace("d532c440b69ab0ff", served.server.log.epoch)
    blocks = re.findall(r"```console\n\$ (curl .*?)```", page, re.DOTALL)
    assert len(blocks) == page.count("$ curl")
    examples = [re.fullmatch(r"(curl [^\n]* -d '[^']*'|[^\n]*)\n(.*)", block, re.DOTALL) for block in blocks]
    return [(example[1], example[2].strip()) for example in examples if example is not None]


@pytest.mark.parametrize("kind", curl.kinds())
async def test_documented_curl_examples_work(tmp_path: Path, kind: str) -> None:
    environment = curl.environment_with(kind, ENVIRONMENT, tmp_path)
    async with serving(tmp_path, clock=ManualClock(DOCUMENTED_MS)) as served:
        submit, read, read_next_page, follow, resume, ticket, look_up = documented_examples(served)

        for command, shown in (submit, read):
            assert await run_curl(command, environment) == (0, shown)

        status, text = await run_curl(look_up[0], environment)
        assert (status, json.loads(text)["status"]) == (0, "committed")

        await served.commit(*(item(number, "orders/1") for number in range(2, 251)))
        status, text = await run_curl(read_next_page[0], environment)
        assert (status, numbers(json.loads(text)["events"])) == (0, list(range(101, 201)))

        text = await run_curl_until(follow[0], environment, "\nid: 2\n")
        assert text.startswith(follow[1].replace('"server_last_committed_id":1,', '"server_last_committed_id":250,'))

        text = await run_curl_until(resume[0], environment, "\nid: 2\n")
        assert "\nid: 1\n" not in text

        status, text = await run_curl(ticket[0], environment)
        assert (status, json.loads(text).keys()) == (0, json.loads(ticket[1]).keys())
        address = f"{served.url}/v1/events/stream?partition=orders/1&ticket={json.loads(text)['ticket']}"
        await run_curl_until(f"curl -s -N '{address}'", environment, "\nid: 2\n")


@pytest.mark.parametrize("kind", curl.kinds())
async def test_curl_reports_http_and_connection_errors(tmp_path: Path, kind: str) -> None:
    """If curl did not report errors, the test of the examples would accept a broken example."""
    environment = curl.environment_with(kind, ENVIRONMENT, tmp_path)
    async with serving(tmp_path, shutdown_ms=600_000) as served:
        assert await run_curl(f"curl -s {served.url}/nowhere", environment) == (curl.REFUSED, "")
        status, text = await run_curl(f"curl -s {served.url}/healthz", environment)
        assert (status, json.loads(text)) == (0, {"status": "ok"})
    assert await run_curl(f"curl -s {served.url}/healthz", environment) == (curl.CANNOT_CONNECT, "")


# --- a process -------------------------------------------------------------------------------------------


class Process:
    """`oncelog serve` and its log."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[dict[str, Any]] = []

    async def line(self, message: str) -> dict[str, Any]:
        """Return the next log record with this message."""
        assert self.process.stderr is not None
        while True:
            text = await soon(self.process.stderr.readline())
            assert text, self.lines
            self.lines.append(json.loads(text))
            if self.lines[-1]["message"].startswith(message):
                return self.lines[-1]


@asynccontextmanager
async def process(directory: Path, *arguments: str) -> AsyncIterator[tuple[Process, str]]:
    """Start a process and return it with its URL."""
    command = ("-m", "oncelog", "serve", "--port", "0", "--store", log_at(directory / "events.db"))
    started = Process(
        await asyncio.create_subprocess_exec(
            sys.executable, *command, "--set", "log.format=json", *arguments, stderr=asyncio.subprocess.PIPE
        )
    )
    try:
        yield started, (await started.line("listening"))["urls"]
    finally:
        if started.process.returncode is None:
            started.process.kill()
        await started.process.wait()


@BOTH_STORES
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_process_shuts_down_cleanly_on_a_signal(tmp_path: Path, number: signal.Signals) -> None:
    async with process(tmp_path, "--development") as (served, url), aiohttp.ClientSession() as session:
        clients = [SocketClient(await soon(session.ws_connect(f"{url}/v1/events"))) for _ in range(5)]
        for client in clients:
            await client.connect()
        assert numbers(await clients[0].submit(item(1))) == [1]
        served.process.send_signal(signal.SIGHUP)
        await served.line("keys, grants and certificates were reloaded")
        assert numbers(await clients[0].submit(item(2))) == [2]
        served.process.send_signal(number)
        for client in clients:
            assert await client.wait_closed() == 1001
        await served.line("stopped")
        assert await soon(served.process.wait()) == 0


async def test_process_that_cannot_listen_reports_the_address(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        arguments = ("--development", "--port", str(port), "--store", str(tmp_path / "events.db"))
        refused = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "oncelog", "serve", *arguments, stderr=asyncio.subprocess.PIPE
        )
        _, message = await soon(refused.communicate())
        assert refused.returncode not in (0, None)
        assert f"cannot listen on 127.0.0.1:{port}".encode() in message
        assert b"Traceback" not in message
