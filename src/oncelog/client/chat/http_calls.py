"""Chats, members, history and delivery over HTTP. Raises LostError, ServerRefusedError or ProtocolError."""

from collections.abc import Iterable
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec
import orjson
from msgspec import Struct

from oncelog.client.chat.values import ChatDetails, ListedChat, Member, Message
from oncelog.client.runtime.http import HttpClient, HttpResponse
from oncelog.client.runtime.websocket import status_error
from oncelog.errors import LostError, ProtocolError, ServerRefusedError

T = TypeVar("T")


class _ErrorBody(Struct):
    code: str
    message: str = ""
    retry_after_ms: int = 0
    details: dict[str, Any] = {}


class _ErrorResponse(Struct):
    error: _ErrorBody


class _ChatsPage(Struct):
    chats: list[ListedChat]
    next_after: str | None = None


class _ChatPage(Struct):
    chat_id: str
    last_sequence: int
    members: list[Member | str]
    next_after: str | None = None


class _MembersPage(Struct):
    members: list[Member]
    next_after: str | None = None


class _Messages(Struct):
    messages: list[Message]


class ChatHttpCalls:
    """One server's chats, as one user sees them."""

    def __init__(self, http: HttpClient) -> None:
        self._http = http

    async def list_chats(self) -> list[ListedChat]:
        """All that we are in."""
        found: list[ListedChat] = []
        after: str | None = ""
        while after is not None:
            page = await self._request_json("GET", "/v1/chats", _ChatsPage, {"after": after} if after else {})
            found += page.chats
            if page.next_after is not None and page.next_after == after:
                raise ProtocolError("the server's list of chats has no end")
            after = page.next_after
        return found

    async def create(self, chat_id: str, members: Iterable[str]) -> ChatDetails:
        """Makes it, or adds members to it."""
        body = orjson.dumps({"chat_id": chat_id, "members": list(members)})
        page = await self._request_json("POST", "/v1/chats", _ChatPage, {}, body)
        return _to_details(page)

    async def get_details(self, chat_id: str) -> ChatDetails:
        """A chat with all its members."""
        page = await self._request_json("GET", _to_path(chat_id), _ChatPage)
        found = _to_details(page)
        while page.next_after is not None:
            after = page.next_after
            page = await self._request_json("GET", _to_path(chat_id), _ChatPage, {"after": after})
            if page.next_after == after:
                raise ProtocolError("the server's list of members has no end")
            found = msgspec.structs.replace(found, members=found.members + _to_details(page).members)
        return found

    async def add_member(self, chat_id: str, user_id: str, role: str | None, *, only_if_member: bool = False) -> None:
        """Add a member, or set its role. For owners."""
        body = None if role is None else orjson.dumps({"role": role, "only_if_member": only_if_member})
        await self._request("PUT", f"{_to_path(chat_id)}/members/{quote(user_id, safe='')}", None, body)

    async def remove_member(self, chat_id: str, user_id: str) -> None:
        """Remove a member. For owners; every member may remove itself."""
        await self._request("DELETE", f"{_to_path(chat_id)}/members/{quote(user_id, safe='')}")

    async def get_history(self, chat_id: str, after: int | None, before: int | None, limit: int) -> list[Message]:
        """Messages in their order, as the server has them."""
        query = {"limit": str(limit)}
        if after is not None:
            query["after"] = str(after)
        if before is not None:
            query["before"] = str(before)
        return (await self._request_json("GET", f"{_to_path(chat_id)}/messages", _Messages, query)).messages

    async def get_delivery(self, chat_id: str) -> tuple[Member, ...]:
        """How far each member has acknowledged."""
        found: list[Member] = []
        after: str | None = ""
        while after is not None:
            query = {"after": after} if after else {}
            page = await self._request_json("GET", f"{_to_path(chat_id)}/delivery", _MembersPage, query)
            found += page.members
            if page.next_after is not None and page.next_after == after:
                raise ProtocolError("the server's list of members has no end")
            after = page.next_after
        return tuple(found)

    async def _request_json(
        self, method: str, path: str, kind: type[T], query: dict[str, str] | None = None, body: bytes | None = None
    ) -> T:
        answer = await self._request(method, path, query, body)
        try:
            return msgspec.json.decode(answer.body, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(f"the server's answer is none: {error}") from error

    async def _request(
        self, method: str, path: str, query: dict[str, str] | None = None, body: bytes | None = None
    ) -> HttpResponse:
        answer = await self._http.request(method, path, query, body)
        if not 200 <= answer.status < 300:
            raise _to_error(answer)
        return answer


def _to_error(response: HttpResponse) -> ServerRefusedError | LostError:
    try:
        body = msgspec.json.decode(response.body, type=_ErrorResponse).error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return status_error(response.status)
    retry_after_ms = body.details.get("retry_after_ms", 0)
    retry_after_ms = retry_after_ms if type(retry_after_ms) is int else 0
    return ServerRefusedError(
        body.code, body.message, max(body.retry_after_ms, retry_after_ms, response.retry_after_ms)
    )


def _to_details(page: _ChatPage) -> ChatDetails:
    members = tuple(Member(member) if isinstance(member, str) else member for member in page.members)
    return ChatDetails(page.chat_id, page.last_sequence, members)


def _to_path(chat_id: str) -> str:
    return f"/v1/chats/{quote(chat_id, safe='')}"
