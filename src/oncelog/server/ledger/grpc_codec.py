"""Codec of the ledger's gRPC service: decodes messages to requests, and encodes answers and errors as messages."""

import asyncio
from collections.abc import Sequence
from functools import lru_cache
from typing import Final, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from oncelog import error_codes
from oncelog.core.proof import Block
from oncelog.core.transactions import check_operation_count, format_tx_id
from oncelog.engine.read_results import Proven
from oncelog.errors import CanonicalError, OncelogError
from oncelog.ledger.operation_codec import decode_operation, encode_operation
from oncelog.ledger.v1 import ledger_pb2 as pb
from oncelog.server import logger
from oncelog.server.errors import SERVER_FAILURE, UNREADABLE, ApiError, to_api_error
from oncelog.server.ledger.codec import merge_operations
from oncelog.server.ledger.values import Members, Write, WriteAnswer, WriteSuccess, to_header_members
from oncelog.server.messages import value_error

SERVICE: Final = "oncelog.ledger.v1.Ledger"
GRPC_STATUS: Final = {
    error_codes.BAD_REQUEST: grpc.StatusCode.INVALID_ARGUMENT,
    error_codes.AUTH_FAILED: grpc.StatusCode.UNAUTHENTICATED,
    error_codes.FORBIDDEN: grpc.StatusCode.PERMISSION_DENIED,
    error_codes.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    error_codes.HISTORY_CHANGED: grpc.StatusCode.FAILED_PRECONDITION,
    error_codes.RATE_LIMITED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    error_codes.SERVER_BUSY: grpc.StatusCode.UNAVAILABLE,
    error_codes.READ_ONLY: grpc.StatusCode.UNAVAILABLE,
    error_codes.QUOTA_EXCEEDED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    error_codes.SERVER_ERROR: grpc.StatusCode.UNAVAILABLE,
}
"""gRPC status for each error code."""
_DETAIL_NAMES: Final = ("field", "tenant", "quota", "limit", "usage", "retry_after_ms", "epoch")
_FIELD_1: Final = b"\x0a"
"""Tag of a message in field 1."""
M = TypeVar("M", bound=Message)

# --- requests ----------------------------------------------------------------------------------------


def parse_message(kind: type[M], data: object) -> M:
    """Parse the bytes of a message. Raises ApiError if they are malformed, or no bytes (at the end of a stream)."""
    try:
        if isinstance(data, bytes):
            return kind.FromString(data)
    except (DecodeError, RecursionError, UnicodeDecodeError):
        pass
    raise ApiError(error_codes.BAD_REQUEST, f"the request must be a message of type {kind.DESCRIPTOR.full_name}")


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
        response = pb.WriteResponse()
        _encode_success(response.success, write_answer)
        return response
    code = f"WRITE_ERROR_CODE_{write_answer.code.name}"
    return pb.WriteResponse(error=pb.WriteError(code=code, message=write_answer.message, **write_answer.members))


def encode_response(write_answer: WriteAnswer) -> bytes:
    """Encode the answer to a write as an encoded message."""
    return encode_answer(write_answer).SerializeToString()


def _encode_success(message: pb.WriteSuccess, success: WriteSuccess) -> None:
    """Fill in a message. Constructors would copy the nested messages, which takes twice as long."""
    receipt, attestation = success.receipt, success.attestation
    message.committed_tx_id = format_tx_id(receipt.lane, receipt.position)
    message.block_height = attestation.block.height
    message.block_header.CopyFrom(encode_header(attestation.block))
    proof = message.transaction_proof
    proof.index = attestation.proof.index
    proof.count = attestation.proof.count
    proof.path.extend(attestation.proof.path)
    proof.salt = attestation.salt
    message.assigned_sequence = receipt.client_sequence
    message.version = receipt.sequence
    message.timestamp_ms = receipt.log_time_ms
    message.actor = attestation.actor


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


# --- answers of a stream of writes ------------------------------------------------------------------


def encode_streamed_response(response: bytes) -> bytes:
    """Encode the encoded answer to a write as a StreamWritesResponse. Joined, several are one message with all answers.

    The protobuf library would decode and copy the answer, which takes longer than encoding it did.
    """
    answer = _FIELD_1 + _encode_length(len(response)) + response
    return _FIELD_1 + _encode_length(len(answer)) + answer


def encode_streamed_error(error: ApiError) -> bytes:
    """Encode the error of a write as a StreamWritesResponse with one answer."""
    call_error = pb.CallError(
        code=GRPC_STATUS[error.code].value[0],
        message=error.message,
        reason=error.code,
        details=to_error_metadata(error),
    )
    return pb.StreamWritesResponse(answers=[pb.StreamedAnswer(error=call_error)]).SerializeToString()


@lru_cache(maxsize=4096)
def _encode_length(length: int) -> bytes:
    """Encode a length as a varint. Cached, because most answers have the same few lengths."""
    encoded = bytearray()
    while length > 0x7F:
        encoded.append(length & 0x7F | 0x80)
        length >>= 7
    encoded.append(length)
    return bytes(encoded)


# --- errors ------------------------------------------------------------------------------------------


def to_call_error(error: BaseException) -> ApiError:
    """Return the error that the client receives. Logs an error that is a fault of the server."""
    if isinstance(error, ApiError | OncelogError):
        return to_api_error(error, UNREADABLE)
    logger.error("a gRPC call failed", exc_info=error)
    return SERVER_FAILURE


def to_error_metadata(error: ApiError) -> dict[str, str]:
    """Return the details of an error, which HTTP has in the body. Metadata values must be ASCII."""
    return {
        name.replace("_", "-"): str(error.details[name]).encode("ascii", "backslashreplace").decode()
        for name in _DETAIL_NAMES
        if name in error.details
    }


def to_status(answered: asyncio.Future[bytes]) -> grpc.StatusCode:
    """Return the status of a write from its answer."""
    if answered.cancelled():
        return grpc.StatusCode.CANCELLED
    error = answered.exception()
    if error is None:
        return grpc.StatusCode.OK
    return GRPC_STATUS[error.code if isinstance(error, ApiError) else error_codes.SERVER_ERROR]
