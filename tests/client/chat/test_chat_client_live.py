"""The chat client against a real server, with clients in one process and in several."""

import asyncio
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest

from cli.server_process import ServerProcess, server_process
from client.chat.chat_clients import (
    HERE,
    SHORT,
    UNREACHABLE_URL,
    client_of,
    contents,
    expect_committed,
    send_message,
    take,
    wait_for_messages,
    wait_for_update,
)
from databases import BOTH_STORES
from deadlines import soon
from oncelog.client.chat import (
    EXPIRED,
    MEMBER,
    OWNER,
    Arrived,
    ChatClient,
    ChatLimits,
    ConnectionState,
    Delivery,
    Mark,
    Membership,
    Message,
    Progress,
    Refused,
)
from oncelog.errors import (
    ClosedError,
    HistoryChangedError,
    IdReusedError,
    LimitExceededError,
    LostError,
    ServerRefusedError,
)
from oncelog.testing.clock import ManualClock
from oncelog.testing.proxy import Faults, FaultyProxy, Incident
from scripts import read_line, run_until_killed, start_script
from server.running_server import api_key, serving

DAY_MS = 86_400_000
FAULTS = Faults(cut_rate=0.05, stall_rate=0.003, stall_ms_max=100, answer_ms_max=100)


# --- two users


@BOTH_STORES
@pytest.mark.rule("CH-12")
async def test_messages_of_one_user_reach_the_other(tmp_path: Path) -> None:
    async with (
        serving(tmp_path) as served,
        client_of(served.url, "ann", tmp_path / "ann.db") as ann,
        client_of(served.url, "bob", tmp_path / "bob.db") as bob,
    ):
        await soon(bob.until_live())
        updates = bob.updates()
        made = await ann.create("tea", members=["user:bob"])
        assert {one.user_id for one in made.members} == {"user:ann", "user:bob"}
        await wait_for_update(updates, Membership("tea", "user:bob", present=True, role=MEMBER))
        pending = await ann.send("tea", "hello")
        outcome = expect_committed(await soon(pending.outcome()))
        assert (outcome.sequence, outcome.duplicate, pending.result) == (1, False, outcome)
        theirs, mine = bob.messages("tea"), ann.messages("tea")
        (message,) = await take(theirs, 1)
        assert (message.sequence, message.sender_id, message.content) == (1, "user:ann", "hello")
        assert (message.message_id, message.created_at) == (outcome.message_id, outcome.created_at)
        assert await take(mine, 1) == [message]
        await send_message(bob, "tea", "hi")
        assert contents(await take(mine, 1)) == contents(await take(theirs, 1)) == ["hi"]
        assert await soon(pending.delivered()) == outcome
        assert (await ann.watermarks("tea"))["user:bob"] == 1
        assert [one.mark for one in await ann.lines("tea")] == [Mark.DELIVERED, Mark.SENT]
        assert [one.complete_to for one in ann.chats()] == [2]
        assert ann.status().state is ConnectionState.LIVE
        assert (ann.status().user_id, ann.status().pending, ann.status().last_error) == ("user:ann", 0, None)
    with pytest.raises(StopAsyncIteration):
        await anext(theirs)
    with pytest.raises(ClosedError):
        await ann.send("tea", "late")
    assert ann.status().state is ConnectionState.CLOSED


