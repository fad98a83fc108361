"""The messages of the ledger's gRPC service, as a client makes and reads them."""

from collections.abc import Sequence
from typing import Final

from oncelog.client.ledger.values import (
    ClientState,
    LedgerBlock,
    LedgerEntity,
    LedgerRelationship,
    LedgerTransaction,
    RefusalCode,
    Refused,
    TransactionProof,
)
from oncelog.core.operations import Operation
from oncelog.core.policy import LEDGER
from oncelog.core.proof import Block, Proof
from oncelog.core.values import Record
from oncelog.errors import CanonicalError, ProtocolError
from oncelog.ledger.operation_codec import decode_operation, encode_operation
from oncelog.ledger.v1 import ledger_pb2 as pb

REFUSAL_CODES: Final = frozenset(map(int, RefusalCode))

# --- what is sent ------------------------------------------------------------------------------------


def encode_operations(given: Sequence[Operation]) -> list[pb.Operation]:
    """Operations of a write."""
    return [encode_operation(one) for one in given]


# --- what comes back ---------------------------------------------------------------------------------


def decode_refusal(error: pb.WriteError) -> Refused:
    """A write that came to nothing."""
    return Refused(
        RefusalCode(error.code),
        error.message,
        error.key,
        error.current_version if error.HasField("current_version") else None,
        error.current_value if error.HasField("current_value") else None,
        error.operation_index if error.HasField("operation_index") else None,
    )


def decode_client_state(state: pb.GetClientStateResponse) -> ClientState:
    """Where a client stands."""
    return ClientState(
        state.last_committed_sequence, state.last_seen_ms, state.last_idempotency_key, state.last_request_hash
    )


def decode_entity(found: pb.Entity) -> LedgerEntity:
    """An entity."""
    expires_at_ms = found.expires_at_ms if found.HasField("expires_at_ms") else None
    return LedgerEntity(found.key, found.value, found.version, expires_at_ms, found.erased)


def decode_relationship(found: pb.StoredRelationship) -> LedgerRelationship:
    """A relationship."""
    return LedgerRelationship(found.resource, found.relation, found.subject, found.version)


def decode_transaction(found: pb.Transaction) -> LedgerTransaction:
    """A transaction."""
    return LedgerTransaction(
        found.tx_id,
        found.client_id,
        found.sequence,
        found.idempotency_key,
        _decode_operations(found.operations),
        found.timestamp_ms,
        found.actor,
        found.block_height,
        found.version,
        found.request_hash,
        found.erased,
    )


def _decode_operations(messages: Sequence[pb.Operation]) -> tuple[Operation, ...]:
    try:
        return tuple([decode_operation(one, index) for index, one in enumerate(messages)])
    except CanonicalError as error:
        message = f"the server has an operation that this client does not know, and may be of a newer version: {error}"
        raise ProtocolError(message) from error


def decode_header(given: pb.BlockHeader) -> Block:
    """A block's header."""
    return Block(
        given.lane,
        given.height,
        given.first_position,
        given.count,
        given.timestamp_ms,
        given.previous_hash,
        given.merkle_root,
    )


def decode_block(given: pb.Block) -> LedgerBlock:
    """A block with the scope's own transactions."""
    return LedgerBlock(decode_header(given.header), given.header.hash, tuple(given.tx_ids), given.epoch)


def decode_write_proof(
    success: pb.WriteSuccess, scope: str, client_id: str, key: bytes, *, request_hash: bytes, body: bytes
) -> TransactionProof:
    """The proof that came with a write: of the record that we know it must be. `said` is its request hash."""
    given, block_header = success.transaction_proof, decode_header(success.block_header)
    record = Record(
        lane=block_header.lane,
        position=block_header.first_position + given.index,
        sequence=success.version,
        log_time_ms=success.timestamp_ms,
        height=success.block_height,
        policy=LEDGER.name,
        scope=scope,
        key=key,
        fingerprint=request_hash,
        actor=success.actor,
        client=client_id,
        client_sequence=success.assigned_sequence,
        partitions=(),
        body=body,
    )
    return TransactionProof(record, given.salt, b"", Proof(given.index, given.count, tuple(given.path)), block_header)


def decode_proof(document: pb.ProofDocument) -> TransactionProof:
    """All that proves a transaction."""
    given = document.record
    erased = not document.HasField("body")
    record = Record(
        given.lane,
        given.position,
        given.sequence,
        given.log_time_ms,
        given.height,
        given.policy,
        given.scope,
        given.key,
        given.fingerprint,
        given.actor,
        given.client,
        given.client_sequence,
        tuple(given.partitions),
        b"" if erased else document.body,
        erased,
    )
    return TransactionProof(
        record,
        b"" if erased else document.salt,
        document.body_hash,
        Proof(document.index, document.count, tuple(document.path)),
        decode_header(document.block),
    )
