"""The latency report of a server: its file, and what it attributes."""

import asyncio
import gc
import json
import time
from pathlib import Path
from typing import Any, Final

import grpc.aio
import pytest

from databases import BOTH_STORES
from deadlines import soon, turns, until
from oncelog.core.latency import Cause
from oncelog.engine.batch_report import RequestArrival
from oncelog.errors import OncelogError, SettingsError, StoreUnavailableError
from oncelog.ledger.v1 import ledger_pb2 as pb
from oncelog.ledger.v1.ledger_pb2_grpc import LedgerStub
from oncelog.server import latency_report
from oncelog.server.limits import LONG_FRAME_BYTES
from oncelog.server.settings import ServerSettings
from server.raw_http import post, raw_connection, write
from server.running_server import Serving, item, serving

CAUSES: Final = {cause.name.lower() for cause in Cause}


def read_report(path: Path) -> Any:
    return json.loads(path.read_bytes())


async def write_ledger(served: Serving) -> None:
    """Submit one ledger write over the fast path, one over aiohttp, and one over gRPC."""
    async with raw_connection(served) as client:
        for number, headers in ((1, ()), (2, ("X-Forwarded-For: 10.0.0.1",))):
            client.send(post(write(number), *headers))
            assert (await client.read_answer())[0] == 200
    request = pb.WriteRequest(
        organization="acme",
        client_id="rpc",
        sequence=1,
        idempotency_key=b"0123456789abcdef",
        operations=[pb.Operation(set_entity=pb.SetEntity(key="invoice/1", value=b"paid"))],
    )
    async with grpc.aio.insecure_channel(served.server.grpc_address) as channel:
        stub: Any = LedgerStub(channel)
        await soon(stub.Write(request))


@BOTH_STORES
async def test_report_attributes_the_writes_of_every_transport(tmp_path: Path) -> None:
    path = tmp_path / "latency.json"
    async with serving(tmp_path, latency_report=str(path)) as served:
        assert not path.exists(), "there is nothing to report before the first write"
        socket = await served.connected()
        await socket.submit(item(1))
        await socket.submit(item(2), item(3))
        await socket.submit(item(4, text="x" * LONG_FRAME_BYTES))
        await served.commit(item(5))
        await served.commit(item(5))
        await write_ledger(served)
    report = read_report(path)["since_start"]
    everything, slowest = report["all"], report["slowest"]
    assert everything["requests"] == 4 + 3, "a retry that is answered from memory needs no commit"
    assert slowest["requests"] == 1
    assert slowest["mean_ms"] >= everything["mean_ms"] > 0
    for summary in (everything, slowest):
        assert summary["shares"].keys() == CAUSES
        assert sum(summary["shares"].values()) == pytest.approx(1, abs=0.001)
    assert min(everything["shares"][name] for name in ("decode", "prepare", "commit", "settle")) > 0
    assert report["seconds"] >= 0
    assert path.stat().st_mode & 0o777 == 0o600
    assert [one.name for one in tmp_path.iterdir() if one.name.startswith(".latency")] == []


async def test_pauses_of_the_event_loop_and_of_the_collector_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "latency.json"
    async with serving(tmp_path, latency_report=str(path)) as served:
        await served.commit(item(1))
        recorder = served.server._latency
        assert recorder is not None
        ticked_s = recorder._due_s
        await until(lambda: recorder._due_s > ticked_s)
        time.sleep(0.05)  # noqa: ASYNC251 - blocks the event loop on purpose
        tracked: list[list[int]] = [[] for _ in range(300_000)]  # a collection that is too short is not recorded
        gc.collect()
        del tracked
        await until(lambda: Cause.EVENT_LOOP in recorder._pauses._figures)
    pauses = read_report(path)["since_start"]["pauses"]
    assert pauses["event_loop"]["longest_ms"] > 40
    assert pauses["gc"]["count"] >= 1


async def test_report_is_written_at_intervals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency_report, "INTERVAL_S", 0.01)
    path = tmp_path / "latency.json"
    async with serving(tmp_path, latency_report=str(path)) as served:
        await served.commit(item(1))
        report = await until(lambda: path.exists() and read_report(path))
        await until(lambda: read_report(path)["since_start"]["all"]["requests"] == 1)
    assert report["last_minute"]["all"]["shares"].keys() == CAUSES


async def test_writes_of_a_failed_commit_are_attributed_to_the_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "latency.json"
    async with serving(tmp_path, latency_report=str(path)) as served:

        async def fail(*_: object) -> None:
            raise StoreUnavailableError("the disk is gone")

        monkeypatch.setattr(served.server.log._store, "commit", fail)
        assert (await served.submit(item(1))).status == 500
    everything = read_report(path)["since_start"]["all"]
    assert everything["requests"] == 1
    assert everything["shares"]["commit"] > 0
    assert everything["shares"]["prepare"] == everything["shares"]["settle"] == 0


async def test_every_request_of_a_large_commit_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "latency.json"
    async with serving(tmp_path, latency_report=str(path)) as served:
        gate = served.hold_commits(monkeypatch)
        first = asyncio.ensure_future(served.submit(item(0)))
        await soon(gate.reached.wait())
        socket = await served.connected()
        count = 2 * latency_report.SAMPLES_MAX + 1
        for number in range(1, count + 1):
            await socket.send("submit_events", {"events": [item(number)]}, number)
        await until(lambda: served.server.log.queue_length == count + 1)
        gate.open()
        for _ in range(count):
            assert (await socket.receive())["payload"]["results"][0]["status"] == "committed"
        assert (await first).status == 200
    everything = read_report(path)["since_start"]["all"]
    assert everything["requests"] == count + 1
    assert everything["before_own_commit"] > 0, "they waited for the first commit"


