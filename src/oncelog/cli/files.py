"""Files that commands read and create."""

import os
import stat
import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO, Final
from uuid import uuid4

import typer

from oncelog.cli.terminal import EXIT_IO_ERROR, print_message
from oncelog.errors import OncelogError, SettingsError
from oncelog.file_modes import describe_read_error, open_new, sync_path
from oncelog.server.auth.secret_files import SecretCheck, check_secret_file

STANDARD_INPUT: Final = "-"
CHECK_VARIABLE: Final = "ONCELOG_CHECK_SECRET_FILES"
"""Environment variable of the server setting `check_secret_files`, which commands also read."""
_CHECKS: Final = {"true": SecretCheck.COMMAND, "false": SecretCheck.WARN}


def open_file(path: str) -> BufferedReader:
    """Open a file for reading. Raises OncelogError."""
    try:
        return Path(path).open("rb")
    except OSError as error:
        raise OncelogError(describe_read_error(path, error)) from error


def open_input(path: str, content: str = "") -> AbstractContextManager[BinaryIO]:
    """Open a file, or standard input for `-`. Exit if standard input is closed. Raises OncelogError.

    `content` is what the prompt at a terminal calls the content of a line, such as "event".
    """
    if path != STANDARD_INPUT:
        return open_file(path)
    if sys.stdin is None:
        print_message("standard input must be open")
        raise typer.Exit(EXIT_IO_ERROR)
    if content:
        os.set_blocking(sys.stdin.fileno(), True)  # an empty non-blocking pipe would look like the end of the input
        if sys.stdin.isatty():
            typer.echo(f"Reading one {content} per line from the terminal; end with Ctrl-D.", err=True)
    return nullcontext(sys.stdin.buffer)


def write_new_file(path: Path, chunks: Iterable[bytes]) -> bool:
    """Create a file. Return False and change nothing if the file exists. Raises OncelogError.

    The content is on disk before the file appears under its name, so a reader never sees a partial file.
    """
    unfinished = path.with_name(f"{path.name}.{uuid4().hex[:8]}.unfinished")
    try:
        try:
            with os.fdopen(open_new(unfinished, os.O_WRONLY), "wb") as file:
                file.writelines(chunks)
                file.flush()
                os.fsync(file.fileno())
            try:
                path.hardlink_to(unfinished)  # a rename would replace an existing file
            except FileExistsError:
                return False
        finally:
            unfinished.unlink(missing_ok=True)
        sync_path(path.parent)
    except OSError as error:
        raise OncelogError(f"{path} cannot be written: {error.strerror}") from error
    return True


def get_secret_check() -> SecretCheck:
    """Return how strictly this command checks secret files. Raises SettingsError if the variable is invalid."""
    check = _CHECKS.get(os.environ.get(CHECK_VARIABLE, "").lower() or "true")
    if check is None:
        raise SettingsError(f"environment variable {CHECK_VARIABLE} must be true or false")
    return check


def read_token_file(path: str, bytes_max: int) -> str:
    """Read a token from a file or pipe, and check file permissions as the server does. Raises OncelogError."""
    try:
        with open_file(path) as file:
            found = os.fstat(file.fileno())
            if stat.S_ISREG(found.st_mode):
                check_secret_file(path, found.st_uid, stat.S_IMODE(found.st_mode), "a token", get_secret_check())
            token = file.read(bytes_max).decode("ascii")
    except OSError as error:
        raise OncelogError(describe_read_error(path, error)) from error
    except UnicodeDecodeError:
        raise OncelogError(f"{path} does not contain a token") from None
    if not token.strip():
        raise OncelogError(f"{path} is empty: it contains no token")
    return token
