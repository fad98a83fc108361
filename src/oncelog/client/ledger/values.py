"""Types of the ledger client's public API: operations, write outcomes, read results, errors and limits."""

from enum import IntEnum
from typing import Final
from uuid import UUID

from msgspec import Struct

from oncelog.client.runtime.values import MIB, BaseCommitted, BaseLimits, BaseRefused, BaseStatus
from oncelog.core.operations import Condition, DeleteEntity, Must, Operation, Relate, SetEntity, Unrelate
from oncelog.core.proof import Block, Proven, verify, verify_header
from oncelog.errors import CanonicalError, ClientError

# --- operations --------------------------------------------------------------------------------------


def set_entity(
    key: str,
    value: bytes,
    *,
    expires_at_ms: int | None = None,
    must_not_exist: bool = False,
    must_exist: bool = False,
    version_is: int | None = None,
    value_equals: bytes | None = None,
) -> Operation:
    """Return an operation that sets an entity, under at most one condition.

    `expires_at_ms` is a log time in milliseconds since 1970. From then on the entity counts as absent. Raises
    CanonicalError for an invalid argument.
    """
    for name, condition_value in (("value", value), ("value_equals", value_equals)):
        if not isinstance(condition_value, bytes) and (name == "value" or condition_value is not None):
            raise CanonicalError(name, f"must be bytes, not {type(condition_value).__name__}")
    for name, number in (("expires_at_ms", expires_at_ms), ("version_is", version_is)):
        if number is not None and type(number) is not int:
            raise CanonicalError(name, f"must be a whole number, not {type(number).__name__}")
    possible_conditions = (
        (must_not_exist, Condition(Must.NOT_EXIST)),
        (must_exist, Condition(Must.EXIST)),
        (version_is is not None, Condition(Must.HAVE_VERSION, version=version_is or 0)),
        (value_equals is not None, Condition(Must.HAVE_VALUE, value=value_equals or b"")),
    )
    conditions = [condition for is_given, condition in possible_conditions if is_given]
    if len(conditions) > 1:
        raise CanonicalError("condition", "must be at most one of must_not_exist, must_exist, version_is, value_equals")
    return SetEntity(_check_text(key, "key"), value, expires_at_ms, conditions[0] if conditions else None)


def delete_entity(key: str) -> Operation:
    """Return an operation that deletes an entity. It has no effect if the entity does not exist."""
    return DeleteEntity(_check_text(key, "key"))


def relate(resource: str, relation: str, subject: str) -> Operation:
    """Return an operation that creates a relationship. It has no effect if the relationship exists."""
    return Relate(_check_text(resource, "resource"), _check_text(relation, "relation"), _check_text(subject, "subject"))


def unrelate(resource: str, relation: str, subject: str) -> Operation:
    """Return an operation that deletes a relationship. It has no effect if the relationship does not exist."""
    return Unrelate(
        _check_text(resource, "resource"), _check_text(relation, "relation"), _check_text(subject, "subject")
    )


def _check_text(text: str, name: str) -> str:
    if not isinstance(text, str):
        raise CanonicalError(name, f"must be a string, not {type(text).__name__}")
    return text


# --- outcomes of writes ------------------------------------------------------------------------------


class RefusalCode(IntEnum):
    """Reasons for refusing a write, numbered as on the wire (LG-20)."""

    KEY_EXISTS = 1
    KEY_NOT_FOUND = 2
    VERSION_MISMATCH = 3
    VALUE_MISMATCH = 4
    IDEMPOTENCY_KEY_REUSED = 6


class Written(BaseCommitted, frozen=True):
    """The transaction is committed, exactly once."""

    tx_id: str | None
    """None if the server has evicted its answer. In that case only the sequence is known."""
    sequence: int
    """Client sequence of the transaction."""
    version: int | None = None
    """Version of every entity that the transaction set.

    The server omits `version`, `height` and `timestamp_ms` if it restarted before it answered and the client may write
    but not read."""
    height: int | None = None
    timestamp_ms: int | None = None
    is_replay: bool = False
    """Whether the server answered ALREADY_COMMITTED. If the server answers a retry from its cache, the answer equals
    the first one and this is False."""


class Refused(BaseRefused, frozen=True):
    """The write was refused. Nothing was written, and the sequence is still free."""

    code: RefusalCode
    message: str
    key: str = ""
    """Entity whose condition failed. `current_version` and `current_value` describe it, and are unset if it does not
    exist."""
    current_version: int | None = None
    current_value: bytes | None = None
    operation_index: int | None = None

    def _get_code_and_message(self) -> tuple[str, str]:
        return self.code.name, self.message


Outcome = Written | Refused


class Status(BaseStatus, frozen=True, kw_only=True):
    """Status of a scope for a user interface. A scope is live while the server answers its writes."""


class PendingWrite(Struct, frozen=True):
    """A write without a known outcome."""

    key: UUID
    sequence: int
    operations: tuple[Operation, ...]


