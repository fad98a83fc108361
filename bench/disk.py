"""Directories for the files of benchmarks: on a disk, because an fsync in memory costs nothing."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

IN_MEMORY: Final = ("tmpfs", "ramfs")


def find_directory_for_files() -> Path:
    """Return the directory for temporary files (TMPDIR), or the current one if TMPDIR is in memory."""
    places = Path(tempfile.gettempdir()), Path.cwd()
    return next((place for place in places if file_system(place) not in IN_MEMORY), places[0])


def file_system(path: Path) -> str:
    """Return the type of the file system of a path."""
    best, kind = Path("/"), "unknown"
    for line in Path("/proc/mounts").read_text().splitlines():
        _, mount, mounted, *_ = line.split()
        if path.resolve().is_relative_to(mount) and Path(mount).is_relative_to(best):
            # If several file systems are mounted on one mount point, the last one is visible.
            best, kind = Path(mount), mounted
    return kind


@contextmanager
def directory() -> Iterator[Path]:
    """Yield a temporary directory, which is removed with its contents."""
    with tempfile.TemporaryDirectory(prefix="oncelog-bench-", dir=find_directory_for_files()) as name:
        yield Path(name)
