"""Continuous replication of a log to a backup target.

Litestream runs as a separate process. It copies each change of the write-ahead log to the target. Litestream's read
transaction prevents other processes from restarting the write-ahead log before its content is copied
(docs/decisions/0059).
"""

import fcntl
import hashlib
import http.client
import os
import socket
import sqlite3
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct

from oncelog.core.rules.leaps import find_last_commit_ms
from oncelog.errors import StoreError
from oncelog.file_modes import open_or_create
from oncelog.storage.litestream.program import (
    BackupError,
    build_error,
    check_reachable,
    redact,
    replace_file,
    start,
    write_config,
)
from oncelog.storage.litestream.recovery import check_same_log, get_marker
from oncelog.storage.litestream.target import BackupTarget, decode_replica
from oncelog.storage.metadata import count_records
from oncelog.storage.queries.records import load_gaps, load_heads
from oncelog.storage.sqlite.query_driver import run_query
from oncelog.storage.sqlite.read_transaction import open_existing, open_read_transaction
from oncelog.storage.verify.findings import ReportProgress

SNAPSHOT_INTERVAL_MS: Final = 24 * 3_600_000
"""Time between snapshots of the whole log in the target. A restore reads one snapshot and the changes after it."""
SYNC_TIMEOUT_S: Final = 60
REACHABLE_EVERY_S: Final = 3
"""Interval at which `sync`, while it waits for the target, checks whether the endpoint is reachable."""
_REQUEST_TIMEOUT_S: Final = 120
RESET_TIMEOUT_S: Final = 30
_RESET_BUSY_MS: Final = 100
_RESET_PAUSE_S: Final = 0.05
_POLL_PAUSE_S: Final = 0.05
_STATE_SUFFIX: Final = "-backup"
_LOCK_NAME: Final = "lock"
_CONFIG_NAME: Final = "litestream.yml"
_SOCKET_NAME: Final = "socket"
"""Relative to Litestream's working directory, because a socket path is limited to 107 bytes."""
_ERRORS_KEPT: Final = 20


class LogState(Struct, frozen=True):
    """Number of records in a log, and the time of the newest commit."""

    records: int
    newest_ms: int
    """Time of the newest commit, or of the log's creation if it has no records."""


class _LogLine(Struct):
    level: str = ""
    msg: str = ""
    error: str = ""


class _SyncAnswer(Struct):
    error: str = ""
    txid: int = 0
    replicated_txid: int = 0


def read_state(path: str) -> LogState:
    """Return the number of records in a log and the time of the newest commit."""
    with open_read_transaction(path) as (connection, metadata):
        heads = run_query(connection, load_heads)
        records = count_records(heads, run_query(connection, load_gaps))
        return LogState(records, find_last_commit_ms(heads.values(), metadata.created_ms))


