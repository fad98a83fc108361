"""Polling of credential files: each file is reloaded by itself, and keeps its last good content (CO-28).

`read_changes` blocks and may run in any thread. `apply` puts the new content into use, on the event loop's thread.
"""

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import sha256
from typing import Any, Final

from msgspec import Struct

from oncelog.doors import files
from oncelog.doors.files import Contents
from oncelog.errors import SettingsError

logger: Final = logging.getLogger("oncelog.doors")

SETTLE_NS: Final = 1_000_000_000
"""A file that was changed less than this before it was read is read once more: a second change within the resolution
of the file system's clock would not be noticed otherwise."""
RETRY_POLLS: Final = 10
"""A file that failed and has not changed since is tried again at every tenth poll."""

Version = tuple[int, ...]
"""Of a file: changes with every write, replacement, and change of owner or mode."""


class CredentialFile:
    """A polled file: how to parse it, how to put the result into use, and the state of its last reload."""

    def __init__(
        self, kind: str, path: str, bytes_max: int, parse: Callable[[Contents], Any], use: Callable[[Any], None]
    ) -> None:
        self.kind = kind
        self.path = path
        self.bytes_max = bytes_max
        self.parse = parse
        self.use = use
        self.version: Version | None = None
        """Of the file when it was last read; None if it was missing."""
        self.is_settled = False
        self.digest: bytes | None = None
        """Of the content in use; None if the newest content is not in use."""
        self.error: str | None = None
        """Why the newest content is not in use."""
        self.reported: tuple[Version | None, str] | None = None


class Found(Struct, frozen=True):
    """What a file had when it was read."""

    file: CredentialFile
    version: Version | None
    is_settled: bool
    digest: bytes | None = None
    content: Any = None
    error: str | None = None
    is_new: bool = True
    """False if the content is in use already."""


class Changes(Struct, frozen=True):
    """The files that have changed."""

    generation: int
    found: Sequence[Found]


class CredentialFiles:
    """All credential files of a server. Nothing is loaded before the first `reload`."""

    def __init__(self, watched: Iterable[CredentialFile] = ()) -> None:
        self._files = tuple(watched)
        self._generation = 0
        """Counts complete reloads, so that `apply` ignores what was read before the last one."""
        self._polls = 0

    def __bool__(self) -> bool:
        return bool(self._files)

    def failed(self) -> Mapping[str, int]:
        """Return how many files of each kind have a newest content that is not in use."""
        counted = Counter({file.kind: 0 for file in self._files})
        counted.update(file.kind for file in self._files if file.error is not None)
        return counted

    def reload(self) -> None:
        """Load every file. Raises SettingsError, after the other files were loaded, with all that is wrong."""
        self._generation += 1
        found = [_read(file) for file in self._files]
        self._use(found)
        _unreported(found)
        errors = [file.error for file in self._files if file.error is not None]
        if errors:
            raise SettingsError("; ".join(errors))

    def read_changes(self) -> Changes:
        """Read the files that have changed, and those that failed if there are any, or if it is time to try again."""
        generation = self._generation
        self._polls += 1
        due = [file for file in self._files if not file.is_settled or _version(file.path) != file.version]
        if due or self._polls % RETRY_POLLS == 0:
            due += [file for file in self._files if file.error is not None and file not in due]
        return Changes(generation, [_read(file) for file in due])

    def apply(self, changes: Changes) -> tuple[bool, list[str]]:
        """Put changed files into use. Return whether there were any, and the failures that were not returned before."""
        if changes.generation != self._generation:
            return False, []
        used = self._use(changes.found)
        for file in used:
            logger.info("%s was reloaded", file.path, extra={"kind": file.kind})
        return bool(used), _unreported(changes.found)

    def _use(self, changes: Sequence[Found]) -> list[CredentialFile]:
        used = []
        pending = []
        for found in changes:
            found.file.version, found.file.is_settled = found.version, found.is_settled
            if found.error is not None:
                _fail(found.file, found.error)
            elif found.is_new:
                pending.append(found)
        while pending:
            refused = [(found, error) for found in pending if (error := _try_use(found)) is not None]
            left = [found for found, _ in refused]
            used += [found.file for found in pending if found not in left]
            if len(left) == len(pending):
                for found, error in refused:
                    _fail(found.file, error)
                break
            # Files of signing keys are checked together: a key may have moved from one of them to another.
            pending = left
        return used


def _unreported(changes: Sequence[Found]) -> list[str]:
    """Return the failures of these files that were not returned before: one for each change of a file."""
    failures = []
    for found in changes:
        file = found.file
        if file.error is not None and file.reported != (found.version, file.error):
            file.reported = (found.version, file.error)
            failures.append(file.error)
    return failures


def _try_use(found: Found) -> str | None:
    """Put the content into use; return the error if it is refused."""
    file = found.file
    try:
        file.use(found.content)
    except SettingsError as error:
        return str(error)
    file.digest, file.error, file.reported = found.digest, None, None
    return None


def _fail(file: CredentialFile, error: str) -> None:
    file.error, file.digest = error, None


def _read(file: CredentialFile) -> Found:
    version = _version(file.path)  # before the content: a later change is noticed by the next poll
    # Position 1 is the time of the last change.
    is_settled = version is None or abs(time.time_ns() - version[1]) > SETTLE_NS
    try:
        contents = files.read(file.path, file.bytes_max)
        digest = sha256(f"{contents.owner} {contents.mode} ".encode() + contents.data).digest()
        if digest == file.digest:
            return Found(file, version, is_settled, digest, is_new=False)
        return Found(file, version, is_settled, digest, file.parse(contents))
    except SettingsError as error:
        return Found(file, version, is_settled, error=str(error))


def _version(path: str) -> Version | None:
    try:
        found = os.stat(path)  # noqa: PTH116 - once a second for every file
    except OSError:
        return None
    return (
        found.st_mtime_ns,
        found.st_ctime_ns,
        found.st_size,
        found.st_ino,
        found.st_dev,
        found.st_mode,
        found.st_uid,
    )
