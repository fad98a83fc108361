"""`oncelog backup` and `oncelog restore` make complete copies, and a restored log gets a new epoch."""

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

from cli import sample_log
from cli.processes import Command
from cli.runner import COMMAND, RUNNER
from cli.server_process import oncelog
from oncelog.core.values import Request
from oncelog.errors import NotALogError
from oncelog.storage import backups
from oncelog.storage.backups import backup, restore
from oncelog.storage.sqlite import partial_copy
from oncelog.storage.sqlite.read_transaction import open_read_transaction
from oncelog.storage.verify.findings import StepProgress, VerificationSummary
from oncelog.storage.verify.verification import verify_log


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("backup") / "log.db"
    sample_log.make_log(path, rounds=8)
    return path


@pytest.fixture
def log(template: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(template, tmp_path / "log.db"))


LANES = 5
"""Each lane of the sample log gets a restore record."""


def names(directory: Path) -> set[str]:
    return {one.name for one in directory.iterdir()}


def verify(path: Path) -> VerificationSummary:
    *_, last = verify_log(path)
    assert isinstance(last, VerificationSummary), last
    return last


def epoch_of(path: Path) -> str:
    with open_read_transaction(str(path)) as (_, file):
        return file.epoch


def ignore_progress(_: StepProgress) -> None:
    pass


# --- backup -------------------------------------------------------------------------------------------


def test_backup_is_one_file_with_all_records_and_the_epoch(log: Path, tmp_path: Path) -> None:
    log.chmod(0o640)
    copy = tmp_path / "copy.db"
    done = RUNNER.invoke(COMMAND, ["backup", str(log), str(copy)])
    assert done.exit_code == 0, done.stderr
    assert names(tmp_path) == {"log.db", "copy.db"}
    found = verify(copy)
    assert found == verify(log)
    assert done.stdout.startswith(f"{found.records} records, {copy.stat().st_size} bytes in ")
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    assert copy.read_bytes()[18:20] == b"\x02\x02"  # the file uses write-ahead logging when it is opened
    sample_log.append(copy, sample_log.full_event(5000, ["orders"]))
    assert verify(copy).records == found.records + 1


def test_backup_includes_the_write_ahead_log_and_does_not_write_to_it(tmp_path: Path) -> None:
    path, copy = tmp_path / "log.db", tmp_path / "copy.db"
    files = path, Path(f"{path}-wal")
    records: list[int] = []

    def each() -> None:
        if not records or records[-1] < 20:
            before = [(file.stat().st_size, file.stat().st_mtime_ns) for file in files]
            records.append(backup(str(path), str(copy), ignore_progress, force=True).records)
            assert verify(copy).records == verify(path).records == records[-1]
            assert [(file.stat().st_size, file.stat().st_mtime_ns) for file in files] == before
            assert files[1].stat().st_size > 0
            assert not Path(f"{copy}-wal").exists()

    sample_log.make_log(path, rounds=5, each=each)
    assert records[-1] >= 20


async def test_backup_is_a_snapshot_while_another_connection_commits(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backups, "SLICE_PAGES", 4)
    before = verify(log)
    clock = sample_log.SetClock(sample_log.START_MS + 100 * sample_log.HOUR_MS)
    store = sample_log.open_store(log, clock)
    await store.open()
    loop = asyncio.get_running_loop()
    written = 0

    def write(_: StepProgress) -> None:
        nonlocal written
        written += 1
        clock.now_ms += 1
        item = sample_log.full_event(10_000 + written, ["orders"])
        asyncio.run_coroutine_threadsafe(store.commit([Request((item,))]), loop).result()

    try:
        copied = await asyncio.to_thread(backup, str(log), str(tmp_path / "copy.db"), write)
    finally:
        await store.close()
    assert copied.records == before.records
    assert written > 5
    assert verify(tmp_path / "copy.db") == before
    assert verify(log).records == before.records + written


WRITER = """
import asyncio, sys
from pathlib import Path
from cli import sample_log
from cli.processes import Command
from oncelog.core.values import Request

async def write():
    clock = sample_log.SetClock(sample_log.START_MS + 100 * sample_log.HOUR_MS)
    store = sample_log.open_store(Path(sys.argv[1]), clock)
    await store.open()
    for number in range(100_000, 200_000):
        clock.now_ms += 1
        await store.commit([Request((sample_log.full_event(number, ["orders"]),))])
        print(number, flush=True)

asyncio.run(write())
"""


