"""Sessions of the Events API: slow, disconnected and concurrent readers."""

import random

import pytest
from aiohttp import WSCloseCode

from deadlines import turns, until
from engine.observable_store import do_nothing
from oncelog.errors import HistoryChangedError
from server.events.event_sessions import Peer, SessionServer, item, numbers, session_server, submissions

ANSWERS = ("connected", "submit_events_result", "error")
"""Pages are excluded, because pages of an open cycle overtake results that wait for its end."""


class Crowd:
    """Peers that submit, sync, page, pause and resume reading, in random order."""

    def __init__(self, server: SessionServer, peers: list[Peer], seed: int) -> None:
        self.server = server
        self.peers = peers
        self.chance = random.Random(seed)
        self.cursors = [0] * len(peers)
        self.begun = [False] * len(peers)
        self.ids = 0

    async def act(self) -> None:
        chance, index = self.chance, self.chance.randrange(len(self.peers))
        peer = self.peers[index]
        match chance.randrange(6):
            case 0 | 1 | 2:
                first = self.ids + 1
                self.ids += chance.randint(1, 3)
                numbers = [*range(first, self.ids + 1)]
                if first > 1 and chance.random() < 0.4:  # a retry, or an event that another peer has sent
                    numbers.insert(chance.randrange(len(numbers) + 1), chance.randrange(max(1, first - 6), first))
                await peer.send("submit_events", {"events": [item(one, "ab"[one % 2]) for one in numbers]})
            case 3 if not peer.wire.is_stuck and self.is_paging(index):
                await self.page(index, chance.randint(1, 3))
            case 3:
                await peer.send("unknown", {})
            case 4:
                peer.wire.is_stuck = not peer.wire.is_stuck
                if not peer.wire.is_stuck:
                    peer.wire.unstick()
            case _:
                await turns(chance.randrange(6))

    async def end(self) -> None:
        """Make all peers read to the end, and check with one more event that all are up to date."""
        for index, peer in enumerate(self.peers):
            peer.wire.unstick()
            while self.is_paging(index):
                await self.page(index, 2)
        (last,) = await self.peers[0].submit(item(10**6, "a"))
        for peer in self.peers[1:]:
            while peer.received()[-1] != last["committed_id"]:
                await turns(1)

    def is_paging(self, index: int) -> bool:
        return not self.begun[index] or self.peers[index].session.subscriber.is_paging

    async def page(self, index: int, limit: int) -> None:
        page = await self.peers[index].sync("a", since=self.cursors[index], limit=limit)
        self.cursors[index], self.begun[index] = page["next_since_committed_id"], True


@pytest.mark.rule("EV-12", "EV-13", "EV-14", "CO-13")
@pytest.mark.parametrize("seed", range(40))
async def test_every_reader_gets_each_event_once_and_in_order(seed: int) -> None:
    async with session_server(engine={"poll_ms": 600_000}, outbox_frames_max=10**6) as server:
        peers = [await server.connect(name) for name in ("ada", "ada", "bob", "cyd")]
        crowd = Crowd(server, peers, seed)
        for _ in range(60):
            await crowd.act()
        await crowd.end()
        everything = {record.position for record in (await server.log.read(partition="a", limit=1000)).records}
        for peer in peers:
            check(peer, everything)


@pytest.mark.rule("EV-8", "CO-32")
@pytest.mark.parametrize("seed", range(20))
async def test_replies_keep_their_order_when_the_queue_is_full_and_other_processes_commit(seed: int) -> None:
    async with session_server(engine={"queue_items_max": 3}, cycle_idle_ms=1, outbox_frames_max=10**6) as server:
        peers = [await server.connect(name) for name in ("ada", "ada", "bob", "cyd")]
        crowd = Crowd(server, peers, seed)
        for _ in range(80):
            await crowd.act()
            if crowd.ids and crowd.chance.random() < 0.1:
                number = crowd.chance.randint(max(1, crowd.ids - 3), crowd.ids)
                await server.log.commit_elsewhere(*submissions(item(number, "ab"[number % 2])))
        for peer in peers:
            peer.wire.unstick()
            sent = await peer.send("unknown", {})
            await peer.reply(sent)
            requests = [int(one["msg_id"].split("-")[1]) for one in peer.messages if one["type"] in ANSWERS]
            assert requests == sorted(requests)


def _retried(peer: Peer) -> set[int]:
    """Return the committed ids of retries. They may also be broadcast, because another peer may have committed them."""
    return {
        one["committed_id"]
        for message in peer.messages
        if message["type"] == "submit_events_result" and len(message["payload"]["results"]) > 1
        for one in message["payload"]["results"]
    }


