"""Loads of the Chat API, on the minimal client of `ws_load`: senders, followers, and pairs of users."""

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, closing
from http.client import HTTPConnection
from typing import Any, Final

import msgspec

from bench.server import Serving
from bench.wire import uuids
from bench.ws_load import ANSWER_S, Connection, Requests, frame, opened

PATH: Final = "/v1/chat"
OWNER: Final = "owner"
"""User that creates all chats."""
CONTENTS: Final = [
    f"{number} buildings have a lift that does not stop: {'who goes there, and when? ' * 9}" for number in range(10)
]
"""About 300 bytes in canonical form, including the type. Events in the other benchmarks have the same size."""
MESSAGE: Final = b'{"type":"message",'


class Answer(msgspec.Struct):
    """The fields that the client reads from a `send_message_ack`, a `message` or an `error`."""

    type: str
    client_message_id: str = ""
    chat_id: str = ""
    message_id: str = ""
    sequence: int = 0
    content: str = ""
    duplicate: bool = False
    content_mismatch: bool = False
    code: str = ""


decoded: Final = msgspec.json.Decoder(Answer).decode


def numbered_names(kind: str, count: int) -> list[str]:
    """Return names of users or chats. In development mode a user's name is also the credential."""
    return [f"{kind}-{number}" for number in range(count)]


def frame_to_send(client_message_id: str, chat_id: str, content: str) -> bytes:
    """Return a frame that sends a message. Its strings need no escapes."""
    return frame(
        f'{{"type":"send_message","client_message_id":"{client_message_id}","chat_id":"{chat_id}",'
        f'"content":"{content}"}}'.encode()
    )


def make_chats(server: Serving, chats: Iterable[tuple[str, Sequence[str]]]) -> None:
    """Create chats with their members. Raises ValueError if the server refuses one."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {OWNER}"}
    with closing(HTTPConnection(server.host, server.port, timeout=ANSWER_S)) as connection:
        for chat_id, members in chats:
            asked = {"chat_id": chat_id, "members": [f"user:{name}" for name in members]}
            connection.request("POST", "/v1/chats", msgspec.json.encode(asked), headers)
            response = connection.getresponse()
            answer = response.read()
            if response.status != 201:
                raise ValueError(f"the server did not create {chat_id}: {answer!r}")


@asynccontextmanager
async def users(server: Serving, who: Sequence[str], *, live: bool) -> AsyncIterator[list[Connection]]:
    """Yield one authenticated connection for each user."""
    async with opened(server.host, server.port, len(who), PATH) as connections:
        for name, connection in zip(who, connections, strict=True):
            asked = {"type": "connect", "token": name, "device_id": "bench", "live": live}
            answer: dict[str, Any] = msgspec.json.decode(await connection.ask_raw(frame(msgspec.json.encode(asked))))
            if answer["type"] != "connected" or answer["user_id"] != f"user:{name}":
                raise ValueError(f"connect was answered with {answer}")
        yield connections


class Sends(Requests):
    """Messages from connections that send to their chats in turn."""

    def __init__(self, connections: Sequence[Connection], chats: Sequence[Sequence[str]]) -> None:
        super().__init__(connections)
        self._ids = uuids()
        self._chats = [itertools.cycle(ones) for ones in chats]
        self._contents = itertools.cycle(CONTENTS)
        self.sequences: dict[str, list[int]] = {chat_id: [] for ones in chats for chat_id in ones}
        """Sequences in the answers, by chat."""

    def request(self, number: int) -> tuple[str, bytes]:
        """See `Requests`."""
        name = next(self._ids)
        return name, frame_to_send(name, next(self._chats[number]), next(self._contents))

    def answer(self, number: int, text: bytes) -> str | None:  # noqa: ARG002 - the answer names its request
        """See `Requests`."""
        answer = decoded(text)
        if answer.type != "send_message_ack" or answer.duplicate:
            raise ValueError(f"a new message was answered with {text[:1000]!r}")
        self.sequences[answer.chat_id].append(answer.sequence)
        return answer.client_message_id


class SequenceCheck:
    """Checks that each chat's sequences continue without gaps or repetitions."""

    def __init__(self) -> None:
        self._newest: dict[str, int] = {}

    def check(self, sequences: dict[str, list[int]]) -> None:
        """Check the sequences received in a slice. Raises ValueError for a gap or a repetition."""
        for chat_id, received in sequences.items():
            before = self._newest.get(chat_id, 0)
            if sorted(received) != list(range(before + 1, before + len(received) + 1)):
                raise ValueError(f"after {before} in {chat_id}, {len(received)} messages have gaps or repeated numbers")
            self._newest[chat_id] = before + len(received)

    @property
    def newest(self) -> dict[str, int]:
        return self._newest


