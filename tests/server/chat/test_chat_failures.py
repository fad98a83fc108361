"""Failures of clients, servers and networks: the specification's appendix B, killed servers, and faulty networks."""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from uuid import UUID

import aiohttp
import pytest
import pytest_asyncio

import server.chat.chat_worker
import server.chat.fan_out_worker
import server.ledger.hanging_commit_worker
from cli.server_process import ServerProcess, server_process
from core.invariants import Answer, History, ObservedSync, find_violations
from databases import BOTH_STORES, log_at
from deadlines import WAIT_S, soon
from oncelog.core.chat import encode_message, message_fingerprint
from oncelog.core.policy import CHAT
from oncelog.core.values import Committed, Replayed
from oncelog.testing.proxy import CALM, FaultyProxy
from scripts import read_line, start_script
from server.chat.chat_servers import (
    ChatServer,
    Device,
    Json,
    message_uuid,
    open_device,
    run_server,
    sequences,
    user_names,
)
from server.cli_commands import oncelog
from server.shared_servers import ServerPool, pool_fixture, unique_name

pytestmark = BOTH_STORES

CLIENT: Final = str(server.chat.chat_worker.__file__)
FAN_OUT: Final = str(server.chat.fan_out_worker.__file__)
WITHHELD: Final = str(server.ledger.hanging_commit_worker.__file__)
LOST: Final = (aiohttp.ClientError, ConnectionError, TimeoutError)
"""Errors that a client sees when its server or network fails."""


process_pool = pool_fixture(server_process)


@pytest_asyncio.fixture(loop_scope="session")
async def shared_process(process_pool: ServerPool[ServerProcess], store_kind: str) -> AsyncIterator[ServerProcess]:
    """A server process shared with other tests. It is restarted after a test has stopped it."""
    server = await process_pool.get(store_kind)
    yield server
    if server.process.poll() is not None:
        await asyncio.to_thread(server.start)


@pytest.fixture
def chat(request: pytest.FixtureRequest) -> str:
    """The id of a chat that only this test uses."""
    return unique_name(request)


@asynccontextmanager
async def connect_to(url: str) -> AsyncIterator["ServerAccess"]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        yield ServerAccess(session, url)


