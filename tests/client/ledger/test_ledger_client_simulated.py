"""The protocol of the ledger client against a model of the server, with faults of the network and of the machine.

Requests and answers are lost, duplicated, late and out of order; the client crashes at any point, during a save too;
conditions fail; the server is busy, refuses, and evicts the client. In every case each write is committed at most once
and in the order of the callers, its reported outcome is correct, and every saved write gets an outcome.
"""

from collections import Counter
from random import Random
from typing import Final

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from client.ledger.model_ledger import Asked, ModelFile, ModelLedger, operations_of
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
DENIED: Final = ServerRefusedError("forbidden", "may not be written")


class World:
    """One client, its server, and random faults of both."""

    def __init__(self, seed: int, *, late: bool = False, evictions: bool = False, foreign: bool = False) -> None:
        self.chance = Random(seed)
        self.server = ModelLedger(self.chance)
        self.file = ModelFile()
        self.in_flight_max = self.chance.choice((1, 2, 5, 64))
        self.protocol = self.restarted()
        self.late = late
        self.submitted: list[bytes] = []
        self.unsaved: set[bytes] = set()
        """Keys of writes that were lost before they were saved."""
        self.told: dict[bytes, Outcome | Exception | None] = {}
        self.doubtful: set[bytes] = set()
        """Keys of writes of which copies were in flight when another outcome was reported."""
        self.withdrawn: dict[bytes, bool] = {}
        """Keys of withdrawn writes, and whether the protocol says that they were not committed."""
        self.travelling: list[tuple[WriteCall, Asked]] = []
        self.answers: list[tuple[WriteCall, WriteAnswer]] = []
        self.orphans: list[Asked] = []
        """Copies whose answers no call waits for."""
        self.saving: StoreChanges | None = None
        self.question: bool | None = None
        self.seen: Counter[str] = Counter()
        self.foreign = 0
        self.now_ms = 0
        actions = {
            self.submit: 12, self.begin_save: 15, self.end_save: 15, self.send: 25, self.deliver: 30, self.answer: 30,
            self.lose: 3, self.ask: 10, self.release: 10, self.crash: 1, self.deny: 1, self.fail_save: 1,
            self.double: 4 if late else 0, self.deliver_orphan: 6 if late else 0,
            self.evict: 1 if evictions else 0, self.write_foreign: 2 if foreign else 0, self.withdraw: 1,
        }  # fmt: skip
        self.actions, self.weights = list(actions), list(actions.values())

    def restarted(self) -> LedgerProtocol:
        return LedgerProtocol(self.file.state, self.file.entries(), in_flight_max=self.in_flight_max)

    # --- actions

    def act(self) -> None:
        self.chance.choices(self.actions, self.weights)[0]()
        self.hear()

    def submit(self) -> None:
        if self.protocol.forgotten is not None:
            return
        for _ in range(self.chance.randint(1, 4)):
            key = (len(self.submitted) + 1).to_bytes(16, "big")
            # Many have the same content: two writes under one sequence must stay two writes.
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
                self.tell(settled)

    def fail_save(self) -> None:
        """The disk is full."""
        changes, self.saving = self.saving, None
        if changes is not None:
            self.protocol.revert_unsaved(changes)

    def send(self) -> None:
        for call in self.protocol.next_calls(self.now_ms):
            entry = call.entry
            _, sequence, _, operations, _, _ = self.file.rows[entry.number]
            assert sequence == call.sequence, "sent before it was saved"
            assert operations == entry.operations
            self.travelling.append((call, Asked(entry.key, call.sequence, entry.operations)))

    def deliver(self) -> None:
        if self.travelling:
            call, asked = self.travelling.pop(self.place(self.travelling))
            self.answers.append((call, self.server.write(asked)))

    def answer(self) -> None:
        if self.answers:
            call, answer = self.answers.pop(self.place(self.answers))
            if self.chance.random() < 0.1:
                answer = LostError("lost")
            self.seen[type(answer).__name__] += 1
            self.protocol.handle_answer(call, answer)

    def lose(self) -> None:
        if self.travelling:
            call, asked = self.travelling.pop(self.place(self.travelling))
            self.leave(asked)
            self.protocol.handle_answer(call, LostError("lost"))

    def deny(self) -> None:
        if self.travelling:
            call, _ = self.travelling.pop(self.place(self.travelling))
            self.seen["ServerRefusedError"] += 1
            self.protocol.handle_answer(call, DENIED)

    def double(self) -> None:
        if self.travelling:
            self.leave(self.chance.choice(self.travelling)[1])

    def leave(self, asked: Asked) -> None:
        if self.late:
            self.orphans.append(asked)
            self.doubtful.add(asked.key)

    def deliver_orphan(self) -> None:
        if self.orphans:
            self.server.write(self.orphans.pop(self.place(self.orphans)))

    def ask(self) -> None:
        if self.question is None:
            self.question = True if self.protocol.take_state_request() else None
            return
        self.question = None
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
        if self.saving is not None and self.chance.random() < 0.5:  # saved, but not reported
            self.file.save(self.saving)
            self.unsaved -= {one.entry.key for one in self.saving.entries}
            for settled in self.saving.settled:
                self.told.setdefault(settled.entry.key, settled.outcome)  # the caller has crashed too
        for _, asked in self.travelling:
            self.leave(asked)
        self.travelling, self.answers, self.saving, self.question = [], [], None, None
        self.protocol = self.restarted()
        for entry in self.protocol.entries:  # withdrawn, but not saved
            self.withdrawn.pop(entry.key, None)

    def evict(self) -> None:
        """A day passes: nothing is in flight any more."""
        if self.chance.random() < 0.3:
            self.seen["evict"] += 1
            for call, _ in self.travelling:
                self.protocol.handle_answer(call, LostError("lost"))
            self.travelling, self.orphans = [], []
            self.now_ms += DAY_MS
            self.server.forget()

    def write_foreign(self) -> None:
        """Another process uses the same client id, which is not allowed."""
        self.foreign += 1
        key = (2**64 + self.foreign).to_bytes(16, "big")
        operations = operations_of(self.chance.choice(("a", key.hex())))
        self.server.write(Asked(key, self.server.last + 1, operations))

    def withdraw(self) -> None:
        entry = next(iter(self.protocol.entries), None)
        if entry is not None and self.chance.random() < 0.2 and entry.saved_sequence:
            self.seen["withdraw"] += 1
            self.withdrawn[entry.key] = self.protocol.withdraw(entry)

    # --- reports

    def hear(self) -> None:
        for report in self.protocol.take_reports():
            if isinstance(report.outcome, Written):
                self.tell(report)
        if self.protocol.forgotten is not None and self.saving is None:
            self.seen["forgotten"] += 1
            # The application checks the outcomes itself, which takes until nothing is in flight.
            while self.travelling:
                self.deliver()
            while self.answers:
                self.answer()
            committed = {asked.key for asked in self.server.log}
            self.protocol.resume({entry.key for entry in self.protocol.entries} - committed)

    def tell(self, settled: SettledWrite) -> None:
        key, outcome = settled.entry.key, settled.outcome
        before = self.told.get(key)
        if before is not None:
            assert isinstance(before, Written), "two different outcomes reported"
            assert isinstance(outcome, Written | None)
        if not isinstance(before, Written):
            self.told[key] = outcome

    def place(
        self, several: list[object] | list[tuple[WriteCall, Asked]] | list[tuple[WriteCall, WriteAnswer]] | list[Asked]
    ) -> int:
        """Return an index: mostly the first."""
        return 0 if self.chance.random() < 0.6 else self.chance.randrange(len(several))

    # --- the end

    def finish(self) -> None:
        self.weights = [0] * len(self.actions)
        for action in (self.begin_save, self.end_save, self.send, self.deliver, self.answer, self.ask, self.release):
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
        committed = [asked.key for asked in self.server.log if asked.key in set(self.submitted)]
        assert len(set(committed)) == len(committed), "committed twice"
        assert not self.file.rows
        for key in self.submitted:
            if key in self.unsaved:
                assert key not in committed
                continue
            assert key in self.told, "no outcome"
            outcome = self.told[key]
            if key in self.withdrawn and outcome is None:
                is_final = self.withdrawn[key] and key not in self.doubtful
                assert not (is_final and key in committed), "withdrawn for certain, but committed"
            elif isinstance(outcome, Written) or outcome is None:
                assert key in committed, "lost"
            elif key in committed:
                assert key in self.doubtful, "reported as not written"
                assert isinstance(outcome, Refused | Exception)
        if in_order:
            doubtful = self.doubtful | self.withdrawn.keys()  # a call in flight may commit later
            sure = [key for key in committed if key not in doubtful or isinstance(self.told[key], Written)]
            assert sure == sorted(sure), "out of order"

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
def test_each_write_commits_once_despite_another_writer_with_the_same_client_id(seed: int) -> None:
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
