"""What fails in the real world, made to happen: the rows of the seed's appendix B, kills, and bad networks."""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from uuid import UUID

import aiohttp
import pytest

import doors.chat.chat_worker
import doors.chat.fan_out_worker
import doors.ledger.withheld_worker
from cli.served import Served, oncelog
from cli.served import serving as served_process
from crash.processes import started
from databases import BOTH_STORES, log_at
from doors.chat.chat_doors import Device, Door, Json, device_at, message_uuid, opened, people, sequences
from doors.serving import run, soon
from oncelog.core.chat import message_body, message_fingerprint
from oncelog.core.invariants import Answer, History, Sync, violations
from oncelog.core.policy import CHAT
from oncelog.core.values import Committed, Replayed
from oncelog.testing.proxy import CALM, FaultyProxy

pytestmark = BOTH_STORES

CLIENT: Final = str(doors.chat.chat_worker.__file__)
FAN_OUT: Final = str(doors.chat.fan_out_worker.__file__)
WITHHELD: Final = str(doors.ledger.withheld_worker.__file__)
LOST: Final = (aiohttp.ClientError, ConnectionError, TimeoutError)
"""What a client meets whose server or network is gone."""


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with served_process(tmp_path) as found:
        yield found


@asynccontextmanager
async def people_at(url: str) -> AsyncIterator["Place"]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        yield Place(session, url)


