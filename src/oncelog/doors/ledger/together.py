"""Writes that come one by one among many others, handed to the log several at a time.

gRPC brings every call alone, and does much for the next one in between: what is done for a single write finds nothing
of its own in the processor's caches, and takes several times as long as in a row. And it lets the next ones in when the
last have been: a commit of one or two would leave it no time to let in more. So while many wait for their commit, or
have just been answered, those who come behind them are held back for a moment. Where few are about, nobody is.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Final

from oncelog.doors.faults import DoorError
from oncelog.doors.ledger import messages
from oncelog.doors.ledger.door import LedgerDoor
from oncelog.doors.ledger.values import Write, WriteAnswer
from oncelog.doors.principal import Principal

CROWD: Final = 16
RECENT_S: Final = 0.02
"""From so many on that wait for their commit, or have been answered in this time, others are held back:"""
HELD_MAX: Final = 32
"""until there are so many of them,"""
HELD_S: Final = 0.003
"""or for so long, or until someone has been answered, and the next batch begins."""

Read = Callable[[Any], Write]
"""What a message asks for. Raises DoorError."""


class Together:
    """One for a service."""

    def __init__(self, door: LedgerDoor) -> None:
        self._door = door
        self._held: list[tuple[Read, Any, Principal, asyncio.Future[bytes]]] = []
        self._timer: asyncio.Handle | None = None
        self._is_due = False
        self._since_s = 0.0
        self._answered = self._answered_before = 0
        """Since then, and in as long a time before it."""

    def write(self, read: Read, message: Any, principal: Principal) -> asyncio.Future[bytes]:
        """The answer to a write, as it is sent. The future raises DoorError."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[bytes] = loop.create_future()
        self._held.append((read, message, principal, future))
        if len(self._held) >= HELD_MAX or not self._is_crowded(loop.time()):
            self.hand_over()
        elif self._timer is None:
            self._timer = loop.call_later(HELD_S, self.hand_over)
        return future

    def _is_crowded(self, now_s: float) -> bool:
        self._count(0, now_s)
        return self._answered + self._answered_before >= CROWD or self._door.log.queued >= CROWD

    def _count(self, answered: int, now_s: float) -> None:
        past_s = now_s - self._since_s
        if past_s >= RECENT_S:
            self._answered_before = self._answered if past_s < 2 * RECENT_S else 0
            self._answered, self._since_s = 0, now_s
        self._answered += answered

    def hand_over(self) -> None:
        """Holds nobody any longer: what comes next must not overtake them."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._is_due = False
        held, self._held = self._held, []
        for read, message, principal, future in held:
            try:
                self._submit(read(message), principal, future)
            except Exception as error:  # noqa: BLE001 - told to the one whose it is, and not to the others
                _fail(future, error)

    def _submit(self, asked: Write, principal: Principal, future: asyncio.Future[bytes]) -> None:
        def answer(given: WriteAnswer) -> None:
            self._count(1, asyncio.get_running_loop().time())
            if self._held and not self._is_due:
                # Not at once: the log is still telling the others.
                self._is_due = True
                asyncio.get_running_loop().call_soon(self.hand_over)
            if not future.done():  # or the caller has gone
                future.set_result(messages.answer(given).SerializeToString())

        def fail(error: Exception) -> None:
            _fail(future, error)

        self._door.write_nowait(asked, principal, answer, fail)


def _fail(future: asyncio.Future[bytes], error: Exception) -> None:
    """What is told is all that is wanted of a DoorError. Where it was raised knows the future, which would keep it: the
    message would stay until a collection of garbage."""
    cause: BaseException | None = error if isinstance(error, DoorError) else None
    while cause is not None:
        cause.__traceback__ = None
        cause = cause.__cause__ or cause.__context__
    if not future.done():
        future.set_exception(error)
