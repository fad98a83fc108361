"""Records from rows that begin with lane and position, as most databases have them, and damage in rows."""

from collections.abc import Iterable
from functools import lru_cache
from typing import Any, Final

import msgspec

from oncelog.core.proof import body_hash
from oncelog.core.values import Record
from oncelog.stores.protocol import Evidence

DAMAGE_ERRORS: Final = (msgspec.MsgspecError, UnicodeError, TypeError)
"""Raised while a stored value is decoded or used that no log has written.

SQLite stores a value of any type in any column, so a damaged file can have text where the log stores a number.
"""

_partitions: Final = lru_cache(maxsize=1024)(msgspec.json.Decoder(tuple[str, ...]).decode)


def record_of(row: Iterable[Any]) -> Record:
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
        _partitions(partitions),
        b"" if body is None else body,
        body is None,
    )


def evidence_of(row: Iterable[Any]) -> Evidence:
    """A record with all that its hash is made of: salt and the hash of an erased body stand behind the body."""
    *columns, body, salt, kept_hash = row
    if body is None:
        return Evidence(record_of((*columns, body)), b"", kept_hash)
    return Evidence(record_of((*columns, body)), salt, body_hash(salt, body))
