"""What a client of the ledger is asked and told. Outcomes of a write are values; bytes are bytes here."""

from enum import IntEnum
from typing import Final
from uuid import UUID

from msgspec import Struct

from oncelog.client.runtime.values import MIB, BaseLimits, BaseStatus
from oncelog.core.operations import Condition, DeleteEntity, Must, Operation, Relate, SetEntity, Unrelate
from oncelog.core.proof import Block, Proof, verify, verify_header
from oncelog.core.values import Record
from oncelog.errors import CanonicalError, ClientError

# --- what is written ---------------------------------------------------------------------------------


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
    """Sets an entity, on one condition at most. Raises CanonicalError for what is none.

    From `expires_at_ms` (log time, milliseconds since 1970) on it counts as absent.
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
    """Deletes an entity; one that is not there stays so."""
    return DeleteEntity(_check_text(key, "key"))


def relate(resource: str, relation: str, subject: str) -> Operation:
    """Creates a relationship; one that is there stays as it is."""
    return Relate(_check_text(resource, "resource"), _check_text(relation, "relation"), _check_text(subject, "subject"))


def unrelate(resource: str, relation: str, subject: str) -> Operation:
    """Deletes a relationship; one that is not there stays so."""
    return Unrelate(
        _check_text(resource, "resource"), _check_text(relation, "relation"), _check_text(subject, "subject")
    )


def _check_text(text: str, name: str) -> str:
    if not isinstance(text, str):
        raise CanonicalError(name, f"must be a string, not {type(text).__name__}")
    return text


# --- what becomes of it ------------------------------------------------------------------------------


class RefusalCode(IntEnum):
    """Why a write came to nothing. The numbers are those of the wire (LG-20)."""

    KEY_EXISTS = 1
    KEY_NOT_FOUND = 2
    VERSION_MISMATCH = 3
    VALUE_MISMATCH = 4
    IDEMPOTENCY_KEY_REUSED = 6


class Written(Struct, frozen=True):
    """The transaction is in the ledger, once."""

    tx_id: str | None
    """None where the server has forgotten what it said; then nothing but the sequence is known."""
    sequence: int
    """The client's own, that it was committed under."""
    version: int | None = None
    """Of every entity that it set. None, as the next two, where this client may write and not read, and the answer
    came after a restart of the server."""
    height: int | None = None
    timestamp_ms: int | None = None
    is_replay: bool = False
    """The server said ALREADY_COMMITTED. (A retry that it answers from memory looks as the first answer did.)"""


class Refused(Struct, frozen=True):
    """Nothing was written, and no sequence was used."""

    code: RefusalCode
    message: str
    key: str = ""
    """The entity of a failed condition, and how it stands: both None where it does not exist."""
    current_version: int | None = None
    current_value: bytes | None = None
    operation_index: int | None = None


Outcome = Written | Refused


class Status(BaseStatus, frozen=True, kw_only=True):
    """How a scope stands, for a user interface. A scope is live as long as its writes are answered."""


class PendingWrite(Struct, frozen=True):
    """A write whose outcome is not known yet."""

    key: UUID
    sequence: int
    operations: tuple[Operation, ...]


class Recovered(Struct, frozen=True):
    """A write of an earlier run, and what became of it: an error where the server would not look at it."""

    key: UUID
    operations: tuple[Operation, ...]
    outcome: Outcome | Exception | None
    """None if the application gave the write up (`resume`, `withdraw`)."""


class ForgottenError(ClientError):
    """The server has forgotten this client, or was restored from a backup. Nothing is sent until `resume`.

    `pending` may have been committed or not: the server cannot tell any more, and would take each as a new one.
    """

    def __init__(self, last_sequence: int, server_sequence: int, pending: tuple[PendingWrite, ...]) -> None:
        if last_sequence == 0:
            why = "may have forgotten this client: its first write has no answer, and was made too long ago"
        elif server_sequence == 0:
            why = f"has forgotten this client, whose last sequence was {last_sequence}"
        else:
            why = f"knows less of this client than it did: its last sequence is {server_sequence}, was {last_sequence}"
        super().__init__(
            f"the server {why}. {len(pending)} writes are pending of which it cannot say whether they were committed; "
            "nothing is sent until resume(resend=…) says what becomes of them"
        )
        self.last_sequence = last_sequence
        self.server_sequence = server_sequence
        self.pending = pending


class UnverifiedError(ClientError):
    """What the server says does not verify. Of a write it says that it has been committed, as `tx_id`."""

    def __init__(self, message: str, tx_id: str | None = None) -> None:
        super().__init__(message)
        self.tx_id = tx_id


# --- what is read ------------------------------------------------------------------------------------


class ClientState(Struct, frozen=True):
    """Where the client stands in a scope; all zero and empty for one never seen, or forgotten."""

    last_sequence: int = 0
    last_seen_ms: int = 0
    last_key: bytes = b""
    last_request_hash: bytes = b""


class LedgerEntity(Struct, frozen=True):
    """An entity as it stands."""

    key: str
    value: bytes
    version: int
    expires_at_ms: int | None = None
    erased: bool = False
    """The value was erased with the transaction that set it, and is empty."""


class LedgerRelationship(Struct, frozen=True):
    """A relationship, and the version that made it."""

    resource: str
    relation: str
    subject: str
    version: int


class LedgerTransaction(Struct, frozen=True):
    """A transaction as it was committed. Of an erased one the operations are gone."""

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
    """A block of the scope's lane, with the ids of the scope's own transactions."""

    block: Block
    hash: bytes
    """As the server says it; `block.hash` is what it must be."""
    tx_ids: tuple[str, ...]
    epoch: str = ""
    """Epoch of the log when the server sent the block."""


class TransactionProof(Struct, frozen=True):
    """All that proves a transaction; `oncelog.proof.proof_document` makes a document of it."""

    record: Record
    salt: bytes
    """Empty of an erased one."""
    body_hash: bytes
    proof: Proof
    block: Block

    @property
    def is_valid(self) -> bool:
        """Whether the record stands in the block where it says. Whether the block can be trusted, nothing here says."""
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
    """What a client holds at most, and how long it waits."""

    pending_writes_max: int = 10_000
    """Writes of a scope without an outcome. Beyond it `write` raises LimitExceededError."""
    pending_bytes_max: int = 256 * MIB
    """Of all of them together; they are kept in memory too."""
    transaction_bytes_max: int = 4_000_000
    """Of one transaction on the wire. A server takes messages of 4 MiB unless it was told otherwise."""
    value_bytes_max: int = MIB
    """Of the value of one entity. The server's own limit is the same unless it was told otherwise."""
    in_flight_max: int = 64
    """Writes of a scope that are sent before the first of them is answered."""
    close_timeout_ms: int = 5000
    """How long `close` waits for the answers of what has been sent."""
    idle_ms: int = 3_600_000
    """After so long without a write, the server is asked where the client stands before the next one is sent."""
    pause_ms_min: int = 100
    """Before something is sent again; each further pause is twice as long."""
    pause_ms_max: int = 10_000
    reconnect_ms_max: int = 1000
    """Between attempts to reach a server that is away. When it is back the pause is over, however long it was to be."""
