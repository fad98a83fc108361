"""Base of the protocols of clients that connect over a WebSocket: state without I/O."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable


class BlockedWrites:
    """Writes that the server refuses temporarily, with its reasons, for the status of a client whose later writes wait.

    Each queue of an outbox has at most one blocked write, because its later writes wait for it.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._errors: dict[str, str] = {}

    @property
    def last_error(self) -> str | None:
        """The last reason of the writes that are still blocked; None without one."""
        return next(reversed(self._errors.values()), None)

    def block(self, code: str, message: str, queue: str = "") -> None:
        """Record that the first write of a queue is sent again later. A lost connection does not change that."""
        is_new = self._errors.pop(queue, None) is None
        self._errors[queue] = f"{code}: {message}"
        if is_new:
            self._logger.warning("not taken for now%s: %s", _format_queue(queue), self._errors[queue])

    def unblock(self, queue: str = "") -> None:
        """Record that a write of a queue has its outcome."""
        if self._errors.pop(queue, None) is not None:
            self._logger.info("writes are taken again%s", _format_queue(queue))


class BaseProtocol(ABC):
    """State of one client whose frames a connector carries. Only one thread may use it at a time."""

    def __init__(self, logger: logging.Logger) -> None:
        self.outgoing: list[bytes] = []
        """Frames to send, in order. The connector that sends them empties the list."""
        self.answer_count = 0
        """Number of awaited answers that have arrived. If it does not grow while `is_waiting`, the server is silent."""
        self.blocked_writes = BlockedWrites(logger)
        self.reconnect_ms = 0
        """Pause that the server asked for before it closed the connection."""
        self.read_error: str | None = None
        """Why this connection receives no data: the client may not read all of it."""
        self._last_request_number = 0

    @property
    @abstractmethod
    def is_waiting(self) -> bool:
        """Whether the server owes an answer."""

    @property
    @abstractmethod
    def is_submitting(self) -> bool:
        """Whether the server has admitted the client, and the connection is ready for writes."""

    @abstractmethod
    def disconnect(self, close_code: int | None = None) -> None:
        """End the connection. The next one sends the writes without an answer again, under the same ids."""

    def _append_request(self, encode: Callable[..., bytes], *arguments: object) -> str:
        """Encode a request with a new id as its last argument, send it, and return the id."""
        self._last_request_number += 1
        request_id = str(self._last_request_number)
        self.outgoing.append(encode(*arguments, request_id))
        return request_id


def _format_queue(queue: str) -> str:
    return f" in {queue}" if queue else ""
