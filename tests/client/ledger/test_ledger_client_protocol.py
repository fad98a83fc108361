"""The protocol of the ledger's client, case by case: numbers, answers, and what is asked."""

from typing import Any

import pytest

from client.ledger.model_ledger import operations_of
from oncelog.client.ledger.entries import (
    Answer,
    Call,
    ComeToNothing,
    Committed,
    Denied,
    Entry,
    Forgotten,
    Gap,
    Taken,
    Unknown,
    Unverified,
)
from oncelog.client.ledger.protocol import REMEMBERED_MS, Protocol
from oncelog.client.ledger.values import ClientState, RefusalCode, Refused, Written
from oncelog.errors import ServerRefusedError

FAILED = ComeToNothing(Refused(RefusalCode.KEY_EXISTS, "exists"))
REUSED = ComeToNothing(Refused(RefusalCode.IDEMPOTENCY_KEY_REUSED, "reused"))
DENIED = Denied(ServerRefusedError("forbidden", "no"))

pytestmark = pytest.mark.rule("LG-19")


class Driven:
    """A protocol whose file saves at once."""

    def __init__(self, last: int = 0, pending: tuple[int, ...] = (), in_flight_max: int = 64, now_ms: int = 0) -> None:
        entries = []
        for number, sequence in enumerate(pending, 1):
            entry = Entry(number, _key(number), operations_of(str(number)), b"", 0)
            entry.sequence = sequence
            entries.append(entry)
        self.now_ms = now_ms
        self.protocol = Protocol(last, entries, in_flight_max=in_flight_max)
        self.calls: dict[int, Call] = {}
        self.settled: dict[int, Any] = {}

    def submit(self, count: int = 1) -> None:
        for _ in range(count):
            number = len(self.settled) + len(self.protocol) + 1
            self.protocol.submit(_key(number), operations_of(str(number)), b"", self.now_ms)

    def save(self) -> None:
        changes = self.protocol.take_changes()
        if changes is not None:
            self.protocol.saved(changes)
            self.settled.update((one.entry.key[-1], one.outcome) for one in changes.settled)

    def told(self, last: int, key: int = 0) -> "Driven":
        assert self.protocol.take_question()
        self.protocol.state_told(ClientState(last, 0, _key(key)), self.now_ms)
        return self

    def sent(self) -> list[tuple[int, int]]:
        """What is sent now: whose it is, and under which number."""
        self.save()
        calls = self.protocol.next_calls(self.now_ms)
        self.calls.update((call.entry.key[-1], call) for call in calls)
        return [(call.entry.key[-1], call.sequence) for call in calls]

    def answer(self, key: int, answer: Answer | None = None) -> None:
        call = self.calls.pop(key)
        self.protocol.answered(call, answer or Committed(Written("tx", call.sequence)))
        self.save()

    @property
    def numbers(self) -> list[int]:
        return [entry.sequence for entry in self.protocol.pending]


def _key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def test_nothing_is_sent_before_it_is_saved_and_the_server_was_asked() -> None:
    driven = Driven()
    driven.submit(2)
    assert driven.protocol.next_calls(0) == []
    assert driven.sent() == []
    driven.told(0)
    driven.submit()
    assert [call.sequence for call in driven.protocol.next_calls(0)] == [1, 2]
    assert driven.sent() == [(3, 3)]


def test_numbers_begin_behind_what_the_server_knows() -> None:
    driven = Driven(last=2)
    driven.submit(2)
    assert driven.told(7).sent() == [(1, 8), (2, 9)]


def test_as_many_are_in_flight_as_may_be() -> None:
    driven = Driven(in_flight_max=2).told(0)
    driven.submit(4)
    assert driven.sent() == [(1, 1), (2, 2)]
    driven.answer(2)
    assert driven.sent() == [(3, 3)]
    driven.answer(1)
    driven.answer(3)
    assert driven.sent() == [(4, 4)]


