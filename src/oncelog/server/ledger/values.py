"""The Ledger API's writes and answers, independent of the transport. Binary values are bytes."""

from enum import IntEnum
from typing import Any

from msgspec import Struct

from oncelog.core.operations import Operation
from oncelog.core.proof import Attestation, Block
from oncelog.core.values import Receipt

Members = dict[str, Any]
"""An answer or a part of one, under the names that JSON and gRPC messages share."""


class Write(Struct, frozen=True, gc=False):
    """A requested write that has not been checked yet."""

    organization: str
    vault: str
    client_id: str
    sequence: int
    key: bytes
    operations: tuple[Operation, ...]
    is_batch: bool = False
    """Whether the request is a batch. Duplicates of a batch are answered with ALREADY_COMMITTED (LG-17)."""


class WriteSuccess(Struct, frozen=True, gc=False):
    """The answer to a committed transaction, and to its retries while it is in memory."""

    receipt: Receipt
    attestation: Attestation


class WriteErrorCode(IntEnum):
    """Outcomes of writes that this request did not commit, with their gRPC numbers (LG-20)."""

    KEY_EXISTS = 1
    KEY_NOT_FOUND = 2
    VERSION_MISMATCH = 3
    VALUE_MISMATCH = 4
    ALREADY_COMMITTED = 5
    IDEMPOTENCY_KEY_REUSED = 6
    SEQUENCE_GAP = 7
    SEQUENCE_REUSED = 8


class WriteError(Struct, frozen=True, gc=False):
    """The answer to a write that this request did not commit. The gRPC call itself succeeds."""

    code: WriteErrorCode
    message: str
    members: Members
    """Details, under the names that JSON and gRPC messages share."""


WriteAnswer = WriteSuccess | WriteError


def to_header_members(block: Block) -> Members:
    """Return the members of a block's header, for JSON and gRPC messages."""
    return {
        "lane": block.lane,
        "height": block.height,
        "first_position": block.first_position,
        "count": block.count,
        "timestamp_ms": block.log_time_ms,
        "previous_hash": block.previous,
        "merkle_root": block.root,
        "hash": block.hash,
    }
