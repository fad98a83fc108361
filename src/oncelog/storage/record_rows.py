"""Decodes records and evidence from rows, and names the errors that mean damage."""

from collections.abc import Iterable
from typing import Any, Final

import msgspec

from oncelog.core.proof import hash_body
from oncelog.core.values import Record
from oncelog.storage.store import Evidence
from oncelog.storage.tenants import decode_partitions

DAMAGE_ERRORS: Final = (msgspec.MsgspecError, UnicodeError, TypeError)
"""Raised while a stored value is decoded or used that no log has written.

SQLite stores a value of any type in any column, so a damaged file can have text where the log stores a number.
"""


def decode_record(row: Iterable[Any]) -> Record:
    """A record from the columns of a page's statement."""
    (lane, position, sequence, log_time_ms, height, policy, scope, key, fingerprint, actor, client, number, partitions,
     body) = row  # fmt: skip
    return Record(
        lane,
        position,
        sequence,
        log_time_ms,
        height,
        policy,
        scope,
        key,
        fingerprint,
        actor,
        client,
        number,
        decode_partitions(partitions),
        b"" if body is None else body,
        body is None,
    )


def decode_evidence(row: Iterable[Any]) -> Evidence:
    """A record with all that its hash is made of: salt and the hash of an erased body stand behind the body."""
    *columns, body, salt, kept_hash = row
    if body is None:
        return Evidence(decode_record((*columns, body)), b"", kept_hash)
    return Evidence(decode_record((*columns, body)), salt, hash_body(salt, body))
