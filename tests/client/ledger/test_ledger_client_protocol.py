"""The protocol of the ledger client, case by case: sequences, answers, and requests for the client state."""

from typing import Any

import pytest

from client.ledger.model_ledger import operations_of
from oncelog.client.ledger.entries import (
    ForgottenClient,
    ProofFailure,
    QueuedWrite,
    ScopeState,
    SequenceGap,
    SequenceTaken,
    WriteAnswer,
    WriteCall,
)
from oncelog.client.ledger.protocol import RETENTION_MS, LedgerProtocol
from oncelog.client.ledger.values import ClientState, RefusalCode, Refused, Written
from oncelog.errors import LostError, ServerRefusedError

FAILED = Refused(RefusalCode.KEY_EXISTS, "exists")
REUSED = Refused(RefusalCode.IDEMPOTENCY_KEY_REUSED, "reused")
DENIED = ServerRefusedError("forbidden", "no")

pytestmark = pytest.mark.rule("LG-19")


class Driven:
    """A protocol whose store saves at once."""

    def __init__(self, last: int = 0, pending: tuple[int, ...] = (), in_flight_max: int = 64, now_ms: int = 0) -> None:
        entries = []
        for number, sequence in enumerate(pending, 1):
            entry = QueuedWrite(number, _key(number), operations_of(str(number)), b"", 0)
            entry.sequence = sequence
            entries.append(entry)
        self.now_ms = now_ms
        self.protocol = LedgerProtocol(ScopeState(last), entries, in_flight_max=in_flight_max)
        self.calls: dict[int, WriteCall] = {}
        self.settled: dict[int, Any] = {}

    def submit(self, count: int = 1) -> None:
        for _ in range(count):
            number = len(self.settled) + len(self.protocol.entries) + 1
            self.protocol.submit(QueuedWrite(number, _key(number), operations_of(str(number)), b"", self.now_ms))

    def save(self) -> None:
        changes = self.protocol.take_changes()
        if changes is not None:
            self.protocol.confirm_saved(changes)
            self.settled.update((one.entry.key[-1], one.outcome) for one in changes.settled)

    def told(self, last: int, key: int = 0) -> "Driven":
        assert self.protocol.take_state_request()
        self.protocol.on_state_received(ClientState(last, 0, _key(key)), self.now_ms)
        return self

    def sent(self) -> list[tuple[int, int]]:
        """Send the next writes; return the key and sequence of each."""
        self.save()
        calls = self.protocol.next_calls(self.now_ms)
        self.calls.update((call.entry.key[-1], call) for call in calls)
        return [(call.entry.key[-1], call.sequence) for call in calls]

    def answer(self, key: int, answer: WriteAnswer | None = None) -> None:
        call = self.calls.pop(key)
        self.protocol.handle_answer(call, answer or Written("tx", call.sequence))
        self.save()

    @property
    def numbers(self) -> list[int]:
        return [entry.sequence for entry in self.protocol.entries]


def _key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def test_writes_are_sent_after_they_are_saved_and_the_state_is_known() -> None:
    driven = Driven()
    driven.submit(2)
    assert driven.protocol.next_calls(0) == []
    assert driven.sent() == []
    driven.told(0)
    driven.submit()
    assert [call.sequence for call in driven.protocol.next_calls(0)] == [1, 2]
    assert driven.sent() == [(3, 3)]


def test_sequences_start_after_the_last_sequence_of_the_server() -> None:
    driven = Driven(last=2)
    driven.submit(2)
    assert driven.told(7).sent() == [(1, 8), (2, 9)]


def test_at_most_in_flight_max_writes_are_in_flight() -> None:
    driven = Driven(in_flight_max=2).told(0)
    driven.submit(4)
    assert driven.sent() == [(1, 1), (2, 2)]
    driven.answer(2)
    assert driven.sent() == [(3, 3)]
    driven.answer(1)
    driven.answer(3)
    assert driven.sent() == [(4, 4)]


