"""`oncelog backup` and `oncelog restore`: a copy is whole or not there, and a restored log says that it is another."""

import asyncio
import os
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cli import sample
from oncelog.cli import app
from oncelog.core.values import Request
from oncelog.stores.sqlite import copying
from oncelog.stores.sqlite.copying import backup, restore
from oncelog.stores.sqlite.findings import Passed, Progress
from oncelog.stores.sqlite.looking import looking_at
from oncelog.stores.sqlite.verifying import verify_file

RUNNER = CliRunner()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("backup") / "log.db"
    sample.make_log(path, rounds=8)
    return path


@pytest.fixture
def log(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(made, tmp_path / "log.db"))


def names(directory: Path) -> set[str]:
    return {one.name for one in directory.iterdir()}


def passed(path: Path) -> Passed:
    *_, last = verify_file(path)
    assert isinstance(last, Passed), last
    return last


def epoch_of(path: Path) -> str:
    with looking_at(str(path)) as (_, file):
        return file.epoch


def silent(_: Progress) -> None:
    pass


# --- backup ------------------------------------------------------------------------------------------


def test_a_backup_is_one_file_with_everything_and_the_epoch(log: Path, tmp_path: Path) -> None:
    log.chmod(0o640)
    copy = tmp_path / "copy.db"
    done = RUNNER.invoke(app, ["backup", str(log), str(copy)])
    assert done.exit_code == 0, done.stderr
    assert names(tmp_path) == {"log.db", "copy.db"}
    found = passed(copy)
    assert found == passed(log)
    assert done.stdout.startswith(f"{found.records} records, {copy.stat().st_size} bytes in ")
    assert stat.S_IMODE(copy.stat().st_mode) == 0o640
    assert copy.read_bytes()[18:20] == b"\x02\x02"  # write-ahead logging, as soon as someone opens it
    sample.append(copy, sample.full_event(5000, ["orders"]))
    assert passed(copy).records == found.records + 1


def test_a_backup_holds_what_is_still_in_the_write_ahead_log(tmp_path: Path) -> None:
    path, copy = tmp_path / "log.db", tmp_path / "copy.db"
    records: list[int] = []

    def each() -> None:
        if not records or records[-1] < 20:
            records.append(backup(str(path), str(copy), silent, force=True).records)
            assert passed(copy).records == records[-1]
            assert Path(f"{path}-wal").stat().st_size > 0
            assert not Path(f"{copy}-wal").exists()

    sample.make_log(path, rounds=5, each=each)
    assert records[-1] >= 20


def test_a_backup_is_of_one_moment_while_another_connection_commits(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "SLICE_PAGES", 4)
    before = passed(log)

    async def race() -> int:
        clock = sample.SetClock(sample.START_MS + 100 * sample.HOUR_MS)
        store = sample.opened(log, clock)
        await store.open()
        loop = asyncio.get_running_loop()
        written = 0

        def write(_: Progress) -> None:
            nonlocal written
            written += 1
            clock.now_ms += 1
            item = sample.full_event(10_000 + written, ["orders"])
            asyncio.run_coroutine_threadsafe(store.commit([Request((item,))]), loop).result()

        try:
            copied = await asyncio.to_thread(backup, str(log), str(tmp_path / "copy.db"), write)
        finally:
            await store.close()
        assert copied.records == before.records
        return written

    written = asyncio.run(race())
    assert written > 5
    assert passed(tmp_path / "copy.db") == before
    assert passed(log).records == before.records + written


WRITER = """
import asyncio, sys
from pathlib import Path
from cli import sample
from oncelog.core.values import Request

async def write():
    clock = sample.SetClock(sample.START_MS + 100 * sample.HOUR_MS)
    store = sample.opened(Path(sys.argv[1]), clock)
    await store.open()
    for number in range(100_000, 200_000):
        clock.now_ms += 1
        await store.commit([Request((sample.full_event(number, ["orders"]),))])
        print(number, flush=True)

asyncio.run(write())
"""


def test_a_backup_is_whole_while_another_process_commits(log: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITER, str(log)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    writer = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)  # noqa: S603
    assert writer.stdout is not None
    try:
        told = 0
        for number in range(3):
            told = int(writer.stdout.readline())
            copy = tmp_path / f"copy{number}.db"
            copied = backup(str(log), str(copy), silent)
            assert passed(copy).records == copied.records
    finally:
        writer.kill()
        writer.communicate()
    # What a writer was told before the backup began is in it.
    connection = sqlite3.connect(copy)
    found = connection.execute("SELECT count(*) FROM oncelog_records WHERE key = ?", (told.to_bytes(16, "big"),))
    assert found.fetchone() == (1,)
    connection.close()
    passed(log)


