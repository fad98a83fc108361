"""The ledger client's protocol, case by case: sequences, answers, and requests for the client state."""

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


class ProtocolDriver:
    """A protocol whose changes are saved immediately."""

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

    def receive_state(self, last: int, key: int = 0) -> "ProtocolDriver":
        assert self.protocol.take_state_request()
        self.protocol.on_state_received(ClientState(last, 0, _key(key)), self.now_ms)
        return self

    def send(self) -> list[tuple[int, int]]:
        """Send the next writes and return their keys and sequences."""
        self.save()
        calls = self.protocol.next_calls(self.now_ms)
        self.calls.update((call.entry.key[-1], call) for call in calls)
        return [(call.entry.key[-1], call.sequence) for call in calls]

    def answer(self, key: int, answer: WriteAnswer | None = None) -> None:
        call = self.calls.pop(key)
        self.protocol.handle_answer(call, answer or Written("tx", call.sequence))
        self.save()

    @property
    def sequences(self) -> list[int]:
        return [entry.sequence for entry in self.protocol.entries]


def _key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def test_writes_are_sent_after_they_are_saved_and_the_state_is_known() -> None:
    driver = ProtocolDriver()
    driver.submit(2)
    assert driver.protocol.next_calls(0) == []
    assert driver.send() == []
    driver.receive_state(0)
    driver.submit()
    assert [call.sequence for call in driver.protocol.next_calls(0)] == [1, 2]
    assert driver.send() == [(3, 3)]


def test_sequences_start_after_the_last_sequence_of_the_server() -> None:
    driver = ProtocolDriver(last=2)
    driver.submit(2)
    assert driver.receive_state(7).send() == [(1, 8), (2, 9)]


def test_at_most_in_flight_max_writes_are_in_flight() -> None:
    driver = ProtocolDriver(in_flight_max=2).receive_state(0)
    driver.submit(4)
    assert driver.send() == [(1, 1), (2, 2)]
    driver.answer(2)
    assert driver.send() == [(3, 3)]
    driver.answer(1)
    driver.answer(3)
    assert driver.send() == [(4, 4)]


def test_writes_refused_with_a_gap_are_sent_again_when_the_write_in_flight_is_answered() -> None:
    driver = ProtocolDriver().receive_state(0)
    driver.submit(3)
    driver.send()
    driver.answer(3, SequenceGap(0))
    driver.answer(2, SequenceGap(0))
    assert driver.send() == []
    driver.answer(1)
    assert driver.send() == [(2, 2), (3, 3)]


def test_gap_answered_after_the_preceding_commit_is_resent_immediately() -> None:
    driver = ProtocolDriver().receive_state(0)
    driver.submit(2)
    driver.send()
    driver.answer(1)
    driver.answer(2, SequenceGap(0))
    assert driver.send() == [(2, 2)]


@pytest.mark.parametrize("answer", [FAILED, REUSED, DENIED])
def test_writes_after_a_failed_write_move_down_by_one_sequence(answer: WriteAnswer) -> None:
    driver = ProtocolDriver().receive_state(0)
    driver.submit(3)
    driver.send()
    driver.answer(1, answer)
    assert driver.sequences == [1, 2]
    assert driver.send() == []  # the other calls are not answered yet
    driver.answer(2, SequenceGap(0))
    driver.answer(3, SequenceGap(0))
    assert driver.send() == [(2, 1)]  # sent alone until its sequence is confirmed
    driver.answer(2)
    assert driver.send() == [(3, 2)]
    driver.submit()
    assert driver.send() == [(4, 3)]


def test_later_writes_keep_their_order_when_a_freed_sequence_is_taken() -> None:
    """A late copy of the first write is committed. Later writes get gap answers before the write with its sequence."""
    driver = ProtocolDriver().receive_state(0)
    driver.submit(3)
    driver.send()
    driver.answer(1, FAILED)
    driver.answer(2, SequenceGap(0))
    assert driver.send() == [(2, 1)]
    driver.answer(3, SequenceGap(1))
    assert driver.send() == []
    driver.answer(2, SequenceTaken(1))
    assert driver.send() == [(2, 2), (3, 3)]


def test_failed_condition_proves_that_earlier_writes_were_committed() -> None:
    driver = ProtocolDriver().receive_state(0)
    driver.submit(3)
    driver.send()
    driver.answer(2, FAILED)
    assert driver.protocol.last == 1
    assert driver.sequences == [1, 2]  # the first write's sequence is confirmed implicitly


def test_reused_key_proves_nothing_about_earlier_writes() -> None:
    driver = ProtocolDriver().receive_state(0)
    driver.submit(3)
    driver.send()
    driver.answer(2, REUSED)
    assert driver.protocol.last == 0
    assert driver.sequences == [1, 2]


