"""Unfinished copies: where a copy is written before it has its name, and the removal of abandoned ones."""

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
"""What SQLite keeps beside a file and would apply to any file of that name."""
_COPY_NAME: Final = "copy.db"


@contextmanager
def open_partial_copy(target: Path) -> Iterator[Path]:
    """A file to be made, in a directory of its own beside the target, from which it can be renamed to it.

    The directory is locked as long as its maker lives, so that whoever makes the next copy can tell one that nobody
    will finish, and removes it. Nothing is left if something goes wrong. Raises StoreUnavailableError.
    """
    with suppress(OSError):  # a copy can be made all the same
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
        with suppress(FileNotFoundError, BlockingIOError):  # who looks for abandoned ones was faster than our lock
            lock = _open_directory(directory)
            try:
                _lock(lock)
                directory.stat()
            except BaseException:
                os.close(lock)
                raise
            return directory, lock


def _remove_abandoned(target: Path) -> None:
    """What is locked has a maker. Where directories cannot be locked nobody can tell, and nothing is removed."""
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
    """False where there are no locks on directories (NFS). Raises BlockingIOError if somebody else has it.

    It is the directory that is locked and not the file in it: there flock could meet SQLite's own locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        return False
    return True


def _remove(directory: Path) -> None:
    """With what belongs there, and nothing else."""
    for suffix in ("", *SIDE_FILE_SUFFIXES):
        (directory / f"{_COPY_NAME}{suffix}").unlink(missing_ok=True)
    with suppress(OSError):  # somebody has put something there
        directory.rmdir()