def test_a_gap_behind_one_that_is_in_flight_is_no_error() -> None:
    driven = Driven().told(0)
    driven.submit(3)
    driven.sent()
    driven.answer(3, Gap(0))
    driven.answer(2, Gap(0))
    assert driven.sent() == []
    driven.answer(1)
    assert driven.sent() == [(2, 2), (3, 3)]


def test_a_gap_that_is_told_late_is_sent_again_at_once() -> None:
    driven = Driven().told(0)
    driven.submit(2)
    driven.sent()
    driven.answer(1)
    driven.answer(2, Gap(0))
    assert driven.sent() == [(2, 2)]


@pytest.mark.parametrize("answer", [FAILED, REUSED, DENIED])
def test_those_behind_one_that_came_to_nothing_move_down(answer: Answer) -> None:
    driven = Driven().told(0)
    driven.submit(3)
    driven.sent()
    driven.answer(1, answer)
    assert driven.numbers == [1, 2]
    assert driven.sent() == []  # their calls have not come back
    driven.answer(2, Gap(0))
    driven.answer(3, Gap(0))
    assert driven.sent() == [(2, 1)]  # alone, until the number is its own
    driven.answer(2)
    assert driven.sent() == [(3, 2)]
    driven.submit()
    assert driven.sent() == [(4, 3)]


def test_a_number_that_became_free_and_was_taken_lets_nobody_overtake() -> None:
    """A copy of the first one came late. Those behind hear of it before the one that was sent under its number."""
    driven = Driven().told(0)
    driven.submit(3)
    driven.sent()
    driven.answer(1, FAILED)
    driven.answer(2, Gap(0))
    assert driven.sent() == [(2, 1)]
    driven.answer(3, Gap(1))
    assert driven.sent() == []
    driven.answer(2, Taken(1))
    assert driven.sent() == [(2, 2), (3, 3)]


def test_a_condition_that_failed_says_that_those_before_were_committed() -> None:
    driven = Driven().told(0)
    driven.submit(3)
    driven.sent()
    driven.answer(2, FAILED)
    assert driven.protocol.last == 1
    assert driven.numbers == [1, 2]  # the first keeps its number: it is its own, though nobody has said so


def test_another_key_that_was_reused_says_nothing_about_those_before() -> None:
    driven = Driven().told(0)
    driven.submit(3)
    driven.sent()
    driven.answer(2, REUSED)
    assert driven.protocol.last == 0
    assert driven.numbers == [1, 2]


def test_what_is_unknown_is_sent_again_under_the_same_key_and_number() -> None:
    driven = Driven().told(0)
    driven.submit(2)
    driven.sent()
    driven.answer(1, Unknown())
    assert driven.protocol.is_held
    assert driven.sent() == []
    driven.protocol.release()
    assert driven.sent() == [(1, 1)]
    driven.answer(2)
    assert driven.numbers == [1]


def test_a_key_that_was_committed_before_uses_no_number() -> None:
    driven = Driven().told(4)
    driven.submit(2)
    assert driven.sent() == [(1, 5), (2, 6)]
    driven.answer(1, Committed(Written("tx", 3, is_replay=True)))
    driven.answer(2, Gap(4))
    assert driven.sent() == [(2, 5)]


def test_a_number_that_another_has_taken_is_given_up_and_the_key_kept() -> None:
    driven = Driven(last=1, pending=(2, 3)).told(5)
    assert driven.sent() == [(1, 2), (2, 3)]
    driven.answer(1, Taken(5))
    driven.answer(2, Committed(Written("tx", 3)))
    assert driven.sent() == [(1, 6)]


def test_a_number_of_which_nothing_is_known_is_not_of_one_that_was_never_sent() -> None:
    """Another writer was here long ago."""
    driven = Driven().told(1)
    driven.submit()
    assert driven.sent() == [(1, 2)]
    driven.answer(1, Committed(Written(None, 2, is_replay=True)))
    assert driven.sent() == []
    assert driven.told(9).sent() == [(1, 10)]
    pending = Driven(last=1, pending=(2,)).told(9)  # but one that may have been sent believes it
    assert pending.sent() == [(1, 2)]
    pending.answer(1, Committed(Written(None, 2, is_replay=True)))
    assert pending.settled == {1: Written(None, 2, is_replay=True)}


