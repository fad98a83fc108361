"""`oncelog load`: its figures are true, it outlives a server that dies, and it sees what is wrong."""

import asyncio
import json
import re
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from aiohttp import web
from typer.testing import CliRunner

from cli.served import ended, oncelog, serving, started
from databases import BOTH_STORES
from oncelog.cli import app, load

SMALL = ["--connections", "2", "--in-flight", "3", "--seconds", "0.5"]


def last_committed_id(url: str) -> int:
    with urlopen(f"{url}/readyz") as answer:  # noqa: S310
        number: int = json.loads(answer.read())["last_committed_id"]
        return number


@BOTH_STORES
def test_its_figures_are_those_of_the_log(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        options = ["--batch", "3", "--size", "200", "--partitions", "2", "--retries", "20", "--json"]
        done = oncelog("load", "--url", served.url, *SMALL, *options)
        assert done.returncode == 0, done.stderr
        figures = json.loads(done.stdout)
        assert figures["events"] == last_committed_id(served.url) > 0
        assert figures["events"] % 3 == 0
        assert figures["retried"] == pytest.approx(figures["events"] / 5, abs=2)  # for each connection one is owed
        assert (figures["differing"], figures["lost"], figures["errors"], figures["rejected"]) == (0, 0, {}, {})
        latency = figures["latency_ms"]
        assert 0 < latency["p50"] <= latency["p90"] <= latency["p99"] <= latency["max"]
        assert figures["events_per_s"] == pytest.approx(figures["events"] / figures["took_s"], rel=0.01)
        said = f"This writes real events into {served.url}, in the partitions load/0 to load/1.\n"
        assert done.stderr.startswith(said)
        command = ["tail", "--url", served.url, "--partition", "load/0", "--partition", "load/1", "--limit"]
        events = [json.loads(line) for line in oncelog(*command, str(figures["events"])).stdout.splitlines()]
        assert len(events) == figures["events"]
        sizes = {len(json.dumps(one["event"], separators=(",", ":"))) for one in events}
        assert sizes == {200}


def test_a_summary_for_people(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        done = oncelog("load", "--url", served.url, *SMALL, "--retries", "0")
    assert done.returncode == 0
    assert re.fullmatch(
        r"\d+ events in \d\.\d s: \d+ events/s\n"
        r"latency: p50 [\d.]+ ms, p90 [\d.]+ ms, p99 [\d.]+ ms, max [\d.]+ ms\n"
        r"retries: 0 sent a second time, 0 with another number\n"
        r"lost: 0\n"
        r"errors: none\n",
        done.stdout,
    )


def test_a_server_that_is_killed_in_the_middle_loses_nothing(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        options = ["--connections", "2", "--in-flight", "4", "--seconds", "4", "--json"]
        with started("load", "--url", served.url, *options) as process:
            assert process.stderr is not None
            process.stderr.readline()
            assert "of 4 s" in process.stderr.readline()  # it is on its way
            served.kill()
            served.start()
            status, said, errors = ended(process)
        assert status == 0, errors
        figures = json.loads(said)
        assert figures["lost"] == figures["differing"] == 0
        assert figures["errors"]["connection_lost"] >= 1
        # What was sent again after the kill was committed before it, or is now, and in either case once.
        assert figures["events"] == last_committed_id(served.url)


def test_a_server_that_is_not_there(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        served.kill()
        done = oncelog("load", "--url", served.url, *SMALL)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1] == f"oncelog: {served.url} cannot be reached: Connection refused"


def test_a_key_that_may_not_write_there(tmp_path: Path) -> None:
    keys = str(tmp_path / "keys.json")
    key = oncelog("apikey", "create", keys, "--client-id", "c", "--name", "n", "--write", "a").stdout.strip()
    with serving(tmp_path, "--set", f"api_keys.file={keys}") as served:
        done = oncelog("load", "--url", served.url, *SMALL, "--client-id", "c", "--json", ONCELOG_TOKEN=key)
        assert done.returncode == 1
        figures = json.loads(done.stdout)
        assert figures["rejected"]["forbidden"] > 0
        assert figures["events"] == last_committed_id(served.url) == 0


# --- servers that lie -----------------------------------------------------------------------------------------

Answer = Callable[[list[str], int], Any]


@contextmanager
def lying(results: Answer) -> Iterator[str]:
    """A server in this process, whose results are a test's own."""
    requests = 0

    async def events(request: web.Request) -> web.StreamResponse:
        nonlocal requests
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for frame in socket:
            message = json.loads(frame.data)
            if message["type"] == "connect":
                payload = {"client_id": "x", "server_last_committed_id": 0, "epoch": "e"}
                await socket.send_json({"type": "connected", "payload": payload})
                continue
            requests += 1
            told = results([one["id"] for one in message["payload"]["events"]], requests)
            if told is not None:
                kind = "error" if "code" in told else "submit_events_result"
                await socket.send_json({"type": kind, "msg_id": message["msg_id"], "payload": told})
        return socket

    application = web.Application()
    application.router.add_get("/v1/events", events)
    with in_a_thread(application) as port:
        yield f"http://127.0.0.1:{port}"


@contextmanager
def in_a_thread(application: web.Application) -> Iterator[int]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    runner = web.AppRunner(application, shutdown_timeout=0.1)

    def do(waited_for: Awaitable[Any]) -> None:
        async def main() -> None:
            await waited_for

        asyncio.run_coroutine_threadsafe(main(), loop).result(30)

    try:
        do(runner.setup())
        do(web.TCPSite(runner, "127.0.0.1", 0).start())
        yield runner.addresses[0][1]
        do(runner.cleanup())
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def committed(ids: list[str], *numbers: int) -> dict[str, Any]:
    return {
        "results": [
            {"id": id_text, "status": "committed", "committed_id": number}
            for id_text, number in zip(ids, numbers, strict=True)
        ]
    }


def figures_of(url: str, *options: str) -> tuple[int, dict[str, Any]]:
    one = ["--connections", "1", "--in-flight", "1", "--seconds", "0.1", "--json"]
    done = CliRunner().invoke(app, ["load", "--url", url, *one, *options])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.stderr
    return done.exit_code, json.loads(done.stdout)


def test_a_retry_with_another_number_is_seen() -> None:
    with lying(committed) as url:
        status, figures = figures_of(url, "--retries", "100")
    assert status == 1
    assert figures["differing"] == figures["retried"] > 0
    assert re.fullmatch(r"[0-9a-f-]{36} is \d+, and at a retry \d+", figures["problems"][0])


def test_two_events_with_one_number_are_seen() -> None:
    with lying(lambda ids, _: committed(ids, 7)) as url:
        status, figures = figures_of(url, "--retries", "0")
    assert status == 1
    assert figures["differing"] == figures["events"] - 1 > 0
    assert "7 is the committed_id of " in figures["problems"][0]


def test_results_of_other_events_are_seen() -> None:
    with lying(lambda ids, request: committed(["x"] * len(ids), request)) as url:
        status, figures = figures_of(url)
    assert (status, figures["events"]) == (1, 0)
    assert figures["differing"] > 0


def test_what_is_never_answered_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "GRACE_S", 0.2)
    with lying(lambda _, __: None) as url:
        status, figures = figures_of(url, "--batch", "4")
    assert (status, figures["events"], figures["lost"]) == (1, 0, 4)
    assert figures["problems"][0].endswith(" has no answer")


def test_a_busy_server_is_counted_and_is_not_wrong() -> None:
    def answer(ids: list[str], request: int) -> dict[str, Any]:
        if request == 1:
            return {"code": "server_busy", "message": "too much", "details": {}}
        return committed(ids, request)

    with lying(answer) as url:
        status, figures = figures_of(url, "--retries", "0")
    assert (status, figures["errors"], figures["lost"]) == (0, {"server_busy": 1}, 0)
    assert figures["events"] >= 1
