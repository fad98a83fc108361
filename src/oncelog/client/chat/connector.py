"""The task that keeps a chat client connected to its server."""

import asyncio
from collections.abc import Callable, Sequence

from oncelog.client.chat.http_client import ChatTransport
from oncelog.client.chat.outbox import ChatRuntime, Outbox, now_ms
from oncelog.client.chat.protocol import WRONG_USER, ChatProtocol
from oncelog.client.chat.sender import ChatPhase
from oncelog.client.runtime.connector import ACCESS_DENIED_CODES, BaseConnector, ConnectionPart
from oncelog.client.runtime.http import Socket
from oncelog.errors import OncelogError


class ChatConnector(BaseConnector[ChatRuntime, ChatProtocol]):
    """Connector of a chat client."""

    denied_codes = ACCESS_DENIED_CODES | {WRONG_USER.lower()}

    def __init__(
        self,
        runtime: ChatRuntime,
        outbox: Outbox,
        transport: ChatTransport,
        wall_ms: Callable[[], int],
    ) -> None:
        super().__init__(runtime, may_renew_token=True)
        self._outbox = outbox
        self._transport = transport
        self._wall_ms = wall_ms
        self._timer_wakeup = asyncio.Event()
        self._list_wakeup = asyncio.Event()
        self.connection_count = 0
        """How many connections the server has admitted. HTTP answers older than the latest connection may be out of
        date."""

    @property
    def is_connected(self) -> bool:
        """Whether the server has admitted the client."""
        return self._protocol.phase in (ChatPhase.LISTING, ChatPhase.READY)

    def wake_all(self) -> None:
        """After a protocol change, wake waiting callers and all tasks that now have work.

        The protocol may have changes to save, frames to send or a new due time, or it may need the list of chats.
        """
        if self._protocol.changes:
            self._outbox.wake()
        self.wake_writer()
        self._timer_wakeup.set()
        if self._protocol.wants_list:
            self._list_wakeup.set()
        self._runtime.wake_waiters()

    async def _connect(self) -> Socket:
        token = await self._transport.get_token()
        socket = await self._transport.connect()
        self._protocol.connect(token, self._wall_ms() - now_ms())
        return socket

    def _list_parts(self) -> Sequence[ConnectionPart]:
        return self._run_timer, self._load_lists

    async def _read(self, socket: Socket) -> None:
        protocol = self._protocol
        while True:
            data = await socket.receive()
            try:
                protocol.receive(data, now_ms())
            finally:
                self._process_changes()
            await self._outbox.wait_for_capacity()

    async def _run_timer(self, _socket: Socket) -> None:
        """Call the protocol's `tick` at `next_at_ms`."""
        protocol = self._protocol
        while True:
            self._timer_wakeup.clear()
            at_ms = protocol.next_at_ms
            try:
                async with asyncio.timeout(None if at_ms is None else max(0, at_ms - now_ms()) / 1000):
                    await self._timer_wakeup.wait()
            except TimeoutError:
                protocol.tick(now_ms())
                self._process_changes()

    async def _load_lists(self, _socket: Socket) -> None:
        """Request the list of chats whenever the protocol needs it."""
        protocol = self._protocol
        while True:
            await self._list_wakeup.wait()
            self._list_wakeup.clear()
            if not protocol.wants_list:
                continue
            is_first = protocol.phase is ChatPhase.LISTING
            protocol.start_list()
            try:
                chats = await self._transport.list_chats()
            except OncelogError as error:
                if is_first:
                    raise
                self._runtime.logger.info("the list of chats could not be loaded: %s", error)
                continue  # the protocol requests the list again later
            protocol.apply_list(chats, now_ms())
            if is_first:
                self.connection_count += 1
            self._process_changes()
