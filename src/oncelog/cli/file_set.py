"""Creates several files together: either all of them appear in a directory, or none."""

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from oncelog.errors import OncelogError
from oncelog.file_modes import OWNER_ONLY, open_new, sync_path

_UNFINISHED: Final = ".oncelog-init.unfinished"
"""Directory in which the files are written."""
_FINISHED: Final = ".oncelog-init.finished"
"""The same directory after all files have appeared. Only the directory itself remains to be removed."""


@contextmanager
def create_file_set(directory: Path, names: Sequence[str]) -> Iterator[Path]:
    """Yield an empty directory for the block to write these files to. After the block, they appear in `directory`.

    The files are hard links, so an existing file is never replaced. If the process is killed, the next call removes
    the files that have already appeared. Raises OncelogError, and names a file that exists.
    """
    is_new = not directory.exists()
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _remove(directory / _FINISHED)
        with _lock_stage(directory) as stage:
            _check_absent(directory, names)
            yield stage
            for name in names:
                sync_path(stage / name)
            for name in names:
                try:
                    (directory / name).hardlink_to(stage / name)
                except FileExistsError:
                    _check_absent(directory, [name])
                    raise
            sync_path(directory)
            stage.rename(directory / _FINISHED)
    except OSError as error:
        path = error.filename or directory
        raise OncelogError(f"{path} cannot be written: {error.strerror}") from error
    finally:
        _remove(directory / _FINISHED)
        if is_new:
            with suppress(OSError):  # the directory contains the files
                directory.rmdir()


def write_file(path: Path, content: str, mode: int = OWNER_ONLY) -> None:
    """Create a file with this content and mode. Raises OSError."""
    with os.fdopen(open_new(path, os.O_WRONLY, mode), "w", encoding="utf-8") as file:
        file.write(content)


@contextmanager
def _lock_stage(directory: Path) -> Iterator[Path]:
    """Yield the empty stage. An error, or the next call after a kill, undoes what the block has published from it."""
    stage = directory / _UNFINISHED
    stage.mkdir(mode=0o700, exist_ok=True)
    lock = os.open(stage, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OncelogError(f"another `oncelog init` is writing to {directory}") from None
        if not stage.exists() or not os.path.samestat(stage.stat(), os.fstat(lock)):
            raise OncelogError(f"another `oncelog init` has just written to {directory}")
        _undo(directory, stage)
        try:
            yield stage
        finally:
            if stage.exists():
                _undo(directory, stage)
                stage.rmdir()
    finally:
        os.close(lock)


def _undo(directory: Path, stage: Path) -> None:
    """Remove the files of an unfinished set, from the directory first."""
    for file in stage.iterdir():
        published = directory / file.name
        if published.exists() and published.samefile(file):
            published.unlink()
        file.unlink()


def _remove(finished: Path) -> None:
    with suppress(OSError):  # the files are complete; the next call removes the directory
        for file in finished.iterdir():
            file.unlink()
        finished.rmdir()


def _check_absent(directory: Path, names: Sequence[str]) -> None:
    for name in names:
        path = directory / name
        if path.exists() or path.is_symlink():
            raise OncelogError(
                f"{path} exists, and is not overwritten. Choose another directory, or move the file away. To create "
                "another API key for an existing configuration, use `oncelog apikey create`."
            )
