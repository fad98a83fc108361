"""Decode records and evidence from rows. Errors indicate damage."""

from collections.abc import Iterable
from typing import Any, Final

import msgspec

from oncelog.core.proof import Evidence, hash_body
from oncelog.core.values import Record
from oncelog.storage.tenants import decode_partitions

DAMAGE_ERRORS: Final = (msgspec.MsgspecError, UnicodeError, TypeError)
"""Errors raised by decoding or using a stored value that Oncelog never writes.

SQLite stores a value of any type in any column, so a damaged file can have text where the log stores a number.
"""


def decode_record(row: Iterable[Any]) -> Record:
    """Return the record that a row of a page contains."""
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
    """Return a record with everything that its hash covers.

    In the row, the salt and the hash of an erased body follow the body.
    """
    *columns, body, salt, kept_hash = row
    if body is None:
        return Evidence(decode_record((*columns, body)), b"", kept_hash)
    return Evidence(decode_record((*columns, body)), salt, hash_body(salt, body))
