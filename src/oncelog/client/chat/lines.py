"""What a user interface shows of a chat, line by line."""

from collections.abc import Mapping

from oncelog.client.chat.pending import Pending
from oncelog.client.chat.values import Line, Mark, Message, RefusedMessage


def has_all(watermarks: Mapping[str, int], user_id: str, sequence: int) -> bool:
    """Whether every member but this one has received everything up to here."""
    return all(acked >= sequence for other, acked in watermarks.items() if other != user_id)


def line_of(message: Message, user_id: str, watermarks: Mapping[str, int]) -> Line:
    """A message that has its place."""
    is_own = message.sender_id == user_id
    has_others = bool(watermarks.keys() - {user_id})
    is_delivered = is_own and has_others and has_all(watermarks, user_id, message.sequence)
    mark = Mark.DELIVERED if is_delivered else Mark.SENT
    content = (message.content, message.content_type)
    return Line(message.client_message_id, message.sender_id, *content, mark, message)


def pending_line(one: Pending, user_id: str) -> Line:
    """An own message that has none yet."""
    return Line(one.client_message_id, user_id, one.content, one.content_type, Mark.PENDING)


def refused_line(one: RefusedMessage, user_id: str) -> Line:
    """An own message that gets none."""
    return Line(one.client_message_id, user_id, one.content, one.content_type, Mark.REFUSED, refusal=one.outcome)