def check(peer: Peer, everything: set[int]) -> None:
    """Check that a peer got each event of the partition once and in order, by page, broadcast or its own result."""
    requests = [int(one["msg_id"].split("-")[1]) for one in peer.messages if one["type"] in ANSWERS]
    assert requests == sorted(requests), "replies are sent in the order of their requests"
    paged: list[int] = []
    live: list[int] = []
    own: set[int] = set()
    newest = 0
    for message in peer.messages:
        payload = message["payload"]
        match message["type"]:
            case "sync_response":
                assert not live
                paged += numbers(payload)
            case "event_broadcast":
                assert payload["committed_id"] > newest, peer.received()
                newest = payload["committed_id"]
                live.append(newest)
            case "submit_events_result":
                committed = [one["committed_id"] for one in payload["results"]]
                own.update(committed)
                if live:
                    newest = max(newest, *committed)  # later broadcasts must have higher ids
    assert paged == sorted(set(paged))
    assert not set(live) & set(paged)
    assert not set(live) & (own - _retried(peer))
    assert set(paged) | set(live) | (own & everything) == everything, peer.received()


# --- slow readers ------------------------------------------------------------------------------------


@pytest.mark.rule("CO-31", "CO-30")
async def test_slow_reader_is_logged_then_closed_without_delaying_others(caplog: pytest.LogCaptureFixture) -> None:
    async with session_server(outbox_frames_max=10) as server:
        ada, slow, bob = await server.connect("ada"), await server.connect("cyd"), await server.connect("bob")
        await slow.sync()
        await bob.sync()
        slow.wire.is_stuck = True
        for number in range(1, 7):
            await ada.submit(item(number))
        assert server.counts.slow_readers_warned == 1
        assert server.counts.slow_readers_closed == 0
        for number in range(7, 12):
            await ada.submit(item(number))
        assert slow.wire.is_aborted
        assert server.counts.slow_readers_closed == 1
        slow.session.on_disconnect()
        await bob.wire.wait_for_messages(13)
        assert bob.received()[2:] == list(range(1, 12))
        again = await server.connect("cyd")
        assert numbers(await again.sync(since=0)) == list(range(1, 12))
        assert "a reader is slow" in caplog.text
        assert "a slow reader is closed" in caplog.text


@pytest.mark.rule("CO-31")
async def test_slow_reader_that_recovers_gets_its_queue_in_one_write() -> None:
    async with session_server(outbox_frames_max=10) as server:
        ada, slow = await server.connect("ada"), await server.connect("cyd")
        await slow.sync()
        slow.wire.is_stuck = True
        for number in range(1, 8):
            await ada.submit(item(number))
        writes = slow.wire.writes
        slow.wire.unstick()
        await slow.wire.wait_for_messages(9)
        assert slow.received()[2:] == list(range(1, 8))
        assert slow.wire.writes == writes + 1
        assert slow.wire.closed_with is None


@pytest.mark.rule("CO-16")
async def test_unreadable_log_closes_all_sessions() -> None:
    async with session_server(engine={"poll_ms": 600_000}) as server:
        idle, live = await server.connect("ada"), await server.connect("bob")
        await live.sync("a")

        async def fail_read(_: object) -> None:
            raise HistoryChangedError("another file", "e", 0)

        server.log.store.before_read = fail_read
        await server.log.commit_elsewhere(*submissions(item(7)))
        await idle.send("submit_events", {"events": [item(8)]})
        await until(lambda: idle.wire.closed_with is not None and live.wire.closed_with is not None)
        assert idle.wire.closed_with == live.wire.closed_with == (WSCloseCode.INTERNAL_ERROR, "server_error")
        assert server.hub._pending_replies == {}
        server.log.store.before_read = do_nothing
        server.hub.position = await server.log.listen(server.hub)
        back = await server.connect("cyd")
        assert (await back.submit(item(8)))[0]["committed_id"] == 2
        assert (await back.submit(item(9)))[0]["committed_id"] == 3


async def test_closed_session_leaves_no_state() -> None:
    async with session_server() as server:
        ada, bob = await server.connect("ada"), await server.connect("bob")
        await ada.sync("a", "b")
        server.log.hold_commits()
        await ada.send("submit_events", {"events": [item(1)]})
        ada.session.on_disconnect()
        server.log.gate.open()
        await bob.sync("a")
        await until(lambda: server.hub.position == 1 and server.hub._pending_replies == {})
        assert set(server.hub._live) == {"a"}
        assert ada.session.send_queue.frames == []