class ServerAccess:
    """Client access to a server: in this or another process, or behind a proxy."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self.session = session
        self.url = url

    async def create(self, chat: str, *names: str) -> None:
        body = {"chat_id": chat, "members": [f"user:{one}" for one in names]}
        headers = {"Authorization": f"Bearer {names[0]}"}
        async with self.session.post(f"{self.url}/v1/chats", json=body, headers=headers) as answer:
            assert answer.status in (200, 201), await answer.text()

    async def connect(self, name: str, **members: Any) -> Device:
        device = await open_device(self.session, self.url, name)
        answer = await device.connect(**members)
        assert answer["type"] == "connected", answer
        return device


class Relay:
    """A proxy between a client and a server. It can start dropping all answers."""

    def __init__(self, url: str) -> None:
        host, _, port = url.removeprefix("http://").partition(":")
        self._target = (host, int(port))
        self.is_mute = False
        self.swallowed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "Relay":
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(*self._target)
        for one in (self._pass(reader, back, False), self._pass(there, writer, True)):
            task = asyncio.ensure_future(one)
            self._tasks.add(task)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_answer: bool) -> None:
        try:
            while data := await reader.read(65_536):
                if is_answer and self.is_mute:
                    self.swallowed.set()
                else:
                    writer.write(data)
        finally:
            writer.close()


# --- appendix B ------------------------------------------------------------------------------------------------


@pytest.mark.rule("CH-14", "CH-4")
async def test_retry_after_a_network_timeout_during_send_is_a_duplicate(
    shared_process: ServerProcess, chat: str
) -> None:
    async with connect_to(shared_process.url) as place, Relay(shared_process.url) as relay:
        await place.create(chat, "ann", "bob")
        bob = await place.connect("bob")
        ann = await ServerAccess(place.session, relay.url).connect("ann")
        relay.is_mute = True
        await ann.send_frame("send_message", client_message_id=message_uuid(1), chat_id=chat, content="hello")
        assert (await bob.wait_for_frame(type="message"))["sequence"] == 1
        await soon(relay.swallowed.wait())  # the server has sent the answer, and the proxy has dropped it
        again = await place.connect("ann")
        answer = await again.send(chat, 1)
        assert (answer["sequence"], answer["duplicate"], "content_mismatch" in answer) == (1, True, False)
        assert sequences(await bob.sync_all(chat)) == [1]
        assert await bob.take_frames() == []
        await ann.close()


@pytest.mark.rule("CH-14", "CH-4")
async def test_retry_after_a_client_crash_before_the_ack_is_a_duplicate(
    shared_process: ServerProcess, chat: str, tmp_path: Path
) -> None:
    url = shared_process.url
    kept = tmp_path / "outbox.json"
    kept.write_text(json.dumps({"client_message_id": message_uuid(1), "chat_id": chat, "content": "hello"}))
    async with connect_to(url) as place:
        await place.create(chat, "ann", "bob")
        bob = await place.connect("bob")
        with start_script(CLIENT, url, str(kept), "silent") as client:
            assert await asyncio.to_thread(read_line, client) == "sent"
            live = await bob.wait_for_frame(type="message")
            client.kill()
        with start_script(CLIENT, url, str(kept), "on") as client:
            answer = json.loads(await asyncio.to_thread(read_line, client))
        assert (answer["sequence"], answer["message_id"]) == (live["sequence"], live["message_id"])
        assert answer["duplicate"] is True
        assert sequences(await bob.sync_all(chat)) == [1]


@pytest.mark.rule("CH-14", "CH-1", "CO-10", "CO-11")
@pytest.mark.parametrize("moment", ["before", "after"])
async def test_server_crash_around_the_commit_stores_the_message_completely_or_not_at_all(
    tmp_path: Path, moment: str
) -> None:
    async with run_server(tmp_path) as chat_server:
        await chat_server.create("c", "ann", "bob")
        await (await chat_server.connect("ann")).send_committed("c", 1)
    with start_script(WITHHELD, log_at(tmp_path / "events.db"), moment) as process:
        url, _ = (await asyncio.to_thread(read_line, process)).split()
        async with connect_to(url) as place:
            ann, bob = await place.connect("ann"), await place.connect("bob")
            await ann.send_frame("send_message", client_message_id=message_uuid(2), chat_id="c", content="hello")
            assert await asyncio.to_thread(read_line, process) == "there"
            process.kill()
            process.wait()
            assert await _live(ann) == ann.frames == []  # the server received no confirmation of the commit
            # The server may have read the committed message from its log.
            assert sequences(await _live(bob)) in ([[], [2]] if moment == "after" else [[]])
    async with run_server(tmp_path) as chat_server:
        ann, bob = await chat_server.connect("ann"), await chat_server.connect("bob")
        is_there = moment == "after"
        assert sequences(await bob.sync_all("c")) == ([1, 2] if is_there else [1])
        answer = await ann.send("c", 2)
        assert (answer["sequence"], answer["duplicate"]) == (2, is_there)
        assert sequences(await bob.sync_all("c")) == [1, 2]


@pytest.mark.rule("CH-14", "CH-6")
async def test_client_that_was_offline_during_a_server_crash_syncs_all_messages(tmp_path: Path, is_soak: bool) -> None:
    crash, end = (500, 700) if is_soak else (200, 300)
    async with server_process(tmp_path) as process:
        async with connect_to(process.url) as place:
            await place.create("c", "ann", "bob")
            ann, bob = await place.connect("ann"), await place.connect("bob")
            for number in range(1, 6):
                await ann.send_committed("c", number)
            seen = sequences(await bob.wait_for_frames(5, "message"))
            await bob.close()
            await send_many(ann, range(6, crash))
            await asyncio.to_thread(process.kill)
            await asyncio.to_thread(process.start)
            ann = await place.connect("ann")
            await send_many(ann, range(crash, end))
            bob = await place.connect("bob")
            seen += sequences(await bob.sync_all("c", seen[-1]))
            assert seen == list(range(1, end))
        assert await asyncio.to_thread(process.stop) == 0
    verified = await oncelog("verify", process.store)
    assert verified.exit_code == 0, verified.output


async def send_many(device: Device, numbers: range) -> None:
    for number in numbers:
        await device.send_frame("send_message", client_message_id=message_uuid(number), chat_id="c", content="x")
    await device.wait_for_frames(len(numbers), "send_message_ack")


@pytest.mark.rule("CH-14", "CH-4")
async def test_reused_id_with_different_content_gets_the_original_answer(
    shared_process: ServerProcess, chat: str
) -> None:
    """After a kill and a restart, the server gives the same answer, which it can only read from the log."""
    async with connect_to(shared_process.url) as place:
        await place.create(chat, "ann", "bob")
        first = await (await place.connect("ann")).send(chat, 1, "original")
        await check_mismatch(place, chat, first)
        await asyncio.to_thread(shared_process.kill)
        await asyncio.to_thread(shared_process.start)
        await check_mismatch(place, chat, first)


async def check_mismatch(place: ServerAccess, chat: str, first: Json) -> None:
    ann = await place.connect("ann")
    answer = await ann.send(chat, 1, "another")
    expected = {**first, "duplicate": True, "content_mismatch": True, "request_id": answer["request_id"]}
    assert answer == expected
    assert [one["content"] for one in await ann.sync_all(chat)] == ["original"]


# --- server killed during a fan-out ------------------------------------------------------------------------------

BEFORE: Final = 5
"""Messages that all members receive before the server is killed."""


async def _live(device: Device) -> list[Json]:
    """Return the messages received until the server dies."""
    messages = []
    try:
        while True:
            messages.append(await device.wait_for_frame(type="message"))
    except LOST:
        return messages


@pytest.mark.rule("CH-7", "CH-6", "CO-11", "CO-13")
async def test_server_killed_during_a_fan_out_loses_no_message(tmp_path: Path, is_soak: bool) -> None:
    names = list(user_names(200 if is_soak else 80))
    with start_script(FAN_OUT, log_at(tmp_path / "events.db"), str(len(names) // 2)) as process:
        url = await asyncio.to_thread(read_line, process)
        async with connect_to(url) as place:
            await place.create("c", "sender", *names)
            sender = await place.connect("sender", live=False)
            devices = await asyncio.gather(*[place.connect(name) for name in names])
            for number in range(1, BEFORE + 1):
                await sender.send_committed("c", number)
            for number in range(BEFORE + 1, BEFORE + 4):  # in one or several commits
                message = {"client_message_id": message_uuid(number), "chat_id": "c", "content": "the end"}
                await sender.send_frame("send_message", **message)
            seen = await asyncio.gather(*map(_live, devices))
    reached = [len(messages) > BEFORE for messages in seen]
    assert 0 < sum(reached) < len(names)
    for messages in seen:
        assert sequences(messages) == list(range(1, len(messages) + 1))
    async with run_server(tmp_path) as chat_server:
        sender = await chat_server.connect("sender", live=False)
        for number in range(BEFORE + 1, BEFORE + 4):
            await sender.send_committed("c", number, "the end")
        whole = await sender.sync_all("c")
        assert sequences(whole) == list(range(1, BEFORE + 4))
        for name, messages in zip(names, seen, strict=True):
            device = await chat_server.connect(name)
            live = [{key: one[key] for key in one if key != "type"} for one in messages]
            assert live + await device.sync_all("c", len(live)) == whole
            await device.close()


# --- faulty network -----------------------------------------------------------------------------------------------


class Writer:
    """Sends messages one by one over a faulty network, and retries each until it is answered."""

    def __init__(self, name: str, seed: int, place: ServerAccess, chats: Sequence[str]) -> None:
        self.name = name
        self.chance = random.Random(f"{seed} {name}")
        self.place = place
        self.chats = chats
        self.acked: list[tuple[str, str, int, bool]] = []
        self.retries = 0
        self._device: Device | None = None

    async def run(self, numbers: Iterator[int], count: int) -> None:
        for _ in range(count):
            chat = "hot" if self.chance.random() < 0.5 else self.chance.choice(self.chats)
            await self._send(chat, message_uuid(next(numbers)))

    async def _send(self, chat: str, uuid: str) -> None:
        is_retry = False
        while True:
            try:
                async with asyncio.timeout(WAIT_S):
                    device = await self._connected()
                    if self.chance.random() < 0.15 and not is_retry:
                        # The connection is dropped before the answer.
                        await device.send_frame("send_message", client_message_id=uuid, chat_id=chat, content=self.name)
                        self._drop()
                        raise ConnectionResetError
                    answer = await device.request(
                        "send_message", client_message_id=uuid, chat_id=chat, content=self.name
                    )
                    assert answer["type"] == "send_message_ack", answer
                    assert "content_mismatch" not in answer
                    self.acked.append((chat, uuid, answer["sequence"], answer["duplicate"]))
                    # An answered message can be read immediately.
                    page = await device.sync(chat, answer["sequence"] - 1, limit=1)
                    assert page["messages"][0]["client_message_id"] == uuid
                    await device.acknowledge(chat, answer["sequence"])
                    return
            except LOST:
                self._drop()
                is_retry = True
                self.retries += 1

    async def _connected(self) -> Device:
        if self._device is None:
            self._device = await self.place.connect(self.name, live=False)
        return self._device

    def _drop(self) -> None:
        device, self._device = self._device, None
        if device is not None and device.socket._response.connection is not None:
            transport = device.socket._response.connection.transport
            if transport is not None:
                transport.abort()


@pytest.mark.rule("CH-1", "CH-2", "CH-3", "CH-4", "CH-13", "CO-10", "CO-14")
async def test_writers_on_a_faulty_network_store_each_message_once(tmp_path: Path, seed: int, is_soak: bool) -> None:
    async with run_server(tmp_path) as chat_server:
        count, each = (20, 15) if is_soak else (12, 8)
        names = [f"w{number}" for number in range(count)]
        direct = ServerAccess(chat_server.served.session, chat_server.served.url)
        chats = ["hot", *(f"c{number}" for number in range(200 if is_soak else 40))]
        await asyncio.gather(*[direct.create(chat, "w0", *names) for chat in chats])
        host, _, port = chat_server.served.url.removeprefix("http://").partition(":")
        async with FaultyProxy(host, int(port), seed=seed) as proxy:
            place = ServerAccess(chat_server.served.session, proxy.url)
            writers = [Writer(name, seed, place, chats[1:]) for name in names]
            numbers = iter(range(1, 10**6))
            await asyncio.gather(*[writer.run(numbers, each) for writer in writers])
            proxy.faults = replace(CALM)
        acked = [one for writer in writers for one in writer.acked]
        assert len({uuid for _, uuid, _, _ in acked}) == count * each
        assert sum(writer.retries for writer in writers) > count // 2
        reader = await chat_server.connect("w0", live=False)
        stored: dict[tuple[str, str], int] = {}
        syncs = []
        for chat in chats:
            messages = await reader.sync_all(chat)
            assert sequences(messages) == list(range(1, len(messages) + 1))
            stored.update({(chat, one["client_message_id"]): one["sequence"] for one in messages})
            syncs.append(ObservedSync("w0", f"chat/{chat}", 0, len(messages), sequences(messages)))
        assert stored == {(chat, uuid): sequence for chat, uuid, sequence, _ in acked}
        await _check_invariants(chat_server, writers, syncs)


async def _check_invariants(chat_server: ChatServer, writers: list[Writer], syncs: list[ObservedSync]) -> None:
    """Check that stored and answered messages satisfy the invariants of the specification and of commits (CH-13)."""
    log = chat_server.served.server.log
    records = []
    for lane in await log.heads():
        after = 0
        while page := (await log.read(lane=lane, after=after)).records:
            records += page
            after = page[-1].position
    places = {(record.scope, record.sequence): record for record in records}
    answers = []
    for writer in writers:
        for chat, uuid, sequence, is_duplicate in writer.acked:
            record = places[f"chat/{chat}", sequence]
            body = encode_message(writer.name, "text/plain")
            verdict = Replayed(record.receipt) if is_duplicate else Committed(record.receipt)
            identity = (CHAT.name, f"chat/{chat}", "", UUID(uuid).bytes)
            answers.append(Answer(identity, message_fingerprint(f"user:{writer.name}", body), verdict))
    acknowledged = {("chat/hot", name): mark for name, mark in (await chat_server.watermarks("hot", "w0")).items()}
    assert max(acknowledged.values()) > 0
    history = History(records, settings=log.settings, answers=answers, syncs=syncs, acknowledged=acknowledged)
    assert find_violations(history) == []
