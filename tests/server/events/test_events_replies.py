"""Sessions of the Events API: replies in request order, closing errors, and the reader's own events (EV-8, EV-14)."""

import asyncio
from random import Random

import pytest
from aiohttp import WSCloseCode

from deadlines import turns, until
from oncelog.errors import StoreUnavailableError
from oncelog.server.auth.principal import parse_grants
from oncelog.server.events import subscriber
from oncelog.server.events.subscriber import OwnPositions
from oncelog.server.limits import ApiLimits
from oncelog.server.metrics import Counts
from oncelog.server.reply_queue import Reply, ReplyQueue
from oncelog.server.send_queue import SendQueue
from oncelog.server.websocket_frames import encode_frame
from server.events.event_sessions import Peer, SessionServer, Tokens, item, session_server, texts_of


async def submit_in_turn(server: SessionServer) -> tuple[Peer, Peer]:
    """Connect Ada and Bob. Bob submits the events 1, 3, 5, 7 and 9, and Ada the even ones up to 10."""
    ada, bob = await server.connect("ada"), await server.connect("bob")
    for number in range(1, 11):
        await (ada, bob)[number % 2].submit(item(number))
    return ada, bob


async def submit_soon(peer: Peer, *numbers: int) -> str:
    return await peer.send("submit_events", {"events": [item(number) for number in numbers]})


# --- order -------------------------------------------------------------------------------------------


@pytest.mark.rule("EV-8")
async def test_replies_are_sent_in_the_order_of_their_requests() -> None:
    async with session_server() as server:
        ada = await server.connect()
        await ada.submit(item(1))
        server.log.hold_commits()
        await submit_soon(ada, 2)
        await ada.send_raw(b"{")
        ada.session.receive_binary()
        await submit_soon(ada, 1)  # known, so answered from memory
        await ada.send("unknown", {})
        await submit_soon(ada, 3)
        await turns()
        assert ada.received() == ["connected", [1]]
        server.log.gate.open()
        await ada.wire.wait_for_messages(8)
        assert ada.received()[2:] == [[2], "bad_request", "bad_request", [1], "bad_request", [3]]


@pytest.mark.rule("EV-8", "EV-13")
async def test_page_is_not_sent_before_an_earlier_result() -> None:
    async with session_server() as server:
        ada, bob = await server.connect("ada"), await server.connect("bob")
        await ada.sync()
        server.log.hold_commits()
        await submit_soon(ada, 1)
        await server.log.gate.reached.wait()
        syncing = asyncio.ensure_future(ada.sync())
        await turns()
        assert ada.received() == ["connected", "sync_response"]
        server.log.gate.open()
        assert [one["committed_id"] for one in (await syncing)["events"]] == [1]
        await bob.submit(item(2))
        await ada.wire.wait_for_messages(5)
        assert ada.received()[2:] == [[1], "sync_response", 2]


@pytest.mark.rule("EV-13", "EV-14")
async def test_error_during_an_open_sync_cycle_waits_for_held_results() -> None:
    async with session_server(cycle_idle_ms=10**7) as server:
        ada, bob = await server.connect("ada"), await server.connect("bob")
        await bob.submit(item(1), item(2))
        page = await ada.sync(limit=1)
        await submit_soon(ada, 3)
        await ada.send("unknown", {})
        await until(lambda: server.hub.position == 3)
        assert ada.received() == ["connected", "sync_response"]
        await ada.sync(since=page["next_since_committed_id"])
        await ada.wire.wait_for_messages(5)
        assert ada.received() == ["connected", "sync_response", "sync_response", [3], "bad_request"]


@pytest.mark.rule("CO-30", "CO-31")
async def test_frames_are_not_read_while_too_many_replies_are_waiting() -> None:
    async with session_server(outbox_frames_max=4) as server:
        ada = await server.connect()
        server.log.hold_commits()
        await submit_soon(ada, 1)
        for _ in range(3):
            await ada.send("unknown", {})
        fifth = asyncio.ensure_future(ada.send("unknown", {}))
        await turns()
        assert server.counts.frames_received == 5
        server.log.gate.open()
        await fifth
        await ada.wire.wait_for_messages(6)
        assert ada.received() == ["connected", [1], *["bad_request"] * 4]


# --- errors that close -------------------------------------------------------------------------------


