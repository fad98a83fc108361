"""What a client does about its writes in one scope: what to send next, what an answer means, which number is whose.

It does no I/O and reads no clock: the shell (`write_stream`) calls it, saves what it says and sends what it says. The
rules:

- The writes without an outcome stand in a queue, in their callers' order, and have dense numbers from `last` + 1 on,
  where `last` is the highest that is known to be committed. One whose number has been passed keeps it until it is
  known whether the number became its own: under an old number nothing is ever executed as new.
- A write is sent under a number that is saved, and has one call at a time. Those behind it are sent before it is
  answered; they may overtake it, and then SEQUENCE_GAP says nothing but that they have to be sent again.
- Where one comes to nothing, those behind it move down. Their keys stay: however often the number changes, what has
  been committed is known by its key.
"""

from collections.abc import Collection, Iterable, Sequence
from itertools import islice
from typing import Final

from oncelog.client.ledger.entries import (
    ForgottenClient,
    ProofFailure,
    QueuedWrite,
    SavedEntry,
    ScopeState,
    SequenceGap,
    SequenceTaken,
    SettledWrite,
    StoreChanges,
    WriteAnswer,
    WriteCall,
)
from oncelog.client.ledger.values import CONDITION_CODES, ClientState, Outcome, Refused, Written
from oncelog.core.operations import Operation
from oncelog.errors import LostError, ServerRefusedError

CLOCK_CORRECTION_MS: Final = 60_000
"""By so much a clock may be corrected."""
RETENTION_MS: Final = 23 * 3600 * 1000
"""For so long a server has surely not forgotten a write: 24 hours, less one for clocks that disagree."""

STATE_VALID_MS: Final = 60_000
"""For so long it is believed where we stand, of a write that is older than that."""
WINDOW_MIN: Final = 4
"""So many are sent ahead however often writes are refused."""