def test_unanswered_write_is_sent_again_under_the_same_key_and_sequence() -> None:
    driver = ProtocolDriver().receive_state(0)
    driver.submit(2)
    driver.send()
    driver.answer(1, LostError("lost"))
    assert driver.protocol.is_paused
    assert driver.send() == []
    driver.protocol.release()
    assert driver.send() == [(1, 1)]
    driver.answer(2)
    assert driver.sequences == [1]


def test_replayed_key_uses_no_sequence() -> None:
    driver = ProtocolDriver().receive_state(4)
    driver.submit(2)
    assert driver.send() == [(1, 5), (2, 6)]
    driver.answer(1, Written("tx", 3, is_replay=True))
    driver.answer(2, SequenceGap(4))
    assert driver.send() == [(2, 5)]


def test_write_with_a_taken_sequence_gets_a_new_one_under_its_key() -> None:
    driver = ProtocolDriver(last=1, pending=(2, 3)).receive_state(5)
    assert driver.send() == [(1, 2), (2, 3)]
    driver.answer(1, SequenceTaken(5))
    driver.answer(2, Written("tx", 3))
    assert driver.send() == [(1, 6)]


def test_replay_without_transaction_is_accepted_only_for_writes_sent_before() -> None:
    """A different writer used the sequence long ago."""
    driver = ProtocolDriver().receive_state(1)
    driver.submit()
    assert driver.send() == [(1, 2)]
    driver.answer(1, Written(None, 2, is_replay=True))
    assert driver.send() == []
    assert driver.receive_state(9).send() == [(1, 10)]
    pending = ProtocolDriver(last=1, pending=(2,)).receive_state(9)  # possibly sent before
    assert pending.send() == [(1, 2)]
    pending.answer(1, Written(None, 2, is_replay=True))
    assert pending.settled == {1: Written(None, 2, is_replay=True)}


def test_later_writes_do_not_overtake_a_write_whose_sequence_was_passed() -> None:
    driver = ProtocolDriver(last=1, pending=(2, 3)).receive_state(2)
    assert driver.send() == [(1, 2)]
    driver.answer(1, SequenceTaken(2))
    assert driver.send() == [(1, 3), (2, 4)]


def test_recovered_writes_are_sent_first_under_their_old_sequences() -> None:
    driver = ProtocolDriver(last=4, pending=(5, 6))
    driver.submit()
    assert driver.receive_state(5).send() == [(1, 5)]
    driver.answer(1)
    assert driver.send() == [(2, 6), (3, 7)]


def test_changed_sequence_is_saved_before_the_write_is_sent() -> None:
    driver = ProtocolDriver(last=1, pending=(2,)).receive_state(2)
    driver.send()
    call = driver.calls.pop(1)
    driver.protocol.handle_answer(call, SequenceTaken(2))
    assert driver.protocol.next_calls(0) == []
    changes = driver.protocol.take_changes()
    assert changes is not None
    assert ([one.sequence for one in changes.entries], changes.must_be_durable) == ([3], True)
    driver.protocol.confirm_saved(changes)
    assert len(driver.protocol.next_calls(0)) == 1


def test_store_never_has_two_writes_under_one_sequence() -> None:
    driver = ProtocolDriver(last=1, pending=(2, 3, 4, 5, 6, 7), in_flight_max=1).receive_state(2)
    driver.send()
    driver.protocol.handle_answer(driver.calls.pop(1), SequenceTaken(2))
    changes = driver.protocol.take_changes()
    assert changes is not None
    assert [one.sequence for one in changes.entries] == [3, 4, 5, 6, 7, 8]


def test_writes_that_move_down_are_saved_shortly_before_they_are_sent() -> None:
    driver = ProtocolDriver(in_flight_max=1).receive_state(0)
    driver.submit(6)
    driver.send()
    driver.protocol.handle_answer(driver.calls.pop(1), FAILED)
    changes = driver.protocol.take_changes()
    assert changes is not None
    assert [one.sequence for one in changes.entries] == [1, 2]
    driver.protocol.confirm_saved(changes)
    for number in range(2, 7):
        assert driver.send() == [(number, number - 1)]
        driver.answer(number)


@pytest.mark.parametrize("server", [0, 3])
def test_server_with_a_lower_last_sequence_has_forgotten_the_client(server: int) -> None:
    driver = ProtocolDriver(last=4, pending=(5, 6)).receive_state(server)
    assert driver.protocol.forgotten == ForgottenClient(4, server)
    assert driver.send() == []
    assert not driver.protocol.take_state_request()
    driver.protocol.resume({_key(2)})
    assert driver.receive_state(server).send() == [(2, server + 1)]
    assert driver.settled == {1: None}


