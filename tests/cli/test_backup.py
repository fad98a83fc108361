"""`oncelog backup` and `oncelog restore`: a copy is whole or not there, and a restored log says that it is another."""

import asyncio
import errno
import fcntl
import os
import re
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
from oncelog.errors import NotALogError
from oncelog.stores.sqlite import copying, unfinished
from oncelog.stores.sqlite.copying import backup, restore
from oncelog.stores.sqlite.looking import looking_at
from oncelog.stores.sqlite.verifying import verify_file
from oncelog.stores.verifying.findings import Passed, Progress

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


KILLED = """
import os, signal, sys
from oncelog.stores.sqlite import copying

def kill(_):
    os.kill(os.getpid(), signal.SIGKILL)

copying.SLICE_PAGES = 4
getattr(copying, sys.argv[1])(sys.argv[2], sys.argv[3], lambda progress: progress.done and kill(progress))
"""


def killed(command: str, log: Path, target: Path) -> None:
    """Begins a copy and kills its maker."""
    done = subprocess.run([sys.executable, "-c", KILLED, command, str(log), str(target)], check=False)  # noqa: S603
    assert done.returncode == -signal.SIGKILL


def unfinished_in(directory: Path) -> set[str]:
    return {name for name in names(directory) if name.endswith(".unfinished")}


@pytest.mark.parametrize("command", ["backup", "restore"])
def test_what_a_killed_copy_left_is_removed_by_the_next_one(log: Path, tmp_path: Path, command: str) -> None:
    target, other = tmp_path / "copy.db", tmp_path / "other.db"
    killed(command, log, target)
    killed(command, log, other)
    of_other, of_target = sorted(unfinished_in(tmp_path), reverse=True)
    assert of_other.startswith(".other.db.")
    assert of_target.startswith(".copy.db.")
    shutil.copytree(tmp_path / of_target, tmp_path / ".copy.db.01234567.unfinished")
    done = RUNNER.invoke(app, [command, str(log), str(target)])
    assert done.exit_code == 0, done.stderr
    passed(target)
    assert unfinished_in(tmp_path) == {of_other}  # for which nobody has asked


def test_a_copy_that_is_being_made_is_not_taken_for_one_that_was_left(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "SLICE_PAGES", 4)
    copy = tmp_path / "copy.db"
    made: list[copying.Copied] = []

    def make_another(_: Progress) -> None:
        if not made:
            made.append(backup(str(log), str(copy), silent))
            passed(copy)

    assert backup(str(log), str(copy), make_another, force=True) == made[0]
    passed(copy)
    assert names(tmp_path) == {"log.db", "copy.db"}


