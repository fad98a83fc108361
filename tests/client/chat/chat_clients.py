"""Chat clients for tests, with short pauses."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

from deadlines import soon, until
from oncelog.client.chat import ChatClient, ChatLimits, Message, Outcome, Sent, Update

HERE: Final = Path(__file__).parent
SHORT: Final = {
    "pause_ms_min": 1, "pause_ms_max": 20, "refused_pause_ms_min": 1, "refused_pause_ms_max": 20,
    "retry_after_ms_max": 20, "ack_wait_ms": 5, "gap_wait_ms": 20,
}  # fmt: skip
LIMITS: Final = ChatLimits(**SHORT)
UNREACHABLE_URL: Final = "http://127.0.0.1:9"
"""No server listens on this port."""


def client_of(url: str, user: str = "ann", path: Path | str = ":memory:", **options: Any) -> ChatClient:
    """Return a client with short pauses."""
    return ChatClient(url, path=path, **{"token": user, "limits": LIMITS, **options})


def expect_committed(outcome: Outcome) -> Sent:
    assert isinstance(outcome, Sent), outcome
    return outcome


async def send_message(client: ChatClient, chat_id: str, content: str) -> Sent:
    """Send a message and wait for its acknowledgement."""
    return expect_committed(await soon((await client.send(chat_id, content)).outcome()))


async def take(messages: AsyncIterator[Message], count: int) -> list[Message]:
    """Return the next `count` messages."""
    return [await soon(anext(messages)) for _ in range(count)]


async def wait_for_update(updates: AsyncIterator[Update], expected: Update) -> None:
    """Read updates until the expected one arrives."""
    while await soon(anext(updates)) != expected:
        pass


def contents(messages: list[Message]) -> list[str | None]:
    return [one.content for one in messages]


async def wait_for_messages(client: ChatClient, chat_id: str, count: int) -> list[Message]:
    """Wait until the timeline of a chat has at least `count` messages, and return them."""
    messages: list[Message] = []

    async def has_enough() -> bool:
        lines = await client.lines(chat_id, count=10_000)
        messages[:] = [one.message for one in lines if one.message is not None]
        return len(messages) >= count

    await until(has_enough, lambda: messages)
    return messages
