"""Files that hold keys: read with suspicion, written whole or not at all.

What is in them never gets into an error: not as its text, and not as the exception that was met on the way, because
some of those (of a text that is not UTF-8) carry all that they were given.
"""

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from msgspec import Struct

from oncelog.core.canonical import JsonValue, parse
from oncelog.errors import CanonicalError, SettingsError
from oncelog.file_modes import open_new, open_or_create

OTHERS_MAY_CHANGE: Final = stat.S_IWOTH
OTHERS_MAY_READ: Final = stat.S_IRWXO | stat.S_IWGRP
"""A group may read a secret: that is how a service is given one."""
ANYONE_ELSE_MAY_READ: Final = stat.S_IRWXO | stat.S_IRWXG


class Contents(Struct, frozen=True):
    """What was in a file, and who could have read or changed it. Its repr says nothing of the former."""

    path: str
    data: bytes
    mode: int

    def __repr__(self) -> str:
        return f"Contents({self.path!r})"

    def demand_closed_to(self, others: int, holds: str) -> None:
        """Raises SettingsError if the file has one of these mode bits."""
        if self.mode & others:
            raise SettingsError(
                f"{self.path} has {holds}, and others may read or change it (its mode is {self.mode:04o}). "
                f"Take that from them: chmod 600 {self.path}"
            )


def read(path: str, bytes_max: int) -> Contents:
    """All of a file. Raises SettingsError for one that is not there, no plain file, or too large."""
    try:
        # Nonblocking, so that a pipe in the file's place is refused and not waited for.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise SettingsError(f"{path} is not a file")
            data = file.read(bytes_max + 1)
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror}") from error
    if len(data) > bytes_max:
        raise SettingsError(f"{path} is larger than {bytes_max} bytes")
    return Contents(path, data, stat.S_IMODE(found.st_mode))


def json_of(contents: Contents) -> JsonValue:
    """The JSON value in it. Raises SettingsError, which says where it is none."""
    try:
        return parse(contents.data)
    except CanonicalError as error:
        problem = error.reason  # of the grammar and a place: nothing of the contents
    raise SettingsError(f"{contents.path}: {problem}")


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Only one process, and one thread of it, changes the file at a time.

    The lock is on a file beside it, which stays: the file itself is replaced by every change, and a lock on what was
    replaced keeps nobody out.
    """
    beside = f"{path}.lock"
    try:
        descriptor = open_or_create(beside, os.O_RDWR | os.O_NOFOLLOW)
    except OSError as error:
        raise SettingsError(f"{beside} cannot be opened: {error.strerror}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def replace(path: Path, data: bytes) -> None:
    """Puts these bytes in the file's place, for its owner alone. The caller has it locked.

    On the disk first, then the name, then the name on the disk: whoever finds the file finds all of it, old or new.
    """
    unfinished = Path(f"{path}.unfinished")
    try:
        unfinished.unlink(missing_ok=True)  # of a process that was killed; the lock says that it is nobody's now
        try:
            _write(unfinished, data, _owner(path))
            unfinished.replace(path)
        except BaseException:
            with suppress(OSError):
                unfinished.unlink(missing_ok=True)
            raise
        _sync_directory(path.parent)
    except OSError as error:
        raise SettingsError(f"{path} cannot be written: {error.strerror}") from error


def _write(path: Path, data: bytes, owner: tuple[int, int] | None) -> None:
    descriptor = open_new(path, os.O_WRONLY)
    with os.fdopen(descriptor, "wb") as file:
        if owner is not None and owner != (os.geteuid(), os.getegid()):
            # What root changes stays the service's own, or the service could not read it any more.
            os.fchown(descriptor, *owner)
        file.write(data)
        file.flush()
        os.fsync(descriptor)


def _owner(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_uid, found.st_gid


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
