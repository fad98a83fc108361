"""Client-side codec of the Chat API. It validates every frame from the server."""

from typing import Any, Final

import msgspec
import orjson
from msgspec import Struct

from oncelog.client.chat.values import Delivery, Membership, Message, OutboxMessage, Sent
from oncelog.client.runtime.values import Number
from oncelog.errors import ProtocolError

PATH: Final = "/v1/chat"

AUTH_FAILED: Final = "AUTH_FAILED"
NOT_A_MEMBER: Final = "NOT_A_MEMBER"
INVALID_ACK: Final = "INVALID_ACK"
TOO_LARGE: Final = "MESSAGE_TOO_LARGE"
TRANSIENT: Final = frozenset({"RATE_LIMITED", "BUSY", "UNAVAILABLE", "READ_ONLY", "QUOTA_EXCEEDED"})
"""Error codes after which the client retries a request later."""


class Frame(Struct, frozen=True, gc=False):
    """The fields that all frames share."""

    type: str
    request_id: str | None = None


class Connected(Struct, frozen=True):
    """A `connected` frame: the server has admitted the client."""

    user_id: str
    epoch: str


class SendAck(Sent, frozen=True, gc=False, kw_only=True):
    """A `send_message_ack` frame: the outcome of a message, with its identity."""

    client_message_id: str
    chat_id: str
    sequence: Number
    erased: bool = False


class MessageBatch(Struct, frozen=True):
    """A `message_batch` frame: a page of a sync."""

    chat_id: str
    messages: list[Message]
    has_more: bool
    next_sequence: Number
    cursor_ahead: bool = False


class DeliveryFrame(Delivery, frozen=True, gc=False):
    """A `delivery` frame: a member's watermark."""

    last_acked_sequence: Number


class MembershipFrame(Membership, frozen=True, gc=False):
    """A `membership` frame, with the member's watermark."""

    last_acked_sequence: int = 0
    """Acknowledged sequence of a current member. A member that rejoins keeps its earlier one."""


class ServerError(Struct, frozen=True):
    """An `error` frame."""

    code: str
    message: str = ""
    retry_after_ms: Number = 0


class ClosingFrame(Struct, frozen=True):
    """A `connection_closing` frame: the server is about to close the connection."""

    reason: str = ""
    reconnect_delay_ms: Number = 0


_DECODERS: Final[dict[str, Any]] = {
    name: msgspec.json.Decoder(kind).decode
    for name, kind in {
        "connected": Connected,
        "send_message_ack": SendAck,
        "message_batch": MessageBatch,
        "message": Message,
        "delivery": DeliveryFrame,
        "membership": MembershipFrame,
        "error": ServerError,
        "connection_closing": ClosingFrame,
    }.items()
}
_decode_envelope: Final = msgspec.json.Decoder(Frame).decode

ServerFrame = (
    Connected | SendAck | MessageBatch | Message | DeliveryFrame | MembershipFrame | ServerError | ClosingFrame
)


def decode_frame(data: str | bytes) -> tuple[ServerFrame | None, str | None]:
    """Decode a frame and the id of the request that it answers. Raises ProtocolError.

    Return None for a frame of an unknown type: newer servers may send additional types.
    """
    try:
        frame = _decode_envelope(data)
        reader = _DECODERS.get(frame.type)
        return (None if reader is None else reader(data)), frame.request_id
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"malformed frame from the server: {error}") from error


def encode_connect(token: str | None, device_id: str) -> bytes:
    """Encode `connect`, the first frame of a connection."""
    return orjson.dumps({"type": "connect", "token": token, "device_id": device_id})


def encode_send(entry: OutboxMessage, request_id: str) -> bytes:
    """Encode the frame that sends a message."""
    return orjson.dumps(
        {
            "type": "send_message",
            "request_id": request_id,
            "client_message_id": entry.client_message_id,
            "chat_id": entry.chat_id,
            "content": entry.content,
            "content_type": entry.content_type,
        }
    )


def encode_sync(chat_id: str, after: int, limit: int, epoch: str, request_id: str) -> bytes:
    """Encode the request for a page of a sync."""
    return orjson.dumps(
        {
            "type": "sync_request",
            "request_id": request_id,
            "chat_id": chat_id,
            "last_acked_sequence": after,
            "limit": limit,
            "epoch": epoch,
        }
    )


def encode_ack(chat_id: str, sequence: int, request_id: str) -> bytes:
    """Encode the acknowledgement of all messages up to a sequence."""
    return orjson.dumps({"type": "ack", "request_id": request_id, "chat_id": chat_id, "last_acked_sequence": sequence})


def to_own_message(entry: OutboxMessage, ack: SendAck, user_id: str) -> Message:
    """Build the message that other members receive for a committed message of this client."""
    return Message(
        message_id=ack.message_id,
        chat_id=entry.chat_id,
        sequence=ack.sequence,
        sender_id=user_id,
        client_message_id=entry.client_message_id,
        content=None if ack.erased else entry.content,
        created_at=ack.created_at,
        content_type=None if ack.erased else entry.content_type,
    )