def test_evicted_client_without_sent_writes_continues_silently() -> None:
    driver = ProtocolDriver(last=4)
    driver.submit()  # not sent
    assert driver.receive_state(0).send() == [(1, 1)]
    assert driver.protocol.was_adopted
    assert driver.protocol.forgotten is None
    restored = ProtocolDriver(last=4).receive_state(3)
    assert restored.protocol.forgotten == ForgottenClient(4, 3)


def test_first_write_older_than_the_retention_is_reported_as_forgotten() -> None:
    assert ProtocolDriver(pending=(1,), now_ms=RETENTION_MS).receive_state(0).send() == [(1, 1)]
    assert ProtocolDriver(pending=(1,), now_ms=RETENTION_MS + 1).receive_state(0).protocol.forgotten == ForgottenClient(
        0, 0
    )


def test_retry_after_the_retention_requests_the_client_state_first() -> None:
    driver = ProtocolDriver().receive_state(0)
    driver.submit()
    driver.send()
    driver.answer(1, LostError("lost"))
    driver.now_ms = RETENTION_MS + 1
    driver.protocol.release()
    assert driver.send() == []
    assert driver.receive_state(0).protocol.forgotten == ForgottenClient(0, 0)


def test_unexpected_gap_makes_the_client_request_its_state() -> None:
    driver = ProtocolDriver().receive_state(4)
    driver.submit(2)
    driver.send()
    driver.answer(1, SequenceGap(0))
    assert driver.send() == []
    driver.protocol.release()
    driver.receive_state(0)
    assert driver.protocol.forgotten == ForgottenClient(4, 0)
    driver.answer(2, SequenceGap(0))
    driver.protocol.resume({_key(1), _key(2)})
    assert driver.receive_state(0).send() == [(1, 1), (2, 2)]


def test_commit_during_a_state_request_is_not_reported_as_forgotten() -> None:
    driver = ProtocolDriver().receive_state(4)
    driver.submit(2)
    driver.send()
    driver.answer(2, SequenceGap(3))  # inconsistent, so the client requests its state
    driver.protocol.release()
    assert driver.protocol.take_state_request()
    driver.answer(1)
    driver.protocol.on_state_received(ClientState(4), 0)  # read before the commit
    assert driver.protocol.forgotten is None
    assert driver.send() == [(2, 6)]


def test_denied_write_that_may_have_been_sent_is_settled_by_the_client_state() -> None:
    driver = ProtocolDriver(last=1, pending=(2, 3)).receive_state(1)
    assert driver.send() == [(1, 2), (2, 3)]
    driver.answer(1, DENIED)
    driver.answer(2, SequenceGap(1))
    assert driver.settled == {}
    driver.receive_state(1)  # the sequence is free, so the write was not committed
    driver.save()
    assert driver.settled == {1: DENIED}
    assert driver.send() == [(2, 2)]


def test_denied_write_that_was_committed_before_is_reported_as_written() -> None:
    driver = ProtocolDriver(last=1, pending=(2,)).receive_state(1)
    driver.send()
    driver.answer(1, DENIED)
    driver.receive_state(2, key=1)
    driver.save()
    assert driver.settled == {1: Written(None, 2, is_replay=True)}


def test_denied_write_with_unknown_outcome_remains_pending_and_reports_the_error() -> None:
    driver = ProtocolDriver(last=1, pending=(2,)).receive_state(1)
    driver.send()
    driver.answer(1, DENIED)
    driver.receive_state(3, key=9)
    assert [error for _, error in driver.protocol.take_reports()] == [DENIED]
    assert driver.protocol.is_paused
    assert driver.protocol.is_refused
    driver.protocol.release()
    assert driver.send() == [(1, 2)]
    driver.answer(1)
    assert driver.settled[1] == Written("tx", 2)


@pytest.mark.rule("LG-19")
@pytest.mark.rule("CO-16")
def test_denied_write_that_an_earlier_call_may_have_committed_remains_pending() -> None:
    """The write got a higher sequence after a call with unknown outcome, so the last sequence is not conclusive."""
    driver = ProtocolDriver().receive_state(0)
    driver.submit(2)
    assert driver.send() == [(1, 1), (2, 2)]
    driver.answer(2, LostError("lost"))  # the server committed it
    driver.answer(1, SequenceTaken(1))
    driver.protocol.release()
    assert driver.send() == [(1, 2), (2, 3)]
    driver.answer(2, DENIED)
    driver.receive_state(2, key=9)
    assert [entry.number for entry, _ in driver.protocol.take_reports()] == [2]
    driver.save()
    assert driver.settled == {}


