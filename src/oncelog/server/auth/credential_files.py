"""Polls credential files. Each file is reloaded independently, and its last valid content remains in use (CO-28).

A `CredentialUser` uses the keys from one or more files, and reports revoked, removed and expired keys.

`load_changes` blocks for at most `POLL_TIMEOUT_S` and may run in any thread. `apply` runs on the event loop's thread
and puts the new content into use.
"""

import os
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from hashlib import sha256
from itertools import combinations
from typing import Any, Final, Literal

from msgspec import Struct
from msgspec.structs import replace

from oncelog.errors import SettingsError
from oncelog.server import logger
from oncelog.server.auth import secret_files
from oncelog.server.auth.secret_files import FileContents, InsecureFileError, SecretCheck

SETTLE_NS: Final = 1_000_000_000
"""A file modified less than this long before it was read is read again: the file system's clock may be too coarse to
show a second change."""
RETRY_POLLS: Final = 10
"""Every tenth poll also retries files that failed and have not changed since."""
POLL_TIMEOUT_S: Final = 2.0
"""How long a poll waits for one file, for example on a hung network file system. The read continues, and later polls
use its result without waiting."""
RELOAD_TIMEOUT_S: Final = 5.0
"""Longest wait for a complete reload."""

FileChanges = tuple[int, "Sequence[FileRead]"]
"""The generation of a poll, and the files that have changed."""
FileVersion = tuple[int, ...]
"""File metadata that differs after every write, replacement, or change of owner or mode."""


CredentialAct = Literal["api_key_revoked", "api_key_removed", "api_key_expired", "signing_key_removed"]


class CredentialEvent(Struct, frozen=True, kw_only=True):
    """Reports a revoked, removed or expired key.

    The event contains no secret. All servers that share a file report the same `act` and `id`.
    """

    act: CredentialAct
    id: str
    """Id of an API key, or algorithm and `kid` of a signing key: `EdDSA/2026-11`, or `HS256/` without a `kid`."""
    path: str
    """The file that contains or contained the key."""
    at_ms: int
    """Time at which the key was revoked or expired. For a removed key, the time at which the server noticed the
    removal."""
    changed_ns: int = 0
    """Modification time of the file that a key was removed from, which distinguishes removals. It is the same on all
    servers that read the file."""
    client_id: str | None = None
    """Client id of an API key."""
    fingerprint: str | None = None
    """Thumbprint of a public signing key (RFC 7638)."""
    is_initial: bool = False
    """Whether the key was already invalid when the server first read the file."""


CredentialListener = Callable[[CredentialEvent], None]


class LoadedKeys(Struct, frozen=True):
    """The keys of a file, and the file's modification time."""

    keys: Any
    modified_ns: int


class CredentialUser(ABC):
    """Base class of components that use credential files. The `source` of a file identifies its contents."""

    def __init__(self, now_ms: Callable[[], int], check: SecretCheck) -> None:
        self._now_ms = now_ms
        self._secret_check = check
        self._listeners: list[CredentialListener] = []

    @abstractmethod
    def list_files(self) -> "Sequence[CredentialFile]":
        """Return the key files to poll."""

    @abstractmethod
    def use(self, contents: Mapping[Any, LoadedKeys]) -> None:
        """Start using the new contents of these files, and report keys that are no longer valid."""

    @abstractmethod
    def restrict(self, source: Any, content: LoadedKeys) -> LoadedKeys | None:
        """Return the content in use without the keys and rights that the new content lacks.

        Returns None if the new content removes nothing.
        """

    def check(self, contents: Mapping[Any, LoadedKeys]) -> None:  # noqa: B027 - a single file cannot conflict
        """Raise SettingsError if these contents conflict with each other or with the other contents in use."""

    def report_expired(self) -> None:  # noqa: B027 - signing keys do not expire
        """Report keys that have expired since the last call."""

    def subscribe(self, listener: CredentialListener) -> None:
        """Call the listener for every subsequent event, in the thread that reloads the files."""
        self._listeners.append(listener)

    def _publish(self, event: CredentialEvent) -> None:
        """Call all listeners. An error in a listener is logged and does not keep the key valid."""
        for listener in self._listeners:
            try:
                listener(event)
            except Exception:
                logger.exception("a credential event listener failed", extra={"act": event.act, "key": event.id})


class CredentialFile(Struct, eq=False):
    """A polled file: how to parse it, which component uses its content, and the result of its last reload."""

    kind: str
    path: str
    bytes_max: int
    parse: Callable[[FileContents], LoadedKeys]
    user: CredentialUser
    source: Hashable
    version: FileVersion | None = None
    """File metadata at the last read, or None if the file was missing."""
    is_settled: bool = False
    digest: bytes | None = None
    """Hash of the content in use, or None if the newest content is not in use."""
    error: str | None = None
    """Why the newest content is not in use."""
    reported: tuple[FileVersion | None, str] | None = None
    """Version and error of the last reported failure."""