@pytest.mark.rule("EV-8", "EV-2")
async def test_connection_over_the_frame_limit_closes_after_the_results_of_accepted_requests() -> None:
    async with session_server(frames_per_second_max=5) as server:
        ada = await server.connect()
        server.log.hold_commits()
        sent = [await submit_soon(ada, number) for number in range(1, 7)]
        await turns()
        assert (ada.received(), ada.wire.closed_with) == (["connected"], None)
        server.log.gate.open()
        await until(lambda: ada.wire.closed_with is not None)
        assert ada.received() == ["connected", [1], [2], [3], [4], "rate_limited"]
        assert ada.messages[-1]["msg_id"] == sent[4]
        assert ada.wire.closed_with == (WSCloseCode.POLICY_VIOLATION, "rate_limited")


@pytest.mark.rule("EV-8", "EV-14")
async def test_broadcasts_continue_until_a_closing_error_is_sent() -> None:
    async with session_server(frames_per_second_max=3) as server:
        ada, bob = await server.connect("ada"), await server.connect("bob")
        await ada.sync()
        server.log.hold_commits()
        await submit_soon(bob, 1)
        await submit_soon(ada, 2)
        await submit_soon(ada, 3)
        server.log.gate.open()
        await until(lambda: ada.wire.closed_with is not None)
        assert ada.received() == ["connected", "sync_response", 1, [2], "rate_limited"]


@pytest.mark.rule("EV-8", "CO-30")
async def test_closing_error_waits_a_bounded_time_for_results() -> None:
    async with session_server(frames_per_second_max=2, close_wait_ms=1) as server:
        ada = await server.connect()
        server.log.hold_commits()
        await submit_soon(ada, 1)
        await submit_soon(ada, 2)
        await until(lambda: ada.wire.closed_with is not None)
        assert (ada.received(), ada.wire.closed_with) == (["connected"], (WSCloseCode.POLICY_VIOLATION, "rate_limited"))
        server.log.gate.open()
        await until(lambda: server.hub.position == 1)
        assert server.hub._pending_replies == {}


@pytest.mark.rule("EV-8", "CO-16")
async def test_failed_request_closes_the_connection_after_earlier_replies() -> None:
    async with session_server() as server:
        ada = await server.connect()
        server.log.gate.shut()
        commits = 0

        async def fail_second(_: object) -> None:
            nonlocal commits
            commits += 1
            if commits == 2:
                raise StoreUnavailableError("away")
            await server.log.gate()

        server.log.store.before_commit = fail_second
        await submit_soon(ada, 1)
        await server.log.gate.reached.wait()
        await submit_soon(ada, 2)
        await submit_soon(ada, 2, 3)
        server.log.gate.open()
        await until(lambda: ada.wire.closed_with is not None)
        assert ada.received() == ["connected", [1], "server_error", "server_error"]
        assert ada.wire.closed_with == (WSCloseCode.INTERNAL_ERROR, "server_error")


@pytest.mark.rule("CO-22", "EV-8")
async def test_revoked_writer_gets_its_results_but_a_revoked_reader_is_closed_immediately() -> None:
    tokens = Tokens()
    for name in ("ada", "eve"):
        tokens.add(name, parse_grants(["a"], ["a"]))
    async with session_server(tokens=tokens) as server:
        writer, reader = await server.connect("ada"), await server.connect("eve")
        await reader.sync()
        server.log.hold_commits()
        await submit_soon(writer, 1)
        await submit_soon(reader, 2)
        for peer in (writer, reader):
            peer.session.renew(None)
        assert (reader.received()[2:], reader.wire.closed_with) == (["auth_failed"], (1008, "auth_failed"))
        assert writer.wire.closed_with is None
        server.log.gate.open()
        await until(lambda: writer.wire.closed_with is not None)
        assert writer.received() == ["connected", [1], "auth_failed"]


# --- own events ----------------------------------------------------------------------------------------


@pytest.mark.rule("EV-13", "EV-14")
async def test_own_events_are_not_broadcast_when_a_sync_cycle_is_abandoned() -> None:
    async with session_server(cycle_idle_ms=1) as server:
        ada, bob = await submit_in_turn(server)
        await ada.sync(limit=2)
        await submit_soon(ada, 11)
        await ada.wire.wait_for_messages(12)
        assert ada.received()[6:] == ["sync_response", 3, 5, 7, 9, [11]]
        await bob.submit(item(12))
        assert (await ada.wire.wait_for_messages(13))[-1]["payload"]["committed_id"] == 12