def test_backup_is_consistent_while_another_process_commits(log: Path, tmp_path: Path) -> None:
    writer = Command(str(log), program=WRITER)
    assert writer.stdout is not None
    try:
        acknowledged = 0
        for number in range(3):
            acknowledged = int(writer.stdout.readline())
            copy = tmp_path / f"copy{number}.db"
            copied = backup(str(log), str(copy), ignore_progress)
            assert verify(copy).records == copied.records
    finally:
        writer.kill()
        writer.communicate()
    # The backup contains every commit that was acknowledged before it began.
    connection = sqlite3.connect(copy)
    found = connection.execute(
        "SELECT count(*) FROM oncelog_records WHERE key = ?", (acknowledged.to_bytes(16, "big"),)
    )
    assert found.fetchone() == (1,)
    connection.close()
    verify(log)


def test_backup_overwrites_a_file_only_with_force(log: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.db"
    copy.write_text("precious")
    for arguments, words in (
        ([str(copy)], "exists"),
        ([str(tmp_path), "--force"], "directory"),
        ([str(log), "--force"], "the log itself"),
        ([str(tmp_path / "nowhere" / "copy.db")], "cannot be written to"),
    ):
        done = RUNNER.invoke(COMMAND, ["backup", str(log), *arguments])
        assert done.exit_code == 2
        assert words in done.stderr
    assert copy.read_text() == "precious"
    wal = tmp_path / "copy.db-wal"
    wal.touch()
    assert "is open or was not closed" in RUNNER.invoke(COMMAND, ["backup", str(log), str(copy), "--force"]).stderr
    wal.unlink()
    assert RUNNER.invoke(COMMAND, ["backup", str(log), str(copy), "--force"]).exit_code == 0
    verify(copy)
    assert names(tmp_path) == {"log.db", "copy.db"}
    done = RUNNER.invoke(COMMAND, ["backup", str(tmp_path / "missing.db"), str(tmp_path / "new.db")])
    assert done.exit_code == 2
    assert names(tmp_path) == {"log.db", "copy.db"}


def test_interrupted_backup_leaves_no_files(log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backups, "SLICE_PAGES", 4)

    def interrupt(_: StepProgress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        backup(str(log), str(tmp_path / "copy.db"), interrupt)
    assert names(tmp_path) == {"log.db"}


KILLED = """
import os, signal, sys
from oncelog.storage import backups

def kill(_):
    os.kill(os.getpid(), signal.SIGKILL)

backups.SLICE_PAGES = 4
getattr(backups, sys.argv[1])(sys.argv[2], sys.argv[3], lambda progress: progress.done and kill(progress))
"""


def kill_during(command: str, log: Path, target: Path) -> None:
    """Start a copy in a process, and kill the process."""
    done = oncelog(command, str(log), str(target), program=KILLED)
    assert done.returncode == -signal.SIGKILL


def list_unfinished_copies(directory: Path) -> set[str]:
    return {name for name in names(directory) if name.endswith(".unfinished")}


@pytest.mark.parametrize("command", ["backup", "restore"])
def test_next_copy_removes_the_files_of_a_killed_one(log: Path, tmp_path: Path, command: str) -> None:
    target, other = tmp_path / "copy.db", tmp_path / "other.db"
    kill_during(command, log, target)
    kill_during(command, log, other)
    of_other, of_target = sorted(list_unfinished_copies(tmp_path), reverse=True)
    assert of_other.startswith(".other.db.")
    assert of_target.startswith(".copy.db.")
    shutil.copytree(tmp_path / of_target, tmp_path / ".copy.db.01234567.unfinished")
    done = RUNNER.invoke(COMMAND, [command, str(log), str(target)])
    assert done.exit_code == 0, done.stderr
    verify(target)
    assert list_unfinished_copies(tmp_path) == {of_other}  # belongs to a different target


def test_running_copy_is_not_removed_as_abandoned(log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backups, "SLICE_PAGES", 4)
    copy = tmp_path / "copy.db"
    created: list[backups.BackupResult] = []

    def make_another_backup(_: StepProgress) -> None:
        if not created:
            created.append(backup(str(log), str(copy), ignore_progress))
            verify(copy)

    assert backup(str(log), str(copy), make_another_backup, force=True) == created[0]
    verify(copy)
    assert names(tmp_path) == {"log.db", "copy.db"}


@pytest.mark.parametrize("stage", ["created", "opened", "locked by another"])
def test_copy_restarts_if_a_second_copy_removes_its_directory(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    """A second copy removes abandoned directories before the first one locks its new directory."""
    copy, real_mkdir, real_flock = tmp_path / "copy.db", Path.mkdir, fcntl.flock
    created: list[Path] = []
    others: list[int] = []

    def mkdir(self: Path, **options: Any) -> None:
        real_mkdir(self, **options)
        created.append(self)
        if stage == "created" and len(created) == 1:
            partial_copy._remove_abandoned(copy)

    def flock(descriptor: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", real_flock)
        if stage == "opened":
            partial_copy._remove_abandoned(copy)
        elif stage == "locked by another":
            others.append(os.open(created[0], os.O_RDONLY))
            real_flock(others[0], fcntl.LOCK_EX)
        real_flock(descriptor, operation)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    monkeypatch.setattr(fcntl, "flock", flock)
    backup(str(log), str(copy), ignore_progress)
    verify(copy)
    assert len(created) == 2
    for other in others:
        os.close(other)
    assert names(tmp_path) == {"log.db", "copy.db", *(created[0].name for _ in others)}


def test_cleanup_keeps_files_that_are_not_abandoned_copies(log: Path, tmp_path: Path) -> None:
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
    backup(str(log), str(tmp_path / "copy.db"), ignore_progress)
    assert names(tmp_path) == {*before, "copy.db"}
    assert (strange / "letter.txt").read_text() == "Dear Ann"
    assert (elsewhere / "copy.db").exists()


def test_copy_without_directory_locks_succeeds_and_removes_nothing(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill_during("backup", log, tmp_path / "copy.db")
    before = list_unfinished_copies(tmp_path)
    assert len(before) == 1

    def flock(_descriptor: int, _operation: int) -> None:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    monkeypatch.setattr(fcntl, "flock", flock)
    backup(str(log), str(tmp_path / "copy.db"), ignore_progress)
    verify(tmp_path / "copy.db")
    assert list_unfinished_copies(tmp_path) == before


def test_backup_is_synced_to_disk_before_it_is_renamed(
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
    backup(str(log), str(tmp_path / "copy.db"), ignore_progress)
    file, renamed, directory = done
    assert re.fullmatch(rf"sync {tmp_path.name}/\.copy\.db\.[0-9a-f]{{8}}\.unfinished/copy\.db", file)
    assert renamed == f"{file.removeprefix('sync ')} becomes copy.db"
    assert directory == f"sync {tmp_path.name}"


# --- restore ------------------------------------------------------------------------------------------


@pytest.mark.rule("CO-40")
@pytest.mark.parametrize("full", [[], ["--full"]])
def test_restored_log_has_a_new_epoch(log: Path, tmp_path: Path, full: list[str]) -> None:
    target = tmp_path / "restored.db"
    before = verify(log)
    done = RUNNER.invoke(COMMAND, ["restore", str(log), str(target), *full])
    assert done.exit_code == 0, done.stderr
    after = verify(target)
    assert after.records == before.records + LANES
    assert after.epoch != before.epoch
    assert epoch_of(log) == before.epoch
    assert f"old epoch: {before.epoch}\nnew epoch: {after.epoch}\n" in done.stdout
    assert "Readers of the old epoch receive history_changed" in done.stdout
    assert names(tmp_path) == {"log.db", "restored.db"}


def test_restore_keeps_the_replaced_log(log: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.db"
    backup(str(log), str(copy), ignore_progress)
    sample_log.append(log, sample_log.full_event(5000, ["orders"]))
    newer = verify(log)
    assert "--force" in RUNNER.invoke(COMMAND, ["restore", str(copy), str(log)]).stderr
    assert verify(log) == newer
    done = RUNNER.invoke(COMMAND, ["restore", str(copy), str(log), "--force"])
    assert done.exit_code == 0, done.stderr
    kept = tmp_path / "log.db.before-restore-1"
    assert f"the previous log is kept as {kept}\n" in done.stdout
    assert verify(kept) == newer
    assert verify(log).records == newer.records - 1 + LANES
    again = restore(str(copy), str(log), ignore_progress, force=True)
    assert again.kept == str(tmp_path / "log.db.before-restore-2")
    assert again.new_epoch != again.old_epoch == newer.epoch


def test_restore_does_not_apply_a_stray_write_ahead_log(log: Path, tmp_path: Path) -> None:
    target = tmp_path / "restored.db"
    stray = tmp_path / "restored.db-wal"
    stray.write_bytes(b"left behind")
    done = RUNNER.invoke(COMMAND, ["restore", str(log), str(target)])
    assert done.exit_code == 2
    assert "restored.db-wal exists" in done.stderr
    assert not target.exists()
    assert RUNNER.invoke(COMMAND, ["restore", str(log), str(target), "--force"]).exit_code == 0
    assert (tmp_path / "restored.db.before-restore-1-wal").read_bytes() == b"left behind"
    verify(target)


def test_restore_does_not_replace_an_open_log(log: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.db"
    backup(str(log), str(copy), ignore_progress)
    user = sqlite3.connect(log)
    assert user.execute("SELECT count(*) FROM oncelog_log").fetchone() == (1,)
    done = RUNNER.invoke(COMMAND, ["restore", str(copy), str(log), "--force"])
    assert done.exit_code == 2
    assert "open in another process" in done.stderr
    user.close()
    assert RUNNER.invoke(COMMAND, ["restore", str(copy), str(log), "--force"]).exit_code == 0


def test_restore_replaces_a_damaged_log(log: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.db"
    backup(str(log), str(copy), ignore_progress)
    for data in (b"", b"rubbish", log.read_bytes()[:5000], log.read_bytes()[:100] + bytes(9000)):
        log.write_bytes(data)
        restored = restore(str(copy), str(log), ignore_progress, force=True)
        assert restored.kept is not None
        assert Path(restored.kept).read_bytes() == data
        verify(log)


@pytest.mark.parametrize("force", [[], ["--force"]])
@pytest.mark.parametrize("mode", ["DELETE", "WAL"])
def test_restore_never_replaces_a_foreign_database(log: Path, tmp_path: Path, force: list[str], mode: str) -> None:
    target = tmp_path / "theirs.db"
    theirs = sqlite3.connect(target, isolation_level=None)
    theirs.execute(f"PRAGMA journal_mode = {mode}")
    theirs.execute("CREATE TABLE precious (id INTEGER)")
    before = {one.name: one.read_bytes() for one in tmp_path.iterdir()}
    done = RUNNER.invoke(COMMAND, ["restore", str(log), str(target), *force])
    assert done.exit_code == 2
    assert f"{target} is an SQLite database of another application" in done.stderr
    assert "Nothing was changed" in done.stderr
    assert {one.name: one.read_bytes() for one in tmp_path.iterdir()} == before
    theirs.close()


def test_restore_does_not_replace_a_foreign_database_created_meanwhile(log: Path, tmp_path: Path) -> None:
    target = tmp_path / "theirs.db"

    def create_foreign_database(_: StepProgress) -> None:
        theirs = sqlite3.connect(target, isolation_level=None)
        theirs.execute("CREATE TABLE IF NOT EXISTS precious (id INTEGER)")
        theirs.close()

    with pytest.raises(NotALogError, match="an SQLite database of another application"):
        restore(str(log), str(target), create_foreign_database, force=True)
    assert names(tmp_path) == {"log.db", "theirs.db"}


def test_damaged_backup_is_not_restored(log: Path, tmp_path: Path) -> None:
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
        done = RUNNER.invoke(COMMAND, ["restore", str(log), str(target), *options])
        assert done.exit_code == 2, statement
        assert done.stderr.startswith("oncelog: ")
        assert not target.exists()
    log.write_bytes(truth[:-8192])
    assert RUNNER.invoke(COMMAND, ["restore", str(log), str(target)]).exit_code == 2
    assert {one for one in names(tmp_path) if not one.startswith("log.db")} == set()


def test_restore_onto_the_backup_itself_is_refused(log: Path) -> None:
    done = RUNNER.invoke(COMMAND, ["restore", str(log), str(log), "--force"])
    assert done.exit_code == 2
    assert "the backup itself" in done.stderr
    verify(log)


# --- exit status and output ---------------------------------------------------------------------------


def test_interrupted_command_exits_with_130(log: Path) -> None:
    slow = (
        "import os, signal, oncelog.cli.verify as command\n"
        "def interrupted(*_):\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    yield from ()\n"
        "command.verify_log = interrupted\n"
        "from oncelog.cli import main\n"
        "main()\n"
    )
    done = oncelog("verify", str(log), program=slow)
    assert done.returncode == 128 + signal.SIGINT
    assert done.stderr == ""


def test_closed_output_pipe_ends_a_command_silently(log: Path) -> None:
    for command in (["head"], ["stats"], ["show", "0:1"], ["verify"]):
        reading, writing = os.pipe()
        os.close(reading)
        with Command(command[0], str(log), *command[1:], stdin=None, stdout=writing) as process:
            os.close(writing)
            assert process.communicate()[1] == ""
        assert process.returncode == 128 + signal.SIGPIPE  # not 0, which would mean that `verify` found a valid log


def test_command_with_closed_standard_output_does_nothing(log: Path, tmp_path: Path) -> None:
    for command in ("verify log.db", "show log.db 0:1", "backup log.db copy.db", "restore log.db new.db"):
        done = run_in_shell(f"{command} >&-", tmp_path)
        assert (done.returncode, done.stderr) == (74, "oncelog: standard output must be open\n")
    assert names(tmp_path) == {log.name}


def test_unwritable_standard_output_is_reported(log: Path) -> None:
    with open("/dev/full", "wb") as full, Command("stats", str(log), stdin=None, stdout=full) as process:  # noqa: PTH123
        _, errors = process.communicate()
    assert (process.returncode, errors) == (74, "oncelog: cannot continue: No space left on device\n")


@pytest.mark.parametrize("nowhere", ["2>/dev/full", "2>&-"])
def test_exit_status_is_kept_when_standard_error_is_unwritable(tmp_path: Path, nowhere: str) -> None:
    assert run_in_shell(f"stats missing.db {nowhere}", tmp_path).returncode == 2


def run_in_shell(command: str, directory: Path) -> subprocess.CompletedProcess[str]:
    shell = ["sh", "-c", f"'{sys.executable}' -m oncelog {command}"]
    # Without PYTHONUNBUFFERED, Python flushes its output at exit.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run(shell, capture_output=True, text=True, check=False, cwd=directory, env=environment)  # noqa: S603


class FullDisk(sqlite3.Connection):
    """A connection that limits the database to a few pages."""

    def execute(self, statement: str, *arguments: Any) -> sqlite3.Cursor:
        if statement == "PRAGMA synchronous = OFF":
            super().execute("PRAGMA max_page_count = 3")
        return super().execute(statement, *arguments)


@pytest.mark.parametrize("command", ["backup", "restore"])
def test_copy_to_a_full_disk_exits_with_74_and_leaves_no_files(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    real_connect = sqlite3.connect

    def connect(path: Any, **options: Any) -> sqlite3.Connection:
        return real_connect(path, **options) if options.get("uri") else real_connect(path, factory=FullDisk, **options)

    monkeypatch.setattr(sqlite3, "connect", connect)
    done = RUNNER.invoke(COMMAND, [command, str(log), str(tmp_path / "copy.db")])
    assert done.exit_code == 74
    assert done.stderr == f"oncelog: {tmp_path / 'copy.db'} cannot be read or written: database or disk is full\n"
    assert names(tmp_path) == {"log.db"}


@pytest.mark.parametrize("command", ["backup", "restore"])
def test_copy_above_the_file_size_limit_exits_with_74_and_leaves_nothing(
    log: Path, tmp_path: Path, command: str
) -> None:
    limited = (
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))\n"
        "from oncelog.cli import main\n"
        "main()\n"
    )
    done = oncelog(command, str(log), str(tmp_path / "copy.db"), program=limited)
    assert done.returncode == 74
    assert done.stderr == f"oncelog: {tmp_path / 'copy.db'} cannot be read or written: disk I/O error\n"
    assert names(tmp_path) == {"log.db"}


@pytest.mark.parametrize(
    ("number", "status"), [(errno.ENOSPC, 74), (errno.EDQUOT, 74), (errno.EIO, 74), (errno.EACCES, 2)]
)
def test_copy_whose_directory_cannot_be_created_is_refused(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, status: int
) -> None:
    def mkdir(self: Path, **_: Any) -> None:
        raise OSError(number, os.strerror(number), str(self))

    monkeypatch.setattr(Path, "mkdir", mkdir)
    done = RUNNER.invoke(COMMAND, ["backup", str(log), str(tmp_path / "copy.db")])
    assert done.exit_code == status
    assert done.stderr == f"oncelog: {tmp_path} cannot be written to: {os.strerror(number)}\n"