class FollowedChats(Sends):
    """Messages to chats whose members all send. Each member receives its answers and the others' messages."""

    def __init__(self, connections: Sequence[Connection], chats: Sequence[Sequence[str]]) -> None:
        super().__init__(connections, chats)
        self._others = {chat_id: count - 1 for chat_id, count in Counter(itertools.chain(*chats)).items()}
        """Number of other members in each chat."""
        self._followed = set(chats[0])
        self.deliveries = 0
        self._seen: list[bytes] = []
        """Messages that the first connection received from others, decoded after the slice."""
        self._own: dict[str, list[int]] = {chat_id: [] for chat_id in self._followed}
        """Sequences of the first connection's own messages, by chat."""

    def answer(self, number: int, text: bytes) -> str | None:
        """See `Requests`."""
        if text.startswith(MESSAGE):
            self.deliveries += 1
            if not number:
                self._seen.append(text)
            return None
        if number:
            return super().answer(number, text)
        answer = decoded(text)
        name = super().answer(number, text)
        self._own[answer.chat_id].append(answer.sequence)
        return name

    async def rest(self) -> None:
        """Wait until all members have all messages. Raises ValueError for other messages or a wrong order."""
        wanted = sum(len(received) * self._others[chat_id] for chat_id, received in self.sequences.items())
        await until(lambda: self.deliveries >= wanted)
        seen: dict[str, list[int]] = {chat_id: [] for chat_id in self._followed}
        for one in map(decoded, self._seen):
            seen[one.chat_id].append(one.sequence)
        for chat_id, sequences in seen.items():
            received = self.sequences[chat_id]
            if self.deliveries != wanted or sorted(sequences + self._own[chat_id]) != sorted(received):
                raise ValueError(f"{len(received)} messages to {chat_id} had wrong deliveries: {self.deliveries}")
            if sequences != sorted(sequences):
                raise ValueError("messages arrived in a different order than they were committed")


class Pairs(Sends):
    """Messages between two users with separate connections. A request ends when the other user has the message.

    The connections with the numbers 2n and 2n + 1 share the n-th chat.
    """

    def __init__(self, connections: Sequence[Connection], chats: Sequence[str]) -> None:
        super().__init__(connections, [[chats[number // 2]] for number in range(len(connections))])
        self._names = chats
        self._acknowledged = 0

    def answer(self, number: int, text: bytes) -> str | None:
        """See `Requests`."""
        if not text.startswith(MESSAGE):
            super().answer(number, text)
            self._acknowledged += 1
            return None
        answer = decoded(text)
        if answer.chat_id != self._names[number // 2] or answer.content not in CONTENTS:
            raise ValueError(f"a member of {self._names[number // 2]} received {text[:1000]!r}")
        return answer.client_message_id

    async def rest(self) -> None:
        """Wait until the senders also have their answers."""
        await until(lambda: self._acknowledged == len(self.waited))


async def until(is_so: Callable[[], bool]) -> None:
    """Poll the condition every millisecond. Raises TimeoutError."""
    end = time.perf_counter() + ANSWER_S
    while not is_so():
        if time.perf_counter() > end:
            raise TimeoutError(f"messages are missing after {ANSWER_S} seconds")
        await asyncio.sleep(0.001)


async def check_once(connection: Connection, stranger: Connection, chat_id: str) -> int:
    """Check a retry, a reuse of its id with other content, and a sender that is not a member. Return the sequence of
    the message.

    Raises ValueError for a wrong answer.
    """
    name = next(uuids())
    first, again, other = [
        decoded(await connection.ask_raw(frame_to_send(name, chat_id, content)))
        for content in (CONTENTS[0], CONTENTS[0], CONTENTS[1])
    ]
    refused = decoded(await stranger.ask_raw(frame_to_send(next(uuids()), chat_id, CONTENTS[0])))
    places = {(one.client_message_id, one.message_id, one.sequence) for one in (first, again, other)}
    flags = [(one.duplicate, one.content_mismatch) for one in (first, again, other)]
    if len(places) != 1 or flags != [(False, False), (True, False), (True, True)] or refused.code != "NOT_A_MEMBER":
        raise ValueError(
            f"a message, its retries and that of a stranger were answered with {first}, {again}, {other}, {refused}"
        )
    return first.sequence


def check_newest(server: Serving, newest: dict[str, int]) -> None:
    """Check the newest sequence of each chat on the server. Raises ValueError if it differs from the answers."""
    with closing(HTTPConnection(server.host, server.port, timeout=ANSWER_S)) as connection:
        for chat_id, sequence in newest.items():
            connection.request("GET", f"/v1/chats/{chat_id}?limit=1", headers={"Authorization": f"Bearer {OWNER}"})
            answer = msgspec.json.decode(connection.getresponse().read())
            if answer.get("last_sequence") != sequence:
                raise ValueError(f"{sequence} messages were sent to {chat_id}, which has {answer}")