@pytest.mark.rule("EV-14", "CO-31")
async def test_reader_is_closed_when_its_own_events_are_no_longer_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscriber, "RANGES_MAX", 2)
    async with session_server(cycle_idle_ms=1) as server:
        ada, _ = await submit_in_turn(server)
        await ada.sync(limit=1)
        await submit_soon(ada, 11)
        await until(lambda: ada.wire.closed_with is not None)
        assert ada.received()[6:] == ["sync_response", "server_error"]
        assert ada.wire.closed_with == (
            WSCloseCode.POLICY_VIOLATION,
            "the sync cycle was left open for too long; sync again",
        )
        again = await server.connect("ada")
        assert [one["committed_id"] for one in (await again.sync(since=1))["events"]] == list(range(2, 12))


@pytest.mark.parametrize("seed", range(20))
def test_own_positions_above_the_forgotten_ones_are_known(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscriber, "RANGES_MAX", 8)
    chance = Random(seed)
    positions, added = OwnPositions(), set()
    newest = 0
    for _ in range(200):
        newest += chance.choice((1, 1, 1, 2, 3))
        position = newest if chance.random() < 0.7 else chance.randint(1, newest)
        positions.add(position)
        added.add(position)
        assert len(positions._firsts) == len(positions._lasts) <= 8
        for number in range(positions.known_after + 1, newest + 2):
            assert (number in positions) == (number in added), (number, positions.known_after)
    assert positions.known_after > 0


# --- the reply queue -----------------------------------------------------------------------------------


class OrderWire:
    """Stores the written texts."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def write(self, data: bytes) -> None:
        self.texts += [text.decode() for text in texts_of(data)]

    def count_buffered_bytes(self) -> int:
        return 0

    async def drain(self) -> None:
        pass

    def close(self, code: int, reason: str) -> None:
        pass

    def abort(self) -> None:
        pass


class RandomReplies:
    """Settles, places, moves and sends replies in random order, with other frames in between."""

    def __init__(self, seed: int) -> None:
        self.chance = Random(seed)
        self.wire = OrderWire()
        self.outbox = SendQueue(self.wire, ApiLimits(), Counts(), lambda: None, dict)
        self.queue = ReplyQueue(self.outbox, lambda _: None)
        self.waiting: list[Reply] = []
        self.asked = self.others = 0

    def act(self) -> None:
        match self.chance.randrange(7):
            case 0 | 1:
                self.ask()
            case 2:
                self.asked += 1
                self.queue.send(encode_frame(f"r{self.asked}".encode()))
            case 3 if self.waiting:
                self.place(self.chance.choice(self.waiting))
            case 4 if self.waiting:
                self.settle(self.chance.choice(self.waiting))
            case 5:
                self.others += 1
                self.outbox.put(encode_frame(f"b{self.others}".encode()))
            case _:
                self.outbox.flush()

    def ask(self) -> None:
        self.asked += 1
        reply = Reply(self.queue)
        reply.frame = encode_frame(f"r{self.asked}".encode())
        self.queue.append(reply)
        self.waiting.append(reply)

    def place(self, reply: Reply) -> None:
        if reply.is_placed:
            self.queue.unplace(reply)
        self.queue.place(reply)

    def settle(self, reply: Reply) -> None:
        self.waiting.remove(reply)
        self.queue.mark_ready(reply)
        if not reply.is_placed:
            self.chance.choice((self.queue.place_after_previous, self.queue.place))(reply)


@pytest.mark.rule("EV-8")
@pytest.mark.parametrize("seed", range(60))
async def test_replies_are_sent_in_order_regardless_of_when_they_settle(seed: int) -> None:
    replies = RandomReplies(seed)
    for _ in range(120):
        replies.act()
    for reply in list(replies.waiting):
        replies.settle(reply)
    replies.outbox.flush()
    await replies.queue.wait_empty()
    texts = replies.wire.texts
    assert [text for text in texts if text[0] == "r"] == [f"r{number + 1}" for number in range(replies.asked)]
    assert [text for text in texts if text[0] == "b"] == [f"b{number + 1}" for number in range(replies.others)]
    assert (replies.queue.count, replies.outbox.frames, replies.outbox.bytes) == (0, [], 0)
