"""The chat door over HTTP and JSON: chats, members, history, delivery state; and messages, for bots and curl."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import orjson
from aiohttp import web

from oncelog import codes
from oncelog.core.canonical import JsonValue
from oncelog.core.values import Replayed
from oncelog.doors.chat import words
from oncelog.doors.chat.door import Batch, Chat, ChatDoor
from oncelog.doors.chat.reading import read_acked, read_chat, read_only_if_member, read_role, read_send, read_user
from oncelog.doors.connections import Caller
from oncelog.doors.faults import DoorError
from oncelog.doors.fields import bad, members_of, parsed, wrong_type
from oncelog.doors.principal import Principal
from oncelog.doors.requests import JSON, body_of, credential_of, demand_json, number_of, parameters_of, path_name

Handler = Callable[[web.Request, Caller], Awaitable[web.StreamResponse]]
PATH: Final = "/v1/chat"
"""The WebSocket; what begins with it is of this door."""


class ChatHttp:
    """The handlers. Who comes is asked at every request."""

    def __init__(self, door: ChatDoor) -> None:
        self._door = door

    def routes(self) -> list[tuple[str, str, Handler]]:
        """Method, path and handler."""
        chat = "/v1/chats/{chat_id}"
        return [
            ("POST", "/v1/chats", self._create),
            ("GET", "/v1/chats", self._chats),
            ("GET", chat, self._chat),
            ("PUT", f"{chat}/members/{{user_id}}", self._add),
            ("DELETE", f"{chat}/members/{{user_id}}", self._remove),
            ("GET", f"{chat}/messages", self._history),
            ("POST", f"{chat}/messages", self._send),
            ("GET", f"{chat}/delivery", self._delivery),
            ("POST", f"{chat}/ack", self._ack),
        ]

    # --- chats

    async def _create(self, request: web.Request, caller: Caller) -> web.Response:
        members, principal = await self._asked(request, caller)
        chat_id = members.get("chat_id")
        if chat_id is not None and type(chat_id) is not str:
            raise wrong_type("$.chat_id", chat_id, "a string")
        scope = None if chat_id is None else read_chat(chat_id)
        chat, is_new = await self._door.create(scope, self._users(members.get("members")), principal)
        return self._ok(_chat(chat), 201 if is_new else 200)

    def _users(self, value: JsonValue) -> list[str]:
        if value is None:
            return []
        if type(value) is not list:
            raise wrong_type("$.members", value, "an array")
        most = self._door.limits.request_members_max
        if len(value) > most:
            raise bad("$.members", f"must be at most {most}, not {len(value)}")
        return [read_user(one, f"$.members[{index}]") for index, one in enumerate(value)]

    async def _chats(self, request: web.Request, caller: Caller) -> web.Response:
        principal = self._principal(request, caller)
        given = parameters_of(request, ("after", "limit"))
        after = read_chat(given["after"], "after") if given.get("after") else ""
        page = await self._door.chats(principal, after, _number(given, "limit"))
        answer: dict[str, Any] = {"chats": words.chats_of(page.memberships)}
        if page.following:
            answer["next_after"] = page.following
        return self._ok(answer)

    async def _chat(self, request: web.Request, caller: Caller) -> web.Response:
        return self._ok(_chat(await self._members(request, caller)))

    async def _delivery(self, request: web.Request, caller: Caller) -> web.Response:
        answer = _chat(await self._members(request, caller))
        del answer["last_sequence"]
        return self._ok(answer)

    async def _members(self, request: web.Request, caller: Caller) -> Chat:
        principal = self._principal(request, caller)
        given = parameters_of(request, ("after", "limit"))
        after = read_user(given["after"], "after") if given.get("after") else ""
        return await self._door.chat(_scope(request), principal, after, _number(given, "limit"))

    async def _add(self, request: web.Request, caller: Caller) -> web.Response:
        principal = self._principal(request, caller)
        parameters_of(request, ())
        user_id, scope = read_user(path_name(request, "user_id"), "user_id"), _scope(request)
        body = await body_of(request)
        role, only_if_member = None, False
        if body:
            demand_json(request)
            members = members_of(parsed(body), "$")
            role, only_if_member = read_role(members.get("role")), read_only_if_member(members.get("only_if_member"))
        principal = self._door.entrance.still(principal)
        role = await self._door.add_member(scope, user_id, principal, role, only_if_member=only_if_member)
        answer = {"chat_id": path_name(request, "chat_id"), "user_id": user_id, "present": True}
        return self._ok(answer if role is None else {**answer, "role": role.value})

    async def _remove(self, request: web.Request, caller: Caller) -> web.Response:
        principal = self._principal(request, caller)
        parameters_of(request, ())
        user_id, scope = read_user(path_name(request, "user_id"), "user_id"), _scope(request)
        await self._door.remove_member(scope, user_id, principal)
        return self._ok({"chat_id": path_name(request, "chat_id"), "user_id": user_id, "present": False})

    # --- messages

    async def _history(self, request: web.Request, caller: Caller) -> web.Response:
        principal = self._principal(request, caller)
        given = parameters_of(request, ("after", "before", "limit", "epoch"))
        after, before, limit = (_number(given, name) for name in ("after", "before", "limit"))
        if after is not None and before is not None:
            raise DoorError(codes.BAD_REQUEST, "before: cannot stand beside after", field="before")
        scope = _scope(request)
        if after is not None:
            batch = await self._door.after(scope, principal, after, limit)
        else:
            batch = await self._door.before(scope, principal, before, limit)
        self._door.demand_epoch(given.get("epoch"))
        return self._page(path_name(request, "chat_id"), batch, is_backwards=after is None)

    def _page(self, chat_id: str, batch: Batch, *, is_backwards: bool) -> web.Response:
        members = words.batch_json(
            chat_id,
            batch.records,
            has_more=batch.has_more,
            following=batch.following,
            newest=batch.newest,
            is_ahead=batch.is_ahead,
        )
        before = b',"next_before":%d' % batch.beginning if is_backwards and batch.has_more else b""
        return self._answered(b"{%b%b}" % (members, before))

    async def _send(self, request: web.Request, caller: Caller) -> web.Response:
        members, principal = await self._asked(request, caller)
        chat_id = path_name(request, "chat_id")
        send = read_send(members, chat_id, self._door.limits.message_bytes_max, None)
        verdict = await self._door.send(send, principal)
        receipt = verdict.receipt
        assert receipt is not None  # noqa: S101 - a key that is remembered has a place
        is_known = isinstance(verdict, Replayed)
        said = words.sent_json(
            send.client_message_id,
            chat_id,
            receipt,
            duplicate=is_known,
            mismatch=isinstance(verdict, Replayed) and verdict.mismatch,
            erased=isinstance(verdict, Replayed) and verdict.erased,
        )
        return self._answered(b"{%b}" % said, 200 if is_known else 201)

    async def _ack(self, request: web.Request, caller: Caller) -> web.Response:
        members, principal = await self._asked(request, caller)
        sequence = read_acked(members)
        changed = await self._door.acknowledge(_scope(request), sequence, principal)
        return self._ok({"chat_id": path_name(request, "chat_id"), "changed": changed})

    # --- requests and answers

    def _principal(self, request: web.Request, caller: Caller) -> Principal:
        return self._door.entrance.authenticate(credential_of(request), caller)

    async def _asked(self, request: web.Request, caller: Caller) -> tuple[Mapping[str, JsonValue], Principal]:
        """The members of the body, and who sends it: rights may have been taken away while it came."""
        principal = self._principal(request, caller)
        parameters_of(request, ())
        demand_json(request)
        body = await body_of(request)
        members = members_of(parsed(body), "$")
        return members, self._door.entrance.still(principal)

    def _ok(self, answer: Mapping[str, Any], status: int = 200) -> web.Response:
        return self._answered(orjson.dumps(answer), status)

    def _answered(self, body: bytes, status: int = 200) -> web.Response:
        counts = self._door.counts
        counts.requests["chat", "http", "ok"] += 1
        counts.bytes_sent += len(body)
        return web.Response(body=body, status=status, content_type=JSON, headers={"Cache-Control": "no-store"})


def _scope(request: web.Request) -> str:
    return read_chat(path_name(request, "chat_id"), "chat_id")


def _number(given: Mapping[str, str], name: str) -> int | None:
    return number_of(given[name], name) if name in given else None


def _chat(chat: Chat) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "chat_id": chat.chat_id,
        "last_sequence": chat.newest,
        "members": words.members_of(chat.page.members),
    }
    if chat.page.has_more:
        answer["next_after"] = chat.page.members[-1].name
    return answer