def test_a_backup_overwrites_nothing_unless_told(log: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.db"
    copy.write_text("precious")
    for arguments, words in (
        ([str(copy)], "exists"),
        ([str(tmp_path), "--force"], "directory"),
        ([str(log), "--force"], "the log itself"),
        ([str(tmp_path / "nowhere" / "copy.db")], "cannot be written to"),
    ):
        done = RUNNER.invoke(app, ["backup", str(log), *arguments])
        assert done.exit_code == 2
        assert words in done.stderr
    assert copy.read_text() == "precious"
    wal = tmp_path / "copy.db-wal"
    wal.touch()
    assert "is open, or was not closed" in RUNNER.invoke(app, ["backup", str(log), str(copy), "--force"]).stderr
    wal.unlink()
    assert RUNNER.invoke(app, ["backup", str(log), str(copy), "--force"]).exit_code == 0
    passed(copy)
    assert names(tmp_path) == {"log.db", "copy.db"}
    done = RUNNER.invoke(app, ["backup", str(tmp_path / "missing.db"), str(tmp_path / "new.db")])
    assert done.exit_code == 2
    assert names(tmp_path) == {"log.db", "copy.db"}


def test_a_backup_that_is_interrupted_leaves_nothing(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "SLICE_PAGES", 4)

    def interrupt(_: Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        backup(str(log), str(tmp_path / "copy.db"), interrupt)
    assert names(tmp_path) == {"log.db"}


def test_a_backup_is_on_the_disk_before_it_has_its_name(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    real_fsync, real_replace = os.fsync, Path.replace

    def fsync(descriptor: int) -> None:
        done.append("sync " + Path(f"/proc/self/fd/{descriptor}").readlink().name)
        real_fsync(descriptor)

    def replace(self: Path, target: Any) -> Path:
        done.append(f"{self.name} becomes {target.name}")
        return real_replace(self, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", replace)
    backup(str(log), str(tmp_path / "copy.db"), silent)
    file, renamed, directory = done
    assert file.startswith("sync .copy.db.")
    assert renamed.endswith("becomes copy.db")
    assert directory == f"sync {tmp_path.name}"


# --- restore -----------------------------------------------------------------------------------------


@pytest.mark.rule("CO-40")
@pytest.mark.parametrize("full", [[], ["--full"]])
def test_a_restored_log_has_a_new_epoch(log: Path, tmp_path: Path, full: list[str]) -> None:
    target = tmp_path / "restored.db"
    before = passed(log)
    done = RUNNER.invoke(app, ["restore", str(log), str(target), *full])
    assert done.exit_code == 0, done.stderr
    after = passed(target)
    assert after.records == before.records
    assert after.epoch != before.epoch
    assert epoch_of(log) == before.epoch
    assert f"old epoch: {before.epoch}\nnew epoch: {after.epoch}\n" in done.stdout
    assert "Readers must not go on" in done.stdout
    assert names(tmp_path) == {"log.db", "restored.db"}


def test_a_restore_keeps_the_log_that_was_there(log: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.db"
    backup(str(log), str(copy), silent)
    sample.append(log, sample.full_event(5000, ["orders"]))
    newer = passed(log)
    assert "--force" in RUNNER.invoke(app, ["restore", str(copy), str(log)]).stderr
    assert passed(log) == newer
    done = RUNNER.invoke(app, ["restore", str(copy), str(log), "--force"])
    assert done.exit_code == 0, done.stderr
    kept = tmp_path / "log.db.before-restore-1"
    assert f"kept as {kept}" in done.stdout
    assert passed(kept) == newer
    assert passed(log).records == newer.records - 1
    again = restore(str(copy), str(log), silent, force=True)
    assert again.kept == str(tmp_path / "log.db.before-restore-2")
    assert again.new_epoch != again.old_epoch == newer.epoch


def test_a_stray_write_ahead_log_is_not_applied_to_a_restored_log(log: Path, tmp_path: Path) -> None:
    target = tmp_path / "restored.db"
    stray = tmp_path / "restored.db-wal"
    stray.write_bytes(b"left behind")
    done = RUNNER.invoke(app, ["restore", str(log), str(target)])
    assert done.exit_code == 2
    assert "restored.db-wal exists" in done.stderr
    assert not target.exists()
    assert RUNNER.invoke(app, ["restore", str(log), str(target), "--force"]).exit_code == 0
    assert (tmp_path / "restored.db.before-restore-1-wal").read_bytes() == b"left behind"
    passed(target)


def test_a_log_that_is_open_is_not_replaced(log: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.db"
    backup(str(log), str(copy), silent)
    user = sqlite3.connect(log)
    assert user.execute("SELECT count(*) FROM oncelog_log").fetchone() == (1,)
    done = RUNNER.invoke(app, ["restore", str(copy), str(log), "--force"])
    assert done.exit_code == 2
    assert "open in another process" in done.stderr
    user.close()
    assert RUNNER.invoke(app, ["restore", str(copy), str(log), "--force"]).exit_code == 0


def test_a_damaged_log_can_be_replaced(log: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.db"
    backup(str(log), str(copy), silent)
    for data in (b"", b"rubbish", log.read_bytes()[:5000], log.read_bytes()[:100] + bytes(9000)):
        log.write_bytes(data)
        restored = restore(str(copy), str(log), silent, force=True)
        assert restored.kept is not None
        assert Path(restored.kept).read_bytes() == data
        passed(log)


def test_a_bad_backup_is_not_restored(log: Path, tmp_path: Path) -> None:
    target = tmp_path / "restored.db"
    truth = log.read_bytes()
    changes = {
        "UPDATE oncelog_lanes SET block_hash = zeroblob(32) WHERE lane = 0": [],
        "UPDATE oncelog_lanes SET height = height + 1 WHERE lane = 1": [],
        "UPDATE oncelog_lanes SET height = height - 1 WHERE lane = 1": [],
        "DELETE FROM oncelog_records WHERE place = (SELECT max(place) FROM oncelog_records)": [],
        "DELETE FROM oncelog_blocks WHERE lane = 2": [],
        "DROP TABLE oncelog_rows": [],
        "UPDATE oncelog_records SET body = x'00' WHERE place = 1": ["--full"],
    }
    for statement, options in changes.items():
        log.write_bytes(truth)
        connection = sqlite3.connect(log)
        connection.execute(statement)
        connection.commit()
        connection.close()
        done = RUNNER.invoke(app, ["restore", str(log), str(target), *options])
        assert done.exit_code == 2, statement
        assert done.stderr.startswith("oncelog: ")
        assert not target.exists()
    log.write_bytes(truth[:-8192])
    assert RUNNER.invoke(app, ["restore", str(log), str(target)]).exit_code == 2
    assert {one for one in names(tmp_path) if not one.startswith("log.db")} == set()


def test_a_backup_is_not_restored_onto_itself(log: Path) -> None:
    done = RUNNER.invoke(app, ["restore", str(log), str(log), "--force"])
    assert done.exit_code == 2
    assert "the backup itself" in done.stderr
    passed(log)


# --- how commands end --------------------------------------------------------------------------------


def test_an_interrupt_ends_a_command_with_130(log: Path) -> None:
    slow = (
        "import os, signal, oncelog.cli.verify as command\n"
        "def interrupted(*_):\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    yield from ()\n"
        "command.verify_file = interrupted\n"
        "from oncelog.cli import main\n"
        "main()\n"
    )
    done = subprocess.run(  # noqa: S603
        [sys.executable, "-c", slow, "verify", str(log)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 128 + signal.SIGINT
    assert done.stderr == ""


def test_a_reader_that_has_enough_ends_a_command_quietly(log: Path) -> None:
    for command in (["head"], ["stats"], ["show", "0:1"], ["verify"]):
        process = subprocess.Popen(  # noqa: S603
            [sys.executable, "-m", "oncelog", command[0], str(log), *command[1:]],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        process.stderr.close()
        assert process.wait() == 0


@pytest.mark.parametrize("command", ["verify", "head", "backup", "restore", "show", "stats", "clock"])
def test_every_command_has_an_example(command: str) -> None:
    done = RUNNER.invoke(app, [command, "--help"])
    assert done.exit_code == 0
    assert "Example:" in done.stdout
    assert f"oncelog {command}" in done.stdout