def test_nobody_overtakes_one_whose_number_has_been_passed() -> None:
    driven = Driven(last=1, pending=(2, 3)).told(2)
    assert driven.sent() == [(1, 2)]
    driven.answer(1, Taken(2))
    assert driven.sent() == [(1, 3), (2, 4)]


def test_pending_ones_are_sent_first_under_their_old_numbers() -> None:
    driven = Driven(last=4, pending=(5, 6))
    driven.submit()
    assert driven.told(5).sent() == [(1, 5)]
    driven.answer(1)
    assert driven.sent() == [(2, 6), (3, 7)]


def test_one_that_moved_up_is_saved_before_anything_is_sent() -> None:
    driven = Driven(last=1, pending=(2,)).told(2)
    driven.sent()
    call = driven.calls.pop(1)
    driven.protocol.answered(call, Taken(2))
    assert driven.protocol.next_calls(0) == []
    changes = driven.protocol.take_changes()
    assert changes is not None
    assert ([sequence for _, sequence in changes.entries], changes.must_last) == ([3], True)
    driven.protocol.saved(changes)
    assert len(driven.protocol.next_calls(0)) == 1


def test_the_file_never_has_one_under_a_number_that_another_gets() -> None:
    driven = Driven(last=1, pending=(2, 3, 4, 5, 6, 7), in_flight_max=1).told(2)
    driven.sent()
    driven.protocol.answered(driven.calls.pop(1), Taken(2))
    changes = driven.protocol.take_changes()
    assert changes is not None
    assert [sequence for _, sequence in changes.entries] == [3, 4, 5, 6, 7, 8]


def test_those_that_move_down_are_saved_when_their_turn_comes_near() -> None:
    driven = Driven(in_flight_max=1).told(0)
    driven.submit(6)
    driven.sent()
    driven.protocol.answered(driven.calls.pop(1), FAILED)
    changes = driven.protocol.take_changes()
    assert changes is not None
    assert [sequence for _, sequence in changes.entries] == [1, 2]
    driven.protocol.saved(changes)
    for number in range(2, 7):
        assert driven.sent() == [(number, number - 1)]
        driven.answer(number)


@pytest.mark.parametrize("server", [0, 3])
def test_a_server_that_knows_less_than_it_did_is_told_of(server: int) -> None:
    driven = Driven(last=4, pending=(5, 6)).told(server)
    assert driven.protocol.forgotten == Forgotten(4, server)
    assert driven.sent() == []
    assert not driven.protocol.take_question()
    driven.protocol.resume({_key(2)})
    assert driven.told(server).sent() == [(2, server + 1)]
    assert driven.settled == {1: None}


def test_one_that_has_nothing_pending_is_not_told_that_it_was_forgotten() -> None:
    driven = Driven(last=4)
    driven.submit()  # never sent
    assert driven.told(0).sent() == [(1, 1)]
    assert driven.protocol.was_adopted
    assert driven.protocol.forgotten is None
    restored = Driven(last=4).told(3)
    assert restored.protocol.forgotten == Forgotten(4, 3)


def test_a_first_write_of_long_ago_may_have_been_forgotten() -> None:
    assert Driven(pending=(1,), now_ms=REMEMBERED_MS).told(0).sent() == [(1, 1)]
    assert Driven(pending=(1,), now_ms=REMEMBERED_MS + 1).told(0).protocol.forgotten == Forgotten(0, 0)


def test_who_waited_for_a_day_asks_again_before_it_sends_again() -> None:
    driven = Driven().told(0)
    driven.submit()
    driven.sent()
    driven.answer(1, Unknown())
    driven.now_ms = REMEMBERED_MS + 1
    driven.protocol.release()
    assert driven.sent() == []
    assert driven.told(0).protocol.forgotten == Forgotten(0, 0)


