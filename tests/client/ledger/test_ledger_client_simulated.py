"""The ledger client's protocol against a model of the server, with random faults.

The network loses, duplicates, delays and reorders requests and answers. The client crashes at any point, including
during a save. Conditions fail, and the server is busy, refuses writes and evicts the client. Each write is committed at
most once and in the order of the calls, every reported outcome is correct, and every saved write gets an outcome.
"""

from collections import Counter
from random import Random
from typing import Final

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from client.ledger.model_ledger import ModelFile, ModelLedger, SentWrite, operations_of
from oncelog.client.ledger.entries import (
    QueuedWrite,
    SequenceGap,
    SequenceTaken,
    SettledWrite,
    StoreChanges,
    WriteAnswer,
    WriteCall,
)
from oncelog.client.ledger.protocol import LedgerProtocol
from oncelog.client.ledger.values import Outcome, Refused, Written
from oncelog.errors import LostError, ServerRefusedError

STEPS: Final = 500
DAY_MS: Final = 24 * 3600 * 1000
DENIED: Final = ServerRefusedError("forbidden", "the credential has no write access to this scope")


class World:
    """One client, its server, and random faults."""

    def __init__(self, seed: int, *, late: bool = False, evictions: bool = False, foreign: bool = False) -> None:
        self.chance = Random(seed)
        self.server = ModelLedger(self.chance)
        self.file = ModelFile()
        self.in_flight_max = self.chance.choice((1, 2, 5, 64))
        self.protocol = self.restart()
        self.late = late
        self.submitted: list[bytes] = []
        self.unsaved: set[bytes] = set()
        """Keys of writes that were lost before they were saved."""
        self.outcomes: dict[bytes, Outcome | Exception | None] = {}
        self.doubtful: set[bytes] = set()
        """Keys of writes with copies in flight. Such a copy may commit after a different outcome was reported."""
        self.withdrawn: dict[bytes, bool] = {}
        """Withdrawn writes by key. True if the protocol reported that the write is certainly not committed."""
        self.in_flight: list[tuple[WriteCall, SentWrite]] = []
        self.answers: list[tuple[WriteCall, WriteAnswer]] = []
        self.orphans: list[SentWrite] = []
        """Copies in flight whose answers are discarded."""
        self.saving: StoreChanges | None = None
        self.state_request: bool | None = None
        self.seen: Counter[str] = Counter()
        self.foreign = 0
        self.now_ms = 0
        actions = {
            self.submit: 12, self.begin_save: 15, self.end_save: 15, self.send: 25, self.deliver: 30, self.answer: 30,
            self.lose: 3, self.request_state: 10, self.release: 10, self.crash: 1, self.deny: 1, self.fail_save: 1,
            self.duplicate: 4 if late else 0, self.deliver_orphan: 6 if late else 0,
            self.evict: 1 if evictions else 0, self.write_foreign: 2 if foreign else 0, self.withdraw: 1,
        }  # fmt: skip
        self.actions, self.weights = list(actions), list(actions.values())

    def restart(self) -> LedgerProtocol:
        return LedgerProtocol(self.file.state, self.file.entries(), in_flight_max=self.in_flight_max)

    # --- actions

    def act(self) -> None:
        self.chance.choices(self.actions, self.weights)[0]()
        self.take_reports_and_resume()

    def submit(self) -> None:
        if self.protocol.forgotten is not None:
            return
        for _ in range(self.chance.randint(1, 4)):
            key = (len(self.submitted) + 1).to_bytes(16, "big")
            # Many writes have the same content. They must remain separate writes even under one sequence.
            name = self.chance.choice(("a", "a", key.hex()))
            operations = operations_of(name, is_conditional=self.chance.random() < 0.25)
            self.submitted.append(key)
            self.protocol.submit(QueuedWrite(len(self.submitted), key, operations, name.encode(), self.now_ms))
            self.unsaved.add(key)

    def begin_save(self) -> None:
        if self.saving is None:
            self.saving = self.protocol.take_changes()

    def end_save(self) -> None:
        changes, self.saving = self.saving, None
        if changes is not None:
            self.file.save(changes)
            self.unsaved -= {one.entry.key for one in changes.entries}
            self.protocol.confirm_saved(changes)
            for settled in changes.settled:
                self.record_outcome(settled)

    def fail_save(self) -> None:
        """Fail a save, as if the disk were full."""
        changes, self.saving = self.saving, None
        if changes is not None:
            self.protocol.revert_unsaved(changes)

    def send(self) -> None:
        for call in self.protocol.next_calls(self.now_ms):
            entry = call.entry
            _, sequence, _, operations, _, _ = self.file.rows[entry.number]
            assert sequence == call.sequence, "sent before it was saved"
            assert operations == entry.operations
            self.in_flight.append((call, SentWrite(entry.key, call.sequence, entry.operations)))

    def deliver(self) -> None:
        if self.in_flight:
            call, write = self.in_flight.pop(self.choose_index(self.in_flight))
            self.answers.append((call, self.server.write(write)))

    def answer(self) -> None:
        if self.answers:
            call, answer = self.answers.pop(self.choose_index(self.answers))
            if self.chance.random() < 0.1:
                answer = LostError("lost")
            self.seen[type(answer).__name__] += 1
            self.protocol.handle_answer(call, answer)

    def lose(self) -> None:
        if self.in_flight:
            call, write = self.in_flight.pop(self.choose_index(self.in_flight))
            self.orphan(write)
            self.protocol.handle_answer(call, LostError("lost"))

    def deny(self) -> None:
        if self.in_flight:
            call, _ = self.in_flight.pop(self.choose_index(self.in_flight))
            self.seen["ServerRefusedError"] += 1
            self.protocol.handle_answer(call, DENIED)

    def duplicate(self) -> None:
        if self.in_flight:
            self.orphan(self.chance.choice(self.in_flight)[1])

    def orphan(self, write: SentWrite) -> None:
        if self.late:
            self.orphans.append(write)
            self.doubtful.add(write.key)

    def deliver_orphan(self) -> None:
        if self.orphans:
            self.server.write(self.orphans.pop(self.choose_index(self.orphans)))

    def request_state(self) -> None:
        if self.state_request is None:
            self.state_request = True if self.protocol.take_state_request() else None
            return
        self.state_request = None
        if self.chance.random() < 0.2:
            self.protocol.on_state_failed(LostError("lost"))
        elif self.chance.random() < 0.05:
            self.protocol.on_state_failed(DENIED)
        else:
            self.protocol.on_state_received(self.server.state(), self.now_ms)

    def release(self) -> None:
        self.protocol.release()

    def crash(self) -> None:
        self.seen["crash"] += 1
        if self.saving is not None and self.chance.random() < 0.5:  # the save succeeds, but is not reported
            self.file.save(self.saving)
            self.unsaved -= {one.entry.key for one in self.saving.entries}
            for settled in self.saving.settled:
                self.outcomes.setdefault(settled.entry.key, settled.outcome)  # The caller crashes as well.
        for _, write in self.in_flight:
            self.orphan(write)
        self.in_flight, self.answers, self.saving, self.state_request = [], [], None, None
        self.protocol = self.restart()
        for entry in self.protocol.entries:  # the withdrawal was not saved
            self.withdrawn.pop(entry.key, None)

    def evict(self) -> None:
        """Let a day pass, so that nothing is in flight and the server evicts the client."""
        if self.chance.random() < 0.3:
            self.seen["evict"] += 1
            for call, _ in self.in_flight:
                self.protocol.handle_answer(call, LostError("lost"))
            self.in_flight, self.orphans = [], []
            self.now_ms += DAY_MS
            self.server.forget()

    def write_foreign(self) -> None:
        """Write from a second process with the same client id, which is not allowed."""
        self.foreign += 1
        key = (2**64 + self.foreign).to_bytes(16, "big")
        operations = operations_of(self.chance.choice(("a", key.hex())))
        self.server.write(SentWrite(key, self.server.last + 1, operations))

    def withdraw(self) -> None:
        entry = next(iter(self.protocol.entries), None)
        if entry is not None and self.chance.random() < 0.2 and entry.saved_sequence:
            self.seen["withdraw"] += 1
            self.withdrawn[entry.key] = self.protocol.withdraw(entry)

    # --- reports

    def take_reports_and_resume(self) -> None:
        for report in self.protocol.take_reports():
            if isinstance(report.outcome, Written):
                self.record_outcome(report)
        if self.protocol.forgotten is not None and self.saving is None:
            self.seen["forgotten"] += 1
            # The application checks the outcomes itself, once nothing is in flight.
            while self.in_flight:
                self.deliver()
            while self.answers:
                self.answer()
            committed = {write.key for write in self.server.log}
            self.protocol.resume({entry.key for entry in self.protocol.entries} - committed)

    def record_outcome(self, settled: SettledWrite) -> None:
        key, outcome = settled.entry.key, settled.outcome
        before = self.outcomes.get(key)
        if before is not None:
            assert isinstance(before, Written), "two different outcomes reported"
            assert isinstance(outcome, Written | None)
        if not isinstance(before, Written):
            self.outcomes[key] = outcome

    def choose_index(
        self,
        several: list[object]
        | list[tuple[WriteCall, SentWrite]]
        | list[tuple[WriteCall, WriteAnswer]]
        | list[SentWrite],
    ) -> int:
        """Return a random index, most often 0."""
        return 0 if self.chance.random() < 0.6 else self.chance.randrange(len(several))

    # --- final checks

    def finish(self) -> None:
        self.weights = [0] * len(self.actions)
        for action in (
            self.begin_save,
            self.end_save,
            self.send,
            self.deliver,
            self.answer,
            self.request_state,
            self.release,
        ):
            self.weights[self.actions.index(action)] = 10
        for _ in range(100_000):
            self.act()
            self.begin_save()
            if not len(self.protocol.entries) and self.saving is None:
                break
        else:
            pytest.fail(f"does not finish: {list(self.protocol.entries)}")
        while self.orphans:
            self.deliver_orphan()

    def check(self, *, in_order: bool = True) -> None:
        committed = [write.key for write in self.server.log if write.key in set(self.submitted)]
        assert len(set(committed)) == len(committed), "committed twice"
        assert not self.file.rows
        for key in self.submitted:
            if key in self.unsaved:
                assert key not in committed
                continue
            assert key in self.outcomes, "a saved write has no outcome"
            outcome = self.outcomes[key]
            if key in self.withdrawn and outcome is None:
                is_final = self.withdrawn[key] and key not in self.doubtful
                assert not (is_final and key in committed), "reported as certainly withdrawn, but committed"
            elif isinstance(outcome, Written) or outcome is None:
                assert key in committed, "lost"
            elif key in committed:
                assert key in self.doubtful, "reported as not written"
                assert isinstance(outcome, Refused | Exception)
        if in_order:
            doubtful = self.doubtful | self.withdrawn.keys()  # calls in flight may commit later
            certain = [key for key in committed if key not in doubtful or isinstance(self.outcomes[key], Written)]
            assert certain == sorted(certain), "out of order"

    def run(self, *, in_order: bool = True) -> "World":
        for _ in range(STEPS):
            self.act()
        self.finish()
        self.check(in_order=in_order)
        return self


