"""The Chat API over HTTP and JSON: chats, members, history, delivery state, and sending messages from bots or curl."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from aiohttp import web
from msgspec.structs import replace

from oncelog.core.values import Replayed
from oncelog.server.api_service import EPOCH_PARAMETER, path_parameter
from oncelog.server.chat import codec
from oncelog.server.chat.codec import MESSAGE_ID
from oncelog.server.chat.messages import CHAT_ID, USER_ID, UUID4, decode_chat_id, decode_user_id
from oncelog.server.chat.service import ChatService
from oncelog.server.endpoint import Call, Endpoint, Parameter, Reply, RequestBody, WebSocketHandler, parse_number
from oncelog.server.errors import field_error
from oncelog.server.messages import Schema, integer_schema, problem_response, schema_response

WEBSOCKET_PATH: Final = "/v1/chat"
_CHATS: Final = "/v1/chats"
_CHAT: Final = f"{_CHATS}/{{chat_id}}"
_MEMBER: Final = f"{_CHAT}/members/{{user_id}}"
_MESSAGE_EXAMPLE: Final = "2d8e6b3a-52a5-4c70-9c2e-5d1f0a7b3c91"


class ChatEndpoints:
    """The HTTP endpoints of a server's Chat API."""

    def __init__(self, service: ChatService, serve_websocket: WebSocketHandler) -> None:
        self._service = service
        self._serve_websocket = serve_websocket

    def list_endpoints(self) -> list[Endpoint]:
        """Return the endpoint declarations."""
        service, messages = self._service, self._service.messages
        limit = service.page_sizes.to_parameter()
        after_chat = _cursor_parameter(CHAT_ID, decode_chat_id)
        after_user = _cursor_parameter(USER_ID, decode_user_id)
        after = integer_schema("Cursor: the page has the messages after this sequence.")
        before = integer_schema(
            "The page has the messages directly before this sequence. Must not be combined with `after`."
        )
        read = partial(
            Endpoint,
            api="chat",
            method="GET",
            authorize=lambda call: service.check_readable(call["chat_id"], call.principal),
        )
        write = partial(
            Endpoint,
            api="chat",
            method="POST",
            authorize=lambda call: service.check_writable(call["chat_id"], call.principal),
        )
        user = path_parameter(
            "user_id", USER_ID, "The user: `user:…`, or `client:…` of an API key.", "user:ben", decode_user_id
        )
        member = (_CHAT_PARAMETER, user)
        done = {200: schema_response("Member", "Done.")}
        return [
            Endpoint(
                method="GET",
                path=WEBSOCKET_PATH,
                api="chat",
                name="connectChat",
                summary="Chat over a WebSocket",
                description=(
                    "A WebSocket (docs/reference/chat.md). The first frame authenticates the client. Then the client "
                    "sends, syncs and acknowledges messages, and receives new ones live. A plain request gets 426."
                ),
                handle=_require_upgrade,
                responses={
                    101: {"description": "A WebSocket."},
                    426: problem_response("The request is not a WebSocket handshake."),
                },
                is_public=True,
                serve_websocket=self._serve_websocket,
            ),
            write(
                path=_CHATS,
                authorize=None,
                name="createChat",
                summary="Create a chat",
                description=(
                    "The caller becomes the first member and owner of the chat. The owners of an existing chat can add "
                    "members with this request; other callers get 403. Of two concurrent callers, one creates the "
                    "chat."
                ),
                body=RequestBody(
                    schema="NewChat",
                    decode=messages.new_chat.decode_body,
                    example={"chat_id": "tea", "members": ["user:ben"]},
                ),
                handle=self._create,
                responses={
                    200: schema_response("Chat", "The chat existed and now has these members."),
                    201: schema_response("Chat", "The chat was created."),
                },
                errors=(507,),
            ),
            read(
                path=_CHATS,
                authorize=None,
                name="listChats",
                summary="List the chats of the caller",
                description="A page of chats in the order of their ids.",
                parameters=(after_chat, limit),
                handle=lambda call: service.list_chats(call.principal, call["after"], call["limit"]),
                responses={200: schema_response("Chats", "A page.")},
            ),
            read(
                path=_CHAT,
                name="getChat",
                summary="Read a chat and its members",
                description="The chat, with a page of its members in the order of their ids.",
                parameters=(_CHAT_PARAMETER, after_user, limit),
                handle=lambda call: service.load_chat(call.scope, call.principal, call["after"], call["limit"]),
                responses={200: schema_response("Chat", "A page.")},
            ),
            write(
                path=_MEMBER,
                parameters=member,
                method="PUT",
                name="addMember",
                summary="Add a member, or set its role",
                description=(
                    "For owners. Without a body or without `role`, the server adds a new user as a plain member and "
                    "keeps the role of an existing member. The last owner cannot become a plain member: 409. With "
                    "`only_if_member`, a user that is not a member gets 403 and is not added. A repeated request "
                    "changes nothing."
                ),
                body=RequestBody(
                    schema="NewMember",
                    decode=messages.new_member.decode_body,
                    example={"role": "owner"},
                    is_required=False,
                ),
                handle=self._add_member,
                responses=done,
                errors=(409, 507),
            ),
            write(
                path=_MEMBER,
                parameters=member,
                method="DELETE",
                name="removeMember",
                summary="Remove a member",
                description=(
                    "For owners. Every member may also leave the chat. When the last owner leaves, the member that "
                    "joined first becomes an owner. A repeated request changes nothing."
                ),
                handle=lambda call: service.remove_member(call.scope, call["user_id"], call.principal),
                responses=done,
            ),
            read(
                path=f"{_CHAT}/messages",
                name="getMessages",
                summary="Read messages",
                description=(
                    "Without `after` and `before`, the page has the newest messages. A page is in ascending order. To "
                    "read forwards, repeat with `after` = `next_after`, and backwards with `before` = `next_before`, "
                    "while `has_more`."
                ),
                parameters=(
                    _CHAT_PARAMETER,
                    Parameter(name="after", schema=after, decode=parse_number),
                    Parameter(name="before", schema=before, decode=parse_number),
                    EPOCH_PARAMETER,
                    limit,
                ),
                handle=self._get_history,
                responses={200: schema_response("Batch", "A page.")},
                errors=(409,),
            ),
            write(
                path=f"{_CHAT}/messages",
                name="sendMessage",
                summary="Send a message",
                description=(
                    "After any failure, send the message again with the same id. A known message gets its first answer "
                    "again, and nothing is written. `content_mismatch` means that the id belongs to a message with "
                    "different content, a different content type or another sender."
                ),
                parameters=(_CHAT_PARAMETER,),
                body=RequestBody(
                    schema="NewMessage",
                    decode=messages.decode_new_message,
                    example={"client_message_id": _MESSAGE_EXAMPLE, "content": "Hello"},
                ),
                handle=self._send,
                responses={
                    200: schema_response("Sent", "The first answer to a known message."),
                    201: schema_response("Sent", "The message is durable."),
                },
                errors=(507,),
            ),
            read(
                path=f"{_CHAT}/messages/{{message_id}}",
                name="getMessage",
                summary="Look up a message by its id",
                description="Returns whether the message with this `message_id` or `client_message_id` is in the "
                "chat, and whether a retry still gets the first answer. Includes the proof of the record.",
                parameters=(
                    _CHAT_PARAMETER,
                    path_parameter(
                        "message_id",
                        {"anyOf": [MESSAGE_ID, UUID4]},
                        "`message_id` or `client_message_id` of the message.",
                        _MESSAGE_EXAMPLE,
                    ),
                ),
                handle=lambda call: service.find_message(call.scope, call["message_id"], call.principal),
                responses={200: schema_response("MessageOutcome", "Outcome of the message.")},
                errors=(404,),
            ),
            read(
                path=f"{_CHAT}/delivery",
                name="getDelivery",
                summary="Read the watermarks of the members",
                description="A page of members in the order of their ids.",
                parameters=(_CHAT_PARAMETER, after_user, limit),
                handle=self._get_delivery,
                responses={200: schema_response("Delivery", "A page.")},
            ),
            read(
                method="POST",
                path=f"{_CHAT}/ack",
                name="acknowledge",
                summary="Acknowledge messages",
                description="Moves the caller's watermark up to a sequence. The watermark never moves back. A "
                "sequence beyond the end of the chat gets 409.",
                parameters=(_CHAT_PARAMETER,),
                body=RequestBody(
                    schema="Acknowledgement",
                    decode=messages.acknowledgement.decode_body,
                    example={"last_acked_sequence": 1},
                ),
                handle=lambda call: service.acknowledge(call.scope, call.body, call.principal),
                responses={200: schema_response("Acknowledged", "The watermark is durable.")},
                errors=(409,),
            ),
        ]

    # --- chats

    async def _create(self, call: Call) -> Reply:
        scope, users = call.body
        chat, is_new = await self._service.create(scope, users, call.principal)
        return Reply(201 if is_new else 200, chat)

    async def _get_delivery(self, call: Call) -> Mapping[str, Any]:
        chat = await self._service.load_chat(call.scope, call.principal, call["after"], call["limit"])
        del chat["last_sequence"]
        return chat

    async def _add_member(self, call: Call) -> Mapping[str, Any]:
        role, only_if_member = call.body or (None, False)
        return await self._service.add_member(
            call.scope, call["user_id"], call.principal, role, only_if_member=only_if_member
        )

    # --- messages

    async def _get_history(self, call: Call) -> bytes:
        after, before, limit = call["after"], call["before"], call["limit"]
        if after is not None and before is not None:
            raise field_error("before", "must not be combined with after")
        scope, service = call.scope, self._service
        if after is not None:
            page = await service.load_after(scope, call.principal, after, limit)
        else:
            page = await service.load_before(scope, call.principal, before, limit)
        service.check_epoch(call["epoch"])
        next_before = b',"next_before":%d' % page.beginning if after is None and page.has_more else b""
        return b'{%b,"next_after":%d%b}' % (codec.encode_batch(scope, page), page.following, next_before)

    async def _send(self, call: Call) -> Reply:
        send = replace(call.body, scope=call.scope)
        verdict = await self._service.send(send, call.principal)
        return Reply(200 if isinstance(verdict, Replayed) else 201, b"{%b}" % codec.encode_sent(send, verdict))


async def _require_upgrade(_: Call) -> web.StreamResponse:
    raise field_error("Upgrade", "must be websocket", status=426)


def _cursor_parameter(schema: Schema, decode: Callable[[str, str], str]) -> Parameter:
    """Declare the cursor of a list that is ordered by id. It may be empty."""
    return Parameter(
        name="after",
        schema={
            "anyOf": [schema, {"type": "string", "maxLength": 0}],
            "description": "`next_after` of the previous page.",
        },
        decode=lambda text, name: decode(text, name) if text else "",
        default="",
    )


_CHAT_PARAMETER: Final = path_parameter("chat_id", CHAT_ID, "Id of the chat, in NFC.", "tea", decode_chat_id)