class Place:
    """A server in another process, or a way to it."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self.session = session
        self.url = url

    async def create(self, chat: str, *names: str) -> None:
        body = {"chat_id": chat, "members": [f"user:{one}" for one in names]}
        headers = {"Authorization": f"Bearer {names[0]}"}
        async with self.session.post(f"{self.url}/v1/chats", json=body, headers=headers) as answer:
            assert answer.status in (200, 201), await answer.text()

    async def device(self, name: str, **members: Any) -> Device:
        device = await device_at(self.session, self.url, name)
        answer = await device.connect(**members)
        assert answer["type"] == "connected", answer
        return device


class Relay:
    """A network between a client and a server, from which on demand no answer comes any more."""

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


# --- the five rows ---------------------------------------------------------------------------------------------


@pytest.mark.rule("CH-14", "CH-4")
def test_network_timeout_during_send(served: Served) -> None:
    async def main() -> None:
        async with people_at(served.url) as place, Relay(served.url) as relay:
            await place.create("c", "ann", "bob")
            bob = await place.device("bob")
            ann = await Place(place.session, relay.url).device("ann")
            relay.is_mute = True
            await ann.tell("send_message", client_message_id=message_uuid(1), chat_id="c", content="hello")
            assert (await bob.take(type="message"))["sequence"] == 1
            await soon(relay.swallowed.wait())  # the answer was there, and is lost
            again = await place.device("ann")
            answer = await again.send("c", 1)
            assert (answer["sequence"], answer["duplicate"], "content_mismatch" in answer) == (1, True, False)
            assert sequences(await bob.synced("c")) == [1]
            assert await bob.quiet() == []

    run(main())


@pytest.mark.rule("CH-14", "CH-4")
def test_client_crash_before_ack(served: Served, tmp_path: Path) -> None:
    async def main() -> None:
        async with people_at(served.url) as place:
            await place.create("c", "ann", "bob")
            bob = await place.device("bob")
            kept = tmp_path / "outbox.json"
            kept.write_text(json.dumps({"client_message_id": message_uuid(1), "content": "hello"}))
            with started(CLIENT, served.url, str(kept), "silent") as client:
                assert client.stdout is not None
                assert await asyncio.to_thread(client.stdout.readline) == b"sent\n"
                live = await bob.take(type="message")
                client.kill()
            with started(CLIENT, served.url, str(kept), "on") as client:
                assert client.stdout is not None
                answer = json.loads(await asyncio.to_thread(client.stdout.readline))
            assert (answer["sequence"], answer["message_id"]) == (live["sequence"], live["message_id"])
            assert answer["duplicate"] is True
            assert sequences(await bob.synced("c")) == [1]

    run(main())


@pytest.mark.rule("CH-14", "CH-1", "CO-10", "CO-11")
@pytest.mark.parametrize("moment", ["before", "after"])
def test_server_crash_around_the_commit_before_ack(tmp_path: Path, moment: str) -> None:
    async def main() -> None:
        async with opened(tmp_path) as door:
            await door.create("c", "ann", "bob")
            await (await door.device("ann")).sent("c", 1)
        with started(WITHHELD, log_at(tmp_path / "events.db"), moment) as process:
            assert process.stdout is not None
            url, _ = (await asyncio.to_thread(process.stdout.readline)).split()
            async with people_at(url.decode()) as place:
                ann, bob = await place.device("ann"), await place.device("bob")
                await ann.tell("send_message", client_message_id=message_uuid(2), chat_id="c", content="hello")
                assert await asyncio.to_thread(process.stdout.readline) == b"there\n"
                process.kill()
                process.wait()
                for device in (ann, bob):  # nobody was told of what may not be durable
                    with pytest.raises(LOST):
                        await device.receive()
        async with opened(tmp_path) as door:
            ann, bob = await door.device("ann"), await door.device("bob")
            is_there = moment == "after"
            assert sequences(await bob.synced("c")) == ([1, 2] if is_there else [1])
            answer = await ann.send("c", 2)
            assert (answer["sequence"], answer["duplicate"]) == (2, is_there)
            assert sequences(await bob.synced("c")) == [1, 2]

    run(main())


@pytest.mark.rule("CH-14", "CH-6")
def test_client_offline_for_an_extended_period(served: Served) -> None:
    """The server is killed and started again meanwhile, and much is said."""

    async def main() -> None:
        async with people_at(served.url) as place:
            await place.create("c", "ann", "bob")
            ann, bob = await place.device("ann"), await place.device("bob")
            for number in range(1, 6):
                await ann.sent("c", number)
            seen = sequences(await bob.takes(5, "message"))
            await bob.close()
            for number in range(6, 500):
                await ann.tell("send_message", client_message_id=message_uuid(number), chat_id="c", content="x")
            await ann.takes(494, "send_message_ack")
            served.kill()
            served.start()
            ann = await place.device("ann")
            for number in range(500, 700):
                await ann.tell("send_message", client_message_id=message_uuid(number), chat_id="c", content="x")
            await ann.takes(200, "send_message_ack")
            bob = await place.device("bob")
            seen += sequences(await bob.synced("c", seen[-1]))
            assert seen == list(range(1, 700))

    run(main())
    assert served.stop() == 0
    verified = oncelog("verify", served.store)
    assert verified.returncode == 0, verified.stdout


@pytest.mark.rule("CH-14", "CH-4")
def test_duplicate_id_with_other_content(served: Served) -> None:
    """Also of a server that has been killed since, and knows of the first from the log alone."""

    async def main() -> None:
        async with people_at(served.url) as place:
            await place.create("c", "ann", "bob")
            first = await (await place.device("ann")).send("c", 1, "original")
            for is_restarted in (False, True):
                if is_restarted:
                    served.kill()
                    served.start()
                ann = await place.device("ann")
                answer = await ann.send("c", 1, "another")
                expected = {**first, "duplicate": True, "content_mismatch": True, "request_id": answer["request_id"]}
                assert answer == expected
                assert [one["content"] for one in await ann.synced("c")] == ["original"]

    run(main())


# --- a kill in the middle of a fan-out ---------------------------------------------------------------------------

MEMBERS: Final = 200
BEFORE: Final = 10
"""Messages that all of them have."""


async def _live(device: Device) -> list[Json]:
    """What comes until the server is gone."""
    messages = []
    try:
        while True:
            messages.append(await device.take(type="message"))
    except LOST:
        return messages


@pytest.mark.rule("CH-7", "CH-6", "CO-11", "CO-13")
def test_a_gateway_killed_in_the_middle_of_a_fan_out(tmp_path: Path) -> None:
    names = list(people(MEMBERS))
    store = log_at(tmp_path / "log.db")

    async def killed() -> list[list[Json]]:
        with started(FAN_OUT, store, str(MEMBERS // 2)) as process:
            assert process.stdout is not None
            url = (await asyncio.to_thread(process.stdout.readline)).decode().strip()
            async with people_at(url) as place:
                await place.create("c", "sender", *names)
                sender = await place.device("sender", live=False)
                devices = await asyncio.gather(*[place.device(name) for name in names])
                for number in range(1, BEFORE + 1):
                    await sender.sent("c", number)
                for number in range(BEFORE + 1, BEFORE + 4):  # in one commit, or in several
                    said = {"client_message_id": message_uuid(number), "chat_id": "c", "content": "the end"}
                    await sender.tell("send_message", **said)
                return await asyncio.gather(*map(_live, devices))

    async def main() -> None:
        seen = await killed()
        reached = [len(messages) > BEFORE for messages in seen]
        assert 0 < sum(reached) < MEMBERS
        for messages in seen:
            assert sequences(messages) == list(range(1, len(messages) + 1))
        with served_process(tmp_path) as served:
            async with people_at(served.url) as place:
                sender = await place.device("sender", live=False)
                for number in range(BEFORE + 1, BEFORE + 4):
                    await sender.sent("c", number, "the end")
                whole = await sender.synced("c")
                assert sequences(whole) == list(range(1, BEFORE + 4))
                for name, messages in zip(names, seen, strict=True):
                    device = await place.device(name)
                    live = [{key: one[key] for key in one if key != "type"} for one in messages]
                    assert live + await device.synced("c", len(live)) == whole
                    await device.close()

    run(main())


# --- a storm -------------------------------------------------------------------------------------------------------

WRITERS: Final = 20
CHATS: Final = 200
EACH: Final = 15


class Writer:
    """Sends its messages one after the other, again and again until it has an answer, over a bad network."""

    def __init__(self, name: str, seed: int, place: Place) -> None:
        self.name = name
        self.chance = random.Random(f"{seed} {name}")
        self.place = place
        self.acked: list[tuple[str, str, int, bool]] = []
        self.retries = 0
        self._device: Device | None = None

    async def run(self, numbers: Iterator[int]) -> None:
        for _ in range(EACH):
            chat = "hot" if self.chance.random() < 0.5 else f"c{self.chance.randrange(CHATS)}"
            await self._send(chat, message_uuid(next(numbers)))

    async def _send(self, chat: str, uuid: str) -> None:
        is_retry = False
        while True:
            try:
                async with asyncio.timeout(3):
                    device = await self._connected()
                    if self.chance.random() < 0.15 and not is_retry:
                        # It is gone before it can have an answer.
                        await device.tell("send_message", client_message_id=uuid, chat_id=chat, content=self.name)
                        self._drop()
                        raise ConnectionResetError
                    answer = await device.ask("send_message", client_message_id=uuid, chat_id=chat, content=self.name)
                    assert answer["type"] == "send_message_ack", answer
                    assert "content_mismatch" not in answer
                    self.acked.append((chat, uuid, answer["sequence"], answer["duplicate"]))
                    # What it has been told is there it can read, at once.
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
            self._device = await self.place.device(self.name, live=False)
        return self._device

    def _drop(self) -> None:
        device, self._device = self._device, None
        if device is not None and device.socket._response.connection is not None:
            transport = device.socket._response.connection.transport
            if transport is not None:
                transport.abort()


@pytest.mark.rule("CH-1", "CH-2", "CH-3", "CH-4", "CH-13", "CO-10", "CO-14")
def test_writers_whose_network_is_bad_in_one_chat_and_in_many_at_once(tmp_path: Path, seed: int) -> None:
    async def main() -> None:
        async with opened(tmp_path) as door:
            names = [f"w{number}" for number in range(WRITERS)]
            direct = Place(door.served.session, door.served.url)
            chats = ["hot", *(f"c{number}" for number in range(CHATS))]
            await asyncio.gather(*[direct.create(chat, "w0", *names) for chat in chats])
            host, _, port = door.served.url.removeprefix("http://").partition(":")
            async with FaultyProxy(host, int(port), seed=seed) as proxy:
                place = Place(door.served.session, proxy.url)
                writers = [Writer(name, seed, place) for name in names]
                numbers = iter(range(1, 10**6))
                await asyncio.gather(*[writer.run(numbers) for writer in writers])
                proxy.faults = replace(CALM)
            acked = [one for writer in writers for one in writer.acked]
            assert len({uuid for _, uuid, _, _ in acked}) == WRITERS * EACH
            assert sum(writer.retries for writer in writers) > WRITERS
            reader = await door.device("w0", live=False)
            stored: dict[tuple[str, str], int] = {}
            syncs = []
            for chat in chats:
                messages = await reader.synced(chat)
                assert sequences(messages) == list(range(1, len(messages) + 1))
                stored.update({(chat, one["client_message_id"]): one["sequence"] for one in messages})
                syncs.append(Sync("w0", f"chat/{chat}", 0, len(messages), sequences(messages)))
            assert stored == {(chat, uuid): sequence for chat, uuid, sequence, _ in acked}
            await _demand_invariants(door, writers, syncs)

    run(main())


async def _demand_invariants(door: Door, writers: list[Writer], syncs: list[Sync]) -> None:
    """The four of the seed, and those of the commit, on what is stored and what was answered (CH-13)."""
    log = door.served.server.log
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
            body = message_body(writer.name, "text/plain")
            verdict = Replayed(record.receipt) if is_duplicate else Committed(record.receipt)
            identity = (CHAT.name, f"chat/{chat}", "", UUID(uuid).bytes)
            answers.append(Answer(identity, message_fingerprint(f"user:{writer.name}", body), verdict))
    acknowledged = {("chat/hot", name): mark for name, mark in (await door.watermarks("hot", "w0")).items()}
    assert max(acknowledged.values()) > 0
    history = History(records, settings=log.settings, answers=answers, syncs=syncs, acknowledged=acknowledged)
    assert violations(history) == []
