"""Readers of messages and updates, with a real store and a scripted server."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from client.chat.chat_clients import LIMITS, SHORT, UNREACHABLE_URL, contents, take
from deadlines import soon, until
from oncelog.client.chat import ChatClient, ChatLimits, ConnectionState, UpdatesLostError
from oncelog.client.chat.values import ListedChat
from oncelog.errors import (
    ClientError,
    ClosedError,
    HistoryChangedError,
    LostError,
    ServerRefusedError,
    StoreUnavailableError,
)


class ScriptedSocket:
    """Delivers the frames that the test pushes, and records the frames that the client sends."""

    def __init__(self) -> None:
        self.close_code: int | None = None
        self.sent: list[dict[str, Any]] = []
        self.frames: asyncio.Queue[str | None] = asyncio.Queue()

    async def send(self, data: bytes) -> None:
        frame = json.loads(data)
        self.sent.append(frame)

    async def receive(self) -> str:
        frame = await self.frames.get()
        if frame is None:
            raise LostError("cut")
        return frame

    async def close(self) -> None:
        pass

    def push(self, kind: str, **members: Any) -> None:
        self.frames.put_nowait(json.dumps({"type": kind, **members}))

    def push_messages(self, *sequences: int) -> None:
        for sequence in sequences:
            self.push(
                "message", message_id=f"msg_{sequence}", chat_id="tea", sequence=sequence, sender_id="user:bob",
                client_message_id=f"theirs-{sequence}", content=str(sequence), created_at="then",
            )  # fmt: skip


class ScriptedWire:
    """Connects immediately. `epoch` and `listed` determine what the simulated server reports."""

    def __init__(self) -> None:
        self.sockets: list[ScriptedSocket] = []
        self.epoch = "e1"
        self.listed: list[ListedChat] | Exception = [ListedChat("tea", 0)]

    async def get_token(self) -> str | None:
        return "ann"

    async def connect(self) -> ScriptedSocket:
        socket = ScriptedSocket()
        self.sockets.append(socket)
        socket.push("connected", user_id="user:ann", epoch=self.epoch)
        return socket

    async def list_chats(self) -> list[ListedChat]:
        if isinstance(self.listed, Exception):
            raise self.listed
        return self.listed


def client_on(wire: ScriptedWire, path: Path | str = ":memory:", **options: Any) -> ChatClient:
    return ChatClient(UNREACHABLE_URL, path=path, **{"limits": LIMITS, "wire": wire, **options})


@pytest.mark.rule("CH-12")
async def test_message_received_during_a_store_read_is_not_skipped() -> None:
    wire = ScriptedWire()
    async with client_on(wire) as ann:
        await soon(ann.until_live())
        store: Any = ann._runtime.store
        read = asyncio.Event()
        loop, messages_after = asyncio.get_running_loop(), store.load_messages_after

        def load_slowly(*arguments: Any) -> Any:
            found = messages_after(*arguments)
            loop.call_soon_threadsafe(read.set)
            asyncio.run_coroutine_threadsafe(moved.wait(), loop).result()
            return found

        store.load_messages_after = load_slowly
        moved, stream = asyncio.Event(), ann.messages("tea")
        wire.sockets[0].push_messages(1)
        first = asyncio.create_task(anext(stream))
        await soon(read.wait())
        ann._runtime.progress["tea"] = ann._runtime.progress["tea"]._replace(
            complete_to=3
        )  # as if 2 and 3 had just been stored
        moved.set()
        assert (await soon(first)).sequence == 1
        store.load_messages_after = messages_after
        wire.sockets[0].push_messages(2, 3)

        async def are_stored() -> bool:
            return len(await ann.lines("tea")) == 3

        await until(are_stored)
        assert [one.sequence for one in await take(stream, 2)] == [2, 3]


@pytest.mark.rule("CH-12")
async def test_changed_history_ends_readers_and_resets_their_position() -> None:
    wire = ScriptedWire()
    async with client_on(wire) as ann:
        await soon(ann.until_live())
        stream, waiting = ann.messages("tea"), ann.messages()
        wire.sockets[0].push_messages(1, 2, 3)
        assert contents(await take(stream, 2)) == ["1", "2"]
        assert contents(await take(waiting, 3)) == ["1", "2", "3"]
        next_one = asyncio.create_task(anext(waiting))
        wire.epoch = "e2"
        wire.sockets[0].frames.put_nowait(None)
        with pytest.raises(HistoryChangedError, match="tea"):
            await soon(next_one)
        with pytest.raises(HistoryChangedError, match="tea"):
            await soon(anext(stream))  # although message 3 is already loaded
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        await soon(ann.until_live())
        wire.sockets[1].push_messages(1)
        assert contents(await take(ann.messages("tea"), 1)) == ["1"]


async def test_slow_reader_of_updates_gets_updates_lost_error() -> None:
    wire = ScriptedWire()
    async with client_on(wire, limits=ChatLimits(**SHORT, updates_max=2)) as ann:
        await soon(ann.until_live())
        slow, stopped = ann.updates(), ann.updates()
        await stopped.aclose()
        for sequence in range(1, 5):
            wire.sockets[0].push_messages(sequence)
            await until(lambda sequence=sequence: ann.chats()[0].complete_to == sequence)  # type: ignore[misc]
        with pytest.raises(UpdatesLostError, match="updates_max"):
            await soon(anext(slow))
        with pytest.raises(StopAsyncIteration):
            await soon(anext(stopped))


async def test_failed_chat_list_closes_a_new_connection_and_is_retried_on_a_live_one() -> None:
    wire = ScriptedWire()
    wire.listed = ServerRefusedError("UNAVAILABLE", "not now")
    async with client_on(wire, limits=ChatLimits(**SHORT, check_ms=5)) as ann:
        status = await soon(ann.until_status(lambda status: status.last_error is not None))
        assert status.state is not ConnectionState.LIVE
        assert "UNAVAILABLE" in str(status.last_error)
        wire.listed = [ListedChat("tea", 0)]
        await soon(ann.until_live())
        count = len(wire.sockets)
        wire.listed = LostError("gone for a moment")
        await until(lambda: ann._runtime.protocol.wants_list is False)
        wire.listed = [ListedChat("tea", 0), ListedChat("new", 0)]
        await soon(ann.until_status(lambda _: len(ann.chats()) == 2))
        assert len(wire.sockets) == count


async def test_connection_without_answers_is_closed_after_the_answer_timeout() -> None:
    wire = ScriptedWire()
    async with client_on(wire, limits=ChatLimits(**SHORT, answer_timeout_ms=20)) as ann:
        await soon(ann.until_live())
        count = len(wire.sockets)
        await ann.send("tea", "hello")
        await until(lambda: len(wire.sockets) > count)
        assert [one["type"] for one in wire.sockets[count - 1].sent] == ["connect", "send_message"]


async def test_unwritable_store_refuses_messages_and_saves_received_ones_later(tmp_path: Path) -> None:
    wire = ScriptedWire()
    async with client_on(wire, tmp_path / "ann.db") as ann:
        await soon(ann.until_live())
        store: Any = ann._runtime.store
        write = store.save

        def raise_disk_full(*_arguments: Any) -> None:
            raise StoreUnavailableError("the disk is full")

        store.save = raise_disk_full
        with pytest.raises(StoreUnavailableError):
            await ann.send("tea", "hello")
        assert ann.pending() == []
        wire.sockets[0].push_messages(1)
        await soon(ann.until_status(lambda status: status.last_error == "the disk is full"))
        assert await ann.lines("tea") == []
        store.save = write
        assert contents(await take(ann.messages("tea"), 1)) == ["1"]
        assert ann.status().last_error is None


@pytest.mark.parametrize("is_mended", [True, False])
async def test_failed_store_write_leaves_no_gap_in_the_messages(tmp_path: Path, is_mended: bool) -> None:
    wire, path = ScriptedWire(), tmp_path / "ann.db"
    async with client_on(wire, path) as ann:
        await soon(ann.until_live())
        store: Any = ann._runtime.store
        write, is_first = store.save, True

        def raise_disk_full(*arguments: Any) -> None:
            nonlocal is_first
            if is_first or (not is_mended and any(one.sequence == 1 for one in arguments[2].messages)):
                is_first = False
                raise StoreUnavailableError("the disk is full")
            write(*arguments)

        store.save = raise_disk_full
        wire.sockets[0].push_messages(1)
        await soon(ann.until_status(lambda status: status.last_error == "the disk is full"))
        wire.sockets[0].push_messages(2)
        await until(lambda: ann._runtime.protocol.chats["tea"].complete_to == 2)
    wire.listed = [ListedChat("tea", 2)]
    async with client_on(wire, path) as ann:
        assert contents([one.message for one in await ann.lines("tea") if one.message]) == ["1", "2"][: 2 * is_mended]


async def test_socket_is_not_read_while_the_store_is_slow() -> None:
    wire = ScriptedWire()
    async with client_on(wire, limits=ChatLimits(**SHORT, frames_max=2)) as ann:
        await soon(ann.until_live())
        gate = asyncio.Event()
        store: Any = ann._runtime.store
        loop, write = asyncio.get_running_loop(), store.save

        def save_when_open(*arguments: Any) -> None:
            asyncio.run_coroutine_threadsafe(gate.wait(), loop).result()
            write(*arguments)

        store.save = save_when_open
        wire.sockets[0].push_messages(*range(1, 50))
        await until(lambda: ann._runtime.protocol.changes.messages[2:])
        for _ in range(20):
            await asyncio.sleep(0)
        assert wire.sockets[0].frames.qsize() > 40
        gate.set()
        assert len(await take(ann.messages("tea"), 49)) == 49


async def test_unexpected_error_is_raised_in_all_callers() -> None:
    wire = ScriptedWire()
    wire.listed = RuntimeError("a bug")  # not an error from the package
    client = client_on(wire)
    async with client as ann:
        with pytest.raises(ClientError, match="RuntimeError: a bug"):
            await soon((await ann.send("tea", "hello")).outcome())
        with pytest.raises(ClientError):
            await ann.send("tea", "more")
        assert ann.status().state is ConnectionState.CLOSED
        assert "a bug" in str(ann.status().last_error)


async def test_close_acknowledges_received_messages() -> None:
    wire = ScriptedWire()
    async with client_on(wire, limits=ChatLimits(**{**SHORT, "ack_wait_ms": 60_000})) as ann:
        await soon(ann.until_live())
        wire.sockets[0].push_messages(1, 2)
        stream = ann.messages("tea")
        await take(stream, 2)
        waiting = asyncio.create_task(anext(stream))
        await until(lambda: ann.chats()[0].received_to == 2)
    assert wire.sockets[0].sent[-1]["type"] == "ack"
    assert wire.sockets[0].sent[-1]["last_acked_sequence"] == 2
    with pytest.raises(StopAsyncIteration):
        await waiting
    with pytest.raises(ClosedError):
        ann.messages("tea")


@pytest.mark.rule("CH-12")
async def test_expired_token_and_planned_close_are_followed_by_a_reconnection() -> None:
    wire = ScriptedWire()
    long = {"refused_pause_ms_min": 600_000, "refused_pause_ms_max": 600_000}
    async with client_on(wire, limits=ChatLimits(**{**SHORT, **long})) as ann:
        for number in range(1, 4):
            await soon(ann.until_status(lambda _: len(wire.sockets) == number))  # noqa: B023 - awaited immediately
            await soon(ann.until_live())
            if number == 1:
                wire.sockets[-1].push("error", code="AUTH_FAILED", message="the token has expired")
            else:
                wire.sockets[-1].push("connection_closing", reason="restart", reconnect_delay_ms=5)
            await until(lambda: len(wire.sockets) > number)  # noqa: B023
        assert ann.status().state is not ConnectionState.REFUSED
