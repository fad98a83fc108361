"""Permissions of the files that Oncelog creates (CO-26).

Every new file gets its mode explicitly, whatever the umask is: 0600, or `file_mode` where a group shares a log. The
mode of an existing file is never changed; a file with more permissions than that is reported once.
"""

import errno
import logging
import os
import re
import shlex
import stat
import threading
from typing import Final

from oncelog.errors import SettingsError

logger: Final = logging.getLogger("oncelog.files")

OWNER_ONLY: Final = 0o600
FILE_MODES: Final = (0o600, 0o640, 0o660)
"""Allowed values of `file_mode`. The owner must read and write; other users than owner and group get nothing."""
_OCTAL: Final = re.compile(r"(0o)?[0-7]{1,5}", re.ASCII)
_PERMISSIONS: Final = 0o777
_REPORTED_MAX: Final = 1000
_create_lock: Final = threading.Lock()
"""Held while a new file is open for its mode to be set: see `create_file`."""
_reported: Final[set[tuple[str, int]]] = set()
"""Paths and modes of files that a warning was logged for."""


def check_file_mode(mode: int) -> int:
    """Return the mode if it is one of `FILE_MODES`. Raises SettingsError."""
    if type(mode) is not int or mode not in FILE_MODES:
        shown = f"{mode:04o}" if type(mode) is int and mode >= 0 else repr(mode)
        raise SettingsError(f"file_mode must be {_format_choices()}, not {shown}")
    return mode


def parse_file_mode(text: str) -> int:
    """Return the mode that octal digits name: `0660`, `660` or `0o660`. Raises SettingsError."""
    if _OCTAL.fullmatch(text) is None:
        raise SettingsError(f"file_mode must be {_format_choices()}, not {text!r}")
    return check_file_mode(int(text.removeprefix("0o"), 8))


def create_file(path: str, mode: int = OWNER_ONLY) -> bool:
    """Create an empty file with this mode, for SQLite to open; return False if the file exists.

    SQLite gives its `-wal`, `-shm` and `-journal` files the mode of the main file. A symbolic link to a missing file
    creates that file, as SQLite would. Raises OSError.
    """
    # POSIX drops all locks of a process on a file when the process closes any descriptor of it. Another thread must
    # not open the new file with SQLite before this descriptor is closed.
    with _create_lock:
        try:
            os.close(open_new(os.path.realpath(path), os.O_RDWR, mode))
        except FileExistsError:
            return False
    return True


def create_or_report(path: str, mode: int = OWNER_ONLY) -> None:
    """Create an empty file as `create_file`, or report an existing one as `report_loose_file`. Raises OSError."""
    if not create_file(path, mode):
        report_loose_file(path, mode)


def open_new(path: str | os.PathLike[str], flags: int, mode: int = OWNER_ONLY) -> int:
    """Create a file with this mode and return its descriptor. Raises FileExistsError and other OSErrors."""
    # No other user may open the file before it has its mode.
    descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode & OWNER_ONLY)
    try:
        os.fchmod(descriptor, mode)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def open_or_create(path: str | os.PathLike[str], flags: int, mode: int = OWNER_ONLY) -> int:
    """Return a descriptor of a file, which is created with this mode if it is missing. Raises OSError."""
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


def report_loose_file(path: str, mode: int = OWNER_ONLY) -> None:
    """Log a warning, once for each file, if an existing file has more permissions than `mode`."""
    try:
        found = stat.S_IMODE(os.stat(path).st_mode) & _PERMISSIONS  # noqa: PTH116 - a path of any type
    except OSError:
        return
    if not found & ~mode or not is_first_report(path, found):
        return
    logger.warning(
        "%s has mode %04o, so other users of this machine may read or change it. Take that from them: chmod %03o %s",
        path,
        found,
        found & mode | OWNER_ONLY,
        shlex.quote(path),
    )


def is_first_report(path: str, mode: int) -> bool:
    """Return whether no warning about a file of this mode was logged before in this process."""
    seen = (os.path.realpath(path), mode)
    if seen in _reported:
        return False
    if len(_reported) >= _REPORTED_MAX:
        _reported.clear()
    _reported.add(seen)
    return True


def _format_choices() -> str:
    *most, last = (f"{mode:04o}" for mode in FILE_MODES)
    return f"{', '.join(most)} or {last}"


def sync_path(path: str | os.PathLike[str]) -> None:
    """Write a file, or the entries of a directory, to the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
