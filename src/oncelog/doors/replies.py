"""Replies of one connection, in the order of its requests.

A reply can be known before an earlier one is. The outbox keeps the place of a reply among the broadcasts; this queue
keeps replies in the order of their requests: a reply is due when all earlier ones have been written. A reply without a
place among the broadcasts (an error, a retry) goes right behind the reply before it.
"""

import asyncio
from collections.abc import Callable, Iterator

from oncelog.doors.outbox import Answer, Outbox

Closing = tuple[int, str]
"""Code and reason with which a connection is closed."""


class Reply(Answer):
    """The reply to one request, from the moment that the request is accepted until it is written."""

    __slots__ = ("closing", "follows", "is_placed", "is_ready", "next", "previous", "queue")

    def __init__(self, queue: "ReplyQueue") -> None:
        self.frame = None  # as `Answer` does, without a call: there is a reply for every write
        self.is_due = False
        self.queue = queue
        self.previous: Reply | None = None
        self.next: Reply | None = None
        self.is_ready = False
        """Known, and everything that must be sent before it is in the outbox."""
        self.is_placed = False
        """In the outbox."""
        self.follows = False
        """Enters the outbox behind `previous`, as soon as that one does."""
        self.closing: Closing | None = None
        """Set for an error that closes the connection once it is written."""

    def written(self) -> None:
        """As `Answer` says."""
        self.queue.written(self)


class ReplyQueue:
    """The replies of one connection that have not been written yet. `on_closing` is called in the middle of a flush."""

    def __init__(self, outbox: Outbox, on_closing: Callable[[Closing], None]) -> None:
        self.count = 0
        self._outbox = outbox
        self._on_closing = on_closing
        self._head: Reply | None = None
        self._tail: Reply | None = None
        self._has_gaps = False
        """A reply may have been placed before an earlier one."""
        self._emptied: asyncio.Future[None] | None = None

    def append(self, reply: Reply) -> None:
        """A request has been accepted: later replies wait for the reply to it."""
        tail = self._tail
        if tail is None:
            self._head = reply
        else:
            tail.next = reply
            reply.previous = tail
        self._tail = reply
        self.count += 1

    def send(self, frame: bytes, closing: Closing | None = None) -> None:
        """Send a reply that is known at once, behind the replies to earlier requests."""
        if self._head is None and closing is None:
            self._outbox.put(frame)
            return
        reply = Reply(self)
        reply.frame, reply.closing = frame, closing
        self.append(reply)
        self.settle(reply)
        self.enter(reply)

    def settle(self, reply: Reply) -> None:
        """The reply is ready: it is due when it is the first one."""
        reply.is_ready = True
        if reply.previous is None:
            reply.is_due = True

    def place(self, reply: Reply) -> None:
        """Put the reply, ready or not, at the end of the outbox: this is its place among the broadcasts."""
        self._outbox.put_answer(reply)
        reply.is_placed = True
        following = reply.next
        while following is not None and following.follows:
            self._outbox.put_answer(following)
            following.is_placed, following.follows = True, False
            following = following.next
        if self._has_gaps:
            # A later reply must not stand in front of it. Moved back, it still overtakes no broadcast.
            for later in list(_placed(following)):
                self._outbox.take_back(later)
                self._outbox.put_answer(later)
        if reply.previous is not None and not reply.previous.is_placed:
            self._has_gaps = True

    def enter(self, reply: Reply) -> None:
        """Put a reply without a place among the broadcasts behind the reply before it."""
        if reply.previous is not None and not reply.previous.is_placed:
            reply.follows = True
            return
        later = next(_placed(reply.next), None) if self._has_gaps else None
        if later is None:
            self.place(reply)
            return
        following: Reply | None = reply
        while following is not None and (following is reply or following.follows):
            self._outbox.put_answer(following, before=later)
            following.is_placed, following.follows = True, False
            following = following.next

    def take_back(self, reply: Reply) -> None:
        """Remove the reply from the outbox: it will be placed further back."""
        self._outbox.take_back(reply)
        reply.is_placed = False
        self._has_gaps = self._has_gaps or reply.next is not None

    def written(self, reply: Reply) -> None:
        """The first reply has been written."""
        following = self._head = reply.next
        self.count -= 1
        if following is None:
            self._tail = None
            self._has_gaps = False
            self._wake()
        else:
            reply.next = following.previous = None
            following.is_due = following.is_ready
        if reply.closing is not None:
            self._on_closing(reply.closing)

    async def emptied(self) -> None:
        """Return when no reply waits any more, or the connection has ended."""
        while self._head is not None:
            if self._emptied is None:
                self._emptied = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._emptied)

    def close(self) -> None:
        """Nothing more is written."""
        reply = self._head
        while reply is not None:  # replies refer to each other
            reply.previous, reply.next, reply = None, None, reply.next
        self._head = self._tail = None
        self.count = 0
        self._wake()

    def _wake(self) -> None:
        if self._emptied is not None:
            self._emptied.set_result(None)
            self._emptied = None


def _placed(reply: Reply | None) -> Iterator[Reply]:
    """Yield the replies from this one on that are in the outbox."""
    while reply is not None:
        if reply.is_placed:
            yield reply
        reply = reply.next
