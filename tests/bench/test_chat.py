"""The chat benchmark runs and rejects wrong answers. No test in this module measures time."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from bench.__main__ import main
from bench.chat import EVENTS_API, ONE, UNFOLLOWED, Figures, Sizes, report_of
from bench.chat_load import CONTENTS, FollowedChats, Pairs, Sends, SequenceCheck, frame_to_send
from bench.server_report import Series
from bench.wire import Slice
from bench.ws_load import Connection
from oncelog.core.chat import encode_message
from oncelog.server.chat.messages import ChatMessages, Send
from oncelog.server.limits import ApiLimits


def test_chat_benchmark_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--quick", "--no-save"]) == 0
    shown = capsys.readouterr().out
    for name in (EVENTS_API, ONE, "10 chats", ONE + UNFOLLOWED, "100 messages per second", "with 40 connections"):
        assert name in shown
    assert "MET" not in shown


def test_messages_have_no_escapes_and_the_size_of_events() -> None:
    for content in CONTENTS:
        assert 280 <= len(encode_message(content, "text/plain")) <= 320
    frame = frame_to_send("0b3f6a4e-2f0c-4d7b-9a51-6f5d0c1e2a3b", "hot", CONTENTS[0])[8:]
    found = ChatMessages(ApiLimits()).decode_fast(frame)
    assert isinstance(found, Send)
    assert found.chat_id == "hot"


def test_sequences_with_gaps_are_refused() -> None:
    sequences = SequenceCheck()
    sequences.check({"a": [2, 1, 3], "b": []})
    sequences.check({"a": [4], "b": [1]})
    assert sequences.newest == {"a": 4, "b": 1}
    for wrong in ([4], [6], [5, 5], [5, 7]):
        with pytest.raises(ValueError, match="after 4 in a"):
            sequences.check({"a": wrong})


# --- answers ------------------------------------------------------------------------------------------


def ack(sequence: int, **changed: Any) -> bytes:
    members = {"client_message_id": f"m{sequence}", "chat_id": "a", "message_id": "msg_1", "sequence": sequence}
    return msgspec.json.encode({"type": "send_message_ack", **members, "duplicate": False, **changed})


def broadcast(sequence: int, chat_id: str = "a", content: str = CONTENTS[0]) -> bytes:
    members = {"client_message_id": f"m{sequence}", "chat_id": chat_id, "sequence": sequence, "content": content}
    return msgspec.json.encode({"type": "message", **members})


@pytest.fixture
async def connections() -> list[Connection]:
    """Two connections of the load generator, which need a running event loop."""
    return [Connection(b"") for _ in range(2)]


async def test_wrong_answer_is_refused(connections: list[Connection]) -> None:
    sends = Sends(connections, [["a"], ["a"]])
    assert sends.answer(0, ack(1)) == "m1"
    assert sends.sequences == {"a": [1]}
    for wrong in (ack(2, duplicate=True), b'{"type":"error","code":"BUSY"}', broadcast(2)):
        with pytest.raises(ValueError, match="a new message was answered with"):
            sends.answer(0, wrong)


async def test_message_counts_as_delivered_when_the_other_member_has_received_it(connections: list[Connection]) -> None:
    pairs = Pairs(connections, ["a"])
    assert pairs.answer(0, ack(1)) is None
    assert pairs.answer(1, broadcast(1)) == "m1"
    for wrong in (broadcast(1, chat_id="b"), broadcast(1, content="another")):
        with pytest.raises(ValueError, match="a member of a received"):
            pairs.answer(1, wrong)


@pytest.mark.parametrize(
    ("seen", "complaint"),
    [
        ([1, 3], None),
        ([3, 1], "in a different order"),
        ([1, 4], "3 messages to a had wrong deliveries"),
        ([1, 3, 3], "3 messages to a had wrong deliveries"),
    ],
)
async def test_followers_must_receive_all_messages_of_other_members_in_order(
    connections: list[Connection], seen: list[int], complaint: str | None
) -> None:
    followed = FollowedChats(connections, [["a"], ["a"]])
    for number, sequence in ((1, 1), (0, 2), (1, 3)):
        followed.answer(number, ack(sequence))
        followed.waited.append(0.001)
    followed.answer(1, broadcast(2))
    for sequence in seen:
        followed.answer(0, broadcast(sequence))
    if complaint is None:
        await followed.rest()
        assert followed.deliveries == 3
    else:
        with pytest.raises(ValueError, match=complaint):
            await followed.rest()


async def test_only_members_follow_a_chat(connections: list[Connection]) -> None:
    followed = FollowedChats(connections, [["a", "b"], ["a"]])
    for number, one in ((0, ack(1)), (1, ack(2)), (0, ack(1, chat_id="b"))):
        followed.answer(number, one)
    followed.answer(0, broadcast(2))
    followed.answer(1, broadcast(1))
    await followed.rest()  # Chat b has one member, so no other client gets its message.
    assert followed.deliveries == 2


# --- the report ---------------------------------------------------------------------------------------


def series(*per_s: float) -> Series:
    return Series([Slice(round(one), 1.0, [0.001, 0.002], 0.5, 1.5) for one in per_s])


def seen(**changed: Any) -> Figures:
    """Figures that meet every target."""
    figures = Figures(
        sends={
            EVENTS_API: series(20_000, 18_000),
            ONE: series(12_000, 12_000),
            "1000 chats": series(12_000, 12_000),
            ONE + UNFOLLOWED: series(20_000, 20_000),
            "1000 chats" + UNFOLLOWED: series(20_000, 20_000),
        },
        deliveries={ONE: [Slice(315_000, 1.0, [0.001, 0.002], 0.9, 0.9)]},
        paced=[Slice(1000, 1.0, [0.002] * 100, 0.1, 0.5)],
        memory=[("without connections", 90.0), ("with 5000 connections", 1023.0)],
        held_s=0.2,
    )
    return replace(figures, **changed)


def results_of(figures: Figures) -> dict[str, tuple[str, str]]:
    *_, findings = report_of(figures, Sizes(), judged=True).tables
    return {name: (value, result) for name, value, _, result in findings.rows}


def test_report_of_the_chat_benchmark_lists_figures_and_targets() -> None:
    report = report_of(seen(), Sizes(), judged=True)
    assert report.is_met
    assert "{" not in report.how_to_read
    single, deliveries, paced, memory, _ = report.tables
    assert [row[0] for row in single.rows] == [
        ONE,
        EVENTS_API,
        "1000 chats",
        ONE + UNFOLLOWED,
        "1000 chats" + UNFOLLOWED,
    ]
    assert deliveries.rows[0][1] == "315000"
    assert paced.rows[0][:5] == ("1000 messages per second", "1000", "1000", "2.00", "2.00")
    assert memory.rows == [("without connections", "90"), ("with 5000 connections", "1023")]
    assert results_of(seen()) == {
        "one chat / Events API": ("0.60×", "met"),
        "one chat / Events API, median of rounds": ("0.63×", ""),
        "1000 chats / one chat": ("1.00×", "met"),
        "1000 chats / one chat, median of rounds": ("1.00×", ""),
        "1000 chats / one chat, without deliveries": ("1.00×", "met"),
        "1000 chats / one chat, without deliveries, median of rounds": ("1.00×", ""),
        "from one user to another at 1000 per second, p50, median of rounds": ("2.00 ms", "met"),
        "from one user to another at 1000 per second, p99, median of rounds": ("2.00 ms", "met"),
        "memory with 5000 connections": ("1023 MiB", "met"),
        "time until one message in every chat has reached all members": ("0.20 s", ""),
    }


SLOW = Slice(1000, 1.0, [0.009] * 90 + [0.06] * 10, 0.5, 0.5)


@pytest.mark.parametrize(
    ("changed", "name", "is_met"),
    [
        ({"sends": {**seen().sends, EVENTS_API: series(20_100, 1)}}, "one chat / Events API", False),
        ({"sends": {**seen().sends, "1000 chats": series(11_900, 11_900)}}, "1000 chats / one chat", False),
        # Results that depend on the machine, or on the store with many chats, have no target.
        (
            {"sends": {**seen().sends, "1000 chats" + UNFOLLOWED: series(19_000, 19_000)}},
            "1000 chats / one chat, without",
            True,
        ),
        ({"paced": [SLOW, SLOW]}, "from one user to another at 1000 per second, p99", True),
        ({"memory": [("with 5000 connections", 1024.0)]}, "memory with 5000 connections", True),
    ],
)
def test_only_missed_ratios_fail_a_chat_run(changed: dict[str, Any], name: str, is_met: bool) -> None:
    figures = seen(**changed)
    (missed,) = [one for one, (_, result) in results_of(figures).items() if result == "NOT MET"]
    assert missed.startswith(name)
    assert report_of(figures, Sizes(), judged=True).is_met is is_met
