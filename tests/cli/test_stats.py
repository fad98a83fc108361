"""`oncelog stats` prints figures about a log without counting its records."""

import json
import re
import sqlite3
from pathlib import Path

import pytest

from cli import sample_log
from cli.runner import COMMAND, RUNNER
from oncelog.storage.postgres.statements import SCHEMA_VERSION as POSTGRES_SCHEMA_VERSION
from oncelog.storage.sqlite.database_file import SCHEMA_VERSION
from oncelog.storage.sqlite.key_index import index


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stats") / "log.db"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(index, "WORK_FACTOR", 20)  # finishes all work on the key index
        sample_log.make_log(path, rounds=8)
    return path


@pytest.mark.rule("CO-42")
def test_stats_prints_the_figures_of_a_file_as_json(log: Path) -> None:
    done = RUNNER.invoke(COMMAND, ["stats", str(log), "--json"])
    assert done.exit_code == 0, done.stderr
    report = json.loads(done.stdout)
    verified = json.loads(RUNNER.invoke(COMMAND, ["verify", str(log), "--json"]).stdout)
    assert (report["records"], report["blocks"], report["epoch"]) == (
        verified["records"],
        verified["blocks"],
        verified["epoch"],
    )
    assert report["schema"] == SCHEMA_VERSION
    assert report["created_ms"] == sample_log.START_MS
    assert report["settings"] == {"lanes": 4, "eviction_interval": 16, "ledger_ttl_ms": 86_400_000}
    assert report["policies"] == ["chat", "deltas", "events", "ledger", "notes", "runs"]
    assert report["keys"]["sealed"] == verified["sealed_keys"]
    assert sum(report["keys"]["segments"].values()) == verified["segments"]
    assert report["keys"]["hot"] > 0
    assert [lane["lane"] for lane in report["lanes"]] == [0, 1, 2, 3, 4]
    assert report["lanes"][0] | {"log_time_ms": 0} == {"lane": 0, "position": 16, "height": 8, "log_time_ms": 0}
    assert report["consumers"] == [
        {"scope": "", "name": "mailer", "cursor": 5, "lag": 11},
        {"scope": "chat/1", "name": "mirror", "cursor": 2, "lag": 1},
    ]
    assert report["erasures"] == 5
    assert report["bytes"] == log.stat().st_size
    assert report["wal_bytes"] == 0


def test_stats_builds_no_key_index(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the index hashes all unsealed keys")

    expected = json.loads(RUNNER.invoke(COMMAND, ["stats", str(log), "--json"]).stdout)["keys"]
    with sqlite3.connect(log) as connection:
        [(unsealed,)] = connection.execute("SELECT sum(position - sealed_position) FROM oncelog_lanes")
    assert expected["hot"] == unsealed
    monkeypatch.setattr(index.KeyIndex, "catch_up", refuse)
    assert json.loads(RUNNER.invoke(COMMAND, ["stats", str(log), "--json"]).stdout)["keys"] == expected


@pytest.mark.rule("CO-42")
def test_stats_of_a_database_match_those_of_a_file(log: Path, database: str) -> None:
    sample_log.make_log(database, rounds=8)
    done = RUNNER.invoke(COMMAND, ["stats", database, "--json"])
    assert done.exit_code == 0, done.stderr
    report = json.loads(done.stdout)
    of_a_file = json.loads(RUNNER.invoke(COMMAND, ["stats", str(log), "--json"]).stdout)
    shared = (report.keys() & of_a_file.keys()) - {"epoch", "schema", "bytes"}
    assert shared == {
        *("created_ms", "settings", "records", "restore_records", "audit_records", "blocks", "lanes"),
        *("policies", "consumers", "erasures", "tenants"),
    }
    assert {name: report[name] for name in shared} == {name: of_a_file[name] for name in shared}
    assert report["schema"] == POSTGRES_SCHEMA_VERSION
    assert report["bytes"] == sum(report["tables"].values()) > 100_000
    assert {"oncelog_records", "oncelog_partition_records", "oncelog_rates"} < report["tables"].keys()
    done = RUNNER.invoke(COMMAND, ["stats", database])
    assert re.search(r"^mirror +chat/1 +2 +1$", done.stdout, re.MULTILINE)
    assert f"PostgreSQL {report['server']}: {report['bytes']} bytes, with indexes\n" in done.stdout
    assert re.search(r"^oncelog_records +[0-9,]+$", done.stdout, re.MULTILINE)


def test_stats_prints_readable_text(log: Path) -> None:
    done = RUNNER.invoke(COMMAND, ["stats", str(log)])
    assert done.exit_code == 0
    assert "created 2027-01-15 08:00:00.000 UTC" in done.stdout
    assert re.search(r"^consumer +stream +cursor +lag$", done.stdout, re.MULTILINE)
    assert re.search(r"^mirror +chat/1 +2 +1$", done.stdout, re.MULTILINE)
    assert re.search(r"^mailer +lane 0 +5 +11$", done.stdout, re.MULTILINE)


def test_stats_includes_the_size_of_the_write_ahead_log(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    sizes: list[int] = []

    def each() -> None:
        sizes.append(json.loads(RUNNER.invoke(COMMAND, ["stats", str(path), "--json"]).stdout)["wal_bytes"])

    sample_log.make_log(path, rounds=1, each=each)
    assert all(size > 0 for size in sizes)


def test_missing_state_row_is_reported_as_damage(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    sample_log.make_log(path, rounds=1)
    connection = sqlite3.connect(path)
    connection.execute("DELETE FROM oncelog_state")
    connection.commit()
    connection.close()
    for command in ("stats", "clock", "verify", "head"):
        done = RUNNER.invoke(COMMAND, [command, str(path)])
        assert done.exit_code == (1 if command == "verify" else 2)
        assert "has no row" in done.output