class Replication:
    """A running replication. Use `replicate` to start it."""

    def __init__(
        self,
        path: Path,
        target: BackupTarget,
        process: "subprocess.Popen[bytes]",
        socket_path: Path,
        marker: Path,
        epoch: str,
    ) -> None:
        """Write the epoch to the file `marker` as soon as the target contains it."""
        self._path = path
        self._target = target
        self._process = process
        self._socket_path = socket_path
        self._marker = marker
        self._epoch = epoch
        self._errors: deque[str] = deque(maxlen=_ERRORS_KEPT)
        self._reader = threading.Thread(target=self._read_errors, name="oncelog-litestream", daemon=True)
        self._reader.start()

    def sync(self) -> None:
        """Wait until the target has everything that the log contains now. Raises BackupError."""
        self._errors.clear()
        wanted = self._request_sync().txid
        deadline = time.monotonic() + SYNC_TIMEOUT_S
        check_at = time.monotonic() + REACHABLE_EVERY_S
        while self._request_sync().replicated_txid < wanted:
            if self._errors:
                raise build_error(self._target, self._errors[-1])
            if time.monotonic() > check_at:
                check_reachable(self._target)
                check_at = time.monotonic() + REACHABLE_EVERY_S
            if time.monotonic() > deadline:
                raise BackupError(f"{self._target.name} has not confirmed the newest changes in {SYNC_TIMEOUT_S} s.")
            self.wait(_POLL_PAUSE_S)
        self._write_marker()

    def _write_marker(self) -> None:
        """Write the epoch to the marker, unless the marker has it. Raises BackupError."""
        content = self._epoch.encode()
        try:
            if not self._marker.exists() or self._marker.read_bytes() != content:
                replace_file(self._marker, content)
        except OSError as error:
            raise BackupError(f"{self._marker} cannot be written: {error.strerror}.") from error

    def _request_sync(self) -> _SyncAnswer:
        """Let Litestream read the write-ahead log, and return its position and that of the target.

        The request has neither `wait` nor `timeout`: with either of them, Litestream 0.5.17 ends its read transaction
        after the request, and other processes can then restart the write-ahead log while Litestream is reading it.
        """
        try:
            answer = self._request("/sync", {"path": str(self._path)})
        except OSError as error:
            self.check()
            raise BackupError(f"{self._target.name}: Litestream does not answer: {error}") from error
        if answer.error:
            raise build_error(self._target, answer.error)
        return answer

    def check(self) -> None:
        """Raise BackupError if Litestream has exited."""
        try:
            status = self._process.wait(0 if self._process.poll() is None else None)
        except subprocess.TimeoutExpired:
            return
        self._reader.join()
        raise build_error(self._target, self._errors[-1] if self._errors else f"Litestream exited with {status}")

    def wait(self, timeout_s: float) -> None:
        """Wait. Raises BackupError as soon as Litestream exits."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        self.check()

    def wait_for_start(self) -> None:
        """Wait until Litestream accepts requests. Raises BackupError if it exits."""
        while not self._socket_path.exists():
            self.wait(_POLL_PAUSE_S)

    def _request(self, operation: str, body: Any) -> _SyncAnswer:
        connection = _SocketConnection(self._socket_path)
        try:
            connection.request("POST", operation, msgspec.json.encode(body))
            return msgspec.json.decode(connection.getresponse().read(), type=_SyncAnswer)
        except (http.client.HTTPException, msgspec.MsgspecError) as error:
            raise BackupError(f"{self._target.name}: invalid answer from Litestream: {redact(str(error))}") from error
        finally:
            connection.close()

    def _read_errors(self) -> None:
        """Read Litestream's log output, because a full pipe would block it, and keep the newest errors."""
        assert self._process.stderr is not None  # noqa: S101
        for line in self._process.stderr:
            text = line.decode(errors="replace").strip()
            try:
                entry = msgspec.json.decode(line, type=_LogLine)
            except msgspec.MsgspecError:
                if text.startswith("Error: "):
                    self._errors.append(text.removeprefix("Error: "))
                continue
            if entry.level == "ERROR":
                self._errors.append(f"{entry.msg}: {entry.error}")


