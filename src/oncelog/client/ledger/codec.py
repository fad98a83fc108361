"""Decode answers from the ledger's gRPC service."""

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
from oncelog.ledger.operation_codec import decode_operation
from oncelog.ledger.v1 import ledger_pb2 as pb

REFUSAL_CODES: Final = frozenset(map(int, RefusalCode))


def decode_refusal(error: pb.WriteError) -> Refused:
    """Decode the refusal of a write."""
    return Refused(
        RefusalCode(error.code),
        error.message,
        error.key,
        error.current_version if error.HasField("current_version") else None,
        error.current_value if error.HasField("current_value") else None,
        error.operation_index if error.HasField("operation_index") else None,
    )


def decode_client_state(state: pb.GetClientStateResponse) -> ClientState:
    """Decode a client's state."""
    return ClientState(
        state.last_committed_sequence, state.last_seen_ms, state.last_idempotency_key, state.last_request_hash
    )


def decode_entity(found: pb.Entity) -> LedgerEntity:
    """Decode an entity."""
    expires_at_ms = found.expires_at_ms if found.HasField("expires_at_ms") else None
    return LedgerEntity(found.key, found.value, found.version, expires_at_ms, found.erased)


def decode_relationship(found: pb.StoredRelationship) -> LedgerRelationship:
    """Decode a relationship."""
    return LedgerRelationship(found.resource, found.relation, found.subject, found.version)


def decode_transaction(found: pb.Transaction) -> LedgerTransaction:
    """Decode a transaction."""
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
        return tuple([decode_operation(operation, index) for index, operation in enumerate(messages)])
    except CanonicalError as error:
        message = f"unknown operation; the server may be newer than this client: {error}"
        raise ProtocolError(message) from error


def decode_header(header: pb.BlockHeader) -> Block:
    """Decode a block header."""
    return Block(
        header.lane,
        header.height,
        header.first_position,
        header.count,
        header.timestamp_ms,
        header.previous_hash,
        header.merkle_root,
    )


def decode_block(block: pb.Block) -> LedgerBlock:
    """Decode a block and the ids of the scope's transactions in it."""
    return LedgerBlock(decode_header(block.header), block.header.hash, tuple(block.tx_ids), block.epoch)


def decode_write_proof(
    success: pb.WriteSuccess, scope: str, client_id: str, key: bytes, *, request_hash: bytes, body: bytes
) -> TransactionProof:
    """Decode the proof in the answer to a write, and build the record that it must prove."""
    proof, block_header = success.transaction_proof, decode_header(success.block_header)
    record = Record(
        lane=block_header.lane,
        position=block_header.first_position + proof.index,
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
    return TransactionProof(record, proof.salt, b"", Proof(proof.index, proof.count, tuple(proof.path)), block_header)


def decode_proof(document: pb.ProofDocument) -> TransactionProof:
    """Decode the proof of a transaction."""
    record_message = document.record
    erased = not document.HasField("body")
    record = Record(
        record_message.lane,
        record_message.position,
        record_message.sequence,
        record_message.log_time_ms,
        record_message.height,
        record_message.policy,
        record_message.scope,
        record_message.key,
        record_message.fingerprint,
        record_message.actor,
        record_message.client,
        record_message.client_sequence,
        tuple(record_message.partitions),
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
