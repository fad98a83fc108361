"""A call of `StreamWrites`: many writes in flight on one stream, answered in the order in which they arrived.

The task of the call reads messages and passes their writes to the write batcher, as calls of `Write` do. A second task
waits for the oldest unanswered write and then sends all answers that are ready in one message. No write has a task of
its own, because a task and a call cost more than the write itself.

When the stream must end, for example because the server stops or the credential is revoked, the server stops reading,
sends the answers to all writes that it has submitted, and then the error.
"""

import asyncio
from collections import deque
from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from oncelog import error_codes
from oncelog.ledger.v1 import ledger_pb2 as pb
from oncelog.server import logger
from oncelog.server.auth.principal import Principal
from oncelog.server.errors import ApiError, field_error
from oncelog.server.ledger import grpc_codec
from oncelog.server.ledger.grpc_codec import to_call_error
from oncelog.server.ledger.grpc_tracing import end_call_span, start_call_span
from oncelog.server.ledger.service import LedgerService
from oncelog.server.ledger.values import Write, WriteAnswer, WriteError
from oncelog.server.ledger.write_batcher import DecodeWrite, WriteBatcher
from oncelog.server.limits import LONG_FRAME_BYTES
from oncelog.server.live_streams import LiveStream

WRITES_IN_FLIGHT_MAX: Final = 1000
"""Unanswered writes of one stream: as many as a connection may have as separate calls. Above the limit the server stops
reading."""
BYTES_IN_FLIGHT_MAX: Final = 8 * 1024 * 1024
"""Size of the unanswered writes of one stream, together with the answers that are ready: an eighth of the log's queue.
A single write is always read. The answers of the writes in flight are limited to the same size (`_encode_verdict`)."""
ANSWERS_BYTES: Final = 256 * 1024
"""Size at which a message of answers is full. gRPC clients accept 4 MiB by default, and one answer with the value of an
entity may be longer than 1 MiB."""

Context = Any
"""A `grpc.aio.ServicerContext`, whose type annotations are incomplete."""


