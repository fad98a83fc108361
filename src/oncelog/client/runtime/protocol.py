"""Base class of the WebSocket client protocols: state without I/O."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable


class BlockedWrites:
    """Writes that the server temporarily refuses, with its reasons. The client reports them in its status.

    An outbox queue has at most one blocked write, because later writes of the queue wait for it.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._errors: dict[str, str] = {}

    @property
    def last_error(self) -> str | None:
        """The most recent reason among the writes that are still blocked, or None if no write is blocked."""
        return next(reversed(self._errors.values()), None)

    def block(self, code: str, message: str, queue: str = "") -> None:
        """Record that the first write of a queue must be retried later. A reconnect does not change this."""
        is_new = self._errors.pop(queue, None) is None
        self._errors[queue] = f"{code}: {message}"
        if is_new:
            self._logger.warning("temporarily refused%s: %s", _format_queue(queue), self._errors[queue])

    def unblock(self, queue: str = "") -> None:
        """Record that the blocked write of a queue now has an outcome."""
        if self._errors.pop(queue, None) is not None:
            self._logger.info("writes are accepted again%s", _format_queue(queue))


class BaseProtocol(ABC):
    """Protocol state of one client. A connector sends and receives its frames. Not thread-safe."""

    def __init__(self, logger: logging.Logger) -> None:
        self.outgoing: list[bytes] = []
        """Frames to send, in order. The connector empties the list as it sends them."""
        self.answer_count = 0
        """How many awaited answers have arrived. If it does not grow while `is_waiting`, the server is silent."""
        self.blocked_writes = BlockedWrites(logger)
        self.reconnect_ms = 0
        """Pause before reconnecting that the server requested when it closed the connection."""
        self.read_error: str | None = None
        """Why this connection receives no data: the client lacks read access to some of what it requested."""
        self._last_request_number = 0

    @property
    @abstractmethod
    def is_waiting(self) -> bool:
        """Whether the client is waiting for an answer from the server."""

    @property
    @abstractmethod
    def is_submitting(self) -> bool:
        """Whether the server has admitted the client, and the connection is ready for writes."""

    @abstractmethod
    def disconnect(self, close_code: int | None = None) -> None:
        """Record the end of the connection. The next one resends unanswered writes under the same ids."""

    def _append_request(self, encode: Callable[..., bytes], *arguments: object) -> str:
        """Encode a request with a new id as its last argument, queue it for sending, and return the id."""
        self._last_request_number += 1
        request_id = str(self._last_request_number)
        self.outgoing.append(encode(*arguments, request_id))
        return request_id


def _format_queue(queue: str) -> str:
    return f" in {queue}" if queue else ""