class Recovered(Struct, frozen=True):
    """A write from an earlier run and its outcome."""

    key: UUID
    operations: tuple[Operation, ...]
    outcome: Outcome | Exception | None
    """An error if the server refused to process the write, or None if the application withdrew it (`resume`,
    `withdraw`)."""


class ForgottenError(ClientError):
    """The server has lost this client's state, because it evicted the client or a backup was restored.

    The client sends nothing until `resume` is called. The server cannot tell whether the `pending` writes were
    committed, and would accept each of them as a new write.
    """

    def __init__(self, last_sequence: int, server_sequence: int, pending: tuple[PendingWrite, ...]) -> None:
        if last_sequence == 0:
            why = "may have evicted this client: its first write has no answer and is too old"
        elif server_sequence == 0:
            why = f"has evicted this client, whose last sequence was {last_sequence}"
        else:
            why = f"has an older state of this client: its last sequence is {server_sequence}, but was {last_sequence}"
        super().__init__(
            f"the server {why}. It cannot tell whether the {len(pending)} pending writes were committed; "
            "the client sends nothing until resume(resend=…) is called"
        )
        self.last_sequence = last_sequence
        self.server_sequence = server_sequence
        self.pending = pending


class UnverifiedError(ClientError):
    """A proof or a chain of blocks does not verify. For a write, `tx_id` is the transaction id that the server sent."""

    def __init__(self, message: str, tx_id: str | None = None) -> None:
        super().__init__(message)
        self.tx_id = tx_id


# --- results of reads --------------------------------------------------------------------------------


class ClientState(Struct, frozen=True):
    """The client state that the server stores for a scope. For an unknown client, all fields are zero or empty."""

    last_sequence: int = 0
    last_seen_ms: int = 0
    last_key: bytes = b""
    last_request_hash: bytes = b""


class LedgerEntity(Struct, frozen=True):
    """Current state of an entity."""

    key: str
    value: bytes
    version: int
    expires_at_ms: int | None = None
    erased: bool = False
    """Whether the value was erased, together with the transaction that set it. `value` is then empty."""


class LedgerRelationship(Struct, frozen=True):
    """A relationship and the version that created it."""

    resource: str
    relation: str
    subject: str
    version: int


class LedgerTransaction(Struct, frozen=True):
    """A committed transaction. An erased transaction has no operations."""

    tx_id: str
    client_id: str
    sequence: int
    key: bytes
    operations: tuple[Operation, ...]
    timestamp_ms: int
    actor: str
    height: int
    version: int
    request_hash: bytes
    is_erased: bool = False


class LedgerBlock(Struct, frozen=True):
    """A block of the scope's lane, and the ids of the scope's transactions in it."""

    block: Block
    hash: bytes
    """Hash that the server sent. It equals `block.hash` if the block is valid."""
    tx_ids: tuple[str, ...]
    epoch: str = ""
    """Epoch of the log when the server sent the block."""


class TransactionProof(Proven, frozen=True):
    """The proof of a transaction. `oncelog.proof.proof_document` converts it to a document."""

    @property
    def is_valid(self) -> bool:
        """Whether the record is in the block at its position.

        The result does not show that the block itself can be trusted.
        """
        if self.record.erased:
            return verify_header(self.record, self.body_hash, self.proof, self.block)
        return verify(self.record, self.salt, self.proof, self.block)


CONDITION_CODES: Final = frozenset(
    {
        RefusalCode.KEY_EXISTS,
        RefusalCode.KEY_NOT_FOUND,
        RefusalCode.VERSION_MISMATCH,
        RefusalCode.VALUE_MISMATCH,
    }
)


class LedgerLimits(BaseLimits, frozen=True, kw_only=True):
    """Limits and timeouts of a ledger client."""

    pending_writes_max: int = 10_000
    """Writes per scope without an outcome. Beyond this, `write` raises LimitExceededError."""
    pending_bytes_max: int = 256 * MIB
    """Total size of the pending writes of a scope, which the client also keeps in memory."""
    transaction_bytes_max: int = 4_000_000
    """Size of a transaction on the wire. By default, servers accept messages of up to 4 MiB."""
    value_bytes_max: int = MIB
    """Size of an entity's value. The server's default limit is the same."""
    in_flight_max: int = 64
    """Writes per scope that may be in flight at the same time."""
    close_timeout_ms: int = 5000
    """How long `close` waits for the answers to sent writes."""
    idle_ms: int = 3_600_000
    """Idle time after which the client requests its state from the server before it sends the next write."""
    pause_ms_min: int = 100
    """Pause before the first retry. Each later pause is twice as long as the one before."""
    pause_ms_max: int = 10_000
    reconnect_ms_max: int = 1000
    """Interval between attempts to connect. A pause before a retry ends as soon as the client is reconnected."""
