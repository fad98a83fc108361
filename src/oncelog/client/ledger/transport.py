"""Calls to the gRPC service of a ledger. A failed call raises LostError or ServerRefusedError.

The transport also checks that the answer to a write is about that write, and that its proof verifies.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio

from oncelog import error_codes
from oncelog.client.ledger import codec
from oncelog.client.ledger.entries import ProofFailure, SequenceGap, SequenceTaken, WriteAnswer, WriteCall
from oncelog.client.ledger.values import ClientState, LedgerLimits, TransactionProof, UnverifiedError, Written
from oncelog.client.runtime.client import is_being_cancelled
from oncelog.client.runtime.options import Token, resolve_token
from oncelog.core.identity import request_hash
from oncelog.core.operations import Operation
from oncelog.core.transactions import format_tx_id, ledger_scope
from oncelog.errors import LostError, ServerRefusedError, SettingsError
from oncelog.ledger.operation_codec import encode_operation
from oncelog.ledger.v1 import ledger_pb2 as pb
from oncelog.ledger.v1.ledger_pb2_grpc import LedgerStub

_REFUSED_STATUSES: Final = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.OUT_OF_RANGE,
    }
)
"""Statuses of calls that were rejected and not executed. After any other status the effect of a call is unknown."""
TOO_LARGE: Final = "too_large"
UNREADABLE_CODES: Final = frozenset({error_codes.FORBIDDEN, error_codes.NOT_FOUND})


class LedgerTransport:
    """A channel to one server. Must be opened and closed in the event loop that uses it."""

    def __init__(
        self,
        address: str,
        *,
        client_id: str,
        token: Token,
        tls: bool | str | Path,
        limits: LedgerLimits,
        is_verifying: bool,
    ) -> None:
        self.address = address
        self.limits = limits
        self._client_id = client_id
        self._token = token
        self.may_renew_token = callable(token)
        self._verifies_proofs = is_verifying
        self._credentials: grpc.ChannelCredentials | None = None
        if tls is not False:
            roots = None if tls is True else _read_roots(tls)
            self._credentials = grpc.ssl_channel_credentials(roots)
        self._channel: grpc.aio.Channel | None = None
        self._stub: Any = None

    def open(self) -> None:
        """Create the channel. It connects on the first call."""
        limits = self.limits
        options = (
            ("grpc.max_receive_message_length", limits.message_bytes_max),
            ("grpc.initial_reconnect_backoff_ms", min(limits.reconnect_ms_max, limits.pause_ms_min)),
            ("grpc.max_reconnect_backoff_ms", min(limits.reconnect_ms_max, limits.pause_ms_max)),
            ("grpc.keepalive_time_ms", limits.heartbeat_ms),
            ("grpc.keepalive_timeout_ms", limits.heartbeat_ms),
            ("grpc.use_local_subchannel_pool", 1),  # reconnects independently of other channels
            ("grpc.enable_retries", 0),
        )
        if self._credentials is None:
            self._channel = grpc.aio.insecure_channel(self.address, options)
        else:
            self._channel = grpc.aio.secure_channel(self.address, self._credentials, options)
        self._stub = LedgerStub(self._channel)

    @property
    def is_connected(self) -> bool:
        """Whether the channel is connected. If it is not, reading this property makes it try to connect."""
        channel = self._channel
        return channel is not None and channel.get_state(try_to_connect=True) is grpc.ChannelConnectivity.READY

    async def close(self) -> None:
        """Close the channel, which cancels the calls in flight."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    # --- calls

    async def call(self, method: str, request: Any, *, waits: bool = True) -> Any:
        """Make a unary call. With `waits`, wait for a connection first. Raises LostError or ServerRefusedError."""
        metadata = await self._build_metadata()
        with self._translate_errors():
            return await getattr(self._stub, method)(
                request, timeout=self.limits.answer_timeout_ms / 1000, metadata=metadata, wait_for_ready=waits
            )

    async def iterate(self, method: str, request: Any) -> AsyncGenerator[Any, None]:
        """Make a call and yield the stream of answers. Raises LostError or ServerRefusedError."""
        call = getattr(self._stub, method)(request, metadata=await self._build_metadata(), wait_for_ready=True)
        try:
            with self._translate_errors():
                async for message in call:
                    yield message
        finally:
            call.cancel()

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except grpc.aio.AioRpcError as error:
            raise self._to_client_error(error) from error
        except grpc.aio.UsageError as error:
            raise LostError(f"{self.address}: {error}") from error
        except asyncio.CancelledError:
            if is_being_cancelled():
                raise
            # The call was cancelled, but its caller was not: the channel has been closed.
            raise LostError(f"{self.address}: the client was closed") from None

    async def get_client_state(self, organization: str, vault: str, *, waits: bool = True) -> ClientState:
        """Return the state that the server stores for this client."""
        request = pb.GetClientStateRequest(organization=organization, vault=vault, client_id=self._client_id)
        return codec.decode_client_state(await self.call("GetClientState", request, waits=waits))

    async def get_proof(self, organization: str, vault: str, tx_id: str, *, waits: bool = True) -> TransactionProof:
        """Return the proof of a transaction."""
        request = pb.GetProofRequest(organization=organization, vault=vault, tx_id=tx_id)
        return codec.decode_proof(await self.call("GetProof", request, waits=waits))

    async def _build_metadata(self) -> tuple[tuple[str, str], ...]:
        token = await resolve_token(self._token)
        return (("authorization", f"Bearer {token}"),) if token else ()

    def _to_client_error(self, error: grpc.aio.AioRpcError) -> LostError | ServerRefusedError:
        status, message = error.code(), error.details() or ""
        metadata = {str(name): value for name, value in error.trailing_metadata() or ()}
        code = str(metadata.get("oncelog-code", ""))
        if status in _REFUSED_STATUSES:
            return ServerRefusedError(code or status.name.lower(), message)
        if status is grpc.StatusCode.RESOURCE_EXHAUSTED and message.startswith("SERVER: Received message larger"):
            return ServerRefusedError(TOO_LARGE, message)
        if code in error_codes.RETRYABLE_CODES:
            return ServerRefusedError(code, message, _parse_ms(metadata.get("retry-after-ms")))
        return LostError(f"{self.address}: {status.name}: {message}")

    # --- writes

    @staticmethod
    def compute_size(operations: Sequence[Operation]) -> int:
        """Return the size of a transaction on the wire, without the fields that identify the write."""
        return pb.WriteRequest(operations=map(encode_operation, operations)).ByteSize()

    async def write(self, organization: str, vault: str, call: WriteCall) -> WriteAnswer:
        """Send a write. Raises LostError or ServerRefusedError."""
        request = pb.WriteRequest(
            organization=organization,
            vault=vault,
            client_id=self._client_id,
            sequence=call.sequence,
            idempotency_key=call.entry.key,
            operations=map(encode_operation, call.entry.operations),
        )
        response = await self.call("Write", request, waits=False)
        if response.HasField("success"):
            return await self._handle_success(organization, vault, call, response.success)
        return await self._handle_error(organization, vault, call, response.error)

    async def _handle_success(
        self, organization: str, vault: str, call: WriteCall, success: pb.WriteSuccess
    ) -> WriteAnswer:
        tx_id, sequence = success.committed_tx_id, success.assigned_sequence
        written = Written(tx_id, sequence, success.version, success.block_height, success.timestamp_ms)
        if not self._verifies_proofs:
            return written
        entry = call.entry
        proof = codec.decode_write_proof(
            success,
            ledger_scope(organization, vault),
            self._client_id,
            entry.key,
            request_hash=request_hash(entry.operations),
            body=entry.body,
        )
        record = proof.record
        is_named = tx_id == format_tx_id(record.lane, record.position)
        if is_named and proof.is_valid and proof.block.hash == success.block_header.hash:
            return written
        # If a write with equal operations already has the sequence, the server answers with that write, even if its key
        # is different.
        proof_failure = await self._check_committed(organization, vault, call, tx_id, sequence)
        return proof_failure if isinstance(proof_failure, SequenceTaken) else _build_proof_failure(tx_id, sequence)

    async def _handle_error(self, organization: str, vault: str, call: WriteCall, error: pb.WriteError) -> WriteAnswer:
        match error.code:
            case pb.WRITE_ERROR_CODE_ALREADY_COMMITTED:
                sequence = error.assigned_sequence or call.sequence
                if not error.committed_tx_id:
                    return Written(None, sequence, is_replay=True)
                height = error.block_height if error.HasField("block_height") else None
                written = Written(error.committed_tx_id, sequence, height=height, is_replay=True)
                if not self._verifies_proofs:
                    return written
                proof_failure = await self._check_committed(organization, vault, call, error.committed_tx_id, sequence)
                return proof_failure or written
            case pb.WRITE_ERROR_CODE_SEQUENCE_GAP:
                return SequenceGap(error.last_committed_sequence)
            case pb.WRITE_ERROR_CODE_SEQUENCE_REUSED:
                return SequenceTaken(error.last_committed_sequence)
            case code if int(code) in codec.REFUSAL_CODES:
                return codec.decode_refusal(error)
            case code:
                raise LostError(f"unknown code {code} in an answer; the server may be newer than this client")

    async def _check_committed(
        self, organization: str, vault: str, call: WriteCall, tx_id: str, sequence: int
    ) -> WriteAnswer | None:
        """Compare a write with the transaction that the server reports. Return None if the client may not read it."""
        try:
            proof = await self.get_proof(organization, vault, tx_id, waits=False)
        except ServerRefusedError as error:
            if error.code in UNREADABLE_CODES:
                return None
            raise LostError(str(error)) from error  # the server refused the read, not the write
        record = proof.record
        if record.key != call.entry.key or record.client != self._client_id:
            return SequenceTaken(max(sequence, record.client_sequence))
        is_ours = (
            record.scope == ledger_scope(organization, vault)
            and record.client_sequence == sequence
            and record.fingerprint == request_hash(call.entry.operations)
            and (record.erased or record.body == call.entry.body)
            and tx_id == format_tx_id(record.lane, record.position)
        )
        if not is_ours or not proof.is_valid:
            return _build_proof_failure(tx_id, sequence)
        return Written(tx_id, sequence, record.sequence, record.height, record.log_time_ms, is_replay=True)


def _build_proof_failure(tx_id: str, sequence: int) -> ProofFailure:
    message = f"the server reports the write as committed as {tx_id}, but its proof does not verify"
    return ProofFailure(UnverifiedError(message, tx_id), sequence)


def _read_roots(path: str | Path) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise SettingsError(f"tls: {path}: {error.strerror}") from error


def _parse_ms(value: object) -> int:
    text = str(value)
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 12 else 0
