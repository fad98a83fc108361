"""One reader of a lane, and the bounded queue of its records."""

import asyncio
import logging
from collections import deque
from typing import Final, Protocol

from oncelog.core.values import Record
from oncelog.engine.limits import Limits
from oncelog.engine.read_results import Cursor, format_order
from oncelog.errors import ClosedError, SlowReaderError

logger: Final = logging.getLogger("oncelog.engine")


class RecordSource(Protocol):
    """Where the records of a subscription come from: the tailer of its lane."""

    lane: int

    @property
    def cursor(self) -> Cursor:
        """Everything up to here has been delivered, in this history."""

    def remove(self, subscription: "Subscription") -> None:
        """The subscription gets nothing more."""


class Subscription:
    """Records from `start` on, as they come, for one reader. Its queue is bounded: who is too slow is closed."""

    def __init__(self, tailer: RecordSource, partitions: frozenset[str], stream: str | None, limits: Limits) -> None:
        self.start = tailer.cursor
        """Everything after this is delivered. It is a cursor of the lane, whatever is read there."""
        self.partitions = partitions
        self.stream = stream
        self.is_slow = False
        """The queue is half full: a reader that cares can be warned."""
        self._tailer = tailer
        self._limits = limits
        self._queue: deque[Record] = deque()
        self._bytes = 0
        self._overrun_at: Cursor | None = None
        """Where a reader that was closed can resume, in the order that it reads."""
        self._error: Exception | None = None
        self._is_closed = False
        self._has_waiter = False
        self._wakeup: asyncio.Future[None] | None = None

    async def next(self) -> list[Record]:
        """All that has arrived, at least one.

        Raises SlowReaderError; ClosedError when the log is closed; the store's error when it could not be read for
        long. One task at a time may wait here: who comes second gets RuntimeError.
        """
        if self._has_waiter:
            raise RuntimeError("another task is waiting for this subscription; each reader needs one of its own")
        self._has_waiter = True
        try:
            while not self._queue:
                self._check_active()
                self._wakeup = asyncio.get_running_loop().create_future()
                await self._wakeup
        finally:
            self._has_waiter = False
        records = list(self._queue)
        self._queue.clear()
        self._bytes = 0
        self.is_slow = False
        return records

    def _check_active(self) -> None:
        if self._overrun_at is not None:
            raise SlowReaderError(self._overrun_at)
        if self._error is not None:
            raise self._error
        if self._is_closed:
            raise ClosedError("the subscription is closed")

    def fail(self, error: Exception) -> None:
        """Nothing more arrives, and that is why."""
        self._error = error
        self._tailer.remove(self)
        self._wake()

    def close(self) -> None:
        """Nothing more arrives."""
        self._is_closed = True
        self._tailer.remove(self)
        self._wake()

    def wants(self, record: Record) -> bool:
        """Whether the record is in its scope."""
        if self.stream is not None:
            return bool(record.sequence) and record.scope == self.stream
        return not self.partitions or not self.partitions.isdisjoint(record.partitions)

    def deliver(self, record: Record) -> None:
        """Puts a record into the queue, or closes a reader that has too many there."""
        if self._overrun_at is not None or record.position <= self.start.position:
            return
        self._queue.append(record)
        self._bytes += len(record.body)
        limits = self._limits
        if len(self._queue) > limits.subscription_records_max or self._bytes > limits.subscription_bytes_max:
            if len(self._queue) > 1:  # one large record alone is what there is to read
                self._overrun()
        elif 2 * len(self._queue) > limits.subscription_records_max or 2 * self._bytes > limits.subscription_bytes_max:
            if not self.is_slow:
                logger.warning("a reader of lane %d is slow: %d records wait", self._tailer.lane, len(self._queue))
            self.is_slow = True
        self._wake()

    def _overrun(self) -> None:
        """What waits is let go: it is in the store, behind the cursor that the reader is given."""
        first = self._queue[0]
        number = (first.position if self.stream is None else first.sequence) - 1
        self._overrun_at = Cursor(number, self.start.epoch, format_order(self.stream, self._tailer.lane))
        logger.warning("a reader of lane %d was closed: it is behind %d", self._tailer.lane, number)
        self._queue.clear()
        self._bytes = 0
        self._tailer.remove(self)

    def _wake(self) -> None:
        if self._wakeup is not None and not self._wakeup.done():
            self._wakeup.set_result(None)