class FileRead(Struct, frozen=True, eq=False):
    """The content of a file when it was read."""

    file: CredentialFile
    version: FileVersion | None
    is_settled: bool
    digest: bytes | None = None
    content: Any = None
    error: str | None = None
    is_new: bool = True
    """False if the content is already in use."""

    @property
    def is_insecure(self) -> bool:
        """Whether other users may read or change the file. Such a file can remove keys and rights, but not add any."""
        return self.error is not None and self.content is not None


class CredentialFiles:
    """All credential files of a server. They are loaded by the first `reload`."""

    def __init__(self, files: Iterable[CredentialFile] = ()) -> None:
        self._files = tuple(files)
        self._generation = 0
        """Number of complete reloads, so that `apply` can ignore reads from before the last reload."""
        self._polls = 0
        self._pending_reads: dict[CredentialFile, tuple[int, Future[FileRead | None]]] = {}
        """Reads that did not finish within their poll, with their generation. Only `load_changes` uses this dict."""

    def __bool__(self) -> bool:
        return bool(self._files)

    def count_failed(self) -> Mapping[str, int]:
        """Return, per kind, the number of files whose newest content is not in use."""
        counts = Counter({file.kind: 0 for file in self._files})
        counts.update(file.kind for file in self._files if file.error is not None)
        return counts

    def reload(self) -> None:
        """Load every file. Raises SettingsError with all failures once the other files are loaded."""
        self._generation += 1
        started = {file: _start_read(partial(_load, file)) for file in self._files}
        wait(started.values(), RELOAD_TIMEOUT_S)
        reads = _get_results(started)
        self._use(reads)
        _take_new_failures(reads)
        errors = [file.error for file in self._files if file.error is not None]
        if errors:
            raise SettingsError("; ".join(errors))

    def load_changes(self) -> FileChanges:
        """Read changed files. If any file has changed, and at every `RETRY_POLLS`-th poll, retry failed files too."""
        generation = self._generation
        self._polls += 1
        is_retry = self._polls % RETRY_POLLS == 0
        reads = self._load_changed(generation, self._files, is_retry=is_retry)
        if reads:
            read_files = {file_read.file for file_read in reads}
            failed = [file for file in self._files if file.error is not None and file not in read_files]
            reads += self._load_changed(generation, failed, is_retry=True)
        return generation, reads

    def apply(self, changes: FileChanges) -> tuple[bool, list[str]]:
        """Start using the contents of changed files. Returns whether it used any, and the unreported failures."""
        generation, reads = changes
        if generation != self._generation:
            return False, []
        used = self._use(reads)
        for file in used:
            if file.error is None:
                logger.info("%s was reloaded", file.path, extra={"kind": file.kind})
        return bool(used), _take_new_failures(reads)

    def _load_changed(self, generation: int, files: Iterable[CredentialFile], *, is_retry: bool) -> list[FileRead]:
        """Read changed files, each in a separate thread. A read that hangs delays the other files only once."""
        pending = self._pending_reads
        reads: dict[CredentialFile, Future[FileRead | None]] = {}
        for file in files:
            read_generation, late_read = pending.get(file, (generation, None))
            if late_read is not None and not late_read.done():
                continue
            pending.pop(file, None)
            if late_read is None or read_generation != generation:
                late_read = _start_read(partial(_load_change, file, is_retry=is_retry))
            reads[file] = late_read
        wait(reads.values(), POLL_TIMEOUT_S)
        pending.update({file: (generation, result) for file, result in reads.items() if not result.done()})
        return _get_results(reads)

    def _use(self, changes: Sequence[FileRead]) -> list[CredentialFile]:
        """Use the contents of all changed files together, because a key may have moved between files."""
        by_user: dict[CredentialUser, list[FileRead]] = {}
        for file_read in changes:
            file = file_read.file
            file.version, file.is_settled = file_read.version, file_read.is_settled
            if file_read.error is not None:
                _record_failure(file, file_read.error)
            if file_read.content is not None and file_read.is_new:
                by_user.setdefault(file.user, []).append(file_read)
        used = []
        for user, user_reads in by_user.items():
            try:
                used += _use_together(user, user_reads)
            except Exception as error:
                logger.exception("changed credential files could not be applied")
                for file_read in user_reads:  # retried although the files have not changed since
                    _record_failure(file_read.file, f"{file_read.file.path} cannot be used: {type(error).__name__}")
        return used


