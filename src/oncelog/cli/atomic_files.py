"""New files that are complete and on the disk when they get their name."""

import os
from collections.abc import Iterable
from pathlib import Path
from uuid import uuid4

from oncelog.errors import OncelogError
from oncelog.file_modes import open_new, sync_path


def write_new_file(path: Path, chunks: Iterable[bytes]) -> bool:
    """Create a file. Returns False, without a change, if it exists. Raises OncelogError.

    The content is on the disk before the file gets its name, so a reader finds all of it.
    """
    unfinished = path.with_name(f"{path.name}.{uuid4().hex[:8]}.unfinished")
    try:
        try:
            with os.fdopen(open_new(unfinished, os.O_WRONLY), "wb") as file:
                file.writelines(chunks)
                file.flush()
                os.fsync(file.fileno())
            try:
                path.hardlink_to(unfinished)  # unlike a rename it takes nothing's place
            except FileExistsError:
                return False
        finally:
            unfinished.unlink(missing_ok=True)
        sync_path(path.parent)
    except OSError as error:
        raise OncelogError(f"{path} cannot be written: {error.strerror}") from error
    return True
