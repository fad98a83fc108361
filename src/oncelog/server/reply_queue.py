"""The replies of one connection, in the order of its requests.

A reply may be known before an earlier one. The send queue keeps each reply's place among the broadcasts. This queue
keeps the replies in the order of their requests: a reply is due once all earlier replies have been written. A reply
without a place among the broadcasts (an error, a retry) goes directly behind the previous reply.
"""

import asyncio
from collections.abc import Callable, Iterator

from oncelog.server.send_queue import ReplySlot, SendQueue

CloseReason = tuple[int, str]
"""Code and reason of a close frame."""


class Reply(ReplySlot):
    """The reply to one request, from the acceptance of the request until the reply is written."""

    __slots__ = ("close_reason", "follows", "is_placed", "is_ready", "next", "previous", "queue")

    def __init__(self, queue: "ReplyQueue") -> None:
        self.frame = None
        self.is_due = False
        self.queue = queue
        self.previous: Reply | None = None
        self.next: Reply | None = None
        self.is_ready = False
        """Whether the reply is known and all frames that must precede it are in the send queue."""
        self.is_placed = False
        """Whether the reply is in the send queue."""
        self.follows = False
        """Whether the reply enters the send queue directly behind `previous`."""
        self.close_reason: CloseReason | None = None
        """Set for an error that closes the connection once it is written."""

    def on_written(self) -> None:
        """See `ReplySlot`."""
        self.queue.remove_written(self)


class ReplyQueue:
    """The unwritten replies of one connection. A flush that writes a closing error calls `on_close`."""

    def __init__(self, send_queue: SendQueue, on_close: Callable[[CloseReason], None]) -> None:
        self.count = 0
        self._send_queue = send_queue
        self._on_close = on_close
        self._head: Reply | None = None
        self._tail: Reply | None = None
        self._has_gaps = False
        """Whether a reply may have been placed in the send queue before an earlier reply."""
        self._empty_future: asyncio.Future[None] | None = None

    def append(self, reply: Reply) -> None:
        """Append the reply to an accepted request. Later replies wait until it is written."""
        tail = self._tail
        if tail is None:
            self._head = reply
        else:
            tail.next = reply
            reply.previous = tail
        self._tail = reply
        self.count += 1

    def send(self, frame: bytes, close_reason: CloseReason | None = None) -> None:
        """Send an immediately known reply, behind the replies to earlier requests."""
        if self._head is None and close_reason is None:
            self._send_queue.put(frame)
            return
        reply = Reply(self)
        reply.frame, reply.close_reason = frame, close_reason
        self.append(reply)
        self.mark_ready(reply)
        self.place_after_previous(reply)

    def mark_ready(self, reply: Reply) -> None:
        """Mark a reply as ready. It is due if it is first in this queue."""
        reply.is_ready = True
        if reply.previous is None:
            reply.is_due = True

    def place(self, reply: Reply) -> None:
        """Append the reply, ready or not, to the send queue, which fixes its place among the broadcasts."""
        self._send_queue.put_slot(reply)
        reply.is_placed = True
        following = reply.next
        while following is not None and following.follows:
            self._send_queue.put_slot(following)
            following.is_placed, following.follows = True, False
            following = following.next
        if self._has_gaps:
            # A later reply must not precede this one. At the end of the queue it cannot overtake a broadcast either.
            for later in list(_iterate_placed(following)):
                self._send_queue.remove_slot(later)
                self._send_queue.put_slot(later)
        if reply.previous is not None and not reply.previous.is_placed:
            self._has_gaps = True

    def place_after_previous(self, reply: Reply) -> None:
        """Put a reply without a place among the broadcasts directly behind the previous reply."""
        if reply.previous is not None and not reply.previous.is_placed:
            reply.follows = True
            return
        later = next(_iterate_placed(reply.next), None) if self._has_gaps else None
        if later is None:
            self.place(reply)
            return
        following: Reply | None = reply
        while following is not None and (following is reply or following.follows):
            self._send_queue.put_slot(following, before=later)
            following.is_placed, following.follows = True, False
            following = following.next

    def unplace(self, reply: Reply) -> None:
        """Remove the reply from the send queue, so that it can be placed further back."""
        self._send_queue.remove_slot(reply)
        reply.is_placed = False
        self._has_gaps = self._has_gaps or reply.next is not None

    def remove_written(self, reply: Reply) -> None:
        """Remove the first reply, which has been written."""
        following = self._head = reply.next
        self.count -= 1
        if following is None:
            self._tail = None
            self._has_gaps = False
            self._wake()
        else:
            reply.next = following.previous = None
            following.is_due = following.is_ready
        if reply.close_reason is not None:
            self._on_close(reply.close_reason)

    async def wait_empty(self) -> None:
        """Wait until no reply is left, or the connection is closed."""
        while self._head is not None:
            if self._empty_future is None:
                self._empty_future = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._empty_future)

    def close(self) -> None:
        """Discard all replies."""
        reply = self._head
        while reply is not None:  # break the reference cycles between replies
            reply.previous, reply.next, reply = None, None, reply.next
        self._head = self._tail = None
        self.count = 0
        self._wake()

    def _wake(self) -> None:
        if self._empty_future is not None:
            self._empty_future.set_result(None)
            self._empty_future = None


def _iterate_placed(reply: Reply | None) -> Iterator[Reply]:
    """Yield the replies that are in the send queue, beginning with this one."""
    while reply is not None:
        if reply.is_placed:
            yield reply
        reply = reply.next
