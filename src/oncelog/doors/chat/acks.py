"""Acknowledgements on their way into the log: one at a time for a user and chat, and while it is, only the newest wait.

A client acknowledges what it gets, message by message. Of ten that come while a commit is under way nine say nothing.
"""

from collections.abc import Callable
from typing import Final

from msgspec import Struct

from oncelog import codes
from oncelog.core.values import Acknowledge, Reason, Refused, Verdict
from oncelog.doors.chat.door import refusal
from oncelog.doors.faults import DoorError, error_of
from oncelog.engine.log import Log
from oncelog.errors import OncelogError

WAITING_MAX: Final = 1000
"""For one user and chat. Each may turn out to be beyond the chat's end, and then those below it still hold."""
BUSY_RETRY_AFTER_MS: Final = 100


class Waiting(Struct, eq=False, gc=False):
    """An acknowledgement, and who is told if it is refused."""

    sequence: int
    refused: Callable[[DoorError], None]


class Acks:
    """One for a server."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._flights: dict[tuple[str, str], _Flight] = {}

    def take(self, scope: str, user_id: str, waiting: Waiting) -> None:
        """Acknowledges all up to a sequence, now or together with what comes until it is its turn."""
        flight = self._flights.get((scope, user_id))
        if flight is not None:
            flight.wait(waiting)
        else:
            flight = self._flights[scope, user_id] = _Flight(self, scope, user_id)
            flight.wait(waiting)
            self.go_on(flight)

    def go_on(self, flight: "_Flight") -> None:
        """Sends the highest of those that wait, or ends the flight."""
        while flight.waiting:
            flight.asked, flight.waiting = flight.waiting, []
            highest = max(one.sequence for one in flight.asked)
            try:
                verdict = self._log.submit_nowait(Acknowledge(flight.scope, flight.user_id, highest), flight)
            except OncelogError as error:
                flight.fail(error_of(error))
                continue
            if verdict is None:
                return
            flight.settle(verdict)
        self._flights.pop((flight.scope, flight.user_id), None)


class _Flight:
    """Of one user in one chat. It is a `Receiver` of the committer's."""

    __slots__ = ("_acks", "asked", "scope", "user_id", "waiting")

    def __init__(self, acks: Acks, scope: str, user_id: str) -> None:
        self._acks = acks
        self.scope = scope
        self.user_id = user_id
        self.asked: list[Waiting] = []
        self.waiting: list[Waiting] = []

    def wait(self, waiting: Waiting) -> None:
        self.waiting.append(waiting)
        if len(self.waiting) > WAITING_MAX:
            # The lowest says least. It may be covered by another; but nobody could tell its sender later if it is not.
            lowest = min(self.waiting, key=lambda one: one.sequence)
            self.waiting.remove(lowest)
            message = f"more than {WAITING_MAX} acknowledgements of this chat wait to be kept"
            lowest.refused(DoorError(codes.SERVER_BUSY, message, retry_after_ms=BUSY_RETRY_AFTER_MS))

    def done(self) -> bool:
        return False

    def set_result(self, result: Verdict, /) -> None:
        self.settle(result)
        self._acks.go_on(self)

    def set_exception(self, exception: Exception, /) -> None:
        self.fail(error_of(exception))
        self._acks.go_on(self)

    def settle(self, verdict: Verdict) -> None:
        """Nobody is told of success. Of those beyond the end everybody is, and the others are asked for again."""
        asked, self.asked = self.asked, []
        if not isinstance(verdict, Refused):
            return
        if verdict.reason is not Reason.INVALID_ACKNOWLEDGEMENT:
            _tell(asked, refusal(verdict))
            return
        _tell([one for one in asked if one.sequence > verdict.current], refusal(verdict))
        self.waiting.extend(one for one in asked if one.sequence <= verdict.current)

    def fail(self, error: DoorError) -> None:
        """Nobody can tell what became of them."""
        asked, self.asked = self.asked, []
        _tell(asked, error)


def _tell(asked: list[Waiting], error: DoorError) -> None:
    for one in asked:
        one.refused(error)
