"""Sizes of stored records and side state, as quotas count them.

The size of a record or a row of side state depends only on its content, so all stores count the same, and a recount
gives the same total. Names are counted several times because a log stores them in rows and in indexes. The constants
cover fixed-size columns, index entries and blocks. A database grows by at most `GROWTH_FACTOR_MAX` bytes per counted
byte.
"""

from typing import Final

from oncelog.core.merge import Row, encode_row
from oncelog.core.operations import Entity
from oncelog.core.values import EntityIdentity, MemberIdentity, RelationshipIdentity, RowIdentity, Submission

RECORD_BYTES: Final = 256
"""Added for each record."""
PARTITION_BYTES: Final = 32
"""Added for each partition of a record."""
MEMBER_BYTES: Final = 256
"""Added for each member of a stream."""
STATE_BYTES: Final = 64
"""Added for each entity, relationship and row."""
NAME_COPIES: Final = 2
MEMBER_NAME_COPIES: Final = 4
"""A log indexes members by stream, by member and by their last change."""
GROWTH_FACTOR_MAX: Final = 4
"""Maximum growth of a database per counted byte: pages are not full, and PostgreSQL adds 28 bytes per row."""


def record_bytes(names: int, partitions: tuple[str, ...], body: int) -> int:
    """Return the size of a record. `names` is the total UTF-8 length of scope, client, key and actor."""
    in_partitions = sum([PARTITION_BYTES + NAME_COPIES * utf8_bytes(name) for name in partitions])
    return RECORD_BYTES + body + NAME_COPIES * names + in_partitions


def submission_bytes(submission: Submission) -> int:
    """Return the size of a submission's record."""
    names = utf8_bytes(submission.scope) + utf8_bytes(submission.client) + utf8_bytes(submission.actor)
    return record_bytes(names + len(submission.key), submission.partitions, len(submission.body))


def act_bytes(scope: str, actor: str, key: bytes, body: bytes) -> int:
    """Return the size of the audit record of an administrative act."""
    return record_bytes(utf8_bytes(scope) + utf8_bytes(actor) + len(key), (), len(body))


def state_bytes(scope: str, rows: int, names: int, values: int) -> int:
    """Return the size of side-state rows in one scope, with `names` bytes of other names and `values` bytes of
    values."""
    return rows * (STATE_BYTES + NAME_COPIES * utf8_bytes(scope)) + NAME_COPIES * names + values


def members_bytes(scope: str, members: int, names: int) -> int:
    """Return the size of a stream's members, whose names total `names` bytes."""
    return members * (MEMBER_BYTES + MEMBER_NAME_COPIES * utf8_bytes(scope)) + MEMBER_NAME_COPIES * names


def entity_bytes(identity: EntityIdentity, entity: Entity | None) -> int:
    """Return the size of an entity, or 0 for None."""
    scope, key = identity
    return 0 if entity is None else state_bytes(scope, 1, utf8_bytes(key), len(entity.value))


def relationship_bytes(identity: RelationshipIdentity, version: int | None) -> int:
    """Return the size of a relationship, or 0 if it has no version."""
    scope, *names = identity
    return 0 if version is None else state_bytes(scope, 1, sum(map(utf8_bytes, names)), 0)


def row_bytes(identity: RowIdentity, row: Row | None) -> int:
    """Return the size of a merged row, or 0 for None."""
    scope, table, row_id = identity
    return 0 if row is None else state_bytes(scope, 1, utf8_bytes(table) + utf8_bytes(row_id), len(encode_row(row)))


def member_bytes(identity: MemberIdentity) -> int:
    """Return the size of a member."""
    scope, member = identity
    return members_bytes(scope, 1, utf8_bytes(member))


def utf8_bytes(text: str) -> int:
    """Return the length of a string in UTF-8."""
    return len(text) if text.isascii() else len(text.encode())
