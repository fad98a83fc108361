"""The asyncio chat client: it sends and delivers each message once, in one order, despite crashes.

    async with ChatClient("http://127.0.0.1:7171", path="ann.db", token="ann") as client:
        await client.create("tea", members=["user:bob"])
        pending = await client.send("tea", "hello")
        print(await pending.outcome())
        async for message in client.messages("tea"):
            print(message.sequence, message.sender_id, message.content)

Two tasks do the work: the `connector` keeps the client connected, and the `outbox` saves outgoing and incoming
messages. The `protocol` makes the decisions without I/O, and the `store` accesses the file.
"""

import asyncio
import os
import random
import ssl
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Final
from uuid import UUID, uuid4

from oncelog.client.chat.connector import ChatConnector
from oncelog.client.chat.delivery import DeliveryCounts, get_mark
from oncelog.client.chat.http_client import ChatHttpClient, ChatTransport
from oncelog.client.chat.message_stream import MessageStream
from oncelog.client.chat.outbox import ChatRuntime, Outbox, Pending, check_chat_id, now_ms, prepare
from oncelog.client.chat.protocol import ChatProtocol
from oncelog.client.chat.store import ChatStore
from oncelog.client.chat.values import (
    TEXT_PLAIN,
    ChatDetails,
    ChatLimits,
    ChatSummary,
    Line,
    Mark,
    Message,
    OutboxMessage,
    Refused,
    RefusedMessage,
    Status,
    Update,
)
from oncelog.client.runtime.bounded_stream import BoundedStream
from oncelog.client.runtime.client import get_wall_ms
from oncelog.client.runtime.connector import ConnectedClient
from oncelog.client.runtime.http import normalize_url
from oncelog.client.runtime.options import (
    Token,
    check_client_id,
    check_limits,
    check_number,
    check_path,
    check_token,
)
from oncelog.client.runtime.values import ConnectionState
from oncelog.core.canonical import INTEGER_MAX
from oncelog.errors import (
    CanonicalError,
    ClientError,
)

LINES_DEFAULT: Final = 50


