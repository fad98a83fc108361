"""The blocking twin of `ChatClient`: the same methods, each of which waits for its result.

    with BlockingChatClient("http://127.0.0.1:7171", path="ann.db", token="ann") as client:
        client.create("tea", members=["user:bob"])
        print(client.send("tea", "hello").sent(timeout_s=10))

Any number of threads may share one.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar
from uuid import UUID

from oncelog.client.chat.client import LINES_DEFAULT, ChatClient
from oncelog.client.chat.outbox import Pending
from oncelog.client.chat.values import (
    TEXT_PLAIN,
    ChatDetails,
    ChatSummary,
    Line,
    Message,
    Outcome,
    RefusedMessage,
    Status,
    Update,
)
from oncelog.client.runtime.client import build_closed_error
from oncelog.portal import Portal

T = TypeVar("T")


class BlockingPending:
    """A message that lies in the outbox."""

    def __init__(self, pending: Pending, portal: Portal) -> None:
        self._pending = pending
        self._portal = portal

    @property
    def client_message_id(self) -> str:
        """As `Pending.client_message_id`."""
        return self._pending.client_message_id

    @property
    def chat_id(self) -> str:
        """As `Pending.chat_id`."""
        return self._pending.chat_id

    @property
    def content(self) -> str:
        """As `Pending.content`."""
        return self._pending.content

    @property
    def content_type(self) -> str:
        """As `Pending.content_type`."""
        return self._pending.content_type

    @property
    def result(self) -> Outcome | None:
        """As `Pending.result`."""
        return self._pending.result

    def sent(self, timeout_s: float | None = None) -> Outcome:
        """As `Pending.sent`; raises TimeoutError if it takes longer."""
        return self._portal.call(_call_with_timeout, self._pending.sent, timeout_s)

    def delivered(self, timeout_s: float | None = None) -> Outcome:
        """As `Pending.delivered`; raises TimeoutError if it takes longer."""
        return self._portal.call(_call_with_timeout, self._pending.delivered, timeout_s)


class BlockingChatClient:
    """For code without an event loop. Takes what `ChatClient` takes; each method does what that one's does."""

    def __init__(self, url: str, **options: Any) -> None:
        self._client = ChatClient(url, **options)
        self._open_portal: Portal | None = None

    def __enter__(self) -> Self:
        portal = Portal("oncelog-chat-loop", partial(build_closed_error, "chat"))
        try:
            portal.call(self._client.__aenter__)
        except BaseException:
            portal.close()
            raise
        self._open_portal = portal
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """As `ChatClient.close`."""
        portal, self._open_portal = self._open_portal, None
        if portal is not None and not portal.is_forked:
            try:
                portal.call(self._client.close)
            finally:
                portal.close()

    @property
    def _portal(self) -> Portal:
        if self._open_portal is None:
            raise build_closed_error("chat")
        return self._open_portal

    def _call_on_loop(self, function: Callable[..., T], *arguments: Any, **options: Any) -> T:
        async def call() -> T:
            return function(*arguments, **options)

        return self._portal.call(call)

    def send(
        self,
        chat_id: str,
        content: str,
        *,
        content_type: str = TEXT_PLAIN,
        client_message_id: UUID | str | None = None,
    ) -> BlockingPending:
        """As `ChatClient.send`."""
        portal = self._portal
        options = {"content_type": content_type, "client_message_id": client_message_id}

        async def send_message() -> Pending:
            return await self._client.send(chat_id, content, **options)  # type: ignore[arg-type]

        return BlockingPending(portal.call(send_message), portal)

    def pending(self, chat_id: str | None = None) -> list[BlockingPending]:
        """As `ChatClient.pending`."""
        portal = self._portal
        return [BlockingPending(message, portal) for message in self._call_on_loop(self._client.pending, chat_id)]

    def refused(self) -> list[RefusedMessage]:
        """As `ChatClient.refused`."""
        return self._call_on_loop(self._client.refused)

    def send_again(self, client_message_id: UUID | str) -> BlockingPending:
        """As `ChatClient.send_again`."""
        portal = self._portal
        return BlockingPending(portal.call(self._client.send_again, client_message_id), portal)

    def forget_refused(self, *client_message_ids: UUID | str) -> None:
        """As `ChatClient.forget_refused`."""
        self._portal.call(self._client.forget_refused, *client_message_ids)

    def messages(self, chat_id: str | None = None, *, after: int | None = None) -> Iterator[Message]:
        """As `ChatClient.messages`."""
        return self._portal.iterate(self._call_on_loop(self._client.messages, chat_id, after=after))

    def received(self, chat_id: str, sequence: int) -> None:
        """As `ChatClient.received`."""
        self._call_on_loop(self._client.received, chat_id, sequence)

    def lines(self, chat_id: str, *, before: int | None = None, count: int = LINES_DEFAULT) -> list[Line]:
        """As `ChatClient.lines`."""
        return self._portal.call(self._client.lines, chat_id, before=before, count=count)

    def forget_messages(self, chat_id: str, up_to: int) -> None:
        """As `ChatClient.forget_messages`."""
        self._portal.call(self._client.forget_messages, chat_id, up_to)

    def updates(self) -> Iterator[Update]:
        """As `ChatClient.updates`: from this call on."""
        return self._portal.iterate(self._call_on_loop(self._client.updates))

    def chats(self) -> list[ChatSummary]:
        """As `ChatClient.chats`."""
        return self._call_on_loop(self._client.chats)

    def create(self, chat_id: str | None = None, *, members: Iterable[str] = ()) -> ChatDetails:
        """As `ChatClient.create`."""
        return self._portal.call(self._client.create, chat_id, members=members)

    def details(self, chat_id: str) -> ChatDetails:
        """As `ChatClient.details`."""
        return self._portal.call(self._client.details, chat_id)

    def add_member(self, chat_id: str, user_id: str, *, role: str | None = None) -> None:
        """As `ChatClient.add_member`."""
        self._portal.call(self._client.add_member, chat_id, user_id, role=role)

    def set_role(self, chat_id: str, user_id: str, role: str) -> None:
        """As `ChatClient.set_role`."""
        self._portal.call(self._client.set_role, chat_id, user_id, role)

    def remove_member(self, chat_id: str, user_id: str) -> None:
        """As `ChatClient.remove_member`."""
        self._portal.call(self._client.remove_member, chat_id, user_id)

    def history(
        self, chat_id: str, *, after: int | None = None, before: int | None = None, limit: int = 100
    ) -> list[Message]:
        """As `ChatClient.history`."""
        return self._portal.call(self._client.history, chat_id, after=after, before=before, limit=limit)

    def watermarks(self, chat_id: str) -> dict[str, int]:
        """As `ChatClient.watermarks`."""
        return self._portal.call(self._client.watermarks, chat_id)

    def status(self) -> Status:
        """As `ChatClient.status`."""
        return self._client.status()

    def until_status(self, condition: Callable[[Status], bool]) -> Status:
        """As `ChatClient.until_status`; the condition is called on another thread."""
        return self._portal.call(self._client.until_status, condition)

    def until_live(self, timeout_s: float | None = None) -> None:
        """As `ChatClient.until_live`; raises TimeoutError if it takes longer."""
        self._portal.call(_call_with_timeout, self._client.until_live, timeout_s)

    def until_settled(self, timeout_s: float | None = None) -> None:
        """As `ChatClient.until_settled`; raises TimeoutError if it takes longer."""
        self._portal.call(_call_with_timeout, self._client.until_settled, timeout_s)

    def reconnect_now(self) -> None:
        """As `ChatClient.reconnect_now`."""
        self._call_on_loop(self._client.reconnect_now)


async def _call_with_timeout(function: Callable[[], Awaitable[T]], timeout_s: float | None) -> T:
    async with asyncio.timeout(timeout_s):
        return await function()
