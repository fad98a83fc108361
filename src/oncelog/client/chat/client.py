"""The asyncio client of chats: messages that are sent once, and read once, in one order, whatever happens between.

    async with ChatClient("http://127.0.0.1:7171", path="ann.db", token="ann") as client:
        await client.create("tea", members=["user:bob"])
        pending = await client.send("tea", "hello")
        print(await pending.sent())
        async for message in client.messages("tea"):
            print(message.sequence, message.sender_id, message.content)

Two tasks share the work: one stays connected (`link`), one keeps what is sent and what comes (`keeper`). What is
decided lies in `protocol`, what is kept in `store`.
"""

import asyncio
import os
import random
import ssl
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Final, Self
from uuid import UUID, uuid4

from oncelog.client.chat.calls import Calls
from oncelog.client.chat.counting import Counting
from oncelog.client.chat.desk import Desk, Name
from oncelog.client.chat.keeper import Keeper, now_ms
from oncelog.client.chat.limits import ChatLimits
from oncelog.client.chat.lines import line_of, pending_line, refused_line
from oncelog.client.chat.link import Link, Wire
from oncelog.client.chat.messages import MessageStream
from oncelog.client.chat.pending import Pending, demand_chat_id, prepare
from oncelog.client.chat.protocol import Protocol
from oncelog.client.chat.store import ChatStore
from oncelog.client.chat.values import (
    TEXT,
    ChatDetails,
    ChatSummary,
    Entry,
    Line,
    Listed,
    Message,
    RefusedMessage,
    State,
    Status,
    Update,
)
from oncelog.client.chat.words import PATH
from oncelog.client.checking import checked_client_id, checked_store
from oncelog.client.http import HttpCaller
from oncelog.client.streams import BoundedStream
from oncelog.client.tokens import Token, demand_token
from oncelog.client.wire import Socket, normal_url
from oncelog.errors import (
    ClientError,
    ClosedError,
    IdReusedError,
    LimitExceededError,
    SettingsError,
)

SEQUENCE_MAX: Final = 2**53 - 1
LINES: Final = 50


class HttpWire:
    """By aiohttp: a WebSocket for messages, and requests over HTTP for all else."""

    def __init__(self, caller: HttpCaller) -> None:
        self._caller = caller
        self._calls = Calls(caller)

    async def token(self) -> str | None:
        """As `Wire` says."""
        return await self._caller.token()

    async def socket(self) -> Socket:
        """As `Wire` says."""
        return await self._caller.socket(PATH)

    async def chats(self) -> list[Listed]:
        """As `Wire` says."""
        return await self._calls.chats()


