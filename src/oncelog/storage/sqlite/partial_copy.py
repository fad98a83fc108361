"""Unfinished copies: where a copy is kept until it gets its final name, and how abandoned copies are removed."""

import fcntl
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from oncelog.errors import StoreUnavailableError

SIDE_FILE_SUFFIXES: Final = ("-wal", "-shm", "-journal")
"""Suffixes of files that SQLite keeps next to a database and applies to any file of that name."""
_COPY_NAME: Final = "copy.db"
RECOVERED_NAMES: Final = ("newest.db", "earlier.db", "probe.db", "litestream.yml")
"""Names of other files that a restore may keep next to the copy (`storage.litestream.recovery`)."""
_DOWNLOAD_SUFFIX: Final = ".tmp"
"""Suffix that Litestream gives to a file while it writes it."""


@contextmanager
def open_partial_copy(target: Path) -> Iterator[Path]:
    """Yield a path for the copy in a new directory next to the target, from which it can be renamed to the target.

    The copying process locks the directory, so the next copy recognises abandoned directories and removes them. An
    error removes everything. Raises StoreUnavailableError.
    """
    with suppress(OSError):  # abandoned copies must not prevent a new one
        _remove_abandoned(target)
    try:
        directory, lock = _create_locked_directory(target)
    except OSError as error:
        raise StoreUnavailableError(f"{target.parent} cannot be written to: {error.strerror}") from error
    try:
        yield directory / _COPY_NAME
    finally:
        _remove(directory)
        os.close(lock)


def _create_locked_directory(target: Path) -> tuple[Path, int]:
    while True:
        directory = target.with_name(f".{target.name}.{secrets.token_hex(4)}.unfinished")
        directory.mkdir(mode=0o700)
        with suppress(FileNotFoundError, BlockingIOError):  # another process removed the directory before the lock
            lock = _open_directory(directory)
            try:
                _lock(lock)
                directory.stat()
            except BaseException:
                os.close(lock)
                raise
            return directory, lock


def _remove_abandoned(target: Path) -> None:
    """Remove the directories that no process has locked.

    On file systems without such locks, all directories are kept.
    """
    copy_pattern = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{8}}\.unfinished")
    for entry in target.parent.iterdir():
        if not copy_pattern.fullmatch(entry.name):
            continue
        with suppress(OSError):
            lock = _open_directory(entry)
            try:
                if _lock(lock):
                    _remove(entry)
            finally:
                os.close(lock)


def _open_directory(directory: Path) -> int:
    return os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)


def _lock(descriptor: int) -> bool:
    """Lock a directory. Returns False if the file system has no such locks (NFS). Raises BlockingIOError if another
    process has locked the directory.

    The lock is on the directory rather than on the file in it, where flock could interfere with SQLite's locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        return False
    return True


def _remove(directory: Path) -> None:
    """Remove the files of a copy or a restore, then the directory if it is empty."""
    for name in (_COPY_NAME, *RECOVERED_NAMES):
        for suffix in ("", _DOWNLOAD_SUFFIX, *SIDE_FILE_SUFFIXES):
            (directory / f"{name}{suffix}").unlink(missing_ok=True)
    with suppress(OSError):  # the directory contains other files
        directory.rmdir()
