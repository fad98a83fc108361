"""HTTP client for chats, members, history and delivery. Raises LostError, ServerRefusedError or ProtocolError."""

from collections.abc import AsyncIterator, Awaitable, Iterable, Sequence
from typing import Protocol, TypeVar
from urllib.parse import quote

import orjson
from msgspec import Struct

from oncelog.client.chat.codec import PATH
from oncelog.client.chat.values import ChatDetails, ListedChat, Member, Message
from oncelog.client.runtime.http import HttpClient, Socket, decode_answer
from oncelog.client.runtime.pages import iterate_pages

T = TypeVar("T")
Page = TypeVar("Page", bound="_Page")


class _Page(Struct, kw_only=True):
    next_after: str | None = None


class _ChatsPage(_Page):
    chats: list[ListedChat]


class _ChatPage(_Page):
    chat_id: str
    last_sequence: int
    members: list[Member | str]


class _MembersPage(_Page):
    members: list[Member]


class _Messages(Struct):
    messages: list[Message]


class ChatTransport(Protocol):
    """The requests that the connector makes to the server."""

    async def get_token(self) -> str | None:
        """Return the user's token. Raises LostError."""

    async def connect(self) -> Socket:
        """Open a connection. Raises LostError or ServerRefusedError."""

    async def list_chats(self) -> list[ListedChat]:
        """Return the user's chats. Raises LostError, ServerRefusedError or ProtocolError."""


class ChatHttpClient(HttpClient):
    """One user's access to a server: a WebSocket for messages, and HTTP requests for everything else."""

    async def connect(self) -> Socket:
        """Like `ChatTransport.connect`."""
        return await self.open_websocket(PATH)

    async def list_chats(self) -> list[ListedChat]:
        """Like `ChatTransport.list_chats`."""
        return [chat async for page in self._load_pages("/v1/chats", _ChatsPage) for chat in page.chats]

    async def create(self, chat_id: str, members: Iterable[str]) -> ChatDetails:
        """Create a chat, or add members to an existing one."""
        body = orjson.dumps({"chat_id": chat_id, "members": list(members)})
        return _to_details([await self._request_json("POST", "/v1/chats", _ChatPage, {}, body)])

    async def get_details(self, chat_id: str) -> ChatDetails:
        """Return a chat with all its members."""
        return _to_details([page async for page in self._load_pages(_to_path(chat_id), _ChatPage)])

    async def add_member(self, chat_id: str, user_id: str, role: str | None, *, only_if_member: bool = False) -> None:
        """Add a member or set its role. Only owners may do so."""
        body = None if role is None else orjson.dumps({"role": role, "only_if_member": only_if_member})
        await self.send("PUT", f"{_to_path(chat_id)}/members/{quote(user_id, safe='')}", None, body)

    async def remove_member(self, chat_id: str, user_id: str) -> None:
        """Remove a member. Only owners may remove other members."""
        await self.send("DELETE", f"{_to_path(chat_id)}/members/{quote(user_id, safe='')}")

    async def get_history(self, chat_id: str, after: int | None, before: int | None, limit: int) -> list[Message]:
        """Return messages from the server, in order."""
        query = {"limit": str(limit)}
        if after is not None:
            query["after"] = str(after)
        if before is not None:
            query["before"] = str(before)
        return (await self._request_json("GET", f"{_to_path(chat_id)}/messages", _Messages, query)).messages

    async def get_delivery(self, chat_id: str) -> tuple[Member, ...]:
        """Return the members with their watermarks."""
        pages = self._load_pages(f"{_to_path(chat_id)}/delivery", _MembersPage)
        return tuple([member async for page in pages for member in page.members])

    def _load_pages(self, path: str, kind: type[Page]) -> AsyncIterator[Page]:
        def fetch(after: str | None) -> Awaitable[Page]:
            return self._request_json("GET", path, kind, {} if after is None else {"after": after})

        return iterate_pages(fetch, lambda page: page.next_after, path)

    async def _request_json(
        self, method: str, path: str, kind: type[T], query: dict[str, str] | None = None, body: bytes | None = None
    ) -> T:
        return decode_answer(await self.send(method, path, query, body), kind)


def _to_details(pages: Sequence[_ChatPage]) -> ChatDetails:
    # Servers without roles send ids instead of members.
    found = [Member(member) if isinstance(member, str) else member for page in pages for member in page.members]
    return ChatDetails(pages[0].chat_id, pages[0].last_sequence, tuple(found))


def _to_path(chat_id: str) -> str:
    return f"/v1/chats/{quote(chat_id, safe='')}"
