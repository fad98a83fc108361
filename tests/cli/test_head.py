"""`oncelog head`: the newest hashes, for keeping elsewhere."""

import json
from pathlib import Path

from typer.testing import CliRunner

from cli import sample
from oncelog.cli import app
from oncelog.stores.verifying.findings import exported_head

RUNNER = CliRunner()


def test_it_prints_the_newest_hash_of_every_lane(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    decided = sample.make_log(path, rounds=6)
    done = RUNNER.invoke(app, ["head", str(path)])
    assert done.exit_code == 0
    said = json.loads(done.stdout)
    assert said.keys() == {"epoch", "lanes"}
    newest = {lane: head for one in decided for lane, head in one.changes.heads.items()}
    assert said["lanes"] == [
        {"lane": lane, "position": head.position, "height": head.height, "block_hash": head.block_hash.hex()}
        for lane, head in sorted(newest.items())
    ]
    assert exported_head(done.stdout.encode()).epoch == said["epoch"]
    assert [one.name for one in tmp_path.iterdir()] == ["log.db"]


def test_a_database_has_the_same_head_as_a_file_with_the_same_history(database: str, tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    heads = []
    for log in (path, database):
        sample.make_log(log, rounds=6)
        heads.append(json.loads(RUNNER.invoke(app, ["head", str(log)]).stdout))
    assert heads[0]["lanes"] == heads[1]["lanes"]


def test_any_name_of_a_file_will_do(tmp_path: Path) -> None:
    path = tmp_path / "a b%41?mode=memory#größe.db"
    sample.make_log(path, rounds=0)
    assert RUNNER.invoke(app, ["head", str(path)]).exit_code == 0
    assert [one.name for one in tmp_path.iterdir()] == [path.name]