class _SocketConnection(http.client.HTTPConnection):
    """HTTP over a local socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=_REQUEST_TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        """Connect to the socket."""
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        directory = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self.sock.connect(f"/proc/self/fd/{directory}/{self._path.name}")
        finally:
            os.close(directory)


@contextmanager
def replicate(
    log: str, target: BackupTarget, keep_ms: int, report: ReportProgress, *, take_over: bool = False
) -> Iterator[Replication]:
    """Replicate a log for the duration of the block. Before it ends, call `Replication.sync` to copy the remaining
    changes.

    The target keeps changes for `keep_ms`, for restores to an earlier time. With `take_over`, it may contain an epoch
    that the log has ended.

    Raises BackupError, and StoreError if another process is replicating the log or the target contains commits that the
    log does not have.
    """
    path = Path(log).resolve()
    read_state(log)  # raises an error for a missing file or another one, before the directory next to it is created
    with _lock_state_directory(path) as directory:
        state = get_target_state(log, target)
        epoch = check_same_log(target, str(path), state, report, take_over=take_over)
        config, socket_path = directory / _CONFIG_NAME, directory / _SOCKET_NAME
        socket_path.unlink(missing_ok=True)  # left behind by a killed run
        write_config(config, _build_config(path, target, state, keep_ms))
        _reset_wal(str(path))
        arguments = ("replicate", "-config", config, "-no-expand-env")
        with start(*arguments, cwd=directory, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
            try:
                replication = Replication(path, target, process, socket_path, get_marker(state), epoch)
                replication.wait_for_start()
                yield replication
            finally:
                # Kill Litestream: after other signals, it ends its read transaction before it copies the remaining
                # changes, and can miss commits. The target is consistent after every uploaded change.
                process.kill()
                process.wait()
                socket_path.unlink(missing_ok=True)
                _remove_wal(str(path))


def _build_config(path: Path, target: BackupTarget, state: Path, keep_ms: int) -> dict[str, Any]:
    interval_ms = min(SNAPSHOT_INTERVAL_MS, keep_ms)
    return {
        "logging": {"level": "warn", "type": "json", "stderr": True},
        "socket": {"enabled": True, "path": _SOCKET_NAME, "permissions": 0o600},
        "snapshot": {
            # A restore needs a snapshot that is older than the requested time.
            "interval": f"{interval_ms}ms",
            "retention": f"{keep_ms + interval_ms}ms",
        },
        "dbs": [{"path": str(path), "meta-path": str(state), "replica": target.replica}],
    }


def find_configured_target(log: str) -> BackupTarget | None:
    """Return the target to which a log was last replicated on this machine, or None if it is unknown."""
    config = _get_state_directory(Path(log).resolve()) / _CONFIG_NAME
    try:
        return decode_replica(msgspec.json.decode(config.read_bytes())["dbs"][0]["replica"])
    except (OSError, msgspec.MsgspecError, KeyError, TypeError, IndexError):
        return None


def get_target_state(log: str, target: BackupTarget) -> Path:
    """Return the directory in which Litestream keeps its position in a target.

    Each target has a separate directory, because a position in one target is meaningless in another.
    """
    name = hashlib.sha256(target.name.encode()).hexdigest()[:16]
    return _get_state_directory(Path(log).resolve()) / name


def is_replicating(log: str) -> bool:
    """Return whether a process on this machine is replicating a log."""
    connection = _SocketConnection(_get_state_directory(Path(log).resolve()) / _SOCKET_NAME)
    try:
        connection.connect()
    except OSError:
        return False
    finally:
        connection.close()
    return True


def _get_state_directory(path: Path) -> Path:
    return path.with_name(f".{path.name}{_STATE_SUFFIX}")


@contextmanager
def _lock_state_directory(path: Path) -> Iterator[Path]:
    """Yield the directory next to the log in which Litestream keeps changes that it has not copied yet.

    A lock prevents a second Litestream from running: each would mistake the other's checkpoints for lost changes.
    """
    directory = _get_state_directory(path)
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        lock = open_or_create(directory / _LOCK_NAME, os.O_RDWR)
    except OSError as error:
        raise StoreError(f"{directory} cannot be written to: {error.strerror}") from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise StoreError(
                f"{path} is being backed up by another `oncelog backup`. Only one may run for each log."
            ) from None
        yield directory
    finally:
        os.close(lock)


def _reset_wal(path: str) -> None:
    """Move the write-ahead log into the file and empty it, so that Litestream begins with a snapshot.

    Litestream continues from its last position if that position still looks valid. It then misses commits that were
    made while it was not running, if the write-ahead log has been restarted in the meantime and does not reach the
    position yet. An empty write-ahead log has no valid position.
    """
    deadline = time.monotonic() + RESET_TIMEOUT_S
    with open_existing(path, query_only=False) as connection:
        connection.execute(f"PRAGMA busy_timeout = {_RESET_BUSY_MS}")
        while _is_checkpoint_blocked(connection):
            if time.monotonic() > deadline:
                raise StoreError(
                    f"{path}: a reader has kept the write-ahead log in use for {RESET_TIMEOUT_S} s, for example "
                    "`oncelog verify` or a transaction of the application. Try again when it has ended."
                )
            time.sleep(_RESET_PAUSE_S)


def _remove_wal(path: str) -> None:
    """Let SQLite move the write-ahead log that Litestream leaves behind into the file, unless a process has the log
    open."""
    with suppress(StoreError), open_existing(path):
        pass


def _is_checkpoint_blocked(connection: sqlite3.Connection) -> bool:
    try:
        return bool(connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0])
    except sqlite3.OperationalError as error:
        if not (error.sqlite_errorname or "").startswith("SQLITE_BUSY"):
            raise
        return True
