"""Small files that must be whole, and on the disk, before anything is sent."""

import os
from collections.abc import Iterable
from pathlib import Path
from uuid import uuid4

from oncelog.errors import OncelogError
from oncelog.file_modes import open_new


def write_new_file(path: Path, chunks: Iterable[bytes]) -> bool:
    """Makes a file that was not there; False, and nothing done, if it is. Raises OncelogError.

    On the disk first, then the name, then the name on the disk: whoever finds the file finds all of it.
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
        descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise OncelogError(f"{path} cannot be written: {error.strerror}") from error
    return True