def test_gap_after_a_write_in_flight_is_sent_again_when_that_write_is_answered() -> None:
    driven = Driven().told(0)
    driven.submit(3)
    driven.sent()
    driven.answer(3, SequenceGap(0))
    driven.answer(2, SequenceGap(0))
    assert driven.sent() == []
    driven.answer(1)
    assert driven.sent() == [(2, 2), (3, 3)]


def test_gap_answered_after_the_preceding_commit_is_sent_again_at_once() -> None:
    driven = Driven().told(0)
    driven.submit(2)
    driven.sent()
    driven.answer(1)
    driven.answer(2, SequenceGap(0))
    assert driven.sent() == [(2, 2)]


@pytest.mark.parametrize("answer", [FAILED, REUSED, DENIED])
def test_writes_after_a_failed_write_move_down_by_one_sequence(answer: WriteAnswer) -> None:
    driven = Driven().told(0)
    driven.submit(3)
    driven.sent()
    driven.answer(1, answer)
    assert driven.numbers == [1, 2]
    assert driven.sent() == []  # their calls have not been answered
    driven.answer(2, SequenceGap(0))
    driven.answer(3, SequenceGap(0))
    assert driven.sent() == [(2, 1)]  # alone, until its sequence is confirmed
    driven.answer(2)
    assert driven.sent() == [(3, 2)]
    driven.submit()
    assert driven.sent() == [(4, 3)]


def test_later_writes_do_not_overtake_when_a_freed_sequence_is_taken() -> None:
    """A late copy of the first write was committed. The later writes learn of it before the write with its sequence."""
    driven = Driven().told(0)
    driven.submit(3)
    driven.sent()
    driven.answer(1, FAILED)
    driven.answer(2, SequenceGap(0))
    assert driven.sent() == [(2, 1)]
    driven.answer(3, SequenceGap(1))
    assert driven.sent() == []
    driven.answer(2, SequenceTaken(1))
    assert driven.sent() == [(2, 2), (3, 3)]


def test_failed_condition_implies_that_earlier_writes_were_committed() -> None:
    driven = Driven().told(0)
    driven.submit(3)
    driven.sent()
    driven.answer(2, FAILED)
    assert driven.protocol.last == 1
    assert driven.numbers == [1, 2]  # the first keeps its sequence, which is confirmed implicitly


def test_reused_key_implies_nothing_about_earlier_writes() -> None:
    driven = Driven().told(0)
    driven.submit(3)
    driven.sent()
    driven.answer(2, REUSED)
    assert driven.protocol.last == 0
    assert driven.numbers == [1, 2]


def test_unanswered_write_is_sent_again_under_the_same_key_and_sequence() -> None:
    driven = Driven().told(0)
    driven.submit(2)
    driven.sent()
    driven.answer(1, LostError("lost"))
    assert driven.protocol.is_paused
    assert driven.sent() == []
    driven.protocol.release()
    assert driven.sent() == [(1, 1)]
    driven.answer(2)
    assert driven.numbers == [1]


def test_replayed_key_uses_no_sequence() -> None:
    driven = Driven().told(4)
    driven.submit(2)
    assert driven.sent() == [(1, 5), (2, 6)]
    driven.answer(1, Written("tx", 3, is_replay=True))
    driven.answer(2, SequenceGap(4))
    assert driven.sent() == [(2, 5)]


def test_write_with_a_taken_sequence_gets_a_new_one_under_its_key() -> None:
    driven = Driven(last=1, pending=(2, 3)).told(5)
    assert driven.sent() == [(1, 2), (2, 3)]
    driven.answer(1, SequenceTaken(5))
    driven.answer(2, Written("tx", 3))
    assert driven.sent() == [(1, 6)]


def test_replay_without_transaction_is_accepted_only_for_writes_sent_before() -> None:
    """Another writer used the sequence long ago."""
    driven = Driven().told(1)
    driven.submit()
    assert driven.sent() == [(1, 2)]
    driven.answer(1, Written(None, 2, is_replay=True))
    assert driven.sent() == []
    assert driven.told(9).sent() == [(1, 10)]
    pending = Driven(last=1, pending=(2,)).told(9)  # a write that may have been sent accepts it
    assert pending.sent() == [(1, 2)]
    pending.answer(1, Written(None, 2, is_replay=True))
    assert pending.settled == {1: Written(None, 2, is_replay=True)}


