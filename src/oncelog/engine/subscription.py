"""One reader's subscription to a lane, with a bounded record queue."""

import asyncio
from collections import deque
from collections.abc import Callable

from oncelog.core.values import Record
from oncelog.engine import logger
from oncelog.engine.limits import Limits
from oncelog.engine.read_results import Cursor, format_order
from oncelog.errors import ClosedError, SlowReaderError


class Subscription:
    """Delivers the records after `start` to one reader as they arrive. Ends if the reader is too slow."""

    def __init__(
        self,
        start: Cursor,
        lane: int,
        partitions: frozenset[str],
        stream: str | None,
        limits: Limits,
        remove: Callable[["Subscription"], None],
    ) -> None:
        """The subscription calls `remove` with itself to stop the delivery."""
        self.start = start
        """Delivery starts after this cursor. It is a lane cursor, even if the subscription is to a stream."""
        self.partitions = partitions
        self.stream = stream
        self.is_slow = False
        """Whether the queue is more than half full. A server then warns its client."""
        self._lane = lane
        self._limits = limits
        self._remove = remove
        self._queue: deque[Record] = deque()
        self._bytes = 0
        self._error: Exception | None = None
        """Raised by `next` once the queue is empty."""
        self._has_waiter = False
        self._wakeup: asyncio.Future[None] | None = None

    @property
    def keys(self) -> list[tuple[str, str]]:
        """Keys under which `Tailer` registers the subscription."""
        if self.stream is not None:
            return [("stream", self.stream)]
        return [("partition", partition) for partition in self.partitions] or [("", "")]

    async def next(self) -> list[Record]:
        """Wait for records and return all queued ones (at least one).

        Only one task may wait at a time.

        Raises:
            SlowReaderError: the queue overflowed; resume from `error.cursor`.
            ClosedError: the log was closed.
            StoreError: the store has been unreadable for too long.
            RuntimeError: another task is already waiting.
        """
        if self._has_waiter:
            raise RuntimeError("another task is waiting for this subscription; each reader needs its own subscription")
        self._has_waiter = True
        try:
            while not self._queue:
                if self._error is not None:
                    raise self._error
                self._wakeup = asyncio.get_running_loop().create_future()
                await self._wakeup
        finally:
            self._has_waiter = False
        records = list(self._queue)
        self._queue.clear()
        self._bytes = 0
        self.is_slow = False
        return records

    def fail(self, error: Exception) -> None:
        """Stop delivery. `next` raises the first error passed here, once the queue is empty."""
        self._error = self._error or error
        self._remove(self)
        self._wake()

    def close(self) -> None:
        """Stop delivery."""
        self.fail(ClosedError("the subscription is closed"))

    def wants(self, record: Record) -> bool:
        """Return whether a record belongs to the subscription."""
        if self.stream is not None:
            return bool(record.sequence) and record.scope == self.stream
        return not self.partitions or not self.partitions.isdisjoint(record.partitions)

    def deliver(self, record: Record) -> None:
        """Queue a record. End the subscription if the queue exceeds a limit."""
        if self._error is not None or record.position <= self.start.position:
            return
        self._queue.append(record)
        self._bytes += len(record.body)
        limits = self._limits
        if len(self._queue) > limits.subscription_records_max or self._bytes > limits.subscription_bytes_max:
            if len(self._queue) > 1:  # a single record above the byte limit must be readable
                self._overrun()
        elif 2 * len(self._queue) > limits.subscription_records_max or 2 * self._bytes > limits.subscription_bytes_max:
            if not self.is_slow:
                logger.warning("a reader of lane %d is slow: %d records are queued", self._lane, len(self._queue))
            self.is_slow = True
        self._wake()

    def _overrun(self) -> None:
        """Drop the queue and fail with a cursor from which the reader can resume."""
        first = self._queue[0]
        number = (first.position if self.stream is None else first.sequence) - 1
        logger.warning("disconnected a slow reader of lane %d; it can resume after %d", self._lane, number)
        self._queue.clear()
        self._bytes = 0
        self.fail(SlowReaderError(Cursor(number, self.start.epoch, format_order(self.stream, self._lane))))

    def _wake(self) -> None:
        if self._wakeup is not None and not self._wakeup.done():
            self._wakeup.set_result(None)
