"""Files that contain keys. Reads check their permissions, and writes replace them atomically.

An error never contains the content of a file, not even in its cause: some exceptions, such as the one for invalid
UTF-8, carry the whole input.
"""

import enum
import fcntl
import os
import shlex
import stat
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace as replace_fields

from oncelog.core.canonical import JsonValue, parse
from oncelog.errors import CanonicalError, SettingsError
from oncelog.file_modes import describe_read_error, open_new, open_or_create, sync_path, warn_once
from oncelog.server import logger

_UNQUOTED_TEXT_ERRORS: Final = (
    "Invalid value",
    "Expected newline or end of document after a statement",
    "Unclosed array",
)
"""Errors of the TOML parser for text without quotes. It reads the beginning of `127.0.0.1` or `info` as a number, and
expects the end of the line after it."""
_WRITABLE_BY_OTHERS: Final = stat.S_IWOTH
_GROUP_OR_OTHERS_ACCESS: Final = stat.S_IRWXG | stat.S_IRWXO
_MORE_THAN_GROUP_READ: Final = stat.S_IWGRP | stat.S_IXGRP | stat.S_IRWXO


class SecretCheck(enum.Enum):
    """How strictly the owner and mode of a secret file are checked (CO-26)."""

    SERVER = "server"
    """Refuse files that belong neither to the server's user nor to root, and files that other users may read."""
    COMMAND = "command"
    """Like SERVER, but root may use any user's files, because root maintains the files of services."""
    WARN = "warn"
    """Log a warning and use the file, because a container runtime provided it."""


class InsecureFileError(SettingsError):
    """A secret file that other users own, or may read or change."""


class FileContents(Struct, frozen=True):
    """The bytes of a file, with its owner and mode. The repr does not show the bytes."""

    path: str
    data: bytes
    mode: int
    owner: int = 0
    modified_ns: int = 0
    """When the file was last modified."""

    def __repr__(self) -> str:
        return f"Contents({self.path!r})"

    def check_write_protected(self, description: str) -> None:
        """Raise SettingsError if users outside the file's group may change it."""
        if self.mode & _WRITABLE_BY_OTHERS:
            raise InsecureFileError(
                f"{self.path} contains {description}, and other users may change it (its mode is {self.mode:04o}). "
                f"Remove these permissions: chmod 600 {shlex.quote(self.path)}"
            )

    def check_secret(self, description: str, check: SecretCheck) -> None:
        """Check the permissions like `check_secret_file`."""
        check_secret_file(self.path, self.owner, self.mode, description, check)

    def to_private(self) -> "FileContents":
        """Return the same contents with safe permissions, for parsing a file that may only remove keys and rights."""
        return replace_fields(self, mode=stat.S_IRUSR, owner=os.geteuid())


def check_secret_file(path: str, owner: int, mode: int, description: str, check: SecretCheck) -> None:
    """Raise SettingsError for a secret file that other users own, or may read or change.

    PostgreSQL has the same rule: the file must belong to the process's user and have at most mode 0600, or belong to
    root and have at most mode 0640. Owner and mode are read from the opened descriptor, not from the path.
    """
    problem = _find_problem(path, owner, mode, check)
    if problem is None:
        return
    if check is not SecretCheck.WARN or mode & _WRITABLE_BY_OTHERS:
        container_hint = (
            ". If a container runtime provides the file with these permissions, "
            "set check_secret_files to false (ONCELOG_CHECK_SECRET_FILES=false)"
        )
        hint = container_hint if check is SecretCheck.SERVER else ""
        raise InsecureFileError(f"{path} contains {description}, and {problem}{hint}")
    warn_once(logger, "%s contains %s, and %s", path, description, problem)


def _find_problem(path: str, owner: int, mode: int, check: SecretCheck) -> str | None:
    own, quoted = os.geteuid(), shlex.quote(path)
    if owner not in (0, own) and not (check is SecretCheck.COMMAND and own == 0):
        return f"it belongs to user id {owner}, not to root or user id {own}. Change the owner: chown {own} {quoted}"
    if mode & (_MORE_THAN_GROUP_READ if owner == 0 else _GROUP_OR_OTHERS_ACCESS):
        # The server's user can read root's file through its group.
        mode_max = "640" if owner == 0 and own != 0 else "600"
        return (
            f"other users may read or change it (its mode is {mode:04o}). Remove these permissions: "
            f"chmod {mode_max} {quoted}"
        )
    return None