def test_later_writes_do_not_overtake_a_write_whose_sequence_was_passed() -> None:
    driven = Driven(last=1, pending=(2, 3)).told(2)
    assert driven.sent() == [(1, 2)]
    driven.answer(1, SequenceTaken(2))
    assert driven.sent() == [(1, 3), (2, 4)]


def test_recovered_writes_are_sent_first_under_their_old_sequences() -> None:
    driven = Driven(last=4, pending=(5, 6))
    driven.submit()
    assert driven.told(5).sent() == [(1, 5)]
    driven.answer(1)
    assert driven.sent() == [(2, 6), (3, 7)]


def test_changed_sequence_is_saved_before_the_write_is_sent() -> None:
    driven = Driven(last=1, pending=(2,)).told(2)
    driven.sent()
    call = driven.calls.pop(1)
    driven.protocol.handle_answer(call, SequenceTaken(2))
    assert driven.protocol.next_calls(0) == []
    changes = driven.protocol.take_changes()
    assert changes is not None
    assert ([one.sequence for one in changes.entries], changes.must_be_durable) == ([3], True)
    driven.protocol.confirm_saved(changes)
    assert len(driven.protocol.next_calls(0)) == 1


def test_store_never_has_two_writes_under_one_sequence() -> None:
    driven = Driven(last=1, pending=(2, 3, 4, 5, 6, 7), in_flight_max=1).told(2)
    driven.sent()
    driven.protocol.handle_answer(driven.calls.pop(1), SequenceTaken(2))
    changes = driven.protocol.take_changes()
    assert changes is not None
    assert [one.sequence for one in changes.entries] == [3, 4, 5, 6, 7, 8]


def test_writes_that_move_down_are_saved_shortly_before_they_are_sent() -> None:
    driven = Driven(in_flight_max=1).told(0)
    driven.submit(6)
    driven.sent()
    driven.protocol.handle_answer(driven.calls.pop(1), FAILED)
    changes = driven.protocol.take_changes()
    assert changes is not None
    assert [one.sequence for one in changes.entries] == [1, 2]
    driven.protocol.confirm_saved(changes)
    for number in range(2, 7):
        assert driven.sent() == [(number, number - 1)]
        driven.answer(number)


@pytest.mark.parametrize("server", [0, 3])
def test_server_with_a_lower_last_sequence_is_reported_as_forgotten(server: int) -> None:
    driven = Driven(last=4, pending=(5, 6)).told(server)
    assert driven.protocol.forgotten == ForgottenClient(4, server)
    assert driven.sent() == []
    assert not driven.protocol.take_state_request()
    driven.protocol.resume({_key(2)})
    assert driven.told(server).sent() == [(2, server + 1)]
    assert driven.settled == {1: None}


def test_evicted_client_without_sent_writes_continues_without_a_report() -> None:
    driven = Driven(last=4)
    driven.submit()  # not sent
    assert driven.told(0).sent() == [(1, 1)]
    assert driven.protocol.was_adopted
    assert driven.protocol.forgotten is None
    restored = Driven(last=4).told(3)
    assert restored.protocol.forgotten == ForgottenClient(4, 3)


def test_first_write_older_than_the_retention_is_reported_as_forgotten() -> None:
    assert Driven(pending=(1,), now_ms=RETENTION_MS).told(0).sent() == [(1, 1)]
    assert Driven(pending=(1,), now_ms=RETENTION_MS + 1).told(0).protocol.forgotten == ForgottenClient(0, 0)


def test_retry_after_the_retention_asks_for_the_client_state_first() -> None:
    driven = Driven().told(0)
    driven.submit()
    driven.sent()
    driven.answer(1, LostError("lost"))
    driven.now_ms = RETENTION_MS + 1
    driven.protocol.release()
    assert driven.sent() == []
    assert driven.told(0).protocol.forgotten == ForgottenClient(0, 0)


