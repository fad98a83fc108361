"""Sessions of the Events API: sync pages, cursors and scopes."""

import pytest

from oncelog.core.limits import PARTITIONS_MAX
from oncelog.server.auth.principal import parse_grants
from oncelog.server.events.subscriber import SubscriptionMode
from server.events.event_sessions import Tokens, code_of, item, numbers, session_server, uuid


@pytest.mark.rule("EV-11", "EV-6")
async def test_sync_page_has_each_event_of_all_partitions_once_in_order() -> None:
    async with session_server() as server:
        peer = await server.connect()
        await peer.submit(item(1, "a"), item(2, "b"), item(3, "a", "b"), item(4, "c"), item(5, "caf\u00e9"))
        page = await peer.sync("b", "a", "b")
        assert page["partitions"] == ["a", "b"]
        assert numbers(page) == [1, 2, 3]
        assert page["events"][2] == {
            "id": uuid(3),
            "client_id": "user:ada/client-ada",
            "actor": "user:ada",
            "partitions": ["a", "b"],
            "committed_id": 3,
            "event": {"type": "t", "n": 3},
            "status_updated_at": page["events"][2]["status_updated_at"],
        }
        assert page["epoch"] == server.log.epoch
        assert numbers(await peer.sync("b", "a", since=2)) == [3]
        assert numbers(await peer.sync("cafe\u0301")) == [5]


@pytest.mark.rule("EV-9", "EV-6")
async def test_duplicate_partitions_count_once() -> None:
    copies = ["caf\u00e9", "cafe\u0301"] * (PARTITIONS_MAX + 1)
    names = [f"p{number}" for number in range(PARTITIONS_MAX)]
    async with session_server() as server:
        peer = await server.connect()
        results = await peer.submit(item(1, *copies), item(2, *names, *names), item(3, *names, "more"))
        assert [one["status"] for one in results] == ["committed", "committed", "rejected"]
        assert results[2]["errors"] == [
            {"field": "partitions", "message": "must have 1 to 64 different entries, not 65"},
        ]
        page = await peer.sync(*copies)
        assert (page["partitions"], numbers(page)) == (["caf\u00e9"], [1])
        assert numbers(await peer.sync(*names, *names)) == [2]
        reply = await peer.request("sync", {"partitions": [*names, "more"], "since_committed_id": 0})
        assert code_of(reply) == "bad_request"
        assert reply["payload"]["message"].endswith("must have 1 to 64 different partitions, not 65")


@pytest.mark.rule("EV-11", "CO-30")
async def test_page_size_limit_is_clamped() -> None:
    async with session_server(page_events_default=2, page_events_max=3) as server:
        peer = await server.connect()
        await peer.submit(*(item(number) for number in range(1, 6)))
        for limit, count in ((None, 2), (-5, 1), (0, 1), (1, 1), (3, 3), (10**15, 3)):
            assert len((await peer.sync(limit=limit))["events"]) == count


@pytest.mark.rule("EV-11", "CO-22")
async def test_unreadable_partition_refuses_the_sync_and_keeps_the_previous_scope() -> None:
    tokens = Tokens()
    tokens.add("ada")
    tokens.add("eve", parse_grants(["public"]))
    async with session_server(tokens=tokens) as server:
        ada, eve = await server.connect("ada"), await server.connect("eve")
        await eve.sync("public")
        refused = [
            await eve.request("sync", {"partitions": [name, "public"], "since_committed_id": 0}) for name in "xy"
        ]
        for reply in refused:
            assert code_of(reply) == "forbidden"
        assert refused[0]["payload"] == refused[1]["payload"]
        await ada.submit(item(1, "public"), item(2, "x"))
        assert (await eve.wire.wait_for_messages(5))[-1]["payload"]["committed_id"] == 1


@pytest.mark.rule("CO-40", "EV-2")
async def test_cursor_of_another_history_is_refused_and_the_previous_scope_continues() -> None:
    async with session_server() as server:
        ada, bob = await server.connect("ada"), await server.connect("bob")
        await bob.sync("a")
        for asked in ({"since_committed_id": 0, "epoch": "another"}, {"since_committed_id": 99}):
            reply = await bob.request("sync", {"partitions": ["b"], **asked})
            assert code_of(reply) == "history_changed"
            assert reply["payload"]["details"] == {"epoch": server.log.epoch, "server_last_committed_id": 0}
        await ada.submit(item(1, "a"), item(2, "b"))
        await bob.wire.wait_for_messages(5)
        assert bob.received() == ["connected", "sync_response", "history_changed", "history_changed", 1]


@pytest.mark.rule("EV-12", "EV-13")
async def test_sync_cycle_has_a_fixed_bound_and_later_events_follow_it() -> None:
    async with session_server() as server:
        ada, bob = await server.connect("ada"), await server.connect("bob")
        await ada.submit(*(item(number) for number in range(1, 6)))
        page = await bob.sync(limit=2)
        seen = numbers(page)
        number = 5
        while page["has_more"]:
            assert page["sync_to_committed_id"] == 5
            number += 1
            await ada.submit(item(number), item(100 + number, "other"))
            page = await bob.sync(since=page["next_since_committed_id"], limit=2)
            seen += numbers(page)
        assert seen == [1, 2, 3, 4, 5]
        assert page["next_since_committed_id"] == page["sync_to_committed_id"] == 5
        await bob.wire.wait_for_messages(6)
        assert bob.received() == ["connected", *["sync_response"] * 3, 6, 8]
        assert bob.session.subscriber.mode is SubscriptionMode.LIVE


@pytest.mark.rule("EV-12")
async def test_cursor_advances_when_no_event_matches() -> None:
    async with session_server() as server:
        peer = await server.connect()
        await peer.submit(item(1), item(2))
        page = await peer.sync("empty")
        assert (page["events"], page["next_since_committed_id"], page["has_more"]) == ([], 2, False)


@pytest.mark.rule("EV-13")
async def test_sync_replaces_the_scope() -> None:
    async with session_server() as server:
        ada, bob = await server.connect("ada"), await server.connect("bob")
        await bob.sync("a")
        await ada.submit(item(1, "a"), item(2, "b"))
        await bob.sync("b", since=2)
        await ada.submit(item(3, "a"), item(4, "b"), item(5, "a", "b"))
        await bob.wire.wait_for_messages(6)
        assert bob.received() == ["connected", "sync_response", 1, "sync_response", 4, 5]
