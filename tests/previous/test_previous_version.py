"""The previous version as a client, as a server, and as the writer of a file or a database."""

import asyncio
import json
from pathlib import Path
from time import time_ns
from typing import Any
from urllib.request import Request, urlopen

import pytest

from cli.sample_log import make_log
from cli.server_process import oncelog, serving
from databases import BOTH_STORES, log_at
from deadlines import WAIT_S, until
from oncelog import open_blocking as opened_blocking
from oncelog.client.deltas import BlockingDeltasClient
from oncelog.testing.clock import ManualClock
from previous.previous_version import DIRECTORY, PreviousVersion
from scripts import start_script
from server.rejecting_store import MARK, reject_marked_bodies, remove_rejection
from server.running_server import Serving, item
from server.running_server import serving as serving_here


def use_current_clients(*arguments: object) -> Any:
    """Run the script with the clients of the current version."""
    with start_script(DIRECTORY / "use_clients.py", *arguments) as process:
        said, _ = process.communicate(timeout=WAIT_S)
        assert process.returncode == 0
    return json.loads(said)


def use_previous_clients(previous: PreviousVersion, *arguments: object) -> Any:
    """Run the script with the clients of the previous version."""
    return json.loads(previous.run_script("use_clients.py", *arguments))


def assert_both_are_read(first: Any, second: Any) -> None:
    """Assert that the second run of the script continues the numbers of the first run and reads its writes."""
    assert first["committed_id"] < second["committed_id"]
    assert (second["events"], second["messages"]) == (["first", "second"], ["by first", "by second"])
    assert (second["entities"], second["rows"]) == (["by:first", "by:second"], ["first", "second"])
    assert (first["sequence"], second["sequence"]) == (1, 2)
    assert first["message_id"] < second["message_id"]
    assert first["tx_id"] < second["tx_id"]
    assert (first["client_sequence"], second["client_sequence"]) == (1, 1)


def test_clients_of_both_versions_share_the_current_server(previous: PreviousVersion, tmp_path: Path) -> None:
    with serving(tmp_path, grpc=True) as server:
        address = (server.url, server.rpc_address, tmp_path)
        first = use_previous_clients(previous, *address, "first")
        second = use_current_clients(*address, "second")
    assert first["version"] != second["version"]
    assert_both_are_read(first, second)


@BOTH_STORES
def test_log_written_by_the_previous_server_is_verified_and_continued(
    previous: PreviousVersion, tmp_path: Path
) -> None:
    log = log_at(tmp_path / "log.db")
    with previous.serving(log) as server:
        first = use_current_clients(server.url, server.rpc_address, tmp_path, "first")
        # `tail` sends no client id, which the previous version requires.
        done = oncelog("tail", "--url", server.url, "--partition", "p", "--limit", "1")
        assert (done.returncode, done.stderr) == (0, "")
        assert server.stop() == 0
    with serving(tmp_path, grpc=True) as server:
        second = use_current_clients(server.url, server.rpc_address, tmp_path, "second")
        assert server.stop() == 0
    assert_both_are_read(first, second)
    verified = oncelog("verify", log, "--json")
    assert verified.returncode == 0, verified.stdout
    assert json.loads(verified.stdout)["ok"]


@pytest.mark.rule("CO-12")
def test_previous_version_refuses_a_log_that_contains_a_leap(previous: PreviousVersion, tmp_path: Path) -> None:
    log = tmp_path / "log.db"
    make_log(log, rounds=1)
    assert oncelog("epoch", str(log), "--renew").returncode == 0
    for command in (
        ("verify", log),
        ("stats", log),
        ("backup", log, tmp_path / "copy.db"),
        ("serve", "--development", "--store", log),
    ):
        refused = previous.run(*command)
        assert refused.returncode == 2, command
        assert "was made by a newer Oncelog (schema" in refused.stderr, command
    assert oncelog("verify", str(log)).returncode == 0


@pytest.mark.rule("CO-12")
@pytest.mark.parametrize("full", [(), ("--full",)])
def test_backup_of_the_previous_version_is_restored(
    previous: PreviousVersion, full: tuple[str, ...], tmp_path: Path
) -> None:
    backup, log = tmp_path / "backup.db", tmp_path / "log.db"
    previous.run_script("write_log.py", backup)
    before = backup.read_bytes()
    restored = oncelog("restore", str(backup), str(log), "--above=1000", *full)
    assert restored.returncode == 0, restored.stderr
    assert restored.stdout.startswith("3 records, ")
    assert backup.read_bytes() == before
    with opened_blocking(str(log)) as opened:
        assert [record.position for record in opened.read(after=0).records] == [1, 2, 3, 1001]
    verified = oncelog("verify", str(log), "--json")
    assert json.loads(verified.stdout)["records"] == 3 + 17