def test_unexpected_gap_asks_for_the_client_state() -> None:
    driven = Driven().told(4)
    driven.submit(2)
    driven.sent()
    driven.answer(1, SequenceGap(0))
    assert driven.sent() == []
    driven.protocol.release()
    driven.told(0)
    assert driven.protocol.forgotten == ForgottenClient(4, 0)
    driven.answer(2, SequenceGap(0))
    driven.protocol.resume({_key(1), _key(2)})
    assert driven.told(0).sent() == [(1, 1), (2, 2)]


def test_commit_during_a_state_request_is_not_reported_as_forgotten() -> None:
    driven = Driven().told(4)
    driven.submit(2)
    driven.sent()
    driven.answer(2, SequenceGap(3))  # inconsistent: asks for the client state
    driven.protocol.release()
    assert driven.protocol.take_state_request()
    driven.answer(1)
    driven.protocol.on_state_received(ClientState(4), 0)  # read before the commit
    assert driven.protocol.forgotten is None
    assert driven.sent() == [(2, 6)]


def test_denied_write_that_may_have_been_sent_is_settled_by_the_client_state() -> None:
    driven = Driven(last=1, pending=(2, 3)).told(1)
    assert driven.sent() == [(1, 2), (2, 3)]
    driven.answer(1, DENIED)
    driven.answer(2, SequenceGap(1))
    assert driven.settled == {}
    driven.told(1)  # the sequence is free: it was not written
    driven.save()
    assert driven.settled == {1: DENIED}
    assert driven.sent() == [(2, 2)]


def test_denied_write_that_was_committed_before_is_reported_as_written() -> None:
    driven = Driven(last=1, pending=(2,)).told(1)
    driven.sent()
    driven.answer(1, DENIED)
    driven.told(2, key=1)
    driven.save()
    assert driven.settled == {1: Written(None, 2, is_replay=True)}


def test_denied_write_with_unknown_outcome_stays_pending_and_reports_the_error() -> None:
    driven = Driven(last=1, pending=(2,)).told(1)
    driven.sent()
    driven.answer(1, DENIED)
    driven.told(3, key=9)
    assert [error for _, error in driven.protocol.take_reports()] == [DENIED]
    assert driven.protocol.is_paused
    assert driven.protocol.is_refused
    driven.protocol.release()
    assert driven.sent() == [(1, 2)]
    driven.answer(1)
    assert driven.settled[1] == Written("tx", 2)


@pytest.mark.rule("LG-19")
@pytest.mark.rule("CO-16")
def test_denied_write_that_an_earlier_call_may_have_committed_stays_pending() -> None:
    """Its sequence was raised after the call of unknown outcome, so the last sequence alone does not tell."""
    driven = Driven().told(0)
    driven.submit(2)
    assert driven.sent() == [(1, 1), (2, 2)]
    driven.answer(2, LostError("lost"))  # committed, in fact
    driven.answer(1, SequenceTaken(1))
    driven.protocol.release()
    assert driven.sent() == [(1, 2), (2, 3)]
    driven.answer(2, DENIED)
    driven.told(2, key=9)
    assert [entry.number for entry, _ in driven.protocol.take_reports()] == [2]
    driven.save()
    assert driven.settled == {}


@pytest.mark.rule("LG-19")
def test_lowest_sequence_of_a_call_is_saved_until_its_outcome_is_known() -> None:
    driven = Driven().told(0)
    driven.submit(2)
    driven.sent()
    driven.protocol.handle_answer(driven.calls.pop(1), SequenceTaken(1))
    changes = driven.protocol.take_changes()
    assert changes is not None
    # The call of the second write under sequence 2 is still in flight.
    assert [(one.sequence, one.lowest) for one in changes.entries] == [(2, 2), (3, 2)]