def read_file(path: str, bytes_max: int) -> FileContents:
    """Read a whole file. Raises SettingsError if it is missing, too large or not a regular file."""
    try:
        # Open without blocking, so that the server refuses a pipe instead of waiting for its writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise SettingsError(f"{path} is not a file: name a regular file")
            with os.fdopen(descriptor, "rb", closefd=False) as file:
                data = file.read(bytes_max + 1)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise SettingsError(describe_read_error(path, error)) from error
    if len(data) > bytes_max:
        raise SettingsError(f"{path} is larger than {bytes_max} bytes")
    return FileContents(path, data, stat.S_IMODE(found.st_mode), found.st_uid, found.st_mtime_ns)


def parse_json(contents: FileContents) -> JsonValue:
    """Parse a file as JSON. Raises SettingsError with the position of a fault."""
    try:
        return parse(contents.data)
    except CanonicalError as error:
        problem = error.reason  # contains a rule and a position, but no file content
    raise SettingsError(f"{contents.path}: {problem}")


def parse_toml(contents: FileContents) -> dict[str, Any]:
    """Parse a file as TOML. Raises SettingsError with the position of a fault."""
    # The error is raised outside of the `except` blocks: a caught exception may contain the whole file and would become
    # its context.
    problem = "not UTF-8"
    try:
        return tomllib.loads(contents.data.decode())
    except UnicodeDecodeError:
        pass
    except RecursionError:
        problem = "nested too deeply"
    except ValueError as error:
        is_unquoted = any(text in str(error) for text in _UNQUOTED_TEXT_ERRORS)
        problem = f"{error}{'; write text in quotes, and flags as true or false' if is_unquoted else ''}"
    raise SettingsError(f"{contents.path} is not valid TOML: {problem}")


@contextmanager
def lock_file(path: Path) -> Iterator[Path]:
    """Hold a lock that keeps other processes and threads from changing a file.

    Yields the path with symbolic links resolved, so that a new file replaces the actual file, not a link to it.

    The lock is on a separate file, which is never removed: each change replaces the original file, and a lock on a
    replaced file has no effect.
    """
    resolved = path.resolve()
    lock_path = f"{resolved}.lock"
    try:
        descriptor = open_or_create(lock_path, os.O_RDWR | os.O_NOFOLLOW)
    except OSError as error:
        if isinstance(error, FileNotFoundError):
            raise SettingsError(f"the directory {resolved.parent} does not exist; create it first") from error
        raise SettingsError(f"{lock_path} cannot be opened: {error.strerror}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield resolved
    finally:
        os.close(descriptor)


def replace_file(path: Path, data: bytes) -> None:
    """Replace a file with these bytes, readable only by its owner. The caller must hold the lock.

    The content is on disk before the file is renamed, so a reader finds either the old or the new content.
    """
    temporary_path = Path(f"{path}.unfinished")
    try:
        temporary_path.unlink(missing_ok=True)  # left by a killed process; the lock rules out concurrent writers
        try:
            _write_file(temporary_path, data, path)
            temporary_path.replace(path)
        finally:
            temporary_path.unlink(missing_ok=True)
        sync_path(path.parent)
    except OSError as error:
        raise SettingsError(f"{path} cannot be written: {error.strerror}") from error


def _write_file(path: Path, data: bytes, replaced: Path) -> None:
    """Write a new file with the same owner as the file that it replaces."""
    descriptor = open_new(path, os.O_WRONLY)
    with os.fdopen(descriptor, "wb") as file:
        if replaced.exists():
            # When root replaces the file of a service, the service must still be able to read it.
            found = replaced.stat()
            if (found.st_uid, found.st_gid) != (os.geteuid(), os.getegid()):
                os.fchown(descriptor, found.st_uid, found.st_gid)
        file.write(data)
        file.flush()
        os.fsync(descriptor)
