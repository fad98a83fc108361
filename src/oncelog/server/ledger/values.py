"""Requests and answers of the Ledger API, independent of the transport. Binary values are bytes."""

from enum import IntEnum

from msgspec import Struct

from oncelog.core.operations import Entity, Operation
from oncelog.core.proof import Block, Proof
from oncelog.core.values import Record


class Scope(Struct, frozen=True, gc=False):
    """An organization, or a vault of one."""

    organization: str
    vault: str
    name: str
    """Of its stream; grants are asked for it."""


class Write(Struct, frozen=True, gc=False):
    """A write as it was asked for, not checked yet."""

    organization: str
    vault: str
    client_id: str
    sequence: int
    key: bytes
    operations: tuple[Operation, ...]
    is_batch: bool = False
    """Whether the request is a batch, whose duplicates are answered with ALREADY_COMMITTED (LG-17)."""


class WriteSuccess(Struct, frozen=True, gc=False):
    """A transaction has been committed: what its first answer said, and what every other from memory says."""

    tx_id: str
    block: Block
    proof: Proof
    salt: bytes
    assigned_sequence: int
    version: int
    timestamp_ms: int
    actor: str


class WriteErrorCode(IntEnum):
    """Outcomes that are no success. Their numbers are those of the wire (LG-20)."""

    KEY_EXISTS = 1
    KEY_NOT_FOUND = 2
    VERSION_MISMATCH = 3
    VALUE_MISMATCH = 4
    ALREADY_COMMITTED = 5
    IDEMPOTENCY_KEY_REUSED = 6
    SEQUENCE_GAP = 7
    SEQUENCE_REUSED = 8


class WriteError(Struct, frozen=True, gc=False, kw_only=True):
    """Data of a successful call: what became of the write in place of a success."""

    code: WriteErrorCode
    message: str
    key: str = ""
    """The entity of a failed condition, and how it stands: nothing where it does not exist."""
    current_version: int | None = None
    current_value: bytes | None = None
    operation_index: int | None = None
    tx_id: str | None = None
    """Of ALREADY_COMMITTED, as far as it is remembered."""
    block_height: int | None = None
    assigned_sequence: int | None = None
    erased: bool = False
    last_committed_sequence: int | None = None


WriteAnswer = WriteSuccess | WriteError


class ClientState(Struct, frozen=True, gc=False):
    """Where a client stands in a scope; all zero and empty for one never seen, or evicted."""

    last_committed_sequence: int = 0
    last_seen_ms: int = 0
    last_key: bytes = b""
    last_request_hash: bytes = b""


class Entities(Struct, frozen=True, gc=False):
    """A page of entities."""

    entities: list[tuple[str, Entity]]
    next_page_token: str


class Relationships(Struct, frozen=True, gc=False):
    """A page of relationships: resource, relation, subject, version."""

    relationships: list[tuple[str, str, str, int]]
    next_page_token: str


class Transaction(Struct, frozen=True, gc=False):
    """A transaction as it was committed."""

    tx_id: str
    record: Record
    operations: tuple[Operation, ...]
    """None of an erased one."""


class ScopeBlock(Struct, frozen=True, gc=False):
    """A block of a scope's lane, with the ids of the scope's own transactions."""

    block: Block
    tx_ids: tuple[str, ...]
    epoch: str
    """Of the history that its height belongs to."""
