"""Chats, members, history and delivery over HTTP. Raises LostError, ServerRefusedError or ProtocolError."""

from collections.abc import Iterable
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec
import orjson
from msgspec import Struct

from oncelog.client.chat.values import ChatDetails, Listed, Member, Message
from oncelog.client.http import HttpAnswer, HttpCaller
from oncelog.client.wire import refused_by_status
from oncelog.errors import LostError, ProtocolError, ServerRefusedError

T = TypeVar("T")


class _ErrorBody(Struct):
    code: str
    message: str = ""
    retry_after_ms: int = 0
    details: dict[str, Any] = {}


class _Error(Struct):
    error: _ErrorBody


class _ChatsPage(Struct):
    chats: list[Listed]
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


class Calls:
    """One server's chats, as one user sees them."""

    def __init__(self, caller: HttpCaller) -> None:
        self._caller = caller

    async def chats(self) -> list[Listed]:
        """All that we are in."""
        found: list[Listed] = []
        after: str | None = ""
        while after is not None:
            page = await self._asked("GET", "/v1/chats", _ChatsPage, {"after": after} if after else {})
            found += page.chats
            if page.next_after is not None and page.next_after == after:
                raise ProtocolError("the server's list of chats has no end")
            after = page.next_after
        return found

    async def create(self, chat_id: str, members: Iterable[str]) -> ChatDetails:
        """Makes it, or adds members to it."""
        body = orjson.dumps({"chat_id": chat_id, "members": list(members)})
        page = await self._asked("POST", "/v1/chats", _ChatPage, {}, body)
        return _details(page)

    async def details(self, chat_id: str) -> ChatDetails:
        """A chat with all its members."""
        page = await self._asked("GET", _path(chat_id), _ChatPage)
        found = _details(page)
        while page.next_after is not None:
            after = page.next_after
            page = await self._asked("GET", _path(chat_id), _ChatPage, {"after": after})
            if page.next_after == after:
                raise ProtocolError("the server's list of members has no end")
            found = msgspec.structs.replace(found, members=found.members + _details(page).members)
        return found

    async def add_member(self, chat_id: str, user_id: str, role: str | None, *, only_if_member: bool = False) -> None:
        """Add a member, or set its role. For owners."""
        body = None if role is None else orjson.dumps({"role": role, "only_if_member": only_if_member})
        await self._done("PUT", f"{_path(chat_id)}/members/{quote(user_id, safe='')}", None, body)

    async def remove_member(self, chat_id: str, user_id: str) -> None:
        """Remove a member. For owners; every member may remove itself."""
        await self._done("DELETE", f"{_path(chat_id)}/members/{quote(user_id, safe='')}")

    async def history(self, chat_id: str, after: int | None, before: int | None, limit: int) -> list[Message]:
        """Messages in their order, as the server has them."""
        query = {"limit": str(limit)}
        if after is not None:
            query["after"] = str(after)
        if before is not None:
            query["before"] = str(before)
        return (await self._asked("GET", f"{_path(chat_id)}/messages", _Messages, query)).messages

    async def delivery(self, chat_id: str) -> tuple[Member, ...]:
        """How far each member has acknowledged."""
        found: list[Member] = []
        after: str | None = ""
        while after is not None:
            query = {"after": after} if after else {}
            page = await self._asked("GET", f"{_path(chat_id)}/delivery", _MembersPage, query)
            found += page.members
            if page.next_after is not None and page.next_after == after:
                raise ProtocolError("the server's list of members has no end")
            after = page.next_after
        return tuple(found)

    async def _asked(
        self, method: str, path: str, kind: type[T], query: dict[str, str] | None = None, body: bytes | None = None
    ) -> T:
        answer = await self._done(method, path, query, body)
        try:
            return msgspec.json.decode(answer.body, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(f"the server's answer is none: {error}") from error

    async def _done(
        self, method: str, path: str, query: dict[str, str] | None = None, body: bytes | None = None
    ) -> HttpAnswer:
        answer = await self._caller.ask(method, path, query, body)
        if not 200 <= answer.status < 300:
            raise _refusal(answer)
        return answer


def _refusal(answer: HttpAnswer) -> ServerRefusedError | LostError:
    try:
        said = msgspec.json.decode(answer.body, type=_Error).error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return refused_by_status(answer.status)
    asked_ms = said.details.get("retry_after_ms", 0)
    asked_ms = asked_ms if type(asked_ms) is int else 0
    return ServerRefusedError(said.code, said.message, max(said.retry_after_ms, asked_ms, answer.retry_after_ms))


def _details(page: _ChatPage) -> ChatDetails:
    members = tuple(Member(one) if isinstance(one, str) else one for one in page.members)
    return ChatDetails(page.chat_id, page.last_sequence, members)


def _path(chat_id: str) -> str:
    return f"/v1/chats/{quote(chat_id, safe='')}"