@pytest.mark.rule("LG-19")
@given(st.integers(0, 2**32))
@example(644018837)
def test_each_write_commits_once_and_in_order_despite_losses_and_crashes(seed: int) -> None:
    World(seed).run()


@pytest.mark.rule("LG-19")
@given(st.integers(0, 2**32))
@example(17827)
@example(17980)
@example(83041)
def test_each_write_commits_once_despite_late_duplicates(seed: int) -> None:
    World(seed, late=True).run()


@pytest.mark.rule("LG-16")
@pytest.mark.rule("LG-19")
@given(st.integers(0, 2**32))
def test_each_write_commits_once_despite_evictions(seed: int) -> None:
    World(seed, evictions=True).run()


@pytest.mark.rule("LG-19")
@given(st.integers(0, 2**32))
@example(97928449)
@example(2027592572)
def test_each_write_commits_once_despite_a_second_writer_with_the_same_client_id(seed: int) -> None:
    World(seed, foreign=True).run(in_order=False)


def test_simulation_covers_all_answers_and_faults() -> None:
    seen: Counter[str] = Counter()
    for seed in range(40):
        seen += World(seed, late=True).run().seen
        seen += World(seed, evictions=True).run().seen
        seen += World(seed, foreign=True).run(in_order=False).seen
    for name in (Written, SequenceGap, SequenceTaken, LostError, ServerRefusedError):
        assert seen[name.__name__] > 10, seen
    for happened in ("Refused", "crash", "evict", "forgotten", "withdraw"):
        assert seen[happened] > 10, seen