class ChatClient:
    """One device of one user, with a file of its own. `async with` opens and closes it."""

    def __init__(  # noqa: PLR0913 - by name, and nearly all may be left out
        self,
        url: str,
        *,
        path: str | os.PathLike[str],
        token: Token = None,
        device_id: str | None = None,
        limits: ChatLimits | None = None,
        headers: Mapping[str, str] | None = None,
        tls: ssl.SSLContext | None = None,
        chance: random.Random | None = None,
        wall_ms: Callable[[], int] | None = None,
        wire: Wire | None = None,
    ) -> None:
        """Says what is to be; nothing is opened yet.

        `path` is a file of the client's own, made if it is missing; ":memory:" is for what need not survive. It is this
        device's and this user's for ever. `device_id` is kept there, and made there if it is not given. `token` is a
        text, or a function that gives one and is asked at every connection and request.
        """
        self.limits = limits or ChatLimits()
        if not isinstance(self.limits, ChatLimits):
            raise SettingsError(f"limits must be ChatLimits, not {limits!r}")
        demand_token(token)
        try:
            self._device_id = checked_client_id(device_id)
        except SettingsError as error:
            raise SettingsError(str(error).replace("client_id", "device_id")) from None
        self.url = normal_url(url)
        self._desk = Desk(ChatStore(checked_store(path)), self.limits)
        self._caller = HttpCaller(self.url, token=token, limits=self.limits, headers=headers, tls=tls)
        self._calls = Calls(self._caller)
        self._wire = wire or HttpWire(self._caller)
        self._chance = chance or random.Random()  # noqa: S311 - for pauses
        self._wall_ms = wall_ms or _system_wall_ms
        self._keeper = Keeper(self._desk)
        self._link = Link(self._desk, self._keeper, self._wire, self._chance, self._wall_ms)
        self._keeper.on_accepted = self._link.changed
        self._counting = Counting(self._desk, self._keeper, self._link, self._calls, self._chance)
        self._tasks: list[asyncio.Task[None]] = []
        self._closing: asyncio.Task[None] | None = None

    # --- opening and closing

    async def __aenter__(self) -> Self:
        """Raises SettingsError, StoreInUseError or another StoreError. Does not wait for the server."""
        if self._desk.was_opened:
            raise ClosedError("a client is opened once; make another one")
        self._desk.begin()
        try:
            kept = await self._desk.in_store(self._desk.store.open, self._device_id)
        except BaseException:
            await self._desk.close(self._desk.store.close)
            raise
        protocol = Protocol(kept.device_id, kept.user_id, kept.epoch, kept.chats, self.limits, self._chance)
        self._desk.opened(protocol)
        self._desk.refused = dict(kept.refused)
        self._desk.pending = {_name(entry): Pending(entry, self._counting.until_delivered) for entry in kept.outbox}
        protocol.offer(kept.outbox, now_ms(), was_tried=True)
        self._tasks = [
            asyncio.create_task(self._desk.guarded(work), name=f"oncelog chat: {name}")
            for name, work in {"keep": self._keeper.run(), "link": self._link.run()}.items()
        ]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Does not wait for what is pending: it stays in the file. To have it sent first, await `until_settled`."""
        if not self._tasks:
            return
        if self._closing is None:
            self._closing = asyncio.create_task(self._close_all(), name="oncelog chat: close")
        await asyncio.shield(self._closing)

    async def _close_all(self) -> None:
        desk = self._desk
        try:
            if desk.failed is None:
                desk.protocol_at_end.flush()
                with suppress(TimeoutError):
                    async with asyncio.timeout(self.limits.close_timeout_ms / 1000):
                        await self._link.drained()
            desk.end()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._counting.close()
            await self._keeper.keep_last()
            await self._caller.close()
        finally:
            await desk.close(desk.store.close)

    # --- sending

    async def send(
        self,
        chat_id: str,
        content: str,
        *,
        content_type: str = TEXT,
        client_message_id: UUID | str | None = None,
    ) -> Pending:
        """Takes a message into the outbox. On return it is on the disk, and will be sent until it has an outcome.

        Raises CanonicalError that names what cannot be, LimitExceededError if the outbox is full, IdReusedError if
        another message waits under this id, StoreError if the file cannot be written: then it was not taken. After a
        ClosedError it may be on the disk: then it is sent when the client is opened again.
        """
        self._desk.demand_open()
        draft = prepare(chat_id, content, content_type, client_message_id, self.limits, self._wall_ms())
        known = self._desk.pending.get(_name(draft))
        if known is not None and not known.says_the_same(draft):
            raise IdReusedError(f"another message waits under the id {draft.client_message_id}")
        if known is not None:
            await self._keeper.accept([])  # it is on the disk when those before it are
            known.demand_taken()
            return known
        return await self._accepted(draft)

    async def _accepted(self, draft: Entry, taken_back: Iterable[int] = ()) -> Pending:
        if len(self._desk.pending) >= self.limits.outbox_messages_max:
            raise LimitExceededError("outbox_messages_max", self.limits.outbox_messages_max)
        pending = self._desk.pending[_name(draft)] = Pending(draft, self._counting.until_delivered)
        await self._keeper.accept([draft], list(taken_back))
        return pending

    def pending(self, chat_id: str | None = None) -> list[Pending]:
        """All messages without an outcome, those of an earlier run too, in their order; of one chat, or of all."""
        return [one for one in self._desk.pending.values() if chat_id in (None, one.chat_id)]

    def refused(self) -> list[RefusedMessage]:
        """Messages that are not sent again, oldest first, until the application has seen to them."""
        return [one for _, one in sorted(self._desk.refused.items())]

    async def send_again(self, client_message_id: UUID | str) -> Pending:
        """Takes a refused message into the outbox once more, under its id. Raises ClientError if there is none."""
        self._desk.demand_open()
        number, one = self._refused_one(str(client_message_id))
        draft = Entry(0, one.client_message_id, one.chat_id, one.content, one.content_type, self._wall_ms())
        if _name(draft) in self._desk.pending:
            raise ClientError(f"the message {one.client_message_id} is on its way already")
        return await self._accepted(draft, [number])

    async def forget_refused(self, *client_message_ids: UUID | str) -> None:
        """The application has seen to these; to all if none is named."""
        self._desk.demand_open()
        names = [str(one) for one in client_message_ids] or [one.client_message_id for one in self.refused()]
        await self._keeper.accept([], [self._refused_one(name)[0] for name in names])

    def _refused_one(self, name: str) -> tuple[int, RefusedMessage]:
        for number, one in self._desk.refused.items():
            if one.client_message_id == name.lower():
                return number, one
        raise ClientError(f"there is no refused message {name}")

    # --- reading

    def messages(self, chat_id: str | None = None, *, after: int | None = None) -> MessageStream:
        """Messages as they come, own ones too, in the order of their chat: of one chat, or of all.

        It begins behind what the application has received, or behind `after`. A message counts as received, and is
        acknowledged to the server, when the next one is asked for. Raises HistoryChangedError if the history of a chat
        begins again.
        """
        self._desk.demand_open()
        if chat_id is not None:
            demand_chat_id(chat_id)
        if after is not None:
            _demand_sequence(after, "after")
        return MessageStream(self._desk, self._keeper, chat_id, after)

    def received(self, chat_id: str, sequence: int) -> None:
        """Acknowledges everything up to here: for an application that shows `lines` and does not loop over `messages`.

        What has not arrived cannot be received: then it counts up to what has.
        """
        _demand_sequence(sequence, "sequence")
        protocol = self._desk.protocol
        shown = self._desk.shown.get(chat_id)
        if shown is not None:
            protocol.received(chat_id, min(sequence, shown.complete_to), shown.generation, now_ms())
            self._keeper.work()
            self._link.changed()

    async def lines(self, chat_id: str, *, before: int | None = None, count: int = LINES) -> list[Line]:
        """What a user interface shows of a chat: the last messages here, then own ones that have no place yet.

        An own message is in its place as soon as it is acknowledged. `before` gives those before a number alone.
        """
        desk = self._desk
        demand_chat_id(chat_id)
        if before is not None:
            _demand_sequence(before, "before")
        protocol, shown = desk.protocol, desk.shown.get(chat_id)
        complete_to = 0 if shown is None else shown.complete_to
        found, watermarks = await desk.in_store(
            desk.store.messages_before, chat_id, SEQUENCE_MAX if before is None else before, complete_to,
            protocol.user_id, count,
        )  # fmt: skip
        self._counting.soon(chat_id)  # the marks of own messages are as good as what is known of others
        lines = [line_of(one, protocol.user_id, watermarks) for one in found]
        if before is None:
            seen = {one.client_message_id for one in found}
            lines += [refused_line(one, protocol.user_id) for one in self.refused() if one.chat_id == chat_id]
            waiting = [one for one in self.pending(chat_id) if one.client_message_id not in seen]
            lines += [pending_line(one, protocol.user_id) for one in waiting]
        return lines

    async def forget_messages(self, chat_id: str, up_to: int) -> None:
        """Removes old messages from the file, up to what was received at most. The server keeps them (`history`)."""
        _demand_sequence(up_to, "up_to")
        chat = self._desk.protocol.chats.get(chat_id)
        if chat is not None:
            await self._desk.in_store(self._desk.store.forget_messages, chat_id, min(up_to, chat.received_to))

    def updates(self) -> BoundedStream[Update]:
        """What happens from this call on: `Arrived`, `Progress`, `Delivery`, `Membership` or `HistoryChange`.

        Raises UpdatesLostError to a reader who falls too far behind. Not durable.
        """
        self._desk.demand_open()
        return self._desk.updates()

    def chats(self) -> list[ChatSummary]:
        """The chats that are known here, by their ids."""
        shown = self._desk.shown
        found = [
            ChatSummary(
                chat_id=chat.chat_id,
                is_member=chat.is_member,
                role=chat.role,
                last_sequence=max(chat.heard_to, chat.complete_to),
                complete_to=shown[chat.chat_id].complete_to if chat.chat_id in shown else 0,
                received_to=chat.received_to,
                pending=len(chat.entries),
            )
            for chat in self._desk.protocol.chats.values()
            if chat.is_member or chat.complete_to
        ]
        return sorted(found, key=lambda one: one.chat_id)

    # --- over HTTP

    async def create(self, chat_id: str | None = None, *, members: Iterable[str] = ()) -> ChatDetails:
        """Create a chat and own it, or add members to one that we own. Can be called again after a LostError.

        Raises LostError if there is no server, ServerRefusedError if it says no; so do all below.
        """
        name = f"chat_{uuid4().hex}" if chat_id is None else chat_id  # ours, so that it is one however often it is sent
        demand_chat_id(name)
        protocol = self._desk.protocol
        made = await self._calls.create(name, members)
        own = next((one.role for one in made.members if one.user_id == protocol.user_id), None)
        protocol.joined(name, own)
        self._changed()
        return made

    async def details(self, chat_id: str) -> ChatDetails:
        """A chat as the server has it, with its members."""
        demand_chat_id(chat_id)
        self._desk.demand_open()
        return await self._calls.details(chat_id)

    async def add_member(self, chat_id: str, user_id: str, *, role: str | None = None) -> None:
        """Add a member (`user:bob`), as an owner of the chat; or set the role of one, `OWNER` or `MEMBER`.

        Without a role a new member is a plain one, and the role of a member stays. ServerRefusedError has the code
        `NOT_AN_OWNER` for plain members, and `LAST_OWNER` if no owner would be left.
        """
        demand_chat_id(chat_id)
        self._desk.demand_open()
        await self._calls.add_member(chat_id, user_id, role)

    async def set_role(self, chat_id: str, user_id: str, role: str) -> None:
        """Set the role of a member. ServerRefusedError has the code `NOT_A_MEMBER` if the user is not a member."""
        demand_chat_id(chat_id)
        self._desk.demand_open()
        await self._calls.add_member(chat_id, user_id, role, only_if_member=True)

    async def remove_member(self, chat_id: str, user_id: str) -> None:
        """Remove a member, as an owner of the chat; or leave it: messages that have arrived stay here."""
        demand_chat_id(chat_id)
        protocol = self._desk.protocol
        await self._calls.remove_member(chat_id, user_id)
        if user_id == protocol.user_id:
            protocol.left(chat_id)
            self._changed()

    async def history(
        self, chat_id: str, *, after: int | None = None, before: int | None = None, limit: int = 100
    ) -> list[Message]:
        """Messages as the server has them, in their order: the first after a number, or the last before one."""
        demand_chat_id(chat_id)
        self._desk.demand_open()
        return await self._calls.history(chat_id, after, before, limit)

    async def watermarks(self, chat_id: str) -> dict[str, int]:
        """How far each member has received the chat. Asked for once a connection; then it is told live."""
        demand_chat_id(chat_id)
        self._desk.demand_open()
        return await self._counting.watermarks(chat_id)

    def _changed(self) -> None:
        self._keeper.work()
        self._link.changed()
        self._desk.wake()

    # --- how it stands

    def status(self) -> Status:
        """For a user interface. `until_status` waits for another one."""
        desk, link = self._desk, self._link
        counts = len(desk.pending), len(desk.refused)
        if not self._tasks or self._closing is not None or desk.failed is not None:
            return Status(State.CLOSED, "", *counts, last_error=None if desk.failed is None else str(desk.failed))
        protocol = desk.protocol
        state = State.LIVE if protocol.is_live else State.CATCHING_UP
        if not link.is_let_in:
            state = State.REFUSED
        elif not link.is_connected:
            state = State.OFFLINE
        return Status(
            state=state,
            user_id=protocol.user_id,
            pending=counts[0],
            refused=counts[1],
            epoch=protocol.epoch,
            history_change=desk.history_change,
            last_error=self._keeper.last_error or link.last_error or protocol.held_up,
        )

    async def until_status(self, condition: Callable[[Status], bool]) -> Status:
        """Returns the first status that is so. Raises ClosedError if the client is closed."""
        found = self.status()

        def is_found() -> bool:
            nonlocal found
            found = self.status()
            return condition(found)

        await self._desk.until(is_found)
        return found

    async def until_live(self) -> None:
        """Returns when everything that the server had has arrived, and lies in the file."""
        protocol = self._desk.protocol
        await self._desk.until(lambda: protocol.is_live and not protocol.has_changes and not self._keeper.is_busy)

    async def until_settled(self) -> None:
        """Returns when every message has its outcome."""
        await self._desk.until(lambda: not self._desk.pending)

    def reconnect_now(self) -> None:
        """Ends the pause before the next attempt: the application knows that the network is back."""
        self._desk.demand_open()
        self._link.hurry()


def _name(entry: Entry) -> Name:
    return entry.chat_id, entry.client_message_id


def _demand_sequence(number: int, name: str) -> None:
    if type(number) is not int or not 0 <= number <= SEQUENCE_MAX:
        raise ValueError(f"{name} must be a whole number from 0 to {SEQUENCE_MAX}, not {number!r}")


def _system_wall_ms() -> int:
    return time.time_ns() // 1_000_000
