"""The send queue of one connection: frames in order, and slots for replies that are not due yet.

A flush writes several frames at a time and never blocks. The queue counts, logs and closes slow readers (CO-31).
"""

import asyncio
from collections.abc import Callable, Container, Iterable, Mapping
from contextlib import suppress
from typing import Final, Protocol, cast

from oncelog.core.canonical import JsonValue
from oncelog.server import logger
from oncelog.server.limits import ApiLimits
from oncelog.server.metrics import Counts

TRANSPORT_BYTES_HIGH: Final = 64 * 1024
"""Above this many unsent bytes, further frames wait in the send queue, which counts them."""
FULL_POLL_S: Final = 0.01
"""Interval between checks of a transport that is still full although `drain` has returned."""


class SessionTransport(Protocol):
    """The socket of a session."""

    def write(self, data: bytes) -> None:
        """Send frames without waiting."""

    def count_buffered_bytes(self) -> int:
        """Return how many bytes have been written but not yet sent."""

    async def drain(self) -> None:
        """Wait until the transport accepts more bytes. Raises OSError if the connection is lost."""

    def close(self, code: int, reason: str) -> None:
        """Close the connection once the frames already written are sent."""

    def abort(self) -> None:
        """Close the connection immediately."""


class ReplySlot:
    """A place in the send queue for a reply that is not known or not due yet."""

    __slots__ = ("frame", "is_due")

    frame: bytes | None
    """None until the outcome is known."""
    is_due: bool
    """Whether the reply may be sent once it is known."""

    def on_written(self) -> None:
        """Called once the reply has been written."""


class SendQueueOwner(Protocol):
    """The owner of a send queue."""

    send_queue: "SendQueue"

    def abort(self) -> None:
        """Close the connection because its frames could not be written."""


class WriteCoalescer:
    """Flushes each scheduled send queue once, at the end of a turn of the event loop."""

    def __init__(self) -> None:
        self._dirty: list[SendQueueOwner] = []
        self._is_scheduled = False

    def schedule(self, reader: SendQueueOwner) -> None:
        """Flush the reader's send queue at the end of this turn of the event loop."""
        outbox = reader.send_queue
        if not outbox.is_dirty:
            outbox.is_dirty = True
            self._dirty.append(reader)
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush_all)

    def broadcast(self, frame: bytes, readers: Iterable[SendQueueOwner], excluded: Container[object] = ()) -> int:
        """Queue the same frame for all readers except `excluded`. Returns how many readers get it."""
        size = len(frame)
        dirty = self._dirty
        count = 0
        for reader in readers:
            if reader in excluded:
                continue
            outbox = reader.send_queue
            outbox.frames.append(frame)
            outbox.bytes += size
            count += 1
            if not outbox.is_dirty:
                outbox.is_dirty = True
                dirty.append(reader)
        if dirty and not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush_all)
        return count

    def _flush_all(self) -> None:
        self._is_scheduled = False
        dirty, self._dirty = self._dirty, []
        for reader in dirty:
            reader.send_queue.is_dirty = False
            try:
                reader.send_queue.flush()
            except Exception:
                logger.exception("a reader's frames could not be written")
                reader.abort()


class SendQueue:
    """The queue of one connection. Code that adds to `frames` and `bytes` must schedule a call of `flush`."""

    def __init__(
        self,
        transport: SessionTransport,
        limits: ApiLimits,
        counts: Counts,
        on_slow: Callable[[], None],
        describe: Callable[[], Mapping[str, JsonValue]],
    ) -> None:
        self.frames: list[bytes | ReplySlot] = []
        self.bytes = 0
        """Size of the queued frames."""
        self.is_dirty = False
        """Whether a call of `flush` is scheduled."""
        self._transport = transport
        self._limits = limits
        self._counts = counts
        self._on_slow = on_slow
        self._describe = describe
        self._slots = 0
        self._drain_task: asyncio.Task[None] | None = None
        self._is_warned = False
        self._is_closed = False

    def put(self, frame: bytes) -> None:
        """Append a frame."""
        self.frames.append(frame)
        self.bytes += len(frame)

    def put_slot(self, slot: ReplySlot, before: ReplySlot | None = None) -> None:
        """Append a slot, or insert it directly before another slot."""
        if before is None:
            self.frames.append(slot)
        else:
            self.frames.insert(self.frames.index(before), slot)
        self._slots += 1

    def remove_slot(self, slot: ReplySlot) -> None:
        """Remove a slot, if it is in the queue."""
        if slot in self.frames:
            self.frames.remove(slot)
            self._slots -= 1

    def flush(self) -> None:
        """Write the queued frames, up to a reply that is not due."""
        if not self.frames or self._is_closed:
            return
        if self._drain_task is not None or self._transport.count_buffered_bytes() > TRANSPORT_BYTES_HIGH:
            self._wait_for_capacity()
            return
        if self._slots:
            data = self._take_due()
        else:
            data = b"".join(cast("list[bytes]", self.frames))
            self.frames.clear()
            self.bytes = 0
        if data:
            self._counts.bytes_sent += len(data)
            self._transport.write(data)

    def _take_due(self) -> bytes:
        frames: list[bytes] = []
        for item in self.frames:
            if isinstance(item, ReplySlot):
                if not item.is_due or item.frame is None:
                    break
                frames.append(item.frame)
                self._slots -= 1
                item.on_written()
            else:
                frames.append(item)
                self.bytes -= len(item)
        del self.frames[: len(frames)]
        return b"".join(frames)

    def _wait_for_capacity(self) -> None:
        if self._drain_task is None:
            self._drain_task = asyncio.get_running_loop().create_task(self._drain_transport())
        limits = self._limits
        frames, size = len(self.frames), self.bytes
        if frames > limits.outbox_frames_max or size > limits.outbox_bytes_max:
            self._counts.slow_readers_closed += 1
            self._warn("a slow reader is closed")
            self._on_slow()
        elif not self._is_warned and (2 * frames > limits.outbox_frames_max or 2 * size > limits.outbox_bytes_max):
            self._is_warned = True
            self._counts.slow_readers_warned += 1
            self._warn("a reader is slow")

    def _warn(self, message: str) -> None:
        queue_fields = {"waiting": len(self.frames), "waiting_bytes": self.bytes}
        logger.warning(message, extra={**self._describe(), **queue_fields})

    async def _drain_transport(self) -> None:
        try:
            with suppress(OSError):  # the connection is lost, which its receiving task notices
                await self._transport.drain()
                while self._transport.count_buffered_bytes() > TRANSPORT_BYTES_HIGH:
                    await asyncio.sleep(FULL_POLL_S)
                    await self._transport.drain()
        finally:
            self._drain_task = None
        self._is_warned = False
        self.flush()

    async def drain(self) -> None:
        """Wait until all frames are sent. Pages wait for this, so that they do not pile up for a slow client."""
        self.flush()
        while self._drain_task is not None and not self._is_closed:
            await asyncio.wait([self._drain_task])

    def close(self) -> None:
        """Discard the queued frames and write no more."""
        self._is_closed = True
        self.frames.clear()
        self.bytes = self._slots = 0
        if self._drain_task is not None:
            self._drain_task.cancel()