@pytest.mark.rule("LG-19")
def test_lowest_sequence_of_a_call_is_saved_until_its_outcome_is_known() -> None:
    driver = ProtocolDriver().receive_state(0)
    driver.submit(2)
    driver.send()
    driver.protocol.handle_answer(driver.calls.pop(1), SequenceTaken(1))
    changes = driver.protocol.take_changes()
    assert changes is not None
    # The second write's call under sequence 2 is still in flight.
    assert [(one.sequence, one.lowest) for one in changes.entries] == [(2, 2), (3, 2)]


@pytest.mark.rule("LG-19")
def test_freed_sequence_limits_calls_after_a_restart() -> None:
    """A delayed copy of the refused write may take its sequence. Later writes must still keep their order."""
    driver = ProtocolDriver().receive_state(0)
    driver.submit(3)
    driver.send()
    driver.protocol.handle_answer(driver.calls.pop(1), DENIED)
    changes = driver.protocol.take_changes()
    assert changes is not None
    assert changes.state == ScopeState(last=0, freed=1, highest=3)
    restarted = ProtocolDriver(pending=(1, 2))
    restarted.protocol = LedgerProtocol(changes.state, list(restarted.protocol.entries), in_flight_max=64)
    assert restarted.receive_state(0).send() == [(1, 1)]
    restarted.answer(1, SequenceTaken(1))
    assert restarted.send() == [(1, 2), (2, 3)]


@pytest.mark.rule("LG-19")
def test_write_gets_the_next_sequence_if_its_own_was_committed_by_an_earlier_write() -> None:
    """A delayed copy of the first write commits under its old sequence, which the second write now has."""
    driver = ProtocolDriver(last=7, pending=(8, 9, 10)).receive_state(8, key=99)
    assert driver.send() == [(1, 8)]
    driver.answer(1, Written("tx", 9, is_replay=True))
    assert driver.send() == [(2, 10), (3, 11)]


@pytest.mark.rule("LG-23")
def test_nothing_is_sent_until_a_withdrawal_is_saved() -> None:
    """After a crash before the save, the withdrawn write is pending again and must not commit after its successor."""
    driver = ProtocolDriver(in_flight_max=1).receive_state(0)
    driver.submit(2)
    driver.save()
    first, second = driver.protocol.entries
    assert driver.protocol.withdraw(first)
    second.saved_sequence = second.sequence  # already saved under this sequence
    assert driver.protocol.next_calls(0) == []
    assert driver.send() == [(2, 1)]
    assert driver.settled == {1: None}


@pytest.mark.rule("LG-23")
def test_withdrawn_write_that_may_be_committed_frees_its_sequence_for_one_write_at_a_time() -> None:
    driver = ProtocolDriver().receive_state(0)
    driver.submit(3)
    driver.send()
    driver.answer(1, LostError("lost"))
    driver.answer(2, SequenceGap(0))
    driver.answer(3, SequenceGap(0))
    assert not driver.protocol.withdraw(next(iter(driver.protocol.entries)))
    driver.protocol.release()
    assert driver.send() == [(2, 1)]
    driver.answer(2, SequenceTaken(1))  # the withdrawn write was committed
    assert driver.send() == [(2, 2), (3, 3)]


def test_denied_client_state_fails_new_writes_and_keeps_recovered_ones() -> None:
    driver = ProtocolDriver(last=1, pending=(2,))
    driver.submit()
    driver.save()
    assert driver.protocol.take_state_request()
    driver.protocol.on_state_failed(DENIED)
    driver.save()
    assert driver.settled == {2: DENIED}
    assert [entry.number for entry, _ in driver.protocol.take_reports()] == [1]
    driver.protocol.release()
    assert driver.receive_state(1).send() == [(1, 2)]


def test_unverified_write_reports_the_error_and_uses_its_sequence() -> None:
    driver = ProtocolDriver().receive_state(0)
    driver.submit(2)
    driver.send()
    error = ValueError()
    driver.answer(1, ProofFailure(error, 1))
    assert driver.settled == {1: error}
    assert driver.sequences == [2]


def test_failed_save_drops_only_new_writes() -> None:
    driver = ProtocolDriver().receive_state(0)
    driver.submit(2)
    driver.send()
    driver.answer(1)
    driver.protocol.handle_answer(driver.calls.pop(2), FAILED)
    driver.submit(2)
    changes = driver.protocol.take_changes()
    assert changes is not None
    driver.protocol.revert_unsaved(changes)
    assert driver.sequences == []
    driver.save()
    assert driver.settled[2] == FAILED
    driver.submit()
    assert driver.send() == [(3, 2)]


def test_refusals_reduce_the_number_of_writes_in_flight() -> None:
    driver = ProtocolDriver(in_flight_max=16).receive_state(0)
    driver.submit(60)
    assert len(driver.send()) == 16
    driver.answer(1, FAILED)
    for number in range(2, 17):
        driver.answer(number, SequenceGap(0))
    assert len(driver.send()) == 1
    driver.answer(2)
    assert len(driver.send()) == 9
