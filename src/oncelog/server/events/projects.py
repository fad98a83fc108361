"""Projects of the `insieme` dialect, with their partitions, scopes and keys (EV-18).

A project is the partition `project/ID`. An event of a project has two partitions: `project/ID`, and a partition that
the client chooses. As for every event, the principal must have write access to both.

Ids are separate in each project, so a project is also a scope. If an event's id is a UUID in its usual form, that UUID
is the key. Any other id is appended to the scope, and the key is a UUID derived from both. Readers with the native
dialect see the derived UUID, which differs between projects. `scope_of` escapes slashes and percent signs in a project
id, so a project's scope never equals the scope of an id in a different project.
"""

from functools import partial
from hashlib import sha256
from typing import Final

import msgspec
from msgspec import Struct

from oncelog.core.builders import format_uuid, parse_uuid
from oncelog.core.canonical import nfc
from oncelog.core.identity import normal_partitions, scope_of
from oncelog.core.limits import NAME_CHARACTERS_MAX, PARTITION_CHARACTERS_MAX
from oncelog.errors import CanonicalError
from oncelog.server.errors import raise_first

PROJECT_PREFIX: Final = "project"
EVENT_ID_CHARACTERS_MAX: Final = NAME_CHARACTERS_MAX - PARTITION_CHARACTERS_MAX - 1
"""Longest event id: project and id together must fit into a scope."""
_UUID_VERSION: Final = 8
_decode_names: Final = msgspec.json.Decoder(tuple[str, ...]).decode


class Project(Struct, frozen=True):
    """One project. `parse_project` creates it."""

    id: str
    partition: str
    scope: str

    def get_partitions(self, own: str, path: str = "$") -> tuple[str, ...]:
        """Return the two partitions of an event. Raises CanonicalError with the path if `own` cannot be a partition."""
        _check_name(own, own, path)
        return normal_partitions([self.partition, own])

    def is_foreign(self, own: object) -> bool:
        """Return whether this partition of an event belongs to a different project."""
        return isinstance(own, str) and own.startswith(f"{PROJECT_PREFIX}/") and own != self.partition

    def find_own_partition(self, partitions_text: str) -> str:
        """Return the first partition in a JSON array that is not the partition of the project.

        An event written in the native dialect may have only the project's partition, which is then the result.
        """
        return next((name for name in _decode_names(partitions_text) if name != self.partition), self.partition)

    def to_scope_and_key(self, event_id: str) -> tuple[str, bytes]:
        """Return the scope and the key for an event id."""
        key = _parse_canonical_uuid(event_id)
        if key is not None:
            return self.scope, key
        scope = f"{self.scope}/{event_id}"
        return scope, _derive_uuid(scope)

    def to_event_id(self, scope: str, key: bytes) -> str:
        """Return the event id for a scope and a key: the UUID, if the event was written in the native dialect."""
        before = f"{self.scope}/"
        return scope.removeprefix(before) if scope.startswith(before) else format_uuid(key)


def parse_project(project_id: str, path: str = "$") -> Project:
    """Return the project with this id. Raises CanonicalError with the path if the id cannot be part of a partition."""
    partition, scope = f"{PROJECT_PREFIX}/{project_id}", scope_of(PROJECT_PREFIX, project_id)
    _check_name(partition, project_id, path)
    if len(scope) > PARTITION_CHARACTERS_MAX:
        raise CanonicalError(
            path,
            f"makes a scope of {len(scope)} characters; at most {PARTITION_CHARACTERS_MAX} are allowed",
        )
    return Project(project_id, partition, scope)


def _check_name(partition: str, own: str, path: str) -> None:
    """Raise CanonicalError with the path for a malformed name.

    Readers expect a name as it was sent, but partitions are stored in NFC, so the name must already be in NFC.
    """
    size, size_max = len(partition), PARTITION_CHARACTERS_MAX
    raise_first(
        partial(CanonicalError, path),
        (not own, "must not be empty"),
        (size > size_max, f"makes a partition of {size} characters; at most {size_max} are allowed"),
        ("\0" in own, "must not contain U+0000"),
    )
    if nfc(partition) != partition:
        raise CanonicalError(path, "must be in NFC")


def _parse_canonical_uuid(text: str) -> bytes | None:
    """Return the bytes of a UUID in lower case. A UUID in any other spelling is an ordinary string id."""
    try:
        key = parse_uuid(text)
    except CanonicalError:
        return None
    return key if format_uuid(key) == text else None


def _derive_uuid(scope: str) -> bytes:
    """Derive a version 8 UUID (RFC 9562, 5.8) that contains 122 bits of SHA-256."""
    digest = bytearray(sha256(scope.encode()).digest()[:16])
    digest[6] = _UUID_VERSION << 4 | digest[6] & 0x0F
    digest[8] = 0x80 | digest[8] & 0x3F
    return bytes(digest)
