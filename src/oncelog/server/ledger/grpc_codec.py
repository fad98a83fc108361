"""Codec of the ledger's gRPC service: decodes messages to requests, and encodes answers as messages."""

from collections.abc import Sequence
from functools import lru_cache

from oncelog.core.proof import Block
from oncelog.core.transactions import check_operation_count, format_tx_id
from oncelog.engine.read_results import Proven
from oncelog.errors import CanonicalError
from oncelog.ledger.operation_codec import decode_operation, encode_operation
from oncelog.ledger.v1 import ledger_pb2 as pb
from oncelog.server.ledger.codec import merge_operations
from oncelog.server.ledger.values import Members, Write, WriteAnswer, WriteSuccess, to_header_members
from oncelog.server.messages import value_error

# --- requests ----------------------------------------------------------------------------------------


def decode_write(message: pb.WriteRequest) -> Write:
    """Decode a write. Raises ApiError if it is invalid."""
    return _to_write(message, message.operations)


def decode_batch(message: pb.BatchWriteRequest) -> Write:
    """Decode a batch into one write with all of its operations. Raises ApiError if it is invalid."""
    return _to_write(message, merge_operations(message), is_batch=True)


def _to_write(
    message: pb.WriteRequest | pb.BatchWriteRequest, operations: Sequence[pb.Operation], *, is_batch: bool = False
) -> Write:
    try:
        check_operation_count(len(operations))  # before any operation is decoded
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


# --- answers -----------------------------------------------------------------------------------------


def encode_answer(write_answer: WriteAnswer) -> pb.WriteResponse:
    """Encode the answer to a write."""
    if isinstance(write_answer, WriteSuccess):
        return pb.WriteResponse(success=_encode_success(write_answer))
    code = f"WRITE_ERROR_CODE_{write_answer.code.name}"
    return pb.WriteResponse(error=pb.WriteError(code=code, message=write_answer.message, **write_answer.members))


def _encode_success(success: WriteSuccess) -> pb.WriteSuccess:
    receipt, attestation = success.receipt, success.attestation
    proof = attestation.proof
    return pb.WriteSuccess(
        committed_tx_id=format_tx_id(receipt.lane, receipt.position),
        block_height=attestation.block.height,
        block_header=encode_header(attestation.block),
        transaction_proof=pb.TransactionProof(
            index=proof.index, count=proof.count, path=proof.path, salt=attestation.salt
        ),
        assigned_sequence=receipt.client_sequence,
        version=receipt.sequence,
        timestamp_ms=receipt.log_time_ms,
        actor=attestation.actor,
    )


@lru_cache(maxsize=256)
def encode_header(block: Block) -> pb.BlockHeader:
    """Encode a block's header. Cached, because all transactions of a group commit share it. Messages copy it."""
    return pb.BlockHeader(**to_header_members(block))


def encode_transaction(transaction: Members) -> pb.Transaction:
    """Encode a transaction."""
    return pb.Transaction(**{**transaction, "operations": list(map(encode_operation, transaction["operations"]))})


def encode_proof(proven: Proven) -> pb.ProofDocument:
    """Encode the proof of a record."""
    record = proven.record
    # All members of the header have the same names as fields of the record.
    header = {name: getattr(record, name) for name in pb.RecordHeader.DESCRIPTOR.fields_by_name}
    return pb.ProofDocument(
        record=pb.RecordHeader(**header),
        salt=None if record.erased else proven.salt,
        body=None if record.erased else record.body,
        body_hash=proven.body_hash,
        index=proven.proof.index,
        count=proven.proof.count,
        path=proven.proof.path,
        block=encode_header(proven.block),
    )