class ChatClient(ConnectedClient[ChatRuntime, Status]):
    """A chat client for one device of one user, with its own file. `async with` opens and closes it."""

    def __init__(  # noqa: PLR0913 - keyword arguments, most with a default
        self,
        url: str,
        *,
        path: str | os.PathLike[str],
        token: Token = None,
        device_id: str | None = None,
        limits: ChatLimits | None = None,
        headers: Mapping[str, str] | None = None,
        tls: ssl.SSLContext | None = None,
        chance: random.Random | None = None,
        wall_ms: Callable[[], int] | None = None,
        wire: ChatTransport | None = None,
    ) -> None:
        """Store the configuration. Opening the client opens the file and connects.

        `path` is the client's file, which is created if it is missing, or ":memory:" for messages that need not survive
        a restart. The file belongs to one device of one user. It stores `device_id`; by default, the client generates
        an id. `token` is a string, or a function that the client calls for each connection and request.
        """
        self.limits = check_limits(limits, ChatLimits)
        check_token(token)
        self._device_id = check_client_id(device_id, "device_id")
        self.url = normalize_url(url)
        self._runtime = ChatRuntime(ChatStore(check_path(path)), self.limits, chance)
        self._transport: ChatHttpClient = ChatHttpClient(
            self.url, token=token, limits=self.limits, headers=headers, tls=tls
        )
        self._wall_ms = wall_ms or get_wall_ms
        self._outbox: Outbox = Outbox(
            self._runtime,
            lambda entry: Pending(entry, self._delivery_counts.wait_until_delivered),
        )
        self._connector: ChatConnector = ChatConnector(
            self._runtime, self._outbox, wire or self._transport, self._wall_ms
        )
        self._runtime.wake_tasks = self._connector.wake_all
        self._delivery_counts = DeliveryCounts(self._runtime, self._outbox, self._connector, self._transport)

    # --- opening and closing

    async def _open(self) -> None:
        runtime = self._runtime
        kept = await runtime.call_store(runtime.store.open, self._device_id)
        protocol = ChatProtocol(
            kept.device_id, kept.user_id, kept.epoch, kept.chats, self.limits, runtime.random_source
        )
        runtime.loaded_protocol = protocol
        runtime.progress = {chat.chat_id: chat.to_saved() for chat in kept.chats}
        self._outbox.refused = dict(kept.refused)
        self._outbox.load(kept.outbox)
        protocol.enqueue(kept.outbox, now_ms(), was_tried=True)
        self._start_tasks()

    async def _drain(self) -> None:
        self._runtime.protocol.flush()
        with suppress(TimeoutError):
            async with asyncio.timeout(self.limits.close_timeout_ms / 1000):
                await self._connector.drain()

    # --- sending

    async def send(
        self,
        chat_id: str,
        content: str,
        *,
        content_type: str = TEXT_PLAIN,
        client_message_id: UUID | str | None = None,
    ) -> Pending:
        """Add a message to the outbox and save it to disk. The client sends it repeatedly until it has an outcome.

        Raises CanonicalError for a malformed message, LimitExceededError if the outbox is full, IdReusedError if a
        different message with this id is pending, and StoreError if the file cannot be written: the message is then not
        in the outbox. After a ClosedError the message may be on disk; if so, the client sends it when it is reopened.
        """
        self._runtime.check_open()
        draft = prepare(chat_id, content, content_type, client_message_id, self.limits, self._wall_ms())
        return (await self._outbox.submit([draft]))[0]

    def pending(self, chat_id: str | None = None) -> list[Pending]:
        """Return the messages without an outcome, from one chat or all, in order. Includes those from earlier runs."""
        return [message for message in self._outbox.pending.values() if chat_id in (None, message.chat_id)]

    def refused(self) -> list[RefusedMessage]:
        """Return the refused messages, oldest first. `send_again` and `forget_refused` remove them."""
        return [message for _, message in sorted(self._outbox.refused.items())]

    async def send_again(self, client_message_id: UUID | str) -> Pending:
        """Move a refused message back to the outbox, with its id. Raises ClientError if no refused message has it."""
        self._runtime.check_open()
        number, message = self._get_refused(str(client_message_id))
        draft = OutboxMessage(
            0, message.client_message_id, message.chat_id, message.content, message.content_type, self._wall_ms()
        )
        if draft.identity in self._outbox.pending:
            raise ClientError(f"the {draft} is already in the outbox")
        return (await self._outbox.submit([draft], [number]))[0]

    async def forget_refused(self, *client_message_ids: UUID | str) -> None:
        """Remove refused messages that the application has handled, or all of them if no id is given."""
        self._runtime.check_open()
        names = [str(item) for item in client_message_ids] or [item.client_message_id for item in self.refused()]
        await self._outbox.save((), [self._get_refused(name)[0] for name in names])

    def _get_refused(self, name: str) -> tuple[int, RefusedMessage]:
        for number, message in self._outbox.refused.items():
            if message.client_message_id == name.lower():
                return number, message
        raise ClientError(f"no refused message has the id {name}")

    # --- reading

    def messages(self, chat_id: str | None = None, *, after: int | None = None) -> MessageStream:
        """Iterate over the messages of one chat or all chats as they arrive, in chat order, including the user's own.

        The stream begins after the messages that the application has received, or after `after`. A message counts as
        received when the loop requests the next one; the client then acknowledges it to the server. Raises
        HistoryChangedError if the history of a chat starts over.
        """
        self._runtime.check_open()
        if chat_id is not None:
            check_chat_id(chat_id)
        if after is not None:
            check_number(after, "after")
        return MessageStream(self._runtime, chat_id, after)

    def received(self, chat_id: str, sequence: int) -> None:
        """Acknowledge all messages up to a sequence. For applications that display `lines` instead of using `messages`.

        Messages that have not arrived yet are not acknowledged.
        """
        check_number(sequence, "sequence")
        self._runtime.check_open()
        shown = self._runtime.progress.get(chat_id)
        if shown is not None:
            self._runtime.mark_received(chat_id, min(sequence, shown.complete_to), shown.generation)

    async def lines(self, chat_id: str, *, before: int | None = None, count: int = LINES_DEFAULT) -> list[Line]:
        """Return the lines of a chat: the last messages, then the user's messages that are not committed yet.

        A pending message moves to its place in the chat once the server has committed it. With `before`, return only
        messages before that sequence.
        """
        runtime = self._runtime
        check_chat_id(chat_id)
        if before is not None:
            check_number(before, "before")
        user_id, shown = runtime.open_protocol.user_id, runtime.progress.get(chat_id)
        complete_to = 0 if shown is None else shown.complete_to
        found, watermarks = await runtime.call_store(
            runtime.store.load_messages_before, chat_id, INTEGER_MAX if before is None else before, complete_to,
            user_id, count,
        )  # fmt: skip
        self._delivery_counts.schedule(chat_id)  # the next call uses the new watermarks
        lines = [
            _to_line(message, message.sender_id, get_mark(message, user_id, watermarks), message) for message in found
        ]
        if before is None:
            refused = [message for message in self.refused() if message.chat_id == chat_id]
            lines += [_to_line(message, user_id, Mark.REFUSED, refusal=message.outcome) for message in refused]
            seen = {message.client_message_id for message in found}
            unsent = [message for message in self.pending(chat_id) if message.client_message_id not in seen]
            lines += [_to_line(message, user_id, Mark.PENDING) for message in unsent]
        return lines

    async def forget_messages(self, chat_id: str, up_to: int) -> None:
        """Remove received messages up to a sequence from the file. The server keeps them (`history`)."""
        check_number(up_to, "up_to")
        chat = self._runtime.open_protocol.chats.get(chat_id)
        if chat is not None:
            await self._runtime.call_store(self._runtime.store.forget_messages, chat_id, min(up_to, chat.received_to))

    def updates(self) -> BoundedStream[Update]:
        """Iterate over updates from now on: `Arrived`, `Progress`, `Delivery`, `Membership` and `HistoryChange`.

        Raises UpdatesLostError if the loop falls too far behind. Updates are not stored.
        """
        self._runtime.check_open()
        return BoundedStream(self._runtime.streams, count_max=("updates_max", self.limits.updates_max))

    def chats(self) -> list[ChatSummary]:
        """Return all known chats, ordered by id."""
        shown = self._runtime.progress
        found = [
            ChatSummary(
                chat_id=chat.chat_id,
                is_member=chat.is_member,
                role=chat.role,
                last_sequence=max(chat.heard_to, chat.complete_to),
                complete_to=shown[chat.chat_id].complete_to if chat.chat_id in shown else 0,
                received_to=chat.received_to,
                pending=len(chat.queue),
            )
            for chat in self._runtime.open_protocol.chats.values()
            if chat.is_member or chat.complete_to
        ]
        return sorted(found, key=lambda chat: chat.chat_id)

    # --- over HTTP

    async def create(self, chat_id: str | None = None, *, members: Iterable[str] = ()) -> ChatDetails:
        """Create a chat with the user as its owner, or add members to a chat that the user owns.

        Like all HTTP calls, it raises LostError if the server does not answer, and ServerRefusedError if it refuses.
        After a LostError the call can be repeated with the same `chat_id`.
        """
        # The client chooses the id, so that a repeated request does not create a second chat.
        name = f"chat_{uuid4().hex}" if chat_id is None else chat_id
        check_chat_id(name)
        if isinstance(members, str):  # a string is an iterable of characters
            raise CanonicalError("members", f"must be a list of strings, not {members!r}")
        protocol = self._runtime.open_protocol
        details = await self._transport.create(name, members)
        own = next((member.role for member in details.members if member.user_id == protocol.user_id), None)
        protocol.join(name, own)
        self._runtime.wake_tasks()
        return details

    async def details(self, chat_id: str) -> ChatDetails:
        """Return the state of a chat on the server, with its members."""
        return await self._check_chat(chat_id).get_details(chat_id)

    async def add_member(self, chat_id: str, user_id: str, *, role: str | None = None) -> None:
        """Add a member (`user:bob`), or set a member's role (`OWNER` or `MEMBER`). Only owners may do so.

        Without a role, a new member joins as a plain member, and an existing one keeps its role. Raises
        ServerRefusedError with the code `NOT_AN_OWNER` if the user is a plain member, or `LAST_OWNER` if the chat would
        be left without an owner.
        """
        await self._check_chat(chat_id).add_member(chat_id, user_id, role)

    async def set_role(self, chat_id: str, user_id: str, role: str) -> None:
        """Set a member's role. Raises ServerRefusedError with the code `NOT_A_MEMBER` if `user_id` is not a member."""
        await self._check_chat(chat_id).add_member(chat_id, user_id, role, only_if_member=True)

    async def remove_member(self, chat_id: str, user_id: str) -> None:
        """Remove a member, which only owners may do, or leave the chat. The client keeps the chat's messages."""
        await self._check_chat(chat_id).remove_member(chat_id, user_id)
        protocol = self._runtime.protocol
        if user_id == protocol.user_id:
            protocol.leave(chat_id)
            self._runtime.wake_tasks()

    async def history(
        self, chat_id: str, *, after: int | None = None, before: int | None = None, limit: int = 100
    ) -> list[Message]:
        """Return messages from the server, in order: the first ones after a sequence, or the last ones before it."""
        return await self._check_chat(chat_id).get_history(chat_id, after, before, limit)

    async def watermarks(self, chat_id: str) -> dict[str, int]:
        """Return the watermark of each member. The client requests them once per connection."""
        self._check_chat(chat_id)
        return await self._delivery_counts.load_watermarks(chat_id)

    def _check_chat(self, chat_id: str) -> ChatHttpClient:
        """Return the HTTP client of an open client. Raises CanonicalError if the chat id is malformed."""
        check_chat_id(chat_id)
        self._runtime.check_open()
        return self._transport

    # --- status

    def status(self) -> Status:
        """Return the current status, for example for a user interface. `until_status` waits for a particular one."""
        runtime, connector = self._runtime, self._connector
        pending, refused = len(self._outbox.pending), len(self._outbox.refused)
        if not runtime.is_open:
            state = ConnectionState.CLOSED
            return Status(state=state, pending=pending, refused=refused, last_error=self._find_last_error())
        protocol = runtime.protocol
        state = ConnectionState.LIVE if protocol.is_live else ConnectionState.CATCHING_UP
        if not connector.is_admitted:
            state = ConnectionState.REFUSED
        elif not connector.is_connected:
            state = ConnectionState.OFFLINE
        return Status(
            state=state,
            user_id=protocol.user_id,
            pending=pending,
            refused=refused,
            epoch=protocol.epoch,
            history_change=runtime.history_change,
            last_error=self._find_last_error(),
        )

    def _is_live(self) -> bool:
        """Whether the file contains all messages that the server has reported."""
        protocol = self._runtime.open_protocol
        return protocol.is_live and not protocol.changes and not self._outbox.is_busy


def _to_line(
    source: Message | RefusedMessage | Pending,
    sender_id: str,
    mark: Mark,
    message: Message | None = None,
    refusal: Refused | None = None,
) -> Line:
    return Line(source.client_message_id, sender_id, source.content, source.content_type, mark, message, refusal)