async def test_server_without_the_setting_measures_nothing(tmp_path: Path) -> None:
    callbacks = list(gc.callbacks)
    async with serving(tmp_path) as served:
        assert gc.callbacks == callbacks
        await served.commit(item(1))
        assert served.server.log._committer.phases is None
        store: Any = served.server.log._store
        assert not store.pauses.is_on


async def test_stopped_server_leaves_no_callback(tmp_path: Path) -> None:
    callbacks = list(gc.callbacks)
    async with serving(tmp_path, latency_report=str(tmp_path / "latency.json")):
        assert len(gc.callbacks) == len(callbacks) + 1
    assert gc.callbacks == callbacks


async def test_report_is_written_when_the_log_cannot_be_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    callbacks, path = list(gc.callbacks), tmp_path / "latency.json"
    async with serving(tmp_path, latency_report=str(path)) as served:
        await served.commit(item(1))
        close = served.server.log.close

        async def fail() -> None:
            await close()
            raise StoreUnavailableError("the disk is gone")

        monkeypatch.setattr(served.server.log, "close", fail)
        with pytest.raises(StoreUnavailableError):
            await served.server.stop()
    assert gc.callbacks == callbacks
    assert read_report(path)["since_start"]["all"]["requests"] == 1


async def test_server_does_not_start_without_a_writable_file(tmp_path: Path) -> None:
    missing = tmp_path / "missing" / "latency.json"
    with pytest.raises(SettingsError, match=r"^latency_report: .*latency.json cannot be written: No such file"):
        async with serving(tmp_path, latency_report=str(missing)):
            pass
    assert list(tmp_path.iterdir()) == [], "a failed start creates no log"
    with pytest.raises(SettingsError, match="latency_report must name a file"):
        ServerSettings(development=True, latency_report="")


async def run_once(directory: Path, path: Path) -> bytes:
    """Run a server that writes a report, and return the report."""
    async with serving(directory, latency_report=str(path)) as served:
        await served.commit(item(1))
    return path.read_bytes()


@pytest.mark.parametrize("content", [b"", b"key = 1\n", b"\xff", b"{}", b'{"since_start": {}}', b" " * 2_000_000])
async def test_other_file_is_not_replaced(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "server.key"
    path.write_bytes(content)
    with pytest.raises(SettingsError, match=r"^latency_report: .*server.key is not a latency report, .*another file"):
        await run_once(tmp_path, path)
    assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]


async def test_path_that_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    directory, report = tmp_path / "reports", tmp_path / "latency.json"
    directory.mkdir()
    content = await run_once(tmp_path, report)
    link = tmp_path / "link.json"
    link.symlink_to(report)
    for path in (directory, link):
        with pytest.raises(SettingsError, match=r"^latency_report: .* is not a regular file"):
            await run_once(tmp_path, path)
    assert link.is_symlink()
    assert report.read_bytes() == content


@BOTH_STORES
async def test_file_that_appears_at_the_path_is_not_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "latency.json"
    async with serving(tmp_path, latency_report=str(path)) as served:
        await served.commit(item(1))
        path.write_text("other")
    assert path.read_text() == "other"
    assert "the latency report is not written: latency_report: " in caplog.text


@pytest.mark.parametrize("suffix", ["", "-wal", "-shm", "-journal"])
def test_setting_must_not_name_a_file_of_the_log(tmp_path: Path, suffix: str) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(SettingsError, match=r"latency_report must not name a file of the log, /.*/link/log.db"):
        ServerSettings(
            development=True, store=str(tmp_path / "log.db"), latency_report=str(tmp_path / "link" / f"log.db{suffix}")
        )


async def test_failed_start_leaves_an_earlier_report_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "latency.json"
    content = await run_once(tmp_path, path)
    broken = tmp_path / "broken.db"
    broken.write_bytes(bytes(4096))
    with pytest.raises(OncelogError, match=r"broken\.db"):
        async with serving(tmp_path, latency_report=str(path), store=str(broken)):
            pass
    assert path.read_bytes() == content


async def test_earlier_report_remains_until_the_first_write(tmp_path: Path) -> None:
    path = tmp_path / "latency.json"
    content = await run_once(tmp_path, path)
    async with serving(tmp_path, latency_report=str(path)):
        pass
    assert path.read_bytes() == content
    async with serving(tmp_path, latency_report=str(path)) as served:
        await served.commit(item(2))
    assert path.read_bytes() != content


async def test_file_that_becomes_unwritable_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = tmp_path / "reports"
    directory.mkdir()
    async with serving(tmp_path, latency_report=str(directory / "latency.json")) as served:
        await served.commit(item(1))
        directory.rmdir()
    assert "latency.json cannot be written: No such file or directory" in caplog.text


async def test_work_that_outlives_its_request_is_not_part_of_it() -> None:
    async def submit_later() -> float:
        await turns()
        times = RequestArrival.read_times()
        return times.queued_s - times.arrived_s

    with RequestArrival():
        first_s = RequestArrival.read_times().arrived_s
        await turns(1)
        during = RequestArrival.read_times()
        outliving = asyncio.ensure_future(submit_later())
    assert during.arrived_s == first_s < during.queued_s
    assert await outliving == 0
    alone = RequestArrival.read_times()
    assert alone.arrived_s == alone.queued_s
