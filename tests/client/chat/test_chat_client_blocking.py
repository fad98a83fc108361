"""The blocking chat client, used from threads."""

import inspect
import threading
from pathlib import Path

import pytest

from cli.server_process import serving
from client.chat.chat_clients import LIMITS, UNREACHABLE_URL
from deadlines import WAIT_S
from oncelog.client.chat import MEMBER, OWNER, BlockingChatClient, ChatClient, ConnectionState, Mark, Sent
from oncelog.errors import ClosedError

ANN, BOB = "ann", "bob"


@pytest.mark.rule("CH-12")
def test_two_blocking_clients_exchange_messages(tmp_path: Path) -> None:
    with (
        serving(tmp_path) as server,
        BlockingChatClient(server.url, path=tmp_path / "ann.db", token=ANN, limits=LIMITS) as ann,
        BlockingChatClient(server.url, path=tmp_path / "bob.db", token=BOB, limits=LIMITS) as bob,
    ):
        made = ann.create("tea", members=["user:bob"])
        assert [one.user_id for one in ann.details("tea").members] == [one.user_id for one in made.members]
        told = bob.updates()
        threads = [threading.Thread(target=ann.send, args=("tea", f"from a thread {number}")) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        ann.until_settled(WAIT_S)
        pending = ann.send("tea", "hello")
        outcome = pending.outcome(timeout_s=WAIT_S)
        assert isinstance(outcome, Sent)
        assert (pending.chat_id, pending.content, pending.content_type) == ("tea", "hello", "text/plain")
        assert pending.result == outcome
        received = []
        for message in bob.messages("tea"):
            received.append(message)
            if len(received) == 5:
                break
        assert [one.sequence for one in received] == [1, 2, 3, 4, 5]
        assert next(told) is not None
        bob.received("tea", 5)
        assert pending.delivered(timeout_s=WAIT_S) == outcome
        assert ann.watermarks("tea")["user:bob"] == 5
        assert [one.mark for one in ann.lines("tea")] == [Mark.DELIVERED] * 5
        assert len(ann.history("tea", limit=2)) == 2
        ann.add_member("tea", "user:carl", role=MEMBER)
        ann.set_role("tea", "user:carl", OWNER)
        assert {one.user_id: one.role for one in ann.details("tea").members} == {
            "user:ann": OWNER,
            "user:bob": MEMBER,
            "user:carl": OWNER,
        }
        ann.remove_member("tea", "user:carl")
        bob.forget_messages("tea", 3)
        assert len(bob.lines("tea")) == 2
        stranger = bob.send("other", "hello")
        refused = stranger.outcome(WAIT_S)
        assert refused == bob.refused()[0].outcome
        again = bob.send_again(stranger.client_message_id)
        again.outcome(WAIT_S)
        bob.forget_refused(stranger.client_message_id)
        assert (bob.refused(), bob.pending()) == ([], [])
        ann.until_live(WAIT_S)
        assert ann.until_status(lambda status: status.state is ConnectionState.LIVE).user_id == "user:ann"
        assert [one.chat_id for one in ann.chats()] == ["tea"]
        ann.reconnect_now()
    assert ann.status().state is ConnectionState.CLOSED
    with pytest.raises(ClosedError):
        ann.send("tea", "late")


def test_waits_raise_timeout_error() -> None:
    with BlockingChatClient(UNREACHABLE_URL, path=":memory:", limits=LIMITS) as ann:
        pending = ann.send("tea", "hello")
        with pytest.raises(TimeoutError):
            pending.outcome(timeout_s=0.01)
        with pytest.raises(TimeoutError):
            ann.until_live(timeout_s=0.01)


def test_blocking_client_has_the_methods_of_the_async_client() -> None:
    def methods(kind: type) -> set[str]:
        return {name for name, _ in inspect.getmembers(kind, callable) if not name.startswith("_")}

    assert methods(BlockingChatClient) == methods(ChatClient)