@pytest.mark.rule("LG-19")
def test_freed_sequence_limits_calls_after_a_restart() -> None:
    """A delayed copy of the refused write may take its sequence: the writes after it must not overtake each other."""
    driven = Driven().told(0)
    driven.submit(3)
    driven.sent()
    driven.protocol.handle_answer(driven.calls.pop(1), DENIED)
    changes = driven.protocol.take_changes()
    assert changes is not None
    assert changes.state == ScopeState(last=0, freed=1, highest=3)
    restarted = Driven(pending=(1, 2))
    restarted.protocol = LedgerProtocol(changes.state, list(restarted.protocol.entries), in_flight_max=64)
    assert restarted.told(0).sent() == [(1, 1)]
    restarted.answer(1, SequenceTaken(1))
    assert restarted.sent() == [(1, 2), (2, 3)]


@pytest.mark.rule("LG-19")
def test_write_whose_sequence_another_write_committed_under_gets_the_next_one() -> None:
    """A delayed copy of the first write committed under its earlier sequence, which the second write has now."""
    driven = Driven(last=7, pending=(8, 9, 10)).told(8, key=99)
    assert driven.sent() == [(1, 8)]
    driven.answer(1, Written("tx", 9, is_replay=True))
    assert driven.sent() == [(2, 10), (3, 11)]


@pytest.mark.rule("LG-23")
def test_nothing_is_sent_until_a_withdrawal_is_saved() -> None:
    """After a crash the withdrawn write would be pending again, and be committed after the one behind it."""
    driven = Driven(in_flight_max=1).told(0)
    driven.submit(2)
    driven.save()
    first, second = driven.protocol.entries
    assert driven.protocol.withdraw(first)
    second.saved_sequence = second.sequence  # the file has it under this sequence already
    assert driven.protocol.next_calls(0) == []
    assert driven.sent() == [(2, 1)]
    assert driven.settled == {1: None}


@pytest.mark.rule("LG-23")
def test_withdrawn_write_that_may_be_committed_frees_its_sequence_slowly() -> None:
    driven = Driven().told(0)
    driven.submit(3)
    driven.sent()
    driven.answer(1, LostError("lost"))
    driven.answer(2, SequenceGap(0))
    driven.answer(3, SequenceGap(0))
    assert not driven.protocol.withdraw(next(iter(driven.protocol.entries)))
    driven.protocol.release()
    assert driven.sent() == [(2, 1)]
    driven.answer(2, SequenceTaken(1))  # the withdrawn write was committed
    assert driven.sent() == [(2, 2), (3, 3)]


def test_denied_client_state_fails_new_writes_and_keeps_recovered_ones() -> None:
    driven = Driven(last=1, pending=(2,))
    driven.submit()
    driven.save()
    assert driven.protocol.take_state_request()
    driven.protocol.on_state_failed(DENIED)
    driven.save()
    assert driven.settled == {2: DENIED}
    assert [entry.number for entry, _ in driven.protocol.take_reports()] == [1]
    driven.protocol.release()
    assert driven.told(1).sent() == [(1, 2)]


def test_unverified_write_reports_the_error_and_uses_its_sequence() -> None:
    driven = Driven().told(0)
    driven.submit(2)
    driven.sent()
    error = ValueError()
    driven.answer(1, ProofFailure(error, 1))
    assert driven.settled == {1: error}
    assert driven.numbers == [2]


def test_failed_save_drops_only_new_writes() -> None:
    driven = Driven().told(0)
    driven.submit(2)
    driven.sent()
    driven.answer(1)
    driven.protocol.handle_answer(driven.calls.pop(2), FAILED)
    driven.submit(2)
    changes = driven.protocol.take_changes()
    assert changes is not None
    driven.protocol.revert_unsaved(changes)
    assert driven.numbers == []
    driven.save()
    assert driven.settled[2] == FAILED
    driven.submit()
    assert driven.sent() == [(3, 2)]


def test_refusals_reduce_the_number_of_writes_in_flight() -> None:
    driven = Driven(in_flight_max=16).told(0)
    driven.submit(60)
    assert len(driven.sent()) == 16
    driven.answer(1, FAILED)
    for number in range(2, 17):
        driven.answer(number, SequenceGap(0))
    assert len(driven.sent()) == 1
    driven.answer(2)
    assert len(driven.sent()) == 9
