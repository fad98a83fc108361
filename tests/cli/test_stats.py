"""`oncelog stats`: what is in a log, without counting it."""

import json
import sqlite3
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli import sample
from oncelog.cli import app
from oncelog.stores.postgres.statements import SCHEMA_VERSION as POSTGRES_SCHEMA_VERSION
from oncelog.stores.sqlite import index
from oncelog.stores.sqlite.files import SCHEMA_VERSION

RUNNER = CliRunner()


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stats") / "log.db"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(index, "PACE", 20)  # in the end no work on the key index is under way
        sample.make_log(path, rounds=8)
    return path


@pytest.mark.rule("CO-42")
def test_the_figures(log: Path) -> None:
    done = RUNNER.invoke(app, ["stats", str(log), "--json"])
    assert done.exit_code == 0, done.stderr
    said = json.loads(done.stdout)
    verified = json.loads(RUNNER.invoke(app, ["verify", str(log), "--json"]).stdout)
    assert (said["records"], said["blocks"], said["epoch"]) == (
        verified["records"],
        verified["blocks"],
        verified["epoch"],
    )
    assert said["schema"] == SCHEMA_VERSION
    assert said["created_ms"] == sample.START_MS
    assert said["settings"] == {"lanes": 4, "eviction_interval": 16}
    assert said["policies"] == ["chat", "deltas", "events", "ledger", "notes", "runs"]
    assert said["keys"]["sealed"] == verified["sealed_keys"]
    assert sum(said["keys"]["segments"].values()) == verified["segments"]
    assert said["keys"]["hot"] > 0
    assert [lane["lane"] for lane in said["lanes"]] == [0, 1, 2, 3, 4]
    assert said["lanes"][0] | {"log_time_ms": 0} == {"lane": 0, "position": 16, "height": 8, "log_time_ms": 0}
    assert said["consumers"] == [
        {"scope": "", "name": "mailer", "cursor": 5, "lag": 11},
        {"scope": "chat/1", "name": "mirror", "cursor": 2, "lag": 1},
    ]
    assert said["erasures"] == 5
    assert said["bytes"] == log.stat().st_size
    assert said["wal_bytes"] == 0


@pytest.mark.rule("CO-42")
def test_the_figures_of_a_database_are_those_of_a_file_and_its_sizes(log: Path, database: str) -> None:
    sample.make_log(database, rounds=8)
    done = RUNNER.invoke(app, ["stats", database, "--json"])
    assert done.exit_code == 0, done.stderr
    said = json.loads(done.stdout)
    of_a_file = json.loads(RUNNER.invoke(app, ["stats", str(log), "--json"]).stdout)
    shared = (said.keys() & of_a_file.keys()) - {"epoch", "schema", "bytes"}
    assert shared == {
        *("created_ms", "settings", "records", "blocks", "lanes", "policies", "consumers", "erasures", "tenants"),
    }
    assert {name: said[name] for name in shared} == {name: of_a_file[name] for name in shared}
    assert said["schema"] == POSTGRES_SCHEMA_VERSION
    assert said["bytes"] == sum(said["tables"].values()) > 100_000
    assert {"oncelog_records", "oncelog_partition_records", "oncelog_rates"} < said["tables"].keys()
    done = RUNNER.invoke(app, ["stats", database])
    assert "consumer 'mirror' of chat/1: at 2, 1 behind" in done.stdout
    assert f"\nPostgreSQL {said['server']}: {said['bytes']} bytes, with indexes\n  oncelog_" in done.stdout


def test_for_people(log: Path) -> None:
    done = RUNNER.invoke(app, ["stats", str(log)])
    assert done.exit_code == 0
    assert "created 2027-01-15 08:00:00.000 UTC" in done.stdout
    assert "consumer 'mirror' of chat/1: at 2, 1 behind" in done.stdout
    assert "consumer 'mailer' of lane 0: at 5, 11 behind" in done.stdout


def test_the_write_ahead_log_of_a_log_in_use(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    sizes: list[int] = []

    def each() -> None:
        sizes.append(json.loads(RUNNER.invoke(app, ["stats", str(path), "--json"]).stdout)["wal_bytes"])

    sample.make_log(path, rounds=1, each=each)
    assert all(size > 0 for size in sizes)


def test_a_log_without_its_state_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    sample.make_log(path, rounds=1)
    connection = sqlite3.connect(path)
    connection.execute("DELETE FROM oncelog_state")
    connection.commit()
    connection.close()
    for command in ("stats", "clock", "verify", "head"):
        done = RUNNER.invoke(app, [command, str(path)])
        assert done.exit_code == (1 if command == "verify" else 2)
        assert "has no row" in done.output
