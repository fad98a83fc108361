"""`oncelog head` prints the newest hash of every lane."""

import json
from pathlib import Path

from cli import sample_log
from cli.runner import COMMAND, RUNNER
from oncelog.storage.verify.findings import decode_exported_head


def test_head_prints_the_newest_hash_of_every_lane(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    decided = sample_log.make_log(path, rounds=6)
    done = RUNNER.invoke(COMMAND, ["head", str(path)])
    assert done.exit_code == 0
    report = json.loads(done.stdout)
    assert report.keys() == {"epoch", "lanes"}
    newest = {lane: head for one in decided for lane, head in one.changes.heads.items()}
    assert report["lanes"] == [
        {"lane": lane, "position": head.position, "height": head.height, "block_hash": head.block_hash.hex()}
        for lane, head in sorted(newest.items())
    ]
    assert decode_exported_head(done.stdout.encode()).epoch == report["epoch"]
    assert [one.name for one in tmp_path.iterdir()] == ["log.db"]


def test_database_and_file_with_equal_histories_have_equal_heads(database: str, tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    heads = []
    for log in (path, database):
        sample_log.make_log(log, rounds=6)
        heads.append(json.loads(RUNNER.invoke(COMMAND, ["head", str(log)]).stdout))
    assert heads[0]["lanes"] == heads[1]["lanes"]


def test_head_accepts_any_file_name(tmp_path: Path) -> None:
    path = tmp_path / "a b%41?mode=memory#größe.db"
    sample_log.make_log(path, rounds=0)
    assert RUNNER.invoke(COMMAND, ["head", str(path)]).exit_code == 0
    assert [one.name for one in tmp_path.iterdir()] == [path.name]
