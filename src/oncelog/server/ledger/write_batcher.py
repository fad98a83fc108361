"""Writes that come one by one among many others, handed to the log several at a time.

gRPC brings every call alone, and does much for the next one in between: what is done for a single write finds nothing
of its own in the processor's caches, and takes several times as long as in a row. And it lets the next ones in when the
last have been: a commit of one or two would leave it no time to let in more. So while many wait for their commit, or
have just been answered, those who come behind them are held back for a moment. Where few are about, nobody is.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from oncelog.server.auth.principal import Principal
from oncelog.server.errors import ApiError
from oncelog.server.ledger import grpc_codec
from oncelog.server.ledger.service import LedgerService
from oncelog.server.ledger.values import Write, WriteAnswer

BATCHING_THRESHOLD: Final = 16
RATE_WINDOW_S: Final = 0.02
"""From so many on that wait for their commit, or have been answered in this time, others are held back:"""
BATCH_WRITES_MAX: Final = 32
"""until there are so many of them,"""
BATCH_WAIT_S: Final = 0.003
"""or for so long, or until someone has been answered, and the next batch begins."""

DecodeWrite = Callable[[Any], Write]
"""What a message asks for. Raises ApiError."""


class WriteBatcher:
    """One for a service."""

    def __init__(self, service: LedgerService) -> None:
        self._service = service
        self._queue: list[tuple[DecodeWrite, Any, Principal, asyncio.Future[bytes]]] = []
        self._timer: asyncio.Handle | None = None
        self._is_flush_scheduled = False
        self._window_start_s = 0.0
        self._window_answers = self._previous_window_answers = 0
        """Since then, and in as long a time before it."""

    def write(self, decode: DecodeWrite, message: Any, principal: Principal) -> asyncio.Future[bytes]:
        """The answer to a write, as it is sent. The future raises ApiError."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[bytes] = loop.create_future()
        self._queue.append((decode, message, principal, future))
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
        """Holds nobody any longer: what comes next must not overtake them."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._is_flush_scheduled = False
        queued, self._queue = self._queue, []
        for decode, message, principal, future in queued:
            try:
                self._submit(decode(message), principal, future)
            except Exception as error:  # noqa: BLE001 - told to the one whose it is, and not to the others
                _fail(future, error)

    def _submit(self, request: Write, principal: Principal, future: asyncio.Future[bytes]) -> None:
        def answer(write_answer: WriteAnswer) -> None:
            self._count_answers(1, asyncio.get_running_loop().time())
            if self._queue and not self._is_flush_scheduled:
                # Not at once: the log is still telling the others.
                self._is_flush_scheduled = True
                asyncio.get_running_loop().call_soon(self.flush)
            if not future.done():  # or the caller has gone
                future.set_result(grpc_codec.encode_answer(write_answer).SerializeToString())

        self._service.write_nowait(request, principal, answer, partial(_fail, future))


def _fail(future: asyncio.Future[bytes], error: Exception) -> None:
    """What is told is all that is wanted of a ApiError. Where it was raised knows the future, which would keep it: the
    message would stay until a collection of garbage."""
    cause: BaseException | None = error if isinstance(error, ApiError) else None
    while cause is not None:
        cause.__traceback__ = None
        cause = cause.__cause__ or cause.__context__
    if not future.done():
        future.set_exception(error)