@BOTH_STORES
@pytest.mark.rule("CO-12")
def test_epoch_of_a_log_of_the_previous_version_can_be_renewed_before_a_server_opens_it(
    previous: PreviousVersion, tmp_path: Path
) -> None:
    log = log_at(tmp_path / "log.db")
    previous.run_script("write_log.py", log)
    renewed = oncelog("epoch", log, "--renew", "--above=1000")
    assert renewed.returncode == 0, renewed.stderr
    with opened_blocking(log) as opened:
        assert [record.position for record in opened.read(after=0).records] == [1, 2, 3, 1001]
    assert oncelog("verify", log).returncode == 0


@pytest.mark.rule("CO-12")
def test_renewal_above_zero_does_not_continue_numbers(tmp_path: Path) -> None:
    log = str(tmp_path / "log.db")
    with opened_blocking(log):
        pass
    refused = oncelog("epoch", log, "--renew", "--above=0")
    assert refused.returncode == 2
    assert oncelog("epoch", log, "--renew", "--above=1").returncode == 0
    assert oncelog("verify", log).returncode == 0


def test_clients_of_the_previous_version_continue_after_a_restore(previous: PreviousVersion, tmp_path: Path) -> None:
    log = tmp_path / "log.db"
    with serving(tmp_path, grpc=True) as server:
        first = use_previous_clients(previous, server.url, server.rpc_address, tmp_path, "first")
        assert server.stop() == 0
    assert oncelog("epoch", str(log), "--renew", "--above=1000").returncode == 0
    with serving(tmp_path, grpc=True) as server:
        second = use_previous_clients(previous, server.url, server.rpc_address, tmp_path, "second")
        assert server.stop() == 0
    assert (first["sequence"], second["sequence"]) == (1, 1001)
    assert (second["committed_id"], second["height"]) == (1002, 1003)
    assert (second["events"], second["messages"]) == (["first", "second"], ["by first", "by second"])
    assert (second["entities"], second["rows"]) == (["by:first", "by:second"], ["first", "second"])


@pytest.mark.rule("CO-34")
async def test_clients_of_the_previous_version_commit_all_writes_that_the_store_accepts(
    previous: PreviousVersion, tmp_path: Path
) -> None:
    await reject_marked_bodies(str(tmp_path / "log.db"))
    texts = ["a", "b", MARK, "c", "d"]
    with serving(tmp_path, grpc=True) as server:
        said = previous.run_script("write_refused.py", server.url, server.rpc_address, tmp_path, *texts)
        assert server.stop() == 0
    assert json.loads(said) == {client: [MARK] for client in ("events", "chat", "deltas", "ledger")}
    remove_rejection(str(tmp_path / "log.db"))
    verified = oncelog("verify", str(tmp_path / "log.db"), "--json")
    assert json.loads(verified.stdout)["records"] == 1 + 4 * (len(texts) - 1)  # one more for an audit record


@pytest.mark.rule("EV-8")
async def test_clients_of_the_previous_version_commit_all_writes_above_a_rate(
    previous: PreviousVersion, tmp_path: Path
) -> None:
    texts = [str(number) for number in range(10)]
    clock = ManualClock(time_ns() // 1_000_000)
    async with serving_here(tmp_path, clock=clock, new_events_per_second_max=1) as served:
        rpc = served.server.grpc_service
        assert rpc is not None
        await served.submit(item(1))  # This uses up the rate until the clock advances.
        address = (served.url, f"127.0.0.1:{rpc.port}", tmp_path)
        script = asyncio.create_task(asyncio.to_thread(previous.run_script, "write_refused.py", *address, *texts))
        await until(lambda: script.done() or is_rate_limited(served))
        assert not script.done()
        while not script.done():
            clock.advance(1000)
            await asyncio.wait([script], timeout=0.05)
    assert not any(json.loads(await script).values())
    verified = oncelog("verify", str(tmp_path / "events.db"), "--json")
    assert json.loads(verified.stdout)["records"] == 2 + 4 * len(texts)  # includes an audit record


def is_rate_limited(served: Serving) -> bool:
    return any(outcome == "rate_limited" for _, _, outcome in served.server.counts.requests)


@pytest.mark.rule("DE-13")
def test_deltas_client_of_the_previous_version_syncs_after_deleted_rows_were_dropped(
    previous: PreviousVersion, tmp_path: Path
) -> None:
    file = tmp_path / "ann.db"
    with serving(tmp_path) as server:
        assert json.loads(previous.run_script("sync_rows.py", server.url, file, "gone", "kept")) == ["gone", "kept"]
        with BlockingDeltasClient(server.url, "shop", path=":memory:", client_id="bob") as bob:
            bob.synced(WAIT_S)
            bob.delete("products", "gone")
            bob.synced(WAIT_S)
        body = json.dumps({"keep": 0, "tombstoneAgeMs": 0}).encode()
        compact = Request(f"{server.url}/v1/sync/shop/compact", body, {"Content-Type": "application/json"})  # noqa: S310
        assert json.loads(urlopen(compact).read())["droppedRows"] == 1  # noqa: S310
        assert json.loads(previous.run_script("sync_rows.py", server.url, file, "new")) == ["kept", "new"]
        assert server.stop() == 0
