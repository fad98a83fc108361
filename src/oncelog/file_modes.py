"""Permissions of the files that Oncelog creates (CO-26).

Every new file gets an explicit mode, independent of the umask: 0600, or `file_mode` if a group shares a log. Oncelog
never changes the mode of an existing file, but warns once about a file with more permissions.
"""

import errno
import logging
import os
import re
import shlex
import stat
import threading
from functools import lru_cache
from pathlib import Path
from typing import Final

from oncelog.errors import SettingsError

logger: Final = logging.getLogger("oncelog.files")

OWNER_ONLY: Final = 0o600
FILE_MODES: Final = (0o600, 0o640, 0o660)
"""Allowed values of `file_mode`. The owner can read and write; users outside the group have no access."""
_OCTAL: Final = re.compile(r"(0o)?[0-7]{1,5}", re.ASCII)
_PERMISSIONS: Final = 0o777
_create_lock: Final = threading.Lock()
"""Held while `create_file` has a new file open to set its mode."""


def check_file_mode(mode: int) -> int:
    """Return the mode if it is one of `FILE_MODES`. Raises SettingsError."""
    if type(mode) is not int or mode not in FILE_MODES:
        shown = f"{mode:04o}" if type(mode) is int and mode >= 0 else repr(mode)
        raise SettingsError(f"file_mode must be {_format_choices()}, not {shown}")
    return mode


def parse_file_mode(text: str) -> int:
    """Parse a mode from octal digits: `0660`, `660` or `0o660`. Raises SettingsError."""
    if _OCTAL.fullmatch(text) is None:
        raise SettingsError(f"file_mode must be {_format_choices()}, not {text!r}")
    return check_file_mode(int(text.removeprefix("0o"), 8))


def create_file(path: str, mode: int = OWNER_ONLY) -> bool:
    """Create an empty file with this mode for SQLite to open. Return False if the file already exists.

    SQLite gives the `-wal`, `-shm` and `-journal` files the mode of the main file. For a symbolic link to a missing
    file, the target is created, as SQLite does. Raises OSError.
    """
    # When a process closes any descriptor of a file, POSIX drops all locks that the process holds on it. No other
    # thread may therefore open the new file with SQLite before this descriptor is closed.
    with _create_lock:
        try:
            os.close(open_new(os.path.realpath(path), os.O_RDWR, mode))
        except FileExistsError:
            return False
    return True


def create_or_report(path: str, mode: int = OWNER_ONLY) -> None:
    """Create an empty file (`create_file`), or report an existing one (`report_loose_file`). Raises OSError."""
    if not create_file(path, mode):
        report_loose_file(path, mode)


def describe_creation_error(path: str, error: OSError) -> str:
    """Return the error message for a file that `create_or_report` could not create."""
    directory = Path(path).parent
    if isinstance(error, FileNotFoundError) and not directory.exists():
        return f"{path} cannot be created: {error.strerror}: the directory {directory} does not exist; create it first"
    return f"{path} cannot be created: {error.strerror}; check the directory {directory} and its permissions"


_READ_HINTS: Final = {
    errno.ENOENT: "; check the path",
    errno.ENOTDIR: "; check the path",
    errno.EISDIR: "; name a file in it",
    errno.EACCES: "; check its permissions",
    errno.EPERM: "; check its permissions",
}


def describe_read_error(path: str, error: OSError) -> str:
    """Return the error message for a file that cannot be read."""
    return f"{path} cannot be read: {error.strerror}{_READ_HINTS.get(error.errno or 0, '')}"


def open_new(path: str | os.PathLike[str], flags: int, mode: int = OWNER_ONLY) -> int:
    """Create a file with this mode and return its descriptor. Raises OSError, and FileExistsError if the file
    exists."""
    # Start with the owner's permissions only; otherwise another user could open the file before its mode is set.
    descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode & OWNER_ONLY)
    try:
        os.fchmod(descriptor, mode)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def open_or_create(path: str | os.PathLike[str], flags: int, mode: int = OWNER_ONLY) -> int:
    """Open a file, creating it with this mode if it is missing, and return its descriptor. Raises OSError."""
    while True:
        try:
            return open_new(path, flags, mode)
        except FileExistsError:
            pass
        try:
            return os.open(path, flags | os.O_CLOEXEC)
        except FileNotFoundError:
            if os.path.islink(path):  # noqa: PTH114 - a path of any type
                raise OSError(errno.ELOOP, "is a symbolic link to a missing file") from None


def find_loose_mode(path: str, mode: int = OWNER_ONLY) -> tuple[str, str] | None:
    """Return a message and a remedy if an existing file has more permissions than `mode`, and otherwise None."""
    try:
        found = stat.S_IMODE(os.stat(path).st_mode) & _PERMISSIONS  # noqa: PTH116 - a path of any type
    except OSError:
        return None
    if not found & ~mode:
        return None
    return (
        f"{path} has mode {found:04o}, so other users of this machine may read or change it",
        f"Remove these permissions: chmod {found & mode | OWNER_ONLY:03o} {shlex.quote(path)}",
    )


def report_loose_file(path: str, mode: int = OWNER_ONLY) -> None:
    """Log a warning, once per file, if an existing file has more permissions than `mode`."""
    loose = find_loose_mode(path, mode)
    if loose is not None:
        warn_once(logger, "%s. %s", *loose)


@lru_cache(maxsize=1000)
def warn_once(logger: logging.Logger, message: str, *arguments: object) -> None:
    """Log a warning, unless this process has already logged the same one."""
    logger.warning(message, *arguments)


def _format_choices() -> str:
    *most, last = (f"{mode:04o}" for mode in FILE_MODES)
    return f"{', '.join(most)} or {last}"


def sync_path(path: str | os.PathLike[str]) -> None:
    """Flush a file, or a directory's entries, to disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
