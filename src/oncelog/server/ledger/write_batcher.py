"""Micro-batching of gRPC writes: under load, the batcher submits several writes to the log together.

gRPC hands over calls one by one and does a lot of work in between. A single write then finds cold processor caches and
takes several times as long as a write in a loop. gRPC also admits new calls only after it has answered earlier ones, so
a commit of one or two writes leaves it no time to admit more. While many writes are waiting for their commit or have
just been answered, the batcher therefore holds new writes briefly. Under light load it holds none.
"""

import asyncio
from collections.abc import Callable
from contextvars import Context, copy_context
from functools import partial
from typing import Any, Final

from oncelog.server.auth.principal import Principal
from oncelog.server.errors import ApiError
from oncelog.server.ledger import grpc_codec
from oncelog.server.ledger.service import LedgerService
from oncelog.server.ledger.values import Write, WriteAnswer

BATCHING_THRESHOLD: Final = 16
"""Minimum number of writes in the log's queue, or of answers in the last two windows, at which the batcher holds new
writes."""
RATE_WINDOW_S: Final = 0.02
"""Duration of a window. The batcher counts the answers in each window."""
BATCH_WRITES_MAX: Final = 32
"""Number of held writes at which the batcher submits them immediately."""
BATCH_WAIT_S: Final = 0.003
"""Maximum time that a write is held. An answer to an earlier write also releases it, because the next commit begins."""

DecodeWrite = Callable[[Any], Write]
"""Decodes a message. Raises ApiError if it is invalid."""
EncodeAnswer = Callable[[WriteAnswer], bytes]
"""Encodes an answer when the verdict arrives. Raises ApiError to answer with an error instead."""


class WriteBatcher:
    """Batches the gRPC writes of a service."""

    def __init__(self, service: LedgerService) -> None:
        self._service = service
        self._queue: list[tuple[DecodeWrite, Any, Principal, EncodeAnswer, asyncio.Future[bytes], Context | None]] = []
        self._timer: asyncio.Handle | None = None
        self._is_flush_scheduled = False
        self._window_start_s = 0.0
        self._window_answers = self._previous_window_answers = 0
        """Numbers of answers in the current and the previous window."""

    def write(
        self,
        decode: DecodeWrite,
        message: Any,
        principal: Principal,
        encode: EncodeAnswer = grpc_codec.encode_response,
    ) -> asyncio.Future[bytes]:
        """Submit a write, now or with the next batch. The future returns the encoded answer or raises ApiError."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[bytes] = loop.create_future()
        # `flush` submits each write in the context of the write's call, which contains the call's span and arrival.
        gate = self._service.auth_gate
        context = copy_context() if gate.tracer is not None or gate.measures_latency else None
        self._queue.append((decode, message, principal, encode, future, context))
        if len(self._queue) >= BATCH_WRITES_MAX or not self._is_busy(loop.time()):
            self.flush()
        elif self._timer is None:
            self._timer = loop.call_later(BATCH_WAIT_S, self.flush)
        return future

    def _is_busy(self, now_s: float) -> bool:
        self._count_answers(0, now_s)
        return (
            self._window_answers + self._previous_window_answers >= BATCHING_THRESHOLD
            or self._service.log.queue_length >= BATCHING_THRESHOLD
        )

    def _count_answers(self, answers: int, now_s: float) -> None:
        past_s = now_s - self._window_start_s
        if past_s >= RATE_WINDOW_S:
            self._previous_window_answers = self._window_answers if past_s < 2 * RATE_WINDOW_S else 0
            self._window_answers, self._window_start_s = 0, now_s
        self._window_answers += answers

    def flush(self) -> None:
        """Submit all held writes. Callers that bypass the batcher flush it first, so that writes keep their order."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._is_flush_scheduled = False
        queued, self._queue = self._queue, []
        for decode, message, principal, encode, future, context in queued:
            try:
                if context is None:
                    self._submit(decode(message), principal, encode, future)
                else:
                    context.run(self._submit, decode(message), principal, encode, future)
            except Exception as error:  # noqa: BLE001 - the error of one write must not affect the others
                _fail(future, error)

    def _submit(
        self, request: Write, principal: Principal, encode: EncodeAnswer, future: asyncio.Future[bytes]
    ) -> None:
        def answer(write_answer: WriteAnswer) -> None:
            self._count_answers(1, asyncio.get_running_loop().time())
            if self._queue and not self._is_flush_scheduled:
                # Flush in the next turn of the event loop, because the log is still passing on this commit's verdicts.
                self._is_flush_scheduled = True
                asyncio.get_running_loop().call_soon(self.flush)
            if future.done():  # a cancelled call has no use for the answer
                return
            try:
                future.set_result(encode(write_answer))
            except ApiError as error:
                _fail(future, error)

        self._service.write_nowait(request, principal, answer, partial(_fail, future))


def _fail(future: asyncio.Future[bytes], error: Exception) -> None:
    """Fail a write's future, without the traceback of an ApiError.

    The traceback's frames refer to the future, and this cycle would keep the message in memory until a garbage
    collection.
    """
    cause: BaseException | None = error if isinstance(error, ApiError) else None
    while cause is not None:
        cause.__traceback__ = None
        cause = cause.__cause__ or cause.__context__
    if not future.done():
        future.set_exception(error)
