"""The lean client of `ws_load`, in the words of the chat door: senders, those who follow, and pairs who write to each
other."""

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
"""Who makes all chats."""
CONTENTS: Final = [
    f"{number} buildings have a lift that does not stop: {'who goes there, and when? ' * 9}" for number in range(10)
]
"""With their type about 300 bytes in canonical form, as the events of the others are."""
MESSAGE: Final = b'{"type":"message",'


class Answer(msgspec.Struct):
    """What is read of a `send_message_ack`, of a `message` and of an `error`."""

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


def names(kind: str, count: int) -> list[str]:
    """What users are called; in development mode that is their credential too."""
    return [f"{kind}-{number}" for number in range(count)]


def sending(client_message_id: str, chat_id: str, content: str) -> bytes:
    """A frame that sends a message. Nothing in it needs escapes."""
    return frame(
        f'{{"type":"send_message","client_message_id":"{client_message_id}","chat_id":"{chat_id}",'
        f'"content":"{content}"}}'.encode()
    )


def make_chats(server: Serving, chats: Iterable[tuple[str, Sequence[str]]]) -> None:
    """Chats, each with its members. Raises ValueError if one could not be made."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {OWNER}"}
    with closing(HTTPConnection(server.host, server.port, timeout=ANSWER_S)) as connection:
        for chat_id, members in chats:
            asked = {"chat_id": chat_id, "members": [f"user:{name}" for name in members]}
            connection.request("POST", "/v1/chats", msgspec.json.encode(asked), headers)
            response = connection.getresponse()
            answer = response.read()
            if response.status != 201:
                raise ValueError(f"{chat_id} could not be made: {answer!r}")


@asynccontextmanager
async def users(server: Serving, who: Sequence[str], *, live: bool) -> AsyncIterator[list[Connection]]:
    """A connection for each, which has said who it is."""
    async with opened(server.host, server.port, len(who), PATH) as connections:
        for name, connection in zip(who, connections, strict=True):
            asked = {"type": "connect", "token": name, "device_id": "bench", "live": live}
            answer: dict[str, Any] = msgspec.json.decode(await connection.ask_raw(frame(msgspec.json.encode(asked))))
            if answer["type"] != "connected" or answer["user_id"] != f"user:{name}":
                raise ValueError(f"connect was answered with {answer}")
        yield connections


class Sends(Requests):
    """Messages of each connection to one of its chats after the other."""

    def __init__(self, connections: Sequence[Connection], chats: Sequence[Sequence[str]]) -> None:
        super().__init__(connections)
        self._ids = uuids()
        self._chats = [itertools.cycle(ones) for ones in chats]
        self._contents = itertools.cycle(CONTENTS)
        self.sequences: dict[str, list[int]] = {chat_id: [] for ones in chats for chat_id in ones}
        """That were told, by chat."""

    def request(self, number: int) -> tuple[str, bytes]:
        """As `Requests` says."""
        name = next(self._ids)
        return name, sending(name, next(self._chats[number]), next(self._contents))

    def answer(self, number: int, text: bytes) -> str | None:  # noqa: ARG002 - the answer says what it belongs to
        """As `Requests` says."""
        answer = decoded(text)
        if answer.type != "send_message_ack" or answer.duplicate:
            raise ValueError(f"a new message was answered with {text[:1000]!r}")
        self.sequences[answer.chat_id].append(answer.sequence)
        return answer.client_message_id


class Dense:
    """How far chats have come: what was told goes on from there, without a gap and without a repeat."""

    def __init__(self) -> None:
        self._newest: dict[str, int] = {}

    def demand(self, sequences: dict[str, list[int]]) -> None:
        """Raises ValueError if not."""
        for chat_id, told in sequences.items():
            before = self._newest.get(chat_id, 0)
            if sorted(told) != list(range(before + 1, before + len(told) + 1)):
                raise ValueError(f"after {before} in {chat_id} {len(told)} messages were numbered otherwise")
            self._newest[chat_id] = before + len(told)

    @property
    def newest(self) -> dict[str, int]:
        return self._newest


class Followed(Sends):
    """Messages to chats whose members all are senders: each gets its answers, and what the others send."""

    def __init__(self, connections: Sequence[Connection], chats: Sequence[Sequence[str]]) -> None:
        super().__init__(connections, chats)
        self._others = {chat_id: count - 1 for chat_id, count in Counter(itertools.chain(*chats)).items()}
        """To whom a message goes, by chat."""
        self._followed = set(chats[0])
        self.deliveries = 0
        self._seen: list[bytes] = []
        """What the first one gets of others; read when the time is over."""
        self._own: dict[str, list[int]] = {chat_id: [] for chat_id in self._followed}
        """What it was told of its own."""

    def answer(self, number: int, text: bytes) -> str | None:
        """As `Requests` says."""
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
        """Until everybody has what the others have sent. Raises ValueError if it is something else."""
        wanted = sum(len(told) * self._others[chat_id] for chat_id, told in self.sequences.items())
        await until(lambda: self.deliveries >= wanted)
        seen: dict[str, list[int]] = {chat_id: [] for chat_id in self._followed}
        for one in map(decoded, self._seen):
            seen[one.chat_id].append(one.sequence)
        for chat_id, sequences in seen.items():
            told = self.sequences[chat_id]
            if self.deliveries != wanted or sorted(sequences + self._own[chat_id]) != sorted(told):
                raise ValueError(f"of {len(told)} messages to {chat_id} there were other deliveries: {self.deliveries}")
            if sequences != sorted(sequences):
                raise ValueError("messages came in another order than they were committed in")


class Pairs(Sends):
    """Messages that go from one to another, who is connected elsewhere: over when the other one has it.

    The connections with the numbers 2n and 2n + 1 share the n-th chat.
    """

    def __init__(self, connections: Sequence[Connection], chats: Sequence[str]) -> None:
        super().__init__(connections, [[chats[number // 2]] for number in range(len(connections))])
        self._names = chats
        self._acknowledged = 0

    def answer(self, number: int, text: bytes) -> str | None:
        """As `Requests` says."""
        if not text.startswith(MESSAGE):
            super().answer(number, text)
            self._acknowledged += 1
            return None
        answer = decoded(text)
        if answer.chat_id != self._names[number // 2] or answer.content not in CONTENTS:
            raise ValueError(f"a member of {self._names[number // 2]} got {text[:1000]!r}")
        return answer.client_message_id

    async def rest(self) -> None:
        """Until the senders have their answers too."""
        await until(lambda: self._acknowledged == len(self.waited))


async def until(is_so: Callable[[], bool]) -> None:
    """Looks every millisecond. Raises TimeoutError."""
    end = time.perf_counter() + ANSWER_S
    while not is_so():
        if time.perf_counter() > end:
            raise TimeoutError(f"not all has come in {ANSWER_S} seconds")
        await asyncio.sleep(0.001)


async def demand_once(connection: Connection, stranger: Connection, chat_id: str) -> int:
    """A retry gets the answer of the first one, other content is told, and a stranger is sent away.

    Gives the sequence that the message has. Raises ValueError if it is not so.
    """
    name = next(uuids())
    first, again, other = [
        decoded(await connection.ask_raw(sending(name, chat_id, content)))
        for content in (CONTENTS[0], CONTENTS[0], CONTENTS[1])
    ]
    refused = decoded(await stranger.ask_raw(sending(next(uuids()), chat_id, CONTENTS[0])))
    places = {(one.client_message_id, one.message_id, one.sequence) for one in (first, again, other)}
    flags = [(one.duplicate, one.content_mismatch) for one in (first, again, other)]
    if len(places) != 1 or flags != [(False, False), (True, False), (True, True)] or refused.code != "NOT_A_MEMBER":
        raise ValueError(
            f"a message, its retries and a stranger's were answered with {first}, {again}, {other}, {refused}"
        )
    return first.sequence


def demand_newest(server: Serving, newest: dict[str, int]) -> None:
    """The server has as many messages in each chat as it has told of. Raises ValueError if not."""
    with closing(HTTPConnection(server.host, server.port, timeout=ANSWER_S)) as connection:
        for chat_id, sequence in newest.items():
            connection.request("GET", f"/v1/chats/{chat_id}?limit=1", headers={"Authorization": f"Bearer {OWNER}"})
            answer = msgspec.json.decode(connection.getresponse().read())
            if answer.get("last_sequence") != sequence:
                raise ValueError(f"{sequence} messages were sent to {chat_id}, which says {answer}")