def _use_together(user: CredentialUser, changes: Sequence[FileRead]) -> list[CredentialFile]:
    """Use the contents of one component's files. Returns the files whose content was accepted."""
    pending = []
    for file_read in changes:
        content = (
            user.restrict(file_read.file.source, file_read.content) if file_read.is_insecure else file_read.content
        )
        if content is not None:
            pending.append(replace(file_read, content=content))
    if not pending:
        return []
    accepted, refused = _choose_compatible(user, pending)
    user.use({file_read.file.source: file_read.content for file_read in accepted})
    for file_read in accepted:
        if file_read.error is None:
            file_read.file.digest, file_read.file.error, file_read.file.reported = file_read.digest, None, None
    for file_read, error in refused:
        _record_failure(file_read.file, error)
    return [file_read.file for file_read in accepted]


def _choose_compatible(
    user: CredentialUser, pending: Sequence[FileRead]
) -> tuple[list[FileRead], list[tuple[FileRead, str]]]:
    """Return the contents that can be used together, and the refused contents with the reasons.

    Usually all contents fit together, even if two files swap their keys. Otherwise at least one file is wrong.
    """

    def problem(reads: Iterable[FileRead]) -> str | None:
        try:
            user.check({file_read.file.source: file_read.content for file_read in reads})
        except SettingsError as error:
            return str(error)
        return None

    candidates = [tuple(pending), *combinations(pending, len(pending) - 1)]
    accepted = list(next((candidate for candidate in candidates if problem(candidate) is None), ()))
    remaining = [candidate for candidate in pending if candidate not in accepted]
    while (
        compatible := next((candidate for candidate in remaining if problem([*accepted, candidate]) is None), None)
    ) is not None:
        accepted.append(compatible)
        remaining.remove(compatible)
    return accepted, [(candidate, problem([*accepted, candidate]) or "") for candidate in remaining]


def _take_new_failures(changes: Sequence[FileRead]) -> list[str]:
    """Return failures that have not been reported yet, at most one per file change."""
    failures = []
    for found in changes:
        file = found.file
        if file.error is not None and file.reported != (found.version, file.error):
            file.reported = (found.version, file.error)
            effect = "its previous content is still used"
            if found.is_insecure:
                effect = "keys missing from it are removed, and no keys are added"
            failures.append(f"{effect}: {file.error}")
    return failures


def _record_failure(file: CredentialFile, error: str) -> None:
    file.error, file.digest = error, None


def _start_read(load: Callable[[], FileRead | None]) -> Future[FileRead | None]:
    """Start a read in a daemon thread, so that a read that hangs does not keep the process from exiting."""
    result: Future[FileRead | None] = Future()

    def run() -> None:
        try:
            result.set_result(load())
        except BaseException as error:  # noqa: BLE001 - re-raised where the result is read
            result.set_exception(error)

    threading.Thread(target=run, name="oncelog-credential-file", daemon=True).start()
    return result


def _get_results(reads: Mapping[CredentialFile, Future[FileRead | None]]) -> list[FileRead]:
    """Return the contents of changed files. An unfinished or failed read is recorded as a failure."""
    results = [_get_result(file, result) for file, result in reads.items()]
    return [file_read for file_read in results if file_read is not None]


def _get_result(file: CredentialFile, result: Future[FileRead | None]) -> FileRead | None:
    reason = "the file system does not respond"
    if result.done():
        try:
            return result.result()
        except Exception as error:
            logger.debug("a credential file cannot be read", exc_info=True)
            reason = type(error).__name__
    return FileRead(file, file.version, is_settled=False, error=f"{file.path} cannot be read: {reason}")


def _load_change(file: CredentialFile, *, is_retry: bool) -> FileRead | None:
    """Read the file if it has changed or a retry is due. Otherwise return None."""
    is_due = not file.is_settled or (is_retry and file.error is not None)
    return _load(file) if is_due or _get_version(file.path) != file.version else None


def _load(file: CredentialFile) -> FileRead:
    version = _get_version(file.path)  # read before the content, so that the next poll notices a later change
    # version[1] is the time at which the file or its metadata last changed.
    is_settled = version is None or abs(time.time_ns() - version[1]) > SETTLE_NS
    try:
        contents = secret_files.read_file(file.path, file.bytes_max)
        digest = sha256(f"{contents.owner} {contents.mode} ".encode() + contents.data).digest()
        if digest == file.digest:
            return FileRead(file, version, is_settled, digest, is_new=False)
        try:
            return FileRead(file, version, is_settled, digest, file.parse(contents))
        except InsecureFileError as error:
            content = file.parse(contents.to_private())
            return FileRead(file, version, is_settled, content=content, error=str(error))
    except SettingsError as error:
        return FileRead(file, version, is_settled, error=str(error))


def _get_version(path: str) -> FileVersion | None:
    try:
        found = os.stat(path)  # noqa: PTH116 - called once a second for every file
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
