"""The task that keeps a client connected, and the base class of the clients that run it.

The task reads and writes each connection and checks that the server answers in time. After a connection ends, it pauses
and reconnects.
"""

import asyncio
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, Generic, TypeVar

from oncelog import error_codes
from oncelog.client.runtime.backoff import RetryPause, RetryTask, run_until_first_ends
from oncelog.client.runtime.client import BaseClient, ProtocolRuntime, StatusType
from oncelog.client.runtime.http import Socket, Transport
from oncelog.client.runtime.outbox import BaseOutbox
from oncelog.client.runtime.protocol import BaseProtocol
from oncelog.errors import LostError, ServerRefusedError

ACCESS_DENIED_CODES: Final = frozenset(
    {
        error_codes.AUTH_FAILED,
        error_codes.FORBIDDEN,
        error_codes.VERSION_UNSUPPORTED,
        error_codes.BAD_REQUEST,
        "invalid_request",
    }
)
"""Error codes that deny access until a person fixes the cause."""

ConnectionPart = Callable[[Socket], Awaitable[None]]
"""One of the loops that serve a connection. The connection is closed when any of them finishes."""


ProtocolType = TypeVar("ProtocolType", bound=BaseProtocol)
Runtime = TypeVar("Runtime", bound=ProtocolRuntime[Any, Any, Any])


class BaseConnector(RetryTask[Runtime], Generic[Runtime, ProtocolType]):
    """Runs one connection after another. A subclass opens them and handles their frames."""

    denied_codes: frozenset[str] = ACCESS_DENIED_CODES

    def __init__(self, runtime: Runtime, *, may_renew_token: bool) -> None:
        super().__init__(runtime)
        self._may_renew_token = may_renew_token
        self._was_admitted = False
        """Whether the server has admitted the client over the current connection."""
        self._write_wakeup = asyncio.Event()
        self._drained_event = asyncio.Event()
        self.is_admitted = True
        """False while the server denies access."""

    @property
    def _protocol(self) -> ProtocolType:
        protocol: ProtocolType = self._runtime.protocol
        return protocol

    # --- for subclasses

    @abstractmethod
    async def _connect(self) -> Socket:
        """Open a connection and start the protocol on it. Raises LostError or ServerRefusedError."""

    @abstractmethod
    async def _read(self, socket: Socket) -> None:
        """Pass frames to the protocol until the connection ends with an error."""

    @abstractmethod
    def _list_parts(self) -> Sequence[ConnectionPart]:
        """Return the loops that a connection runs besides reading, writing and watching for answers."""

    # --- calls

    def wake_writer(self) -> None:
        """Wake the write loop if the protocol has frames to send."""
        if self._protocol.outgoing:
            self._drained_event.clear()
            self._write_wakeup.set()

    async def drain(self) -> None:
        """Wait until all frames are sent or the connection has ended."""
        if self._protocol.outgoing:
            self.wake_writer()
            await self._drained_event.wait()

    # --- the task

    async def _step(self) -> RetryPause:
        """Run one connection, which always ends with an error."""
        before = self._protocol.answer_count
        self._was_admitted, self._protocol.reconnect_ms = False, 0
        try:
            await self._run_connection()
        except LostError as error:
            self._record_error(str(error))
            return RetryPause(self._protocol.reconnect_ms)
        except ServerRefusedError as error:
            self._record_error(str(error))
            # If the client was admitted before, its token has probably expired. A token function may return a new one.
            has_expired = self._was_admitted and self._may_renew_token
            self.is_admitted = has_expired or error.code.lower() not in self.denied_codes
            return RetryPause(error.retry_after_ms, is_long=not self.is_admitted)
        finally:
            if self._protocol.answer_count - before > 1:  # more than the answer to `connect` arrived
                self._backoff.reset()
            self._process_changes()
        return RetryPause()

    def _record_error(self, error: str) -> None:
        if error != self.last_error:
            self._runtime.logger.info("not connected: %s", error)
        super()._record_error(error)

    def _process_changes(self) -> None:
        """Wake the tasks that may have new work after a frame or a connection change."""
        if self._protocol.is_submitting:
            self._was_admitted = self.is_admitted = True
            self.last_error = None
        self._runtime.wake_tasks()

    async def _run_connection(self) -> None:
        socket = await self._connect()
        try:
            self._process_changes()
            parts = (self._read, self._write, self._watch_answers, *self._list_parts())
            await run_until_first_ends(part(socket) for part in parts)
        finally:
            # Disconnect first, so that submissions made while the socket closes wait for the next connection.
            self._protocol.disconnect(socket.close_code)
            self._write_wakeup.clear()
            self._drained_event.set()
            self._process_changes()
            await socket.close()

    async def _write(self, socket: Socket) -> None:
        outgoing = self._protocol.outgoing
        while True:
            await self._write_wakeup.wait()
            self._write_wakeup.clear()
            while outgoing:
                frames = list(outgoing)
                outgoing.clear()
                for frame in frames:
                    await socket.send(frame)
            self._drained_event.set()

    async def _watch_answers(self, _socket: Socket) -> None:
        """Raise LostError if the server takes too long to answer."""
        protocol, timeout_ms = self._protocol, self._runtime.limits.answer_timeout_ms
        while True:
            before = protocol.answer_count if protocol.is_waiting else -1
            await asyncio.sleep(timeout_ms / 2000)
            if protocol.is_waiting and protocol.answer_count == before:
                await asyncio.sleep(timeout_ms / 2000)
                if protocol.is_waiting and protocol.answer_count == before:
                    raise LostError(f"the server did not answer within {timeout_ms} ms")


class ConnectedClient(BaseClient[Runtime, StatusType]):
    """A client with an outbox and a connector."""

    _connector: BaseConnector[Any, Any]
    _outbox: BaseOutbox[Any, Any, Any, Any]
    _transport: Transport

    def reconnect_now(self) -> None:
        """Skip the pause before the next connection attempt, for example because the network is back."""
        self._runtime.check_open()
        self._connector.skip_pause()

    def _find_last_error(self) -> str | None:
        """Return why the client is not connected, or why writes wait."""
        runtime = self._runtime
        if not runtime.is_open:
            return runtime.failure_text
        protocol = runtime.protocol
        connection_error = protocol.read_error or self._connector.last_error
        return runtime.store_error or connection_error or protocol.blocked_writes.last_error

    def _start_tasks(self) -> None:
        self._runtime.start_task("save", self._outbox.run)
        self._runtime.start_task("connect", self._connector.run)

    async def _release(self) -> None:
        try:
            if self._runtime.is_ready:
                await self._outbox.finish()
        finally:
            await self._transport.close()
