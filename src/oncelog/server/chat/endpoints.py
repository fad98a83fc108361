"""The chat door over HTTP and JSON: chats, members, history, delivery state; and messages, for bots and curl."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import orjson
from aiohttp import web

from oncelog import error_codes
from oncelog.core.canonical import JsonValue
from oncelog.core.values import Replayed
from oncelog.server.auth.principal import Principal
from oncelog.server.chat import codec
from oncelog.server.chat.decode import (
    decode_chat_id,
    decode_only_if_member,
    decode_role,
    decode_send,
    decode_user_id,
    get_acked_sequence,
)
from oncelog.server.chat.service import ChatService, ChatView, MessagePage
from oncelog.server.connection_limiter import Caller
from oncelog.server.errors import ApiError
from oncelog.server.http_requests import (
    JSON,
    check_json,
    get_credential,
    get_path_name,
    parse_number,
    parse_parameters,
    read_body,
)
from oncelog.server.json_fields import bad_request, decode_object, parse_json, type_error

Handler = Callable[[web.Request, Caller], Awaitable[web.StreamResponse]]
PATH: Final = "/v1/chat"
"""The WebSocket; what begins with it is of this door."""


class ChatEndpoints:
    """The handlers. Who comes is asked at every request."""

    def __init__(self, service: ChatService) -> None:
        self._service = service

    def list_routes(self) -> list[tuple[str, str, Handler]]:
        """Method, path and handler."""
        chat = "/v1/chats/{chat_id}"
        return [
            ("POST", "/v1/chats", self._create),
            ("GET", "/v1/chats", self._list_chats),
            ("GET", chat, self._get_chat),
            ("PUT", f"{chat}/members/{{user_id}}", self._add_member),
            ("DELETE", f"{chat}/members/{{user_id}}", self._remove_member),
            ("GET", f"{chat}/messages", self._get_history),
            ("POST", f"{chat}/messages", self._send),
            ("GET", f"{chat}/delivery", self._get_delivery),
            ("POST", f"{chat}/ack", self._ack),
        ]

    # --- chats

    async def _create(self, request: web.Request, caller: Caller) -> web.Response:
        members, principal = await self._read_request(request, caller)
        chat_id = members.get("chat_id")
        if chat_id is not None and type(chat_id) is not str:
            raise type_error("$.chat_id", chat_id, "a string")
        scope = None if chat_id is None else decode_chat_id(chat_id)
        chat, is_new = await self._service.create(scope, self._decode_users(members.get("members")), principal)
        return self._respond_json(_to_json(chat), 201 if is_new else 200)

    def _decode_users(self, value: JsonValue) -> list[str]:
        if value is None:
            return []
        if type(value) is not list:
            raise type_error("$.members", value, "an array")
        most = self._service.limits.request_members_max
        if len(value) > most:
            raise bad_request("$.members", f"must be at most {most}, not {len(value)}")
        return [decode_user_id(one, f"$.members[{index}]") for index, one in enumerate(value)]

    async def _list_chats(self, request: web.Request, caller: Caller) -> web.Response:
        principal = self._authenticate(request, caller)
        given = parse_parameters(request, ("after", "limit"))
        after = decode_chat_id(given["after"], "after") if given.get("after") else ""
        page = await self._service.list_chats(principal, after, _get_number(given, "limit"))
        answer: dict[str, Any] = {"chats": codec.to_chats(page.memberships)}
        if page.following:
            answer["next_after"] = page.following
        return self._respond_json(answer)

    async def _get_chat(self, request: web.Request, caller: Caller) -> web.Response:
        return self._respond_json(_to_json(await self._load_members(request, caller)))

    async def _get_delivery(self, request: web.Request, caller: Caller) -> web.Response:
        answer = _to_json(await self._load_members(request, caller))
        del answer["last_sequence"]
        return self._respond_json(answer)

    async def _load_members(self, request: web.Request, caller: Caller) -> ChatView:
        principal = self._authenticate(request, caller)
        given = parse_parameters(request, ("after", "limit"))
        after = decode_user_id(given["after"], "after") if given.get("after") else ""
        return await self._service.load_chat(_get_scope(request), principal, after, _get_number(given, "limit"))

    async def _add_member(self, request: web.Request, caller: Caller) -> web.Response:
        principal = self._authenticate(request, caller)
        parse_parameters(request, ())
        user_id, scope = decode_user_id(get_path_name(request, "user_id"), "user_id"), _get_scope(request)
        body = await read_body(request)
        role, only_if_member = None, False
        if body:
            check_json(request)
            members = decode_object(parse_json(body), "$")
            role, only_if_member = (
                decode_role(members.get("role")),
                decode_only_if_member(members.get("only_if_member")),
            )
        principal = self._service.auth_gate.recheck_principal(principal)
        role = await self._service.add_member(scope, user_id, principal, role, only_if_member=only_if_member)
        answer = {"chat_id": get_path_name(request, "chat_id"), "user_id": user_id, "present": True}
        return self._respond_json(answer if role is None else {**answer, "role": role.value})

    async def _remove_member(self, request: web.Request, caller: Caller) -> web.Response:
        principal = self._authenticate(request, caller)
        parse_parameters(request, ())
        user_id, scope = decode_user_id(get_path_name(request, "user_id"), "user_id"), _get_scope(request)
        await self._service.remove_member(scope, user_id, principal)
        return self._respond_json({"chat_id": get_path_name(request, "chat_id"), "user_id": user_id, "present": False})

    # --- messages

    async def _get_history(self, request: web.Request, caller: Caller) -> web.Response:
        principal = self._authenticate(request, caller)
        given = parse_parameters(request, ("after", "before", "limit", "epoch"))
        after, before, limit = (_get_number(given, name) for name in ("after", "before", "limit"))
        if after is not None and before is not None:
            raise ApiError(error_codes.BAD_REQUEST, "before: cannot stand beside after", field="before")
        scope = _get_scope(request)
        if after is not None:
            batch = await self._service.load_after(scope, principal, after, limit)
        else:
            batch = await self._service.load_before(scope, principal, before, limit)
        self._service.check_epoch(given.get("epoch"))
        return self._respond_page(get_path_name(request, "chat_id"), batch, is_backwards=after is None)

    def _respond_page(self, chat_id: str, batch: MessagePage, *, is_backwards: bool) -> web.Response:
        members = codec.encode_batch(
            chat_id,
            batch.records,
            has_more=batch.has_more,
            following=batch.following,
            newest=batch.newest,
            is_ahead=batch.is_ahead,
        )
        before = b',"next_before":%d' % batch.beginning if is_backwards and batch.has_more else b""
        return self._respond(b"{%b%b}" % (members, before))

    async def _send(self, request: web.Request, caller: Caller) -> web.Response:
        members, principal = await self._read_request(request, caller)
        chat_id = get_path_name(request, "chat_id")
        send = decode_send(members, chat_id, self._service.limits.message_bytes_max, None)
        verdict = await self._service.send(send, principal)
        receipt = verdict.receipt
        assert receipt is not None  # noqa: S101 - a key that is remembered has a place
        is_known = isinstance(verdict, Replayed)
        said = codec.encode_sent(
            send.client_message_id,
            chat_id,
            receipt,
            duplicate=is_known,
            mismatch=isinstance(verdict, Replayed) and verdict.mismatch,
            erased=isinstance(verdict, Replayed) and verdict.erased,
        )
        return self._respond(b"{%b}" % said, 200 if is_known else 201)

    async def _ack(self, request: web.Request, caller: Caller) -> web.Response:
        members, principal = await self._read_request(request, caller)
        sequence = get_acked_sequence(members)
        changed = await self._service.acknowledge(_get_scope(request), sequence, principal)
        return self._respond_json({"chat_id": get_path_name(request, "chat_id"), "changed": changed})

    # --- requests and answers

    def _authenticate(self, request: web.Request, caller: Caller) -> Principal:
        return self._service.auth_gate.authenticate(get_credential(request), caller)

    async def _read_request(self, request: web.Request, caller: Caller) -> tuple[Mapping[str, JsonValue], Principal]:
        """The members of the body, and who sends it: rights may have been taken away while it came."""
        principal = self._authenticate(request, caller)
        parse_parameters(request, ())
        check_json(request)
        body = await read_body(request)
        members = decode_object(parse_json(body), "$")
        return members, self._service.auth_gate.recheck_principal(principal)

    def _respond_json(self, answer: Mapping[str, Any], status: int = 200) -> web.Response:
        return self._respond(orjson.dumps(answer), status)

    def _respond(self, body: bytes, status: int = 200) -> web.Response:
        counts = self._service.counts
        counts.requests["chat", "http", "ok"] += 1
        counts.bytes_sent += len(body)
        return web.Response(body=body, status=status, content_type=JSON, headers={"Cache-Control": "no-store"})


def _get_scope(request: web.Request) -> str:
    return decode_chat_id(get_path_name(request, "chat_id"), "chat_id")


def _get_number(parameters: Mapping[str, str], name: str) -> int | None:
    return parse_number(parameters[name], name) if name in parameters else None


def _to_json(chat: ChatView) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "chat_id": chat.chat_id,
        "last_sequence": chat.newest,
        "members": codec.to_members(chat.page.members),
    }
    if chat.page.has_more:
        answer["next_after"] = chat.page.members[-1].name
    return answer