class GrpcWriteStream(LiveStream):
    """One open stream of writes. Every write is authorized with the principal's current rights."""

    def __init__(
        self,
        service: LedgerService,
        write_batcher: WriteBatcher,
        context: Context,
        principal: Principal,
        trace_headers: Mapping[str, str],
    ) -> None:
        """`trace_headers` is the trace context of the call, which writes without one continue."""
        super().__init__(principal, (), service.limits.heartbeat_ms)
        self._auth_gate = service.auth_gate
        self._counts = service.counts
        self._message_writes_max = service.limits.request_events_max
        self._write_batcher = write_batcher
        self._context = context
        self._trace_headers = trace_headers
        self._unanswered: deque[tuple[asyncio.Future[bytes], int]] = deque()
        """The answers that have not been sent yet, and the size of each write."""
        self._unanswered_bytes = 0
        self._ready_bytes = 0
        """Size of the answers that are ready and have not been sent yet."""
        self._has_ended = False
        """Whether the server reads no more writes."""
        self._wake_sender = asyncio.Event()
        self._wake_reader = asyncio.Event()

    async def serve(self) -> ApiError | None:
        """Read and answer writes until the client or the server ends the stream. Returns the error that ended it."""
        sender = asyncio.create_task(self._send_answers())
        sender.add_done_callback(lambda _: self.stop())
        try:
            error = await self.run(self._read_messages())
            self._has_ended = True
            self._wake_sender.set()
            return await sender or error
        finally:
            sender.cancel()
            for future, _ in self._unanswered:  # the writes are in flight, but no client waits for the answers
                future.cancel()
            self._unanswered.clear()  # tracebacks refer to the stream, and would keep the answers in memory

    # --- writes

    async def _read_messages(self) -> None:
        while isinstance(data := await self._context.read(), bytes):  # rather than grpc.aio.EOF
            await self._submit_message(grpc_codec.parse_message(pb.StreamWritesRequest, data))

    async def _submit_message(self, message: pb.StreamWritesRequest) -> None:
        """Submit the writes of a message. Raises ApiError if the stream must end."""
        count, count_max = len(message.writes), self._message_writes_max
        if not 1 <= count <= count_max:
            raise field_error("writes", f"must have 1 to {count_max} entries, not {count}", limit=count_max)
        self._check_open()
        rejection: ApiError | None = None
        try:
            self._auth_gate.count_request(self.principal)
        except ApiError as error:
            rejection = error
        turn_bytes = 0
        for streamed in message.writes:
            size = streamed.ByteSize()
            turn_bytes += size
            if turn_bytes > LONG_FRAME_BYTES:  # let other calls run, as if this were several messages
                turn_bytes = size
                await asyncio.sleep(0)
                self._check_open()
            decode: DecodeWrite = grpc_codec.decode_write if rejection is None else partial(_raise, rejection)
            if self._is_full(size):
                await self._wait_for_room(size)
            if size > LONG_FRAME_BYTES and rejection is None:
                decode = await self._decode_in_thread(streamed.write)
            self._submit(streamed, size, decode)

    def _check_open(self) -> None:
        """Raise ApiError if the server is stopping or the credential is no longer valid; update the rights."""
        self._auth_gate.check_open()
        self.principal = self._auth_gate.recheck_principal(self.principal)

    def _is_full(self, size: int) -> bool:
        unanswered = len(self._unanswered)
        return unanswered >= WRITES_IN_FLIGHT_MAX or (
            unanswered > 0 and self._unanswered_bytes + self._ready_bytes + size > BYTES_IN_FLIGHT_MAX
        )

    async def _wait_for_room(self, size: int) -> None:
        while self._is_full(size):
            self._wake_reader.clear()
            await self._wake_reader.wait()
        self._check_open()

    async def _decode_in_thread(self, write: pb.WriteRequest) -> DecodeWrite:
        """Decode a long write in a thread, so that other calls do not wait. Later writes of the stream do."""
        (decoded,) = await asyncio.gather(asyncio.to_thread(grpc_codec.decode_write, write), return_exceptions=True)
        self._check_open()
        return partial(_raise, decoded) if isinstance(decoded, BaseException) else lambda _: decoded

    def _submit(self, streamed: pb.StreamedWrite, size: int, decode: DecodeWrite) -> None:
        tracer = self._auth_gate.tracer
        if tracer is None:
            future = self._write_batcher.write(decode, streamed.write, self.principal, self._encode_verdict)
        else:
            headers = {"traceparent": streamed.traceparent} if streamed.traceparent else self._trace_headers
            span = start_call_span(tracer, "StreamWrites", headers)
            with span.activate():
                future = self._write_batcher.write(decode, streamed.write, self.principal, self._encode_verdict)
            future.add_done_callback(lambda done: end_call_span(span, grpc_codec.to_status(done)))
        self._unanswered.append((future, size))
        self._unanswered_bytes += size
        self._wake_sender.set()

    # --- answers

    def _encode_verdict(self, answer: WriteAnswer) -> bytes:
        """Encode the answer to a write, when its verdict arrives.

        A refusal may contain the value of an entity, and a thousand writes may be in flight. While the unsent answers
        have reached the limit, the client gets an error instead, and has to send the refused write again. A commit has
        a short answer, which is never omitted. Raises ApiError.
        """
        if self._ready_bytes >= BYTES_IN_FLIGHT_MAX and isinstance(answer, WriteError):
            raise ApiError(
                error_codes.SERVER_BUSY,
                f"the answers that the client has not read exceed {BYTES_IN_FLIGHT_MAX} bytes; read them, and send the "
                "write again",
            )
        encoded = grpc_codec.encode_response(answer)
        self._ready_bytes += len(encoded)
        return encoded

    async def _send_answers(self) -> ApiError | None:
        """Send answers until no write is left. Returns an error if the client does not read them."""
        while True:
            while not self._unanswered:
                if self._has_ended:
                    return None
                self._wake_sender.clear()
                await self._wake_sender.wait()
            await asyncio.wait([self._unanswered[0][0]])
            answers = self._take_answers()
            self._wake_reader.set()
            try:
                await self.wait_bounded(self._context.write(answers))
            except TimeoutError:
                logger.warning("a slow reader is closed", extra={"actor": self.principal.actor})
                self._counts.slow_readers_closed += 1
                reason = "the client does not read the answers; send the writes without an answer again"
                return ApiError(error_codes.SERVER_BUSY, reason)
            except Exception as error:  # noqa: BLE001 - gRPC has no public type for it
                logger.debug("the client of a stream of writes is gone: %s", error)
                raise asyncio.CancelledError from None

    def _take_answers(self) -> bytes:
        """Remove the answers that are ready, up to a full message, and return the message."""
        answers, answers_bytes = [], 0
        while answers_bytes < ANSWERS_BYTES and self._unanswered and self._unanswered[0][0].done():
            future, size = self._unanswered.popleft()
            self._unanswered_bytes -= size
            answer = self._encode_answer(future)
            answers.append(answer)
            answers_bytes += len(answer)
        return b"".join(answers)

    def _encode_answer(self, future: asyncio.Future[bytes]) -> bytes:
        error = future.exception()
        if error is None:
            self._counts.requests["ledger", "grpc", "ok"] += 1
            response = future.result()
            self._ready_bytes -= len(response)
            return grpc_codec.encode_streamed_response(response)
        call_error = to_call_error(error)
        self._counts.requests["ledger", "grpc", call_error.code] += 1
        return grpc_codec.encode_streamed_error(call_error)


def _raise(error: BaseException, _: Any) -> Write:
    """Raise the error of a write that was not decoded."""
    raise error