@pytest.mark.parametrize("moment", ["made", "opened", "looked at"])
def test_a_copy_that_was_taken_for_one_that_was_left_begins_again(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Somebody looks for what was left between the moment when its directory is there and that when it is locked."""
    copy, real_mkdir, real_flock = tmp_path / "copy.db", Path.mkdir, fcntl.flock
    made: list[Path] = []
    others: list[int] = []

    def mkdir(self: Path, **options: Any) -> None:
        real_mkdir(self, **options)
        made.append(self)
        if moment == "made" and len(made) == 1:
            unfinished._remove_abandoned(copy)

    def flock(descriptor: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", real_flock)
        if moment == "opened":
            unfinished._remove_abandoned(copy)
        elif moment == "looked at":
            others.append(os.open(made[0], os.O_RDONLY))
            real_flock(others[0], fcntl.LOCK_EX)
        real_flock(descriptor, operation)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    monkeypatch.setattr(fcntl, "flock", flock)
    backup(str(log), str(copy), silent)
    passed(copy)
    assert len(made) == 2
    for other in others:
        os.close(other)
    assert names(tmp_path) == {"log.db", "copy.db", *(made[0].name for _ in others)}


def test_nothing_is_removed_that_is_not_a_copy_of_ours(log: Path, tmp_path: Path) -> None:
    strange = tmp_path / ".copy.db.01234567.unfinished"
    strange.mkdir()
    (strange / "letter.txt").write_text("Dear Ann")
    for other in (".copy.db.unfinished", "copy.db.01234567.unfinished", ".copy.db.0123456g.unfinished"):
        (tmp_path / other).mkdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "copy.db").touch()
    (tmp_path / ".copy.db.89abcdef.unfinished").symlink_to(elsewhere)
    (tmp_path / ".copy.db.89abcde0.unfinished").write_text("a file")
    before = names(tmp_path)
    backup(str(log), str(tmp_path / "copy.db"), silent)
    assert names(tmp_path) == {*before, "copy.db"}
    assert (strange / "letter.txt").read_text() == "Dear Ann"
    assert (elsewhere / "copy.db").exists()


def test_where_directories_cannot_be_locked_copies_are_made_and_nothing_is_removed(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed("backup", log, tmp_path / "copy.db")
    before = unfinished_in(tmp_path)
    assert len(before) == 1

    def flock(_descriptor: int, _operation: int) -> None:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    monkeypatch.setattr(fcntl, "flock", flock)
    backup(str(log), str(tmp_path / "copy.db"), silent)
    passed(tmp_path / "copy.db")
    assert unfinished_in(tmp_path) == before


def test_a_backup_is_on_the_disk_before_it_has_its_name(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    real_fsync, real_replace = os.fsync, Path.replace

    def fsync(descriptor: int) -> None:
        synced = Path(f"/proc/self/fd/{descriptor}").readlink()
        done.append(f"sync {synced.relative_to(tmp_path.parent)}")
        real_fsync(descriptor)

    def replace(self: Path, target: Any) -> Path:
        done.append(f"{self.relative_to(tmp_path.parent)} becomes {target.name}")
        return real_replace(self, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", replace)
    backup(str(log), str(tmp_path / "copy.db"), silent)
    file, renamed, directory = done
    assert re.fullmatch(rf"sync {tmp_path.name}/\.copy\.db\.[0-9a-f]{{8}}\.unfinished/copy\.db", file)
    assert renamed == f"{file.removeprefix('sync ')} becomes copy.db"
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
    assert f"what was there is kept as {kept}\n" in done.stdout
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


@pytest.mark.parametrize("force", [[], ["--force"]])
@pytest.mark.parametrize("mode", ["DELETE", "WAL"])
def test_a_database_of_somebody_else_is_never_replaced(log: Path, tmp_path: Path, force: list[str], mode: str) -> None:
    target = tmp_path / "theirs.db"
    theirs = sqlite3.connect(target, isolation_level=None)
    theirs.execute(f"PRAGMA journal_mode = {mode}")
    theirs.execute("CREATE TABLE precious (id INTEGER)")
    before = {one.name: one.read_bytes() for one in tmp_path.iterdir()}
    done = RUNNER.invoke(app, ["restore", str(log), str(target), *force])
    assert done.exit_code == 2
    assert f"{target} is an SQLite database, but not a log of Oncelog's" in done.stderr
    assert "Nothing was changed" in done.stderr
    assert {one.name: one.read_bytes() for one in tmp_path.iterdir()} == before
    theirs.close()


def test_a_database_of_somebody_else_that_came_meanwhile_is_not_replaced_either(log: Path, tmp_path: Path) -> None:
    target = tmp_path / "theirs.db"

    def come(_: Progress) -> None:
        theirs = sqlite3.connect(target, isolation_level=None)
        theirs.execute("CREATE TABLE IF NOT EXISTS precious (id INTEGER)")
        theirs.close()

    with pytest.raises(NotALogError, match="not a log of Oncelog's"):
        restore(str(log), str(target), come, force=True)
    assert names(tmp_path) == {"log.db", "theirs.db"}


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
        "import os, signal, oncelog.stores.sqlite.inspecting as inspecting\n"
        # Whoever starts the tests in the background of a shell has it ignored, and the child inherits that.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "def interrupted(*_):\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    yield from ()\n"
        "inspecting.verify_file = interrupted\n"
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
        assert process.wait() == 128 + signal.SIGPIPE  # not 0, with which `verify` says that nothing is wrong


def test_nothing_is_done_while_standard_output_is_closed(log: Path, tmp_path: Path) -> None:
    for command in ("verify log.db", "show log.db 0:1", "backup log.db copy.db", "restore log.db new.db"):
        done = in_a_shell(f"{command} >&-", tmp_path)
        assert (done.returncode, done.stderr) == (74, "oncelog: standard output must be open\n")
    assert names(tmp_path) == {log.name}


def test_output_that_cannot_be_written_is_a_clear_error(log: Path, tmp_path: Path) -> None:
    done = in_a_shell(f"stats {log.name} >/dev/full", tmp_path)
    assert (done.returncode, done.stderr) == (74, "oncelog: cannot go on: No space left on device\n")


@pytest.mark.parametrize("nowhere", ["2>/dev/full", "2>&-"])
def test_an_error_that_nobody_hears_is_told_by_the_status(tmp_path: Path, nowhere: str) -> None:
    assert in_a_shell(f"stats missing.db {nowhere}", tmp_path).returncode == 2


def in_a_shell(command: str, directory: Path) -> subprocess.CompletedProcess[str]:
    shell = ["sh", "-c", f"'{sys.executable}' -m oncelog {command}"]
    return subprocess.run(shell, capture_output=True, text=True, check=False, cwd=directory)  # noqa: S603


class FullDisk(sqlite3.Connection):
    """Takes a few pages and no more, as SQLite has it."""

    def execute(self, statement: str, *arguments: Any) -> sqlite3.Cursor:
        if statement == "PRAGMA synchronous = OFF":
            super().execute("PRAGMA max_page_count = 3")
        return super().execute(statement, *arguments)


@pytest.mark.parametrize("command", ["backup", "restore"])
def test_a_full_disk_ends_a_copy_with_74_and_leaves_nothing(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    real_connect = sqlite3.connect

    def connect(path: Any, **options: Any) -> sqlite3.Connection:
        return real_connect(path, **options) if options.get("uri") else real_connect(path, factory=FullDisk, **options)

    monkeypatch.setattr(sqlite3, "connect", connect)
    done = RUNNER.invoke(app, [command, str(log), str(tmp_path / "copy.db")])
    assert done.exit_code == 74
    assert done.stderr == f"oncelog: {tmp_path / 'copy.db'} cannot be read or written: database or disk is full\n"
    assert names(tmp_path) == {"log.db"}


@pytest.mark.parametrize("command", ["backup", "restore"])
def test_a_copy_that_cannot_grow_ends_with_74_and_leaves_nothing(log: Path, tmp_path: Path, command: str) -> None:
    limited = (
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))\n"
        "from oncelog.cli import main\n"
        "main()\n"
    )
    done = subprocess.run(  # noqa: S603
        [sys.executable, "-c", limited, command, str(log), str(tmp_path / "copy.db")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 74
    assert done.stderr == f"oncelog: {tmp_path / 'copy.db'} cannot be read or written: disk I/O error\n"
    assert names(tmp_path) == {"log.db"}


@pytest.mark.parametrize(
    ("number", "status"), [(errno.ENOSPC, 74), (errno.EDQUOT, 74), (errno.EIO, 74), (errno.EACCES, 2)]
)
def test_a_directory_that_cannot_be_made_ends_a_copy(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, status: int
) -> None:
    def mkdir(self: Path, **_: Any) -> None:
        raise OSError(number, os.strerror(number), str(self))

    monkeypatch.setattr(Path, "mkdir", mkdir)
    done = RUNNER.invoke(app, ["backup", str(log), str(tmp_path / "copy.db")])
    assert done.exit_code == status
    assert done.stderr == f"oncelog: {tmp_path} cannot be written to: {os.strerror(number)}\n"


@pytest.mark.parametrize("command", ["verify", "head", "backup", "restore", "show", "stats", "clock"])
def test_every_command_has_an_example(command: str) -> None:
    done = RUNNER.invoke(app, [command, "--help"])
    assert done.exit_code == 0
    assert "Example:" in done.stdout
    assert f"oncelog {command}" in done.stdout
