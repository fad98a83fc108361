"""Checks of a log in a file, and of the disk that it is on."""

import os
import shlex
import sqlite3
from pathlib import Path
from typing import Final

from msgspec import Struct

from oncelog.cli.clock import check_clock
from oncelog.cli.doctor.database import judge_clock, judge_older_schema, judge_size
from oncelog.cli.doctor.findings import Check, Finding, format_bytes, format_count, ok, problem, warning
from oncelog.engine.write_gate import DiskLimits
from oncelog.file_modes import OWNER_ONLY, find_loose_mode
from oncelog.storage.inspect.sqlite import FileView
from oncelog.storage.litestream.replication import read_state
from oncelog.storage.metadata import LogMetadata
from oncelog.storage.sqlite.database_file import SCHEMA_VERSION
from oncelog.storage.sqlite.moved_marker import load_marker
from oncelog.storage.sqlite.read_transaction import open_read_transaction

WAL_BYTES_MAX: Final = 256 * 2**20
"""Size of a write-ahead log that a long read or a stopped process has probably kept from being emptied. A commit
normally empties it at 16 MB."""
FREE_MARGIN: Final = 2
"""Free space below this multiple of the limit is reported."""
NETWORK_FILE_SYSTEMS: Final = frozenset(
    {"9p", "afs", "ceph", "cifs", "fuse.glusterfs", "fuse.sshfs", "glusterfs", "lustre", "nfs", "nfs4", "smb3", "smbfs"}
)
_MOUNTS: Final = Path("/proc/self/mounts")


class FileExpectations(Struct, frozen=True):
    """Expected properties of a log file, from the server's settings or by default."""

    disk: DiskLimits
    jump_ms_max: int
    file_mode: int | None = None
    """Mode of a server's file. None for an embedded log, which may belong to a group."""
    is_server: bool = False
    """Whether a server refuses new writes at the disk limits, and creates a missing file."""


def check_log_file(path: str, expected: FileExpectations) -> Check:
    """Check the file, its permissions, its clock and its disk."""
    file = Path(path)
    if not file.parent.is_dir():
        yield problem("store", f"the directory {file.parent} does not exist", "Create it.")
        return
    yield from _check_disk(file, expected)
    yield judge_file_system(file, _MOUNTS.read_text(encoding="utf-8", errors="replace") if _MOUNTS.exists() else "")
    if not file.exists() and expected.is_server:
        yield ok("store", f"{path} does not exist yet: the server creates it")
        return
    yield from _check_content(path, expected.jump_ms_max)
    yield _check_mode(path, OWNER_ONLY | 0o070 if expected.file_mode is None else expected.file_mode)
    if expected.disk.store_bytes_max and file.exists():
        yield judge_size(file.stat().st_size, expected.disk.store_bytes_max)


def _check_content(path: str, jump_ms_max: int) -> Check:
    with open_read_transaction(path, allow_older=True) as (connection, metadata):
        if metadata.schema_version < SCHEMA_VERSION:
            yield judge_older_schema(path, metadata.schema_version, SCHEMA_VERSION)
            return
        marker = load_marker(connection)
        if marker is not None:
            message = f"{path} has been moved to {marker.target}, and accepts no more writes"
            yield problem("store", message, "Use the log there.")
            return
        yield from _check_connection(connection, path, metadata, jump_ms_max)
    records = read_state(path).records
    yield ok(
        "store",
        f"{path} is a log: epoch {metadata.epoch}, schema {metadata.schema_version}, {format_count(records, 'record')}",
    )


def _check_connection(connection: sqlite3.Connection, path: str, metadata: LogMetadata, jump_ms_max: int) -> Check:
    (mode,) = connection.execute("PRAGMA journal_mode").fetchone()
    if mode == "wal":
        yield ok("journal_mode", "write-ahead logging is on")
    else:
        yield warning(
            "journal_mode",
            f"another program has set the journal mode to {mode}: commits are slower, and readers block writers",
            "Restart the programs that use the log. Oncelog sets the mode to wal when it opens the log for writing.",
        )
    status = FileView(connection, path, metadata).get_clock_status()
    has_jumped, sentence = check_clock(status, jump_ms_max)
    yield judge_clock(has_jumped=has_jumped, is_behind=status.newest_ms > status.now.time_ms, sentence=sentence)


def _check_mode(path: str, allowed: int) -> Finding:
    loose = find_loose_mode(path, allowed)
    if loose is not None:
        return warning("permissions", *loose)
    return ok("permissions", f"{path} is not accessible to other users")


def _check_disk(file: Path, expected: FileExpectations) -> Check:
    found = os.statvfs(file.parent)
    wal = Path(f"{file}-wal")
    wal_bytes = wal.stat().st_size if wal.exists() else 0
    yield judge_free_space(found.f_bavail * found.f_frsize - wal_bytes, expected)
    if wal_bytes > WAL_BYTES_MAX:
        yield warning(
            "disk",
            f"the write-ahead log {wal} has {format_bytes(wal_bytes)}",
            "Look for a long read (oncelog verify, a backup, a transaction of the application), and let it end.",
        )


def judge_free_space(free: int, expected: FileExpectations) -> Finding:
    """Return the finding for the free bytes of a log's disk, without the bytes that the write-ahead log will need."""
    lowest = expected.disk.free_bytes_min
    text = f"{format_bytes(max(0, free))} are free for the log"
    if free < lowest and expected.is_server:
        message = f"{text}, fewer than disk.free_bytes_min ({format_bytes(lowest)}), so the server refuses new writes"
        return problem("disk", message, "Free space, or enlarge the disk.")
    if free < FREE_MARGIN * lowest:
        return warning("disk", text, "Free space, or enlarge the disk.")
    return ok("disk", text)


def judge_file_system(file: Path, mounts: str) -> Finding:
    """Return the finding for the file system of a log. `mounts` is the content of /proc/self/mounts."""
    directory, kind, longest = file.parent.resolve(), "unknown", -1
    for line in mounts.splitlines():
        _, place, found, *_ = line.split()
        # Spaces in the path are escaped in octal.
        mount = Path(place.encode().decode("unicode_escape"))
        if directory.is_relative_to(mount) and len(mount.parts) >= longest:
            kind, longest = found, len(mount.parts)
    if kind in NETWORK_FILE_SYSTEMS:
        return problem(
            "file_system",
            f"{file} is on a network file system ({kind}), which does not have the locks that SQLite needs",
            f"Move the log to a local disk: oncelog backup {shlex.quote(str(file))} LOCAL-FILE. Or use PostgreSQL.",
        )
    return ok("file_system", f"the file system is {kind}")