@pytest.mark.rule("CH-12")
async def test_updates_report_progress_arrival_delivery_and_membership(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, client_of(served.url) as ann, client_of(served.url, "bob") as bob:
        await ann.create("tea", members=["user:bob"])
        await soon(ann.until_live())
        updates = ann.updates()
        pending = await ann.send("tea", "hello")
        outcome = expect_committed(await soon(pending.outcome()))
        await wait_for_update(updates, Progress("tea", pending.client_message_id, outcome))
        await wait_for_update(updates, Arrived("tea", 1))
        theirs = bob.messages()
        await take(theirs, 1)
        next_one = asyncio.create_task(anext(theirs))
        await wait_for_update(updates, Delivery("tea", "user:bob", 1))
        await bob.remove_member("tea", "user:bob")
        await wait_for_update(updates, Membership("tea", "user:bob", present=False))
        assert not bob.chats()[0].is_member
        assert (await ann.watermarks("tea")).keys() == {"user:ann"}
        next_one.cancel()


def _has_message(client: ChatClient) -> bool:
    return any(chat.complete_to == 1 for chat in client.chats())


@pytest.mark.rule("CH-12")
async def test_message_is_marked_delivered_when_all_members_have_it(tmp_path: Path) -> None:
    async with (
        serving(tmp_path) as served,
        client_of(served.url) as ann,
        client_of(served.url, "bob") as bob,
        client_of(served.url, "carl") as carl,
    ):
        await ann.create("tea", members=["user:bob", "user:carl"])
        pending = await ann.send("tea", "hello")
        await soon(pending.outcome())
        updates, delivered = ann.updates(), asyncio.create_task(pending.delivered())
        for other in (bob, carl):
            await soon(other.until_status(lambda _, other=other: _has_message(other)))  # type: ignore[misc]
            await soon(other.until_live())
            assert not delivered.done()
            assert [one.mark for one in await ann.lines("tea")] == [Mark.SENT]
            other.received("tea", 1)
            await wait_for_update(updates, Delivery("tea", other.status().user_id, 1))
        await soon(delivered)
        assert [one.mark for one in await ann.lines("tea")] == [Mark.DELIVERED]
        for present, change in ((False, ann.remove_member), (True, ann.add_member)):  # carl leaves and joins again
            await change("tea", "user:carl")
            await wait_for_update(updates, Membership("tea", "user:carl", present, MEMBER if present else None))
        assert (await ann.watermarks("tea"))["user:carl"] == 1
        assert [one.mark for one in await ann.lines("tea")] == [Mark.DELIVERED]


@BOTH_STORES
@pytest.mark.rule("CH-19")
async def test_owner_appoints_owners_and_plain_member_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, client_of(served.url) as ann, client_of(served.url, "bob") as bob:
        await soon(ann.until_live())
        await soon(bob.until_live())
        mine, theirs = ann.updates(), bob.updates()
        made = await ann.create("tea", members=["user:bob"])
        assert {one.user_id: one.role for one in made.members} == {"user:ann": OWNER, "user:bob": MEMBER}
        await wait_for_update(theirs, Membership("tea", "user:bob", present=True, role=MEMBER))
        for change in (
            bob.add_member("tea", "user:carl"),
            bob.remove_member("tea", "user:ann"),
            bob.set_role("tea", "user:bob", OWNER),
        ):
            with pytest.raises(ServerRefusedError, match="NOT_AN_OWNER"):
                await change
        with pytest.raises(ServerRefusedError, match="LAST_OWNER"):
            await ann.set_role("tea", "user:ann", MEMBER)
        with pytest.raises(ServerRefusedError, match="NOT_A_MEMBER"):
            await ann.set_role("tea", "user:carl", OWNER)
        await ann.set_role("tea", "user:bob", OWNER)
        await wait_for_update(theirs, Membership("tea", "user:bob", present=True, role=OWNER))
        await wait_for_update(mine, Membership("tea", "user:bob", present=True, role=OWNER))
        assert [one.role for one in bob.chats()] == [OWNER]
        await bob.add_member("tea", "user:carl", role=OWNER)
        await bob.set_role("tea", "user:ann", MEMBER)
        await wait_for_update(mine, Membership("tea", "user:ann", present=True, role=MEMBER))
        found = await ann.details("tea")
        assert {one.user_id: one.role for one in found.members} == {
            "user:ann": MEMBER,
            "user:bob": OWNER,
            "user:carl": OWNER,
        }


@pytest.mark.rule("CH-7")
@pytest.mark.rule("CH-12")
async def test_devices_of_one_user_get_the_same_messages(tmp_path: Path) -> None:
    async with (
        serving(tmp_path) as served,
        client_of(served.url, path=tmp_path / "phone.db", device_id="phone") as phone,
        client_of(served.url, path=tmp_path / "desk.db", device_id="desk") as desk,
    ):
        await phone.create("tea")
        for number in range(5):
            await send_message(phone if number % 2 else desk, "tea", str(number))
        for device in (phone, desk):
            assert contents(await wait_for_messages(device, "tea", 5)) == list("01234")
        stream = phone.messages("tea")
        await take(stream, 4)
        # A message received on one device counts as received by the user, but each device continues at its own
        # position.
        assert phone.chats()[0].received_to == 3
        assert contents(await take(desk.messages("tea"), 1)) == ["0"]
        updates = desk.updates()
        await take(stream, 1)
        await wait_for_update(updates, Delivery("tea", "user:ann", 4))


# --- offline


@BOTH_STORES
@pytest.mark.rule("CH-12")
async def test_offline_messages_are_sent_after_the_sync(tmp_path: Path) -> None:
    path = tmp_path / "ann.db"
    async with serving(tmp_path) as served, client_of(served.url, "bob") as bob:
        await bob.create("tea", members=["user:ann"])
        async with client_of(served.url, path=path) as ann:
            await soon(ann.until_live())
            await send_message(ann, "tea", "first")
        for number in range(7):
            await send_message(bob, "tea", str(number))
        async with client_of(UNREACHABLE_URL, path=path) as ann:
            pending = [await ann.send("tea", f"offline {number}") for number in range(3)]
            lines = await ann.lines("tea")
            assert [one.mark for one in lines] == [Mark.SENT, *[Mark.PENDING] * 3]
            status = await soon(ann.until_status(lambda status: status.last_error is not None))
            assert (status.state, status.pending) == (ConnectionState.OFFLINE, 3)
            with pytest.raises(LostError):
                await ann.history("tea")
        limits = ChatLimits(**SHORT, page_messages=2)
        async with client_of(served.url, path=path, limits=limits) as ann:
            assert [one.client_message_id for one in ann.pending()] == [one.client_message_id for one in pending]
            await soon(ann.until_settled())
            expected = ["first", *map(str, range(7)), *(f"offline {number}" for number in range(3))]
            assert contents(await wait_for_messages(ann, "tea", len(expected))) == expected
            assert contents(await wait_for_messages(bob, "tea", len(expected))) == expected
            assert contents(await ann.history("tea", before=3)) == expected[:2]
            assert contents(await ann.history("tea", after=9)) == expected[9:]


@pytest.mark.rule("CH-12")
async def test_reader_continues_after_the_received_messages(tmp_path: Path) -> None:
    path = tmp_path / "bob.db"
    async with serving(tmp_path) as served, client_of(served.url) as ann:
        await ann.create("tea", members=["user:bob"])
        pending = [await ann.send("tea", str(number)) for number in range(6)]
        last = pending[-1]
        await soon(last.outcome())
        async with client_of(served.url, "bob", path) as bob:
            assert contents(await take(bob.messages("tea"), 3)) == ["0", "1", "2"]
        async with client_of(UNREACHABLE_URL, "bob", path) as bob:  # reads from its store
            stream = bob.messages("tea")
            assert contents(await take(stream, 2)) == ["2", "3"], "a new reader repeats the last message"
            await stream.aclose()
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
            bob.received("tea", 100)
        async with client_of(served.url, "bob", path) as bob:
            await soon(bob.until_live())
            assert bob.chats()[0].received_to == 6
            await soon(last.delivered())
            assert (await ann.watermarks("tea"))["user:bob"] == 6
            await bob.forget_messages("tea", 4)
            assert contents(await take(bob.messages("tea", after=0), 2)) == ["4", "5"]


# --- refusals


@pytest.mark.rule("CH-12")
async def test_refused_messages_are_kept_and_can_be_sent_again(tmp_path: Path) -> None:
    path = tmp_path / "ann.db"
    async with serving(tmp_path, message_bytes_max=100) as served, client_of(served.url, "bob") as bob:
        await bob.create("tea")
        async with client_of(served.url, path=path) as ann:
            stranger = await ann.send("tea", "hello")
            outcome = await soon(stranger.outcome())
            assert isinstance(outcome, Refused)
            assert (outcome.code, outcome.was_tried) == ("NOT_A_MEMBER", False)
            assert await soon(stranger.delivered()) == outcome
            await ann.create("mine")
            long = await soon((await ann.send("mine", "x" * 101)).outcome())
            assert isinstance(long, Refused)
            assert long.code == "MESSAGE_TOO_LARGE"
            await send_message(ann, "mine", "the next one goes")
            with pytest.raises(ServerRefusedError, match="NOT_A_MEMBER"):
                await ann.details("tea")
            assert ann.status().refused == 2
        async with client_of(served.url, path=path) as ann:
            assert [one.outcome.code for one in ann.refused()] == ["NOT_A_MEMBER", "MESSAGE_TOO_LARGE"]
            assert [one.mark for one in await ann.lines("tea")] == [Mark.REFUSED]
            await bob.add_member("tea", "user:ann")
            await soon(ann.until_status(lambda _: any(one.chat_id == "tea" for one in ann.chats())))
            again = await ann.send_again(stranger.client_message_id)
            assert expect_committed(await soon(again.outcome())).sequence == 1
            await ann.forget_refused()
            assert ann.refused() == []
            assert contents(await wait_for_messages(bob, "tea", 1)) == ["hello"]


@pytest.mark.rule("CH-12")
async def test_rate_limited_messages_are_sent_in_order(tmp_path: Path) -> None:
    clock = ManualClock()
    async with (
        serving(tmp_path, clock=clock, user_messages_per_second_max=50) as served,
        client_of(served.url) as ann,
    ):
        await ann.create("tea")
        pending = [await ann.send("tea", str(number)) for number in range(80)]
        await soon(ann.until_status(lambda status: "RATE_LIMITED" in str(status.last_error)))
        clock.advance(1000)
        outcomes = [expect_committed(await soon(one.outcome())) for one in pending]
        assert [one.sequence for one in outcomes] == list(range(1, 81))
        assert contents(await wait_for_messages(ann, "tea", 80)) == [str(number) for number in range(80)]


@pytest.mark.rule("CH-5")
@pytest.mark.rule("CH-12")
async def test_message_older_than_the_id_retention_is_refused_as_expired(tmp_path: Path) -> None:
    path = tmp_path / "ann.db"
    ago = 0

    def wall_ms() -> int:
        return 1_800_000_000_000 - ago

    async with serving(tmp_path) as served:
        async with client_of(served.url, path=path) as ann:
            await ann.create("tea")
            await send_message(ann, "tea", "first")
        ago = 7 * DAY_MS
        async with client_of(UNREACHABLE_URL, path=path, wall_ms=wall_ms) as ann:
            old = await ann.send("tea", "a week ago")
            ago = 6 * DAY_MS
            await ann.send("tea", "yesterday")
        ago = 0
        async with client_of(served.url, path=path, wall_ms=wall_ms) as ann:
            await soon(ann.until_settled())
            (refused,) = ann.refused()
            assert (refused.client_message_id, refused.outcome.code) == (old.client_message_id, EXPIRED)
            assert contents(await wait_for_messages(ann, "tea", 2)) == ["first", "yesterday"]
            again = await ann.send_again(old.client_message_id)
            assert expect_committed(await soon(again.outcome())).sequence == 3


async def test_reused_id_and_full_outbox_are_refused() -> None:
    limits = ChatLimits(outbox_messages_max=2)
    async with client_of(UNREACHABLE_URL, limits=limits) as ann:
        name = "0d6d3b8e-3c43-4d3c-9d3c-6a5c1a2b3c4d"
        first = await ann.send("tea", "hello", client_message_id=name)
        assert await ann.send("tea", "hello", client_message_id=name.upper()) is first
        with pytest.raises(IdReusedError):
            await ann.send("tea", "other", client_message_id=name)
        await ann.send("other", "ids are unique in a chat", client_message_id=name)
        with pytest.raises(LimitExceededError, match="outbox_messages_max"):
            await ann.send("tea", "more")


@pytest.mark.rule("CH-4")
@pytest.mark.rule("CH-12")
async def test_reused_id_with_different_content_is_reported_as_mismatch(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, client_of(served.url) as ann, client_of(served.url, "bob") as bob:
        await ann.create("tea", members=["user:bob"])
        first = await ann.send("tea", "hello")
        await soon(first.outcome())
        other = await bob.send("tea", "not that", client_message_id=first.client_message_id)
        outcome = expect_committed(await soon(other.outcome()))
        assert (outcome.sequence, outcome.duplicate, outcome.content_mismatch) == (1, True, True)
        assert contents(await wait_for_messages(bob, "tea", 1)) == ["hello"]


async def test_refused_credentials_are_reported_and_retried(tmp_path: Path) -> None:
    async with serving(tmp_path, api_keys=True) as served:
        token = "wrong"  # noqa: S105
        async with client_of(served.url, path=tmp_path / "ann.db", token=lambda: token) as ann:
            status = await soon(ann.until_status(lambda status: status.state is ConnectionState.REFUSED))
            assert "AUTH_FAILED" in str(status.last_error)
            token = api_key(served, "ann", read=["chat/tea"], write=["chat/tea"]).text
            await soon(ann.until_live())
            assert ann.status().user_id == "client:ann"
        token = api_key(served, "bob").text
        async with client_of(served.url, path=tmp_path / "ann.db", token=token) as bob:
            status = await soon(bob.until_status(lambda status: status.state is ConnectionState.REFUSED))
            assert "'client:ann'" in str(status.last_error)


# --- history changes


@BOTH_STORES
@pytest.mark.rule("CH-12")
async def test_changed_history_resets_the_messages_and_keeps_the_outbox(tmp_path: Path) -> None:
    path = tmp_path / "ann.db"
    async with serving(tmp_path) as served, client_of(served.url, path=path) as ann:
        await ann.create("tea")
        for number in range(3):
            await send_message(ann, "tea", str(number))
        await take(ann.messages("tea"), 3)
    async with client_of(UNREACHABLE_URL, path=path) as ann:
        await ann.send("tea", "mine")
    other = tmp_path / "other"
    other.mkdir()
    async with serving(other) as served, client_of(served.url, "bob") as bob:
        await bob.create("tea", members=["user:ann"])
        await send_message(bob, "tea", "new")
        async with client_of(served.url, path=path) as ann:
            stream = ann.messages("tea")
            known = ann.status().epoch
            with pytest.raises(HistoryChangedError):
                await take(stream, 2)
            await soon(ann.until_settled())
            change = ann.status().history_change
            assert change is not None
            assert (change.known_epoch, change.epoch) == (known, ann.status().epoch)
            assert contents(await take(ann.messages("tea"), 2)) == ["new", "mine"]


# --- killed processes


@BOTH_STORES
@pytest.mark.rule("CH-12")
@pytest.mark.rule("CH-14")
@pytest.mark.parametrize("moment", ["unsent", "unanswered"])
async def test_killed_client_sends_again_under_the_same_ids(tmp_path: Path, moment: str) -> None:
    path = tmp_path / "ann.db"
    async with serving(tmp_path) as served:
        async with client_of(served.url, "bob") as bob:
            await bob.create("tea", members=["user:ann"])
        await asyncio.to_thread(run_until_killed, HERE / "chat_client_worker.py", served.url, path, moment, 5)
        async with client_of(UNREACHABLE_URL, path=path) as ann:
            assert len(ann.pending()) == 5
        async with client_of(served.url, path=path) as ann, client_of(served.url, "bob") as bob:
            await soon(ann.until_settled())
            assert contents(await wait_for_messages(ann, "tea", 5)) == list("01234")
            assert contents(await wait_for_messages(bob, "tea", 5)) == list("01234")


def send_and_kill(server: ServerProcess, directory: Path, number: int) -> set[str]:
    """Kill the server and then three sending devices. Return the messages that the devices have reported as stored."""
    reported = set[str]()
    with ExitStack() as stack:
        devices = (("ann", "ann-phone", f"{number}p"), ("ann", "ann-desk", f"{number}d"), ("bob", "bob", f"{number}"))
        workers = [
            stack.enter_context(
                start_script(HERE / "chat_storm_worker.py", server.url, directory / f"{name}.db", user, turn)
            )
            for user, name, turn in devices
        ]
        reported |= {read_line(worker) for _ in range(15) for worker in workers}
        server.kill()
        reported |= {read_line(worker) for _ in range(5) for worker in workers}
        for worker in workers:
            worker.kill()
            assert worker.stdout is not None
            reported |= {line for line in worker.stdout.read().split("\n")[:-1] if line}
    assert "" not in reported
    return reported


async def wait_until_converged(*clients: ChatClient) -> list[Message]:
    """Wait until all clients have the same messages, and return them."""
    for one in clients:
        await soon(one.until_settled())
    (last,) = await clients[0].history("tea", limit=1)
    for one in clients:
        await soon(one.until_status(lambda _, one=one: one.chats()[0].complete_to >= last.sequence))  # type: ignore[misc]
    found = [await wait_for_messages(one, "tea", last.sequence) for one in clients]
    assert all(one == found[0] for one in found)
    assert [one.sequence for one in found[0]] == list(range(1, len(found[0]) + 1))
    return found[0]


@BOTH_STORES
@pytest.mark.rule("CH-12")
@pytest.mark.rule("CH-14")
async def test_clients_and_server_converge_after_repeated_kills(tmp_path: Path) -> None:
    reported = set[str]()
    async with server_process(tmp_path) as server:
        url = server.url
        async with client_of(url) as ann:
            await ann.create("tea", members=["user:bob"])
        for number in range(2):
            reported |= send_and_kill(server, tmp_path, number)
            server.start()
        async with (
            client_of(url, "ann", tmp_path / "ann-phone.db") as phone,
            client_of(url, "ann", tmp_path / "ann-desk.db") as desk,
            client_of(url, "bob", tmp_path / "bob.db") as bob,
            client_of(url, "bob") as new,
        ):
            found = await wait_until_converged(phone, desk, bob, new)
    count = Counter(one.content for one in found)
    assert set(count.values()) == {1}
    assert reported <= count.keys()
    for turn in ("ann:0p", "ann:0d", "bob:1"):  # each device's messages keep their order
        own = [str(one.content) for one in found if str(one.content).startswith(f"{turn}:")]
        assert own == sorted(own)


# --- faulty network


def has_enough_faults(proxy: FaultyProxy) -> bool:
    cuts = sum(proxy.done[one] for one in Incident if one.startswith("cut"))
    return cuts > 5 and proxy.done[Incident.DUPLICATED] > 0


@BOTH_STORES
@pytest.mark.rule("CH-7")
@pytest.mark.rule("CH-12")
@pytest.mark.parametrize("seed", range(3))
async def test_devices_converge_over_a_faulty_network(tmp_path: Path, seed: int) -> None:
    print(f"seed {seed}")  # noqa: T201 - pytest shows it where the test fails
    limits = ChatLimits(**SHORT, page_messages=3, answer_timeout_ms=60_000, connect_timeout_ms=60_000)
    async with serving(tmp_path) as served:
        port = served.port
        async with client_of(served.url) as ann:
            await ann.create("tea", members=["user:bob"])
        async with FaultyProxy("127.0.0.1", port, seed=seed, faults=FAULTS) as proxy:

            def open_client(user: str, name: str) -> ChatClient:
                return client_of(proxy.url, user, tmp_path / f"{name}.db", limits=limits)

            async def send_all(user: str, name: str) -> None:
                for turn in range(2):
                    async with open_client(user, name) as client:
                        for number in range(25):
                            pending = await client.send("tea", f"{name} {turn} {number:02}")
                            if number % 5 == 0:
                                expect_committed(await soon(pending.outcome()))

            await asyncio.gather(send_all("ann", "phone"), send_all("ann", "desk"), send_all("bob", "bob"))
            extra = 0
            async with open_client("bob", "bob") as bob:
                while not has_enough_faults(proxy):
                    expect_committed(await soon((await bob.send("tea", f"extra {extra}")).outcome()))
                    extra += 1
            proxy.calm()
            async with (
                open_client("ann", "phone") as phone,
                open_client("ann", "desk") as desk,
                open_client("bob", "bob") as bob,
            ):
                found = await wait_until_converged(phone, desk, bob)
                assert len(found) == 150 + extra
                for name in ("phone", "desk", "bob"):
                    own = [str(one.content) for one in found if str(one.content).startswith(name)]
                    assert own == [f"{name} {turn} {number:02}" for turn in range(2) for number in range(25)]
