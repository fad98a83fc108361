"""Projects of the second dialect in the words of the first: what partition, scope and key are theirs (EV-18).

A project is the partition `project/ID`, and an event of it has two partitions: that one, and its own as the client
names it. Both must be writable, as for every event.

Ids are a project's own. So a project is a scope too, and the key is the UUID that an event has for its id. An id that
is no UUID in its usual form stands in the scope behind the project, and its key is a UUID that is made of both: readers
of the first dialect see that one, and it is another one in every project. In the scope a slash or a percent sign in a
project's id is escaped (`scope_of`), so that no project can be taken for an id in another one.
"""

from hashlib import sha256
from typing import Final
from uuid import UUID

import msgspec
from msgspec import Struct

from oncelog.core.builders import parse_uuid
from oncelog.core.canonical import nfc
from oncelog.core.identity import normal_partitions, scope_of
from oncelog.core.limits import NAME_CHARACTERS_MAX, PARTITION_CHARACTERS_MAX
from oncelog.errors import CanonicalError

PROJECT_PREFIX: Final = "project"
EVENT_ID_CHARACTERS_MAX: Final = NAME_CHARACTERS_MAX - PARTITION_CHARACTERS_MAX - 1
"""Of an event's id: with its project before it, it must be a scope."""
_UUID_VERSION: Final = 8
_decode_names: Final = msgspec.json.Decoder(tuple[str, ...]).decode


class Project(Struct, frozen=True):
    """One project. Make it with `parse_project`."""

    id: str
    partition: str
    scope: str

    def get_partitions(self, own: str, path: str = "$") -> tuple[str, ...]:
        """Both partitions of an event. Raises CanonicalError with the path if its own can be none."""
        _check_name(own, own, path)
        return normal_partitions([self.partition, own])

    def is_foreign(self, own: object) -> bool:
        """Whether an event's own partition would make it another project's too."""
        return isinstance(own, str) and own.startswith(f"{PROJECT_PREFIX}/") and own != self.partition

    def find_own_partition(self, partitions_text: str) -> str:
        """Its own partition, by all that it has (as a JSON array): the first that is not the project's.

        One that was written in the first dialect may have none but the project's, and then that is it.
        """
        return next((name for name in _decode_names(partitions_text) if name != self.partition), self.partition)

    def to_scope_and_key(self, event_id: str) -> tuple[str, bytes]:
        """Scope and key of an id."""
        key = _parse_canonical_uuid(event_id)
        if key is not None:
            return self.scope, key
        scope = f"{self.scope}/{event_id}"
        return scope, _derive_uuid(scope)

    def to_event_id(self, scope: str, key: bytes) -> str:
        """And back. An event that was not written as the project's has its UUID."""
        before = f"{self.scope}/"
        return scope.removeprefix(before) if scope.startswith(before) else str(UUID(bytes=key))


def parse_project(project_id: str, path: str = "$") -> Project:
    """Raises CanonicalError with the path for an id that cannot be a partition's name."""
    partition, scope = f"{PROJECT_PREFIX}/{project_id}", scope_of(PROJECT_PREFIX, project_id)
    _check_name(partition, project_id, path)
    if len(scope) > PARTITION_CHARACTERS_MAX:
        raise CanonicalError(
            path, f"must make a scope of at most {PARTITION_CHARACTERS_MAX} characters, not {len(scope)}"
        )
    return Project(project_id, partition, scope)


def _check_name(partition: str, own: str, path: str) -> None:
    """It is shown as it was sent, and partitions are kept in NFC: another spelling would come back as this one."""
    if not own:
        raise CanonicalError(path, "must not be empty")
    if len(partition) > PARTITION_CHARACTERS_MAX:
        raise CanonicalError(
            path, f"must make a partition of at most {PARTITION_CHARACTERS_MAX} characters, not {len(partition)}"
        )
    if "\0" in own:
        raise CanonicalError(path, "must not have U+0000")
    if nfc(partition) != partition:
        raise CanonicalError(path, "must be in Unicode's normal form C")


def _parse_canonical_uuid(text: str) -> bytes | None:
    """The bytes of a UUID in lower case. In another spelling it is another id, as any other text is."""
    try:
        key = parse_uuid(text)
    except CanonicalError:
        return None
    return key if str(UUID(bytes=key)) == text else None


def _derive_uuid(scope: str) -> bytes:
    """A UUID of version 8 (RFC 9562, 5.8): 122 bits of a SHA-256."""
    digest = bytearray(sha256(scope.encode()).digest()[:16])
    digest[6] = _UUID_VERSION << 4 | digest[6] & 0x0F
    digest[8] = 0x80 | digest[8] & 0x3F
    return bytes(digest)
