"""Creates several files together: either all of them appear in a directory, or none."""

import errno
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
_DIRECTORY_MODE: Final = 0o700
_PERMISSIONS: Final = 0o777
_OWNER: Final = 0o700


@contextmanager
def create_file_set(directory: Path, names: Sequence[str]) -> Iterator[Path]:
    """Yield an empty directory for the block to write these files to. After the block, they appear in `directory`.

    The files are hard links, so an existing file is never replaced. If the process is killed, the next call removes
    the files that have already appeared. Raises OncelogError, which names the file, if one of them exists.
    """
    created: list[Path] = []
    try:
        if directory.exists() and not directory.is_dir():
            raise OncelogError(f"{directory} is a file, not a directory. Name a directory for the new files")
        created += [path for path in (directory, *directory.parents) if not path.exists()]
        with _keep_owner_permissions():
            directory.mkdir(mode=_DIRECTORY_MODE, parents=True, exist_ok=True)
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
        for path in created:
            with suppress(OSError):  # a directory that contains the files remains
                path.rmdir()


@contextmanager
def _keep_owner_permissions() -> Iterator[None]:
    """Ignore a umask that would remove permissions of the owner from new directories."""
    umask = os.umask(0o077)
    os.umask(umask & ~_OWNER)
    try:
        yield
    finally:
        os.umask(umask)


def write_file(path: Path, content: str, mode: int = OWNER_ONLY) -> None:
    """Create a file with this content and mode. Raises OSError."""
    with os.fdopen(open_new(path, os.O_WRONLY, mode), "w", encoding="utf-8") as file:
        file.write(content)


@contextmanager
def _lock_stage(directory: Path) -> Iterator[Path]:
    """Yield the empty directory in which the block writes the files.

    If the block fails, its published files are removed. If the process is killed, the next call removes them.
    """
    stage, finished = directory / _UNFINISHED, directory / _FINISHED
    with suppress(FileExistsError), _keep_owner_permissions():
        stage.mkdir(mode=_DIRECTORY_MODE)
    with _lock_directory(stage) as descriptor:
        if not _is_at(stage, descriptor):
            raise OncelogError(f"another `oncelog init` has just written to {directory}")
        try:
            _remove_finished(finished)
            _undo(directory, descriptor)
            yield stage
        finally:
            if _is_at(stage, descriptor):
                _undo(directory, descriptor)
                stage.rmdir()
            else:
                with suppress(OSError):  # the files are complete; the next call removes the directory
                    _empty(descriptor)
                    finished.rmdir()


@contextmanager
def _lock_directory(path: Path) -> Iterator[int]:
    """Open the directory of this call or of an earlier one, and lock it. Yields its descriptor.

    Callers remove files through the descriptor, because another user may replace the path with a link.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP):  # a symbolic link gets one or the other
            raise _build_foreign_error(path) from error
        raise
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid() or status.st_mode & _PERMISSIONS != _DIRECTORY_MODE:
            raise _build_foreign_error(path)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OncelogError(f"another `oncelog init` is writing to {path.parent}") from None
        with os.scandir(descriptor) as entries:
            if any(entry.is_dir(follow_symlinks=False) for entry in entries):
                raise _build_foreign_error(path)
        yield descriptor
    finally:
        os.close(descriptor)


def _build_foreign_error(path: Path) -> OncelogError:
    return OncelogError(
        f"{path} must be a directory that this user owns, with mode 0700 and without subdirectories: `oncelog init` "
        "creates it that way. Remove it if nothing else needs it, and run the command again"
    )


def _is_at(path: Path, descriptor: int) -> bool:
    """Return whether a path is this open directory."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _undo(directory: Path, stage: int) -> None:
    """Remove the files of an unfinished set, from the directory first."""
    for name in os.listdir(stage):
        published = directory / name
        with suppress(FileNotFoundError):
            staged = os.stat(name, dir_fd=stage, follow_symlinks=False)
            if os.path.samestat(published.lstat(), staged):
                published.unlink()
    _empty(stage)


def _remove_finished(path: Path) -> None:
    """Remove the directory of a process that was killed after all its files had appeared."""
    try:
        with _lock_directory(path) as descriptor:
            if _is_at(path, descriptor):
                _empty(descriptor)
                path.rmdir()
    except FileNotFoundError:
        return


def _empty(directory: int) -> None:
    for name in os.listdir(directory):
        os.unlink(name, dir_fd=directory)


def _check_absent(directory: Path, names: Sequence[str]) -> None:
    for name in names:
        path = directory / name
        if path.exists() or path.is_symlink():
            raise OncelogError(
                f"{path} already exists. `oncelog init` does not overwrite files. Choose another directory, or move "
                "the file away. To create another API key for an existing configuration, use `oncelog apikey create`."
            )
