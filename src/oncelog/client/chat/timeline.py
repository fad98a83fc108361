"""What a user interface shows of a chat, line by line."""

from collections.abc import Mapping

from oncelog.client.chat.outbox import Pending
from oncelog.client.chat.values import Line, Mark, Message, RefusedMessage


def has_reached_all(watermarks: Mapping[str, int], user_id: str, sequence: int) -> bool:
    """Whether every member but this one has received everything up to here."""
    return all(acked >= sequence for other, acked in watermarks.items() if other != user_id)


def to_line(message: Message, user_id: str, watermarks: Mapping[str, int]) -> Line:
    """A message that has its place."""
    is_own = message.sender_id == user_id
    has_others = bool(watermarks.keys() - {user_id})
    is_delivered = is_own and has_others and has_reached_all(watermarks, user_id, message.sequence)
    mark = Mark.DELIVERED if is_delivered else Mark.SENT
    content = (message.content, message.content_type)
    return Line(message.client_message_id, message.sender_id, *content, mark, message)


def to_pending_line(message: Pending, user_id: str) -> Line:
    """An own message that has none yet."""
    return Line(message.client_message_id, user_id, message.content, message.content_type, Mark.PENDING)


def to_refused_line(message: RefusedMessage, user_id: str) -> Line:
    """An own message that gets none."""
    return Line(
        message.client_message_id, user_id, message.content, message.content_type, Mark.REFUSED, refusal=message.outcome
    )