def test_a_gap_where_there_is_none_is_asked_about() -> None:
    driven = Driven().told(4)
    driven.submit(2)
    driven.sent()
    driven.answer(1, Gap(0))
    assert driven.sent() == []
    driven.protocol.release()
    driven.told(0)
    assert driven.protocol.forgotten == Forgotten(4, 0)
    driven.answer(2, Gap(0))
    driven.protocol.resume({_key(1), _key(2)})
    assert driven.told(0).sent() == [(1, 1), (2, 2)]


def test_what_is_committed_while_the_server_is_asked_is_no_reason_to_think_it_forgot() -> None:
    driven = Driven().told(4)
    driven.submit(2)
    driven.sent()
    driven.answer(2, Gap(3))  # strange enough to ask
    driven.protocol.release()
    assert driven.protocol.take_question()
    driven.answer(1)
    driven.protocol.state_told(ClientState(4), 0)  # it was read before
    assert driven.protocol.forgotten is None
    assert driven.sent() == [(2, 6)]


def test_a_write_that_may_have_been_sent_is_not_given_up_because_it_is_denied() -> None:
    driven = Driven(last=1, pending=(2, 3)).told(1)
    assert driven.sent() == [(1, 2), (2, 3)]
    driven.answer(1, DENIED)
    driven.answer(2, Gap(1))
    assert driven.settled == {}
    driven.told(1)  # its number is free: it was not written
    driven.save()
    assert driven.settled == {1: DENIED.error}
    assert driven.sent() == [(2, 2)]


def test_one_that_is_denied_may_have_been_committed_before() -> None:
    driven = Driven(last=1, pending=(2,)).told(1)
    driven.sent()
    driven.answer(1, DENIED)
    driven.told(2, key=1)
    driven.save()
    assert driven.settled == {1: Written(None, 2, is_replay=True)}


def test_one_of_which_nobody_can_say_waits_and_its_caller_is_told() -> None:
    driven = Driven(last=1, pending=(2,)).told(1)
    driven.sent()
    driven.answer(1, DENIED)
    driven.told(3, key=9)
    assert [error for _, error in driven.protocol.take_told()] == [DENIED.error]
    assert driven.protocol.is_held
    assert driven.protocol.is_refused
    driven.protocol.release()
    assert driven.sent() == [(1, 2)]
    driven.answer(1)
    assert driven.settled[1] == Written("tx", 2)


def test_who_is_not_told_where_it_stands_writes_nothing() -> None:
    driven = Driven(last=1, pending=(2,))
    driven.submit()
    driven.save()
    assert driven.protocol.take_question()
    driven.protocol.state_denied(DENIED.error)
    driven.save()
    assert driven.settled == {2: DENIED.error}
    assert [entry.number for entry, _ in driven.protocol.take_told()] == [1]
    driven.protocol.release()
    assert driven.told(1).sent() == [(1, 2)]


def test_what_does_not_verify_is_told_and_its_number_used() -> None:
    driven = Driven().told(0)
    driven.submit(2)
    driven.sent()
    error = ValueError()
    driven.answer(1, Unverified(error, 1))
    assert driven.settled == {1: error}
    assert driven.numbers == [2]


def test_a_full_disk_takes_back_what_is_new_and_nothing_else() -> None:
    driven = Driven().told(0)
    driven.submit(2)
    driven.sent()
    driven.answer(1)
    driven.protocol.answered(driven.calls.pop(2), FAILED)
    driven.submit(2)
    changes = driven.protocol.take_changes()
    assert changes is not None
    assert len(driven.protocol.not_saved(changes)) == 2
    assert driven.numbers == []
    driven.save()
    assert driven.settled[2] == FAILED.refused
    driven.submit()
    assert driven.sent() == [(3, 2)]


def test_where_writes_are_refused_often_less_is_sent_ahead() -> None:
    driven = Driven(in_flight_max=16).told(0)
    driven.submit(60)
    assert len(driven.sent()) == 16
    driven.answer(1, FAILED)
    for number in range(2, 17):
        driven.answer(number, Gap(0))
    assert len(driven.sent()) == 1
    driven.answer(2)
    assert len(driven.sent()) == 9
