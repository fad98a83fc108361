"""What waits to be written to one connection, in order: frames, and places of answers that are not due yet.

It is written without waiting, several frames at a time. A reader that is slower than what comes for it is counted,
warned of, and ended (CO-31).
"""

import asyncio
import logging
from collections.abc import Callable, Container, Iterable, Mapping
from contextlib import suppress
from typing import Final, Protocol, cast

from oncelog.core.canonical import JsonValue
from oncelog.doors.limits import DoorLimits
from oncelog.doors.metrics import Counts

logger: Final = logging.getLogger("oncelog.doors")

WIRE_BYTES_HIGH: Final = 64 * 1024
"""With more than this on its way, what follows waits in the outbox, where it is counted."""
STILL_FULL_S: Final = 0.01
"""How long to wait for a wire that says it has room, and has none."""


class Wire(Protocol):
    """The socket, as far as a session is concerned."""

    def write(self, data: bytes) -> None:
        """Sends frames. Never waits."""

    def waiting_bytes(self) -> int:
        """How much has been written and is not on its way yet."""

    async def drained(self) -> None:
        """Returns when there is room again. Raises OSError when the connection is gone."""

    def close(self, code: int, reason: str) -> None:
        """Ends the connection after what was written."""

    def abort(self) -> None:
        """Ends it at once."""


class Answer:
    """A place in the outbox for what is not known yet, or not due."""

    __slots__ = ("frame", "is_due")

    def __init__(self) -> None:
        self.frame: bytes | None = None
        """None until the outcome is known."""
        self.is_due = False
        """Known, and it may be told."""

    def written(self) -> None:
        """It is on its way."""


class Reads(Protocol):
    """Whoever has an outbox."""

    outbox: "Outbox"

    def abort(self) -> None:
        """Something is wrong with this one alone."""


class Flusher:
    """Writes what has come into outboxes at the end of a turn of the event loop, once to each."""

    def __init__(self) -> None:
        self._dirty: list[Reads] = []
        self._is_due = False

    def soon(self, reader: Reads) -> None:
        """What is in its outbox is written at the end of this turn of the loop, together with what comes till then."""
        outbox = reader.outbox
        if not outbox.is_dirty:
            outbox.is_dirty = True
            self._dirty.append(reader)
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._flush_all)

    def put(self, frame: bytes, readers: Iterable[Reads], but: Container[Reads] = ()) -> int:
        """Puts the same frame into the outboxes of all but some; gives into how many."""
        size = len(frame)
        dirty = self._dirty
        count = 0
        for reader in readers:
            if reader in but:
                continue
            outbox = reader.outbox
            outbox.frames.append(frame)
            outbox.bytes += size
            count += 1
            if not outbox.is_dirty:
                outbox.is_dirty = True
                dirty.append(reader)
        if dirty and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._flush_all)
        return count

    def _flush_all(self) -> None:
        self._is_due = False
        dirty, self._dirty = self._dirty, []
        for reader in dirty:
            reader.outbox.is_dirty = False
            try:
                reader.outbox.flush()
            except Exception:
                logger.exception("what is for a reader could not be written")
                reader.abort()


class Outbox:
    """Of one connection. Whoever adds to `frames` and `bytes` sees to it that `flush` is called soon."""

    def __init__(
        self,
        wire: Wire,
        limits: DoorLimits,
        counts: Counts,
        on_slow: Callable[[], None],
        described: Callable[[], Mapping[str, JsonValue]],
    ) -> None:
        self.frames: list[bytes | Answer] = []
        self.bytes = 0
        """Of the frames that are there."""
        self.is_dirty = False
        """Somebody will call `flush`."""
        self._wire = wire
        self._limits = limits
        self._counts = counts
        self._on_slow = on_slow
        self._described = described
        self._answers = 0
        self._draining: asyncio.Task[None] | None = None
        self._is_warned = False
        self._is_closed = False

    def put(self, frame: bytes) -> None:
        """At the end."""
        self.frames.append(frame)
        self.bytes += len(frame)

    def put_answer(self, answer: Answer, before: Answer | None = None) -> None:
        """Keep a place at the end, or directly before another answer that has one."""
        if before is None:
            self.frames.append(answer)
        else:
            self.frames.insert(self.frames.index(before), answer)
        self._answers += 1

    def take_back(self, answer: Answer) -> None:
        """Gives up the place that was kept for it, if there is one."""
        if answer in self.frames:
            self.frames.remove(answer)
            self._answers -= 1

    def flush(self) -> None:
        """Writes what is there, up to an answer that is not due."""
        if not self.frames or self._is_closed:
            return
        if self._draining is not None or self._wire.waiting_bytes() > WIRE_BYTES_HIGH:
            self._wait_for_room()
            return
        if self._answers:
            data = self._taken()
        else:
            data = b"".join(cast("list[bytes]", self.frames))
            self.frames.clear()
            self.bytes = 0
        if data:
            self._counts.bytes_sent += len(data)
            self._wire.write(data)

    def _taken(self) -> bytes:
        taken: list[bytes] = []
        for one in self.frames:
            if isinstance(one, Answer):
                if not one.is_due or one.frame is None:
                    break
                taken.append(one.frame)
                self._answers -= 1
                one.written()
            else:
                taken.append(one)
                self.bytes -= len(one)
        del self.frames[: len(taken)]
        return b"".join(taken)

    def _wait_for_room(self) -> None:
        if self._draining is None:
            self._draining = asyncio.get_running_loop().create_task(self._drain())
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

    def _warn(self, sentence: str) -> None:
        waiting = {"waiting": len(self.frames), "waiting_bytes": self.bytes}
        logger.warning(sentence, extra={**self._described(), **waiting})

    async def _drain(self) -> None:
        try:
            with suppress(OSError):  # it is gone, and whoever receives from it hears of that
                await self._wire.drained()
                while self._wire.waiting_bytes() > WIRE_BYTES_HIGH:
                    await asyncio.sleep(STILL_FULL_S)
                    await self._wire.drained()
        finally:
            self._draining = None
        self._is_warned = False
        self.flush()

    async def drained(self) -> None:
        """Returns when what was sent is on its way: a client that asks for pages gets no more than it reads."""
        self.flush()
        while self._draining is not None and not self._is_closed:
            await asyncio.wait([self._draining])

    def close(self) -> None:
        """Nothing is written any more."""
        self._is_closed = True
        self.frames.clear()
        self.bytes = self._answers = 0
        if self._draining is not None:
            self._draining.cancel()