class LedgerProtocol:
    """The writes of one client in one scope."""

    def __init__(self, state: ScopeState, entries: Sequence[QueuedWrite], *, in_flight_max: int) -> None:
        """Continue with the state and the pending writes of the file, in their order. Each may have been sent."""
        self.last = state.last
        self.forgotten: ForgottenClient | None = None
        self.refusal: ServerRefusedError | None = None
        """Why the server does not say where we stand."""
        self.is_paused = False
        """Nothing is sent until `release`. The shell sets a clock for it."""
        self.is_refused = False
        """The pause is because the server does not let us in."""
        self.was_adopted = False
        """The server had forgotten us, and nothing was at stake."""
        self._queue: dict[int, QueuedWrite] = {}
        self._next_number = 1
        self._in_flight = 0
        self._in_flight_max = self._window = in_flight_max
        self._probes = 0
        self._freed = state.freed
        """See `ScopeState.freed`. Until another write has this sequence or a higher one, one is sent at a time."""
        self._highest = state.highest
        self._turn = 0
        self._wants_state = True
        self._is_first_question = True
        self._is_adopting = False
        self._requested_from: int | None = None
        self._state_at_ms = 0
        self._unsaved: dict[int, QueuedWrite] = {}
        """What is to be saved whenever something is."""
        self._settled: list[SettledWrite] = []
        self._unsaved_removals = 0
        """Writes that left the queue without being written, and whose removal is not saved yet. Nothing is sent
        meanwhile: after a crash they are pending again, and no later write may have been committed before them."""
        self._reports: list[SettledWrite] = []
        self._saved_last = state.last
        for entry in entries:
            entry.saved_sequence = entry.sent_sequence = entry.sequence
            entry.highest_sequence = max(state.highest, entry.sequence)
            entry.was_sent = entry.is_recovered = True
            entry.mark_unknown(entry.sequence)
            self._queue[entry.number] = entry
            self._next_number = entry.number + 1

    def __len__(self) -> int:
        """Writes without an outcome."""
        return len(self._queue)

    @property
    def entries(self) -> Iterable[QueuedWrite]:
        """Them, in order."""
        return self._queue.values()

    @property
    def in_flight(self) -> int:
        """Those that are sent and not answered."""
        return self._in_flight

    @property
    def needs_state(self) -> bool:
        """The server has not said yet where we stand."""
        return self._wants_state or self._requested_from is not None

    # --- taking in

    def submit(self, key: bytes, operations: tuple[Operation, ...], body: bytes, now_ms: int) -> QueuedWrite:
        """Puts a write behind all others. It is sent once it is saved."""
        entry = QueuedWrite(self._next_number, key, operations, body, now_ms)
        self._next_number += 1
        entry.sequence = self._get_next_sequence()
        self._queue[entry.number] = entry
        self._unsaved[entry.number] = entry
        return entry

    def _get_next_sequence(self) -> int:
        """That of one behind the queue."""
        newest = next(reversed(self._queue.values()), None)
        return max(self.last, newest.sequence if newest is not None else 0) + 1

    def request_state(self) -> None:
        """Nothing has been written for long: asks where we stand before anything is sent. Only with an empty queue."""
        if not self._queue and self._requested_from is None:
            self._wants_state = True

    # --- saving

    def take_changes(self) -> StoreChanges | None:
        """What must be saved now; None if all is. Then `confirm_saved` or `revert_unsaved`."""
        # One that moves down is saved when its turn comes near: else each refusal would write the whole queue anew.
        for entry in islice(self._queue.values(), 2 * self._in_flight_max):
            if entry.saved_sequence != entry.sequence:
                self._unsaved[entry.number] = entry
        if not self._unsaved and not self._settled and self.last == self._saved_last:
            return None
        entries = [
            SavedEntry(entry, entry.sequence, entry.lowest_possible(entry.sequence)) for entry in self._unsaved.values()
        ]
        self._highest = max(self._highest, *(entry.sequence for entry in entries), 0)
        changes = StoreChanges(entries, self._settled, ScopeState(self.last, self._freed, self._highest))
        self._unsaved, self._settled = {}, []
        return changes

    def confirm_saved(self, changes: StoreChanges) -> None:
        """They are on the disk."""
        for entry, sequence, _ in changes.entries:
            entry.saved_sequence = sequence
        self._saved_last = changes.state.last
        self._unsaved_removals -= sum(not isinstance(settled.outcome, Written) for settled in changes.settled)

    def revert_unsaved(self, changes: StoreChanges) -> list[QueuedWrite]:
        """They are not. New writes leave the queue, and are given back; what else there is waits for the next time."""
        withdrawn = []
        for entry, _, _ in changes.entries:
            if entry.saved_sequence == 0:
                withdrawn.append(entry)
                self._queue.pop(entry.number, None)
                self._unsaved.pop(entry.number, None)
            elif entry.number in self._queue:
                self._unsaved[entry.number] = entry
        # (What is settled stays so: nothing is told of it before it is saved, but that it was written.)
        self._settled = changes.settled + self._settled
        self._renumber()
        return withdrawn

    def take_reports(self) -> list[SettledWrite]:
        """Return what callers can learn before it is saved.

        A committed write: after a crash the client asks for it again. An error of a pending write, which the server
        refuses to look at.
        """
        reports, self._reports = self._reports, []
        return reports

    # --- sending

    def next_calls(self, now_ms: int) -> list[WriteCall]:
        """What is to be sent now, in this order. Each call ends with `handle_answer`."""
        if self.is_paused or self.needs_state or self.forgotten is not None or self._unsaved_removals:
            return []
        calls: list[WriteCall] = []
        for entry in self._queue.values():
            if self._in_flight >= self._window:
                break
            if self._freed and calls:
                break
            if entry.call is not None or (self._probes and not entry.is_probe):
                if self._freed and not self._probes:
                    break
                continue
            if entry.saved_sequence != entry.sequence or entry.gapped_turn == self._turn:
                break  # those behind it would only leave a gap
            if (
                self._is_old(entry, now_ms) and abs(now_ms - self._state_at_ms) > STATE_VALID_MS
            ):  # a clock can be set back
                self._wants_state = True  # the server may have forgotten us by now, and would take it for a new one
                break
            call = WriteCall(entry, entry.sequence, self.last)
            entry.call = call
            entry.sent_sequence = entry.sequence
            entry.highest_sequence = max(entry.highest_sequence, entry.sequence)
            entry.was_sent = True
            entry.denied = None
            self._in_flight += 1
            calls.append(call)
        return calls

    def release(self) -> None:
        """The pause is over."""
        self.is_paused = self.is_refused = False

    def handle_answer(self, call: WriteCall, answer: WriteAnswer) -> None:  # noqa: C901 - one case an answer
        """What came of a call."""
        entry = call.entry
        entry.call = None
        self._in_flight -= 1
        if entry.number not in self._queue:
            return  # the application has let go of it
        match answer:
            case Written(tx_id=None) if entry.is_certain:
                # Another write used the sequence, since this one was never sent before. The server has forgotten which.
                self._handle_taken(call, call.sequence)
                self._wants_state = True
            case Written(sequence=sequence):
                self._settle(entry, answer)
                self._mark_used(sequence)
                self._window = min(self._window + 1, self._in_flight_max)
                if not sequence == call.sequence == entry.sequence:
                    self._give_up_sequence(sequence)
                    self._renumber()
            case ProofFailure(error, sequence):
                self._settle(entry, error)
                self._mark_used(sequence)
                self._renumber()
            case Refused(code):
                if code in CONDITION_CODES:  # the server checks conditions only of the write that is the next
                    self._advance(call.sequence - 1)
                # Each write that was sent behind it was sent in vain: where that is frequent, less is sent ahead.
                self._window = max(self._window // 2, min(WINDOW_MIN, self._in_flight_max))
                self._handle_refusal(entry, answer)
            case SequenceGap(last):
                self._handle_gap(call, last)
            case SequenceTaken(last):
                self._handle_taken(call, last)
            case LostError() | ServerRefusedError(is_transient=True):
                entry.mark_unknown(call.sequence)
                self.is_paused = True
            case ServerRefusedError():
                self._handle_denial(entry, answer)

    def _give_up_sequence(self, sequence: int) -> None:
        """Let `_renumber` move the write that has this sequence, because another write was committed under it.

        A delayed copy of a write that has moved down can commit under its earlier sequence.
        """
        for entry in self._queue.values():
            if entry.sequence == entry.sent_sequence == sequence:
                entry.sent_sequence = 0
                self._end_probe(entry)

    def _handle_refusal(self, entry: QueuedWrite, outcome: Refused | ServerRefusedError) -> None:
        # A copy of it that is late may still take its number. The next one would find that out, and those behind it
        # would have overtaken it by then.
        self._freed = max(self._freed, entry.highest_sequence)
        self._settle(entry, outcome)
        self._renumber()

    def _handle_taken(self, call: WriteCall, last: int) -> None:
        entry = call.entry
        self._mark_used(max(last, call.sequence))
        if entry.sequence == call.sequence:
            entry.sent_sequence = 0
        self._end_probe(entry)
        self._renumber()

    def _handle_gap(self, call: WriteCall, last: int) -> None:
        if last < call.last:
            # The server knew more when this was sent. Whether it has forgotten us it says when it is asked.
            self._wants_state = self.is_paused = True
            return
        if last > self.last:
            self._advance(last)
            self._renumber()
        if self.last < call.entry.sequence - 1:
            call.entry.gapped_turn = self._turn  # it comes again when more is known of those before it

    def _handle_denial(self, entry: QueuedWrite, error: ServerRefusedError) -> None:
        if entry.is_certain:
            self._handle_refusal(entry, error)
            return
        # An earlier call may have committed it. What the server says now is about the caller, or about its own
        # limits, and not about that; but where we stand says it.
        entry.denied = error
        self._wants_state = True

    # --- where we stand

    def take_state_request(self) -> bool:
        """Return whether to ask the server for its state now.

        `on_state_received` or `on_state_failed` takes the answer.
        """
        if not self._wants_state or self._requested_from is not None or self.is_paused or self.forgotten is not None:
            return False
        if not self._queue and not self._is_first_question:
            return False  # nobody waits for it
        self._requested_from = self.last
        return True

    def on_state_failed(self, error: LostError | ServerRefusedError) -> None:
        """The server gave no answer, or refuses to give its state to this client."""
        self._requested_from = None
        if isinstance(error, LostError) or error.is_transient:
            self.is_paused = True
            return
        self._is_first_question = False
        self.refusal = error
        for entry in list(self._queue.values()):
            if not entry.was_sent:
                self._settle(entry, error)
            else:
                self._reports.append(SettledWrite(entry, entry.denied or error))
        self.is_paused = self.is_refused = bool(self._queue)

    def on_state_received(self, state: ClientState, now_ms: int) -> None:
        """Where we stand."""
        requested_from, self._requested_from = self._requested_from, None
        assert requested_from is not None  # noqa: S101 - it is told to who has asked
        self._wants_state = self._is_first_question = False
        self.refusal = None
        self._state_at_ms = now_ms
        last = state.last_sequence
        if self._is_adopting:
            self._adopt_sequence(last)
        elif last < requested_from or (last == 0 and self._has_old(now_ms)):
            if last == 0 and not any(entry.was_sent for entry in self._queue.values()):
                self.was_adopted = True  # nothing was sent that could be sent again
                self._adopt_sequence(last)
            else:
                self.forgotten = ForgottenClient(self.last, last)
        else:
            self._mark_used(last)
            self._settle_denied(state)
            for entry in self._queue.values():
                if entry.sequence <= last and entry.sent_sequence == entry.sequence and not entry.is_probe:
                    entry.is_probe = True
                    self._probes += 1
                    if entry.saved_sequence != entry.sequence:  # others wait for it, wherever it is in the queue
                        self._unsaved[entry.number] = entry
            self._renumber()

    def _has_old(self, now_ms: int) -> bool:
        return any(self._is_old(entry, now_ms) for entry in self._queue.values())

    @staticmethod
    def _is_old(entry: QueuedWrite, now_ms: int) -> bool:
        """By its age; of one that was made long after now, by a clock that was set back since, nobody knows it."""
        age_ms = now_ms - entry.made_at_ms
        return not entry.is_certain and not -CLOCK_CORRECTION_MS <= age_ms <= RETENTION_MS

    def _settle_denied(self, state: ClientState) -> None:
        for entry in list(self._queue.values()):
            if entry.denied is None:
                continue
            if entry.key == state.last_key:
                self._settle(entry, Written(None, state.last_sequence, is_replay=True))
            elif entry.lowest_unknown is None or entry.lowest_unknown > state.last_sequence:
                self._handle_refusal(entry, entry.denied)
            else:  # an earlier call may have committed it, and only the server can tell
                self._reports.append(SettledWrite(entry, entry.denied))
                self.is_paused = self.is_refused = True

    def _adopt_sequence(self, last: int) -> None:
        self._is_adopting = False
        self.last = last
        self._freed = 0
        self._turn += 1
        for entry in self._queue.values():
            entry.sent_sequence = 0
            self._end_probe(entry)
        self._renumber()

    def resume(self, resend: Collection[bytes]) -> None:
        """The application has decided: those with these keys are sent, as new ones; the others are let go of."""
        if self.forgotten is None:
            return
        self.forgotten = None
        for entry in list(self._queue.values()):
            if entry.key not in resend:
                self._settle(entry, None)
        self._wants_state = self._is_adopting = self._is_first_question = True
        self.is_paused = False

    def withdraw(self, entry: QueuedWrite) -> bool:
        """Take a pending write out of the queue. Return True if it was not committed and cannot be any more."""
        is_final = entry.is_certain and entry.call is None
        if not is_final:
            self._freed = max(self._freed, entry.highest_sequence)
        self._settle(entry, None)
        self._renumber()
        return is_final

    # --- the queue

    def _advance(self, last: int) -> None:
        if last > self.last:
            self.last = last
            self._turn += 1

    def _mark_used(self, sequence: int) -> None:
        """By whom is known, and so is what became of the one that was sent under it."""
        self._advance(sequence)
        if sequence >= self._freed:
            self._freed = 0

    def _settle(self, entry: QueuedWrite, outcome: Outcome | Exception | None) -> None:
        del self._queue[entry.number]
        self._unsaved.pop(entry.number, None)
        self._end_probe(entry)
        settled = SettledWrite(entry, outcome)
        self._settled.append(settled)
        if isinstance(outcome, Written):
            self._reports.append(settled)
        else:
            self._unsaved_removals += 1
        self._turn += 1

    def _end_probe(self, entry: QueuedWrite) -> None:
        if entry.is_probe:
            entry.is_probe = False
            self._probes -= 1

    def _renumber(self) -> None:
        sequence = self.last
        for entry in self._queue.values():
            if entry.sequence <= self.last and entry.sent_sequence == entry.sequence:
                continue  # it may have become its own
            sequence += 1
            if entry.sequence == sequence:
                continue
            if entry.sequence < sequence:
                # The file must not have it under a number that another write gets.
                self._unsaved[entry.number] = entry
            entry.sequence = sequence
            self._turn += 1
