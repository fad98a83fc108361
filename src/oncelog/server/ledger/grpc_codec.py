"""Codec of the ledger's gRPC service: requests from messages, and answers to messages."""

from collections.abc import Sequence
from functools import lru_cache

from oncelog.core.operations import Entity
from oncelog.core.proof import Block
from oncelog.core.transactions import check_operation_count
from oncelog.engine.read_results import Proven
from oncelog.errors import CanonicalError
from oncelog.ledger.operation_codec import decode_operation, encode_operation
from oncelog.ledger.v1 import ledger_pb2 as pb
from oncelog.server.ledger.codec import check_batch_operations, check_one_scope
from oncelog.server.ledger.service import value_error
from oncelog.server.ledger.values import (
    ClientState,
    Entities,
    Relationships,
    ScopeBlock,
    Transaction,
    Write,
    WriteAnswer,
    WriteError,
    WriteSuccess,
)

# --- what comes in -----------------------------------------------------------------------------------


def decode_write(message: pb.WriteRequest) -> Write:
    """A write. Raises ApiError."""
    return _to_write(message, message.operations)


def decode_batch(message: pb.BatchWriteRequest) -> Write:
    """A batch: one write of all its operations. Raises ApiError."""
    scopes = [(item.organization, item.vault) for item in message.writes]
    check_one_scope((message.organization, message.vault), scopes)
    check_batch_operations([len(item.operations) for item in message.writes])
    return _to_write(message, [item for write in message.writes for item in write.operations], is_batch=True)


def _to_write(
    message: pb.WriteRequest | pb.BatchWriteRequest, operations: Sequence[pb.Operation], *, is_batch: bool = False
) -> Write:
    try:
        check_operation_count(len(operations))  # before any of them is looked at
        return Write(
            message.organization,
            message.vault,
            message.client_id,
            message.sequence,
            message.idempotency_key,
            tuple([decode_operation(operation, index) for index, operation in enumerate(operations)]),
            is_batch,
        )
    except CanonicalError as error:
        raise value_error(error) from error


# --- what goes out -----------------------------------------------------------------------------------


def encode_answer(write_answer: WriteAnswer) -> pb.WriteResponse:
    """What became of a write."""
    if isinstance(write_answer, WriteSuccess):
        return pb.WriteResponse(success=_encode_success(write_answer))
    return pb.WriteResponse(error=_encode_error(write_answer))


def _encode_success(success: WriteSuccess) -> pb.WriteSuccess:
    proof = success.proof
    return pb.WriteSuccess(
        committed_tx_id=success.tx_id,
        block_height=success.block.height,
        block_header=_encode_cached_header(success.block),
        transaction_proof=pb.TransactionProof(index=proof.index, count=proof.count, path=proof.path, salt=success.salt),
        assigned_sequence=success.assigned_sequence,
        version=success.version,
        timestamp_ms=success.timestamp_ms,
        actor=success.actor,
    )


@lru_cache(maxsize=256)
def _encode_cached_header(block: Block) -> pb.BlockHeader:
    """The same for all that were committed together. It is copied into what is sent, and never changed."""
    return encode_header(block)


def _encode_error(error: WriteError) -> pb.WriteError:
    return pb.WriteError(
        code=f"WRITE_ERROR_CODE_{error.code.name}",
        message=error.message,
        key=error.key,
        current_version=error.current_version,
        current_value=error.current_value,
        operation_index=error.operation_index,
        committed_tx_id=error.tx_id,
        block_height=error.block_height,
        assigned_sequence=error.assigned_sequence,
        erased=error.erased,
        last_committed_sequence=error.last_committed_sequence,
    )


def encode_header(block: Block) -> pb.BlockHeader:
    """A block's header."""
    return pb.BlockHeader(
        lane=block.lane,
        height=block.height,
        first_position=block.first_position,
        count=block.count,
        timestamp_ms=block.log_time_ms,
        previous_hash=block.previous,
        merkle_root=block.root,
        hash=block.hash,
    )


def encode_client_state(state: ClientState) -> pb.GetClientStateResponse:
    """Where a client stands."""
    return pb.GetClientStateResponse(
        last_committed_sequence=state.last_committed_sequence,
        last_seen_ms=state.last_seen_ms,
        last_idempotency_key=state.last_key,
        last_request_hash=state.last_request_hash,
    )


def encode_entity(found: tuple[str, Entity] | None) -> pb.GetEntityResponse:
    """An entity, or none."""
    return pb.GetEntityResponse(entity=None if found is None else _to_entity_message(*found))


def _to_entity_message(key: str, found: Entity) -> pb.Entity:
    return pb.Entity(
        key=key,
        value=found.value,
        version=found.version,
        expires_at_ms=found.expires_at_ms,
        erased=found.erased,
    )


def encode_entities(page: Entities) -> pb.ListEntitiesResponse:
    """A page of entities."""
    found = [_to_entity_message(key, entity) for key, entity in page.entities]
    return pb.ListEntitiesResponse(entities=found, next_page_token=page.next_page_token)


def encode_relationships(page: Relationships) -> pb.ListRelationshipsResponse:
    """A page of relationships."""
    found = [
        pb.StoredRelationship(resource=resource, relation=relation, subject=subject, version=version)
        for resource, relation, subject, version in page.relationships
    ]
    return pb.ListRelationshipsResponse(relationships=found, next_page_token=page.next_page_token)


def encode_transaction(found: Transaction) -> pb.Transaction:
    """A transaction as it was committed."""
    record = found.record
    return pb.Transaction(
        tx_id=found.tx_id,
        client_id=record.client,
        sequence=record.client_sequence,
        idempotency_key=record.key,
        operations=[encode_operation(operation) for operation in found.operations],
        timestamp_ms=record.log_time_ms,
        actor=record.actor,
        block_height=record.height,
        version=record.sequence,
        request_hash=record.fingerprint,
        erased=record.erased,
    )


def encode_block(scope_block: ScopeBlock) -> pb.Block:
    """A block with the scope's own transactions."""
    return pb.Block(header=encode_header(scope_block.block), tx_ids=scope_block.tx_ids, epoch=scope_block.epoch)


def encode_proof(proven: Proven) -> pb.ProofDocument:
    """All that proves a record."""
    record = proven.record
    return pb.ProofDocument(
        record=pb.RecordHeader(
            lane=record.lane,
            position=record.position,
            sequence=record.sequence,
            log_time_ms=record.log_time_ms,
            height=record.height,
            client_sequence=record.client_sequence,
            policy=record.policy,
            scope=record.scope,
            key=record.key,
            fingerprint=record.fingerprint,
            actor=record.actor,
            client=record.client,
            partitions=record.partitions,
        ),
        salt=None if record.erased else proven.salt,
        body=None if record.erased else record.body,
        body_hash=proven.body_hash,
        index=proven.proof.index,
        count=proven.proof.count,
        path=proven.proof.path,
        block=encode_header(proven.block),
    )
